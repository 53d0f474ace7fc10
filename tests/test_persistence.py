"""Writing a file, which is complete at any moment, and its format. ``test_saving.py`` tests what files keep."""

import io
import json
import os
import pathlib
import random
import signal
import time
import zipfile
from typing import Any

import numpy as np
import pytest
import torch as th
from helpers import make_model, same, weights

from sb3_grpo import GRPO, __version__, load_actor
from sb3_grpo.persistence import FORMAT, replace_file

# --- replacing a file ---


def test_a_file_is_replaced_and_missing_folders_are_made(tmp_path: pathlib.Path):
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"old", b"new and longer", b""):
        replace_file(path, content)
        assert path.read_bytes() == content
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("function", "error"), [("fsync", OSError("no space left")), ("replace", KeyboardInterrupt())])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_beside_it(
    function: str, error: BaseException, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(type(error)):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path: pathlib.Path):
    path, size = tmp_path / "file", 2_000_000
    for attempt in range(20):
        replace_file(path, bytes(size))
        pid = os.fork()
        if pid == 0:
            try:
                while True:
                    replace_file(path, b"1" * size)
            finally:
                os._exit(1)
        while path.read_bytes()[0] == 0:  # until the first write is complete
            time.sleep(0.001)
        time.sleep(0.0005 * attempt)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert path.read_bytes() == b"1" * size


def test_links_are_followed_and_permissions_kept(tmp_path: pathlib.Path):
    target, link = tmp_path / "run3", tmp_path / "latest"
    replace_file(target, b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640


# --- saving a model ---


def test_models_are_saved_where_sb3_would_save_them(tmp_path: pathlib.Path):
    model = make_model()
    model.save(tmp_path / "new folder" / "model")
    model.save(str(tmp_path / "model.v1"))
    stream = io.BytesIO()
    model.save(stream)
    stream.seek(0)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {"new folder/model.zip", "model.v1"}
    for source in (tmp_path / "new folder" / "model", tmp_path / "model.v1", stream):
        assert same(weights(GRPO.load(source, device="cpu")), weights(model))


def test_a_save_that_fails_leaves_the_old_file_and_the_model_as_it_was(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_model().learn(64)
    model.save(tmp_path / "model.zip")
    old, attributes = (tmp_path / "model.zip").read_bytes(), dict(vars(model))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(th, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        model.save(tmp_path / "model.zip")
    assert (tmp_path / "model.zip").read_bytes() == old
    assert vars(model) == attributes


# --- the format ---


def changed_format(path: pathlib.Path, entry: dict[str, Any] | int | None) -> pathlib.Path:
    """A copy of a saved model with another format entry, or without one."""
    copy = path.with_name("copy.zip")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "data":
                data = json.loads(content)
                del data["_sb3_grpo_format"]
                content = json.dumps(data if entry is None else {**data, "_sb3_grpo_format": entry}).encode()
            target.writestr(name, content)
    return copy


def test_a_file_says_which_version_saved_it_in_which_format(tmp_path: pathlib.Path):
    make_model().save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert json.loads(archive.read("data"))["_sb3_grpo_format"] == {"format": FORMAT, "version": __version__}


@pytest.mark.parametrize("entry", [FORMAT, None], ids=["also a number in the data", "nothing in the data"])
def test_the_first_files_of_the_format_have_it_in_an_entry_of_the_archive(entry: Any, tmp_path: pathlib.Path):
    model = make_model().learn(64)
    model.save(tmp_path / "model.zip")
    first = changed_format(tmp_path / "model.zip", entry)
    with zipfile.ZipFile(first, "a") as archive:
        archive.writestr("_sb3_grpo_format", json.dumps({"format": FORMAT, "version": "0.1.0"}))
    for name, loaded in GRPO.load(first).policy.state_dict().items():
        assert th.equal(loaded, model.policy.state_dict()[name])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        *(
            pytest.param(
                dict(format=each, version=version),
                rf"saved by sb3-grpo {version} in file format {each}; .* which loads format {FORMAT}\. .*`load_actor\(model, ",
                id=name,
            )
            for name, each, version in (("earlier format", FORMAT - 1, "1.0"), ("later format", FORMAT + 1, "9.0"))
        ),
        pytest.param(None, "saved by another algorithm, so", id="no format"),
    ],
)
def test_a_file_of_another_format_is_refused_before_anything_is_unpickled(
    entry: Any, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    model = make_model().learn(64)
    model.save(tmp_path / "model.zip")
    other = changed_format(tmp_path / "model.zip", entry)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object was unpickled")

    monkeypatch.setattr("cloudpickle.loads", refuse)
    with pytest.raises(ValueError, match=message):
        GRPO.load(other)
    # The way out that the message names.
    fresh = make_model()
    load_actor(fresh, other)
    assert same(weights(fresh), weights(model))


# --- random numbers ---


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(th.rand(()))]


def test_loading_a_model_to_predict_restores_no_random_state(tmp_path: pathlib.Path):
    make_model(seed=None).save(tmp_path / "model")
    drawn = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), th.manual_seed(seed)
        loaded = GRPO.load(tmp_path / "model", device="cpu")
        loaded.predict(np.zeros(3), deterministic=True)
        drawn.append(draw())
    assert all(first != second for first, second in zip(*drawn, strict=True))
