"""The runner: what is run, when a finished run counts, rates and units of its arms; and the quickstart."""

import contextlib
import importlib.resources
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
import yaml
from gymnasium import spaces
from PIL import Image, ImageSequence
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnvBox

from benchmarks import matrix, quickstart
from benchmarks import run as runner
from benchmarks.curves import CurveStore, LearningCurve, TrainingCurve
from benchmarks.matrix import RIVALS, Run, expand, load_matrix
from benchmarks.rates import RateFollowsStd, log_std_of
from benchmarks.results import FIELDS, RESULTS, Suite, append_row, provenance, read_rows, row_key, rows_file
from benchmarks.tests.toys import SMALL
from benchmarks.wrappers import Rescaled
from sb3_grpo import GRPO
from sb3_grpo.policies import MlpPolicy

Command = Callable[..., int]


@pytest.fixture
def command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``python -m benchmarks.run`` on the small matrix, with results in ``tmp_path``."""

    def call(*arguments: str, matrix: dict[str, Any] = SMALL) -> int:
        (tmp_path / "matrix.yml").write_text(yaml.safe_dump(matrix))
        where = ["--matrix", str(tmp_path / "matrix.yml"), "--results", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["run.py", *where, *arguments])
        return runner.main()

    return call


def test_the_runner_leaves_a_row_and_a_curve_per_run_and_resumes(
    command: Command, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--dry-run", "--envs", "CartPole-v1") == 0
    assert "5 of 5 runs to do" in capsys.readouterr().out
    assert not (tmp_path / "proof.csv").exists()

    assert command("--envs", "CartPole-v1", "--seeds", "100") == 0
    rows = {row["arm"]: row for row in read_rows(tmp_path / "proof.csv")}
    assert set(rows) == {"random", "ppo", "grpo"}
    curves = CurveStore(tmp_path / "proof.csv").load()
    assert len(curves) == 2
    for (_, _, settings), curve in curves.items():
        [row] = [row for row in rows.values() if row["settings_hash"] == settings]
        assert float(row["auc"]) == pytest.approx(curve.area(2048), abs=1e-4)
        assert sum(curve.returns) <= 2048  # each episode of CartPole is as long as its return

    capsys.readouterr()
    assert command("--envs", "CartPole-v1", "--arms", "grpo") == 0
    assert "1 runs done, 0 failed" in capsys.readouterr().out


def test_tuned_ppo_is_the_ppo_of_stable_baselines3() -> None:
    _, cell = expand(SMALL, "proof", ["ppo"], ["CartPole-v1"], [7])
    _, curve = runner.execute(cell)
    expected = TrainingCurve()
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=7), n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98,
        n_epochs=20, ent_coef=0.0, seed=7, learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2,
        device="cpu",
    )  # fmt: skip
    model.learn(2048, callback=expected)
    assert curve is not None
    assert (curve.steps, curve.returns) == (expected.steps, expected.returns)


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_are_done(
    command: Command, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**SMALL, "arms": {**SMALL["arms"], "ppo": {"algo": "ppo", "entry": "zoo", "set": {"batch_size": -1}}}}
    assert command("--envs", "Acrobot-v1", matrix=broken) == 1
    printed = capsys.readouterr()
    assert "FAILED: ppo Acrobot-v1" in printed.err
    assert "2 runs done, 1 failed" in printed.out
    assert {row["arm"] for row in read_rows(tmp_path / "proof.csv")} == {"random", "grpo"}


@pytest.fixture
def ray() -> Iterator[None]:
    module = pytest.importorskip("ray")
    module.shutdown()  # workers look for the benchmarks where Ray was started
    yield
    module.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray")
def test_on_ray_rows_are_those_of_runs_in_process_and_a_failed_run_is_named(
    command: Command, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**SMALL, "arms": {**SMALL["arms"], "ppo": {"algo": "ppo", "entry": "zoo", "set": {"batch_size": -1}}}}
    assert command("--envs", "Acrobot-v1", "--ray", matrix=broken) == 1
    printed = capsys.readouterr()
    assert "FAILED: ppo Acrobot-v1" in printed.err and "batch_size" in printed.err
    assert "2 runs done, 1 failed" in printed.out
    rows = {row["arm"]: row for row in read_rows(tmp_path / "proof.csv")}
    [(_, curve)] = CurveStore(tmp_path / "proof.csv").load().items()

    random, _, grpo = expand(broken, "proof", envs=["Acrobot-v1"])
    for cell in (random, grpo):
        row, expected = runner.execute(cell)
        same = [field for field in FIELDS if field not in {"wall_clock", "steps_per_second", "seconds_to_threshold"}]
        assert [rows[cell.arm][field] for field in same] == [str(row.get(field, "")) for field in same]
    assert expected is not None
    np.testing.assert_array_equal(curve.steps, expected.steps)
    np.testing.assert_array_equal(curve.returns, np.asarray(expected.returns, np.float32))


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray")
def test_a_call_on_ray_is_made_again_if_its_process_is_lost_but_not_if_it_fails(tmp_path: pathlib.Path) -> None:
    def call(name: str, fault: Callable[[], None]) -> tuple[int, int]:
        with (tmp_path / name).open("a") as file:
            file.write("x")
            file.flush()
            if file.tell() == 1:
                fault()
            return file.tell(), os.getpid()

    pool = runner.RayExecutor("")
    lost = pool.submit(call, "lost", lambda: os.kill(os.getpid(), signal.SIGKILL))
    failed = pool.submit(call, "failed", lambda: [][0])
    others = [pool.submit(call, f"other {i}", lambda: None) for i in range(3)]
    assert lost.result()[0] == 2
    with pytest.raises(IndexError):
        failed.result()
    assert (tmp_path / "failed").read_text() == "x"
    assert len({other.result()[1] for other in others}) == 3  # a process of its own for each


def test_a_training_cut_short_is_no_finished_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: TrainingCurve) -> None:
        raise KeyboardInterrupt

    _, cell = expand(SMALL, "proof", ["grpo"], ["CartPole-v1"], [0], {"n_steps": 256})
    monkeypatch.setattr(TrainingCurve, "_on_rollout_end", interrupt)  # rl-zoo3 swallows it
    with pytest.raises(RuntimeError, match="interrupted after 256 of 2048 steps"):
        runner.execute(cell)


@pytest.mark.slow
def test_five_published_rows_drawn_by_lot_are_reproduced_to_the_digit() -> None:
    suite, versions = Suite("proof"), provenance()["versions"]

    finished = [
        each
        for arm in suite.arms
        for env, timesteps in suite.timesteps.items()
        for each in suite.runs(arm, env)
        # Rows of GRPO are from before the value estimate learned its metric
        if timesteps <= 200_000 and each.run.algo in RIVALS and each.row["versions"] == versions
    ]
    if len(finished) < 5:
        pytest.skip(f"rows are reproduced where they were made, and there are no five that were made with {versions}")
    for drawn in random.sample(finished, 5):
        again, _ = runner.execute_apart(drawn.run)
        for name in ("auc", "final", "eval_mean", "eval_std", "steps_to_threshold"):
            assert str(again[name]) == drawn.row[name], (drawn.run.arm, drawn.run.env, drawn.run.seed, name)


@pytest.mark.slow
def test_kill_leaves_no_process_behind(tmp_path: pathlib.Path) -> None:
    arguments = ["--envs", "CartPole-v1", "--arms", "ppo", "--results", str(tmp_path)]
    # In a session of its own, so that one can ask for what is left of it
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.run", *arguments],
        start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        shown = ""
        while "| 1/" not in shown:  # the random control is finished, a training is next
            shown += process.stderr.read(1)
            assert process.poll() is None, shown
        time.sleep(1.0)
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == runner.INTERRUPTED
        assert "the same command resumes" in errors
        end = time.monotonic() + 60.0
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(process.pid, 0)
                time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--set", "gae_lambda"], "pass KEY=VALUE", id="no value"),
        pytest.param(
            ["--set", "gamma=0.5", "--results", str(runner.RESULTS)], "pass another folder", id="among reported rows"
        ),
    ],
)
def test_a_wrong_trial_is_refused(
    arguments: list[str], message: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(*arguments)
    assert message in capsys.readouterr().err


def test_rows_come_back_from_the_file_as_they_went_in(tmp_path: pathlib.Path) -> None:
    rows = [{field: f"{field} {i}, with a comma" for field in FIELDS} for i in range(2)]
    for row in rows:
        append_row(tmp_path / "folder" / "rows.csv", row, FIELDS)
    assert read_rows(tmp_path / "folder" / "rows.csv") == rows


def test_curves_are_the_same_before_and_after_packing(tmp_path: pathlib.Path) -> None:
    store = CurveStore(tmp_path / "proof.csv")
    for seed in "12":
        store.save(("toys/A-v1", seed, "aaaaaaaa"), LearningCurve([3, 9, 20], [1.0, float(seed), 0.1]))
    assert store.pack() == 2
    store.save(("toys/A-v1", "3", "aaaaaaaa"), LearningCurve([4], [0.5]))
    loose = store.load()
    assert store.pack() == 3
    assert list(store.loose.iterdir()) == []
    packed = store.load()
    assert set(packed) == set(loose) == {("toys/A-v1", seed, "aaaaaaaa") for seed in "123"}
    for key, curve in packed.items():
        np.testing.assert_array_equal(curve.steps, loose[key].steps)
        np.testing.assert_array_equal(curve.returns, loose[key].returns)
    np.testing.assert_array_equal(packed["toys/A-v1", "2", "aaaaaaaa"].returns, np.array([1.0, 2.0, 0.1], np.float32))


def test_a_curve_is_averaged_over_the_last_twenty_episodes() -> None:
    curve = LearningCurve(np.arange(1, 41) * 10, np.concatenate([np.zeros(20), np.full(20, 100.0)]))
    assert curve.first_held(0.0) == 19
    assert curve.first_held(50.0) == 29
    assert curve.first_held(100.5) is None
    np.testing.assert_allclose(curve.smoothed(np.array([0, 5, 200, 205, 215, 300, 400])), [0, 0, 0, 0, 5, 50, 100])
    # 0 until step 200, then a straight line in steps of ten
    expected = np.maximum(np.linspace(0, 400, 201)[1:] // 10 - 20, 0) * 5
    assert curve.area(400) == pytest.approx(expected.mean())


@pytest.mark.parametrize("changes", [[0.0], [-0.5], [-1.2], [0.4]])
def test_ppo_gets_the_rate_that_grpo_has(changes: list[float]) -> None:
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    policy = MlpPolicy(action_space, action_space, lambda _: 0.02, log_std_init=math.log(0.3))
    model = PPO("MlpPolicy", IdentityEnvBox(), learning_rate=lambda progress: 0.04 * progress, n_steps=8, batch_size=8)
    callback = RateFollowsStd()
    callback.init_callback(model)
    callback.on_training_start({}, {})
    for each in (policy, model.policy):
        each.log_std.data += th.tensor(changes)
    policy.set_learning_rate(0.02)
    assert model.lr_schedule(0.5) == pytest.approx(policy.optimizer.param_groups[0]["lr"])


def test_the_deviation_of_a_policy_on_jax_is_found() -> None:
    state = SimpleNamespace(params={"params": {"log_std": np.array([0.1, -0.3], np.float32)}})  # as sbx keeps it
    assert log_std_of(SimpleNamespace(actor_state=state)).tolist() == pytest.approx([0.1, -0.3])


def test_observations_are_shifted_and_scaled_and_rewards_are_multiplied() -> None:
    plain, other = gym.make("Pendulum-v1"), Rescaled(gym.make("Pendulum-v1"), reward=-3.0, scale=10.0, shift=2.0)
    for env in (plain, other):
        env.reset(seed=0)
    expected, reward, *_ = plain.step(np.array([0.5], dtype=np.float32))
    found, other_reward, *_ = other.step(np.array([0.5], dtype=np.float32))
    np.testing.assert_allclose(found, 10.0 * (expected + 2.0), rtol=1e-6)
    assert other_reward == pytest.approx(-3.0 * float(reward))
    assert other.observation_space.contains(found) and other.observation_space.contains(other.reset(seed=1)[0])


@pytest.mark.parametrize(("algorithm", "is_same"), [(GRPO, True), (PPO, False)], ids=["GRPO", "PPO"])
def test_what_grpo_learns_does_not_depend_on_the_unit_of_rewards_and_what_ppo_learns_does(
    algorithm: Any, is_same: bool
) -> None:
    actions = []
    for reward in (1.0, 1024.0):
        env = make_vec_env("Pendulum-v1", 2, seed=0, wrapper_class=partial(Rescaled, reward=reward))
        model = algorithm("MlpPolicy", env, n_steps=64, batch_size=64, seed=0, device="cpu").learn(512)
        observations = np.random.default_rng(0).uniform(-1.0, 1.0, (20, 3)).astype(np.float32)
        actions.append(model.predict(observations, deterministic=True)[0])
    assert np.allclose(actions[0], actions[1], rtol=1e-2, atol=1e-4) == is_same


def test_the_quickstart_prints_a_screen_with_its_settings_its_result_and_its_files(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["quickstart", "--timesteps", "4096", "--out", str(tmp_path)])
    quickstart.main()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 24
    assert "Using the kernel buffer" in printed
    assert "rollout/" not in printed and "train/" not in printed
    result = re.search(r"20 evaluation episodes: (\d+\.\d) \+/- .* counts as solved from 475", printed)
    assert result and float(result[1]) > 60  # random actions get 23
    for name in ("CartPole-v1.zip", "CartPole-v1.png", "CartPole-v1.gif"):
        assert f" {tmp_path / name}\n" in printed and (tmp_path / name).is_file()


def test_the_quickstart_needs_only_what_make_train_installs():
    others = ["minatar", "minigrid", "moviepy", "mujoco", "pandas", "ray", "requests", "rl_zoo3", "rliable", "sb3_contrib"]
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import benchmarks.quickstart"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_animation_shows_that_the_trained_policy_moves(tmp_path: pathlib.Path):
    model = GRPO("MlpPolicy", "CartPole-v1", seed=0)
    assert quickstart.animation(model, "CartPole-v1", seed=0, path=tmp_path / "film.gif") == str(tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(film)]
    assert len(frames) > 50 and frames[0].shape == (226, 606, 3)
    assert np.abs(frames[0].astype(int) - frames[5]).max() > 100


def test_an_environment_without_pictures_costs_the_animation_alone(tmp_path: pathlib.Path):
    model = GRPO("MlpPolicy", "sb3_grpo/LostSales-v0", seed=0)
    text = quickstart.animation(model, "sb3_grpo/LostSales-v0", seed=0, path=tmp_path / "film.gif")
    assert text.startswith("none, because sb3_grpo/LostSales-v0 cannot be rendered here")


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


def test_trpo_with_our_settings_has_those_of_natural_gradient_steps_and_continuous_actions_alone() -> None:
    entries = {run.env: run.entry for run in expand(MATRIX, "proof") if run.arm == "trpo, our settings"}
    assert len(entries) == 9 and not {"CartPole-v1", "LunarLander-v3", "sb3_grpo/Queueing-v0"} & set(entries)
    assert {key: value for key, value in entries["Hopper-v5"].items() if key != "policy_kwargs"} == {
        "policy": "MlpPolicy",
        "n_envs": 8,
        "n_steps": 256,
        "n_timesteps": 300000,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "target_kl": 0.02,
        "normalize": "dict(norm_obs=True, norm_reward=True)",
    }
    model = GRPO("MlpPolicy", "Pendulum-v1")
    assert eval(entries["Pendulum-v1"]["policy_kwargs"])["log_std_init"] == pytest.approx(model.policy.log_std.item())


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
