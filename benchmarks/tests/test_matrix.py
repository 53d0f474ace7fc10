"""What is run, and when a finished run counts."""

import importlib.resources
from typing import Any

import pytest
import yaml

from benchmarks import matrix
from benchmarks.matrix import Run, expand, load_matrix
from benchmarks.results import RESULTS, read_rows
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
        pytest.param(dict(suite="long"), "'long'.*proof, cases", id="suite"),
        pytest.param(dict(suite="proof", arms=["a2c"]), "'a2c'.*ppo, grpo", id="arm"),
        pytest.param(dict(suite="proof", envs=["Acrobot-v2"]), "'Acrobot-v2'.*CartPole-v1, Acrobot-v1", id="environment"),
    ],
)
def test_an_unknown_name_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(SMALL, **wrong)


@pytest.mark.parametrize("suite", ["default", "default_million"])
def test_tuned_ppo_has_the_settings_of_rl_zoo3(suite: str) -> None:
    shipped = yaml.safe_load((importlib.resources.files("rl_zoo3") / "hyperparams" / "ppo.yml").read_text())
    runs = [run for run in expand(MATRIX, suite) if run.arm == "ppo"]
    assert runs
    for run in runs:
        name = run.env if run.env in shipped else run.env.replace("-v5", "-v4")
        assert run.entry == {**shipped[name], "n_timesteps": run.timesteps}


def test_an_arm_is_left_out_where_rl_zoo3_has_no_entry() -> None:
    arms: dict[str, set[str]] = {}
    for run in expand(MATRIX, "proof"):
        arms.setdefault(run.env, set()).add(run.arm)
    assert {"ppo", "trpo"} <= arms["Ant-v5"]
    assert {"ppo", "trpo"} & arms["InvertedPendulum-v5"] == {"ppo"}
    assert {"ppo", "trpo"} & arms["sb3_grpo/Queueing-v0"] == set()


def test_default_arms_have_nothing_but_defaults() -> None:
    runs = [run for run in expand(MATRIX, "default") if run.arm in ("default", "default, 1 environment", "ppo, defaults")]
    size = {"default": {"n_envs": 8}, "default, 1 environment": {}, "ppo, defaults": {"n_envs": 8, "n_steps": 256}}
    ours = ("policy", "n_timesteps", "env_wrapper")
    for run in runs:
        assert {key: value for key, value in run.entry.items() if key not in ours} == size[run.arm]
    assert {run.arm for run in runs} == set(size)


def test_ppo_with_our_settings_has_the_learning_rate_that_follows_the_deviation_since_it_is_the_default() -> None:
    def callbacks(suite: str) -> dict[str, Any]:
        runs = [run for run in expand(MATRIX, suite) if run.arm == "ppo, our settings"]
        return {run.env: run.entry.get("callback") for run in runs}

    assert set(callbacks("default").values()) == {None}
    now = callbacks("proof")
    assert now["HalfCheetah-v5"] == now["Pendulum-v1"] == "benchmarks.rates.RateFollowsStd"
    assert now["CartPole-v1"] is now["MiniGrid-DoorKey-5x5-v0"] is None


def test_arms_of_older_rows_have_what_the_defaults_were() -> None:
    old = {
        "arms": {"a": {"algo": "grpo", "entry": "default", "set": {"n_envs": 8}}},
        "seeds": [0],
        "timesteps": {"Pendulum-v1": 1000},
    }
    suites = {"now": old, **{str(generation): {**old, "generation": generation} for generation in (3, 2, 1)}}
    of_suites = {**MATRIX, "arms": old["arms"], "suites": suites}
    now, third, second, first = (next(run for run in expand(of_suites, name) if run.arm == "a") for name in suites)
    assert now.hyperparameters() == {"policy": "MlpPolicy", "n_envs": 8, "n_timesteps": 1000}
    constant_rate = {"policy_kwargs": "{'lr_follows_std': False} | ({})"}
    assert third.hyperparameters() == {**now.entry, **constant_rate, "rollout_buffer_kwargs": {}}
    former = {
        "n_steps": 256,
        "normalize_observations": False,
        "policy_kwargs": "{'log_std_init': 0.0, 'lr_follows_std': False} | ({})",
    }
    assert second.hyperparameters() == {**now.entry, **former, "rollout_buffer_kwargs": {"bandwidth": 0.5}}
    groups = {"group_size": 2, "rollout_buffer_kwargs": {"bandwidth": 0.5, "relative": False}}
    assert first.hyperparameters() == {**now.entry, **former, **groups}
    assert len({run.settings_hash() for run in (now, third, second, first)}) == 4


def test_the_hash_of_older_rows_does_not_change_with_the_defaults() -> None:
    row = next(row for row in read_rows(RESULTS / "inputs.csv") if row["arm"] == "grpo, defaults")
    run = next(run for run in expand(MATRIX, "inputs") if run.arm == "grpo, defaults" and run.env == row["env"])
    assert run.settings_hash() == row["settings_hash"]


def test_reported_seeds_are_not_those_of_tuning() -> None:
    seeds = {name: {run.seed for run in expand(MATRIX, name) if run.algo != "random"} for name in MATRIX["suites"]}
    reported = [
        *("zoo", "inputs", "ordinary", "tokens"),
        *("default", "default_million", "untouched", "units", "proof", "proof_million"),
    ]
    compared = set.union(*(seeds.pop(name) for name in reported))
    assert min(compared) >= 100 > max(set.union(*seeds.values()))


@pytest.mark.parametrize("suite", ["learning", "variants"])
def test_a_case_has_enough_seeds_to_pass(suite: str) -> None:
    for case in MATRIX["suites"][suite]["cases"].values():
        assert 0 < case["required"] <= len(set(case["seeds"]))


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(dict(arm="another name"), id="arm"),
        pytest.param(dict(seed=101), id="seed"),
        pytest.param(dict(threshold=1.0), id="threshold"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "gamma": 0.99}), id="default"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "rollout_buffer_class": "kernel"}), id="default buffer"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "rollout_buffer_kwargs": "dict(forgetting=0.8)"}), id="string"),
        pytest.param(dict(entry={"policy": "MlpPolicy", "clip_range_high": None}), id="neutral"),
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


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_a_changed_default_changes_the_hash(buffer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(entry={"policy": "MlpPolicy", "rollout_buffer_class": buffer})
    before, changed = run.settings_hash(), {**matrix.buffer_defaults(buffer), "group_size": 99}
    monkeypatch.setattr(matrix, "buffer_defaults", lambda _: changed)
    assert run.settings_hash() != before


def test_changes_of_a_mapping_leave_its_other_entries() -> None:
    arm = {"algo": "grpo", "entry": "zoo", "set": {"rollout_buffer_kwargs": {"ridge": 0.5}}}
    toy = {"arms": ["changed"], "seeds": [0], "timesteps": {"HalfCheetah-v5": 1000}}
    changed = {**MATRIX, "arms": {"changed": arm}, "suites": {"toy": toy}}
    *_, run = expand(changed, "toy", changes={"gamma": 0.5, "rollout_buffer_kwargs": {"n_folds": 2}})
    shipped = matrix.hyperparameter_file("grpo")["HalfCheetah-v5"]["rollout_buffer_kwargs"]
    assert run.entry["rollout_buffer_kwargs"] == {**shipped, "ridge": 0.5, "n_folds": 2}
    assert run.entry["gamma"] == 0.5
