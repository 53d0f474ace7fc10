"""rl-zoo3's experiment manager, adapted to the algorithms of a plugin, and their registration."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import rl_zoo3.exp_manager
import rl_zoo3.train
import rl_zoo3.utils
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_grpo import GRPO, MaskableGRPO, RecurrentGRPO
from sb3_grpo.validation import require_at_least
from sb3_grpo.zoo.search import convert_grpo_params, sample_grpo_params

#: Names of the algorithms of this package in rl-zoo3
ALGO, MASKED_ALGO, RECURRENT_ALGO = "grpo", "grpo_mask", "grpo_lstm"
HYPERPARAMS = Path(__file__).with_name("hyperparams") / "grpo.yml"
#: Entries that may be Python in a string.
EVALUATED = ("policy_kwargs", "rollout_buffer_kwargs", "objective", "normalize", "monitor_kwargs")
#: Words that people write in a hyperparameter file, and that YAML takes for strings, at least in quotation marks.
WORDS = {"true": True, "false": False, "none": None, "null": None}
#: What rl-zoo3 makes a schedule of
LINEAR_SCHEDULE = re.compile(r"lin_[0-9.eE+-]*[0-9.]")


class GRPOExperimentManager(ExperimentManager):
    """
    :class:`rl_zoo3.exp_manager.ExperimentManager` with additions for the algorithms of this package. It uses the
    hyperparameter file of this package unless another one is given. It understands numbers as people write them, and
    ``objective`` and ``rollout_buffer_kwargs`` in a string. It refuses wrong values with the file and the entry. With
    ``grpo_mask``, evaluation uses masks. With ``grpo_lstm``, policies have memory.
    """

    #: Keyword arguments of the ``RayVecEnv`` to train in; ``None`` for the class that ``--vec-env`` names.
    ray: ClassVar[dict[str, Any] | None] = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.ray is not None:
            self.save_path = os.path.abspath(self.save_path)  # workers have folders of their own
        if self.is_ours and not kwargs.get("config"):
            self.config = str(HYPERPARAMS)

    @property
    def is_ours(self) -> bool:
        """Whether the algorithm is one of this package."""
        return self.algo in (ALGO, MASKED_ALGO, RECURRENT_ALGO)

    def create_callbacks(self) -> None:
        super().create_callbacks()
        for callback in self.callbacks:
            if self.algo == MASKED_ALGO and type(callback) is EvalCallback:
                # The same callback, evaluating with masks, of which rl-zoo3 does not know
                callback.__class__ = MaskableEvalCallback
                callback.use_masking = True  # type: ignore[attr-defined]

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        hyperparams, saved = super().read_hyperparameters()
        if self.is_ours:
            saved.update((name, plain_value(value)) for name, value in saved.items())  # `enjoy` reads them
            with self._errors_name_the_file():
                hyperparams = processed(hyperparams)
            if self.algo == RECURRENT_ALGO:  # the file has one entry for policies with and without memory
                hyperparams["policy"] = re.sub("(?<!Lstm)Policy$", "LstmPolicy", hyperparams["policy"])
        return hyperparams, saved

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        with self._errors_name_the_file():
            return super().setup_experiment()

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        if self.ray is not None:
            from sb3_grpo.distributed import RayVecEnv

            # The first environment of a search only tells the spaces
            trains = not eval_env and (no_log or not self.optimize_hyperparameters)
            self.vec_env_class = RayVecEnv if trains else DummyVecEnv
            self.vec_env_kwargs = self.ray if trains else {}
        return super().create_envs(n_envs, eval_env, no_log)

    @contextmanager
    def _errors_name_the_file(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError) as error:
            where = f"Hyperparameters of {self.env_name.gym_id} from {self.config}"
            if not self.is_ours or str(error).startswith(where):
                raise
            overwritten = f", with {self.custom_hyperparams} from the command line" if self.custom_hyperparams else ""
            raise ValueError(f"{where}{overwritten}: {error}") from error


def processed(hyperparams: dict[str, Any]) -> dict[str, Any]:
    """:return: An entry of a hyperparameter file as rl-zoo3 and GRPO take it. A ``ValueError`` names a wrong value's key"""
    hyperparams = {name: plain_value(value) for name, value in hyperparams.items()}
    for name in EVALUATED:
        value = hyperparams.get(name)
        if isinstance(value, str):
            try:
                # With the names that rl-zoo3 offers, such as `nn`.
                hyperparams[name] = value = eval(value, dict(vars(rl_zoo3.exp_manager)))
            except Exception as error:
                raise ValueError(f"`{name}` is {value!r}, which is no Python expression ({error!r}).") from error
        if isinstance(value, dict):
            hyperparams[name] = {option: plain_value(each, words={}) for option, each in value.items()}
    for name in ("learning_rate", "clip_range"):
        text = hyperparams.get(name)
        if isinstance(text, str) and not LINEAR_SCHEDULE.fullmatch(text):
            raise ValueError(f"`{name}` must be a number, or 'lin_' and the initial value, such as 'lin_0.3', not {text!r}.")
    if not isinstance(hyperparams.get("policy"), str):
        raise ValueError(f"`policy` is {hyperparams.get('policy', 'missing')!r}: write a name, such as `policy: MlpPolicy`.")
    for name, default in (("n_timesteps", None), ("n_envs", 1)):
        require_at_least(name, hyperparams.get(name, default), 1)
    if hyperparams.get("frame_stack") is not None:
        require_at_least("frame_stack", hyperparams["frame_stack"], 1)
    return hyperparams


def plain_value(value: Any, words: dict[str, Any] = WORDS) -> Any:
    """
    :return: The number that is meant by a string such as ``"1e-3"``, which YAML does not take for one; an integer for a whole
        number such as ``1e2`` or 4.0; the meaning of a word such as ``"true"``; other values as they are
    """
    if isinstance(value, str):
        value = words.get(value.strip().lower(), value)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def register(ray: dict[str, Any] | None = None) -> None:
    """
    Add ``grpo``, ``grpo_mask`` for :class:`~sb3_grpo.MaskableGRPO`, and ``grpo_lstm`` for :class:`~sb3_grpo.RecurrentGRPO`, to
    the algorithms of rl-zoo3 and to its hyperparameter search, before a function of rl-zoo3 parses its arguments::

        from rl_zoo3.train import train
        from sb3_grpo.zoo import register

        register()
        train()

    :param ray: Keyword arguments of the :class:`~sb3_grpo.distributed.RayVecEnv` to train in, such as
        ``dict(n_workers=2)``; ``None`` to train as ``--vec-env`` says
    """
    # All modules of rl-zoo3 share these dicts.
    for name, algorithm in ((ALGO, GRPO), (MASKED_ALGO, MaskableGRPO), (RECURRENT_ALGO, RecurrentGRPO)):
        rl_zoo3.utils.ALGOS[name] = algorithm
        HYPERPARAMS_SAMPLER[name] = sample_grpo_params
        HYPERPARAMS_CONVERTER[name] = convert_grpo_params
    GRPOExperimentManager.ray = ray
    if rl_zoo3.train.ExperimentManager is ExperimentManager:  # and not a manager of the user's own
        rl_zoo3.train.ExperimentManager = GRPOExperimentManager  # type: ignore[misc]
