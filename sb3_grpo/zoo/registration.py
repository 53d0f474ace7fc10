"""Registration of ``grpo`` with rl-zoo3."""

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import rl_zoo3.exp_manager
import rl_zoo3.train
import rl_zoo3.utils
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER

from sb3_grpo import GRPO
from sb3_grpo.zoo.experiment import GRPOExperimentManager
from sb3_grpo.zoo.search import convert_grpo_params, sample_grpo_params

ALGO = "grpo"


class TrainParser(argparse.ArgumentParser):
    """Parser of ``train`` that knows ``--vec-env ray``."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        if "--vec-env" in args:
            kwargs["choices"] = [*kwargs["choices"], "ray"]
            self.add_argument("--n-workers", type=int, help="Workers of --vec-env ray (default: one per CPU of the cluster)")
            self.add_argument("--ray-address", help="Cluster of --vec-env ray (default: one is started on this machine)")
        return super().add_argument(*args, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        given = super().parse_args(*args, **kwargs)
        for option in ("--n-workers", "--ray-address"):
            value = getattr(given, option[2:].replace("-", "_"))
            if value is not None and given.vec_env != "ray":
                self.error(
                    f"`{option} {value}` is for `--vec-env ray`, not `--vec-env {given.vec_env}`: pass `--vec-env ray`."
                )
        return given


def register() -> None:
    """
    Add ``grpo`` to the algorithms of rl-zoo3 and to its hyperparameter search, and ``ray`` to the choices of ``--vec-env``.
    Other algorithms do not change, and a second call has no effect.

    Call it before a function of rl-zoo3 parses its arguments::

        from rl_zoo3.train import train
        from sb3_grpo.zoo import register

        register()
        train()
    """
    # All modules of rl-zoo3 share these dicts.
    rl_zoo3.utils.ALGOS[ALGO] = GRPO
    HYPERPARAMS_SAMPLER[ALGO] = sample_grpo_params
    HYPERPARAMS_CONVERTER[ALGO] = convert_grpo_params
    rl_zoo3.train.argparse = SimpleNamespace(ArgumentParser=TrainParser)  # type: ignore[assignment]
    # Each module that uses the manager has imported it under a name of its own. A user's subclass is left in place.
    original = GRPOExperimentManager.__base__
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "rl_zoo3" and getattr(module, "ExperimentManager", None) is original:
            module.ExperimentManager = GRPOExperimentManager  # type: ignore[attr-defined]
