"""Each kind of ``VecEnv`` is stepped as it would step itself, with the seeds of the ledger in its resets."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import CHW, VECTOR, AnyEnv, make_model
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper

from sb3_grpo import EnvironmentFault
from sb3_grpo.observations import observation_parts
from sb3_grpo.starts.adapters import DummyVecEnvAdapter, SubprocVecEnvAdapter, VecEnvAdapter, adapter_of
from sb3_grpo.starts.vec_env import base_of

SPACES: dict[str, spaces.Space] = {
    "vector": VECTOR,
    "image": CHW,
    "Discrete": spaces.Discrete(4),
    "Dict": spaces.Dict({"near": VECTOR, "far": spaces.Discrete(100)}),
    "Tuple": spaces.Tuple([VECTOR, spaces.Discrete(100)]),
}


class Told(AnyEnv):
    """Tells how often and with which seed it was reset, and has an info of each reset and step."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        self.reset_seed = seed
        observation, _ = super().reset(seed=seed)
        return observation, {"token": float(self.np_random.random())}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, _ = super().step(action)
        return *result, {"left": self.steps_left, "list": [self.steps_left]}


class MoreKeys(gym.ObservationWrapper):
    """Returns more than its space says, which SB3 leaves out."""

    def observation(self, observation: Any) -> Any:
        return {"more": 1, **observation}


class OwnSeeds(gym.Wrapper):
    """Gives each automatic reset the seed that the adapter is to give it."""

    def __init__(self, env: gym.Env, env_idx: int):
        super().__init__(env)
        self.seeds = Seeds(env_idx)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=self.seeds(self.seeds.env_idx) if seed is None else seed)


class Seeds:
    """A seed for each reset of each environment."""

    def __init__(self, env_idx: int = 0):
        self.env_idx, self.given = env_idx, dict[int, int]()

    def __call__(self, env_idx: int) -> int:
        self.given[env_idx] = self.given.get(env_idx, 0) + 1
        return 100 * env_idx + self.given[env_idx]


def forked(env_fns: list[Any]) -> SubprocVecEnv:
    return SubprocVecEnv(env_fns, start_method="fork")


def spawned(env_fns: list[Any]) -> SubprocVecEnv:
    return SubprocVecEnv(env_fns, start_method="spawn")


@pytest.fixture
def close() -> Iterator[Callable[[Any], Any]]:
    """Close environments at the end, and end their processes even where one has died."""
    venvs: list[Any] = []

    def remember(venv: Any) -> Any:
        venvs.append(venv)
        return venv

    yield remember
    for venv in venvs:
        for process in getattr(venv, "processes", []):
            process.kill()
            process.join()


def begin(venv: VecEnv) -> Any:
    """:return: The adapter of a ``VecEnv`` that has been reset with seeds"""
    adapter = adapter_of(venv)
    reset(adapter)
    return adapter


def reset(adapter: VecEnvAdapter) -> Any:
    adapter.venv._seeds = [100 * env_idx for env_idx in range(adapter.venv.num_envs)]
    with adapter.resetting():
        return adapter.venv.reset()


def step(adapter: VecEnvAdapter, restart: Any) -> Any:
    adapter.step_async(np.zeros(adapter.venv.num_envs, dtype=int))
    return adapter.step_wait(restart)


def without_clock(infos: Any) -> list[dict[str, Any]]:
    return [{**info, **({"episode": {**info["episode"], "t": 0}} if "episode" in info else {})} for info in infos]


# --- DummyVecEnv and SubprocVecEnv ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SPACES, "more keys"])
@pytest.mark.parametrize("venv_class", [DummyVecEnv, forked])
def test_steps_are_those_of_the_vec_env_itself_with_the_seeds_in_its_resets(venv_class: Any, kind: str, close: Any):
    def make(env_idx: int, has_own_seeds: bool) -> gym.Env:
        env: gym.Env = Told(SPACES.get(kind, SPACES["Dict"]))
        env = MoreKeys(env) if kind == "more keys" else env
        return Monitor(OwnSeeds(env, env_idx) if has_own_seeds else env)

    by_adapter, by_itself = (
        close(venv_class([partial(make, env_idx, has_own_seeds) for env_idx in range(3)])) for has_own_seeds in (False, True)
    )
    adapter, restart, rng = adapter_of(by_adapter), Seeds(), np.random.default_rng(0)
    n_done = 0
    by_itself._seeds = [0, 100, 200]
    np.testing.assert_equal(reset(adapter), by_itself.reset())
    for _ in range(30):
        actions = rng.integers(3, size=3)
        adapter.step_async(actions)
        *arrays, infos = list[Any](adapter.step_wait(restart))
        *expected, expected_infos = by_itself.step(actions)
        np.testing.assert_equal(arrays, expected)
        batches = [[*observation_parts(each[0]).values(), *each[1:]] for each in (arrays, expected)]
        assert [batch.dtype for batch in batches[0]] == [batch.dtype for batch in batches[1]]
        np.testing.assert_equal(without_clock(infos), without_clock(expected_infos))
        np.testing.assert_equal(list(by_adapter.reset_infos), list(by_itself.reset_infos))
        n_done += arrays[2].sum()
    assert n_done > 15 and sum("episode" in info for info in infos) == arrays[2].sum()


@pytest.mark.parametrize("venv_class", [DummyVecEnv, forked, pytest.param(spawned, marks=pytest.mark.slow)])
def test_an_episode_costs_one_reset_with_its_seed(venv_class: Any, close: Any):
    venv, restart, n_done = close(venv_class([lambda: Monitor(Told())] * 2)), Seeds(), 0
    adapter = begin(venv)
    for _ in range(20):
        n_done += step(adapter, restart)[2].sum()
        assert venv.get_attr("reset_seed") == [100 * env_idx + restart.given.get(env_idx, 0) for env_idx in range(2)]
    assert n_done > 6 and sum(venv.get_attr("resets")) == 2 + n_done == 2 + sum(restart.given.values())
    while not step(adapter, lambda _: None)[2].any():
        pass
    assert None in venv.get_attr("reset_seed")


def test_workers_reset_at_the_same_time(close: Any):
    together = multiprocessing.get_context("fork").Barrier(3, timeout=10.0)  # breaks if one has to wait for another

    class Waits(Told):
        def reset(self, **kwargs: Any) -> Any:
            together.wait()
            return super().reset(**kwargs)

    adapter = begin(close(forked([lambda: Waits(lengths=(1, 2))] * 3)))
    for _ in range(5):
        assert step(adapter, Seeds())[2].all()


class OneArray(gym.Env):
    """Counts its steps, five per episode, in an array that it returns again and again."""

    observation_space = spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.state = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.state[:] = 0.0
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state += 1.0
        return self.state, 0.0, bool(self.state[0] == 5.0), False, {}


@pytest.mark.parametrize("venv_class", [DummyVecEnv, forked])
def test_the_reset_does_not_overwrite_the_terminal_observation(venv_class: Any, close: Any):
    adapter = begin(close(venv_class([OneArray] * 2)))
    for _ in range(4):
        step(adapter, Seeds())
    observations, _, dones, infos = step(adapter, Seeds())
    assert dones.all() and (observations == 0.0).all()
    assert [info["terminal_observation"].item() for info in infos] == [5.0] * 2


def test_infos_that_are_kept_do_not_change_with_the_environment():
    class OneInfo(Told):
        info: ClassVar[dict[str, Any]] = dict(found=[])

        def step(self, action: Any) -> Any:
            self.info["found"].append(1)
            return *super().step(action)[:4], self.info

    adapter = begin(DummyVecEnv([OneInfo]))
    infos = [step(adapter, Seeds())[3][0] for _ in range(3)]
    assert [info["found"] for info in infos] == [[1], [1, 1], [1, 1, 1]]


# --- faults -----------------------------------------------------------------------------------------------------------


class Faulty(Told):
    """Fails in its third step, or in its second reset."""

    def __init__(self, fault: str):
        super().__init__(spaces.Dict({"x": VECTOR}) if "dict" in fault else VECTOR, lengths=(2, 3))
        self.fault, self.n_steps = fault, 0

    def _shown(self, observation: Any) -> Any:
        shown = {"x": observation["x"][:1]} if isinstance(observation, dict) else observation[:1]
        return shown if "fewer" in self.fault else observation

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        if self.resets < 2 or "reset" not in self.fault:
            return observation, info
        if "raises" in self.fault:
            raise ZeroDivisionError("no way to begin")
        return self._shown(observation), info

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        observation, *rest = super().step(action)
        if self.n_steps > 2 and "step" in self.fault:
            if "raises" in self.fault:
                raise ZeroDivisionError("no way on")
            if "dies" in self.fault:
                os._exit(3)
            return self._shown(observation), *rest
        return observation, *rest


def run(adapter: VecEnvAdapter, n_steps: int = 10) -> None:
    for _ in range(n_steps):
        step(adapter, Seeds())


@pytest.mark.parametrize(("method", "message"), [("step", "no way on"), ("reset", "no way to begin")])
def test_an_error_of_an_environment_keeps_its_type_and_traceback_and_gets_a_note(method: str, message: str):
    adapter = begin(DummyVecEnv([Told, lambda: Faulty(f"raises in {method}"), Told]))
    with pytest.raises(ZeroDivisionError, match=message) as raised:
        run(adapter)
    assert raised.traceback[-1].name == method and str(raised.traceback[-1].path) == __file__
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert note.startswith(f"This was raised by `{method}` of environment 1. ")


@pytest.mark.parametrize("make", [DummyVecEnv, forked])
@pytest.mark.parametrize("fault", ["fewer numbers in step", "fewer numbers in reset"])
@pytest.mark.parametrize(("where", "named"), [("", "an observation"), (" of a dict", "an observation with 'x'")])
def test_an_observation_of_another_size_is_refused_and_not_broadcast(
    make: Any, fault: str, where: str, named: str, close: Any
):
    faults = [f"none{where}", f"{fault}{where}"]
    adapter = begin(close(make([partial(Faulty, each) for each in faults])))
    message = rf"Environment 1 returned {named} of shape \(1,\), but its space has shape \(3,\)"
    with pytest.raises(EnvironmentFault, match=message) as raised:
        run(adapter)
    assert raised.value.env_idx == 1


@pytest.mark.parametrize(("fault", "exit_code"), [("dies in step", 3), ("raises in step", 1), ("raises in reset", 1)])
def test_a_worker_that_ends_is_named_at_once_and_the_others_end_with_it(fault: str, exit_code: int, close: Any):
    """The workers are forked: the first holds the pipe of the second open, so that nothing comes from it, not even its end."""
    venv = close(forked([Told, lambda: Faulty(fault), Told]))
    adapter, began = begin(venv), time.monotonic()
    message = f"Environment 1 is gone: its process has ended with exit code {exit_code}"
    with pytest.raises(EnvironmentFault, match=message) as raised:
        run(adapter)
    assert time.monotonic() - began < 5.0 and raised.value.env_idx == 1
    assert not any(process.is_alive() for process in venv.processes)
    venv.close()
    for use_again in (lambda: reset(adapter), lambda: step(adapter, Seeds())):
        with pytest.raises(EnvironmentFault, match="has no process: all workers"):
            use_again()


@pytest.mark.parametrize("use", ["step", "reset"])
def test_an_interrupt_while_workers_are_asked_stops_them(use: str, close: Any, monkeypatch: pytest.MonkeyPatch):
    """Else their answers would be taken for those to the next question."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    venv = close(forked([Told] * 2))
    adapter = begin(venv)
    monkeypatch.setattr(venv.remotes[1], "recv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(adapter, 1) if use == "step" else reset(adapter)
    assert not any(process.is_alive() for process in venv.processes)
    with pytest.raises(EnvironmentFault, match="has no process: all workers"):
        reset(adapter)


def test_answers_to_a_step_that_nobody_waited_for_are_not_taken_for_those_to_a_reset(close: Any):
    venv = close(forked([Told] * 2))
    adapter = begin(venv)
    for _ in range(5):
        adapter.step_async(np.zeros(2, dtype=int))
        np.testing.assert_array_equal(reset(adapter), [Told().reset(seed=seed)[0] for seed in (0, 100)])


def test_a_fault_arrives_from_another_process_as_it_was_sent(close: Any):
    fault = EnvironmentFault(3, "is gone")
    copy = deepcopy(fault)
    assert type(copy) is EnvironmentFault and copy.env_idx == 3
    assert str(copy) == str(fault) and str(fault).startswith("Environment 3 is gone. The rollout")


# --- any other VecEnv -------------------------------------------------------------------------------------------------


class Simulator(VecEnv):
    """
    Robots that one call steps. A robot counts its steps in an array that is reused; the seed is where it begins. The methods
    that address single environments are placeholders.
    """

    def __init__(self, placeholder: str = "raises"):
        self.placeholder = placeholder
        self.begun: list[list[int | None]] = [[], [], []]
        self.state, self.steps_left, self.rewards = np.zeros((3, 1), np.float32), np.zeros(3, int), np.ones(3, np.float32)
        super().__init__(3, spaces.Box(-1000.0, 1000.0, (1,), np.float32), spaces.Discrete(2))

    def _begin(self, env_idx: int, seed: int | None) -> None:
        self.begun[env_idx].append(seed)
        self.state[env_idx], self.steps_left[env_idx] = (seed or 0) % 1000, 2 + env_idx

    def reset(self) -> Any:
        for env_idx, seed in enumerate(self._seeds):
            self._begin(env_idx, seed)
        self._reset_seeds()
        return self.state

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        self.state += 1
        self.steps_left -= 1
        infos: list[dict[str, Any]] = [{}, {}, {}]
        for env_idx in np.flatnonzero(self.steps_left == 0).tolist():
            infos[env_idx] = {"terminal_observation": self.state[env_idx].copy()}
            if getattr(self, "autoreset", True):
                self._begin(env_idx, None)
        return self.state, self.rewards, np.array([bool(info) for info in infos]), infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        if attr_name == "render_mode":
            return [None] * 3
        if self.placeholder == "raises":
            raise NotImplementedError
        return None

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        if self.placeholder == "ignores indices" and method_name == "reset":
            return [(first, {}) for first in self.reset()]
        return self.get_attr(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * 3


class Resets(Simulator):
    """Can reset some of its robots."""

    def reset_envs(self, env_indices: list[int], seeds: list[int | None]) -> tuple[list[Any], list[dict[str, Any]]]:
        for env_idx, seed in zip(env_indices, seeds, strict=True):
            self._begin(env_idx, seed)
        return [self.state[env_idx] for env_idx in env_indices], [{"seed": seed} for seed in seeds]


class Defers(Resets):
    autoreset = True


def test_what_steps_in_a_way_of_its_own_has_the_general_adapter(close: Any):
    class StepsItself(DummyVecEnv):
        def step_wait(self) -> Any:
            return super().step_wait()

    class ClosesItself(DummyVecEnv):
        def close(self) -> None:
            super().close()

    replaced = DummyVecEnv([Told])
    replaced.step_wait = lambda: DummyVecEnv.step_wait(replaced)  # type: ignore[method-assign]
    for venv in (StepsItself([Told]), replaced, Simulator()):
        assert type(adapter_of(venv)) is VecEnvAdapter and not adapter_of(venv).takes_seeds
    for venv in (DummyVecEnv([Told]), ClosesItself([Told])):
        assert type(adapter_of(venv)) is DummyVecEnvAdapter and adapter_of(venv).takes_seeds
    assert type(adapter_of(close(forked([Told])))) is SubprocVecEnvAdapter
    assert [adapter_of(each()).takes_seeds for each in (Resets, Defers)] == [True, True]


@pytest.mark.parametrize(
    ("venv_class", "begun"),
    [(Simulator, [0, None, None]), (Resets, [0, None, 1, None, 2]), (Defers, [0, 1, 2])],
)
def test_robots_are_reset_with_their_seeds_where_the_simulator_can_and_by_itself_where_it_cannot(venv_class: Any, begun: Any):
    venv: Any = venv_class()
    adapter, restart, seen = begin(venv), Seeds(), []
    for _ in range(4):
        seen.append(step(adapter, restart if adapter.takes_seeds else lambda _: None))
    firsts = [0, 0] if venv_class is Simulator else [1, 2]
    # Robot 0 has episodes of two steps; the array that the simulator reuses has moved on since
    assert [observations[0, 0] for observations, *_ in seen] == [1, firsts[0], firsts[0] + 1, firsts[1]]
    assert [infos[0].get("terminal_observation", [None])[0] for *_, infos in seen] == [None, 2, None, firsts[0] + 2]
    assert venv.begun[0] == begun and len(venv.begun[2]) == (3 if venv_class is Resets else 2)
    if adapter.takes_seeds:
        assert venv.reset_infos[0] == {"seed": 2}


NOT_SHARED = "`{}` cannot reset single environments with a seed, .* define `reset_envs"


@pytest.mark.parametrize("placeholder", ["raises", "returns None", "ignores indices"])
def test_a_simulator_whose_methods_are_placeholders_trains_and_is_never_probed(placeholder: str):
    venv = Simulator(placeholder)
    with pytest.warns(UserWarning, match=NOT_SHARED.format("Simulator")) as caught:
        model = make_model(venv, n_steps=16, batch_size=48).learn(96)
    assert len([each for each in caught if each.category is UserWarning]) == 1
    # One robot has 16 episodes in 32 steps, the others 10 and 8. A reset of all would show in each
    assert [len(each) for each in venv.begun] == [1 + 16, 1 + 10, 1 + 8]
    stored = model.rollout_buffer.observations[0, :4, 0]
    np.testing.assert_array_equal(stored, [0, 1, 0, 1])
    assert "rollout/start_mismatches" not in model.logger.name_to_value


def test_without_the_wish_for_shared_starts_there_is_no_warning(recwarn: pytest.WarningsRecorder):
    make_model(Simulator(), n_steps=16, batch_size=48, share_starts=False).learn(48)
    assert not list(recwarn)


@pytest.mark.parametrize("venv_class", [Resets, Defers])
def test_a_simulator_that_resets_single_robots_has_shared_starts(venv_class: Any, recwarn: pytest.WarningsRecorder):
    venv = venv_class()
    model = make_model(venv, n_steps=16, batch_size=48, normalize_observations=False).learn(48)
    assert not list(recwarn) and model._starts(model.env).mismatches == 0
    groups, members, steps = (getattr(model.rollout_buffer, name) for name in ("groups", "members", "steps"))
    firsts = [model.ledger.seed_of(group) % 1000 for group in groups.ravel().tolist()]
    np.testing.assert_array_equal(model.rollout_buffer.observations[..., 0].ravel(), np.add(firsts, steps.ravel()))
    assert members.max() == 1


class Native:
    """No ``VecEnv``: a library of its own."""

    num_envs, observation_space, action_space = 3, spaces.Box(-1000.0, 1000.0, (1,), np.float32), spaces.Discrete(2)

    def __init__(self) -> None:
        self.t = 0

    def recv(self) -> np.ndarray:
        self.t += 1
        return np.full((3, 1), self.t % 5, np.float32)


class Adapted(VecEnvWrapper):
    """A wrapper around something that is no ``VecEnv``, as in the examples of EnvPool."""

    venv: Any

    def seed(self, seed: int | None = None) -> list[None]:
        return [None] * 3

    def reset(self) -> Any:
        return np.zeros((3, 1), np.float32)

    def step_async(self, actions: Any) -> None:
        pass

    def step_wait(self) -> Any:
        observations = self.venv.recv()
        ended = observations[:, 0] == 0
        return (
            observations,
            np.ones(3),
            ended,
            [dict(terminal_observation=each) if each[0] == 0 else {} for each in observations],
        )

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        return [None] * 3 if attr_name == "render_mode" else self.venv.get_attr(attr_name)


@pytest.mark.parametrize("share_starts", [True, False])
@pytest.mark.filterwarnings("ignore:`Adapted` cannot reset")
def test_a_wrapper_around_something_that_is_no_vec_env_is_a_base_and_trains(share_starts: bool):
    env: Any = Adapted(Native())  # type: ignore[arg-type]
    assert base_of(env) == (None, env)
    model = make_model(env, n_steps=16, batch_size=48, share_starts=share_starts).learn(48)
    assert model.env is env and type(env.venv) is Native and env.venv.t == 16
