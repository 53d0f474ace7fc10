"""
GRPO in `RL Baselines3 Zoo <https://github.com/DLR-RM/rl-baselines3-zoo>`_: ``python -m sb3_grpo.zoo train --algo grpo ...``.

In your own scripts, call :func:`register` before the functions of rl-zoo3.

:raises ImportError: If a package of the extra ``zoo`` is missing
"""

try:
    import optuna  # noqa: F401
    import pandas  # noqa: F401
    import requests  # noqa: F401
    import rl_zoo3  # noqa: F401
    import seaborn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"sb3_grpo.zoo needs {error.name!r}, which is not installed: pip install 'sb3-grpo[zoo]', or from a clone "
        "pip install -e '.[zoo]'. The extra installs rl_zoo3 and the packages that rl_zoo3 needs without declaring them."
    ) from error

from sb3_grpo.zoo.experiment import register

__all__ = ["register"]
