"""
The drawn figures of the documentation, from short runs made here: `python -m docs.figures`.

`group.svg` and `credit.svg` show one group of CartPole trajectories and what each buffer makes of their rewards;
`baseline.svg` holds the kernel baseline against the value of the policy, estimated by many rollouts from the same states.
`shared_inputs.svg` shows two members of a group of the inventory task, and what each baseline removes.
"""

import pathlib
from typing import Any, NamedTuple

import gymnasium as gym
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.figures import STYLE, save
from sb3_grpo import GRPO, KernelRolloutBuffer
from sb3_grpo import advantages as F
from sb3_grpo.buffers import Transitions

HERE = pathlib.Path(__file__).parent
GAMMA = 0.99
SEED = 3
#: Of CartPole's observation.
ANGLE = 2
CARTPOLE_LIMIT = 500


class Trajectory(NamedTuple):
    """
    :param observations: Observations from the first to the last, shape ``(n + 1, 4)``
    :param rewards: Reward of each step, shape ``(n,)``
    """

    observations: np.ndarray
    rewards: np.ndarray


def sample_trajectory(env: gym.Env, model: GRPO, seed: int) -> Trajectory:
    """
    :param env: CartPole
    :param model: Model whose policy acts
    :param seed: Seed of the start
    :return: An episode
    """
    observation, _ = env.reset(seed=seed)
    observations, rewards, done = [observation], [], False
    while not done:
        action, _ = model.predict(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        rewards.append(float(reward))
        done = terminated or truncated
    return Trajectory(np.array(observations), np.array(rewards))


def draw_group(groups: list[list[Trajectory]], path: pathlib.Path) -> None:
    """
    :param groups: Trajectories of each group
    :param path: Path of the picture
    """
    figure, axis = plt.subplots()
    for number, (group, colour) in enumerate(zip(groups, ("C0", "C1"), strict=True)):
        for member, trajectory in enumerate(group):
            angles = np.degrees(trajectory.observations[:, ANGLE])
            label = f"group {number}: one seed, {len(group)} members" if member == 0 else None
            axis.plot(angles, color=colour, lw=1.2, alpha=0.8, label=label)
            axis.plot(len(angles) - 1, angles[-1], "x", color=colour, ms=6)
        axis.plot(0, np.degrees(group[0].observations[0, ANGLE]), "o", color=colour, ms=7)
    axis.set(xlabel="step", ylabel="angle of the pole, degrees")
    figure.legend(loc="outside upper center", ncols=len(groups))
    save(figure, path)


def draw_credit(group: list[Trajectory], path: pathlib.Path) -> None:
    """
    :param group: Trajectories of the group
    :param path: Path of the picture
    """
    rewards = np.concatenate([each.rewards for each in group])
    lengths = np.array([len(each.rewards) for each in group])
    groups = np.zeros(len(group), dtype=np.int64)
    credit = {
        "outcome": F.outcome_advantages(rewards, lengths, groups),
        "process": F.process_advantages(rewards, lengths, groups),
        "return_to_go": F.return_to_go_advantages(rewards, lengths, groups, GAMMA),
        "stepwise": F.stepwise_advantages(rewards, lengths, groups, GAMMA),
    }
    figure, axes = plt.subplots(2, 2, figsize=(7.35, 4.6), sharex=True)
    for axis, (name, advantages) in zip(axes.flat, credit.items(), strict=True):
        axis.axhline(0.0, color="grey", lw=0.8)
        for member, own in enumerate(np.split(advantages, np.cumsum(lengths)[:-1])):
            axis.plot(own, lw=1.6, label=f"{lengths[member]} steps")
        axis.set_title(name)
    for axis in axes[1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("advantage")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, title="member of")
    save(figure, path)


def draw_baseline(model: GRPO, trajectory: Trajectory, path: pathlib.Path, every: int = 10, n_rollouts: int = 32) -> None:
    """
    :param model: Model that was trained with the kernel buffer
    :param trajectory: Trajectory along which the baseline is drawn
    :param path: Path of the picture
    :param every: Number of steps between the states in which rollouts begin
    :param n_rollouts: Number of rollouts from each state
    """
    buffer = model.rollout_buffer
    assert isinstance(buffer, KernelRolloutBuffer)
    steps = np.arange(len(trajectory.observations))
    features = buffer.baseline.features(trajectory.observations, steps / CARTPOLE_LIMIT)
    predicted = (features @ buffer.baseline.weights).numpy()
    starts = steps[::every]
    returns = np.array([returns_from(model, trajectory.observations[step], n_rollouts) for step in starts])
    mean, error = returns.mean(axis=1), returns.std(axis=1) / np.sqrt(n_rollouts)
    figure, axis = plt.subplots()
    axis.plot(starts, mean, color="C1", label=f"value: mean of {n_rollouts} rollouts from the state")
    axis.fill_between(starts, mean - 2 * error, mean + 2 * error, color="C1", alpha=0.25, lw=0)
    axis.plot(steps, predicted, color="C0", label="kernel baseline")
    axis.set(xlabel="step of an episode", ylabel="discounted return")
    axis.set_ylim(bottom=0.0)
    axis.legend()
    save(figure, path)


def returns_from(model: GRPO, observation: np.ndarray, n_rollouts: int) -> np.ndarray:
    """
    :param model: Model whose policy acts
    :param observation: Observation of CartPole, which is its state
    :param n_rollouts: Number of rollouts from this state
    :return: Discounted return of each, shape ``(n_rollouts,)``. The time limit does not count, because the baseline stands for
        the rewards that it cuts off
    """
    envs: list[Any] = [gym.make("CartPole-v1").unwrapped for _ in range(n_rollouts)]
    for env in envs:
        env.reset()
        env.state = observation.astype(np.float64)
    observations = np.tile(observation, (n_rollouts, 1))
    returns, running = np.zeros(n_rollouts), np.ones(n_rollouts, dtype=bool)
    for later in range(CARTPOLE_LIMIT):
        if not running.any():
            break
        actions, _ = model.predict(observations)
        for i in np.flatnonzero(running):
            observations[i], reward, terminated, _, _ = envs[i].step(actions[i])
            returns[i] += GAMMA**later * float(reward)
            running[i] = not terminated
    return returns


class RecordingBuffer(KernelRolloutBuffer):
    """Keeps the advantages of the last rollout."""

    def _form_update(self, rollout: Transitions, *args: Any) -> tuple[Transitions, np.ndarray]:
        rollout, self.advantages = super()._form_update(rollout, *args)
        return rollout, self.advantages


class RecordingInputs(BaseCallback):
    """Keeps the demand that each environment has in the last rollout, which is its episode."""

    def _on_rollout_start(self) -> None:
        self.demands = np.array([inputs["demand"] for inputs in self.training_env.get_attr("inputs")])

    def _on_step(self) -> bool:
        return True


def draw_shared_inputs(path: pathlib.Path) -> None:
    """
    :param path: Path of the picture
    """
    n_envs, n_steps = 8, 200  # a rollout has one episode of each environment
    env = make_vec_env("sb3_grpo/LostSales-v0", n_envs)
    model = GRPO(
        "MlpPolicy", env, n_steps=n_steps, group_size=2, rollout_buffer_class=RecordingBuffer,
        rollout_buffer_kwargs=dict(relative=False), seed=SEED, device="cpu",
    )  # fmt: skip
    inputs = RecordingInputs()
    model.learn(60_000, callback=inputs)
    buffer: Any = model.rollout_buffer
    lengths = np.full(n_envs, n_steps)
    returns = F.discounted_returns(buffer.rewards.ravel().astype(np.float64), lengths, GAMMA)
    demands, groups = np.unique(inputs.demands, axis=0, return_inverse=True)  # members of a group have the same
    groups = groups.ravel()
    peers = F.peers_at_each_step(lengths, groups)
    panels = {
        "returns of two members": returns,
        "minus the kernel baseline": buffer.advantages,
        "minus 0.8 of the other member": F.relative_advantages(buffer.advantages, peers, 0.8),
    }
    members = np.flatnonzero(groups == groups[0])
    figure, axes = plt.subplots(2, 2, figsize=(7.35, 4.6), sharex=True)
    axes[0, 0].plot(demands[groups[0]], color="grey", lw=1.2)
    axes[0, 0].set_title("the input: demand")
    limit = 1.1 * np.abs(buffer.advantages.reshape(n_envs, n_steps)[members]).max()
    for axis, (title, values) in zip(axes.flat[1:], panels.items(), strict=True):
        for line, colour in zip(values.reshape(n_envs, n_steps)[members], ("C0", "C1"), strict=True):
            axis.plot(line, color=colour, lw=1.4)
        axis.set_title(title)
        if values is not returns:
            axis.axhline(0.0, color="grey", lw=0.8)
            axis.set_ylim(-limit, limit)
    for axis in axes[1]:
        axis.set_xlabel("step")
    save(figure, path)


def main() -> None:
    th.set_num_threads(1)
    plt.style.use(STYLE)
    draw_shared_inputs(HERE / "shared_inputs.svg")
    model = GRPO("MlpPolicy", "CartPole-v1", seed=SEED, device="cpu")
    model.learn(4096)
    env = gym.make("CartPole-v1")
    groups = [[sample_trajectory(env, model, seed) for _ in range(4)] for seed in (1, 8)]
    draw_group(groups, HERE / "group.svg")
    draw_credit(groups[0], HERE / "credit.svg")
    model.learn(8192, reset_num_timesteps=False)
    draw_baseline(model, sample_trajectory(env, model, SEED), HERE / "baseline.svg")


if __name__ == "__main__":
    main()
