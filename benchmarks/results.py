"""Rows of finished runs: how they are kept, and those of a suite."""

import csv
import functools
import importlib.metadata
import math
import pathlib
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th

from benchmarks.curves import CurveStore, LearningCurve
from benchmarks.matrix import Run, cells, expand, load_matrix

#: For each name the arms that stand for it, of which an environment has one
Arms = Mapping[str, Sequence[str]]

RESULTS = pathlib.Path(__file__).with_name("results")
FIELDS = [
    "arm", "env", "timesteps", "seed", "settings_hash", "auc", "final", "eval_mean", "eval_std", "threshold",
    "steps_to_threshold", "seconds_to_threshold", "wall_clock", "steps_per_second", "commit", "versions", "variance_removed",
]  # fmt: skip


def rows_file(matrix: dict[str, Any], suite: str, results: pathlib.Path) -> pathlib.Path:
    """
    :param matrix: From :func:`benchmarks.matrix.load_matrix`
    :param suite: Name of one of its suites
    :param results: Folder
    :return: The CSV of the suite
    """
    return results / f"{matrix['suites'][suite].get('rows', suite)}.csv"


def row_key(row: dict[str, str]) -> tuple[str, str, str]:
    """
    :param row: Row of the CSV
    :return: The :meth:`benchmarks.matrix.Run.key` of its run
    """
    return row["env"], row["seed"], row["settings_hash"]


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """
    :param path: CSV
    :return: Its rows, none if there is no file
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def has_row(path: pathlib.Path, key: dict[str, str]) -> bool:
    """
    :param path: CSV
    :param key: Values by column
    :return: Whether one of its rows has these values, which is said on the terminal
    """
    found = any(key.items() <= row.items() for row in read_rows(path))
    if found:
        print(f"There is a row of {key} in {path.name}.")
    return found


def append_row(path: pathlib.Path, row: dict[str, Any], fields: Sequence[str]) -> None:
    """
    :param path: CSV
    :param row: Row to append
    :param fields: Columns of a new CSV, in order. A CSV that exists keeps its columns
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            fields = next(csv.reader(file))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def provenance() -> dict[str, str]:
    """
    :return: The commit that is checked out, with ``+`` if the package differs from it; and versions of other packages, with
        torch's name of the processor's vector instructions, on which the last digits of its sums depend
    """
    root = pathlib.Path(__file__).parent
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=root, text=True).strip()
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "../sb3_grpo"], cwd=root).returncode != 0
        commit = head + "+" * changed
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    packages = ("stable_baselines3", "gymnasium", "torch", "numpy")
    versions = [f"{each}={importlib.metadata.version(each)}" for each in packages]
    return {"commit": commit, "versions": " ".join([*versions, f"cpu={th.backends.cpu.get_cpu_capability()}"])}


class Finished(NamedTuple):
    """
    :param run: The run
    :param row: Its row
    """

    run: Run
    row: dict[str, str]


class Suite:
    """
    The finished runs of a suite.

    :param name: Name of the suite
    :param results: Folder
    :param matrix: From :func:`benchmarks.matrix.load_matrix`, which is called by default
    :param envs: Environments that count, all by default
    """

    def __init__(
        self,
        name: str,
        results: pathlib.Path = RESULTS,
        matrix: dict[str, Any] | None = None,
        envs: Collection[str] | None = None,
    ):
        matrix = load_matrix() if matrix is None else matrix
        self.settings: dict[str, Any] = matrix["suites"][name]
        csv = rows_file(matrix, name, results)
        self.results, self._store = results, CurveStore(csv)
        self._curves: dict[tuple[str, ...], LearningCurve] | None = None
        rows = {row_key(row): row for row in read_rows(csv)}
        self._finished: dict[tuple[str, str], list[Finished]] = {}
        self.arms = list(dict.fromkeys(cell.arm for cell, _ in cells(matrix, name)))
        self.timesteps = {cell.env: cell.timesteps for cell, _ in cells(matrix, name) if envs is None or cell.env in envs}
        self.planned = [run for run in expand(matrix, name) if run.env in self.timesteps]
        self.finished = [run for run in self.planned if run.key() in rows]
        for run in self.planned:
            if (row := rows.get(run.key())) is not None:
                self._finished.setdefault((run.arm, run.env), []).append(Finished(run, row))

    def runs(self, arm: str, env: str) -> list[Finished]:
        """:return: Finished runs, by seed"""
        return self._finished.get((arm, env), [])

    def column(self, arm: str, env: str, name: str) -> np.ndarray:
        """
        :param arm: Name of an arm
        :param env: Gymnasium environment
        :param name: Name of a column of numbers
        :return: Its values, infinity where it is empty, shape ``(n_seeds,)``
        """
        return np.array([float(each.row[name] or math.inf) for each in self.runs(arm, env)])

    def arm_in(self, arms: Sequence[str], env: str) -> str | None:
        """:return: The first of these arms that has finished runs in an environment, if any"""
        return next((arm for arm in arms if self.runs(arm, env)), None)

    def with_runs(self, arms: Arms) -> Arms:
        """:return: The names of which an arm has finished runs in some environment"""
        return {name: each for name, each in arms.items() if any(self.arm_in(each, env) for env in self.timesteps)}

    @functools.cached_property
    def speed_rows(self) -> list[dict[str, str]]:
        """Rows of ``speed.csv``."""
        return read_rows(self.results / "speed.csv")

    def random_area(self, env: str) -> float:
        """:return: Area of random actions, which is their mean return"""
        return float(self.column("random", env, "auc")[0])

    def curves(self, arm: str, env: str) -> list[LearningCurve]:
        """:return: Learning curves, by seed"""
        if self._curves is None:
            self._curves = self._store.load()
        return [self._curves[each.run.key()] for each in self.runs(arm, env)]
