"""
The command line: rl-zoo3's scripts, with ``grpo`` among their algorithms.

    python -m sb3_grpo.zoo train --algo grpo --env CartPole-v1
    python -m sb3_grpo.zoo enjoy --algo grpo --env CartPole-v1 -f logs --no-render

Each script has the options that it has in rl-zoo3. Besides, ``train`` takes ``--vec-env ray`` with ``--n-workers`` and
``--ray-address``. Without a display, figures are saved in the current folder.
"""

import argparse
import importlib
import runpy
import sys
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from sb3_grpo.zoo.experiment import register

#: Scripts of rl-zoo3: the module, and its function; ``None`` if the module is run as a script. ``record_training`` and
#: ``benchmark`` are not among them, because they start other scripts in new processes, which would not know ``grpo``.
SCRIPTS: dict[str, tuple[str, str | None]] = {
    "train": ("rl_zoo3.train", "train"),
    "enjoy": ("rl_zoo3.enjoy", "enjoy"),
    "record_video": ("rl_zoo3.record_video", None),
    "plot_train": ("rl_zoo3.plots.plot_train", "plot_train"),
    "all_plots": ("rl_zoo3.plots.all_plots", "all_plots"),
    "plot_from_file": ("rl_zoo3.plots.plot_from_file", "plot_from_file"),
    "push_to_hub": ("rl_zoo3.push_to_hub", None),
    "load_from_hub": ("rl_zoo3.load_from_hub", None),
}


def main(arguments: list[str] | None = None) -> None:
    """Run one of rl-zoo3's scripts, with its name and its arguments; ``None`` for those of the command line."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(f"{(__doc__ or '').strip()}\n\nScripts: {', '.join(SCRIPTS)}; each has a --help.")
        return
    if name not in SCRIPTS:
        sys.exit(f"There is no script {name!r}: pass one of {', '.join(SCRIPTS)}.")
    rest, ray = parse_ray_options(rest) if name == "train" else (rest, None)
    register(ray)
    module, function = SCRIPTS[name]
    command_line, sys.argv = sys.argv, [f"python -m sb3_grpo.zoo {name}", *rest]
    try:
        if function is None:
            runpy.run_module(module, run_name="__main__")
        else:
            getattr(importlib.import_module(module), function)()
    finally:
        sys.argv = command_line
    if matplotlib.get_backend().lower() == "agg":  # which cannot show a figure
        for number in plt.get_fignums():
            path = f"{name}_{number}.png"
            plt.figure(number).savefig(path)
            plt.close(number)
            print(f"Figure: {path}")


def parse_ray_options(arguments: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """:return: The arguments that rl-zoo3 knows, and those of the ``RayVecEnv``; ``None`` without ``--vec-env ray``"""
    parser = argparse.ArgumentParser("train", add_help=False, allow_abbrev=False)
    parser.add_argument("--vec-env")
    parser.add_argument("--n-workers", type=int)
    parser.add_argument("--ray-address")
    options, others = parser.parse_known_args(arguments)
    if options.vec_env == "ray":
        return others, dict(n_workers=options.n_workers, address=options.ray_address)
    for option, value in (("--n-workers", options.n_workers), ("--ray-address", options.ray_address)):
        if value is not None:
            parser.error(f"`{option} {value}` is for `--vec-env ray`: pass `--vec-env ray` as well.")
    return arguments, None
