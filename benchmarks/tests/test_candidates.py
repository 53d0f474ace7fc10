"""The score of candidates for the default settings."""

import pathlib

import numpy as np
import pytest

from benchmarks.candidates import REFERENCE, changes_of, effects, score, table
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


def test_changes_are_named_with_their_place():
    base = {"n_envs": 8, "policy_kwargs": {"a": 1}}
    assert changes_of({"n_envs": 8, "n_steps": 64, "policy_kwargs": {"a": 2, "b": 3}}, base) == {
        "n_steps=64",
        "policy_kwargs.a=2",
        "policy_kwargs.b=3",
    }


def test_the_effect_of_a_change_is_the_difference_of_two_halves():
    levels = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 1], [1, 1]], dtype=float)
    scores = np.array([1.0, 2.0, 4.0, 5.0, 1.2, 1.8, 4.2, 4.8])[:, None]
    found, errors = effects(levels, scores)
    assert found[:, 0] == pytest.approx([scores[1::2].mean() - scores[::2].mean(), 3.0])
    # Five degrees of freedom; the difference of two means of four each
    residuals = np.array([-0.1, 0.1, -0.1, 0.1, 0.1, -0.1, 0.1, -0.1])
    assert errors[:, 0] == pytest.approx(np.sqrt((residuals**2).sum() / 5 * (1 / 4 + 1 / 4)))
