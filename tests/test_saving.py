"""Files: what they keep, how a run continues from one, and which are refused."""

import pathlib
from typing import Any

import numpy as np
import pytest
import torch as th
from helpers import (
    KERNEL_AND_GROUPS,
    OBSERVED,
    AnyEnv,
    Starts,
    Watcher,
    assert_trained,
    make_envs,
    make_model,
    reference_weights,
    reload,
    same,
    saved,
    weights,
)
from stable_baselines3 import A2C, PPO, SAC

from sb3_grpo import GRPO, GroupRolloutBuffer, load_actor
from sb3_grpo.persistence import random_state, set_random_state


class RewardIsAdvantage(GroupRolloutBuffer):
    """A buffer as users might write it."""

    def _form_update(self, rollout, last_obs, policy):
        return rollout, rollout.rewards


# --- A new run, or the same one ---------------------------------------------------------------------------------------


def run(model: Any, **kwargs: Any) -> tuple[list[tuple[float, ...]], list[np.ndarray], dict[str, th.Tensor]]:
    """:return: First observations, actions and final weights of a run of 64 steps"""
    starts, watcher = Starts(), Watcher()
    model.learn(64, callback=[starts, watcher], **kwargs)
    return [starts.firsts[start] for start in sorted(starts.firsts)], watcher.actions, weights(model)


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
def test_runs_from_one_checkpoint_are_different_runs_unless_they_continue_it(buffer: str):
    model = make_model(seed=None, rollout_buffer_class=buffer).learn(64)
    file, state = saved(model), random_state()

    def load() -> Any:
        file.seek(0)
        return GRPO.load(file, env=make_envs(), device="cpu")

    new = [run(load()) for _ in range(2)]
    assert set(new[0][0]).isdisjoint(new[1][0])
    assert not np.array_equal(new[0][1], new[1][1])
    assert not same(new[0][2], new[1][2])

    model.set_env(make_envs(), force_reset=True)  # as a loaded model, the saved one continues from a reset
    saved_again = GRPO.load(saved(load()), env=make_envs(), device="cpu")
    continued = [run(each, reset_num_timesteps=False) for each in (load(), load(), saved_again)]
    set_random_state(state)
    expected = run(model, reset_num_timesteps=False)
    for firsts, actions, after in continued:
        assert firsts == expected[0]
        np.testing.assert_array_equal(actions, expected[1])
        assert same(after, expected[2])


@pytest.mark.parametrize("when", ["while loading", "after loading"])
def test_without_a_forced_reset_a_loaded_model_begins_with_one_as_well(when: str):
    file, env = saved(make_model(rollout_buffer_class="outcome").learn(64)), make_envs()
    env.reset()
    if when == "while loading":
        model = GRPO.load(file, env=env, force_reset=False)
    else:
        model = GRPO.load(file)
        model.set_env(env, force_reset=False)
    watcher = Watcher()
    model.learn(64, watcher, reset_num_timesteps=False)
    assert not watcher.positions[0].steps.any() and watcher.positions[1].steps.all()


@pytest.mark.parametrize("when", ["while loading", "after loading"])
def test_a_seed_begins_a_new_run(when: str):
    file, runs = saved(make_model(seed=None).learn(64)), []
    for seed in (1, 1, 2):
        file.seek(0)
        arguments: dict[str, Any] = dict(seed=seed) if when == "while loading" else {}
        loaded = GRPO.load(file, env=make_envs(), device="cpu", **arguments)
        if when == "after loading":
            loaded.set_random_seed(seed)
        runs.append(run(loaded, reset_num_timesteps=False))
    assert runs[0][0] == runs[1][0] and same(runs[0][2], runs[1][2])
    assert set(runs[0][0]).isdisjoint(runs[2][0])


def test_continuing_takes_the_next_group_of_the_ledger_and_a_new_run_the_first():
    model = make_model(group_size=3).learn(64)
    newest = max(model.ledger.open_groups())
    for reset, group in ((False, newest + 1), (True, 0)):
        watcher = Watcher()
        loaded = reload(model, env=make_envs()).learn(32, callback=watcher, reset_num_timesteps=reset)
        assert [array.tolist() for array in watcher.positions[0]] == [[group, group], [0, 1], [0, 0]]
        assert loaded.ledger.seed == model.ledger.seed


# --- What a file keeps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_envs", [1, 5])
def test_a_model_continues_with_another_number_of_environments(n_envs: int):
    loaded, watcher = reload(make_model().learn(64), env=make_envs(n_envs)), Watcher()
    before = weights(loaded)
    assert_trained(loaded.learn(2 * 16 * n_envs, callback=watcher), before)
    assert watcher.timesteps == [16 * n_envs, 32 * n_envs]


@pytest.mark.parametrize(
    ("kwargs", "with_16_envs", "with_2_envs"),
    [
        pytest.param({}, 64, 512, id="chosen again"),
        pytest.param(dict(rollout_buffer_class="outcome"), 128, 1024, id="chosen again for another buffer"),
        pytest.param(dict(n_steps=1024), 1024, 1024, id="given"),
        pytest.param(dict(custom_objects=dict(n_steps=1024)), 1024, 1024, id="given as an object"),
    ],
)
def test_a_chosen_number_of_steps_follows_the_number_of_environments(
    kwargs: dict[str, Any], with_16_envs: int, with_2_envs: int
):
    model = make_model(make_envs(1), n_steps=None)
    assert model.n_steps == 1024
    loaded = reload(model, env=make_envs(16), **kwargs)
    assert loaded.n_steps == loaded.rollout_buffer.buffer_size == with_16_envs
    assert reload(loaded, env=make_envs(2)).n_steps == with_2_envs  # a file of the loaded model knows which it was
    assert reload(make_model(n_steps=8), env=make_envs(1), n_steps=None).n_steps == 1024


@pytest.mark.parametrize(
    "kwargs", [dict(group_size=4), dict(rollout_buffer_class="outcome"), dict(objective=dict(kl_coef=0.1))], ids=str
)
def test_a_model_can_be_loaded_with_another_argument(kwargs: dict[str, Any]):
    loaded, starts = reload(make_model(group_size=2).learn(64), env=make_envs(), **kwargs), Starts()
    before = weights(loaded)
    assert_trained(loaded.learn(128, callback=starts), before)
    assert loaded.group_size == loaded.rollout_buffer.group_size == loaded.ledger.group_size
    groups = starts.groups(loaded.group_size)
    assert len(groups) >= 4 and all(len(group) == 1 for group in groups)
    reference = reference_weights(loaded)
    assert (reference is not None) == ("objective" in kwargs) and (reference is None or same(reference, before))


def test_a_model_with_a_buffer_of_the_user_can_be_loaded():
    loaded = reload(make_model(rollout_buffer_class=RewardIsAdvantage).learn(64), env=make_envs())
    assert type(loaded.rollout_buffer) is RewardIsAdvantage
    before = weights(loaded)
    assert_trained(loaded.learn(64), before)


def test_the_initial_reference_is_kept_and_not_built_again():
    model = make_model(objective=dict(kl_coef=0.1, kl_reference="initial"))
    load_actor(model, make_model(seed=1))  # weights that do not come from the seed of the model
    initial = weights(model)
    loaded = reload(model.learn(64), env=make_envs())
    assert same(reference_weights(loaded), initial) and not same(weights(loaded), initial)
    assert same(reference_weights(loaded.learn(64)), initial)


# --- Without an environment -------------------------------------------------------------------------------------------


def test_a_model_without_an_environment_predicts_and_learns_once_it_gets_one():
    loaded = reload(make_model().learn(64))
    assert loaded.get_env() is None
    loaded.predict(OBSERVED.numpy())
    with pytest.raises(ValueError, match=r"no environment to learn in: .*GRPO\.load\(path, env=env\), or call `set_env`"):
        loaded.learn(64)
    loaded.set_env(make_envs())
    before = weights(loaded)
    assert_trained(loaded.learn(64), before)


# --- Files that are refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_a_file_of_an_algorithm_with_a_critic_is_refused_and_load_actor_takes_its_weights(
    algorithm: Any, tmp_path: pathlib.Path
):
    net_arch = dict(pi=[8], vf=[8])
    source = algorithm("MlpPolicy", AnyEnv(), n_steps=16, policy_kwargs=dict(net_arch=net_arch), device="cpu").learn(16)
    source.save(tmp_path / "model")
    path = str(tmp_path / "model.zip")
    with pytest.raises(ValueError, match="saved by an algorithm with a critic, such as PPO") as error:
        GRPO.load(path)
    model = make_model(policy_kwargs=dict(net_arch=[8], activation_fn=th.nn.Tanh))
    _, call = str(error.value).rsplit(": ", 1)
    eval(call.strip("`."), {"load_actor": load_actor, "model": model})
    np.testing.assert_array_equal(
        *(m.predict(OBSERVED.numpy(), deterministic=True)[0] for m in (model, source)),
    )


@pytest.mark.parametrize("normalizes", [True, False], ids=["with", "without"])
def test_weights_of_a_policy_that_standardises_do_not_fit_one_that_does_not(normalizes: bool):
    model = make_model(normalize_observations=normalizes, objective=dict(kl_coef=0.1)).learn(64)
    assert (model.policy.normalizer is not None) == normalizes
    with pytest.raises(
        ValueError, match=rf"policy with normalize_observations={normalizes}, .*={not normalizes}: .*load_actor"
    ):
        reload(model, normalize_observations=not normalizes)
    other = make_model(normalize_observations=not normalizes)
    with pytest.raises(ValueError, match=rf"policy with normalize_observations={normalizes}"):
        other.set_parameters(saved(model))
    load_actor(other, model)
    observations = 0.5 * OBSERVED.numpy()
    np.testing.assert_array_equal(*(m.predict(observations, deterministic=True)[0] for m in (model, other)))


def test_other_files_give_the_errors_of_sb3(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError):
        GRPO.load(tmp_path / "missing")
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(ValueError, match="wasn't a zip-file"):
        GRPO.load(tmp_path / "text.zip")
    SAC("MlpPolicy", "Pendulum-v1", buffer_size=1, device="cpu").save(tmp_path / "sac")
    with pytest.raises(ValueError, match=r"sac\.zip' was saved by another algorithm, so .* Load it with the class that saved"):
        GRPO.load(tmp_path / "sac")
