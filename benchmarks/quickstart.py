"""
Train GRPO on one environment, evaluate it, draw its learning curve and record an animation.

Usage: ``python -m benchmarks.quickstart [--env CartPole-v1] [--timesteps 100000] [--seed 0] [--out runs/quickstart]``
"""

import argparse
import os
import re
import sys
from pathlib import Path

import gymnasium as gym
import torch as th
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from benchmarks.animations import record
from benchmarks.curves import WINDOW, TrainingCurve
from sb3_grpo import GRPO

N_EVAL_EPISODES = 20
# Far from the training seeds, so that the evaluation does not start where the training started.
EVAL_SEED_OFFSET = 1_000_000


def plot_learning_curve(curve: TrainingCurve, title: str, path: Path) -> None:
    """
    Draw the return of every episode, and the mean over the last ``WINDOW`` episodes, against the steps taken.

    :param curve: Learning curve, with at least one episode
    :param title: Title of the figure
    :param path: Path of the PNG file
    """
    # Figure without pyplot: no backend, so no display, is involved.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve.steps, curve.returns, ".", markersize=3, alpha=0.35, label="one episode")
    if len(curve.returns) >= WINDOW:
        axes.plot(curve.steps[WINDOW - 1 :], curve.windows(), label=f"mean of {WINDOW} episodes")
    axes.set(title=title, xlabel="environment steps", ylabel="episode return")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def watch_command(env_id: str, model_path: Path) -> str:
    """
    :param env_id: Environment that the model was trained on
    :param model_path: Path of the saved model
    :return: A shell command that loads the model and shows three episodes in a window
    """
    code = (
        "import gymnasium as gym; from sb3_grpo import GRPO; "
        "from stable_baselines3.common.evaluation import evaluate_policy; "
        f"evaluate_policy(GRPO.load('{model_path.as_posix()}'), gym.make('{env_id}', render_mode='human'), 3, warn=False)"
    )
    return f'{os.path.relpath(sys.executable)} -c "{code}"'


def animation(model: GRPO, env_id: str, seed: int, path: Path) -> str:
    """
    Record the model beside one that has not been trained.

    :param model: The trained model
    :param env_id: Environment that the model was trained on
    :param seed: Seed of the model
    :param path: Path of the animation
    :return: The path, or why there is no animation
    """
    untrained = GRPO("MlpPolicy", env_id, seed=seed)
    try:
        record({"before training": untrained, f"after {model.num_timesteps:,} steps": model}, env_id, path)
    except Exception as error:  # whatever the renderer raises where it finds no library or no display
        return f"none, because {env_id} cannot be rendered here ({error})"
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train GRPO, evaluate it, draw its learning curve and record it.")
    parser.add_argument("--env", default="CartPole-v1", help="a registered Gymnasium id")
    parser.add_argument("--timesteps", type=int, default=100_000, help="training steps (rounded up to whole rollouts)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), help="folder for the model, the curve and the animation"
    )
    args = parser.parse_args()
    if args.timesteps < 1:
        parser.error(f"--timesteps is {args.timesteps}: pass at least 1")

    # A small policy spends more on handing work to threads than they save, and one thread adds up in one order.
    th.set_num_threads(1)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the animation needs no window
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / re.sub(r"[^\w.-]", "_", args.env)
    model_path, curve_path, film_path = (Path(f"{stem}.{kind}") for kind in ("zip", "png", "gif"))

    curve = TrainingCurve()
    model = GRPO("MlpPolicy", args.env, seed=args.seed, verbose=1)
    # A bar instead of tables
    model.learn(args.timesteps, callback=curve, log_interval=None, progress_bar=True)  # type: ignore[arg-type]
    model.save(model_path)
    if not curve.returns:
        sys.exit(f"No episode of {args.env} ended within {model.num_timesteps} steps: pass more --timesteps.")

    eval_env = make_vec_env(args.env, seed=args.seed + EVAL_SEED_OFFSET)
    mean, std = evaluate_policy(model, eval_env, n_eval_episodes=N_EVAL_EPISODES, deterministic=True)
    eval_env.close()
    plot_learning_curve(curve, f"GRPO on {args.env}, seed {args.seed}", curve_path)

    threshold = gym.spec(args.env).reward_threshold
    solved = "" if threshold is None else f" ({args.env} counts as solved from {threshold:g})"
    print(f"Mean return over {N_EVAL_EPISODES} evaluation episodes: {mean:.1f} +/- {std:.1f}{solved}")
    print(f"Model:          {model_path}")
    print(f"Learning curve: {curve_path}")
    print(f"Animation:      {animation(model, args.env, args.seed, film_path)}")
    print(f"Watch it:       {watch_command(args.env, model_path)}")


if __name__ == "__main__":
    main()
