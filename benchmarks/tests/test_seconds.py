"""Seconds until an arm is as good as the last policies of a rival: toys whose answer is known."""

import pathlib

from benchmarks import seconds
from benchmarks.results import Suite, append_row
from benchmarks.tests.toys import toy_suite

RIVALS = {"PPO": ["ppo"]}


def suite_of(tmp_path: pathlib.Path, ours: float, theirs: float) -> Suite:
    """Returns rise evenly from 0 to twice the area in 1,000 steps, and the evaluation is the area."""
    areas = {"grpo": {"CartPole-v1": [ours, ours]}, "ppo": {"CartPole-v1": [theirs, theirs]}}
    return toy_suite(tmp_path, areas, speeds={"grpo": 0.001, "ppo": 0.003})


def test_seconds_are_those_until_the_evaluation_of_the_rival(tmp_path: pathlib.Path) -> None:
    suite = suite_of(tmp_path, ours=40.0, theirs=20.0)
    race = seconds.races(suite, "grpo", ["ppo"])["CartPole-v1"]
    # Half of PPO's way and a quarter of GRPO's, and a mean of 20 episodes of 10 steps lags 100 steps behind
    assert race.theirs.tolist() == [600 * 0.003] * 2 and race.ours.tolist() == [360 * 0.001] * 2
    assert str(seconds.ratio(suite, "grpo", ["ppo"])) == "0.20 (0.20 to 0.20)"
    assert str(seconds.ratio_per_step(suite, "grpo", ["ppo"])) == "0.33 (0.33 to 0.33)"
    assert seconds.environments_table(suite, "grpo", RIVALS).endswith("| CartPole-v1 | 1,000 | 333; 0.20 |")


def test_a_run_that_does_not_get_there_counts_as_never(tmp_path: pathlib.Path) -> None:
    suite = suite_of(tmp_path, ours=5.0, theirs=20.0)
    assert str(seconds.ratio(suite, "grpo", ["ppo"])) == "never (never to never)"
    assert seconds.runs_table(suite, "grpo", RIVALS).endswith("| PPO | 1 | 0 of 2 | 2 of 2 |")


def test_a_run_of_the_rival_counts_with_its_budget_at_most(tmp_path: pathlib.Path) -> None:
    # The first run of PPO ends at 8, and the target is 20
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0]}, "ppo": {"CartPole-v1": [4.0, 36.0]}}
    suite = toy_suite(tmp_path, areas, speeds={"grpo": 0.001, "ppo": 0.003})
    race = seconds.races(suite, "grpo", ["ppo"])["CartPole-v1"]
    assert race.theirs.tolist() == [1000 * 0.003, 380 * 0.003] and race.n_there == 1


def test_the_median_is_known_while_less_than_half_of_the_runs_do_not_get_there(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0, 5.0]}, "ppo": {"CartPole-v1": [20.0, 20.0, 20.0]}}
    suite = toy_suite(tmp_path, areas, speeds={"grpo": 0.001, "ppo": 0.003})
    assert str(seconds.ratio(suite, "grpo", ["ppo"])) == "0.20 (0.20 to never)"


def test_there_is_no_race_against_a_rival_that_does_not_learn(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0]}, "ppo": {"CartPole-v1": [9.0, 11.0]}}
    suite = toy_suite(tmp_path, areas, random=10.0, speeds={"grpo": 0.001, "ppo": 0.003})
    assert seconds.races(suite, "grpo", ["ppo"]) == {}


def test_speeds_are_those_of_one_session(tmp_path: pathlib.Path) -> None:
    suite = suite_of(tmp_path, ours=4.0, theirs=2.0)
    settings = suite.runs("ppo", "CartPole-v1")[0].run.settings_hash()
    row = {"session": 2, "env": "CartPole-v1", "settings_hash": settings, "seconds_per_step": 50.0}
    append_row(tmp_path / "speed.csv", row, list(row))
    assert seconds.seconds_per_step(suite, ("grpo", "ppo"), "CartPole-v1") == {"grpo": 0.001, "ppo": 0.003}
    assert seconds.seconds_per_step(suite, ("ppo",), "CartPole-v1") == {"ppo": 50.0}
