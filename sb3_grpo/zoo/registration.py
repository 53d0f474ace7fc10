"""Registration of ``grpo`` and ``grpo_mask`` with rl-zoo3."""

from typing import Any

import rl_zoo3.train
import rl_zoo3.utils
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER

from sb3_grpo import GRPO, MaskableGRPO
from sb3_grpo.zoo.experiment import ALGO, MASKED_ALGO, GRPOExperimentManager
from sb3_grpo.zoo.search import convert_grpo_params, sample_grpo_params


def register(ray: dict[str, Any] | None = None) -> None:
    """
    Add ``grpo``, and ``grpo_mask`` for :class:`~sb3_grpo.MaskableGRPO`, to the algorithms of rl-zoo3 and to its hyperparameter
    search, before a function of rl-zoo3 parses its arguments::

        from rl_zoo3.train import train
        from sb3_grpo.zoo import register

        register()
        train()

    :param ray: Keyword arguments of the :class:`~sb3_grpo.distributed.RayVecEnv` to train in, such as
        ``dict(n_workers=2)``; ``None`` to train as ``--vec-env`` says
    """
    # All modules of rl-zoo3 share these dicts.
    for name, algorithm in ((ALGO, GRPO), (MASKED_ALGO, MaskableGRPO)):
        rl_zoo3.utils.ALGOS[name] = algorithm
        HYPERPARAMS_SAMPLER[name] = sample_grpo_params
        HYPERPARAMS_CONVERTER[name] = convert_grpo_params
    GRPOExperimentManager.ray = ray
    if rl_zoo3.train.ExperimentManager is ExperimentManager:  # and not a manager of the user's own
        rl_zoo3.train.ExperimentManager = GRPOExperimentManager  # type: ignore[misc]
