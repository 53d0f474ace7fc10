"""Which of SB3's wrappers around the environments change rewards, or what workers return."""

from stable_baselines3.common import vec_env as sb3
from stable_baselines3.common.vec_env import VecCheckNan, VecEnv, VecEnvWrapper, VecNormalize

#: Wrappers that leave rewards as they are, and leave it to the environments whether observations are finite.
KEEP_BOTH = (VecCheckNan, sb3.VecFrameStack, sb3.VecMonitor, sb3.VecTransposeImage)
KEEP_REWARDS = (*KEEP_BOTH, sb3.VecExtractDictObs, sb3.VecVideoRecorder)
KEEP_FINITENESS = (*KEEP_BOTH, VecNormalize)

#: Wrappers that keep workers from collecting whole rollouts, and what to use inside the environments instead.
INSIDE_WORKERS = {
    "VecNormalize": "`GRPO(normalize_observations=True)`, and `gymnasium.wrappers.NormalizeReward` for rewards",
    "VecFrameStack": "`gymnasium.wrappers.FrameStackObservation`",
    "VecTransposeImage": "a wrapper that returns images with the channels first",
    "VecMonitor": "`stable_baselines3.common.monitor.Monitor`",
}


def wrappers_of(env: VecEnv) -> list[VecEnvWrapper]:
    """
    :return: The wrappers around a base ``VecEnv``, the outermost first. A wrapper around something that is no ``VecEnv``, as
        EnvPool's examples have it, is a base
    """
    wrappers = []
    while isinstance(env, VecEnvWrapper) and isinstance(env.venv, VecEnv):
        wrappers.append(env)
        env = env.venv
    return wrappers


def base_of(env: VecEnv) -> tuple[VecEnvWrapper | None, VecEnv]:
    """:return: The innermost wrapper, ``None`` without one, and the base ``VecEnv`` in it"""
    wrappers = wrappers_of(env)
    return (wrappers[-1], wrappers[-1].venv) if wrappers else (None, env)


def reward_normalizer(env: VecEnv) -> VecNormalize | None:
    """:return: The ``VecNormalize`` that scales the rewards, unless a wrapper outside it may change them again"""
    first = next((each for each in wrappers_of(env) if type(each) not in KEEP_REWARDS), None)
    return first if type(first) is VecNormalize and first.norm_reward else None


def data_changing_wrapper(env: VecEnv) -> str | None:
    """:return: Name of the outermost wrapper that may change what the environments return; ``None`` if there is none"""
    return next((type(each).__name__ for each in wrappers_of(env) if not isinstance(each, VecCheckNan)), None)


def normalizes_directly(env: VecEnv) -> bool:
    """
    :return: Whether a ``VecNormalize`` computes its statistics from what the environments return. Other wrappers under it may
        replace NaN, or drop a part of the observations
    """
    wrappers = wrappers_of(env)
    under = next((wrappers[i:] for i, each in enumerate(wrappers) if isinstance(each, VecNormalize)), [])
    return len(under) > 0 and all(type(each) in KEEP_FINITENESS for each in under)
