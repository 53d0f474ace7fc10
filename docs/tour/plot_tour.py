"""
The five buffers side by side
=============================

What turns rewards into advantages is what the variants of GRPO differ in most, and ``rollout_buffer_class`` chooses it.
This tour trains each of the five on CartPole for 20,480 steps, a few seconds each, and looks at what they learn, what they
tell the policy, and what the log says about it.
"""

# %%
# Training
# --------
#
# Everything but the buffer is the same, and the size of the groups: the four buffers that judge whole trajectories are
# given eight members to compare. Episode returns are what Stable-Baselines3's ``Monitor`` writes, metrics what its CSV
# logger writes.

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
# What they learn
# ---------------
#
# A running mean over 50 training episodes. Returns of CartPole are episode lengths: 500 is the time limit.

figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
for buffer, colour in COLOURS.items():
    episodes = load_results(str(FOLDER / buffer))
    mean_return = episodes["r"].rolling(50).mean()
    axis.plot(episodes["l"].cumsum(), mean_return, color=colour, label=buffer)
axis.set(xlabel="steps", ylabel="return")
axis.legend(frameon=False)
plt.show()

# %%
# ``kernel`` judges every step of every rollout. The others wait until all members of a group have ended, so that much
# of what they have sampled is not trained on yet. ``process`` learns nothing: it standardises single rewards, and
# CartPole's are all 1.
#
# One rollout, judged five ways
# -----------------------------
#
# With the same seed, five models sample the same first rollout, here of 16,384 steps with random actions. What differs
# is what they make of it. Dots are single steps, lines are means. Under a pole that falls to the right one should push
# right, so the orange line should be above the blue one there, and below it on the left. What the lines have in common
# is no advice: it says that upright poles fare better, whatever was done. ``kernel`` has taken most of it out;
# to the policy gradient, what is left of it is noise.

figure, axes = plt.subplots(1, 5, figsize=(10, 2.6), sharex=True, sharey=True, layout="constrained")
bins = np.linspace(-1.5, 1.5, 9)
for axis, buffer in zip(axes, BUFFERS, strict=True):
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
        axis.scatter(falling[own][::10], advantage[own][::10], s=3, alpha=0.3, color=f"C{action}", lw=0)
        means = pd.Series(advantage[own]).groupby(pd.cut(falling[own], bins), observed=False).mean()
        axis.plot((bins[:-1] + bins[1:]) / 2, means, color=f"C{action}", label=push)
    axis.axhline(0, color="grey", lw=0.8)
    axis.set(title=buffer, xlabel="pole falls, rad/s", xlim=(bins[0], bins[-1]), ylim=(-3, 3))
axes[0].set_ylabel("advantage")
axes[0].legend(frameon=False, fontsize=8)
plt.show()

# %%
# What the log says
# -----------------
#
# Some of what is logged after each rollout; every key is explained under *Diagnostics*. ``rollout/groups_tied`` is the
# share of groups whose members cannot be told apart: all of them with ``process``. ``train/approx_kl`` is how far an
# update has moved the policy. ``train/entropy_loss`` is minus the entropy: it rises as the policy makes up its mind.

keys = ["rollout/ep_rew_mean", "rollout/groups_tied", "train/approx_kl", "train/entropy_loss"]
figure, axes = plt.subplots(1, len(keys), figsize=(10, 2.6), layout="constrained")
for buffer, colour in COLOURS.items():
    log = pd.read_csv(FOLDER / buffer / "progress.csv")
    for axis, key in zip(axes, keys, strict=True):
        if key in log:
            axis.plot(log["time/total_timesteps"], log[key], color=colour, label=buffer)
        axis.set(title=key, xlabel="steps")
axes[0].legend(frameon=False, fontsize=8)
plt.show()

# %%
# ``kernel`` has two keys of its own: how much of the variance of its targets the baseline explains, and how much
# variance it takes away from what the advantages would be without it. The second is what a baseline is for.

log = pd.read_csv(FOLDER / "kernel" / "progress.csv")
keys = ["time/total_timesteps", "train/explained_variance", "train/baseline_variance_reduction"]
log[keys].round(2)

# %%
# Evaluate, save, load, go on
# ---------------------------
#
# As with any algorithm of Stable-Baselines3.

model = models["kernel"]
model.save(FOLDER / "cartpole")
model = GRPO.load(FOLDER / "cartpole", env=make_vec_env("CartPole-v1", n_envs=8), device="cpu")
model.learn(10_240, reset_num_timesteps=False)
mean, std = evaluate_policy(model, make_vec_env("CartPole-v1"), n_eval_episodes=20)
print(f"mean return {mean:.0f} +/- {std:.0f} after {model.num_timesteps:,} steps")
