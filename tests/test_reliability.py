"""Nothing learned is lost: continuing, saving, faults of environments, interrupts, versions."""

import copy
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from faults import Fault, FaultyEnv
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize

from sb3_grpo import GRPO, EnvironmentFault, load_actor, persistence
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.losses import KL_COEF_BOUNDS

BROKEN = 1  # index of the environment that fails
Weights = dict[str, th.Tensor]


def weights(model: GRPO) -> Weights:
    return {name: weight.clone() for name, weight in model.policy.state_dict().items()}


def same(left: Weights, right: Weights) -> bool:
    return all(th.equal(weight, right[name]) for name, weight in left.items())


def is_finite(model: GRPO) -> bool:
    moments = [value for state in model.policy.optimizer.state.values() for value in state.values()]
    return all(bool(th.isfinite(tensor).all()) for tensor in (*weights(model).values(), *moments))


def make_model(env: Any = "CartPole-v1", **kwargs: Any) -> GRPO:
    settings: dict[str, Any] = dict(
        n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu", policy_kwargs=dict(net_arch=[8])
    )
    return GRPO("MlpPolicy", env, **{**settings, **kwargs})


def restart(model: GRPO) -> None:
    """Begin with a reset, as a loaded model does."""
    env = model.get_env()
    assert env is not None
    model.set_env(env)


# --- continuing -------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: dict(rollout_buffer_class=name) for name in BUFFERS},
    "schedules": dict(learning_rate=lambda progress: 1e-3 * progress, clip_range=lambda progress: 0.1 + 0.1 * progress),
    "reference every third update": dict(kl_coef=0.1, kl_reference=3),
    "polyak reference": dict(kl_coef=0.1, kl_reference="polyak"),
    "adaptive penalty": dict(kl_coef=0.1, adaptive_kl_target=0.5),
    "reused rollouts": dict(n_reused_rollouts=2),
    "gSDE": dict(env="Pendulum-v1", use_sde=True),
    "log_std_lr_factor": dict(env="Pendulum-v1", policy_kwargs=dict(net_arch=[8], log_std_lr_factor=8.0)),
    "LSTD": dict(env="Pendulum-v1", rollout_buffer_kwargs=dict(fit="lstd")),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_loaded_model_goes_on_as_the_saved_one_bit_for_bit(settings: dict[str, Any], tmp_path: Path):
    env = settings.get("env", "CartPole-v1")
    model = make_model(**settings).learn(320)
    model.save(tmp_path / "model")

    restart(model)
    model.learn(320, reset_num_timesteps=False)
    expected, coefficient = weights(model), model.kl_coef

    # Whatever this process has drawn or seeded in between makes no difference
    random.seed(7), np.random.seed(7), th.manual_seed(7)
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env(env, 1), device="cpu")
    before = weights(loaded)
    loaded.learn(320, reset_num_timesteps=False)
    assert same(weights(loaded), expected)
    assert loaded.num_timesteps == model.num_timesteps and loaded.kl_coef == coefficient
    # What starts from wrong statistics would differ only by what was learned since
    assert settings.get("rollout_buffer_class") == "process" or not same(before, expected)


CONTINUE = """
import sys, torch
from stable_baselines3.common.env_util import make_vec_env
from sb3_grpo import GRPO
torch.set_num_threads(1)
model = GRPO.load(sys.argv[1], env=make_vec_env("CartPole-v1", 1), device="cpu")
model.learn(320, reset_num_timesteps=False)
torch.save(model.policy.state_dict(), sys.argv[2])
"""


def test_a_model_loaded_in_a_new_process_goes_on_as_the_saved_one_bit_for_bit(tmp_path: Path):
    model = make_model().learn(320)
    model.save(tmp_path / "model.zip")
    subprocess.run([sys.executable, "-c", CONTINUE, tmp_path / "model.zip", tmp_path / "weights.pt"], check=True)
    restart(model)
    model.learn(320, reset_num_timesteps=False)
    assert same(th.load(tmp_path / "weights.pt"), weights(model))


def test_a_seed_that_is_passed_begins_a_stream_of_its_own(tmp_path: Path):
    make_model().learn(128).save(tmp_path / "model")
    runs: dict[int | None, Weights] = {}
    for seed in (None, 5, 5, 6):
        kwargs: dict[str, Any] = {} if seed is None else {"seed": seed}
        model = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 1), device="cpu", **kwargs)
        assert model.start_queue is not None and (seed is None or model.start_queue.next_index == 0)
        model.learn(128, reset_num_timesteps=False)
        if seed in runs:
            assert same(runs[seed], weights(model))
        runs[seed] = weights(model)
    assert not same(runs[5], runs[6]) and not same(runs[5], runs[None])


def test_a_seed_that_is_set_after_loading_begins_a_stream_of_its_own(tmp_path: Path):
    make_model().learn(128).save(tmp_path / "model")
    runs = []
    for seed in (5, 5, 6):
        model = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 1), device="cpu")
        model.set_random_seed(seed)
        model.learn(128, reset_num_timesteps=False)
        runs.append((weights(model), random.random()))
    assert same(runs[0][0], runs[1][0]) and not same(runs[0][0], runs[2][0])
    assert runs[0][1] == runs[1][1] != runs[2][1]


def test_loading_a_model_to_predict_leaves_the_random_generators_of_a_run_alone(tmp_path: Path):
    make_model(seed=None).learn(64).save(tmp_path / "model")
    drawn = set()
    for seed in (1, 2):
        th.manual_seed(seed), np.random.seed(seed)
        GRPO.load(tmp_path / "model", device="cpu").predict(np.zeros(4), deterministic=True)
        drawn.add((th.rand(1).item(), np.random.rand()))
    assert len(drawn) == 2


def test_a_model_that_is_loaded_and_saved_again_goes_on_as_the_first(tmp_path: Path):
    model = make_model().learn(128)
    model.save(tmp_path / "first")
    GRPO.load(tmp_path / "first", device="cpu").save(tmp_path / "second")
    found = []
    for name in ("first", "second"):
        loaded = GRPO.load(tmp_path / name, env=make_vec_env("CartPole-v1", 1), device="cpu")
        found.append(weights(loaded.learn(128, reset_num_timesteps=False)))
    assert same(*found)


@pytest.mark.parametrize(
    "option", [{"n_features": 32}, {"bandwidth": 1.0}, {"time_feature": False}, {"fit": "regression"}], ids=str
)
def test_a_baseline_with_other_features_begins_afresh(option: dict[str, Any], tmp_path: Path):
    make_model().learn(64).save(tmp_path / "model")
    with pytest.warns(UserWarning, match="its fit begins afresh"):
        loaded: Any = GRPO.load(
            tmp_path / "model", env=make_vec_env("CartPole-v1", 1), device="cpu", rollout_buffer_kwargs=option
        )
    assert loaded.rollout_buffer.baseline._input_statistics is None
    loaded.learn(64)
    assert is_finite(loaded)


def test_parameters_are_taken_with_the_reference_they_belong_to(tmp_path: Path):
    model = make_model(kl_coef=0.1).learn(128)
    model.save(tmp_path / "model.zip")
    fresh = make_model(kl_coef=0.1, seed=1)
    fresh.set_parameters(str(tmp_path / "model.zip"))
    assert fresh.kl_reference_policy is not None and model.kl_reference_policy is not None
    assert same(fresh.kl_reference_policy.state_dict(), model.kl_reference_policy.state_dict())
    assert same(weights(fresh), weights(model))


def test_a_model_can_go_back_to_parameters_from_before_there_was_a_reference():
    model = make_model(kl_coef=0.1)
    first = copy.deepcopy(model.get_parameters())
    model.learn(128)
    model.set_parameters(first)
    assert same(weights(model), first["policy"])
    assert model.kl_reference_policy is None
    model.learn(64)  # 64 transitions are one update: the reference is the policy that it began with
    assert model.kl_reference_policy is not None
    assert same(first["policy"], model.kl_reference_policy.state_dict())


def test_parameters_that_do_not_fit_leave_the_reference_alone():
    model = make_model(kl_coef=0.1).learn(64)
    reference = model.kl_reference_policy
    with pytest.raises(ValueError, match="do not match"):
        model.set_parameters({})
    assert model.kl_reference_policy is reference is not None
    model.learn(64, reset_num_timesteps=False)
    assert model.kl_reference_policy is reference


def test_waiting_transitions_are_dropped_by_a_reset_in_either_model(tmp_path: Path):
    model = make_model(rollout_buffer_class="outcome", n_steps=7).learn(7)
    buffer: Any = model.rollout_buffer
    assert buffer._waiting is not None and len(buffer._waiting) > 0
    model.save(tmp_path / "model")
    loaded: Any = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 1), device="cpu")
    assert loaded.rollout_buffer._waiting is None
    restart(model)
    model.learn(7, reset_num_timesteps=False)
    assert model.rollout_buffer.metrics["rollout/transitions_dropped"] == 7


# --- saving -----------------------------------------------------------------------------------------------------------


def kill_while_saving(model: GRPO, path: Path, delay: float) -> None:
    """A process of its own saves again and again, each time another number of timesteps, and is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            while True:
                model.num_timesteps += 1
                model.save(path)
        finally:
            os._exit(1)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_process_killed_while_it_saves_leaves_a_whole_file(tmp_path: Path):
    model = make_model().learn(64)
    path = tmp_path / "model.zip"
    model.save(path)
    began = time.monotonic()
    model.save(path)
    delays = np.random.default_rng(0).uniform(0.0, 8.0 * (time.monotonic() - began), size=40)
    seen = set()
    for delay in delays:
        kill_while_saving(model, path, float(delay))
        loaded = GRPO.load(path, device="cpu")
        assert same(weights(loaded), weights(model))
        seen.add(loaded.num_timesteps)
    assert len(seen) > 1  # some were killed after they had replaced the file


def test_a_save_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = make_model().learn(64)
    path = tmp_path / "model.zip"
    model.save(path)
    old = path.read_bytes()

    def no_space(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space left"):
        model.learn(64).save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_where_sb3_would_put_it(tmp_path: Path):
    model = make_model()
    model.save(tmp_path / "new folder" / "model")
    model.save(str(tmp_path / "model.v1"))
    stream = io.BytesIO()
    model.save(stream)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"new folder/model.zip", "model.v1"}
    stream.seek(0)
    for source in (tmp_path / "new folder/model", tmp_path / "model.v1", stream):
        assert same(weights(GRPO.load(source, device="cpu")), weights(model))


def test_a_link_is_followed_and_permissions_stay(tmp_path: Path):
    model = make_model()
    target, link = tmp_path / "run3.zip", tmp_path / "latest.zip"
    model.save(target)
    target.chmod(0o640)
    link.symlink_to(target)
    model.learn(64).save(link)
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert GRPO.load(target, device="cpu").num_timesteps == 64


def test_what_is_no_archive_is_refused_as_sb3_does(tmp_path: Path):
    (tmp_path / "model.zip").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="wasn't a zip-file"):
        GRPO.load(tmp_path / "model.zip")


def test_checkpoints_are_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = []
    original = os.replace

    def replace(source: Path, target: Path) -> None:
        written.append(Path(target).name)
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    make_model().learn(128, callback=CheckpointCallback(64, str(tmp_path)))
    assert written == ["rl_model_64_steps.zip", "rl_model_128_steps.zip"]


def test_weights_are_taken_from_a_file_without_unpickling_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = make_model().learn(64)
    model.save(tmp_path / "model.zip")
    fresh = make_model(seed=1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object was unpickled")

    monkeypatch.setattr("cloudpickle.loads", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    load_actor(fresh, tmp_path / "model.zip")
    assert same(weights(fresh), weights(model))
    with pytest.raises(AssertionError, match="an object was unpickled"):
        GRPO.load(tmp_path / "model.zip", device="cpu")


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_saved_model_says_which_version_saved_it(tmp_path: Path):
    make_model().save(tmp_path / "model")
    assert persistence.read_version(tmp_path / "model") == persistence.VERSION
    with (tmp_path / "model.zip").open("rb") as stream:
        assert persistence.read_version(stream) == persistence.VERSION
        assert stream.tell() == 0


def with_version(path: Path, version: str | None) -> Path:
    """A copy of a saved model that says it was saved by another version, or by none."""
    copy = path.with_name("copy.zip")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
        for name in source.namelist():
            if name != persistence.VERSION_ENTRY:
                target.writestr(name, source.read(name))
        if version is not None:
            target.writestr(persistence.VERSION_ENTRY, version)
    return copy


def test_a_file_of_a_newer_major_version_is_refused_before_it_is_unpickled(tmp_path: Path):
    make_model().save(tmp_path / "model.zip")
    newer = with_version(tmp_path / "model.zip", f"{int(persistence.VERSION.split('.')[0]) + 1}.2.3")
    with pytest.raises(ValueError, match=r"saved by sb3-grpo \d+\.2\.3, and this is .* install sb3-grpo \d+ to load it"):
        GRPO.load(newer)


def test_a_file_of_an_older_major_version_loads_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_model().save(tmp_path / "model.zip")
    monkeypatch.setattr(persistence, "VERSION", "7.0.0")
    with pytest.warns(UserWarning, match=r"saved by sb3-grpo 0\.\d+\.\d+, and this is 7\.0\.0: the changelog says"):
        GRPO.load(tmp_path / "model.zip", device="cpu")


def test_a_file_that_does_not_say_its_version_loads(tmp_path: Path):
    model = make_model()
    model.save(tmp_path / "model.zip")
    assert same(weights(GRPO.load(with_version(tmp_path / "model.zip", None), device="cpu")), weights(model))


# --- faults -----------------------------------------------------------------------------------------------------------

EVERYWHERE: dict[Fault, str] = {
    "raises": rf"Environment {BROKEN} ",
    "raises in reset": rf"Environment {BROKEN} ",
    "nan observation": rf"Environment {BROKEN} returned a non-finite observation after \d+ timesteps: \[nan nan nan\]",
    "nan first observation": rf"Environment {BROKEN} returned a non-finite observation after \d+ timesteps: \[nan nan nan\]",
    "nan final observation": rf"Environment {BROKEN} returned a non-finite final observation after \d+ timesteps: \[nan",
    "infinite reward": rf"Environment {BROKEN} returned a non-finite reward after \d+ timesteps: inf",
    "fewer numbers": rf"Environment {BROKEN} returned an observation of shape \(2,\), but its space has shape \(3,\)",
    "a single number": rf"Environment {BROKEN} returned an observation of shape \(1,\), but its space has shape \(3,\)",
}
IN_WORKERS: dict[Fault, str] = {
    **EVERYWHERE,
    "dies": rf"Environment {BROKEN} is gone: its process has ended with exit code 3",
    "hangs": rf"Environment {BROKEN} has taken longer than `worker_timeout` allows",
}
BASES: dict[str, Callable[[list[Any]], VecEnv]] = {
    "dummy": DummyVecEnv,
    "forked": lambda env_fns: SubprocVecEnv(env_fns, start_method="fork"),
    "served": lambda env_fns: SubprocVecEnv(env_fns, start_method="forkserver"),
}
CASES = [
    pytest.param(base, fault, at_step, id=f"{base}-{fault}-at {at_step}", marks=[pytest.mark.slow] * (base == "served"))
    for base in BASES
    for fault in (EVERYWHERE if base == "dummy" else IN_WORKERS)
    for at_step in (3, 21)
]


def env_functions(fault: Fault, at_step: int) -> list[Any]:
    return [FaultyEnv, lambda: FaultyEnv(fault, at_step), FaultyEnv]


@pytest.fixture
def close() -> Iterator[Callable[[VecEnv], VecEnv]]:
    envs: list[VecEnv] = []

    def remember(env: VecEnv) -> VecEnv:
        envs.append(env)
        return env

    yield remember
    for env in envs:
        env.close()


@pytest.mark.filterwarnings("ignore:The environment 'FaultyEnv'")
@pytest.mark.parametrize(("base", "fault", "at_step"), CASES)
def test_a_fault_surfaces_at_once_and_the_model_learns_on(base, fault, at_step, close, tmp_path: Path):
    """One fault before the first update, one after it; rollouts have 16 steps."""
    env = close(VecNormalize(BASES[base](env_functions(fault, at_step))))
    model = make_model(env, n_steps=16, worker_timeout=2.0)
    initial = weights(model)
    began = time.monotonic()
    # A worker's own exception ends it, and its traceback goes to the error stream
    with pytest.raises((EnvironmentFault, ValueError, RuntimeError), match=IN_WORKERS[fault]) as raised:
        model.learn(10_000)
    assert time.monotonic() - began < 20.0
    if base == "dummy" and fault.startswith("raises"):
        assert isinstance(raised.value, EnvironmentFault) and raised.value.env_idx == BROKEN
        assert isinstance(raised.value.__cause__, ZeroDivisionError)

    # Nothing that is wrong has been learned, by the policy or by what normalises
    assert is_finite(model)
    assert same(initial, weights(model)) == (model.num_timesteps < 16 * 3)
    assert np.isfinite(env.obs_rms.mean).all() and np.isfinite(env.obs_rms.var).all() and np.isfinite(env.ret_rms.var)
    model.save(tmp_path / "model")
    assert same(weights(GRPO.load(tmp_path / "model", device="cpu")), weights(model))

    before = weights(model)
    model.set_env(VecNormalize(DummyVecEnv([FaultyEnv] * 3)))
    model.learn(16 * 3 * 2, reset_num_timesteps=False)
    assert is_finite(model) and not same(before, weights(model))


def test_an_environment_that_ignores_seeds_is_noticed_and_trained_on(close):
    env = close(SubprocVecEnv(env_functions("ignores seeds", 0), start_method="fork"))
    with pytest.warns(UserWarning, match="does not reproduce its initial state"):
        model = make_model(env, n_steps=16).learn(96)
    assert is_finite(model)
    assert model.logger.name_to_value.get("rollout/start_mismatches", 1) > 0


def test_without_a_fault_workers_and_a_time_out_give_what_one_process_gives(close):
    models = []
    for base in ("dummy", "forked"):
        env = close(BASES[base](env_functions("none", 0)))
        models.append(make_model(env, n_steps=16, worker_timeout=30.0).learn(96))
    assert same(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("kl_coef", [0.0, 1e-3], ids=["closed form", "autograd"])
def test_an_update_whose_gradient_is_not_finite_is_undone(kl_coef: float):
    model = make_model(kl_coef=kl_coef).learn(64)
    assert model.policy.closed_form() is not None
    before, moments = weights(model), copy.deepcopy(model.policy.optimizer.state_dict()["state"])
    buffer: Any = model.rollout_buffer  # which still holds the last update
    advantages = buffer._update.advantages.clone()
    advantages[5] = float("nan")
    buffer._update = buffer._update._replace(advantages=advantages)
    with pytest.raises(ValueError, match=r"gradient of update \d+ is not finite|found invalid values"):
        model.train()
    assert same(before, weights(model)) and is_finite(model)
    after = model.policy.optimizer.state_dict()["state"]
    assert all(th.equal(value, after[index][name]) for index, state in moments.items() for name, value in state.items())
    model.learn(64, reset_num_timesteps=False)
    assert is_finite(model) and not same(before, weights(model))


def test_an_update_whose_weights_are_not_finite_is_undone():
    """The last step of an update has no gradient after it to tell."""
    model = make_model(n_epochs=1, batch_size=64).learn(64)
    before = weights(model)

    def step(*args: Any) -> None:
        with th.no_grad():
            next(model.policy.parameters()).fill_(float("inf"))

    model.policy.optimizer.step = step
    with pytest.raises(ValueError, match=r"weights after update \d+ are not finite"):
        model.learn(64, reset_num_timesteps=False)
    assert same(before, weights(model))


def test_a_fault_arrives_from_another_process_as_what_it_is():
    fault = pickle.loads(pickle.dumps(EnvironmentFault(3, "is gone", "A hint.")))
    assert isinstance(fault, EnvironmentFault) and fault.env_idx == 3
    assert str(fault) == str(EnvironmentFault(3, "is gone", "A hint."))


def test_what_a_wrapper_mends_is_no_fault():
    class Mended(VecEnvWrapper):
        def reset(self) -> Any:
            return np.nan_to_num(np.asarray(self.venv.reset()))

        def step_wait(self) -> Any:
            observations, rewards, dones, infos = self.venv.step_wait()
            for info in infos:
                if "terminal_observation" in info:
                    info["terminal_observation"] = np.nan_to_num(info["terminal_observation"])
            return np.nan_to_num(np.asarray(observations)), rewards, dones, infos

    model = make_model(Mended(DummyVecEnv(env_functions("nan observation", 3))), n_steps=16).learn(96)
    assert is_finite(model)


@pytest.mark.parametrize("base", ["dummy", "forked"])
@pytest.mark.filterwarnings("ignore:The environment 'FaultyEnv'")
def test_a_first_observation_of_another_shape_is_not_broadcast(base: str, close):
    env = close(BASES[base](env_functions("fewer numbers in reset", 12)))
    with pytest.raises(EnvironmentFault, match=rf"Environment {BROKEN} returned an observation of shape \(1,\)") as raised:
        make_model(env, n_steps=16).learn(960)
    assert raised.value.env_idx == BROKEN


# --- interrupts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """An alarm is what Ctrl-C is: an interrupt between two bytecodes, wherever the run is."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """
    One interrupt. It may be lost where Python swallows exceptions, as in a finaliser: then another one comes a second later.
    What runs inside has to go on until it is interrupted.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    with pytest.raises(KeyboardInterrupt):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_an_interrupt_at_any_moment_leaves_a_model_that_saves_and_goes_on(buffer: str, ctrl_c, tmp_path: Path):
    model = make_model(make_vec_env("CartPole-v1", 4), rollout_buffer_class=buffer, n_steps=32, n_epochs=5)
    model.learn(128)
    began = time.monotonic()
    model.learn(128 * 5, reset_num_timesteps=False)
    rollout = (time.monotonic() - began) / 5
    delays = np.random.default_rng(0).uniform(0.2, 3.0, size=30) * rollout
    for delay in delays:
        with interrupt_after(float(delay)):
            model.learn(100_000, reset_num_timesteps=False)
        assert is_finite(model)
        model.save(tmp_path / "model")
        loaded = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 4), device="cpu")
        assert same(weights(loaded), weights(model))
        loaded.learn(128, reset_num_timesteps=False)
        assert is_finite(loaded)
    before = weights(model)
    model.learn(128 * 4, reset_num_timesteps=False)
    assert is_finite(model) and not same(before, weights(model))


def test_an_update_that_is_interrupted_is_undone():
    model = make_model(n_epochs=50).learn(64)
    before, n_updates, moments = weights(model), model._n_updates, copy.deepcopy(model.policy.optimizer.state_dict()["state"])
    original, calls = model.policy.optimizer.step, []

    def step(*args: Any) -> None:
        calls.append(original())
        if len(calls) == 7:
            raise KeyboardInterrupt

    model.policy.optimizer.step = step
    with pytest.raises(KeyboardInterrupt):
        model.learn(64, reset_num_timesteps=False)
    assert len(calls) == 7 and model._n_updates == n_updates
    assert same(before, weights(model))
    after = model.policy.optimizer.state_dict()["state"]
    assert all(th.equal(value, after[index][name]) for index, state in moments.items() for name, value in state.items())


@pytest.mark.parametrize("asked", ["step", "reset", "reset and step"])
def test_answers_that_nobody_waited_for_are_not_taken_for_others(asked: str, close):
    """An interrupt may come between question and answer, of a step or of the reset of a single environment."""
    env = close(SubprocVecEnv(env_functions("none", 0), start_method="fork"))
    model = make_model(env, n_steps=16).learn(96)
    expected = copy.deepcopy(model.start_queue)
    for remote in env.remotes:
        if "reset" in asked:
            remote.send(("reset", (123, None)))
        if "step" in asked:
            remote.send(("step", 0))
    restart(model)
    observed = []

    class First(BaseCallback):
        def _on_step(self) -> bool:
            observed.append(self.locals["obs_tensor"].numpy())
            return len(observed) < 5

    model.learn(96, callback=First(), reset_num_timesteps=False)
    assert expected is not None
    expected.begin_group()
    seeds = [expected.take().seed for _ in range(3)]
    np.testing.assert_array_equal(observed[0], [FaultyEnv().reset(seed=seed)[0] for seed in seeds])


def test_workers_interrupted_in_a_step_are_reset_not_misunderstood(close):
    """The answers to the step that nobody waited for are still in the pipes."""
    env = close(SubprocVecEnv(env_functions("none", 0), start_method="fork"))
    model = make_model(env, n_steps=16)

    class InterruptedStep(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps > 100:
                env.step_async(np.zeros(3, dtype=int))
                raise KeyboardInterrupt
            return True

    with pytest.raises(KeyboardInterrupt):
        model.learn(1000, callback=InterruptedStep())
    assert env.waiting
    before = weights(model)
    model.learn(96, reset_num_timesteps=False)
    assert is_finite(model) and not same(before, weights(model))


@pytest.mark.parametrize("stop_at", [5, 64, 70], ids=["first rollout", "its last step", "second rollout"])
def test_a_callback_stops_within_the_step_and_leaves_a_model_that_goes_on(stop_at: int):
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.num_timesteps < stop_at

    model = make_model().learn(1000, callback=Stop())
    assert model.num_timesteps == stop_at
    model.learn(128, reset_num_timesteps=False)
    assert is_finite(model)


def test_the_adaptive_coefficient_stays_where_it_can_find_back():
    model = make_model(kl_coef=0.1, adaptive_kl_target=1e-9, n_epochs=1).learn(640)
    assert KL_COEF_BOUNDS[0] <= model.kl_coef <= KL_COEF_BOUNDS[1]
