"""The page of variants gives the objectives of papers as arguments, which are accepted."""

import re
from pathlib import Path
from typing import Any

import pytest

from sb3_grpo import GRPO

PAGE = (Path(__file__).parents[1] / "docs" / "variants.md").read_text(encoding="utf-8")
PAPERS = [eval(arguments) for arguments in re.findall(r"^\| .*? \| `(dict\(.*?\))` \| ", PAGE, re.MULTILINE)]


@pytest.mark.parametrize("arguments", PAPERS, ids=str)
def test_the_arguments_of_a_paper_are_accepted(arguments: dict[str, Any]):
    model = GRPO("MlpPolicy", "CartPole-v1", **arguments)
    for name, value in arguments.get("rollout_buffer_kwargs", {}).items():
        assert getattr(model.rollout_buffer, name) == value
    for name, value in arguments.get("objective", {}).items():
        assert getattr(model.objective, name) == value
