"""
The command line: rl-zoo3's scripts, with ``grpo`` among their algorithms.

    python -m sb3_grpo.zoo train --algo grpo --env CartPole-v1
    python -m sb3_grpo.zoo enjoy --algo grpo --env CartPole-v1 -f logs --no-render

Each script has the options that it has in rl-zoo3. Where there is no display, scripts that plot save their pictures in the
current folder instead of opening windows.
"""

import importlib
import itertools
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from sb3_grpo.zoo.registration import register

#: Scripts of rl-zoo3: the module, and its function if it is not to be run as a whole.
SCRIPTS: dict[str, tuple[str, str | None]] = {
    "train": ("rl_zoo3.train", "train"),
    "enjoy": ("rl_zoo3.enjoy", "enjoy"),
    "record_video": ("rl_zoo3.record_video", None),
    "record_training": ("rl_zoo3.record_training", None),
    "plot_train": ("rl_zoo3.plots.plot_train", "plot_train"),
    "all_plots": ("rl_zoo3.plots.all_plots", "all_plots"),
    "plot_from_file": ("rl_zoo3.plots.plot_from_file", "plot_from_file"),
    "push_to_hub": ("rl_zoo3.push_to_hub", None),
    "load_from_hub": ("rl_zoo3.load_from_hub", None),
    "benchmark": ("rl_zoo3.benchmark", None),
}


def main(arguments: list[str] | None = None) -> None:
    """
    Run one of rl-zoo3's scripts.

    :param arguments: its name and its arguments, ``None`` for those of the command line
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(f"{(__doc__ or '').strip()}\n\nScripts: {', '.join(SCRIPTS)}; each knows --help.")
        return
    if name not in SCRIPTS:
        sys.exit(f"There is no script {name!r}: pass one of {', '.join(SCRIPTS)}.")
    register()
    module, function = SCRIPTS[name]
    with (
        _replaced(sys, "argv", [f"python -m sb3_grpo.zoo {name}", *rest]),
        _replaced(subprocess, "call", _call),
        # Where there is a display, as it is
        _replaced(plt, "show", _PictureSaver(name) if matplotlib.get_backend().lower() == "agg" else plt.show),
    ):
        if name == "push_to_hub":
            _mend_push_to_hub()
        if function is None:
            runpy.run_module(module, run_name="__main__")
        else:
            getattr(importlib.import_module(module), function)()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_original_call = subprocess.call


def _call(command: Any, *args: Any, **kwargs: Any) -> int:
    # record_training and benchmark call other scripts, in processes in which nobody would know of grpo
    return _original_call(redirected(command), *args, **kwargs)


def redirected(command: Any) -> Any:
    """
    :param command: of a process
    :return: the same, by this command line where it was a script of rl-zoo3
    """
    if not isinstance(command, list) or not command or command[0] != "python":
        return command
    for name, (module, _) in SCRIPTS.items():
        for script in (["-m", module], [f"{name}.py"]):
            if command[1 : 1 + len(script)] == script:
                return [sys.executable, "-m", "sb3_grpo.zoo", name, *command[1 + len(script) :]]
    return command


def _mend_push_to_hub() -> None:
    """
    rl-zoo3 2.9 imports a function under the name it had before version 3.2 of the hub's integration, see
    https://github.com/huggingface/huggingface_sb3/issues/54.
    """
    module: Any = importlib.import_module("huggingface_sb3.push_to_hub")
    if not hasattr(module, "generate_metadata"):
        module.generate_metadata = module._generate_metadata


class _PictureSaver:
    """
    Stands in for ``pyplot.show`` where there is nothing to show pictures on.

    :param script: whose name the files get
    """

    def __init__(self, script: str):
        self.paths = (Path(f"{script}_{number}.png") for number in itertools.count(1))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for number in plt.get_fignums():
            path = next(self.paths)
            plt.figure(number).savefig(path, dpi=150, bbox_inches="tight")
            print(f"Picture saved to {path}")
        plt.close("all")
