"""An arm against rivals: toys whose answer is known."""

import pathlib

import numpy as np
import pytest
from rliable import metrics

from benchmarks import statistics, versus
from benchmarks.results import Suite, append_row
from benchmarks.statistics import (
    Estimate,
    chance_of_improvement,
    interquartile_curve,
    interquartile_ratio,
    median_ratio,
    performance_profile,
)
from benchmarks.tables import NO_ROWS
from benchmarks.tests.toys import toy_suite

RIVALS = {"PPO": ["ppo-default", "ppo"]}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_of_what_is_above_random_and_an_environment_takes_the_rival_it_has(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [30.0, 30.0], "Acrobot-v1": [50.0, 50.0]},
        "ppo": {"CartPole-v1": [], "Acrobot-v1": [30.0, 30.0]},  # 40 / 20
        "ppo-default": {"CartPole-v1": [20.0, 20.0], "Acrobot-v1": []},  # 20 / 10
    }
    suite = toy_suite(tmp_path, areas, random=10.0)
    perfect = ["2.00 (2.00 to 2.00)", "1.00 (1.00 to 1.00)"]  # seeds and environments are all alike
    line = versus.summary_table(suite, "grpo", RIVALS).splitlines()[2]
    assert cells(line) == ["PPO", "2 of 2", perfect[0], *perfect, "", ""]
    names = {"ours": ["grpo"], **RIVALS}
    assert cells(versus.environments_table(suite, names, "auc").splitlines()[2])[1:] == [
        "10.0", "30.0 (30.0 to 30.0)", "20.0 (20.0 to 20.0)",
    ]  # fmt: skip


def test_there_is_no_ratio_to_a_rival_that_does_not_learn_and_no_win_where_nobody_does(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [30.0, 31.0, 32.0], "Acrobot-v1": [9.0, 10.0, 11.0], "Pendulum-v1": [15.0] * 3},
        "ppo": {"CartPole-v1": [9.0, 10.0, 11.0], "Acrobot-v1": [8.0, 10.0, 11.0], "Pendulum-v1": [20.0] * 3},
    }
    suite = toy_suite(tmp_path, areas, random=10.0)
    line = cells(versus.summary_table(suite, "grpo", {"PPO": ["ppo"]}).splitlines()[2])
    assert line[1:] == ["1 of 2", "0.50 (0.50 to 0.50)", "0.50 (0.50 to 0.50)", "0.50 (0.00 to 1.00)", "", ""]
    line = cells(versus.outcomes_table(suite, "grpo", {"PPO": ["ppo"]}).splitlines()[2])
    assert line[1:] == ["area", "1, 0, 1", "Pendulum-v1 -5.00 (-5.00 to -5.00)"]


def test_steps_and_seeds_have_columns_where_they_differ(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [1.0, 1.0], "Acrobot-v1": [1.0]}}
    header = cells(versus.environments_table(toy_suite(tmp_path, areas), {"ours": ["grpo"]}, "auc").splitlines()[0])
    assert header == ["environment", "seeds", "random", "ours"]


def test_nothing_is_said_before_there_are_rows(tmp_path: pathlib.Path) -> None:
    suite = toy_suite(tmp_path, {"grpo": {"CartPole-v1": [1.0]}, "ppo": {"CartPole-v1": []}})
    assert versus.summary_table(suite, "grpo", {"PPO": ["ppo"]}) == NO_ROWS
    assert versus.outcomes_table(suite, "grpo", {"PPO": ["ppo"]}) == NO_ROWS


def test_intervals_draw_environments_anew_and_not_seeds_alone() -> None:
    alike = [(np.full(5, 2.0), np.ones(5))] * 20
    assert interquartile_ratio(alike) == (2.0, 2.0, 2.0)
    different = [(np.full(5, level), np.ones(5)) for level in np.linspace(1.0, 3.0, 20)]
    value, low, high = interquartile_ratio(different)
    # The middle half of the levels; the error of a trimmed mean of 20 uniform numbers with a deviation of 0.6
    assert value == pytest.approx(2.0) and 0.5 < high - low < 1.0


def test_ratios_are_averaged_as_rliable_does_it() -> None:
    ratios = np.random.default_rng(0).normal(size=(6, 3))
    pairs = [(2 * ratios[:, env], np.array([1.0, 3.0])) for env in range(3)]
    assert interquartile_ratio(pairs).value == pytest.approx(metrics.aggregate_iqm(ratios))


def test_the_median_of_ratios_may_be_never() -> None:
    never, soon = np.full(4, np.inf), np.full(4, 1.0)
    assert median_ratio([(soon, np.full(4, 2.0))] * 4) == (0.5, 0.5, 0.5)
    assert median_ratio([(soon, np.ones(4)), (never, np.ones(4)), (never, np.ones(4))]) == (np.inf, 1.0, np.inf)


def test_intervals_are_the_same_each_time_and_leave_the_generator_of_numpy_alone() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=4), rng.normal(2.0, size=4)) for _ in range(5)]
    np.random.seed(7)
    expected = np.random.random(3)
    np.random.seed(7)
    assert interquartile_ratio(pairs) == interquartile_ratio(pairs)
    np.testing.assert_array_equal(np.random.random(3), expected)


def test_an_environment_with_fewer_seeds_counts_as_much() -> None:
    few, many = np.full(5, 1.0), np.full(10, 3.0)
    assert interquartile_ratio([(few, np.ones(5)), (many, np.ones(10))]).value == pytest.approx(2.0)


def test_an_interval_is_the_same_however_many_values_are_aggregated_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(1.0, size=n), rng.normal(2.0, size=4)) for n in (5, 8, 9)]
    at_once = interquartile_ratio(pairs)
    assert at_once.low < at_once.value < at_once.high
    monkeypatch.setattr(statistics, "MAX_VALUES", 1_000_000)  # of 54 million
    assert interquartile_ratio(pairs) == at_once


def test_the_chance_of_improvement_is_that_of_rliable() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.integers(4, size=(2, 6, 3)).astype(float)  # with ties
    pairs = [(ours[:, env], theirs[:, env]) for env in range(3)]
    assert chance_of_improvement(pairs).value == pytest.approx(metrics.probability_of_improvement(ours, theirs))


@pytest.mark.parametrize(
    ("ratio", "less_is_better", "expected"),
    [
        pytest.param((1.2, 1.1, 1.3), False, "better", id="more"),
        pytest.param((0.8, 0.7, 0.9), False, "worse", id="less"),
        pytest.param((1.2, 0.9, 1.4), False, "level", id="neither"),
        pytest.param((0.4, 0.3, 0.5), True, "better", id="fewer seconds"),
        pytest.param((np.inf, 1.2, np.inf), True, "worse", id="never there"),
        pytest.param((1.2, 1.004, 1.4), False, "level", id="printed as (1.00 to 1.40)"),
        pytest.param((1.2, 1.006, 1.4), False, "better", id="printed as (1.01 to 1.40)"),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side(ratio: tuple[float, ...], less_is_better: bool, expected: str) -> None:
    assert versus.verdict(Estimate(*ratio), less_is_better) == expected


def test_the_claim_has_a_verdict_and_an_interval_for_each_measure(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0]}, "ppo": {"CartPole-v1": [20.0, 20.0]}}
    suite = toy_suite(tmp_path, areas, speeds={"grpo": 0.001, "ppo": 0.003})
    assert versus.claim(suite, "grpo", ["ppo"], "It is") == (
        "It is **better** by area, 2.00 (2.00 to 2.00), **better** by evaluation, 2.00 (2.00 to 2.00), "
        "**better** by seconds, 0.20 (0.20 to 0.20) and **better** by steps, 0.60 (0.60 to 0.60), in 1 environments."
    )
    assert versus.speed_claim(suite, "grpo", ["ppo"], "GRPO takes") == "GRPO takes 0.33 (0.33 to 0.33) times as long per step."


def test_the_claim_is_silent_about_seconds_and_steps_that_were_not_measured(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0]}, "ppo": {"CartPole-v1": [20.0, 20.0]}}
    assert versus.claim(toy_suite(tmp_path, areas), "grpo", ["ppo"], "It is") == (
        "It is **better** by area, 2.00 (2.00 to 2.00) and **better** by evaluation, 2.00 (2.00 to 2.00), "
        "in 1 environments."
    )


def test_a_loss_is_shown_with_the_interval_of_the_difference(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [20.0, 22.0], "Acrobot-v1": [20.0, 30.0], "Pendulum-v1": [50.0, 50.0]},
        "ppo": {"CartPole-v1": [30.0, 32.0], "Acrobot-v1": [26.0, 28.0], "Pendulum-v1": [49.999, 49.999]},
    }
    suite = toy_suite(tmp_path, areas, random=10.0)
    _, _, *lines = versus.losses_table(suite, "grpo", {"PPO": ["ppo"]}).splitlines()
    assert [cells(line) for line in lines] == [
        ["PPO", by, env, *numbers]
        for by in ("area", "evaluation")
        for env, *numbers in [
            ["CartPole-v1", "21.0", "31.0", "-10.0 (-12.0 to -8.00)"],
            ["Acrobot-v1", "25.0", "27.0", "-2.00 (-8.00 to 4.00)"],
        ]
    ]


def test_ahead_and_behind_need_an_interval_on_one_side_of_zero_and_three_seeds(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [20.0, 21.0, 22.0], "Acrobot-v1": [20.0, 25.0, 30.0], "Pendulum-v1": [50.0, 51.0, 52.0]},
        "ppo": {"CartPole-v1": [30.0, 31.0, 32.0], "Acrobot-v1": [26.0, 27.0, 28.0], "Pendulum-v1": [40.0, 41.0, 42.0]},
    }
    of_two_seeds = {arm: {"MountainCarContinuous-v0": [area, area]} for arm, area in (("grpo", 20.0), ("ppo", 30.0))}
    areas = {arm: {**each, **of_two_seeds[arm]} for arm, each in areas.items()}
    suite = toy_suite(tmp_path, areas, random=10.0)
    _, _, *lines = versus.outcomes_table(suite, "grpo", {"PPO": ["ppo"]}).splitlines()
    behind = "CartPole-v1 -10.0 (-11.3 to -8.67)"
    assert [cells(line) for line in lines] == [["PPO", by, "1, 1, 1", behind] for by in ("area", "evaluation")]


def test_an_environment_has_the_outcome_by_evaluation_and_then_another_one_by_area(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [20.0, 21.0, 22.0], "Acrobot-v1": [20.0, 25.0, 30.0], "Pendulum-v1": [9.0, 10.0, 11.0]},
        "ppo": {"CartPole-v1": [30.0, 31.0, 32.0], "Acrobot-v1": [26.0, 27.0, 28.0], "Pendulum-v1": [9.0, 10.0, 11.0]},
        "ppo-default": {"CartPole-v1": [20.0, 21.0], "Acrobot-v1": [20.0, 25.0, 30.0], "Pendulum-v1": [9.0, 10.0, 11.0]},
    }
    areas = {arm: {**each, "MountainCarContinuous-v0": [20.0, 21.0, 22.0]} for arm, each in areas.items()}
    suite = toy_suite(tmp_path, areas, random=10.0)
    for finished in suite.runs("ppo", "MountainCarContinuous-v0"):
        finished.row["eval_mean"] = "15.0"
    _, _, *lines = versus.outcomes_by_environment(suite, "grpo", {"PPO": ["ppo"], "defaults": ["ppo-default"]}).splitlines()
    assert [cells(line) for line in lines] == [
        ["CartPole-v1", "**behind**", "-"],  # too few seeds
        ["Acrobot-v1", "level", "level"],
        ["MountainCarContinuous-v0", "ahead / level", "level"],  # nobody learns in Pendulum
    ]


def test_outcomes_wait_for_three_seeds(tmp_path: pathlib.Path) -> None:
    suite = toy_suite(tmp_path, {"grpo": {"CartPole-v1": [20.0, 22.0]}, "ppo": {"CartPole-v1": [30.0, 32.0]}})
    assert versus.outcomes_table(suite, "grpo", {"PPO": ["ppo"]}) == versus.TOO_FEW_SEEDS


def test_scores_are_one_for_the_best_and_a_profile_is_the_share_of_runs_above(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [30.0, 50.0], "Acrobot-v1": [15.0, 15.0], "Pendulum-v1": [9.0, 11.0]},
        "ppo": {"CartPole-v1": [20.0, 20.0], "Acrobot-v1": [20.0, 20.0], "Pendulum-v1": [9.0, 11.0]},
    }
    suite = toy_suite(tmp_path, areas, random=10.0)
    scores = versus.scores_by_arm(suite, {"ours": ["grpo"], "PPO": ["ppo"]}, "auc")  # nobody learns in Pendulum
    assert [each.round(3).tolist() for each in scores["ours"]] == [[0.667, 1.333], [0.5, 0.5]]
    assert [each.round(3).tolist() for each in scores["PPO"]] == [[0.333, 0.333], [1.0, 1.0]]
    profile, low, high = performance_profile(scores["ours"], np.array([0.0, 0.6, 1.0, 2.0]))
    assert profile.tolist() == [1.0, 0.5, 0.25, 0.0]
    assert np.all(low <= profile) and np.all(profile <= high)
    assert low[1] == 0.0 and high[1] == 1.0  # both draws are of one environment


def test_curves_of_scores_end_at_one_for_the_best_and_leave_out_where_nobody_learns(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [30.0, 50.0], "Pendulum-v1": [-9.0, -11.0]},
        "ppo": {"CartPole-v1": [20.0, 20.0], "Pendulum-v1": [-9.0, -11.0]},
    }
    curves = versus.curves_by_arm(toy_suite(tmp_path, areas), {"ours": ["grpo"], "PPO": ["ppo"]}, n_points=10)
    (ours,), (theirs,) = curves["ours"], curves["PPO"]
    assert ours.shape == theirs.shape == (2, 10)
    assert ours[:, -1] == pytest.approx([0.75, 1.25]) and theirs[:, -1] == pytest.approx([0.5, 0.5])
    assert ours[0] == pytest.approx(1.5 * theirs[0])  # returns rise evenly, half as high again


def test_the_interquartile_curve_has_at_each_point_the_mean_of_the_middle_half_of_the_runs() -> None:
    many = np.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0], [99.0, 99.0]])
    assert interquartile_curve([many]).values.tolist() == [1.5, 11.5]
    one_of_each = interquartile_curve([many, np.full((1, 2), 5.0)])  # counts as four runs
    assert one_of_each.values.tolist() == [(2 + 5 * 3) / 4, (5 * 2 + 10 + 11) / 4]
    assert np.all(one_of_each.low <= one_of_each.values) and np.all(one_of_each.values <= one_of_each.high)


ONE_RIVAL = {"PPO": ["ppo"]}


def suite_of(tmp_path: pathlib.Path, ours: float, theirs: float) -> Suite:
    """Returns rise evenly from 0 to twice the area in 1,000 steps, and the evaluation is the area."""
    areas = {"grpo": {"CartPole-v1": [ours, ours]}, "ppo": {"CartPole-v1": [theirs, theirs]}}
    return toy_suite(tmp_path, areas, speeds={"grpo": 0.001, "ppo": 0.003})


def test_seconds_are_those_until_the_evaluation_of_the_rival(tmp_path: pathlib.Path) -> None:
    suite = suite_of(tmp_path, ours=40.0, theirs=20.0)
    race = versus.races(suite, "grpo", ["ppo"])["CartPole-v1"]
    # Half of PPO's way and a quarter of GRPO's, and a mean of 20 episodes of 10 steps lags 100 steps behind
    assert race.theirs.tolist() == [600 * 0.003] * 2 and race.ours.tolist() == [360 * 0.001] * 2
    assert str(versus.seconds_ratio(suite, "grpo", ["ppo"])) == "0.20 (0.20 to 0.20)"
    compiled = versus.compilation_table(suite, "grpo", ONE_RIVAL, (0, 1.44))
    assert compiled.endswith("| PPO | 0.20 (0.20 to 0.20) | 1.00 (1.00 to 1.00) |")
    assert str(versus.seconds_ratio_per_step(suite, "grpo", ["ppo"])) == "0.33 (0.33 to 0.33)"
    assert versus.seconds_table(suite, "grpo", ONE_RIVAL).endswith("| CartPole-v1 | 1,000 | 333; 0.20 |")


def test_a_run_that_does_not_get_there_counts_as_never(tmp_path: pathlib.Path) -> None:
    suite = suite_of(tmp_path, ours=5.0, theirs=20.0)
    assert str(versus.seconds_ratio(suite, "grpo", ["ppo"])) == "never (never to never)"
    assert versus.seconds_runs_table(suite, "grpo", ONE_RIVAL).endswith("| PPO | 1 | 0 of 2 | 2 of 2 |")


def test_a_run_of_the_rival_counts_with_its_budget_at_most(tmp_path: pathlib.Path) -> None:
    # The first run of PPO ends at 8, and the target is 20
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0]}, "ppo": {"CartPole-v1": [4.0, 36.0]}}
    suite = toy_suite(tmp_path, areas, speeds={"grpo": 0.001, "ppo": 0.003})
    race = versus.races(suite, "grpo", ["ppo"])["CartPole-v1"]
    assert race.theirs.tolist() == [1000 * 0.003, 380 * 0.003] and race.n_there == 1


def test_the_median_is_known_while_less_than_half_of_the_runs_do_not_get_there(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0, 5.0]}, "ppo": {"CartPole-v1": [20.0, 20.0, 20.0]}}
    suite = toy_suite(tmp_path, areas, speeds={"grpo": 0.001, "ppo": 0.003})
    assert str(versus.seconds_ratio(suite, "grpo", ["ppo"])) == "0.20 (0.20 to never)"


def test_there_is_no_race_against_a_rival_that_does_not_learn(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [40.0, 40.0]}, "ppo": {"CartPole-v1": [9.0, 11.0]}}
    suite = toy_suite(tmp_path, areas, random=10.0, speeds={"grpo": 0.001, "ppo": 0.003})
    assert versus.races(suite, "grpo", ["ppo"]) == {}


def test_speeds_are_those_of_one_session(tmp_path: pathlib.Path) -> None:
    suite = suite_of(tmp_path, ours=4.0, theirs=2.0)
    settings = suite.runs("ppo", "CartPole-v1")[0].run.settings_hash()
    row = {"session": 2, "env": "CartPole-v1", "settings_hash": settings, "seconds_per_step": 50.0}
    append_row(tmp_path / "speed.csv", row, list(row))
    assert versus.seconds_per_step(suite, ("grpo", "ppo"), "CartPole-v1") == {"grpo": 0.001, "ppo": 0.003}
    assert versus.seconds_per_step(suite, ("ppo",), "CartPole-v1") == {"ppo": 50.0}
