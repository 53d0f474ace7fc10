"""The page of variants gives the objectives of papers as arguments, which are accepted; its results are of these."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.matrix import load_matrix
from sb3_grpo import GRPO

PAGE = (Path(__file__).parents[1] / "docs" / "variants.md").read_text(encoding="utf-8")
PAPERS = [eval(arguments) for arguments in re.findall(r"^\| .*? \| `(dict\(.*?\))` \| ", PAGE, re.MULTILINE)]
CASES = load_matrix()["suites"]["variants"]["cases"]


@pytest.mark.parametrize("arguments", PAPERS, ids=str)
def test_the_arguments_of_a_paper_are_accepted(arguments: dict[str, Any]):
    model = GRPO("MlpPolicy", "CartPole-v1", **arguments)
    for name, value in arguments.get("rollout_buffer_kwargs", {}).items():
        assert getattr(model.rollout_buffer, name) == value
    for name in ("clip_range", "clip_range_high"):
        if name in arguments:
            assert getattr(model, name)(1.0) == arguments[name]


@pytest.mark.parametrize("name", [name for name in CASES if name != "polyak"])
def test_a_variant_that_was_run_is_that_of_a_paper_on_the_page(name: str):
    settings = {
        key: value for key, value in CASES[name]["set"].items() if key not in ("n_envs", "learning_rate", "group_size")
    }
    if settings["rollout_buffer_class"] == "kernel":  # the default
        del settings["rollout_buffer_class"]
    assert settings in PAPERS
