"""The command that reports what GRPO learns: it must count right, and not mix up runs."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from benchmarks.curves import TrainingCurve
from benchmarks.learning import Case, append_row, defaults, passed, read_rows, table
from sb3_grpo import GRPO

ROOT = Path(__file__).parents[1]
CASE = Case("CartPole-v1", 1, 1000, threshold=100.0, required=2, seeds=(0, 1, 2))


def row(seed: int, steps_to_threshold: str = "", eval_mean: float = 0.0, case: Case = CASE) -> dict[str, str]:
    figures = {"eval_mean": str(eval_mean), "auc": "50", "steps_per_second": "1000", "steps_to_threshold": steps_to_threshold}
    return {"case": "toy", "seed": str(seed), "settings_hash": case.settings_hash(), **figures}


@pytest.mark.parametrize(
    ("judged_by", "reached", "missed"),
    [
        pytest.param("training", row(0, "500"), row(0, "", eval_mean=500.0), id="by training returns"),
        pytest.param("evaluation", row(0, "", eval_mean=100.0), row(0, "500", eval_mean=99.9), id="by evaluation"),
        pytest.param("failure", row(0, "", eval_mean=500.0), row(0, "500"), id="by not learning"),
    ],
)
def test_a_run_is_judged_by_what_its_case_names(judged_by: str, reached: dict[str, str], missed: dict[str, str]):
    case = replace(CASE, judged_by=judged_by)
    assert passed(case, reached)
    assert not passed(case, missed)


def test_the_table_says_whether_enough_seeds_passed():
    two_of_three = [row(0, "500"), row(1, "700"), row(2)]
    text, everything = table({"toy": CASE}, two_of_three)
    assert everything
    assert "2 of 3" in text
    assert "700" in text  # the median, a run that never got there counting as the latest
    assert not table({"toy": replace(CASE, required=3)}, two_of_three)[1]


@pytest.mark.parametrize(
    "strangers",
    [
        pytest.param([row(seed, "500") for seed in (7, 8, 9)], id="seeds that are not reported"),
        pytest.param(
            [row(seed, "500", case=replace(CASE, settings={"gamma": 0.9})) for seed in (0, 1, 2)], id="other settings"
        ),
        pytest.param([{**row(seed, "500"), "case": "another"} for seed in (0, 1, 2)], id="another case"),
    ],
)
def test_runs_of_other_seeds_settings_and_cases_do_not_count(strangers: list[dict[str, str]]):
    text, everything = table({"toy": CASE}, strangers)
    assert not everything
    assert "not run" in text


def test_a_changed_default_makes_rows_stale(monkeypatch: pytest.MonkeyPatch):
    before = CASE.settings_hash()
    assert replace(CASE, settings={"gamma": 0.99}).settings_hash() == before  # the default, spelt out
    assert replace(CASE, settings={"gamma": 0.9}).settings_hash() != before
    monkeypatch.setattr(learning, "defaults", lambda callable_class: {**defaults(callable_class), "ridge": 1.0})
    assert CASE.settings_hash() != before


def test_rows_come_back_from_the_file_as_they_went_in(tmp_path: Path):
    path = tmp_path / "folder" / "rows.csv"
    assert read_rows(path) == []
    rows = [{field: f"{field} {i}, with a comma" for field in learning.FIELDS} for i in range(2)]
    for each in rows:
        append_row(path, each, learning.FIELDS)
    assert read_rows(path) == rows


def test_the_area_is_the_mean_over_the_budget_of_the_recent_return():
    curve = TrainingCurve()
    # 20 episodes of return 10 end at once, 20 of return 30 half-way through the budget
    curve.steps = [1] * 20 + [500] * 20
    curve.returns = [10.0] * 20 + [30.0] * 20
    # 200 samples at 5, 10, ..., 1000: 99 see return 10, 101 see return 30
    assert curve.area(1000) == pytest.approx((99 * 10 + 101 * 30) / 200)
    assert curve.windows()[[0, -1]] == pytest.approx([10.0, 30.0])
    assert len(curve.windows()) == 21


def test_a_run_reports_what_it_trained():
    figures = learning.run("toy", replace(CASE, timesteps=256, settings=dict(n_steps=128, n_epochs=1)), seed=3)
    assert set(figures) == set(learning.FIELDS)
    assert (figures["case"], figures["seed"], figures["timesteps"]) == ("toy", 3, 256)
    assert 5 < float(figures["eval_mean"]) <= 500


def test_the_readme_shows_what_the_rows_say():
    text, everything = table(learning.CASES, read_rows(learning.CSV))
    assert everything
    assert text in (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")


CASES_AND_VARIANTS = {**learning.CASES, **learning.VARIANTS}


@pytest.mark.parametrize("name", CASES_AND_VARIANTS)
def test_every_case_names_seeds_enough_to_pass(name: str):
    case = CASES_AND_VARIANTS[name]
    assert 0 < case.required <= len(set(case.seeds))


VARIANTS_PAGE = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
PAPERS = [eval(arguments) for arguments in re.findall(r"^\| .*? \| `(dict\(.*?\))` \| ", VARIANTS_PAGE, re.MULTILINE)]


@pytest.mark.parametrize("arguments", PAPERS, ids=str)
def test_the_arguments_of_a_paper_are_accepted(arguments: dict[str, Any]):
    model = GRPO("MlpPolicy", "CartPole-v1", **arguments)
    for name, value in arguments.get("rollout_buffer_kwargs", {}).items():
        assert getattr(model.rollout_buffer, name) == value
    for name in ("clip_range", "clip_range_high"):
        if name in arguments:
            assert getattr(model, name)(1.0) == arguments[name]


def test_the_docs_show_the_variants_that_were_run_and_what_came_of_them():
    text, everything = table(learning.VARIANTS, read_rows(learning.CSV))
    assert everything
    assert text in VARIANTS_PAGE


@pytest.mark.parametrize("name", [name for name in learning.VARIANTS if name != "polyak"])
def test_a_variant_that_was_run_is_that_of_a_paper_in_the_docs(name: str):
    settings = {**learning.VARIANTS[name].settings}
    del settings["learning_rate"], settings["group_size"]
    if settings["rollout_buffer_class"] == "kernel":  # the default
        del settings["rollout_buffer_class"]
    assert settings in PAPERS
