"""What makes ``grpo`` one of rl-zoo3's algorithms."""

import sys

import rl_zoo3.exp_manager
import rl_zoo3.train
import rl_zoo3.utils
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER

from sb3_grpo import GRPO
from sb3_grpo.zoo.experiment import GRPOExperimentManager
from sb3_grpo.zoo.search import convert_grpo_params, sample_grpo_params

ALGO = "grpo"


def register() -> None:
    """
    Add ``grpo`` to rl-zoo3: to the algorithms of all its scripts, with the hyperparameters that this package ships, and to
    its search for hyperparameters. Other algorithms stay as they are. Calling it again changes nothing.

    To be called before a function of rl-zoo3 parses its arguments::

        from rl_zoo3.train import train
        from sb3_grpo.zoo import register

        register()
        train()
    """
    # All modules of the zoo share these dicts
    rl_zoo3.utils.ALGOS[ALGO] = GRPO
    HYPERPARAMS_SAMPLER[ALGO] = sample_grpo_params
    HYPERPARAMS_CONVERTER[ALGO] = convert_grpo_params
    # But each module that uses the manager has its own name for it. A user's subclass in that place stays
    original = GRPOExperimentManager.__base__
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "rl_zoo3" and getattr(module, "ExperimentManager", None) is original:
            module.ExperimentManager = GRPOExperimentManager  # type: ignore[attr-defined]
