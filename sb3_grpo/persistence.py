"""What saving a model takes beside Stable-Baselines3's own: whole files, random generators, versions."""

import io
import os
import pathlib
import random
import warnings
import zipfile
from typing import Any, NamedTuple

import numpy as np
import torch as th

#: Entry of a saved model's archive, beside Stable-Baselines3's own.
VERSION_ENTRY = "_sb3_grpo_version"
VERSION = pathlib.Path(__file__).with_name("version.txt").read_text(encoding="utf-8").strip()


class RandomState(NamedTuple):
    """
    State of all random generators that a run draws from.

    :param python: of the module ``random``
    :param numpy: of numpy's global generator
    :param torch: of torch's on the CPU
    :param cuda: of torch's on each GPU
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: th.Tensor
    cuda: list[th.Tensor]


def random_state() -> RandomState:
    """:return: of the generators as they are"""
    cuda = th.cuda.get_rng_state_all() if th.cuda.is_available() else []
    return RandomState(random.getstate(), np.random.get_state(legacy=False), th.get_rng_state(), cuda)


def set_random_state(state: RandomState) -> None:
    """
    :param state: from :func:`random_state`; states of GPUs that are not there are left out
    """
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    th.set_rng_state(state.torch)
    if th.cuda.is_available() and len(state.cuda) == th.cuda.device_count():
        th.cuda.set_rng_state_all(state.cuda)


def with_suffix(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """
    :param path: of a file
    :param suffix: to add where the path has none
    :return: the path that Stable-Baselines3 would write to
    """
    return path if path.suffix else path.with_name(path.name + suffix)


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """
    Write a file so that at any moment there is either the old one or the new one under its name, whole: beside it first, and
    moved over it once it is on the disk. A process that is killed may leave the file beside it behind.

    :param path: of the file; missing folders are made
    :param content: of the new file
    """
    path = path.resolve()  # what a link points to is replaced, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            beside.chmod(path.stat().st_mode)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_version(archive: io.BytesIO) -> None:
    """
    Add the version of this package to a saved model.

    :param archive: the model
    """
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(VERSION_ENTRY, VERSION)


def read_version(path: str | pathlib.Path | io.BufferedIOBase) -> str | None:
    """
    :param path: of a saved model, or a file-like object, which is left at the position it had
    :return: the version of this package that saved it, ``None`` if it does not say
    """
    if isinstance(path, (str, pathlib.Path)):
        path = pathlib.Path(path)
        if not path.is_file():
            path = path.with_name(path.name + ".zip")
        if not path.is_file():
            return None  # which load will say better, as it will that a file is no archive
        return _version_in(path)
    position = path.tell()
    version = _version_in(path)
    path.seek(position)
    return version


def _version_in(file: Any) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.read(VERSION_ENTRY).decode() if VERSION_ENTRY in archive.namelist() else None
    except zipfile.BadZipFile:
        return None


def check_version(path: str | pathlib.Path | io.BufferedIOBase) -> None:
    """
    Before anything in the file is unpickled.

    :param path: of a saved model, or a file-like object
    :raises ValueError: if it was saved by a newer major version; a model saved by an older one loads, with a warning
    """
    version = read_version(path)
    if version is None:
        return
    theirs, ours = (int(each.split(".")[0]) for each in (version, VERSION))
    if theirs > ours:
        raise ValueError(
            f"The model was saved by sb3-grpo {version}, and this is {VERSION}, which cannot know what has changed: install "
            f"sb3-grpo {theirs} to load it, or take its weights alone with `load_actor`."
        )
    if theirs < ours:
        warnings.warn(
            f"The model was saved by sb3-grpo {version}, and this is {VERSION}: the changelog says what has changed since.",
            stacklevel=3,
        )
