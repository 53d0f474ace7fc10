"""Shared starts in trainings, and what callbacks and users see of them: nothing."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import CHW, ENDLESS, HWC, VECTOR, AnyEnv, Evaluates, Starts, Watcher, flat, make_envs, make_model
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

forked = partial(SubprocVecEnv, start_method="fork")
DICT = spaces.Dict({"near": VECTOR, "far": spaces.Discrete(100_000)})


class SeedBlind(AnyEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset()


# By a lambda, so that the spec cannot be sent from a worker
gym.register("SeedBlind-v0", entry_point=lambda **kwargs: SeedBlind(**kwargs))


class PassThrough(VecEnvWrapper):
    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


# --- members share their start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("venv_class", "wrap", "space"),
    [
        (DummyVecEnv, lambda venv: venv, VECTOR),
        (forked, lambda venv: venv, VECTOR),
        (DummyVecEnv, lambda venv: VecFrameStack(VecTransposeImage(VecMonitor(venv)), 2), HWC),
        (DummyVecEnv, lambda venv: VecNormalize(VecMonitor(venv), norm_obs_keys=["near"]), DICT),
        (forked, lambda venv: VecNormalize(venv, norm_obs_keys=["near"]), DICT),
        (DummyVecEnv, PassThrough, CHW),
    ],
    ids=["DummyVecEnv", "SubprocVecEnv", "image in frame stack", "dict in normalize", "workers in normalize", "own wrapper"],
)
def test_members_of_a_group_start_alike_and_groups_do_not(venv_class: Any, wrap: Any, space: spaces.Space):
    """Nobody is warned of a mismatch: pytest is set up so that warnings of this package are errors."""
    env, starts = wrap(venv_class([lambda: AnyEnv(space)] * 2)), Starts()
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    model = make_model(env, policy, group_size=4, normalize_observations=False)
    model.learn(64, callback=starts, log_interval=1000)  # what is logged stays
    groups = starts.groups(4)
    assert len(groups) >= 3 and all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == len(groups)
    oracle = AnyEnv(space)
    for (group, _), first in starts.firsts.items():
        assert first == flat(oracle.reset(seed=model.ledger.seed_of(group))[0])
    assert dict(model.logger.name_to_value)["rollout/start_mismatches"] == 0
    env.close()


def test_without_shared_starts_environments_are_reset_without_seeds_but_starts_are_counted():
    starts = Starts()
    model = make_model(share_starts=False, group_size=4).learn(64, callback=starts, log_interval=1000)
    assert len(set(starts.firsts.values())) == len(starts.firsts) > 16
    assert sorted(starts.firsts) == [(j // 4, j % 4) for j in range(len(starts.firsts))]
    assert "rollout/start_mismatches" not in model.logger.name_to_value


@pytest.mark.parametrize(
    ("make", "name", "venv_class"),
    [
        (lambda: gym.make("SeedBlind-v0"), "SeedBlind-v0", DummyVecEnv),
        (lambda: gym.make("SeedBlind-v0"), "SeedBlind-v0", forked),
        (lambda: Monitor(SeedBlind()), "SeedBlind", DummyVecEnv),
    ],
    ids=["id", "id of a worker", "class"],
)
def test_an_environment_that_ignores_seeds_is_counted_and_warned_of_once_by_name(make: Any, name: str, venv_class: Any):
    env, starts = venv_class([make] * 2), Starts()
    model = make_model(env, group_size=4)
    with pytest.warns(UserWarning, match=f"The environment '{name}' does not reproduce its initial state") as caught:
        model.learn(64, callback=starts, log_interval=1000)
    messages = [str(each.message) for each in caught if "reproduce" in str(each.message)]
    assert len(messages) == 1
    assert all(part in messages[0] for part in ("super().reset(seed=seed)", "self.np_random", "share_starts=False"))
    # All but the first member of each group
    n_groups = len({group for group, _ in starts.firsts})
    assert model.logger.name_to_value["rollout/start_mismatches"] == len(starts.firsts) - n_groups
    env.close()


# --- nothing shows ------------------------------------------------------------------------------------------------------


class Sees(BaseCallback):
    """Notes at each event of a callback which objects the environment consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.events: set[str] = set()

    def _note(self, event: str) -> None:
        self.events.add(event)
        self.seen.append(parts(self.training_env))

    def _init_callback(self) -> None:
        self._note("init")

    def _on_training_start(self) -> None:
        self._note("training start")

    def _on_rollout_start(self) -> None:
        self._note("rollout start")

    def _on_step(self) -> bool:
        self._note("step")
        return True

    def _on_rollout_end(self) -> None:
        self._note("rollout end")

    def _on_training_end(self) -> None:
        self._note("training end")


def parts(env: Any) -> list[int]:
    """:return: The identities of an environment's wrappers, of its base, and of the environments in that"""
    found = [id(env)]
    while isinstance(env, VecEnvWrapper):
        env = env.venv
        found.append(id(env))
    return found + [id(each) for each in getattr(env, "envs", [])] + [id(each.unwrapped) for each in getattr(env, "envs", [])]


@pytest.mark.parametrize(
    "wrap",
    [lambda venv: venv, VecNormalize, lambda venv: VecNormalize(PassThrough(venv))],
    ids=["bare", "normalize", "two wrappers"],
)
@pytest.mark.parametrize("venv_class", [DummyVecEnv, forked])
def test_callbacks_find_the_users_own_objects_at_every_event(venv_class: Any, wrap: Any):
    base = venv_class([lambda: Monitor(AnyEnv())] * 2)
    base.reset()
    base.step(np.zeros(2, dtype=int))  # which adds an attribute
    names = set(vars(base))
    env, sees = wrap(base), Sees()
    expected = parts(env)
    model = make_model(env).learn(64, callback=sees)
    assert len(sees.events) == 6 and len(sees.seen) > 32 and all(each == expected for each in sees.seen)
    assert model.env is env and model.get_env() is env and set(vars(base)) == names
    env.close()


def test_after_an_error_in_a_step_or_a_reset_the_users_own_objects_are_in_place():
    class Fails(AnyEnv):
        fails = ""

        def reset(self, **kwargs: Any) -> Any:
            if self.fails == "reset":
                raise ZeroDivisionError
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            if self.fails == "step":
                raise ZeroDivisionError
            return super().step(action)

    env = VecNormalize(DummyVecEnv([Fails] * 2))
    model, expected = make_model(env), parts(env)
    for fails in ("reset", "step"):
        env.set_attr("fails", fails)
        with pytest.raises(ZeroDivisionError):
            model.learn(64, reset_num_timesteps=False)
        assert parts(env) == expected
    env.set_attr("fails", "")
    model.learn(64, reset_num_timesteps=False)


@pytest.mark.parametrize("venv_class", [DummyVecEnv, forked])
@pytest.mark.parametrize("share_starts", [True, False])
def test_an_environment_that_allows_no_early_reset_trains(venv_class: Any, share_starts: bool):
    """It stands for all that count or record episodes: there is one reset per episode, at its end."""
    env = venv_class([lambda: Monitor(AnyEnv(), allow_early_resets=False)] * 2)
    model = make_model(env, share_starts=share_starts).learn(64)
    assert len(model.ep_info_buffer) >= 10
    env.close()


@pytest.mark.filterwarnings("ignore:Nothing was learned")
def test_an_environment_may_change_the_action_that_it_is_given():
    class Corrects(AnyEnv):
        def step(self, action: Any) -> Any:
            action[...] = 0
            return super().step(action)

    class Notes(BaseCallback):
        def _on_step(self) -> bool:
            self.clipped = self.locals["clipped_actions"].copy()
            return True

    for space in (spaces.MultiDiscrete([3, 3]), spaces.Box(-1.0, 1.0, (2,), np.float32)):
        env, notes = DummyVecEnv([partial(Corrects, action_space=space)] * 2), Notes()
        model = make_model(env, normalize_observations=False, learning_rate=0.0).learn(32, callback=notes)
        buffer = model.rollout_buffer
        assert np.count_nonzero(buffer.actions) > 32 and np.count_nonzero(notes.clipped) > 0
        with th.no_grad():
            observations, actions = (th.as_tensor(each.reshape(32, -1)) for each in (buffer.observations, buffer.actions))
            log_probs = model.policy.evaluate_actions(observations, actions)[0]
        np.testing.assert_allclose(log_probs.numpy(), buffer.log_probs.ravel(), rtol=1e-5)


# --- used by others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("venv_class", [DummyVecEnv, forked])
@pytest.mark.parametrize("of_base", [False, True], ids=["training_env", "base"])
def test_a_reset_by_a_callback_in_a_rollout_raises_and_one_between_rollouts_begins_new_episodes(
    venv_class: Any, of_base: bool
):
    base = venv_class([lambda: AnyEnv(lengths=(50, 60))] * 2)
    env: Any = VecMonitor(base)
    used, model = base if of_base else env, make_model(env)
    with pytest.raises(RuntimeError, match=r"A callback reset the training environment .* pass `EvalCallback`"):
        model.learn(64, callback=Evaluates("step", used))
    for event in ("end", "start"):
        watcher = Watcher()
        model.learn(64, callback=[Evaluates(event, used), watcher], reset_num_timesteps=False)
        groups, members, steps = zip(*(watcher.positions[16 * rollout] for rollout in range(2)), strict=True)
        assert all(first == second for first, second in groups) and groups[0][0] < groups[1][0]
        assert np.array_equal(members, [[0, 1]] * 2) and not np.any(steps) and (model.rollout_buffer.steps[:, 0] == 0).all()
    env.close()


@pytest.mark.parametrize("between", ["nothing", "options", "seed", "steps", "reset"])
def test_episodes_go_on_between_two_learns_unless_somebody_has_reset_the_environments(between: str):
    venv = make_envs(lengths=(ENDLESS, ENDLESS + 1))
    model = make_model(VecMonitor(venv)).learn(32)
    if between == "options":
        venv.set_options({"level": 1})  # as a curriculum does, for the next reset
    if between == "seed":
        venv.seed(3)
    if between == "steps":
        venv.step(np.zeros(2, dtype=int))
    if between == "reset":
        venv.reset()
    model.learn(32, reset_num_timesteps=False)
    assert model.rollout_buffer.steps[:, 0].tolist() == [0 if between == "reset" else 16] * 2


def test_seeds_of_the_user_take_precedence_over_those_that_a_training_leaves():
    class Seeds(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls == 16:
                self.training_env.seed(5)
            return True

    env = make_envs()
    make_model(env).learn(32, callback=Seeds())
    assert env._seeds == [5, 6]
    make_model(env).learn(32)
    assert env._seeds != [5, 6] and None not in env._seeds
