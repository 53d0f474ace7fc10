"""
Compositions of small parts, on which PPO and GRPO must see the same.

Environments here go by the numbers of their steps and resets alone, so rewards, ends and observations depend on no action.
``python tests/test_fuzz.py 7 30 40`` tries the compositions 30 to 39 of the seed 7, and prints all differences.
"""

import contextlib
import datetime
import hashlib
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common import vec_env as sb3
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EveryNTimesteps, StopTrainingOnMaxEpisodes
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from test_strangers import (
    FORMS,
    LAYERS,
    Endless,
    Late,
    Limit,
    Merges,
    OwnAsync,
    OwnConstructor,
    OwnStep,
    OwnWait,
    PassThrough,
    Repeat,
    Splits,
    WrapperWithStep,
)

from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.observations import map_observations

# --- parts --------------------------------------------------------------------------------------------------------------

BOX = spaces.Box(-1, 100, (2,), np.float32)
SPACES: dict[str, spaces.Space] = {
    "vector": BOX,
    "doubles": spaces.Box(-1, 100, (2,), np.float64),
    "matrix": spaces.Box(-1, 100, (2, 3), np.float32),
    "integers": spaces.Box(0, 100, (3,), np.int64),
    "image": spaces.Box(0, 255, (36, 36, 1), np.uint8),
    "Discrete": spaces.Discrete(9),
    "MultiDiscrete": spaces.MultiDiscrete([9, 9]),
    "MultiBinary": spaces.MultiBinary(3),
    "Dict": spaces.Dict({"a": BOX, "b": spaces.Discrete(9)}),
}
ACTIONS: dict[str, spaces.Space] = {
    "Discrete": spaces.Discrete(2),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(2),
}
REWARDS: dict[str, Callable[[float], Any]] = {"float": float, "integer": int, "array": np.array, "tensor": th.tensor}
ENDS: dict[str, Callable[[bool], Any]] = {"bool": bool, "numpy": np.bool_, "integer": int, "tensor": th.tensor}


class Clockwork(gym.Env):
    """Everything is a function of the number of the environment, of its resets and of its steps."""

    n_resets = n_steps = t = 0

    def __init__(self, number: int, parts: dict[str, str]):
        self.number, self.parts = number, parts
        self.observation_space, self.action_space = SPACES[parts["space"]], ACTIONS[parts["action"]]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None and self.parts["seeds"] == "everything":
            random.seed(seed)
            np.random.seed(seed)
            th.manual_seed(seed)
        self.n_resets += 1
        self.t = 0
        return self.observe(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.t += 1
        self.n_steps += 1
        self.last_action = np.array(action)
        reward = REWARDS[self.parts["reward"]](self.number * 100.0 + self.n_resets % 7 + self.t % 5)
        lengths = {
            "short": 1 + self.n_resets % 3,
            "uneven": 3 + 2 * self.number + self.n_resets % 2,
            "equal": 5,
            "endless": 10**6,
        }
        is_over = self.t >= lengths[self.parts["length"]]
        kind = self.parts["end"] if self.parts["end"] != "both" else ("terminated", "truncated")[self.n_resets % 2]
        form = ENDS[self.parts["ends"]]
        ends = form(is_over and kind == "terminated"), form(is_over and kind == "truncated")
        return self.observe(self.observation_space), reward, *ends, {"is_success": True} if is_over else {}

    def observe(self, space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self.observe(part) for key, part in space.spaces.items()}
        number = (self.number + self.n_resets + self.t) % 9
        if isinstance(space, spaces.Discrete):
            return number
        observation = np.full(space.shape, number % 2 if isinstance(space, spaces.MultiBinary) else number, space.dtype)
        return FORMS[self.parts["form"]](observation) if space is BOX and self.parts["form"] != "as it is" else observation


class ByResets(gym.RewardWrapper):
    """Changes rewards by the number of its own steps."""

    n = 0

    def reward(self, reward: Any) -> Any:
        self.n += 1
        return reward + 0.5 * (self.n % 3)


class Reorders(PassThrough):
    """The lanes in reverse order."""

    def reset(self) -> Any:
        return self.turned(self.venv.reset())

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(actions[::-1])

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        return self.turned(observations), rewards[::-1].copy(), dones[::-1].copy(), list(infos)[::-1]

    def turned(self, observations: Any) -> Any:
        return map_observations(lambda part: part[::-1].copy(), observations)


class OwnVecEnv(sb3.VecEnv):
    """Knows nothing of SB3's own, and cannot reset single environments with a seed."""

    def __init__(self, env_fns: list[Callable[[], gym.Env]]):
        self.inner = sb3.DummyVecEnv(env_fns)
        super().__init__(len(env_fns), self.inner.observation_space, self.inner.action_space)

    def reset(self) -> Any:
        self._reset_seeds()
        self._reset_options()
        return self.inner.reset()

    def step_async(self, actions: np.ndarray) -> None:
        self.inner.step_async(actions)

    def step_wait(self) -> Any:
        return self.inner.step_wait()

    def close(self) -> None:
        self.inner.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        return self.inner.get_attr(attr_name, indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self.inner.set_attr(attr_name, value, indices)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        return self.inner.env_method(method_name, *args, indices=indices, **kwargs)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
        return self.inner.env_is_wrapped(wrapper_class, indices)


class ResetsSingly(OwnVecEnv):
    """Leaves environments that are done to the caller, while it is asked to."""

    autoreset = True

    def step_wait(self) -> Any:
        if self.autoreset:
            return self.inner.step_wait()
        observations, rewards, dones, infos = [], [], [], []
        for env, action in zip(self.inner.envs, self.inner.actions, strict=True):
            observation, reward, terminated, truncated, info = env.step(action)
            done = bool(terminated or truncated)
            info = {**info, "TimeLimit.truncated": truncated and not terminated}
            infos.append({**info, "terminal_observation": observation} if done else info)
            observations.append(observation)
            rewards.append(float(reward))
            dones.append(done)
        for i, observation in enumerate(observations):
            self.inner._save_obs(i, observation)
        return self.inner._obs_from_buf(), np.array(rewards, np.float32), np.array(dones), infos

    def reset_envs(self, env_indices: list[int], seeds: list[int | None]) -> Any:
        return zip(*(self.inner.envs[i].reset(seed=seed) for i, seed in zip(env_indices, seeds, strict=True)), strict=True)


class Extractor(BaseFeaturesExtractor):
    def __init__(self, space: Any, layers: str):
        super().__init__(space, 8)
        self.layers, self.after = th.nn.Linear(2, 8), LAYERS[layers]()

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.after(self.layers(observations / 9))


class Returns(BaseCallback):
    """Returns the same each time; ``None`` ends the training as well."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value

    def _on_step(self) -> Any:
        return self.value


class MovesOptimizer(BaseCallback):
    """Uses the environments between rollouts."""

    def _on_rollout_end(self) -> None:
        self.training_env.env_method("get_wrapper_attr", "n_steps")

    def _on_step(self) -> bool:
        return True


ENV_WRAPPERS: dict[str, Callable[[gym.Env], gym.Env]] = {
    "Monitor": Monitor,
    "TimeLimit": partial(gym.wrappers.TimeLimit, max_episode_steps=4),
    "ByResets": ByResets,
    "Statistics": gym.wrappers.RecordEpisodeStatistics,
    "halved": partial(gym.wrappers.TransformReward, func=lambda reward: float(reward) / 2),
    "order": gym.wrappers.OrderEnforcing,
}
VEC_ENVS: dict[str, Callable[..., Any]] = {
    "Dummy": sb3.DummyVecEnv,
    "Dummy again": sb3.DummyVecEnv,
    "Subproc": partial(sb3.SubprocVecEnv, start_method="fork"),
    "OwnStep": OwnStep,
    "OwnAsync": OwnAsync,
    "OwnWait": OwnWait,
    "OwnConstructor": OwnConstructor,
    "OwnVecEnv": OwnVecEnv,
    "ResetsSingly": ResetsSingly,
}
VEC_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "VecMonitor": sb3.VecMonitor,
    "VecNormalize": sb3.VecNormalize,
    "VecNormalize of rewards": partial(sb3.VecNormalize, norm_obs=False),
    "VecFrameStack": partial(sb3.VecFrameStack, n_stack=2),
    "VecCheckNan": sb3.VecCheckNan,
    "VecExtractDictObs": partial(sb3.VecExtractDictObs, key="a"),
    **{each.__name__: each for each in (PassThrough, WrapperWithStep, Repeat, Splits, Merges, Endless, Limit, Late, Reorders)},
}
STOPS = "ends after three episodes"
CALLBACKS: dict[str, Callable[[], list[BaseCallback]]] = {
    "none": list,
    STOPS: lambda: [StopTrainingOnMaxEpisodes(3)],
    "every five": lambda: [EveryNTimesteps(5, Returns(True))],
    "returns None": lambda: [Returns(None)],
    "returns numpy": lambda: [Returns(np.bool_(True))],
    "returns a number": lambda: [Returns(1)],
    "asks the environments": lambda: [MovesOptimizer()],
}


class Composition(NamedTuple):
    """
    A composition.

    :param parts: Names of parts by their kind
    :param env_wrappers: Names of wrappers around each environment
    :param vec_wrappers: Names of wrappers around all
    :param numbers: Arguments that both algorithms take
    :param own: Arguments of GRPO
    """

    parts: dict[str, str]
    env_wrappers: list[str]
    vec_wrappers: list[str]
    numbers: dict[str, int]
    own: dict[str, Any]


def composition(seed: int, index: int) -> Composition:
    rng = random.Random(f"{seed} {index}")
    parts = {
        "space": rng.choice(["vector"] * 6 + list(SPACES)),
        "action": rng.choice(["Discrete", "Box", *ACTIONS]),
        "form": rng.choice(["as it is"] * 4 + list(FORMS)),
        "reward": rng.choice(["float"] * 3 + list(REWARDS)),
        "ends": rng.choice(["bool"] * 3 + list(ENDS)),
        "length": rng.choice(["short", "uneven", "uneven", "equal", "endless"]),
        "end": rng.choice(["terminated", "truncated", "both"]),
        "seeds": rng.choice(["own", "everything"]),
        "vec_env": rng.choice(list(VEC_ENVS)),
        "layers": rng.choice(["default"] * 6 + list(LAYERS)),
        "callback": rng.choice(["none"] * 4 + list(CALLBACKS)),
    }
    if parts["vec_env"] in ("Subproc", "OwnConstructor"):  # where ends that are integers are indices for VecNormalize
        parts["ends"] = "bool"
    if parts["vec_env"] == "OwnAsync":  # which sends the opposite of 0 and 1
        parts["action"] = "Discrete"
    env_wrappers = rng.sample(list(ENV_WRAPPERS), rng.choice([0, 0, 1, 2]))
    vec_wrappers = rng.sample(list(VEC_WRAPPERS), rng.choice([0, 0, 1, 1, 2, 3]))
    fits = {"VecExtractDictObs": parts["space"] == "Dict", "Late": len(vec_wrappers) == 1}
    fits["VecNormalize"] = parts["space"] in ("vector", "doubles", "matrix", "integers")
    fits["VecNormalize of rewards"] = fits["VecFrameStack"] = fits["VecNormalize"] or parts["space"] == "image"
    vec_wrappers = [name for name in vec_wrappers if fits.get(name, True)]
    numbers = {"n_envs": rng.choice([1, 2, 2, 3]), "n_steps": rng.choice([8, 12, 16]), "seed": rng.randrange(100)}
    own: dict[str, Any] = {"rollout_buffer_class": rng.choice(["kernel"] * 3 + list(BUFFERS))}
    own |= {"group_size": rng.choice([None, 2, 3]), "share_starts": rng.random() < 0.9}
    return Composition(parts, env_wrappers, vec_wrappers, numbers, own)


# --- what is recorded ---------------------------------------------------------------------------------------------------


class Recorder(BaseCallback):
    """
    Everything that callbacks see of the environments, and what the policy makes of the actions that it took.

    :param lanes_stay: Whether each environment gets the actions of the lane with its number
    """

    def __init__(self, lanes_stay: bool) -> None:
        super().__init__()
        self.lanes_stay = lanes_stay
        self.steps: list[Any] = []
        self.generators: set[Any] = set()
        self.faults: list[str] = []
        self.rewards: list[np.ndarray] = []
        self.dones: list[np.ndarray] = []

    def _on_rollout_start(self) -> None:
        self.generators, self.rewards, self.dones = set(), [], []

    def _on_step(self) -> bool:
        names = self.locals
        infos = [{key: plain(value) for key, value in info.items() if key in SEEN} for info in names["infos"]]
        observed = plain(map_observations(np.ravel, names["new_obs"]))  # GRPO brings them into the shape of their space
        if self.lanes_stay:
            taken = self.training_env.get_attr("last_action")
            if not np.array_equal(np.array(taken), np.reshape(names["clipped_actions"], np.shape(taken))):
                self.faults.append(f"environments took the actions {taken} instead of {names['clipped_actions']}")
        self.steps.append(
            (plain(names["rewards"]), plain(np.asarray(names["dones"], bool)), observed, infos, self.num_timesteps)
        )
        self.rewards.append(np.array(names["rewards"], np.float32).reshape(-1))
        self.dones.append(np.array(names["dones"], bool).reshape(-1))
        self.generators.add((digest(random.getstate()), digest(np.random.get_state(legacy=True)), th.initial_seed()))
        if len(self.generators) > 1:
            self.faults.append("a global generator was set within a rollout")
            self.generators = set()
        return True

    def _on_rollout_end(self) -> None:
        model: Any = self.model
        buffer = model.rollout_buffer
        policy = model.policy
        was_training = policy.training
        policy.set_training_mode(False)
        is_ppo = isinstance(model, PPO)
        observations = map_observations(lambda column: th.as_tensor(by_row(column)), buffer.observations)
        taken, log_probs = th.as_tensor(by_row(buffer.actions)), by_row(buffer.log_probs)
        taken = taken.long().flatten() if isinstance(model.action_space, spaces.Discrete) else taken.float()
        with th.no_grad():
            evaluated = policy.evaluate_actions(observations, taken)
        again = evaluated[1] if is_ppo else evaluated[0]
        policy.set_training_mode(was_training)
        if not np.allclose(again.numpy(), log_probs, atol=2e-3, rtol=1e-3):
            self.faults.append(f"log-probabilities differ by {np.abs(again.numpy() - log_probs).max()}")
        if is_ppo:
            return
        if not any(isinstance(each, sb3.VecNormalize) for each in wrappers_of(model.env)):
            self.expect("rewards", buffer.rewards, self.rewards)
        self.expect("dones", buffer.dones, self.dones)

    def expect(self, name: str, stored: np.ndarray, seen: list[np.ndarray]) -> None:
        if not np.array_equal(stored, np.stack(seen, axis=1)):
            self.faults.append(f"the buffer has other {name} than the callback saw")


#: Entries of infos that are compared; others have times in them.
SEEN = ("TimeLimit.truncated", "terminal_observation", "is_success")


def wrappers_of(env: Any) -> list[Any]:
    return [env, *(wrappers_of(env.venv) if isinstance(env, sb3.VecEnvWrapper) else [])]


def by_row(column: np.ndarray) -> np.ndarray:
    """:return: A column of a buffer with one row per transition"""
    return column.reshape(-1, *column.shape[2:])


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return np.asarray(value, np.float64).round(5).tolist()


def digest(value: Any) -> str:
    return hashlib.md5(repr(value).encode()).hexdigest()


#: Parts under which an environment gets other actions than the lane with its number
MOVE_LANES = {"OwnAsync", "Splits", "Merges", "Reorders"}


class Seen(NamedTuple):
    """What an algorithm has seen. The fields are those that are compared; ``faults`` must be empty."""

    error: str
    steps: list[Any]
    timesteps: int
    episodes: list[Any]
    counts: list[Any]
    faults: list[str]


def trained(algorithm: Any, case: Composition) -> Seen:
    """Train for two rollouts."""
    parts, numbers = case.parts, case.numbers
    recorder = Recorder(not MOVE_LANES & {parts["vec_env"], *case.vec_wrappers})
    th.manual_seed(0)
    random.seed(0)
    np.random.seed(0)

    def make(number: int) -> gym.Env:
        env: gym.Env = Clockwork(number, parts)
        for name in case.env_wrappers:
            env = ENV_WRAPPERS[name](env)
        return env

    env: Any = None
    error, model, counts = "", None, []
    try:
        env = base = VEC_ENVS[parts["vec_env"]]([partial(make, number) for number in range(numbers["n_envs"])])
        for name in case.vec_wrappers:
            env = VEC_WRAPPERS[name](env)
        policy_kwargs: dict[str, Any] = dict(net_arch=[8])
        if parts["layers"] != "default" and env.observation_space == BOX:
            policy_kwargs |= dict(features_extractor_class=Extractor, features_extractor_kwargs=dict(layers=parts["layers"]))
        is_dict = isinstance(env.observation_space, spaces.Dict)
        policy = "MultiInputPolicy" if is_dict else "CnnPolicy" if parts["space"] == "image" else "MlpPolicy"
        own = case.own if algorithm is GRPO else dict(n_epochs=1)
        common = dict(n_steps=numbers["n_steps"], batch_size=8, seed=numbers["seed"], device="cpu")
        if algorithm is GRPO:  # a batch size would choose clipped updates
            common.pop("batch_size")
        model = algorithm(policy, env, policy_kwargs=policy_kwargs, **common, **own)
        callback = CallbackList([recorder, *CALLBACKS[parts["callback"]]()])
        model.learn(2 * numbers["n_steps"] * model.n_envs, callback=callback)
        counts = list(zip(base.get_attr("n_resets"), base.get_attr("n_steps"), strict=True))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}\n{''.join(traceback.format_tb(raised.__traceback__)[-3:])}"
    with contextlib.suppress(Exception):  # of a worker that has ended
        env.close()
    episodes = [(round(float(each["r"]), 4), int(each["l"])) for each in (model.ep_info_buffer or ())] if model else []
    return Seen(error, recorder.steps, model.num_timesteps if model else 0, episodes, counts, recorder.faults)


def differences(case: Composition) -> list[str]:
    """:return: What is not as it must be"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ppo = trained(PPO, case)
        grpo = trained(GRPO, case)
    if ppo.error:
        return []  # GRPO may take what PPO does not
    if grpo.error:
        return [f"PPO trains, GRPO raises {grpo.error}"]
    found = grpo.faults
    # GRPO keeps the step after which a callback ends the training, so it counts the episodes that end with it.
    grpo = grpo._replace(
        episodes=grpo.episodes[: len(ppo.episodes) if case.parts["callback"] in (STOPS, "returns None") else None]
    )
    for name in ("timesteps", "episodes", "counts"):
        if getattr(ppo, name) != getattr(grpo, name):
            found.append(f"{name}: {getattr(ppo, name)} under PPO, {getattr(grpo, name)} under GRPO")
    for t, pair in enumerate(zip(ppo.steps, grpo.steps, strict=False)):
        kinds = zip(("rewards", "dones", "observations", "infos", "timesteps"), *pair, strict=True)
        different = [f"step {t}: {kind} {left} under PPO, {right} under GRPO" for kind, left, right in kinds if left != right]
        if different:
            return [*found, *different]
    return found


def fuzz(seed: int, seconds: float, first: int = 0) -> tuple[int, list[str]]:
    """:return: Number of compositions that were tried, and a description of the first with a difference"""
    for action in ("Discrete", "Box"):  # the clock does not run while functions are compiled
        parts = {**composition(seed, 0).parts, "space": "vector", "action": action, "vec_env": "Dummy", "layers": "default"}
        trained(GRPO, Composition(parts, [], [], dict(n_envs=1, n_steps=8, seed=0), {}))
    until, index = time.monotonic() + seconds, first
    while time.monotonic() < until:
        case = composition(seed, index)
        found = differences(case)
        index += 1
        if found:
            return index - first, [f"composition {index - 1} of seed {seed}: {case}", *found]
    return index - first, []


@pytest.mark.parametrize("seconds", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_ppo_and_grpo_see_the_same_of_compositions_of_today(seconds: int, record_property: Any):
    seed = datetime.date.today().toordinal() + (seconds > 20)
    n, found = fuzz(seed, seconds)
    record_property("fuzzing", f"{n} compositions with the seed {seed}")
    assert not found, "\n".join(found)


def test_environments_of_compositions_have_every_part_sometimes():
    cases = [composition(0, index) for index in range(500)]
    assert {name for case in cases for name in case.vec_wrappers} == set(VEC_WRAPPERS)
    assert {case.parts["vec_env"] for case in cases} == set(VEC_ENVS)
    assert {case.parts["callback"] for case in cases} == set(CALLBACKS)


if __name__ == "__main__":
    th.set_num_threads(1)
    of_seed, next_index, limit = (int(each) for each in sys.argv[1:4])
    while next_index < limit:
        this = composition(of_seed, next_index)
        for line in (these := differences(this)):
            print(next_index, line, flush=True)
        if these:
            print(this, flush=True)
        next_index += 1
        if next_index % 100 == 0:
            print(next_index, time.strftime("%X"), flush=True)
