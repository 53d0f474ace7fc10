"""The report: estimates of toys whose answer is known, and pages that say what the rows say."""

import functools
import pathlib
import re
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import report, tables
from benchmarks.figures import draw_curves
from benchmarks.results import RESULTS, Suite
from benchmarks.statistics import difference_of_means, interval_of_means, median
from benchmarks.tests.toys import SMALL, toy_suite

BETTER = {"CartPole-v1": [30.0, 31.0, 32.0], "Acrobot-v1": [300.0, 310.0, 320.0]}
WORSE = {"CartPole-v1": [10.0, 11.0, 12.0], "Acrobot-v1": [100.0, 110.0, 120.0]}


@pytest.mark.parametrize("group", report.GROUPS)
def test_a_group_of_environments_is_a_part_of_the_suite(group: str) -> None:
    whole, part = Suite("proof"), Suite("proof", envs=report.GROUPS[group])
    assert set(part.timesteps) == set(report.GROUPS[group])
    assert part.timesteps.items() < whole.timesteps.items()


def test_a_median_has_an_interval_around_it() -> None:
    assert median(np.array([2.0, 2.0, 2.0])) == (2.0, 2.0, 2.0)
    value, low, high = median(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert 1.0 <= low < value == 3.0 < high <= 100.0


def test_rows_of_other_settings_do_not_count(tmp_path: pathlib.Path) -> None:
    first = toy_suite(tmp_path, {"grpo": WORSE, "ppo": WORSE}).runs("grpo", "CartPole-v1")[0]
    rows = tmp_path / "toy.csv"
    rows.write_text(rows.read_text().replace(first.run.settings_hash(), "00000000"))
    toy = {"arms": ["grpo"], "seeds": [100], "timesteps": {"CartPole-v1": 1000}}
    assert Suite("toy", tmp_path, {**SMALL, "suites": {"toy": toy}}).runs("grpo", "CartPole-v1") == []


def test_the_figure_of_curves_shows_each_arm_that_an_environment_has_and_repeats(tmp_path: pathlib.Path) -> None:
    suite = toy_suite(tmp_path, {"grpo": BETTER, "ppo": {**WORSE, "Acrobot-v1": []}})
    for name in ("one", "two"):
        draw_curves(suite, {"ours": ["grpo"], "PPO, defaults": ["ppo"], "absent": ["ppo-default"]}, tmp_path / f"{name}.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    lines = [path for path in re.findall("<path[^>]*>", drawn) if "fill: none" in path and "stroke-width: 1.6" in path]
    ours, theirs = ([line for line in lines if colour in line] for colour in ("#2b83d6", "#d9730d"))
    assert len(ours) == 3 and len(theirs) == 2  # in two panels and in one, and in the legend
    assert ["dasharray" in line for line in ours + theirs] == [False] * 3 + [True] * 2


def test_equal_scores_do_not_differ_whatever_the_number_of_seeds() -> None:
    ours, theirs = np.full(8, 994.77), np.full(5, 994.77)
    assert ours.mean() != theirs.mean()
    assert tuple(difference_of_means(ours, theirs)) == (0.0, 0.0, 0.0)


def test_the_interval_of_a_mean_over_seeds_is_narrower_than_their_range() -> None:
    returns = np.random.default_rng(0).normal(size=(100, 3))
    low, high = interval_of_means(returns)
    assert high - low == pytest.approx(2 * 1.96 / 10, rel=0.2)


def test_without_rows_every_table_says_so(tmp_path: pathlib.Path) -> None:
    contents = report.sections(tmp_path)
    assert {text() for text in contents.values()} == {tables.NO_ROWS}


def test_places_of_a_page_are_filled() -> None:
    page = "a\n<!-- report: one -->\nold\n<!-- end -->\nb\n<!-- report: two -->\n<!-- end -->\n"
    contents = {"one": lambda: "1", "two": lambda: "2"}
    filled = "a\n<!-- report: one -->\n1\n<!-- end -->\nb\n<!-- report: two -->\n2\n<!-- end -->\n"
    assert report.fill(page, contents) == report.fill(filled, contents) == filled


@pytest.fixture(scope="module")
def contents() -> dict[str, Callable[[], str]]:
    """The contents of all places, each made once."""
    return {name: functools.cache(make) for name, make in report.sections(RESULTS).items()}


@pytest.mark.xdist_group("report")  # one process, so that pages share contents
@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_the_rows_say(page: pathlib.Path, contents: dict[str, Callable[[], str]]) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- report: " in text
    assert report.fill(text, contents) == text, "the page is old, run: python -m benchmarks.report"
