"""
Learning curves: the return of each training episode, and the step at which it ended.

    python -m benchmarks.curves    # pack the curves of finished runs into the file that is under version control

A run leaves its curve in a file of its own, in a folder that git ignores, so that several commands can run at the same time.
Packing puts them into one compressed file for each CSV of rows.
"""

import io
import lzma
import pathlib
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from sb3_grpo.persistence import replace_file

WINDOW = 20  # episodes over which the training return is averaged
SUFFIX = ".npz.xz"
#: For numbers of four bytes, with which files are a twentieth smaller than with the defaults of xz
FILTERS = [dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, lc=1, lp=2, pb=2)]


class LearningCurve:
    """
    One entry per training episode, in the order in which they ended.

    :param steps: Step at which each ended, shape ``(n,)``
    :param returns: Return of each, shape ``(n,)``
    """

    def __init__(self, steps: Sequence[int] | np.ndarray, returns: Sequence[float] | np.ndarray):
        self.steps = steps
        self.returns = returns

    def windows(self) -> np.ndarray:
        """:return: Mean returns of ``WINDOW`` consecutive episodes, one for each episode from the ``WINDOW``-th on"""
        if len(self.returns) < WINDOW:
            return np.empty(0)
        return np.convolve(np.asarray(self.returns, dtype=np.float64), np.ones(WINDOW) / WINDOW, mode="valid")

    def first_held(self, threshold: float) -> int | None:
        """
        :param threshold: Return
        :return: Index of the first episode that ends ``WINDOW`` episodes whose mean return is at least that, ``None`` if there
            is none
        """
        reached = np.flatnonzero(self.windows() >= threshold)
        return int(reached[0]) + WINDOW - 1 if len(reached) else None

    def smoothed(self, at: np.ndarray) -> np.ndarray:
        """
        :param at: Steps, shape ``(m,)``
        :return: Mean return of the last (up to) 20 episodes that had ended by then, that of the first one before, shape
            ``(m,)``
        """
        totals = np.concatenate([[0.0], np.cumsum(self.returns, dtype=np.float64)])
        ended = np.maximum(np.searchsorted(self.steps, at, side="right"), 1)
        window = np.minimum(ended, WINDOW)
        return (totals[ended] - totals[ended - window]) / window

    def area(self, timesteps: int) -> float:
        """
        :param timesteps: Budget of the run
        :return: Mean over the budget of the mean return of the last (up to) 20 episodes, sampled at 200 steps evenly apart
        """
        return float(np.mean(self.smoothed(np.linspace(0, timesteps, 201)[1:])))


class TrainingCurve(LearningCurve, BaseCallback):
    """Records the learning curve of a training, and the second at which each episode ended."""

    steps: list[int]
    returns: list[float]

    def __init__(self) -> None:
        BaseCallback.__init__(self)
        LearningCurve.__init__(self, [], [])
        self.seconds: list[float] = []
        self._began = 0.0

    def _on_training_start(self) -> None:
        self._began = time.perf_counter()

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.steps.append(self.num_timesteps)
                self.returns.append(float(info["episode"]["r"]))
                self.seconds.append(time.perf_counter() - self._began)
        return True


class CurveStore:
    """
    The curves that belong to a CSV of rows: one packed file, and one file for each run that is not packed yet.

    :param csv: The CSV
    """

    def __init__(self, csv: pathlib.Path):
        self.packed = csv.with_suffix(SUFFIX)
        self.loose = csv.with_name(f"{csv.stem}.curves")

    def save(self, key: tuple[str, ...], curve: LearningCurve) -> None:
        """
        :param key: See :meth:`benchmarks.matrix.Run.key`
        :param curve: Learning curve of that run
        """
        arrays = dict(steps=np.asarray(curve.steps, np.int32), returns=np.asarray(curve.returns, np.float32))
        _write_whole(self.loose / f"{quote(' '.join(key), safe=' ')}{SUFFIX}", arrays)  # ids may contain slashes

    def load(self) -> dict[tuple[str, ...], LearningCurve]:
        """:return: All curves by key"""
        curves = {}
        if self.packed.exists():
            with _read(self.packed) as file:
                ends = np.cumsum(file["lengths"])[:-1]
                steps, returns = np.split(file["step_differences"], ends), np.split(file["returns"], ends)
                for name, differences, own in zip(file["names"], steps, returns, strict=True):
                    curves[tuple(str(name).split())] = LearningCurve(np.cumsum(differences, dtype=np.int64), own)
        for path in self._loose_files():
            with _read(path) as file:
                curves[tuple(unquote(path.name.removesuffix(SUFFIX)).split())] = LearningCurve(file["steps"], file["returns"])
        return curves

    def pack(self) -> int:
        """:return: Number of curves in the packed file, which has all of them now"""
        moved, curves = self._loose_files(), sorted(self.load().items())
        if moved:
            differences = np.concatenate([np.diff(curve.steps, prepend=0) for _, curve in curves])
            arrays = dict(
                names=np.array([" ".join(key) for key, _ in curves]),
                lengths=np.array([len(curve.steps) for _, curve in curves], np.int32),
                step_differences=differences.astype(np.min_scalar_type(differences.max())),
                returns=np.concatenate([np.asarray(curve.returns, np.float32) for _, curve in curves]),
            )
            _write_whole(self.packed, arrays)
            for path in moved:
                path.unlink()
        return len(curves)

    def _loose_files(self) -> list[pathlib.Path]:
        return sorted(self.loose.glob(f"*{SUFFIX}"))


def _read(path: pathlib.Path) -> Any:
    return np.load(io.BytesIO(lzma.decompress(path.read_bytes())))


def _write_whole(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    replace_file(path, lzma.compress(content.getvalue(), filters=FILTERS))


def main() -> None:
    for csv in sorted(pathlib.Path(__file__).with_name("results").glob("*.csv")):
        store = CurveStore(csv)
        if count := store.pack():
            print(f"{store.packed.name}: {count} curves, {store.packed.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
