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
    monkeypatch.setattr(clock, "MARKS", (0.005, 0.01))  # 0.3 and 0.6 seconds
    began = time.process_time()
    first, second = clock.train(clock.planned("SAC", "Pendulum-v1", seed=0))
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


def test_a_table_has_means_over_seeds_and_the_hours_of_a_million_steps() -> None:
    def row(seed: int, minutes: float, steps: int, score: float) -> dict[str, str]:
        named = dict(arm="SAC", env="Pendulum-v1", seed=seed, minutes=minutes, steps=steps, eval_mean=score)
        return {key: str(value) for key, value in named.items()}

    rows = [row(0, 0.5, 3000, -1000.0), row(1, 0.5, 3000, -1200.0), row(0, 5, 30_000, -150.0), row(1, 5, 30_000, -170.0)]
    assert clock.table(rows).splitlines()[2:] == ["| Pendulum-v1, 1 min | - |", "| Pendulum-v1, 5 min | -160.0 |"]
    assert clock.hours(rows).splitlines()[2:] == ["| Pendulum-v1, hours | 2.78 |"]  # 27,000 steps in 4.5 minutes
    assert clock.table([]) == NO_ROWS
