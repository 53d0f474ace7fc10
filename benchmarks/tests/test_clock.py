"""Scores by the clock: evaluations take no time, and a run stops after the last mark."""

import time
from typing import Any

import pytest

from benchmarks import clock
from benchmarks.tables import NO_ROWS


def test_evaluations_do_not_count_and_a_run_ends_with_the_last_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([(1.0, 0.0), (2.0, 0.5)])

    def evaluated_for_a_second(*_: Any) -> tuple[float, float]:
        began = time.process_time()
        while time.process_time() - began < 1.0:
            pass
        return next(scores)

    monkeypatch.setattr(clock, "evaluate", evaluated_for_a_second)
    began = time.process_time()
    first, second = clock.train(clock.planned("SAC", "Pendulum-v1", seed=0), [0.005, 0.01])  # 0.3 and 0.6 seconds
    assert (first["eval_mean"], second["eval_mean"]) == ("1.0000", "2.0000")
    assert (first["minutes"], second["minutes"]) == (0.005, 0.01)
    assert 0 < first["steps"] < second["steps"] < 5000
    assert time.process_time() - began < 12.0


def test_rivals_have_the_settings_of_the_zoo_and_grpo_its_own() -> None:
    assert clock.planned("TQC", "Hopper-v5", 0).entry["top_quantiles_to_drop_per_net"] == 5  # the entry of Hopper-v4
    assert clock.planned("SAC of sbx", "Pendulum-v1", 0).entry["learning_rate"] == 1e-3
    assert clock.planned("TRPO", "HalfCheetah-v5", 0).entry["cg_max_steps"] == 25
    assert "batch_size" not in clock.planned("PPO", "Hopper-v5", 0).entry  # the entry of Ant-v4
    assert set(clock.planned("GRPO", "Hopper-v5", 0).entry) == {"policy", "n_envs", "n_timesteps"}


def test_a_rival_without_an_entry_has_its_defaults_and_the_environments_of_grpo() -> None:
    entry = clock.planned("TRPO", "sb3_grpo/LoadBalancing-v0", 0).entry
    assert entry == {"policy": "MlpPolicy", "n_envs": 8, "n_steps": 256, "n_timesteps": 10_000_000}
    assert clock.planned("PPO", "MiniGrid-DoorKey-5x5-v0", 0).entry["normalize"] is False


def test_the_last_policy_stands_for_the_minutes_after_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "evaluate", lambda *_: (3.0, 0.0))
    run = clock.planned("PPO", "CartPole-v1", seed=0)
    run.entry["n_timesteps"] = 512
    rows = clock.train(run, [1.0, 2.0])
    assert [(row["minutes"], row["steps"], row["eval_mean"]) for row in rows] == [(1.0, 512, "3.0000"), (2.0, 512, "3.0000")]


def test_a_table_has_means_and_extremes_over_seeds_and_the_hours_of_a_million_steps() -> None:
    def row(seed: int, minutes: float, steps: int, score: float) -> dict[str, str]:
        named = dict(arm="SAC", env="Pendulum-v1", seed=seed, minutes=minutes, steps=steps, eval_mean=score)
        return {key: str(value) for key, value in named.items()}

    rows = [row(0, 0.5, 3000, -1000.0), row(1, 0.5, 3000, -1200.0), row(0, 5, 30_000, -150.0), row(1, 5, 30_000, -170.0)]
    rows.append({**row(2, 1, 5000, -900.0), "arm": "TQC"})
    assert clock.table(rows, 1.0).splitlines() == ["| environment | TQC |", "| --- | --- |", "| Pendulum-v1 | -900.0 |"]
    assert clock.table(rows, 5.0).splitlines()[2:] == ["| Pendulum-v1 | -160.0 (-170.0 to -150.0) |"]
    assert clock.hours(rows).splitlines()[2:] == ["| Pendulum-v1 | 2.78 |"]  # 27,000 steps in 4.5 minutes
    ended = [{**row(3, minutes, 4000, -300.0), "arm": "PPO"} for minutes in (0.5, 5)]
    assert clock.hours([*rows, *ended]).splitlines()[2:] == ["| Pendulum-v1 | - | 2.78 |"]
    assert clock.table([], 1.0) == NO_ROWS
