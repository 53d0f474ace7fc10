"""The score of candidates for the default settings."""

import pathlib

import numpy as np
import pytest

from benchmarks.candidates import REFERENCE, score, table
from benchmarks.results import Suite, read_rows
from benchmarks.tests.toys import toy_suite

REFERENCES = {env: {"random": "-10", "area": "10", "evaluation": "10"} for env in ("CartPole-v1", "Acrobot-v1")}


@pytest.mark.parametrize(
    ("area", "evaluation", "expected"),
    [(0.0, -10.0, 0.0), (100.0, 200.0, 1.0), (50.0, 200.0, 0.75), (500.0, 1000.0, 2.0), (-100.0, -10.0, -0.5)],
    ids=["random actions", "the reference", "half of its area", "at most two", "worse than random actions"],
)
def test_a_score_is_the_mean_of_both_above_random_over_the_reference(area: float, evaluation: float, expected: float):
    reference = {"random": "0.0", "area": "100.0", "evaluation": "210.0"}
    shifted = {"random": "-10.0", "area": "90.0", "evaluation": "200.0"}
    assert score(np.array([area - 10.0]), np.array([evaluation]), shifted) == pytest.approx(
        score(np.array([area]), np.array([evaluation + 10.0]), reference)
    )
    assert score(np.array([area]), np.array([evaluation + 10.0]), reference) == pytest.approx(expected)


def test_the_best_candidate_comes_first_and_an_unfinished_one_has_no_score(tmp_path: pathlib.Path):
    areas = {
        "ppo": {"CartPole-v1": [0.0, 0.0], "Acrobot-v1": [0.0, 0.0]},
        "grpo": {"CartPole-v1": [10.0, 10.0], "Acrobot-v1": [0.0, 20.0]},
        "ppo-default": {"CartPole-v1": [20.0, 20.0], "Acrobot-v1": []},
    }
    _, _, *lines = table(toy_suite(tmp_path, areas), REFERENCES).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[0] for line in cells] == ["grpo", "ppo", "ppo-default"]
    assert cells[0][1] == "2" and cells[0][2].startswith("1.0") and cells[0][3:] == ["1.00", "1.00"]
    assert cells[1][2].startswith("0.5") and cells[1][3:] == ["0.50", "0.50"]
    assert cells[2][1:] == ["0", "", "1.50", ""]


def test_the_reference_has_the_environments_and_budgets_of_the_candidates():
    references = {row["env"]: int(row["timesteps"]) for row in read_rows(REFERENCE)}
    assert references == Suite("candidates").timesteps
