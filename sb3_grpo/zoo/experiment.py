"""rl-zoo3's experiment manager, adapted to an algorithm of a plugin."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import SimpleLinearSchedule
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_grpo.validation import require_at_least

HYPERPARAMS = Path(__file__).with_name("hyperparams") / "grpo.yml"


class GRPOExperimentManager(ExperimentManager):
    """
    :class:`rl_zoo3.exp_manager.ExperimentManager` with three additions for ``grpo``: it uses the hyperparameter file of this
    package unless another one is given, it evaluates ``rollout_buffer_kwargs`` and schedules of ``clip_range_high``, and it
    refuses wrong values with the file and the entry. Besides, ``vec_env_type="ray"`` trains in a
    :class:`~sb3_grpo.distributed.RayVecEnv`, with ``n_workers`` and ``ray_address`` from the command line.

    :param args: See the base class
    :param kwargs: See the base class
    """

    def __init__(self, *args: Any, **kwargs: Any):
        given = inspect.signature(ExperimentManager).bind(*args, **kwargs)
        self.ray_vec_env_class: Any = None
        if given.arguments.get("vec_env_type") == "ray":
            from sb3_grpo.distributed import RayVecEnv

            self.ray_vec_env_class = RayVecEnv
            given.arguments["vec_env_type"] = "dummy"
        super().__init__(*given.args, **given.kwargs)
        if self.ray_vec_env_class is not None:
            self.save_path = os.path.abspath(self.save_path)  # workers have folders of their own
        if self.algo == "grpo" and not given.arguments.get("config"):
            self.config = str(HYPERPARAMS)

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        hyperparams, saved = super().read_hyperparameters()
        if self.algo == "grpo":
            with self._errors_name_the_file():
                if isinstance(hyperparams.get("rollout_buffer_kwargs"), str):
                    hyperparams["rollout_buffer_kwargs"] = eval(hyperparams["rollout_buffer_kwargs"])
                for name in ("learning_rate", "clip_range", "clip_range_high"):
                    if isinstance(hyperparams.get(name), str):
                        schedule = linear_schedule(name, hyperparams[name])
                        if name == "clip_range_high":  # rl-zoo3 does it for the others
                            hyperparams[name] = schedule
                require_at_least("n_envs", hyperparams.get("n_envs", 1), 1)
                if "policy" not in hyperparams:
                    raise ValueError("`policy` is missing, such as `policy: MlpPolicy`.")
        return hyperparams, saved

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        if self.algo != "grpo":
            return super().setup_experiment()
        with self._errors_name_the_file():
            return super().setup_experiment()

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        if self.ray_vec_env_class is not None:
            # The first environment of a search only tells the spaces
            trains = not eval_env and (no_log or not self.optimize_hyperparameters)
            options = dict(n_workers=self.args.n_workers, address=self.args.ray_address)
            self.vec_env_class, self.vec_env_kwargs = (self.ray_vec_env_class, options) if trains else (DummyVecEnv, {})
        return super().create_envs(n_envs, eval_env, no_log)

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


def linear_schedule(name: str, text: str) -> SimpleLinearSchedule:
    """
    :param name: Name of the argument
    :param text: A string such as ``"lin_0.2"``
    :return: A schedule from that value to zero
    :raises ValueError: If it is another string
    """
    kind, _, initial_value = text.partition("_")
    try:
        if kind != "lin":
            raise ValueError(kind)
        return SimpleLinearSchedule(initial_value)
    except ValueError:
        raise ValueError(
            f"`{name}` must be a number, or 'lin_' and the initial value, such as 'lin_0.3', not {text!r}. YAML takes numbers "
            "without a point, such as 1e-3, for strings: write them with one, such as 1.0e-3."
        ) from None
