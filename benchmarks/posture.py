"""
How HalfCheetah spends its first steps of training: upright, on its nose, or on its back.

    python -m benchmarks.posture                    # GRPO and PPO, seeds 100 to 102; interrupted, it goes on
    python -m benchmarks.posture --suite cheetah --arms "4 x 250, regression" --seeds 4
    python -m benchmarks.posture --table            # of the rows there are, run nothing

Trainings are those of a suite (`benchmarks/matrix.yml`), by default `short`, stopped after `--timesteps`; each is one row of
`posture.csv`, beside those of `benchmarks.run`. An episode lasts 1,000 steps whatever happens: a posture without a way out
takes the rest of it.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize
from tqdm import tqdm

from benchmarks.learning import append_row, commit, read_rows, versions
from benchmarks.run import RESULTS, Run, expand, experiment, load_matrix, train
from benchmarks.tables import markdown_table

ENV = "HalfCheetah-v5"
ARMS, SEEDS = ("grpo", "ppo"), (100, 101, 102)
FIELDS = [
    "arm", "seed", "settings_hash", "timesteps", "nose_share", "nose_speed", "back_share", "back_speed", "upright_share",
    "upright_speed", "commit", "versions",
]  # fmt: skip

#: Entries of the observation: pitch of the body in rad, 0 when upright and positive towards the nose, and forward speed in m/s
PITCH, SPEED = 1, 8
#: Pitch in rad beyond which the body rests on its nose or its tail, and on its back
TILTED, OVERTURNED = 0.6, 2.0


def postures(pitch: np.ndarray) -> dict[str, np.ndarray]:
    """
    :param pitch: of the body, in rad, not wrapped, shape ``(n,)``
    :return: for each posture which of the steps are spent in it, shape ``(n,)``; leaning back is none of them
    """
    wrapped = np.angle(np.exp(1j * pitch))
    return {
        "nose": (wrapped > TILTED) & (wrapped <= OVERTURNED),
        "back": np.abs(wrapped) > OVERTURNED,
        "upright": np.abs(wrapped) <= TILTED,
    }


class PostureRecorder(BaseCallback):
    """
    Records pitch and speed of every step, and stops the training.

    :param timesteps: after so many steps
    """

    def __init__(self, timesteps: int):
        super().__init__()
        self.timesteps = timesteps
        self.observations: list[np.ndarray] = []

    def _on_step(self) -> bool:
        env = self.training_env
        observations = env.get_original_obs() if isinstance(env, VecNormalize) else self.locals["new_obs"]
        self.observations.append(np.asarray(observations)[:, [PITCH, SPEED]])
        return self.num_timesteps < self.timesteps

    def shares_and_speeds(self) -> dict[str, str]:
        """
        :return: for each posture its share of all steps, and the mean speed in it, in m/s
        """
        pitch, speed = np.concatenate(self.observations).T
        row: dict[str, str] = {}
        for name, there in postures(pitch).items():
            row[f"{name}_share"] = f"{there.mean():.4f}"
            row[f"{name}_speed"] = f"{speed[there].mean():.3f}" if there.any() else ""
        return row


def trainings(arms: Sequence[str] = ARMS, seeds: Sequence[int] = SEEDS, suite: str = "short") -> list[Run]:
    """
    :param arms: of the suite
    :param seeds: of each
    :param suite: of the matrix, with HalfCheetah in it
    :return: what to observe
    :raises ValueError: if there is no such suite or arm
    """
    return [run for run in expand(load_matrix(), suite, list(arms), [ENV], list(seeds)) if run.algo != "random"]


def observe(run: Run, timesteps: int) -> dict[str, Any]:
    """
    :param run: to train
    :param timesteps: to stop after
    :return: a row of the CSV
    """
    recorder = PostureRecorder(timesteps)
    with experiment(run) as (manager, model):
        train(manager, model, recorder, timesteps)
    row = {"arm": run.arm, "seed": run.seed, "settings_hash": run.settings_hash(), "timesteps": timesteps}
    return {**row, **recorder.shares_and_speeds(), "commit": commit(), "versions": versions()}


def table(rows: list[dict[str, str]], runs: list[Run]) -> str:
    """
    :param rows: of the CSV
    :param runs: which of them to show: those of their seeds and settings
    :return: Markdown, one line per training; empty if there is none
    """

    def posture(row: dict[str, str], name: str) -> str:
        speed = f", {float(row[f'{name}_speed']):.1f} m/s" if row[f"{name}_speed"] else ""
        return f"{float(row[f'{name}_share']):.0%}{speed}"

    wanted = {(str(run.seed), run.settings_hash()) for run in runs}
    shown = [row for row in rows if (row["seed"], row["settings_hash"]) in wanted]
    lines = [
        [row["seed"], row["arm"], f"{int(row['timesteps']):,}", *(posture(row, name) for name in ("upright", "nose", "back"))]
        for row in sorted(shown, key=lambda row: (int(row["seed"]), row["arm"]))
    ]
    return markdown_table(["seed", "arm", "steps", "upright", "on the nose", "on the back"], lines) if lines else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.posture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", default="short")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM", help="of the suite")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--timesteps", type=int, default=120_000)
    parser.add_argument("--csv", type=pathlib.Path, default=RESULTS / "posture.csv")
    parser.add_argument("--table", action="store_true", help="run nothing")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.timesteps < 1:
        print(f"--timesteps must be at least 1, not {args.timesteps}", file=sys.stderr)
        return 2
    try:
        runs = trainings(args.arms, args.seeds, args.suite)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    th.set_num_threads(1)
    if not args.table:
        done = {(row["seed"], row["settings_hash"], row["timesteps"]) for row in read_rows(args.csv)}
        missing = [run for run in runs if (str(run.seed), run.settings_hash(), str(args.timesteps)) not in done]
        for run in tqdm(missing, unit="run"):
            append_row(args.csv, observe(run, args.timesteps), FIELDS)
    print(table(read_rows(args.csv), runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
