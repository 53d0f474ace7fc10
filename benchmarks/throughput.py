"""
How fast is GRPO, compared with SB3's PPO and with what the work itself takes?

    python -m benchmarks.throughput                                   # CartPole-v1, 8 envs x 128 steps, kernel buffer
    python -m benchmarks.throughput --env HalfCheetah-v5
    python -m benchmarks.throughput --env image --n-envs 4 --policy CnnPolicy --pairs 5
    python -m benchmarks.throughput --buffer outcome --csv runs/throughput.csv

GRPO, PPO and the *bound* take turns in one process, with the same environment, rollout, minibatches, epochs and network, on
one torch thread; a turn is a few rollouts and updates. Printed are medians over turns, and of the ratios within each round of
turns their median and an interval for it. The bound is the work itself: the bare vectorised environment, one pass of the
actor's network to act, and its minibatches of forward, backward and optimiser step, without policy classes, buffers, callbacks
or logs. PPO is SB3's as it comes, whose Adam is not fused; ``--fused-ppo`` gives it the one that GRPO has.

The breakdown comes from further turns with a stopwatch around each part, whose overhead is in the figures.
"""

import argparse
import functools
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space, preprocess_obs
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.vec_env import VecEnv, VecTransposeImage
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from torch import nn

from benchmarks.learning import append_row, commit, read_rows, versions
from benchmarks.tables import markdown_table
from benchmarks.timing import Stopwatch, median_with_interval, take_turns
from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS

CSV = pathlib.Path(__file__).with_name("throughput.csv")
FIELDS = [
    "env", "n_envs", "n_steps", "batch_size", "n_epochs", "buffer", "fused_ppo", "pairs", "grpo", "ppo", "bound", "over_ppo",
    "over_ppo_low", "over_ppo_high", "over_bound", "over_bound_low", "over_bound_high", "fit_share", "commit", "versions",
]  # fmt: skip


class Setting(NamedTuple):
    """
    What GRPO, PPO and the bound have in common.

    :param env: Gymnasium environment, or ``"image"`` for SB3's fake one (84 x 84 pixels, one channel)
    :param policy: SB3's name of the policy
    :param n_envs: environments side by side
    :param n_steps: steps per environment and rollout
    :param batch_size: minibatch size
    :param n_epochs: passes over a rollout
    :param buffer: GRPO's rollout buffer
    :param fused_ppo: whether PPO gets the fused Adam that GRPO and the bound have, instead of SB3's default
    :param n_channels: of the images
    """

    env: str = "CartPole-v1"
    policy: str = "MlpPolicy"
    n_envs: int = 8
    n_steps: int = 128
    batch_size: int = 256
    n_epochs: int = 10
    buffer: str = "kernel"
    fused_ppo: bool = False
    n_channels: int = 1

    def make_env(self) -> VecEnv:
        """:return: the environments, seeded"""
        env = functools.partial(fake_images, self.n_channels) if self.env == "image" else self.env
        return make_vec_env(env, self.n_envs, seed=0)

    @property
    def rollout(self) -> int:
        """Transitions per rollout."""
        return self.n_envs * self.n_steps


def fake_images(n_channels: int) -> FakeImageEnv:
    """
    :param n_channels: of the images
    :return: random images of the size of preprocessed Atari frames
    """
    return FakeImageEnv(screen_height=84, screen_width=84, n_channels=n_channels)


def make_model(algorithm: type[GRPO] | type[PPO], setting: Setting) -> OnPolicyAlgorithm:
    """
    :param algorithm: GRPO or PPO
    :param setting: of the comparison
    :return: a model
    """
    kwargs: dict[str, Any] = {}
    if algorithm is GRPO:
        # SB3's images are random, whatever the seed
        kwargs = dict(rollout_buffer_class=setting.buffer, share_starts=setting.env != "image")
    elif setting.fused_ppo:
        kwargs = dict(policy_kwargs=dict(optimizer_kwargs=dict(eps=1e-5, fused=True)))
    return algorithm(
        setting.policy,
        setting.make_env(),
        n_steps=setting.n_steps,
        batch_size=setting.batch_size,
        n_epochs=setting.n_epochs,
        seed=0,
        device="cpu",
        **kwargs,
    )


class LeanActor:
    """
    The work without the library: steps environments, acts by one pass of a network, updates it by the clipped surrogate.

    :param setting: of the comparison
    """

    def __init__(self, setting: Setting):
        th.manual_seed(0)
        self.setting = setting
        self.env = setting.make_env()
        if is_image_space(self.env.observation_space):
            self.env = VecTransposeImage(self.env)
        self.space = self.env.action_space
        assert isinstance(self.space, (spaces.Discrete, spaces.Box)), f"no bound for {self.space}"
        outputs = int(self.space.n) if isinstance(self.space, spaces.Discrete) else int(np.prod(self.space.shape))
        if setting.policy == "CnnPolicy":
            assert isinstance(self.env.observation_space, spaces.Box)
            extractor = NatureCNN(self.env.observation_space)
            self.net = nn.Sequential(extractor, nn.Linear(extractor.features_dim, outputs))
        else:
            inputs = int(np.prod(self.env.observation_space.shape))  # type: ignore[arg-type]
            hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
            self.net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, outputs))
        self.log_std = nn.Parameter(th.zeros(outputs))
        self.parameters = (
            [*self.net.parameters(), self.log_std] if isinstance(self.space, spaces.Box) else [*self.net.parameters()]
        )
        self.optimizer = th.optim.Adam(self.parameters, lr=3e-4, eps=1e-5, fused=True)
        self.obs = _array(self.env.reset())

    def log_prob(self, outputs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        :param outputs: of the network, shape ``(n, outputs)``
        :param actions: shape ``(n,)`` or ``(n, outputs)``
        :return: shape ``(n,)``
        """
        if isinstance(self.space, spaces.Discrete):
            return th.log_softmax(outputs, dim=1).gather(1, actions[:, None])[:, 0]
        return (-0.5 * ((actions - outputs) * th.exp(-self.log_std)) ** 2 - self.log_std).sum(dim=1)

    def act(self, obs: np.ndarray) -> tuple[th.Tensor, th.Tensor]:
        """
        :param obs: shape ``(n_envs, ...)``
        :return: actions and their log-probabilities
        """
        with th.inference_mode():
            outputs = self.net(self.inputs(th.as_tensor(obs)))
            if isinstance(self.space, spaces.Discrete):
                actions = (outputs - th.empty_like(outputs).exponential_().log_()).argmax(dim=1)
            else:
                actions = outputs + th.exp(self.log_std) * th.randn_like(outputs)
            return actions, self.log_prob(outputs, actions)

    def inputs(self, obs: th.Tensor) -> th.Tensor:
        """
        :param obs: shape ``(n, ...)``
        :return: as the network takes them
        """
        inputs = preprocess_obs(obs, self.env.observation_space)
        assert isinstance(inputs, th.Tensor)
        return inputs

    def learn(self, total_timesteps: int) -> None:
        """
        :param total_timesteps: a multiple of the rollout
        """
        for _ in range(total_timesteps // self.setting.rollout):
            steps = [self.step() for _ in range(self.setting.n_steps)]
            observations, actions, log_probs, rewards = zip(*steps, strict=True)
            advantages = th.as_tensor(np.concatenate(rewards))
            self.update(np.concatenate(observations), th.cat(actions), th.cat(log_probs), advantages)

    def step(self) -> tuple[np.ndarray, th.Tensor, th.Tensor, np.ndarray]:
        """:return: observations, actions, their log-probabilities, rewards of one step of all environments"""
        obs = self.obs
        actions, log_probs = self.act(obs)
        taken = actions.numpy()
        if isinstance(self.space, spaces.Box):
            taken = np.clip(taken, self.space.low, self.space.high)
        next_obs, rewards, _, _ = self.env.step(taken)
        self.obs = _array(next_obs)
        return obs, actions, log_probs, rewards

    def update(self, obs: np.ndarray, actions: th.Tensor, old_log_probs: th.Tensor, advantages: th.Tensor) -> None:
        """
        :param obs: shape ``(n, ...)``
        :param actions: shape ``(n,)`` or ``(n, outputs)``
        :param old_log_probs: shape ``(n,)``
        :param advantages: rewards in their place, shape ``(n,)``
        """
        observations = th.as_tensor(obs)
        for _ in range(self.setting.n_epochs):
            for batch in th.randperm(len(observations)).split(self.setting.batch_size):
                outputs = self.net(self.inputs(observations[batch]))
                ratio = th.exp(self.log_prob(outputs, actions[batch]) - old_log_probs[batch])
                gain = advantages[batch]
                loss = -th.min(ratio * gain, th.clamp(ratio, 0.8, 1.2) * gain).mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()


def _array(observations: VecEnvObs) -> np.ndarray:
    assert isinstance(observations, np.ndarray), "no bound for Dict observations"
    return observations


def breakdown(model: GRPO, timesteps: int) -> dict[str, float]:
    """
    :param model: to train on
    :param timesteps: to train
    :return: share of the wall-clock by part
    """
    watch = Stopwatch()
    assert model.env is not None
    with (
        watch.around("environment", model.env, "step"),
        watch.around("inference", model, "_choose_actions"),
        watch.around("buffer", model.rollout_buffer, "add"),
        watch.around("advantages", model.rollout_buffer, "finish_rollout"),
        watch.around("update", model, "train"),
    ):
        began = time.perf_counter()
        model.learn(timesteps, reset_num_timesteps=False)
        total = time.perf_counter() - began
    shares = {part: seconds / total for part, seconds in watch.seconds.items()}
    return {**shares, "callbacks, logs, rest": 1.0 - sum(shares.values())}


def ratio_columns(name: str, ratios: np.ndarray) -> dict[str, str]:
    """
    :param name: of the column
    :param ratios: one per round, shape ``(n,)``
    :return: their median, and the ends of a 95% bootstrap interval for it
    """
    estimate = median_with_interval(ratios)
    return {name: f"{estimate.median:.3f}", f"{name}_low": f"{estimate.low:.3f}", f"{name}_high": f"{estimate.high:.3f}"}


def compare(setting: Setting, pairs: int, rollouts: int) -> dict[str, Any]:
    """
    :param setting: of the comparison
    :param pairs: turns of each contestant
    :param rollouts: per turn
    :return: a row of the CSV, and the breakdown under ``shares``
    """
    timesteps = rollouts * setting.rollout
    grpo, ppo, lean = make_model(GRPO, setting), make_model(PPO, setting), LeanActor(setting)
    seconds = take_turns(
        {
            "grpo": lambda: grpo.learn(timesteps, reset_num_timesteps=False),
            "ppo": lambda: ppo.learn(timesteps, reset_num_timesteps=False),
            "bound": lambda: lean.learn(timesteps),
        },
        pairs,
    )
    assert isinstance(grpo, GRPO)
    shares = breakdown(grpo, pairs * timesteps)
    return {
        **{key: value for key, value in setting._asdict().items() if key in FIELDS},
        "pairs": pairs,
        **{name: round(timesteps / float(np.median(turns))) for name, turns in seconds.items()},
        **ratio_columns("over_ppo", seconds["ppo"] / seconds["grpo"]),
        **ratio_columns("over_bound", seconds["bound"] / seconds["grpo"]),
        "fit_share": f"{shares['advantages']:.4f}",
        "commit": commit(),
        "versions": versions(),
        "shares": shares,
    }


def report(row: dict[str, Any]) -> str:
    """
    :param row: from :func:`compare`
    :return: what to print
    """

    def against(other: str) -> str:
        return f"GRPO over {other} {row[f'over_{other}']} ({row[f'over_{other}_low']} to {row[f'over_{other}_high']})"

    lines = [
        f"{row['env']}, {row['n_envs']} envs x {row['n_steps']} steps, batch {row['batch_size']}, {row['n_epochs']} epochs, "
        f"{row['buffer']} buffer, medians of {row['pairs']}" + (", PPO with fused Adam" if row["fused_ppo"] else ""),
        f"  GRPO  {row['grpo']:>8,} steps/s",
        f"  PPO   {row['ppo']:>8,} steps/s   {against('ppo')}",
        f"  bound {row['bound']:>8,} steps/s   {against('bound')}",
        *(f"  {part:<22}{share:>7.1%}" for part, share in row["shares"].items()),
    ]
    return "\n".join(lines)


def table(rows: list[dict[str, str]]) -> str:
    """
    :param rows: of the CSV, of which the last of each setting counts
    :return: in Markdown
    """
    latest = {tuple(row[field] for field in FIELDS[:7]): row for row in rows}
    header = ("environment", "envs x steps, batch, epochs", "GRPO, steps/s", "PPO", "over PPO", "of the bound", "advantages")
    lines = []
    for row in latest.values():
        ppo = f"{int(row['ppo']):,}" + (", fused Adam" if row["fused_ppo"] == "True" else "")
        over = f"{float(row['over_ppo']):.2f} ({float(row['over_ppo_low']):.2f} to {float(row['over_ppo_high']):.2f})"
        sizes = f"{row['n_envs']} x {row['n_steps']}, {row['batch_size']}, {row['n_epochs']}"
        shares = f"{float(row['over_bound']):.2f}", f"{float(row['fit_share']):.1%}"
        lines.append([row["env"], sizes, f"{int(row['grpo']):,}", ppo, over, *shares])
    return markdown_table(header, lines)


def add_setting_arguments(parser: argparse.ArgumentParser, defaults: Setting) -> None:
    """
    :param parser: gets an option for each field of a setting
    :param defaults: their defaults
    """
    for name, default in defaults._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default, choices=list(BUFFERS) if name == "buffer" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_setting_arguments(parser, Setting())
    parser.add_argument("--pairs", type=int, default=11, help="turns of each contestant")
    parser.add_argument("--rollouts", type=int, default=2, help="rollouts per turn")
    parser.add_argument("--csv", type=pathlib.Path, default=CSV, help="file to which a row is appended")
    parser.add_argument("--table", action="store_true", help="run nothing, print the last row of each setting")
    args = vars(parser.parse_args())
    if args.pop("table"):
        print(table(read_rows(args["csv"])))
        return
    th.set_num_threads(1)
    path, pairs, rollouts = args.pop("csv"), args.pop("pairs"), args.pop("rollouts")
    row = compare(Setting(**args), pairs, rollouts)
    print(report(row))
    append_row(path, {field: row[field] for field in FIELDS}, FIELDS)


if __name__ == "__main__":
    main()
