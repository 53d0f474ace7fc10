"""rl-zoo3 with ``grpo``: every script, the shipped settings, the search, and the errors."""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import optuna
import pytest
import rl_zoo3
import rl_zoo3.exp_manager
import rl_zoo3.train
import torch as th
import yaml
from helpers import same
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_grpo import GRPO, MaskableGRPO, ObjectiveOptions, RecurrentGRPO
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.zoo import cli, register
from sb3_grpo.zoo.experiment import HYPERPARAMS, GRPOExperimentManager
from sb3_grpo.zoo.search import convert_grpo_params, sample_grpo_params

ENTRIES: dict[str, dict[str, Any]] = yaml.safe_load(HYPERPARAMS.read_text(encoding="utf-8"))
ALGOS = {**rl_zoo3.ALGOS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The zoo writes to the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    th.set_num_threads(1)


def train(*arguments: str, env: str = "CartPole-v1", algo: str = "grpo") -> None:
    cli.main(["train", "--algo", algo, "--env", env, "--num-threads", "1", "--eval-freq", "-1", "--seed", "1", *arguments])


def saved_weights(path: str | Path, algorithm: Any = GRPO) -> dict[str, th.Tensor]:
    return algorithm.load(path, device="cpu").policy.state_dict()


#: The rollouts of these tests are shorter than the batches of the settings.
SHORT_ROLLOUTS = pytest.mark.filterwarnings("ignore:batch_size=")
LAST = "logs/grpo/CartPole-v1_1/CartPole-v1.zip"


# --- registration -----------------------------------------------------------------------------------------------------


def test_registering_adds_grpo_and_leaves_the_others_alone():
    register()
    register()
    assert rl_zoo3.train.ExperimentManager is GRPOExperimentManager
    assert rl_zoo3.ALGOS["grpo"] is GRPO
    assert {
        name: algorithm for name, algorithm in rl_zoo3.ALGOS.items() if name not in ("grpo", "grpo_mask", "grpo_lstm")
    } == {name: algorithm for name, algorithm in ALGOS.items() if name != "grpo"}
    assert HYPERPARAMS_SAMPLER["grpo"] is sample_grpo_params and HYPERPARAMS_CONVERTER["grpo"] is convert_grpo_params


def test_a_script_of_ones_own_trains_grpo_after_registering(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(rl_zoo3.ALGOS, "grpo", raising=False)  # which another test has registered
    monkeypatch.setattr(rl_zoo3.train, "ExperimentManager", rl_zoo3.exp_manager.ExperimentManager)
    script = "from rl_zoo3.train import train\nfrom sb3_grpo.zoo import register\nregister()\ntrain()\n"
    (folder / "own.py").write_text(script)
    arguments = ["--algo", "grpo", "--env", "CartPole-v1", "-n", "64", "--eval-freq", "-1", "--num-threads", "1"]
    monkeypatch.setattr(sys, "argv", ["own.py", *arguments])
    runpy.run_path("own.py", run_name="__main__")
    assert Path(LAST).is_file()


WITHOUT_EXTRAS = """
import sys
sys.modules["ray"] = sys.modules["requests"] = None
try:
    import sb3_grpo.zoo
except ImportError as error:
    print(error)
del sys.modules["requests"]
from sb3_grpo.zoo.cli import main
main(sys.argv[1:])
"""


def test_without_an_extra_the_message_says_what_to_install_and_only_where_it_is_needed():
    arguments = ["train", "--algo", "grpo", "--env", "CartPole-v1", "--vec-env", "ray"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *arguments], capture_output=True, text=True)
    assert "sb3_grpo.zoo needs 'requests'" in done.stdout and "pip install 'sb3-grpo[zoo]'" in done.stdout
    assert done.returncode != 0 and "== CartPole-v1 ==" in done.stdout
    assert "which is not installed: run `pip install 'sb3-grpo[ray]'`" in done.stderr


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_each_script_shows_its_options_and_offers_grpo_where_it_takes_an_algorithm(capsys: pytest.CaptureFixture):
    without_algorithm = {"plot_train", "all_plots", "plot_from_file"}
    for script in set(cli.SCRIPTS) - {"push_to_hub"}:  # it needs a version of huggingface_sb3 that matches rl-zoo3's
        with pytest.raises(SystemExit) as stop:
            cli.main([script, "--help"])
        shown = capsys.readouterr().out
        assert stop.value.code == 0 and "usage: " in shown
        offered = shown.split("--algo")[-1].split("]")[0].split("}")[0]
        assert script in without_algorithm or (",ppo," in shown and "grpo" in offered)


def test_help_names_all_scripts_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture):
    for arguments in ([], ["--help"]):
        cli.main(arguments)
        shown = capsys.readouterr().out
        assert all(script in shown for script in cli.SCRIPTS)
    with pytest.raises(SystemExit, match="no script 'fly': pass one of train, enjoy"):
        cli.main(["fly"])


def test_training_with_evaluation_and_checkpoints_then_enjoying_resuming_and_plotting(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    # Two rollouts: a learning rate that decays to zero is zero in the last
    train("-n", "2048", "--eval-freq", "512", "--save-freq", "512")
    run = folder / "logs/grpo/CartPole-v1_1"
    saved = {path.name for path in run.iterdir()}
    assert {"CartPole-v1.zip", "best_model.zip", "evaluations.npz", "rl_model_512_steps.zip"} <= saved
    # The config holds what the file says, so that the run can be repeated
    config = yaml.load((run / "CartPole-v1/config.yml").read_text(), Loader=yaml.UnsafeLoader)
    assert config["n_envs"] == ENTRIES["CartPole-v1"]["n_envs"] == GRPO.load(LAST).n_envs

    for which in ([], ["--load-best"], ["--load-checkpoint", "512"]):
        capsys.readouterr()
        enjoy = ["enjoy", "--algo", "grpo", "--env", "CartPole-v1", "-f", "logs", "--no-render", "-n", "600"]
        cli.main([*enjoy, "--exp-id", "1", *which])
        assert "Mean reward: " in capsys.readouterr().out

    train("-n", "512", "-i", LAST, "-params", "learning_rate:0.0")
    resumed = "logs/grpo/CartPole-v1_2/CartPole-v1.zip"
    assert same(saved_weights(resumed), saved_weights(LAST))
    train("-n", "2048", "-i", LAST, "--eval-freq", "512")  # plot_from_file wants two runs
    changed = saved_weights("logs/grpo/CartPole-v1_3/CartPole-v1.zip")
    assert not any(th.equal(weight, saved_weights(LAST)[name]) for name, weight in changed.items())

    monkeypatch.setattr(plt, "show", lambda *_: None)
    cli.main(["plot_train", "-a", "grpo", "-e", "CartPole-v1", "-f", "logs", "-w", "5"])
    cli.main(["all_plots", "-a", "grpo", "-e", "CartPole-v1", "-f", "logs", "-o", "results"])
    cli.main(["plot_from_file", "-i", "results.pkl"])
    for name in ("plot_train", "all_plots", "plot_from_file"):
        assert plt.imread(f"{name}_1.png").std() > 0
    assert plt.get_fignums() == []


@pytest.mark.slow
@SHORT_ROLLOUTS
@pytest.mark.xdist_group("ray")
def test_on_ray_training_environments_are_in_workers_and_others_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch):
    ray = pytest.importorskip("ray")
    from sb3_grpo import distributed

    made: list[VecEnv] = []
    make_vec_env = rl_zoo3.exp_manager.make_vec_env

    def recorded(*args: Any, **kwargs: Any) -> VecEnv:
        made.append(make_vec_env(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(rl_zoo3.exp_manager, "make_vec_env", recorded)
    with monkeypatch.context() as context:
        context.setenv("RAY_ADDRESS", "127.0.0.1:9")  # a cluster that was not asked for
        distributed.connect()
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")  # the workers are elsewhere
    on_ray = ["-n", "64", "--vec-env", "ray", "--n-workers", "2"]
    try:
        train(*on_ray, "--eval-freq", "32", "-params", "n_envs:4", "n_steps:16")
        trained, made[:] = [*made], []
        train(*OPTIMIZE, *on_ray, "--n-trials", "1")
    finally:
        ray.shutdown()
    assert [type(env) for env in trained] == [DummyVecEnv, distributed.RayVecEnv]  # for evaluation, and for training
    assert [type(env) for env in made] == [DummyVecEnv, distributed.RayVecEnv, DummyVecEnv]  # for the spaces, and as above
    assert (trained[1].num_envs, trained[1].n_workers) == (4, 2)  # type: ignore[attr-defined]
    assert {path.name for path in Path(LAST).parent.glob("*.csv")} == {f"{i}.monitor.csv" for i in range(4)}
    assert GRPO.load(LAST, device="cpu").num_timesteps == 64


@pytest.mark.xdist_group("ray")
def test_the_address_of_a_cluster_is_used_and_a_wrong_one_is_named():
    pytest.importorskip("ray").shutdown()  # what another test has started
    with pytest.raises(ConnectionError, match=r"No Ray cluster answers at '127\.0\.0\.1:9' .* `ray start --head`"):
        train("-n", "64", "--vec-env", "ray", "--ray-address", "127.0.0.1:9")


@pytest.mark.parametrize(("option", "value"), [("--n-workers", "2"), ("--ray-address", "127.0.0.1:9")])
def test_an_option_of_ray_without_ray_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        train("-n", "64", option, value)
    assert f"`{option} {value}` is for `--vec-env ray`: pass `--vec-env ray` as well" in capsys.readouterr().err


@pytest.mark.slow
def test_ppo_is_what_it_is_in_plain_rl_zoo(folder: Path):
    arguments = "--algo ppo --env CartPole-v1 -n 2000 --seed 7 --num-threads 1 --eval-freq -1".split()
    subprocess.run([sys.executable, "-m", "rl_zoo3.train", *arguments, "-f", "plain"], check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "sb3_grpo.zoo", "train", *arguments, "-f", "ours"], check=True, capture_output=True)
    plain, ours = (saved_weights(f"{log}/ppo/CartPole-v1_1/CartPole-v1.zip", PPO) for log in ("plain", "ours"))
    assert all(th.equal(weight, ours[name]) for name, weight in plain.items())


# --- shipped settings -------------------------------------------------------------------------------------------------


def environment_of(entry: str) -> str:
    return {"default": "MountainCar-v0", "atari": "PongNoFrameskip-v4"}.get(entry, entry)


@SHORT_ROLLOUTS
@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_builds_its_model_and_learns(entry: str):
    env = environment_of(entry)
    if entry == "atari":
        pytest.importorskip("ale_py")
        gym.register_envs(pytest.importorskip("ale_py"))
    options = [] if entry == "default" else ["-params", "n_envs:2", "n_steps:16", "n_epochs:1"]
    train("-n", "32", *options, env=env)
    model = GRPO.load(f"logs/grpo/{env}_1/{env}.zip", device="cpu")
    assert model.num_timesteps >= 32
    hyperparams = ENTRIES[entry]
    assert hyperparams.get("n_steps", 64) * hyperparams.get("n_envs", 1) % hyperparams.get("batch_size", 64) == 0
    for name in ("gamma", "gae_lambda", "batch_size", "ent_coef", "max_grad_norm", "rollout_buffer_kwargs"):
        if name in hyperparams:
            assert getattr(model, name) == hyperparams[name]
    for name in ("learning_rate", "clip_range"):
        value = hyperparams.get(name)
        if isinstance(value, str):
            # A tenth of the run is left, and so a tenth of the value
            assert getattr(model, name)(0.1) == pytest.approx(0.1 * float(value.removeprefix("lin_")))
        elif value is not None:
            assert getattr(model, name)(0.1) == value


def test_the_entries_are_those_that_the_docs_promise():
    promised = ["default", "atari", "CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0", "LunarLander-v3"]
    promised += ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "MiniGrid-Empty-Random-5x5-v0", "MiniGrid-DoorKey-5x5-v0"]
    promised += ["LunarLanderContinuous-v3"]
    assert set(promised) <= set(ENTRIES)


def write_entry(folder: Path, *lines: str) -> None:
    """Write a hyperparameter file; lines replace those of the same key."""
    entry = {line.split(": ")[0]: line for line in ("n_timesteps: 64", "policy: MlpPolicy", *lines)}
    (folder / "own.yml").write_text("CartPole-v1:\n" + "".join(f"  {line}\n" for line in entry.values()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama: 0.9", "GRPO does not take `gama=0.9`: did you mean `gamma`?"),
        ("clip_range: cos_0.3", "`clip_range` must be a number, or 'lin_' .* not 'cos_0.3'"),
        ("objective: {kl_coef: -1}", "`kl_coef` must be a finite number of at least 0, not -1"),
        ("batch_size: 32.5", "`batch_size` must be an integer of at least 1, not 32.5"),
        ("n_timesteps: null", "`n_timesteps` must be an integer of at least 1, not None"),
        ("policy: null", "`policy` is None: write a name, such as `policy: MlpPolicy`"),
        ("normalize: tru", "`normalize` is 'tru', which is no Python expression"),
        ("policy_kwargs: dict(net_arch=[64", r"`policy_kwargs` is 'dict\(net_arch=\[64', which is no Python expression"),
    ],
    ids=lambda text: text.split(":")[0] if ": " in text else "",
)
def test_a_wrong_value_in_a_file_is_refused_with_the_file_and_the_entry(folder: Path, text: str, message: str):
    write_entry(folder, text)
    with pytest.raises(ValueError, match=f"Hyperparameters of CartPole-v1 from own.yml: .*{message}"):
        train("-conf", "own.yml")
    assert not Path(LAST).exists()


@SHORT_ROLLOUTS
def test_numbers_and_flags_are_understood_as_people_write_them(folder: Path):
    entry = dict(n_envs="2e0", n_timesteps="6.4e1", n_steps="16.0", batch_size="1e1", group_size="4.0", frame_stack="2e0")
    entry |= dict(
        learning_rate="1e-3",
        clip_range="2e-1",
        objective="{kl_coef: 1e-2, kl_reference: 2.0}",
        gamma="99e-2",
        target_kl="None",
    )
    entry |= dict(normalize="'true'", use_sde="'False'", rollout_buffer_kwargs="{ridge: 1e-4, n_features: 32.0}")
    write_entry(folder, *(f"{name}: {value}" for name, value in entry.items()))
    train("-conf", "own.yml")
    model: Any = GRPO.load(LAST, device="cpu")
    assert (model.n_envs, model.n_steps, model.batch_size, model.group_size, model.num_timesteps) == (2, 16, 10, 4, 64)
    assert (model.learning_rate(1.0), model.clip_range(1.0), model.gamma, model.target_kl) == (1e-3, 0.2, 0.99, None)
    assert model.objective == ObjectiveOptions(kl_coef=1e-2, kl_reference=2)
    assert model.rollout_buffer_kwargs == dict(ridge=1e-4, n_features=32) and not model.use_sde
    assert model.observation_space.shape == (8,)
    cli.main(["enjoy", "--algo", "grpo", "--env", "CartPole-v1", "-f", "logs", "--no-render", "-n", "20"])


def test_a_wrong_value_on_the_command_line_is_refused_with_the_command_line():
    with pytest.raises(ValueError, match=r"grpo.yml, with {'gama': 0.9} from the command line: GRPO does not take `gama"):
        train("-params", "gama:0.9")


def test_a_file_of_ones_own_is_used_as_it_is(folder: Path):
    buffer = ["rollout_buffer_class: stepwise", "rollout_buffer_kwargs: dict(scale='none')"]
    write_entry(folder, "n_steps: 32", "objective: 'dict(clip_range_high=lambda progress: 0.3 * progress)'", *buffer)
    train("-conf", "own.yml")
    model = GRPO.load(LAST, device="cpu")
    assert model.rollout_buffer_class is BUFFERS["stepwise"]
    assert model.rollout_buffer.scale == "none"  # type: ignore[attr-defined]
    assert model.objective.clip_range_high(0.5) == 0.15  # type: ignore[operator, misc]


# --- search -----------------------------------------------------------------------------------------------------------


def sampled(n_trials: int) -> list[tuple[optuna.trial.FrozenTrial, dict[str, Any]]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = []
    for _ in range(n_trials):
        trial = study.ask()
        found.append((trial, sample_grpo_params(trial, 1, 2, {})))
    return found  # type: ignore[return-value]


@SHORT_ROLLOUTS
def test_every_sampled_configuration_is_valid():
    seen: dict[str, int] = {}
    for trial, hyperparams in sampled(60):
        buffer, rule = hyperparams["rollout_buffer_class"], hyperparams["update_rule"]
        for name in (buffer, rule):
            seen[name] = seen.get(name, 0) + 1
        hyperparams["n_steps"] = min(hyperparams.get("n_steps", 64), 64)  # storage that nobody reads takes time
        model = GRPO("MlpPolicy", "CartPole-v1", device="cpu", **hyperparams)
        assert type(model.rollout_buffer) is BUFFERS[buffer] and model.update_rule == rule
        assert ("target_kl" in hyperparams) == (rule == "natural") == ("learning_rate" not in hyperparams)
        assert ("ridge" in hyperparams["rollout_buffer_kwargs"]) == (buffer == "kernel") == ("forgetting" in trial.params)
        assert ("scale" in hyperparams["rollout_buffer_kwargs"]) == (buffer != "kernel")
        assert 0 < hyperparams["gamma"] < 1 and 0 < hyperparams["gae_lambda"] < 1
    assert set(seen) == {*BUFFERS, "clipped", "natural"} and min(seen.values()) > 3


def test_the_converter_gives_the_settings_of_the_sampler():
    for trial, hyperparams in sampled(30):
        assert convert_grpo_params(trial.params) == hyperparams


OPTIMIZE = ["-n", "1000", "-optimize", "--n-trials", "2", "--n-evaluations", "1", "--no-optim-plots"]


@SHORT_ROLLOUTS
def test_a_search_of_two_trials_completes_both(folder: Path):
    train(*OPTIMIZE, "--storage", "study.log", "--study-name", "search")
    storage = JournalStorage(JournalFileBackend("study.log"))
    study = optuna.load_study(study_name="search", storage=storage)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    assert all(np.isfinite(trial.values[0]) for trial in study.trials)
    assert len(list((folder / "logs/grpo").glob("report_*.csv"))) == 1

    # A trial's settings can be trained with: the converter is the zoo's way back from a study
    train("-n", "64", "--storage", "study.log", "--study-name", "search", "--trial-id", "1")
    [trained] = (folder / "logs/grpo").glob("CartPole-v1_*/CartPole-v1.zip")
    assert GRPO.load(trained, device="cpu").gamma == pytest.approx(1 - study.trials[1].params["one_minus_gamma"])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["study.log", "sqlite:///study.db"])
def test_two_processes_share_one_study(storage: str):
    command = [sys.executable, "-m", "sb3_grpo.zoo", "train", "--algo", "grpo", "--env", "CartPole-v1", "--num-threads", "1"]
    command += [*OPTIMIZE, "--storage", storage, "--study-name", "shared"]
    opened = JournalStorage(JournalFileBackend(storage)) if storage.endswith(".log") else storage
    if opened == storage:  # a new database is set up by one process
        optuna.create_study(study_name="shared", storage=opened, direction="maximize")
    workers = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    trials = optuna.load_study(study_name="shared", storage=opened).trials
    # Two of each process, and none tries what the other does
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    assert len({trial.params["ent_coef"] for trial in trials}) == 4


# --- masks ------------------------------------------------------------------------------------------------------------


@SHORT_ROLLOUTS
def test_masks_are_used_in_training_and_in_evaluation(folder: Path, monkeypatch: pytest.MonkeyPatch):
    evaluated = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        evaluated.append(kwargs["use_masking"])
        return evaluate_policy(*args, **kwargs)

    monkeypatch.setattr("sb3_contrib.common.maskable.callbacks.evaluate_policy", watched)
    env = "sb3_grpo/FullServers-v0"
    options = ["-n", "512", "--eval-freq", "256", "--eval-episodes", "1", "--num-threads", "1"]
    cli.main(["train", "--algo", "grpo_mask", "--env", env, "--gym-packages", "benchmarks.tasks", *options])
    (path,) = folder.glob("logs/grpo_mask/*/*FullServers-v0.zip")
    model = MaskableGRPO.load(path, device="cpu")
    assert model.num_timesteps >= 512 and evaluated and all(evaluated)


@SHORT_ROLLOUTS
def test_policies_with_memory_train_from_the_entries_of_others(folder: Path):
    cli.main(["train", "--algo", "grpo_lstm", "--env", "CartPole-v1", "-n", "512", "--num-threads", "1"])
    (path,) = folder.glob("logs/grpo_lstm/*/CartPole-v1.zip")
    model = RecurrentGRPO.load(path, device="cpu")
    assert model.num_timesteps >= 512 and model.policy.state_size == 128
