"""The command that reports what the zoo trains: it must count right, and run what it says."""

from pathlib import Path

import pytest

from benchmarks import zoo
from benchmarks.learning import read_rows
from benchmarks.zoo import Run, table

DOCS = Path(__file__).parents[1] / "docs" / "zoo.md"


def row(seed: int, evaluation: float, env: str = "CartPole-v1") -> dict[str, str]:
    run = Run(env, seed)
    figures = {"timesteps": "100352", "eval_mean": str(evaluation), "wall_clock": "10"}
    return {"env": env, "seed": str(seed), "settings_hash": run.settings_hash(), **figures}


def test_the_table_counts_the_seeds_that_reached_the_target():
    text = table([row(110, 500.0), row(111, 499.9), row(112, 500.0)])
    assert "| 2 of 3 | 500.0 (500.0, 499.9, 500.0) |" in text


@pytest.mark.parametrize(
    "stranger",
    [row(7, 500.0), {**row(110, 500.0), "settings_hash": "another"}, row(110, 500.0, env="Acrobot-v1")],
    ids=["another seed", "other settings", "another environment"],
)
def test_rows_of_other_seeds_and_settings_do_not_count(stranger: dict[str, str]):
    text = table([row(110, 500.0), stranger])
    assert "| CartPole-v1 | 100,352 | 500 | 1 of 1 |" in text


def test_what_is_overwritten_makes_another_run():
    trial = Run("CartPole-v1", 110, ("gamma:0.9",))
    assert Run("CartPole-v1", 110).settings_hash() != trial.settings_hash()
    rows = [row(110, 500.0), {**row(110, 77.0), "settings_hash": trial.settings_hash()}]
    assert "| 500.0 (500.0) |" in table(rows)
    shown = table(rows, [110], trial.params)
    assert "| 77.0 (77.0) |" in shown and "-params gamma:0.9`" in shown


def test_a_trial_is_not_written_into_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr("sys.argv", ["zoo", "--params", "gamma:0.9"])
    with pytest.raises(SystemExit):
        zoo.main()
    assert "pass another --csv" in capsys.readouterr().err


def test_a_run_is_the_command_of_the_table_and_gives_a_row():
    row = zoo.execute(Run("CartPole-v1", 0, ("n_steps:16", "n_timesteps:256", "n_epochs:1")))
    assert set(row) == set(zoo.FIELDS)
    assert row["timesteps"] == 256
    assert 5 < float(row["eval_mean"]) <= 500


def test_the_docs_show_what_the_rows_say():
    rows = read_rows(zoo.CSV)
    text = table(rows)
    assert text in DOCS.read_text(encoding="utf-8")
    assert all(f"| {env} |" in text for env in zoo.TARGETS)
