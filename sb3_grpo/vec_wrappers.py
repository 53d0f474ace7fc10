"""Which of SB3's wrappers around the environments change rewards, or what workers return."""

from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

#: Wrappers that leave rewards as they are.
KEEP_REWARDS = (VecCheckNan, VecExtractDictObs, VecFrameStack, VecMonitor, VecTransposeImage, VecVideoRecorder)

#: Wrappers that leave it to the environments whether observations are finite.
KEEP_FINITENESS = (VecCheckNan, VecFrameStack, VecMonitor, VecNormalize, VecTransposeImage)

#: Wrappers that keep workers from collecting whole rollouts, and what to use inside the environments instead.
INSIDE_WORKERS = {
    "VecNormalize": "`GRPO(normalize_observations=True)`, and `gymnasium.wrappers.NormalizeReward` for rewards",
    "VecFrameStack": "`gymnasium.wrappers.FrameStackObservation`",
    "VecTransposeImage": "a wrapper that returns images with the channels first",
    "VecMonitor": "`stable_baselines3.common.monitor.Monitor`",
}


def base_of(env: VecEnv) -> tuple[VecEnvWrapper | None, VecEnv]:
    """
    :return: The innermost wrapper, ``None`` without one, and the base ``VecEnv`` in it. A wrapper around something that is no
        ``VecEnv``, as EnvPool's examples have it, is a base
    """
    wrapper, base = None, env
    while isinstance(base, VecEnvWrapper) and isinstance(base.venv, VecEnv):
        wrapper, base = base, base.venv
    return wrapper, base


def reward_normalizer(env: VecEnv) -> VecNormalize | None:
    """:return: The ``VecNormalize`` that scales the rewards, unless a wrapper outside it may change them again"""
    wrapper = env
    while isinstance(wrapper, VecEnvWrapper):
        if isinstance(wrapper, VecNormalize):
            return wrapper if wrapper.norm_reward else None
        if type(wrapper) not in KEEP_REWARDS:
            return None
        wrapper = wrapper.venv
    return None


def data_changing_wrapper(env: VecEnv) -> str | None:
    """:return: Name of the outermost wrapper that may change what the environments return; ``None`` if there is none"""
    wrapper = env
    while isinstance(wrapper, VecCheckNan):
        wrapper = wrapper.venv
    return type(wrapper).__name__ if isinstance(wrapper, VecEnvWrapper) else None


def normalizes_directly(env: VecEnv) -> bool:
    """
    :return: Whether a ``VecNormalize`` computes its statistics from what the environments return. Other wrappers under it may
        replace NaN, or drop a part of the observations
    """
    wrapper, is_under = env, False
    while isinstance(wrapper, VecEnvWrapper):
        is_under = is_under or isinstance(wrapper, VecNormalize)
        if is_under and type(wrapper) not in KEEP_FINITENESS:
            return False
        wrapper = wrapper.venv
    return is_under
