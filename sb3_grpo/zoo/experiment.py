"""rl-zoo3's experiment manager, with what a plugin's algorithm needs."""

import difflib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import SimpleLinearSchedule
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_grpo import GRPO
from sb3_grpo.buffers import check_buffer_arguments, resolve_buffer_class

HYPERPARAMS = Path(__file__).with_name("hyperparams") / "grpo.yml"
#: What an entry may hold beside GRPO's arguments; the zoo takes these out before it constructs a model.
ZOO_KEYS = (
    "callback",
    "env_kwargs",
    "env_wrapper",
    "frame_stack",
    "monitor_kwargs",
    "n_envs",
    "n_timesteps",
    "normalize",
    "vec_env_wrapper",
)
#: What the zoo passes to a model itself.
PASSED_BY_ZOO = ("self", "env", "tensorboard_log", "seed", "verbose", "device", "_init_setup_model")


class GRPOExperimentManager(ExperimentManager):
    """
    :class:`rl_zoo3.exp_manager.ExperimentManager`, and for ``grpo``: the hyperparameters that this package ships unless
    others are asked for, schedules for ``clip_range_high``, ``rollout_buffer_kwargs`` written as Python, and errors that
    name the file and the entry.

    :param args: see the base class
    :param kwargs: see the base class
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        asked_for = inspect.signature(ExperimentManager).bind(*args, **kwargs).arguments.get("config")
        if self.algo == "grpo" and not asked_for:
            self.config = str(HYPERPARAMS)

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        hyperparams, saved = super().read_hyperparameters()
        if self.algo == "grpo":
            with self._errors_name_the_file():
                if isinstance(hyperparams.get("rollout_buffer_kwargs"), str):
                    # Written as Python, as the zoo lets policy_kwargs be
                    hyperparams["rollout_buffer_kwargs"] = eval(hyperparams["rollout_buffer_kwargs"])
                if isinstance(hyperparams.get("clip_range_high"), str):
                    hyperparams["clip_range_high"] = linear_schedule(hyperparams["clip_range_high"])
                check_entry(hyperparams)
        return hyperparams, saved

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        if self.algo != "grpo":
            return super().setup_experiment()
        with self._errors_name_the_file():
            return super().setup_experiment()

    @contextmanager
    def _errors_name_the_file(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError) as error:
            where = f"Hyperparameters of {self.env_name.gym_id} from {self.config}"
            if str(error).startswith(where):
                raise
            overwritten = f", with {self.custom_hyperparams} from the command line" if self.custom_hyperparams else ""
            raise ValueError(f"{where}{overwritten}: {error}") from error


def linear_schedule(text: str) -> SimpleLinearSchedule:
    """
    :param text: ``"lin_0.2"``
    :return: from that value to zero
    :raises ValueError: if the text is something else
    """
    kind, _, initial_value = text.partition("_")
    try:
        if kind != "lin":
            raise ValueError(kind)
        return SimpleLinearSchedule(initial_value)
    except ValueError:
        raise ValueError(
            f"`clip_range_high` is {text!r}: pass a number, or 'lin_' and the initial value, as 'lin_0.3'."
        ) from None


def check_entry(hyperparams: dict[str, Any]) -> None:
    """
    What would fail, or be taken for something else, once the model is constructed.

    :param hyperparams: an entry of a hyperparameter file, as read
    :raises ValueError: if a key is unknown, or the buffer or its options are
    """
    if not isinstance(hyperparams, dict) or not all(isinstance(key, str) for key in hyperparams):
        raise ValueError(f"an entry is a mapping from names to values, not {hyperparams!r}.")
    accepted = [name for name in inspect.signature(GRPO.__init__).parameters if name not in PASSED_BY_ZOO]
    for key in hyperparams:
        if key not in accepted and key not in ZOO_KEYS:
            closest = difflib.get_close_matches(key, [*accepted, *ZOO_KEYS], n=1)
            hint = f": did you mean {closest[0]!r}?" if closest else f": GRPO takes {', '.join(accepted)}."
            raise ValueError(f"unknown key {key!r}{hint}")
    for key in ("n_timesteps", "policy"):
        if key not in hyperparams:
            raise ValueError(f"the key {key!r} is missing.")
    buffer_class = resolve_buffer_class(hyperparams.get("rollout_buffer_class"))
    check_buffer_arguments(buffer_class, hyperparams.get("rollout_buffer_kwargs") or {})
