"""What saving a model needs beyond Stable-Baselines3: a file format, complete files, and the state that continues a run."""

import io
import json
import os
import pathlib
import random
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th

VERSION = pathlib.Path(__file__).with_name("version.txt").read_text(encoding="utf-8").strip()
#: Version of the file format. It increases when files of earlier formats can no longer be loaded.
FORMAT = 5
#: Name of the archive member that holds the format.
FORMAT_ENTRY = "_sb3_grpo_format"


@dataclass
class RunState:
    """
    Everything that continuing a run needs beyond what SB3 saves.

    :param buffer_class: Full name of the class of the rollout buffer. The class itself, which may be gone when the file is
        loaded, is saved once, among the arguments of the model, where ``custom_objects`` can replace it
    :param buffer: State of the rollout buffer
    :param kl_penalty: State of the KL penalty
    :param random: State of the random generators
    """

    buffer_class: str
    buffer: dict[str, Any]
    kl_penalty: dict[str, Any]
    random: dict[str, Any]


def full_name(of: type) -> str:
    """
    :param of: A class
    :return: Its name with that of its module
    """
    return f"{of.__module__}.{of.__qualname__}"


def random_state() -> dict[str, Any]:
    """
    :return: State of the global random generators of Python, numpy and torch
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": th.get_rng_state(),
        "cuda": th.cuda.get_rng_state_all() if th.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """
    :param state: State from :func:`random_state`; the states of missing GPUs are left out
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    th.set_rng_state(state["torch"])
    if th.cuda.is_available() and len(state["cuda"]) == th.cuda.device_count():
        th.cuda.set_rng_state_all(state["cuda"])


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """
    Write a file such that at any moment either the old or the new content is complete under its name.

    :param path: Path of the file; missing folders are created
    :param content: New content
    """
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


def write_model(path: str | pathlib.Path | io.BufferedIOBase, archive: io.BytesIO) -> None:
    """
    Write a saved model, with the file format.

    :param path: Path of the file (``.zip`` is added if it has no suffix), or a file-like object
    :param archive: The model
    """
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(FORMAT_ENTRY, json.dumps({"format": FORMAT, "version": VERSION}))
    if isinstance(path, (str, pathlib.Path)):
        path = pathlib.Path(path)
        replace_file(path if path.suffix else path.with_name(f"{path.name}.zip"), archive.getvalue())
    else:
        path.write(archive.getvalue())


def check_format(path: str | pathlib.Path | io.BufferedIOBase) -> None:
    """
    Refuse files that this version cannot load, before anything in them is unpickled.

    :param path: Path of a saved model, or a file-like object, whose position does not change
    :raises ValueError: If the file is of another algorithm, or of another format
    """
    if isinstance(path, (str, pathlib.Path)):
        candidates = [pathlib.Path(path), pathlib.Path(f"{path}.zip")]
        existing = [each for each in candidates if each.is_file()]
        if not existing:
            return  # SB3's error for missing files is clear
        _check_archive(existing[0], repr(str(existing[0])), repr(str(existing[0])))
    else:
        position = path.tell()
        try:
            _check_archive(path, "The file", "file")
        finally:
            path.seek(position)


def _check_archive(file: Any, name: str, argument: str) -> None:
    """
    :param file: Path or file-like object
    :param name: Name of the file in messages
    :param argument: The file as an argument in messages
    :raises ValueError: If the file is of another algorithm, or of another format
    """
    weights_only = f"To use its policy, make a model and copy the weights: `load_actor(model, {argument})`."
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if FORMAT_ENTRY in names:
                saved = json.loads(archive.read(FORMAT_ENTRY))
                if saved["format"] != FORMAT:
                    raise ValueError(
                        f"{name} was saved by sb3-grpo {saved['version']} in file format {saved['format']}; this is sb3-grpo "
                        f"{VERSION}, which loads format {FORMAT}. {weights_only}"
                    )
            elif "data" in names:
                data = archive.read("data")
                if "vf_coef" in json.loads(data):
                    made_by, advice = "an algorithm with a critic, such as PPO", weights_only
                elif b"sb3_grpo" in data:
                    made_by, advice = "sb3-grpo in file format 1", weights_only
                else:
                    made_by, advice = "another algorithm", "Load it with the class that saved it."
                raise ValueError(f"{name} was saved by {made_by}, so GRPO.load cannot load it. {advice}")
    except zipfile.BadZipFile:
        return  # SB3's error for other files is clear
