"""
How much memory does training take? Peak resident memory of GRPO and of SB3's PPO, each in a process of its own.

    python -m benchmarks.memory                                      # images, 84 x 84 pixels and 4 channels
    python -m benchmarks.memory --env CartPole-v1 --policy MlpPolicy --n-steps 2048

Printed are the peak of the whole process, and how much of it came after the libraries had been imported; the ratios are those
of GRPO to PPO.
"""

import argparse
import multiprocessing
import pathlib
from typing import NamedTuple

import torch as th
from stable_baselines3 import PPO

from benchmarks.throughput import Setting, add_setting_arguments, make_model
from sb3_grpo import GRPO

ALGORITHMS: dict[str, type[GRPO] | type[PPO]] = {"GRPO": GRPO, "PPO": PPO}
IMAGES = Setting(env="image", policy="CnnPolicy", n_envs=8, n_steps=128, batch_size=256, n_epochs=1, n_channels=4)


class Memory(NamedTuple):
    """
    :param peak: resident memory of the process at its highest, in MB
    :param grown: what of this came after the imports, in MB
    """

    peak: float
    grown: float


def peak_memory() -> float:
    """:return: highest resident memory of this process since :func:`forget_peak`, in MB, from Linux's ``/proc``"""
    [line] = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e6


def forget_peak() -> None:
    """What the process inherited, or took while it imported, is not what the run takes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def train(algorithm: str, setting: Setting, rollouts: int) -> Memory:
    """
    To be called in a fresh process: a peak does not go down again.

    :param algorithm: ``"GRPO"`` or ``"PPO"``
    :param setting: of the comparison
    :param rollouts: to train on
    :return: what it took
    """
    th.set_num_threads(1)
    forget_peak()
    imported = peak_memory()
    make_model(ALGORITHMS[algorithm], setting).learn(rollouts * setting.rollout)
    return Memory(peak_memory(), peak_memory() - imported)


def compare(setting: Setting, rollouts: int) -> dict[str, Memory]:
    """
    :param setting: of the comparison
    :param rollouts: to train on
    :return: what each algorithm took
    """
    memory = {}
    for algorithm in ALGORITHMS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            memory[algorithm] = pool.apply(train, (algorithm, setting, rollouts))
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_setting_arguments(parser, IMAGES)
    parser.add_argument("--rollouts", type=int, default=2, help="rollouts to train on")
    args = vars(parser.parse_args())
    rollouts = args.pop("rollouts")
    memory = compare(Setting(**args), rollouts)
    for algorithm, (peak, grown) in memory.items():
        print(f"{algorithm:<5} peak {peak:7.1f} MB, of which {grown:7.1f} MB after the imports")
    ours, theirs = memory["GRPO"], memory["PPO"]
    print(f"ratio      {ours.peak / theirs.peak:7.3f}             {ours.grown / theirs.grown:7.3f}")


if __name__ == "__main__":
    main()
