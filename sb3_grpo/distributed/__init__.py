"""
Environments on many machines, with Ray (https://docs.ray.io).

:class:`RayVecEnv` takes the place of a ``SubprocVecEnv``. Its workers are Ray actors, anywhere in a cluster, and each has some
of the environments. A call to an actor takes far longer than a step of most environments, so a worker acts by itself: once per
rollout, it gets the weights, takes all its steps, and returns the transitions.

A worker that dies, hangs, or is lost with its node is replaced. The environments of the new worker are brought back by the
seed of their start and the actions since, and its part of the rollout is collected again with the same random numbers, so that
training continues as if nothing had happened, bit for bit.
"""

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError("RayVecEnv needs Ray, which is not installed: run `pip install 'sb3-grpo[ray]'`.") from error

from sb3_grpo.distributed.vec_env import RayVecEnv, connect

__all__ = ["RayVecEnv", "connect"]
