"""
The five buffers side by side
=============================

The variants of GRPO differ most in how they turn rewards into advantages, and ``rollout_buffer_class`` chooses among them.
This tour trains each of the five buffers on CartPole for 20,480 steps, which takes a few seconds each. It compares their
learning curves, their advantages, and their logs. It needs two packages more: ``pip install matplotlib pandas``.
"""

# %%
# Training
# --------
#
# The runs differ in the buffer and in the size of the groups: the four buffers that judge whole trajectories have eight
# members to compare. Stable-Baselines3's ``Monitor`` writes the episode returns, and its CSV logger writes the metrics.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import load_results

from sb3_grpo import GRPO

th.set_num_threads(1)  # networks this small only wait for more
FOLDER = Path(tempfile.mkdtemp())
BUFFERS = ["kernel", "return_to_go", "stepwise", "outcome", "process"]
COLOURS = {buffer: f"C{i}" for i, buffer in enumerate(BUFFERS)}


def train(buffer: str) -> GRPO:
    model = GRPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, monitor_dir=str(FOLDER / buffer)),
        learning_rate=1e-3,
        rollout_buffer_class=buffer,
        group_size=2 if buffer == "kernel" else 8,
        seed=0,
        device="cpu",
    )
    model.set_logger(configure(str(FOLDER / buffer), ["csv"]))
    return model.learn(20_480)


models = {buffer: train(buffer) for buffer in BUFFERS}

# %%
# Learning curves
# ---------------
#
# The curves are running means over 50 training episodes. Returns of CartPole are episode lengths: 500 is the time limit.

figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
for buffer, colour in COLOURS.items():
    episodes = load_results(str(FOLDER / buffer))
    mean_return = episodes["r"].rolling(50).mean()
    axis.plot(episodes["l"].cumsum(), mean_return, color=colour, label=buffer)
axis.set(xlabel="steps", ylabel="return")
axis.legend(frameon=False)
plt.show()

# %%
# ``kernel`` judges every step of every rollout. The others wait until all members of a group have ended, so a part of
# their samples has not been used yet. ``process`` learns nothing: it standardises single rewards, and CartPole's are all 1.
#
# One rollout, judged five ways
# -----------------------------
#
# With the same seed, five models sample the same first rollout, here of 16,384 steps with random actions. Only the
# advantages differ. Dots are single steps, and lines are means. If the pole falls to the right, pushing right is better, so
# the orange line should be above the blue one there, and below it on the left. A trend that both lines share does not help
# to choose an action: it says that upright poles do better, whatever the action. It is noise to the policy gradient, and
# ``kernel`` has removed most of it.

figure, axes = plt.subplots(2, 3, sharey=True, figsize=(7, 4.6), layout="constrained")
bins = np.linspace(-1.5, 1.5, 9)
for axis, buffer in zip(axes.flat, BUFFERS, strict=False):
    model = GRPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8),
        n_steps=2048,
        n_epochs=1,
        rollout_buffer_class=buffer,
        group_size=8,
        seed=0,
        device="cpu",
    )
    (update,) = model.learn(16_384).rollout_buffer.get()  # everything in one minibatch
    falling, advantage = update.observations[:, 3].numpy(), update.advantages.numpy()
    for action, push in enumerate(["push left", "push right"]):
        own = update.actions.numpy() == action
        x, y = falling[own], advantage[own]
        axis.scatter(x[::10], y[::10], s=3, alpha=0.3, color=f"C{action}", lw=0)
        means = pd.Series(y).groupby(pd.cut(x, bins), observed=False).mean()
        axis.plot((bins[:-1] + bins[1:]) / 2, means, color=f"C{action}", label=push)
    axis.axhline(0, color="grey", lw=0.8)
    axis.set(title=buffer, xlim=(bins[0], bins[-1]), ylim=(-3, 3))
axes[1, 2].axis("off")
axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="center")
figure.supxlabel("pole falls, rad/s")
figure.supylabel("advantage")
plt.show()

# %%
# The log
# -------
#
# These are a few of the logged metrics, which *Metrics and troubleshooting* explains. ``rollout/groups_tied`` is the share of
# groups whose members cannot be told apart, which is all of them with ``process``. ``train/approx_kl`` is the distance that
# an update has moved the policy. ``train/entropy_loss`` is the negative entropy. It rises as the policy becomes certain.

keys = ["rollout/ep_rew_mean", "rollout/groups_tied", "train/approx_kl", "train/entropy_loss"]
figure, axes = plt.subplots(2, 2, sharex=True, figsize=(7, 4.6), layout="constrained")
for buffer, colour in COLOURS.items():
    log = pd.read_csv(FOLDER / buffer / "progress.csv")
    for axis, key in zip(axes.flat, keys, strict=True):
        if key in log:
            axis.plot(log["time/total_timesteps"], log[key], color=colour, label=buffer)
        axis.set(title=key)
axes[0, 0].legend(frameon=False)
figure.supxlabel("steps")
plt.show()

# %%
# ``kernel`` logs how much of the variance of the returns its baseline explains, and how much it reduces the variance of the
# advantages. A baseline should reduce variance.

log = pd.read_csv(FOLDER / "kernel" / "progress.csv")
keys = ["time/total_timesteps", "train/explained_variance", "train/baseline_variance_reduction"]
log[keys].round(2)

# %%
# Evaluate, save, load, continue
# ------------------------------
#
# These work as in any algorithm of Stable-Baselines3.

model = models["kernel"]
model.save(FOLDER / "cartpole")
model = GRPO.load(FOLDER / "cartpole", env=make_vec_env("CartPole-v1", n_envs=8), device="cpu")
model.learn(10_240, reset_num_timesteps=False)
mean, std = evaluate_policy(model, make_vec_env("CartPole-v1"), n_eval_episodes=20)
print(f"mean return {mean:.0f} +/- {std:.0f} after {model.num_timesteps:,} steps")
