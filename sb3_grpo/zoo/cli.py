"""
The command line: rl-zoo3's scripts, with ``grpo`` among their algorithms.

    python -m sb3_grpo.zoo train --algo grpo --env CartPole-v1
    python -m sb3_grpo.zoo enjoy --algo grpo --env CartPole-v1 -f logs --no-render

Each script has the options that it has in rl-zoo3. Without a display, figures are saved in the current folder.
"""

import importlib
import runpy
import subprocess
import sys
from typing import Any
from unittest import mock

import matplotlib
from matplotlib import pyplot as plt

from sb3_grpo.zoo.registration import register

#: Scripts of rl-zoo3: the module, and its function; ``None`` if the module is run as a script.
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

    :param arguments: Name of the script and its arguments; ``None`` for those of the command line
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(f"{(__doc__ or '').strip()}\n\nScripts: {', '.join(SCRIPTS)}; each has a --help.")
        return
    if name not in SCRIPTS:
        sys.exit(f"There is no script {name!r}: pass one of {', '.join(SCRIPTS)}.")
    register()
    module, function = SCRIPTS[name]
    with (
        mock.patch.object(sys, "argv", [f"python -m sb3_grpo.zoo {name}", *rest]),
        mock.patch.object(subprocess, "call", _call),
    ):
        if function is None:
            runpy.run_module(module, run_name="__main__")
        else:
            getattr(importlib.import_module(module), function)()
    if matplotlib.get_backend().lower() == "agg":  # which cannot show a figure
        save_figures(name)


def save_figures(name: str) -> None:
    """
    Save and close all open figures.

    :param name: Beginning of the names of the files
    """
    for number in plt.get_fignums():
        path = f"{name}_{number}.png"
        plt.figure(number).savefig(path)
        plt.close(number)
        print(f"Figure: {path}")


_original_call = subprocess.call


def _call(command: Any, *args: Any, **kwargs: Any) -> int:
    # record_training and benchmark run other scripts in new processes, which would not know grpo.
    return _original_call(redirected(command), *args, **kwargs)


def redirected(command: Any) -> Any:
    """
    :param command: Command of a new process
    :return: The same command, through this command line if it is a script of rl-zoo3
    """
    if not isinstance(command, list) or not command or command[0] != "python":
        return command
    for name, (module, _) in SCRIPTS.items():
        for script in (["-m", module], [f"{name}.py"]):
            if command[1 : 1 + len(script)] == script:
                return [sys.executable, "-m", "sb3_grpo.zoo", name, *command[1 + len(script) :]]
    return command
