"""
Show that a change of the code changes nothing: train a few rollouts with various settings and print a hash of the weights.

    python -m benchmarks.fingerprint [NAME ...]    # half a minute for all; compare the lines before and after the change
"""

import hashlib
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from minigrid.wrappers import FlatObsWrapper
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecNormalize

from sb3_grpo import GRPO


class Images(gym.Env):
    """Random images that a seed determines."""

    observation_space, action_space = spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.integers(0, 255, (36, 36, 3), dtype=np.uint8), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t, image = self.t + 1, self.np_random.integers(0, 255, (36, 36, 3), dtype=np.uint8)
        return image, float(action == self.t % 3), self.t >= 17, self.t >= 25, {}


SHORT: dict[str, Any] = dict(n_steps=256)
GSPO: dict[str, Any] = dict(
    objective=dict(importance_sampling_level="trajectory", loss_aggregation="constant", clip_range_high=0.3)
)
SKIP: dict[str, Any] = dict(rollout_buffer_class="stepwise", rollout_buffer_kwargs=dict(tied_groups="skip", scale="group"))
KL: dict[str, Any] = dict(objective=dict(kl_coef=0.1, adaptive_kl_target=0.01), ent_coef=0.01)
MAKE: dict[str, Any] = {"doorkey8": dict(wrapper_class=FlatObsWrapper), "subproc": dict(vec_env_cls=SubprocVecEnv)}
WHOLE = ("outcome", "process", "return_to_go", "stepwise")
#: Environment, number of environments, steps to train, and arguments of GRPO
CASES: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "cartpole": ("CartPole-v1", 1, 8192, {}),
    "cartpole8": ("CartPole-v1", 8, 8192, {}),
    "pendulum": ("Pendulum-v1", 1, 8192, {}),
    "lunar": ("LunarLander-v3", 1, 8192, {}),
    "doorkey8": ("MiniGrid-DoorKey-5x5-v0", 8, 6144, {}),
    **{each: ("CartPole-v1", 8, 8192, dict(rollout_buffer_class=each, group_size=4)) for each in WHOLE},
    "trajectory": ("Pendulum-v1", 4, 4096, dict(SHORT, objective=dict(loss_aggregation="trajectory"))),
    "kl": ("Pendulum-v1", 4, 4096, dict(SHORT, **KL)),
    "klk3": ("CartPole-v1", 4, 4096, dict(SHORT, objective=dict(kl_coef=0.1, kl_reference="initial", kl_estimator="k3"))),
    "gspo": ("CartPole-v1", 8, 4096, dict(GSPO, n_steps=128, rollout_buffer_class="outcome")),
    "skip": ("CartPole-v1", 8, 4096, dict(SKIP, n_steps=128)),
    "subproc": ("CartPole-v1", 4, 3072, dict(SHORT, group_size=4)),
    "noshare": ("Acrobot-v1", 4, 4096, dict(SHORT, share_starts=False)),
    "vecnorm": ("Pendulum-v1", 4, 4096, dict(SHORT, rollout_buffer_class="return_to_go")),
    "image": (Images, 4, 512, dict(policy="CnnPolicy", n_steps=64, batch_size=64, n_epochs=2)),
    "sde": ("Pendulum-v1", 4, 2048, dict(SHORT, use_sde=True)),
}


def fingerprint(name: str) -> str:
    """:return: Sixteen characters that change with any weight"""
    env_id, n_envs, timesteps, settings = CASES[name]
    env: VecEnv = make_vec_env(env_id, n_envs, seed=0, **MAKE.get(name, {}))
    env = VecNormalize(env) if name == "vecnorm" else env
    model = GRPO(**{"policy": "MlpPolicy", "env": env, "seed": 3, "device": "cpu", **settings}).learn(timesteps)
    env.close()
    weights = sorted(model.policy.state_dict().items())
    return hashlib.sha256(b"".join(key.encode() + each.numpy().tobytes() for key, each in weights)).hexdigest()[:16]


if __name__ == "__main__":
    th.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        print(f"{name:14s} {fingerprint(name)}", flush=True)
