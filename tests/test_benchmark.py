"""The comparison with PPO: that it runs what it says, and counts what it ran."""

import contextlib
import dataclasses
import importlib.resources
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import yaml
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from benchmarks import learning, posture, report, run
from benchmarks.curves import LearningCurve, TrainingCurve
from benchmarks.learning import append_row, read_rows
from benchmarks.tables import markdown_table

MATRIX = run.load_matrix()
#: One environment, two seeds of its own, and another that has one more.
SMALL: dict[str, Any] = {
    "arms": {"ppo": {"algo": "ppo", "entry": "zoo"}, "grpo": {"algo": "grpo", "entry": "default"}},
    "environments": {"CartPole-v1": {"threshold": 25}, "Acrobot-v1": {"threshold": -100}},
    "suites": {
        "short": {
            "arms": ["ppo", "grpo"],
            "seeds": [100],
            "more_seeds": {"CartPole-v1": [100, 101]},
            "timesteps": {"CartPole-v1": 2048, "Acrobot-v1": 1024},
        },
        "full": {"arms": ["ppo", "grpo"], "seeds": [100], "timesteps": {"CartPole-v1": 4096}},
    },
}


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "N_RESAMPLES", 50)


# The matrix


def test_runs_come_seed_by_seed_with_arms_side_by_side() -> None:
    runs = [(each.arm, each.env, each.seed) for each in run.expand(SMALL, "short")]
    assert runs == [
        ("random", "CartPole-v1", 0),
        ("random", "Acrobot-v1", 0),
        ("ppo", "CartPole-v1", 100),
        ("grpo", "CartPole-v1", 100),
        ("ppo", "Acrobot-v1", 100),
        ("grpo", "Acrobot-v1", 100),
        ("ppo", "CartPole-v1", 101),
        ("grpo", "CartPole-v1", 101),
    ]


def test_a_part_of_the_matrix_can_be_chosen() -> None:
    runs = run.expand(SMALL, "short", arms=["grpo"], envs=["Acrobot-v1"], seeds=[3, 4])
    assert [(each.arm, each.env, each.seed) for each in runs[1:]] == [("grpo", "Acrobot-v1", 3), ("grpo", "Acrobot-v1", 4)]


@pytest.mark.parametrize(
    "wrong, quoted",
    [
        (dict(suite="long"), "'long'.*short, full"),
        (dict(suite="short", arms=["a2c"]), "'a2c'.*ppo, grpo"),
        (dict(suite="short", envs=["Acrobot-v2"]), "'Acrobot-v2'.*CartPole-v1, Acrobot-v1"),
    ],
)
def test_unknown_names_are_refused(wrong: dict[str, Any], quoted: str) -> None:
    with pytest.raises(ValueError, match=quoted):
        run.expand(SMALL, **wrong)


@pytest.mark.parametrize("suite", MATRIX["suites"])
def test_tuned_ppo_has_rl_zoo3s_settings(suite: str) -> None:
    shipped = yaml.safe_load((importlib.resources.files("rl_zoo3") / "hyperparams" / "ppo.yml").read_text())
    for each in run.expand(MATRIX, suite):
        if each.arm == "ppo":
            name = each.env if each.env in shipped else each.env.replace("-v5", "-v4")
            assert each.entry == {**shipped[name], "n_timesteps": each.timesteps}


def test_default_arms_have_nothing_but_defaults() -> None:
    default_arms = [each for each in run.expand(MATRIX, "short") if each.arm.endswith("-default")]
    assert {each.algo for each in default_arms} == {"ppo", "grpo"}
    for each in default_arms:
        assert set(each.entry) <= {"policy", "n_timesteps", "env_wrapper"}
        assert each.entry["policy"] == "MlpPolicy"


def test_reported_seeds_are_not_those_of_tuning() -> None:
    tuning = {*range(10), *range(20, 25)}
    for suite in MATRIX["suites"]:
        seeds = {each.seed for each in run.expand(MATRIX, suite) if each.algo != "random"}
        assert min(seeds) >= 100 if suite in ("short", "full", "minigrid") else seeds <= tuning


def make_run(**changes: Any) -> run.Run:
    fields: dict[str, Any] = dict(
        arm="grpo", algo="grpo", env="CartPole-v1", timesteps=1000, seed=100, threshold=475.0, entry={"policy": "MlpPolicy"}
    )
    return run.Run(**{**fields, **changes})


def test_hash_is_of_what_decides_the_outcome() -> None:
    same = [
        make_run(),
        make_run(arm="another name"),
        make_run(seed=101),
        make_run(threshold=1.0),
        make_run(entry={"policy": "MlpPolicy", "gamma": 0.99}),  # a default, spelt out
        make_run(entry={"policy": "MlpPolicy", "rollout_buffer_class": "kernel"}),
        make_run(entry={"policy": "MlpPolicy", "rollout_buffer_kwargs": {"forgetting": 0.8}}),
        make_run(entry={"policy": "MlpPolicy", "rollout_buffer_kwargs": "dict(forgetting=0.8)"}),
    ]
    others = [
        make_run(algo="ppo"),
        make_run(env="Acrobot-v1"),
        make_run(timesteps=2000),
        make_run(entry={"policy": "MlpPolicy", "gamma": 0.98}),
        make_run(entry={"policy": "MlpPolicy", "rollout_buffer_kwargs": {"forgetting": 0.9}}),
        make_run(entry={"policy": "MlpPolicy", "rollout_buffer_class": "outcome"}),
    ]
    assert len({each.settings_hash() for each in same}) == 1
    assert len({each.settings_hash() for each in [same[0], *others]}) == 1 + len(others)


def test_a_changed_default_changes_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    for buffer in ("kernel", "outcome"):
        cell = make_run(entry={"policy": "MlpPolicy", "rollout_buffer_class": buffer})
        before = cell.settings_hash()
        changed = {**learning.buffer_defaults(buffer), "group_size": 99}
        with monkeypatch.context() as patch:
            patch.setattr(learning, "buffer_defaults", lambda _: changed)  # noqa: B023  # called within the iteration
            assert cell.settings_hash() != before
    # What a buffer hands on to its bases is among them
    assert {"scale", "max_waiting", "tied_groups", "leave_one_out"} <= set(learning.buffer_defaults("outcome"))


def test_changes_of_a_mapping_leave_its_other_entries() -> None:
    matrix = {**MATRIX, "arms": {"grpo": {"algo": "grpo", "entry": "zoo", "set": {"rollout_buffer_kwargs": {"ridge": 0.5}}}}}
    shipped = run.zoo_entry("grpo", "Pendulum-v1")["rollout_buffer_kwargs"]
    entry = run.entry_of(matrix, "grpo", "Pendulum-v1", 1000, {"gamma": 0.5, "rollout_buffer_kwargs": {"bandwidth": 0.1}})
    assert entry["rollout_buffer_kwargs"] == {**shipped, "ridge": 0.5, "bandwidth": 0.1} and entry["gamma"] == 0.5


# The runner


class Command:
    """
    ``python -m benchmarks.run`` on a matrix.

    :param matrix: of its own
    :param folder: for that and for the results
    """

    def __init__(self, matrix: dict[str, Any], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.results = folder / "results"
        self.monkeypatch = monkeypatch
        (folder / "matrix.yml").write_text(yaml.safe_dump(matrix))
        self.where = ["--matrix", str(folder / "matrix.yml"), "--results", str(self.results)]

    def __call__(self, *arguments: str) -> int:
        """:return: exit status"""
        self.monkeypatch.setattr(sys, "argv", ["run.py", *self.where, *arguments])
        return run.main()


def test_the_runner_leaves_a_row_and_a_curve_per_run_and_goes_on_where_it_stopped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(SMALL, tmp_path, monkeypatch)
    results = command.results
    assert command("--dry-run", "--envs", "CartPole-v1") == 0
    planned = capsys.readouterr().out
    assert "5 of 5 runs to do" in planned and "hours" in planned
    assert not results.exists()

    assert command("--envs", "CartPole-v1", "--seeds", "100") == 0
    rows = {row["arm"]: row for row in read_rows(results / "runs.csv")}
    assert set(rows) == {"random", "ppo", "grpo"}
    for arm in ("ppo", "grpo"):
        (cell,) = [each for each in run.expand(SMALL, "short", [arm], ["CartPole-v1"], [100]) if each.arm == arm]
        with np.load(cell.curve_path(results)) as file:
            curve = LearningCurve(file["steps"], file["returns"])
            assert np.all(np.diff(file["seconds"]) >= 0) and np.all(np.diff(file["steps"]) >= 0)
        row = rows[arm]
        assert float(row["auc"]) == pytest.approx(curve.area(2048), abs=1e-4)
        held = curve.first_held(25.0)
        assert row["steps_to_threshold"] == ("" if held is None else str(curve.steps[held]))
        # Each episode of CartPole is as long as its return
        assert sum(curve.returns) <= 2048
        assert 8 <= float(row["eval_mean"]) <= 500

    capsys.readouterr()
    assert command("--envs", "CartPole-v1", "--arms", "grpo") == 0
    assert "1 runs done, 0 failed, 2 were there already" in capsys.readouterr().out


def test_tuned_ppo_is_stable_baselines3s_ppo(tmp_path: pathlib.Path) -> None:
    _, cell = run.expand(SMALL, "short", ["ppo"], ["CartPole-v1"], [7])
    run.execute(cell, tmp_path)
    curve = TrainingCurve()
    env = make_vec_env("CartPole-v1", 8, seed=7)
    model = PPO(
        "MlpPolicy", env, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0, seed=7,
        learning_rate=lambda remaining: remaining * 1e-3, clip_range=lambda remaining: remaining * 0.2, device="cpu",
    )  # fmt: skip
    model.learn(2048, callback=curve)
    with np.load(cell.curve_path(tmp_path)) as file:
        np.testing.assert_array_equal(file["returns"], np.array(curve.returns, dtype=np.float32))
        np.testing.assert_array_equal(file["steps"], curve.steps)


def test_a_run_that_fails_is_tried_again_and_told_loudly(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**SMALL, "arms": {**SMALL["arms"], "ppo": {"algo": "ppo", "entry": "zoo", "set": {"batch_size": -1}}}}
    command = Command(broken, tmp_path, monkeypatch)
    assert command("--envs", "Acrobot-v1") == 1
    printed = capsys.readouterr()
    assert "FAILED (attempt 1 of 2): ppo Acrobot-v1" in printed.err and "FAILED (attempt 2 of 2)" in printed.err
    assert {row["arm"] for row in read_rows(command.results / "runs.csv")} == {"random", "grpo"}
    assert "2 runs done, 1 failed" in printed.out


def test_ctrl_c_starts_nothing_more_and_a_run_cut_short_is_no_row(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def interrupted(cell: run.Run, results: pathlib.Path) -> dict[str, Any]:
        started.append(cell)
        if len(started) == 1:
            raise KeyboardInterrupt
        time.sleep(0.5)
        return {}

    monkeypatch.setattr(run, "execute_apart", interrupted)
    monkeypatch.setattr(run, "INTERRUPTED", threading.Event())
    command = Command(SMALL, tmp_path, monkeypatch)
    assert command() == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(started) < len(run.expand(SMALL, "short")) and read_rows(command.results / "runs.csv") == []

    # rl-zoo3 swallows the interrupt of a training: what it returns is not a finished run
    _, cell = run.expand(SMALL, "short", ["grpo"], ["Acrobot-v1"], [0])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"interrupted after .* of 1024 steps"):
        patch.setattr(TrainingCurve, "_on_rollout_end", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        run.execute(dataclasses.replace(cell, entry={**cell.entry, "n_steps": 256}), tmp_path)


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """
    :param condition: to wait for
    :param seconds: for how long
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds} seconds"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("command", "training"),
    [
        # The random control is finished, a training is next
        (["benchmarks.run", "--envs", "CartPole-v1", "--arms", "ppo", "--results", "{folder}"], "| 1/"),
        (["benchmarks.learning", "--cases", "cartpole-1", "--seeds", "0", "--csv", "{folder}/runs.csv"], "| 0/"),
    ],
    ids=["run", "learning"],
)
def test_kill_leaves_no_run_behind(command: list[str], training: str, tmp_path: pathlib.Path) -> None:
    arguments = [argument.format(folder=tmp_path) for argument in command]
    # A session of its own: what is left of it can be asked for
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        shown = ""
        while training not in shown:
            shown += process.stderr.read(1)
            assert process.poll() is None, shown
        time.sleep(1.0)
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130 and "the same command goes on" in errors
        with pytest.raises(ProcessLookupError):
            wait_until(lambda: os.killpg(process.pid, 0))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_setting_without_a_value_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as refused:
        Command(SMALL, tmp_path, monkeypatch)("--set", "gae_lambda")
    assert refused.value.code == 2


def test_trials_do_not_mix_with_what_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(SMALL, tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as refused:
        command("--set", "gamma=0.5", "--results", str(run.RESULTS))
    assert refused.value.code == 2
    printed = capsys.readouterr().err
    assert "gamma=0.5" in printed and "--results" in printed


def test_speed_is_measured_for_every_arm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SHORTEST_TURN", 256)
    monkeypatch.setattr(run, "N_TURNS", 2)
    cells = run.expand(SMALL, "short", envs=["CartPole-v1"])
    run.run_speed(cells, tmp_path / "speed.csv")
    rows = read_rows(tmp_path / "speed.csv")
    assert sorted(row["arm"] for row in rows) == ["grpo", "grpo", "ppo", "ppo"]
    # A turn is made of whole rollouts of either arm: 256 transitions of PPO's, 2048 of GRPO's
    assert {row["steps"] for row in rows} == {"2048"}
    assert all(1e-6 < float(row["seconds_per_step"]) < 1e-1 for row in rows)
    run.run_speed(cells, tmp_path / "speed.csv")
    assert read_rows(tmp_path / "speed.csv") == rows


# Curves


def test_learning_curve() -> None:
    curve = LearningCurve(np.arange(1, 41) * 10, np.concatenate([np.zeros(20), np.full(20, 100.0)]))
    assert curve.first_held(0.0) == 19 and curve.first_held(50.0) == 29 and curve.first_held(100.5) is None
    np.testing.assert_allclose(curve.smoothed(np.array([0, 5, 200, 205, 215, 300, 400])), [0, 0, 0, 0, 5, 50, 100])
    # 0 until step 200, then a straight line in steps of ten
    steps = np.linspace(0, 400, 201)[1:]
    expected = np.maximum(steps // 10 - 20, 0) * 5
    assert curve.area(400) == pytest.approx(expected.mean())


# The report


quick = pytest.mark.usefixtures("few_resamples")


TOY_ARMS = {**SMALL["arms"], "ppo-default": {"algo": "ppo", "entry": "default"}}


def toy_matrix(arms: list[str], envs: list[str]) -> dict[str, Any]:
    """
    :param arms: of the suite
    :param envs: of the suite
    :return: a matrix with the suite ``toy``, of three seeds
    """
    toy = {"arms": arms, "seeds": [100, 101, 102], "timesteps": dict.fromkeys(envs, 1000)}
    return {"arms": TOY_ARMS, "environments": {env: {"threshold": 0.0} for env in envs}, "suites": {"toy": toy}}


def write_toy(
    results: pathlib.Path,
    areas: dict[str, dict[str, list[float]]],
    random: float = 0.0,
    speeds: dict[str, float] | None = None,
) -> report.Suite:
    """
    :param results: folder for the rows
    :param areas: by arm and environment, one for each seed, NaN for a run that is not finished; a run's return is its area
        throughout
    :param random: return of random actions
    :param speeds: seconds per step by arm
    :return: the suite
    """
    matrix = toy_matrix(list(areas), list(next(iter(areas.values()))))
    for each in run.expand(matrix, "toy"):
        if each.arm != "random" and each.seed - 100 >= len(areas[each.arm][each.env]):
            continue
        area = random if each.arm == "random" else areas[each.arm][each.env][each.seed - 100]
        if math.isnan(area):
            continue
        row = {
            "arm": each.arm, "env": each.env, "seed": each.seed, "settings_hash": each.settings_hash(),
            **{name: area for name in ("auc", "final", "eval_mean")},
        }  # fmt: skip
        append_row(results / "runs.csv", row, run.FIELDS)
        path = each.curve_path(results)
        path.parent.mkdir(exist_ok=True)
        np.savez(path, steps=np.arange(1, 101) * 10, returns=np.linspace(0.0, 2 * area, 100), seconds=np.zeros(100))
        if speeds and each.arm in speeds and each.seed == 100:
            row = {"session": 1, "arm": each.arm, "env": each.env, "settings_hash": each.settings_hash()}
            row["seconds_per_step"] = speeds[each.arm]
            append_row(results / "speed.csv", row, run.SPEED_FIELDS)
    return report.Suite("toy", results, matrix)


BETTER = {"CartPole-v1": [30.0, 31.0, 32.0], "Acrobot-v1": [300.0, 310.0, 320.0]}
WORSE = {"CartPole-v1": [10.0, 11.0, 12.0], "Acrobot-v1": [100.0, 110.0, 120.0]}


@quick
@pytest.mark.parametrize(
    "grpo, ppo, probability",
    [(BETTER, WORSE, 1.0), (WORSE, BETTER, 0.0), (WORSE, WORSE, 0.5)],
    ids=["better", "swapped", "equal"],
)
def test_probability_of_improvement_of_a_toy(
    grpo: dict[str, list[float]], ppo: dict[str, list[float]], probability: float, tmp_path: pathlib.Path
) -> None:
    suite = write_toy(tmp_path, {"grpo": grpo, "ppo": ppo})
    seeds = report.common_seeds(suite, ("grpo", "ppo"), list(grpo))
    assert seeds == [100, 101, 102]
    ours, theirs = (report.raw_areas(suite, arm, list(grpo), seeds) for arm in ("grpo", "ppo"))
    estimate = report.probability_of_improvement(ours, theirs)
    assert estimate.value == probability
    assert estimate.low <= probability <= estimate.high
    if probability != 0.5:
        assert estimate.low == estimate.high == probability


def test_areas_are_above_random_and_over_ppos_mean(tmp_path: pathlib.Path) -> None:
    suite = write_toy(tmp_path, {"grpo": {"CartPole-v1": [50.0, 70.0]}, "ppo": {"CartPole-v1": [20.0, 40.0]}}, random=10.0)
    scores, envs, seeds = report.normalised_areas(suite, ("grpo", "ppo"), "ppo")
    assert (envs, seeds) == (["CartPole-v1"], [100, 101])
    np.testing.assert_allclose(scores["grpo"], [[2.0], [3.0]])
    np.testing.assert_allclose(scores["ppo"], [[0.5], [1.5]])
    assert "| 2.50 |" in report.area_table(suite, "grpo", "ppo")


@pytest.mark.parametrize("ppo, learns", [([11.0, 40.0], True), ([9.0, 40.0], False), ([11.0], True), ([9.0], False)])
def test_a_ratio_needs_a_reference_whose_interval_is_above_random(
    ppo: list[float], learns: bool, tmp_path: pathlib.Path
) -> None:
    suite = write_toy(tmp_path, {"grpo": {"CartPole-v1": [50.0] * len(ppo)}, "ppo": {"CartPole-v1": ppo}}, random=10.0)
    envs = report.normalised_areas(suite, ("grpo", "ppo"), "ppo")[1]
    assert envs == (["CartPole-v1"] if learns else [])
    assert ("PPO no better than random" in report.area_table(suite, "grpo", "ppo")) is not learns
    seeds = report.common_seeds(suite, ("grpo", "ppo"), ["CartPole-v1"])
    areas, (scale,) = report.areas_and_scales(suite, "grpo", "ppo", ["CartPole-v1"], seeds)
    assert np.isinf(areas).all() == (not learns)
    np.testing.assert_array_equal(scale, np.array(ppo) - 10.0 if learns else [1.0])


def test_an_ablation_has_a_line_per_arm_and_a_column_per_environment(tmp_path: pathlib.Path) -> None:
    grpo = {"CartPole-v1": [30.0, 50.0], "Acrobot-v1": [3.0, 3.0]}
    suite = write_toy(tmp_path, {"grpo": grpo, "ppo": {"CartPole-v1": [20.0, 20.0], "Acrobot-v1": []}})
    assert report.ablation_table(suite).splitlines() == [
        "| seeds 100, 101 | CartPole-v1, 1,000 | Acrobot-v1, 1,000 |",
        "| --- | --- | --- |",
        "| grpo | 40.0 (30.0 to 50.0) | 3.00 (3.00 to 3.00) |",
        "| ppo | 20.0 (20.0 to 20.0) | not run |",
    ]


@quick
def test_an_arm_without_a_common_seed_is_left_out_of_an_ablation(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [30.0, 50.0], "Acrobot-v1": [3.0, 5.0]},
        "ppo": {"CartPole-v1": [20.0], "Acrobot-v1": [math.nan, 2.0]},
    }
    assert report.ablation_table(write_toy(tmp_path, areas)).splitlines() == [
        "| seeds 100, 101 | CartPole-v1, 1,000 | Acrobot-v1, 1,000 |",
        "| --- | --- | --- |",
        "| grpo | 40.0 (30.0 to 50.0) | 4.00 (3.00 to 5.00) |",
    ]


@quick
def test_arms_of_an_ablation_that_share_no_seed_make_no_table(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [30.0]}, "ppo": {"CartPole-v1": [math.nan, 20.0]}}
    assert report.ablation_table(write_toy(tmp_path, areas)) == report.NO_ROWS


@quick
def test_arms_of_an_ablation_are_compared_on_the_same_seeds(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": [10.0, 90.0], "ppo": [20.0], "ppo-default": [30.0, 50.0]}
    suite = write_toy(tmp_path, {arm: {"CartPole-v1": values} for arm, values in areas.items()})
    assert report.ablation_table(suite).splitlines() == [
        "| seed 100 | CartPole-v1, 1,000 |",
        "| --- | --- |",
        "| grpo | 10.0 |",
        "| ppo | 20.0 |",
        "| ppo-default | 30.0 |",
        "",
        "| seeds 100, 101 | CartPole-v1, 1,000 |",
        "| --- | --- |",
        "| grpo | 50.0 (10.0 to 90.0) |",
        "| ppo-default | 40.0 (30.0 to 50.0) |",
    ]


@quick
def test_a_table_has_a_line_per_row_and_empty_cells_where_one_is_short() -> None:
    lines = markdown_table(["arm", "area", "seeds"], [["ppo", 1.5, 5], ["grpo"]]).splitlines()
    assert lines[:3] == ["| arm | area | seeds |", "| --- | --- | --- |", "| ppo | 1.5 | 5 |"]
    assert [cell.strip() for cell in lines[3].split("|")] == ["", "grpo", "", "", ""]
    with pytest.raises(ValueError, match=r"2 cells, and the table 1 columns: .*'ppo', 5"):
        markdown_table(["arm"], [["ppo", 5]])


def test_interquartile_mean_leaves_out_a_quarter_at_either_end() -> None:
    areas = np.array([[1.0, -50.0], [2.0, 100.0]])
    assert report.interquartile_mean(areas).value == pytest.approx(1.5)


def test_the_reference_is_drawn_anew_as_well() -> None:
    ours, theirs = np.array([[2.0], [3.0], [4.0]]), np.array([1.0, 2.0, 3.0])
    known, drawn = report.interquartile_mean(ours / theirs.mean()), report.interquartile_mean(ours, [theirs])
    assert known.value == drawn.value == pytest.approx(1.5)
    assert drawn.low < known.low < drawn.value < known.high < drawn.high
    same = np.array([2.0])
    assert report.interquartile_mean(ours, [same]) == report.interquartile_mean(ours / 2.0)


@quick
def test_what_never_ends_is_left_out_with_the_longest_quarter_and_is_never_beyond_it() -> None:
    finite = np.array([[1.0, 2.0], [3.0, math.inf]])
    assert report.interquartile_mean(finite).value == pytest.approx(2.5)
    assert report.interquartile_mean(finite).high == math.inf
    half = np.array([[1.0, 2.0], [math.inf, math.inf]])
    assert str(report.interquartile_mean(half)).startswith("never")


def test_intervals_are_the_same_each_time_and_leave_numpys_generator_alone() -> None:
    scores = np.random.default_rng(0).normal(size=(4, 5))
    np.random.seed(7)
    expected = np.random.random(3)
    np.random.seed(7)
    first = report.interquartile_mean(scores)
    np.testing.assert_array_equal(np.random.random(3), expected)
    assert report.interquartile_mean(scores) == first
    assert first.low < first.value < first.high


def test_a_single_seed_has_no_interval() -> None:
    assert str(report.interquartile_mean(np.array([[1.0, 2.0]]))) == "1.50"
    assert str(report.mean_over_seeds(np.array([3.0]))) == "3.00"


def test_seeds_are_matched_by_number(tmp_path: pathlib.Path) -> None:
    areas = {
        "grpo": {"CartPole-v1": [4.0, 4.0, 9.0], "Acrobot-v1": [4.0, 6.0]},
        "ppo": {"CartPole-v1": [2.0, 2.0, 2.0], "Acrobot-v1": [2.0, 2.0]},
    }
    suite = write_toy(tmp_path, areas)
    scores, _, seeds = report.normalised_areas(suite, ("grpo", "ppo"), "ppo")
    assert seeds == [100, 101]
    np.testing.assert_allclose(scores["grpo"], [[2.0, 2.0], [2.0, 3.0]])
    # Without the first run of one arm, the second is still compared with the second
    rows = (tmp_path / "runs.csv").read_text().splitlines(keepends=True)
    gone = suite.runs("grpo", "CartPole-v1")[0].run
    kept = [row for row in rows if not (row.startswith("grpo,CartPole") and ",100," in row and gone.settings_hash() in row)]
    (tmp_path / "runs.csv").write_text("".join(kept))
    scores, _, seeds = report.normalised_areas(
        report.Suite("toy", tmp_path, toy_matrix(suite.arms, list(suite.timesteps))), ("grpo", "ppo"), "ppo"
    )
    assert seeds == [101]
    np.testing.assert_allclose(scores["grpo"], [[2.0, 3.0]])


def test_an_environment_where_ppo_is_no_better_than_random_has_no_ratio(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [4.0], "Acrobot-v1": [4.0]}, "ppo": {"CartPole-v1": [2.0], "Acrobot-v1": [-1.0]}}
    suite = write_toy(tmp_path, areas)
    assert report.normalised_areas(suite, ("grpo", "ppo"), "ppo")[1] == ["CartPole-v1"]
    assert "no better than random" in report.area_table(suite, "grpo", "ppo")
    # It still counts where no ratio is needed, and is named where one is
    table = report.aggregate_table(suite, [("grpo", "ppo")])
    assert "| GRPO against PPO | 2 | 1 | 2 of 2 | 2.00 | 1.00 |" in table
    assert "GRPO against PPO: no ratio on Acrobot-v1, where PPO is no better than random actions." in table
    assert "On the other 1 the area is at least as large on 1, and the probability of improvement 1.00." in table
    assert table.endswith("counted as ∞ there, others as 0, the interquartile mean is ∞.")


def test_an_environment_without_a_ratio_counts_as_infinity_where_better_than_random_and_else_as_zero(
    tmp_path: pathlib.Path,
) -> None:
    ratios = {"CartPole-v1": 1.0, "Pendulum-v1": 2.0, "MountainCarContinuous-v0": 3.0}
    ppo = {**{env: [1.0] for env in ratios}, "Acrobot-v1": [-1.0]}
    for ours, expected in ((0.5, "2.50"), (-0.5, "1.50")):  # of 1, 2, 3, infinity; of 0, 1, 2, 3
        grpo = {**{env: [ratio] for env, ratio in ratios.items()}, "Acrobot-v1": [ours]}
        suite = write_toy(tmp_path / expected, {"grpo": grpo, "ppo": ppo})
        assert report.aggregate_table(suite, [("grpo", "ppo")]).endswith(f"the interquartile mean is {expected}.")


def test_an_environment_where_ppo_learned_nothing_has_no_seconds(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": {"CartPole-v1": [4.0], "Acrobot-v1": [4.0]}, "ppo": {"CartPole-v1": [2.0], "Acrobot-v1": [-1.0]}}
    table, _ = report.seconds_table(write_toy(tmp_path, areas, speeds={"grpo": 0.1, "ppo": 0.1}), "grpo", "ppo")
    assert "CartPole-v1" in table and "Acrobot-v1" not in table


def test_speeds_are_those_of_one_session(tmp_path: pathlib.Path) -> None:
    suite = write_toy(
        tmp_path, {"grpo": {"CartPole-v1": [4.0]}, "ppo": {"CartPole-v1": [2.0]}}, speeds={"grpo": 1.0, "ppo": 2.0}
    )
    later = suite.runs("ppo", "CartPole-v1")[0].run
    row = {"session": 2, "env": "CartPole-v1", "settings_hash": later.settings_hash(), "seconds_per_step": 50.0}
    append_row(tmp_path / "speed.csv", row, run.SPEED_FIELDS)
    assert report.seconds_per_step(suite, ("grpo", "ppo"), "CartPole-v1") == {"grpo": 1.0, "ppo": 2.0}
    assert report.seconds_per_step(suite, ("ppo",), "CartPole-v1") == {"ppo": 50.0}


def test_an_arm_without_a_time_does_not_hide_those_of_the_others(tmp_path: pathlib.Path) -> None:
    areas = {"grpo": BETTER, "ppo": WORSE, "ppo-default": WORSE}
    suite = write_toy(tmp_path, areas, speeds={"grpo": 1.0, "ppo": 2.0})
    assert report.seconds_per_step(suite, list(areas), "CartPole-v1") == {}
    assert report.seconds_where_timed(suite, list(areas), "CartPole-v1") == {"grpo": 1.0, "ppo": 2.0}


def test_rows_of_other_settings_do_not_count(tmp_path: pathlib.Path) -> None:
    suite = write_toy(tmp_path, {"grpo": WORSE, "ppo": WORSE})
    text = (tmp_path / "runs.csv").read_text()
    first = suite.runs("grpo", "CartPole-v1")[0].run.settings_hash()
    (tmp_path / "runs.csv").write_text(text.replace(first, "00000000"))
    matrix = toy_matrix(suite.arms, list(suite.timesteps))
    assert report.Suite("toy", tmp_path, matrix).runs("grpo", "CartPole-v1") == []


def test_seconds_to_ppos_final_return(tmp_path: pathlib.Path) -> None:
    # Returns rise evenly from 0 to twice the area; PPO's "final" is its area. Means of 20 episodes lag ten episodes behind
    suite = write_toy(
        tmp_path, {"grpo": {"CartPole-v1": [40.0]}, "ppo": {"CartPole-v1": [20.0]}}, speeds={"grpo": 0.001, "ppo": 0.003}
    )
    curves = {arm: suite.curves(arm, "CartPole-v1")[0] for arm in ("grpo", "ppo")}
    steps = {arm: report.steps_to(curve, 20.0) for arm, curve in curves.items()}
    assert steps == {"grpo": 360.0, "ppo": 600.0}
    table, ratio = report.seconds_table(suite, "grpo", "ppo")
    assert ratio is not None and ratio.value == pytest.approx(360 * 0.001 / (600 * 0.003))
    assert "| 1 of 1 | 1 of 1 | 360 | 600 | 1,000 | 333 | 0.20 |" in table


def test_a_run_that_never_gets_there_counts_as_never(tmp_path: pathlib.Path) -> None:
    suite = write_toy(
        tmp_path, {"grpo": {"CartPole-v1": [5.0]}, "ppo": {"CartPole-v1": [20.0]}}, speeds={"grpo": 0.001, "ppo": 0.003}
    )
    assert math.isinf(report.steps_to(suite.curves("grpo", "CartPole-v1")[0], 20.0))
    table, ratio = report.seconds_table(suite, "grpo", "ppo")
    assert "| 0 of 1 | 1 of 1 | never |" in table and str(ratio) == "never"


@quick
def test_pictures_are_drawn(tmp_path: pathlib.Path) -> None:
    suite = write_toy(tmp_path, {"grpo": BETTER, "ppo": WORSE}, speeds={"grpo": 0.001, "ppo": 0.003})
    report.draw_curves(suite, tmp_path / "steps.png", by_seconds=False)
    report.draw_curves(suite, tmp_path / "seconds.png", by_seconds=True)
    report.draw_profile(suite, tmp_path / "profile.png")
    for name in ("steps", "seconds", "profile"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_of_one_seed_does_not_cut_the_profile_of_the_others_short(tmp_path: pathlib.Path) -> None:
    once = {env: areas[:1] for env, areas in BETTER.items()}
    suite = write_toy(tmp_path, {"ppo": WORSE, "ppo-default": once, "grpo": BETTER})
    assert report.profiled_arms(suite) == ["ppo", "grpo"]


def test_an_arm_of_one_environment_does_not_cut_the_profile_of_the_others_short(tmp_path: pathlib.Path) -> None:
    partly = {"CartPole-v1": BETTER["CartPole-v1"], "Acrobot-v1": []}
    suite = write_toy(tmp_path, {"ppo": WORSE, "ppo-default": partly, "grpo": BETTER})
    assert report.profiled_arms(suite) == ["ppo", "grpo"]


def test_a_table_without_rows_says_so(tmp_path: pathlib.Path) -> None:
    suite = write_toy(tmp_path, {"ppo": WORSE, "grpo": {"CartPole-v1": [], "Acrobot-v1": []}})
    assert report.area_table(suite, "grpo", "ppo") == report.NO_ROWS
    assert report.seconds_table(suite, "grpo", "ppo") == (report.NO_ROWS, None)
    assert report.ablation_table(report.Suite("buffers", tmp_path)) == report.NO_ROWS


def test_replaced_settings_are_those_of_several_reported_seeds_that_no_suite_shows(tmp_path: pathlib.Path) -> None:
    def row(arm: str, env: str, timesteps: int, seed: int, settings: str, area: float) -> dict[str, Any]:
        return {
            "arm": arm, "env": env, "timesteps": timesteps, "seed": seed, "settings_hash": settings,
            "auc": area, "eval_mean": 2 * area,
        }  # fmt: skip

    (shown,) = (each for each in run.expand(toy_matrix(["grpo"], ["CartPole-v1"]), "toy", seeds=[100]) if each.arm == "grpo")
    rows = [
        *[row("grpo", "CartPole-v1", 1000, seed, shown.settings_hash(), 9.0) for seed in (100, 101)],
        *[row("former", "CartPole-v1", 1000, seed, "aaaaaaaa", area) for seed, area in ((3, 5.0), (100, 10.0), (101, 20.0))],
        *[row("former", "CartPole-v1", 5000, seed, "bbbbbbbb", 1.0) for seed in (100, 101)],
        row("once", "CartPole-v1", 1000, 100, "cccccccc", 10.0),
        *[row("tuning", "CartPole-v1", 1000, seed, "dddddddd", 10.0) for seed in (98, 99)],
    ]
    for each in rows:
        append_row(tmp_path / "runs.csv", each, run.FIELDS)
    suite = report.Suite("toy", tmp_path, toy_matrix(["grpo"], ["CartPole-v1"]))
    header, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in report.replaced_table(tmp_path, [suite]).splitlines()
    )
    assert header == [
        "environment", "steps", "settings", "hash", "reported seeds", "area", "the present ones' there", "evaluation",
        "tuning seeds", "area",
    ]  # fmt: skip
    assert lines == [
        [
            "CartPole-v1", "1,000", "former", "`aaaaaaaa`", "2", "15.0 (10.0 to 20.0)", "9.00 (9.00 to 9.00)",
            "30.0 (20.0 to 40.0)", "1", "5.00",
        ],
        [
            "CartPole-v1", "5,000", "former", "`bbbbbbbb`", "2", "1.00 (1.00 to 1.00)", "not run", "2.00 (2.00 to 2.00)",
            "0", "not run",
        ],
    ]  # fmt: skip
    assert report.replaced_table(tmp_path / "elsewhere", [suite]) == report.NO_ROWS


def test_places_of_the_page_are_filled() -> None:
    page = "a\n<!-- report: one -->\nold\n<!-- end -->\nb\n<!-- report: two -->\n<!-- end -->\n"
    filled = report.fill(page, {"one": "1", "two": "2"})
    assert filled == "a\n<!-- report: one -->\n1\n<!-- end -->\nb\n<!-- report: two -->\n2\n<!-- end -->\n"
    assert report.fill(filled, {"one": "1", "two": "2"}) == filled
    with pytest.raises(KeyError):
        report.fill(page, {"one": "1"})


def test_the_pages_are_what_the_rows_say() -> None:
    contents = report.sections()
    for path in report.PAGES:
        page = path.read_text(encoding="utf-8")
        assert report.fill(page, contents) == page, f"{path.name} is old, run: python -m benchmarks.report"


# Postures and falls


def test_falls_are_told_from_the_episodes_around_them() -> None:
    # A run that gets better: what is a fall at the end was the best return at the beginning
    steps = np.arange(1, 51) * 20
    returns = np.repeat([100.0, 200.0, 300.0, 400.0, 500.0], 10)
    returns[[10, 41, 42]] = 100.0
    curve = LearningCurve(steps, returns)
    share, last, without = report.fall_shares(curve, 1000)
    assert share == pytest.approx(3 / 40)
    assert (last, without) == (pytest.approx(420.0), pytest.approx(500.0))
    assert np.flatnonzero(report.fallen(np.array([10.0, 6.9, 7.1, 10.0, 10.0]))).tolist() == [1]


def test_postures_are_told_by_the_wrapped_pitch() -> None:
    pitch = np.array([0.0, -0.5, 0.7, 1.1, 2.1, 3.3, -3.3, -1.1, 1.1 + 2 * np.pi, 0.1 - 4 * np.pi])
    there = {name: np.flatnonzero(which).tolist() for name, which in posture.postures(pitch).items()}
    assert there == {"nose": [2, 3, 8], "back": [4, 5, 6], "upright": [0, 1, 9]}


def test_shares_of_postures_and_the_speed_in_each() -> None:
    recorder = posture.PostureRecorder(4)
    # Two environments, two steps: pitch and speed
    recorder.observations = [np.array([[0.0, 3.0], [1.1, 0.0]]), np.array([[0.1, 2.0], [1.2, 0.5]])]
    assert recorder.shares_and_speeds() == {
        "upright_share": "0.5000", "upright_speed": "2.500", "nose_share": "0.5000", "nose_speed": "0.250",
        "back_share": "0.0000", "back_speed": "",
    }  # fmt: skip


@pytest.mark.parametrize("arm", ["grpo", "ppo-default"])  # with normalised observations and without
def test_the_first_steps_of_a_training_are_observed(arm: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv = tmp_path / "posture.csv"
    arguments = ["posture", "--arms", arm, "--seeds", "3", "--timesteps", "2048", "--csv", str(csv)]
    monkeypatch.setattr(sys, "argv", arguments)
    for _ in range(2):  # the second time there is nothing left to do
        assert posture.main() == 0
    (row,) = read_rows(csv)
    assert (row["arm"], row["seed"], row["timesteps"]) == (arm, "3", "2048")
    # A cheetah that has hardly learned anything stays about where it was put
    assert abs(float(row["upright_speed"])) < 0.5
    # Noise as small as that of the tuned settings does not tip it over
    assert arm != "grpo" or float(row["upright_share"]) > 0.9


def test_postures_are_shown_of_the_present_settings_alone() -> None:
    (run_,) = posture.trainings(["grpo"], [100])
    row = {
        "arm": "grpo", "seed": "100", "settings_hash": run_.settings_hash(), "timesteps": "120000",
        "nose_share": "0.25", "nose_speed": "0.04", "back_share": "0.0", "back_speed": "",
        "upright_share": "0.75", "upright_speed": "1.26",
    }  # fmt: skip
    assert posture.table([{**row, "settings_hash": "aaaaaaaa"}, row], [run_]).splitlines() == [
        "| seed | arm | steps | upright | on the nose | on the back |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 100 | grpo | 120,000 | 75%, 1.3 m/s | 25%, 0.0 m/s | 0% |",
    ]
    assert posture.table([row], posture.trainings(["grpo"], [101])) == ""


@pytest.mark.parametrize(
    "wrong, quoted", [(["--arms", "a2c"], "'a2c'"), (["--suite", "long"], "'long'"), (["--timesteps", "0"], "not 0")]
)
def test_postures_of_nothing_are_refused(
    wrong: list[str], quoted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["posture", *wrong])
    assert posture.main() == 2
    assert quoted in capsys.readouterr().err
