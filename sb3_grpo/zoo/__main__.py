"""``python -m sb3_grpo.zoo``, see :mod:`sb3_grpo.zoo.cli`."""

from sb3_grpo.zoo.cli import main

if __name__ == "__main__":
    main()
