"""
Environments on many machines, with Ray (https://docs.ray.io).

:class:`RayVecEnv` takes the place of a ``SubprocVecEnv``. Its workers are Ray actors. A call to an actor takes far longer than
a step of most environments, so a worker collects its part of a rollout by itself. ``docs/many_machines.md`` explains this, and
how a worker that is lost is replaced.
"""

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError("RayVecEnv needs Ray, which is not installed: run `pip install 'sb3-grpo[ray]'`.") from error

from sb3_grpo.distributed.vec_env import RayVecEnv, connect

__all__ = ["RayVecEnv", "connect"]
