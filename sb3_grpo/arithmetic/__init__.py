"""Who acts, who updates the policy, and how: in machine code or by torch, by gradient steps or by natural-gradient steps."""
