"""Comparisons with several rivals: toys whose answer is known."""

import pathlib

from benchmarks import versus
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
    perfect = ["2.00 (2.00 to 2.00)", "1.00 (1.00 to 1.00)"]
    assert cells(versus.summary_table(suite, "grpo", RIVALS).splitlines()[2]) == ["PPO", "2 of 2", *perfect, *perfect]
    names = {"ours": ["grpo"], **RIVALS}
    assert cells(versus.environments_table(suite, names, "auc").splitlines()[2])[2:] == [
        "2", "10.0", "30.0 (30.0 to 30.0)", "20.0 (20.0 to 20.0)",
    ]  # fmt: skip


def test_there_is_no_ratio_to_a_rival_that_does_not_learn_and_no_win_where_nobody_does(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [30.0, 32.0], "Acrobot-v1": [9.0, 11.0], "Pendulum-v1": [15.0, 15.0]},
        "ppo": {"CartPole-v1": [9.0, 11.0], "Acrobot-v1": [8.0, 11.0], "Pendulum-v1": [20.0, 20.0]},
    }
    suite = toy_suite(tmp_path, areas, random=10.0)
    line = cells(versus.summary_table(suite, "grpo", {"PPO": ["ppo"]}).splitlines()[2])
    assert line[1:4] == ["1 of 2", "0.50 (0.50 to 0.50)", "0.50 (0.50 to 0.50)"]
    assert cells(versus.wins_table(suite, "grpo", {"PPO": ["ppo"]}).splitlines()[2])[1:] == ["1 of 2"] * 3


def test_nothing_is_said_before_there_are_rows(tmp_path: pathlib.Path) -> None:
    suite = toy_suite(tmp_path, {"grpo": {"CartPole-v1": [1.0]}, "ppo": {"CartPole-v1": []}})
    assert versus.summary_table(suite, "grpo", {"PPO": ["ppo"]}) == versus.NO_ROWS
    assert versus.wins_table(suite, "grpo", {"PPO": ["ppo"]}) == versus.NO_ROWS
