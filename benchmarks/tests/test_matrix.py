"""What is run, and when a finished run counts."""

import importlib.resources
from typing import Any

import pytest
import yaml

from benchmarks import matrix
from benchmarks.matrix import Run, expand, load_matrix
from benchmarks.results import RESULTS, read_rows, row_key, rows_file
from benchmarks.tests.toys import SMALL

MATRIX = load_matrix()


def make_run(**changes: Any) -> Run:
    fields: dict[str, Any] = dict(arm="grpo", algo="grpo", env="CartPole-v1", timesteps=1000, seed=100, threshold=475.0)
    return Run(**{**fields, "n_episodes": 20, "entry": {"policy": "MlpPolicy"}, **changes})


def test_runs_come_seed_by_seed_with_arms_side_by_side() -> None:
    assert [(run.arm, run.env, run.seed) for run in expand(SMALL, "proof")] == [
        ("random", "CartPole-v1", 0),
        ("random", "Acrobot-v1", 0),
        ("ppo", "CartPole-v1", 100),
        ("grpo", "CartPole-v1", 100),
        ("ppo", "Acrobot-v1", 100),
        ("grpo", "Acrobot-v1", 100),
        ("ppo", "CartPole-v1", 101),
        ("grpo", "CartPole-v1", 101),
    ]


def test_a_part_of_a_suite_can_be_chosen() -> None:
    runs = expand(SMALL, "proof", arms=["grpo"], envs=["Acrobot-v1"], seeds=[3, 4])
    assert [(run.arm, run.env, run.seed) for run in runs[1:]] == [("grpo", "Acrobot-v1", 3), ("grpo", "Acrobot-v1", 4)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param(dict(suite="long"), "'long'.*proof", id="suite"),
        pytest.param(dict(suite="proof", arms=["a2c"]), "'a2c'.*ppo, grpo", id="arm"),
        pytest.param(dict(suite="proof", envs=["Acrobot-v2"]), "'Acrobot-v2'.*CartPole-v1, Acrobot-v1", id="environment"),
    ],
)
def test_an_unknown_name_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(SMALL, **wrong)


@pytest.mark.parametrize("suite", ["proof", "proof_million"])
def test_tuned_ppo_has_the_settings_of_rl_zoo3(suite: str) -> None:
    shipped = yaml.safe_load((importlib.resources.files("rl_zoo3") / "hyperparams" / "ppo.yml").read_text())
    runs = [run for run in expand(MATRIX, suite) if run.arm == "ppo"]
    assert runs
    for run in runs:
        name, *_ = [name for name in (run.env, *(run.env.replace("-v5", old) for old in ("-v4", "-v2"))) if name in shipped]
        assert run.entry == {**shipped[name], "n_timesteps": run.timesteps}


def test_ppo_with_our_rate_on_atari_has_the_settings_of_our_entry() -> None:
    entries = {run.arm: run.entry for run in expand(MATRIX, "atari") if "Breakout" in run.env}
    ours, theirs, rl_zoo3 = (entries[arm] for arm in ("grpo", "ppo, our rate", "ppo"))
    without = ("share_starts", "gae_lambda")  # PPO's default lambda is that of the entry
    assert {name: value for name, value in ours.items() if name not in without} | {"vf_coef": rl_zoo3["vf_coef"]} == theirs
    assert ours["gae_lambda"] == 0.95
    assert {name for name in theirs if theirs[name] != rl_zoo3[name]} == {"learning_rate", "clip_range"}


def test_an_arm_is_left_out_where_rl_zoo3_has_no_entry() -> None:
    arms: dict[str, set[str]] = {}
    for run in expand(MATRIX, "proof"):
        arms.setdefault(run.env, set()).add(run.arm)
    assert {"ppo", "trpo"} <= arms["Ant-v5"]
    assert {"ppo", "trpo"} & arms["InvertedPendulum-v5"] == {"ppo"}
    assert {"ppo", "trpo"} & arms["sb3_grpo/Queueing-v0"] == set()


def test_default_arms_have_nothing_but_the_defaults_of_the_comparison() -> None:
    size = {
        "now": {"n_envs": 8},
        "default": {"n_envs": 8, "update_rule": "clipped"},
        "ppo, defaults": {"n_envs": 8, "n_steps": 256},
    }
    runs = [run for run in expand(MATRIX, "proof") if run.arm in size]
    ours = ("policy", "n_timesteps", "env_wrapper")
    for run in runs:
        assert {key: value for key, value in run.entry.items() if key not in ours} == size[run.arm]
    assert {run.arm for run in runs} == set(size)


def test_ppo_with_our_settings_has_the_learning_rate_that_follows_the_deviation() -> None:
    runs = [run for run in expand(MATRIX, "proof") if run.arm == "ppo, our settings"]
    callbacks = {run.env: run.entry.get("callback") for run in runs}
    assert callbacks["HalfCheetah-v5"] == callbacks["Pendulum-v1"] == "benchmarks.rates.RateFollowsStd"
    assert callbacks["CartPole-v1"] is callbacks["MiniGrid-DoorKey-5x5-v0"] is None


def test_every_published_row_is_of_a_run_of_the_matrix() -> None:
    runs: dict[str, set[tuple[str, ...]]] = {}
    for suite in MATRIX["suites"]:
        file = rows_file(MATRIX, suite, RESULTS).name
        runs.setdefault(file, set()).update(run.key() for run in expand(MATRIX, suite))
    for file, keys in runs.items():
        rows = [row_key(row) for row in read_rows(RESULTS / file)]
        assert len(set(rows)) == len(rows) > 0 and set(rows) <= keys, file


def test_reported_seeds_are_not_those_of_tuning() -> None:
    for suite, about in MATRIX["suites"].items():
        is_tuning = about.get("is_tuning", False)
        assert all((run.seed < 100) == is_tuning for run in expand(MATRIX, suite) if run.algo != "random"), suite


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(dict(arm="another name"), id="arm"),
        pytest.param(dict(seed=101), id="seed"),
        pytest.param(dict(threshold=1.0), id="threshold"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "gamma": 0.99}), id="default"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "rollout_buffer_class": "kernel"}), id="default buffer"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "rollout_buffer_kwargs": "dict(forgetting=0.8)"}), id="string"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "objective": {"clip_range_high": None}}), id="neutral"),
    ],
)
def test_the_hash_is_the_same_where_the_outcome_is(same: dict[str, Any]) -> None:
    assert make_run(**same).settings_hash() == make_run().settings_hash()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(dict(algo="ppo"), id="algorithm"),
        pytest.param(dict(env="Acrobot-v1"), id="environment"),
        pytest.param(dict(timesteps=2000), id="budget"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "gamma": 0.98}), id="argument"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "rollout_buffer_kwargs": {"forgetting": 0.9}}), id="buffer argument"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "rollout_buffer_class": "outcome"}), id="buffer"),
    ],
)
def test_the_hash_changes_with_what_decides_the_outcome(other: dict[str, Any]) -> None:
    assert make_run(**other).settings_hash() != make_run().settings_hash()


@pytest.mark.parametrize(("timesteps", "falls"), [(300_000, False), (300_001, True)])
def test_a_limit_that_falls_is_a_setting_of_long_runs_alone(timesteps: int, falls: bool) -> None:
    entries = [{"policy": "MlpPolicy", "target_kl": limit} for limit in (None, 0.02, 0.01)]
    runs = [make_run(env="Pendulum-v1", timesteps=timesteps, entry=entry, is_continuous=True) for entry in entries]
    by_default, constant, other = (run.settings_hash() for run in runs)
    assert (by_default != constant) == falls
    assert other not in (by_default, constant)


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_a_changed_default_changes_the_hash(buffer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(entry={"policy": "MlpPolicy", "rollout_buffer_class": buffer})
    before, changed = run.settings_hash(), {**matrix.buffer_defaults(buffer), "group_size": 99}
    monkeypatch.setattr(matrix, "buffer_defaults", lambda _: changed)
    assert run.settings_hash() != before


def test_changes_of_a_mapping_leave_its_other_entries() -> None:
    arm = {"algo": "grpo", "entry": "default", "set": {"rollout_buffer_kwargs": {"ridge": 0.5}}}
    toy = {"arms": ["changed"], "seeds": [0], "timesteps": {"Pendulum-v1": 1000}}
    changed = {**MATRIX, "arms": {"changed": arm}, "suites": {"toy": toy}}
    *_, run = expand(changed, "toy", changes={"gamma": 0.5, "rollout_buffer_kwargs": {"n_folds": 2}})
    assert run.entry["rollout_buffer_kwargs"] == {"ridge": 0.5, "n_folds": 2}
    assert run.entry["gamma"] == 0.5
