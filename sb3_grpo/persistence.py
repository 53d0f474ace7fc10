"""What saving a model needs beyond Stable-Baselines3: a file format, complete files, and the state that continues a run."""

import inspect
import io
import json
import os
import pathlib
import random
import zipfile
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.type_aliases import GymEnv

from sb3_grpo.arithmetic.averaging import WeightAverage
from sb3_grpo.arithmetic.kl_penalty import KLPenalty
from sb3_grpo.buffers import DEFAULT_GROUP_SIZE, GroupRolloutBuffer
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.settings import CLIPPED_ONLY, refuse_arguments, warn_of_idle_arguments
from sb3_grpo.starts import Ledger
from sb3_grpo.validation import takes_any

SelfAlgorithm = TypeVar("SelfAlgorithm", bound="PersistentAlgorithm")

VERSION = pathlib.Path(__file__).with_name("version.txt").read_text(encoding="utf-8").strip()
#: Version of the file format, the only one that can be loaded.
FORMAT = 1
#: Name of the attribute in a file that holds the format and the version of the package. SB3's functions that write a file anew
#: keep it.
FORMAT_ENTRY = "_sb3_grpo_format"


def full_name(of: type) -> str:
    """:return: The name of a class with that of its module"""
    return f"{of.__module__}.{of.__qualname__}"


def random_state() -> dict[str, Any]:
    """:return: State of the global random generators of Python, numpy and torch"""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": th.get_rng_state(),
        "cuda": th.cuda.get_rng_state_all() if th.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to a state from :func:`random_state`. The states of missing GPUs are left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    th.set_rng_state(state["torch"])
    if th.cuda.is_available() and len(state["cuda"]) == th.cuda.device_count():
        th.cuda.set_rng_state_all(state["cuda"])


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Write a file such that at any moment either the old or the new content is complete under its name."""
    path = path.resolve()  # replace the target of a link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_format(path: str | pathlib.Path | io.BufferedIOBase) -> list[str]:
    """
    Raise a ``ValueError`` for a file of another algorithm or format, before anything in it is unpickled.

    :return: Names of the attributes in the file
    """
    file: Any = open_path(path, "r", suffix="zip")
    position, is_given = file.tell(), file is path
    name, argument = ("The file", "file") if is_given else (repr(str(file.name)),) * 2
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            data = json.loads(archive.read("data")) if "data" in names else {}
    except zipfile.BadZipFile:
        return []  # SB3's error for other files is clear
    finally:
        file.seek(position)
        if not is_given:
            file.close()
    weights_only = f"To use its policy, make a model and copy the weights: `load_actor(model, {argument})`."
    # The first files of this format have it in an entry of the archive, and a number or nothing here.
    saved = data.get(FORMAT_ENTRY) or FORMAT_ENTRY in names
    if data and not saved:
        made_by, advice = "another algorithm", "Load it with the class that saved it."
        if "vf_coef" in data:
            made_by, advice = "an algorithm with a critic, such as PPO", weights_only
        raise ValueError(f"{name} was saved by {made_by}, so GRPO.load cannot load it. {advice}")
    if isinstance(saved, dict) and saved["format"] != FORMAT:
        raise ValueError(
            f"{name} was saved by sb3-grpo {saved['version']} in file format {saved['format']}; this is sb3-grpo {VERSION}, "
            f"which loads format {FORMAT}. {weights_only}"
        )
    return list(data)


class PersistentAlgorithm(OnPolicyAlgorithm):
    """The part of GRPO that saves and loads models, such that a run can be continued."""

    rollout_buffer: GroupRolloutBuffer  # type: ignore[assignment]
    policy: ActorPolicy  # type: ignore[assignment]
    _last_obs: Any
    kl_penalty: KLPenalty
    weight_average: WeightAverage
    group_size: int | None
    #: Which start each environment runs, and the starts to come.
    ledger: Ledger = None  # type: ignore[assignment]  # until the model is set up
    # The arguments as they were last taken up, by name
    _settings: dict[str, Any]
    # What continuing a run needs beyond what SB3 saves, on the way from a file to the parts that are built later.
    _run_state: dict[str, Any] | None = None
    # Random state with which a loaded model continues its run.
    _random_state: dict[str, Any] | None = None

    def _new_ledger(self, seed: int | None = None) -> Ledger:
        return Ledger(self.group_size or DEFAULT_GROUP_SIZE, seed)

    def _continue_run(self, saved_ledger: Ledger | None) -> None:
        """Go on with the run of a saved model, if this is one. SB3 has seeded it meanwhile, which made a new ledger."""
        if saved_ledger is not None:
            self.ledger, self._last_obs = saved_ledger, None  # trajectories in progress lack their beginnings
            saved_ledger.group_size = self.group_size or saved_ledger.group_size
        elif self.ledger is None:
            self.ledger = self._new_ledger()
        if self._run_state is not None:
            self._random_state = self._run_state["random"]
            self.kl_penalty.set_state(self._run_state["kl_penalty"], self.policy)
            if "weight_average" in self._run_state:  # not in the first files of this format
                self.weight_average.set_state(self._run_state["weight_average"], self.policy)
            if self._run_state["buffer_class"] == full_name(type(self.rollout_buffer)):  # load() may have been given another
                self.rollout_buffer.set_state(self._run_state["buffer"])
            self._run_state = None

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
        run_state: bool = True,
    ) -> None:
        """
        Save the model in a zip file, with everything that continuing its run needs: weights and those of the last update, see
        :mod:`sb3_grpo.arithmetic.averaging`, optimizer, kernel baseline, KL reference, ledger and random generators.
        Transitions that wait for their group are not saved.

        The file is replaced as a whole: if saving is interrupted, the previous file stays intact.

        :param path: Path of the file (``.zip`` is added if it has no suffix), or a file-like object
        :param exclude: Names of attributes that are not saved
        :param include: Names of attributes that are saved although they are excluded by default
        :param run_state: Whether to save what only continuing the run needs: weights of the last update, kernel baseline, KL
            reference, ledger and random generators. Without, the file is as small as one of PPO, and a model that is loaded
            from it begins a new run
        """
        content = io.BytesIO()
        if run_state:
            self._run_state = {
                "buffer_class": full_name(type(self.rollout_buffer)),  # which may be gone when the file is loaded
                "buffer": self.rollout_buffer.get_state(),
                "kl_penalty": self.kl_penalty.get_state(),
                "weight_average": self.weight_average.get_state(),
                "random": self._random_state or random_state(),
            }
        else:
            exclude = {*(exclude or ()), "ledger", "_last_obs", "_last_original_obs", "_last_episode_starts"}
        vars(self)[FORMAT_ENTRY] = {"format": FORMAT, "version": VERSION}
        try:
            with self.weight_average.shown(self.policy):
                super().save(content, exclude, include)
        finally:
            self._run_state = None
            del vars(self)[FORMAT_ENTRY]
        if isinstance(path, (str, pathlib.Path)):
            path = pathlib.Path(path)
            replace_file(path if path.suffix else path.with_name(f"{path.name}.zip"), content.getvalue())
        else:
            path.write(content.getvalue())

    @classmethod
    def load(
        cls: type[SelfAlgorithm],
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfAlgorithm:
        """
        Load a model. ``learn(..., reset_num_timesteps=False)`` then continues the saved run with the same random numbers, from
        a reset of the environments. ``learn(...)`` starts a new run; if the model was saved with a ``seed``, that seed is used
        again unless another one is passed here.

        .. warning::
            A saved model contains pickled objects, and unpickling runs code from the file: load only files that you trust.
            From other files take the weights alone, with :func:`~sb3_grpo.transfer.load_actor`.

        :param path: Path of the file, or a file-like object
        :param env: Environment to learn in; ``None`` for a model that only predicts, or to set it later (``set_env``)
        :param device: Device of the policy
        :param custom_objects: Attributes that replace those in the file
        :param print_system_info: Whether to print information about the current and the saving system
        :param force_reset: Unused: learning always begins with a reset of the environments
        :param kwargs: Arguments to change
        :raises ValueError: If the file is of another algorithm or file format, or if an argument does not fit the saved
            weights
        :raises TypeError: If there is an unknown argument
        """
        classes = [each for each in cls.__mro__ if issubclass(each, PersistentAlgorithm) and each is not PersistentAlgorithm]
        taken = ("policy", "env", "_init_setup_model", "unknown")  # by the file, by `load`, or by nobody
        accepted = [name for each in classes for name in inspect.signature(each).parameters if name not in taken]
        saved = check_format(path)
        # A constructor may take further arguments out of its `**kwargs`. They are known by the attributes that they became.
        accepted += saved if takes_any(cls) else []
        refuse_arguments({name: value for name, value in kwargs.items() if name not in accepted}, accepted)
        changed = {**(custom_objects or {}), **kwargs}
        for name in {"n_steps", "gae_lambda"} & {*changed}:
            kwargs[f"_chooses_{name}"] = changed[name] is None
        if "objective" in changed:
            kwargs["kl_coef"] = None  # begins with that of the objective
        if "stats_window_size" in kwargs:  # SB3 keeps it under another name
            kwargs["_stats_window_size"] = kwargs.pop("stats_window_size")
        model = super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)
        warn_of_idle_arguments(vars(model), kwargs)
        for name in {*CLIPPED_ONLY} & {*(custom_objects or ())}:  # changes for `learn`; who only predicts is not warned
            model._settings.pop(name, None)
        if changed.get("seed") is not None:  # a new run
            model.ledger = model._new_ledger(model.seed)
            model._random_state = None
        return model
