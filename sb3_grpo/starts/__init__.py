"""
Starts that the members of a group share: the ledger that hands them out, the layer that resets environments with their seeds,
and an adapter for each kind of ``VecEnv``.
"""

from sb3_grpo.starts.faults import EnvironmentFault, RolloutLost
from sb3_grpo.starts.ledger import Ledger, Position, Start
from sb3_grpo.starts.vec_env import SeededVecEnv

__all__ = ["EnvironmentFault", "Ledger", "Position", "RolloutLost", "SeededVecEnv", "Start"]
