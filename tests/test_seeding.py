import pickle
import warnings
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    sync_envs_normalization,
)

from sb3_grpo.seeding import SeededVecEnv, StartQueue, find_seeded_vec_env, insert_seeded_vec_env
from sb3_grpo.stepping import EnvironmentFault

SPACES: dict[str, spaces.Space] = {
    "box": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "nan": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(100_000),
    "dict": spaces.Dict({"near": spaces.Box(-1.0, 1.0, (2,), np.float32), "far": spaces.Discrete(100_000)}),
}


class DriftEnv(gym.Env):
    """Random start, random drift and random episode length (2 to 5 steps), all drawn from ``np_random``."""

    def __init__(self, kind: str = "box"):
        self.kind = kind
        self.observation_space = SPACES[kind]
        self.action_space = spaces.Discrete(2)

    def _observe(self):
        observations = {
            "box": lambda: self.np_random.uniform(-1, 1, 3).astype(np.float32),
            "nan": lambda: np.array([np.nan, *self.np_random.uniform(-1, 1, 2)], dtype=np.float32),
            "image": lambda: self.np_random.integers(0, 256, (8, 8, 3), dtype=np.uint8),
            "discrete": lambda: int(self.np_random.integers(100_000)),
            "dict": lambda: {
                "near": self.np_random.uniform(-1, 1, 2).astype(np.float32),
                "far": int(self.np_random.integers(100_000)),
            },
        }
        return observations[self.kind]()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps_left = int(self.np_random.integers(2, 6))
        self.first_observation = self._observe()
        self.reset_info = {"token": float(self.np_random.uniform())}
        return self.first_observation, self.reset_info

    def step(self, action):
        self.steps_left -= 1
        done = self.steps_left == 0
        return self._observe(), float(action), done and bool(action), done and not action, {"steps_left": self.steps_left}


class SeedBlindEnv(DriftEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(options=options)


class SeedRefusingEnv(DriftEnv):
    def __init__(self, error: type[BaseException], refuses_from: int = 0):
        super().__init__()
        self.error, self.refuses_from, self.resets = error, refuses_from, 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        if seed is not None and self.resets > self.refuses_from:
            raise self.error("no seeds, please")
        return super().reset(seed=seed, options=options)


class BufferSharingVecEnv(DummyVecEnv):
    """Returns the array that it writes to."""

    def _obs_from_buf(self):
        return self.buf_obs[None]


class VecEnvWithoutEnvMethod(DummyVecEnv):
    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        raise NotImplementedError("no env_method here")


class PassThrough(VecEnvWrapper):
    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        return self.venv.step_wait()


# By a lambda, so that the spec cannot be sent from a worker
gym.register("SeedBlind-v0", entry_point=lambda **kwargs: SeedBlindEnv(**kwargs))


@pytest.fixture
def subproc():
    """Build SubprocVecEnvs, and end their processes even where a worker has died."""
    venvs = []

    def build(env_fns, start_method="fork"):
        venvs.append(SubprocVecEnv(env_fns, start_method=start_method))
        return venvs[-1]

    yield build
    for venv in venvs:
        for process in venv.processes:
            process.terminate()
            process.join()


@pytest.fixture(params=["dummy", "subproc"])
def vec_env_class(request, subproc):
    return {"dummy": DummyVecEnv, "subproc": subproc}[request.param]


def run_starts(env: VecEnv, n_steps: int = 40) -> list:
    """
    Reset, then step with random actions.

    :return: The first observation of every episode as the environment itself knows it, in the order of the starts
    """
    rng = np.random.default_rng(0)
    env.reset()
    firsts = list(env.get_attr("first_observation"))
    for _ in range(n_steps):
        _, _, dones, _ = env.step(rng.integers(0, 2, env.num_envs))
        firsts += [env.get_attr("first_observation", indices=[i])[0] for i in np.flatnonzero(dones).tolist()]
    return firsts


def flat(observation) -> tuple:
    """An observation as something hashable."""
    parts = [observation[key] for key in sorted(observation)] if isinstance(observation, dict) else [observation]
    return tuple(float(number) for part in parts for number in np.ravel(part))


def different(observations: list) -> int:
    return len({flat(observation) for observation in observations})


def attached(venv: VecEnv, group_size: int = 2, seed: int | None = 1, **kwargs) -> SeededVecEnv:
    seeded = SeededVecEnv(venv)
    seeded.attach(StartQueue(group_size, seed=seed), **kwargs)
    return seeded


# -- the queue --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 0, -3, 2.0, "4", None, True], ids=repr)
def test_a_group_needs_an_integer_of_at_least_two_members(group_size):
    with pytest.raises(ValueError, match=f"`group_size` must be an integer of at least 2, got {group_size!r}"):
        StartQueue(group_size)
    assert StartQueue(2).group_size == 2


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="`seed` must not be negative, got -1"):
        StartQueue(2, seed=-1)


def test_starts_are_numbered_and_share_their_groups_31_bit_seed():
    queue = StartQueue(3, seed=7)
    starts = [queue.take() for _ in range(300)]
    assert [start.index for start in starts] == list(range(300))
    assert [start.group for start in starts] == [index // 3 for index in range(300)]
    assert all(start.seed == starts[3 * start.group].seed for start in starts)
    seeds = [start.seed for start in starts[::3]]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**31 for seed in seeds) and max(seeds) > 2**30


def test_a_groups_seed_depends_on_the_queues_seed_alone():
    def seeds(seed):
        queue = StartQueue(2, seed=seed)
        return [queue.take().seed for _ in range(6)]

    assert seeds(3) == seeds(3) != seeds(4)
    np.random.seed(0)
    first, second = seeds(None), seeds(None)
    np.random.seed(0)
    assert seeds(None) == first != second


def test_begin_group_skips_to_the_next_group_unless_one_is_about_to_begin():
    queue = StartQueue(4, seed=0)
    queue.begin_group()
    assert queue.next_index == 0
    queue.take()
    queue.begin_group()
    assert queue.next_index == 4
    queue.begin_group()
    assert queue.take() == start_at(4, group_size=4, seed=0)


def start_at(index: int, group_size: int, seed: int):
    """The start at an index, by taking all before it."""
    queue = StartQueue(group_size, seed=seed)
    return [queue.take() for _ in range(index + 1)][-1]


@pytest.mark.parametrize("taken", [0, 5, 6], ids=["fresh", "within a group", "between groups"])
def test_a_pickled_queue_continues_identically(taken):
    queue = StartQueue(3, seed=None)
    for _ in range(taken):
        queue.take()
    copy = pickle.loads(pickle.dumps(queue))
    assert [copy.take() for _ in range(10)] == [queue.take() for _ in range(10)]


# -- shared starts ----------------------------------------------------------------------------------------------------


def test_members_of_a_group_start_alike_and_groups_do_not(vec_env_class):
    env = attached(vec_env_class([DriftEnv] * 2), group_size=4)
    firsts = run_starts(env)
    groups = [firsts[j : j + 4] for j in range(0, len(firsts) - 3, 4)]
    assert len(groups) >= 5
    assert all(different(group) == 1 for group in groups)
    assert different([group[0] for group in groups]) == len(groups)
    assert env.mismatches == 0


def test_without_a_queue_all_starts_differ(vec_env_class):
    env = SeededVecEnv(vec_env_class([DriftEnv] * 2))
    firsts = run_starts(env)
    assert len(firsts) >= 20
    assert different(firsts) == len(firsts)
    assert (env.start_indices == -1).all()


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        ("box", VecNormalize),
        ("box", lambda venv: VecFrameStack(venv, 3)),
        ("box", VecMonitor),
        ("image", VecTransposeImage),
        ("image", lambda venv: VecFrameStack(VecTransposeImage(VecMonitor(venv)), 2)),
        ("dict", lambda venv: VecNormalize(VecMonitor(venv), norm_obs_keys=["near"])),
    ],
    ids=["normalize", "frame stack", "monitor", "transpose", "transpose in frame stack", "dict in normalize"],
)
def test_members_of_a_group_start_alike_under_wrappers(kind, wrap):
    env = insert_seeded_vec_env(wrap(DummyVecEnv([lambda: DriftEnv(kind)] * 2)))
    find_seeded_vec_env(env).attach(StartQueue(2, seed=1))
    firsts = run_starts(env)
    assert len(firsts) >= 20
    assert all(different(firsts[j : j + 2]) == 1 for j in range(0, len(firsts) - 1, 2))
    assert different(firsts[::2]) == len(firsts[::2])

    find_seeded_vec_env(env).detach()
    unshared = run_starts(env)
    assert different(unshared) == len(unshared)


@pytest.mark.parametrize("kind", SPACES)
def test_the_returned_observation_is_that_of_the_seeded_reset(kind, vec_env_class):
    env = attached(vec_env_class([lambda: DriftEnv(kind)] * 2))
    observations, begun = env.reset(), np.ones(2, dtype=bool)
    n_begun = 0
    for _ in range(30):
        for i in np.flatnonzero(begun).tolist():
            row = {key: part[i] for key, part in observations.items()} if kind == "dict" else observations[i]
            first = env.get_attr("first_observation", indices=[i])[0]
            assert np.array_equal(flat(row), flat(first), equal_nan=True)
            n_begun += 1
        observations, _, begun, _ = env.step(np.zeros(2, dtype=int))
    assert n_begun >= 10 and env.mismatches == 0


@pytest.mark.parametrize(("n_envs", "group_size"), [(1, 4), (3, 2), (8, 4), (2, 5)])
def test_the_jth_start_belongs_to_group_j_over_group_size(n_envs, group_size):
    queue = StartQueue(group_size, seed=2)
    env = SeededVecEnv(DummyVecEnv([DriftEnv] * n_envs))
    env.attach(queue)
    env.reset()
    assert env.start_indices.tolist() == list(range(n_envs)) and env.start_indices.dtype == np.int64
    firsts = env.get_attr("first_observation")
    for _ in range(60):
        before = env.start_indices
        kept = before.copy()
        _, _, dones, _ = env.step(np.ones(n_envs, dtype=int))
        begun = np.flatnonzero(dones).tolist()
        assert env.start_indices[begun].tolist() == list(range(len(firsts), len(firsts) + len(begun)))
        assert (env.start_indices[~dones] == kept[~dones]).all() and (before == kept).all()
        firsts += [env.get_attr("first_observation", indices=[i])[0] for i in begun]
    assert queue.next_index == len(firsts) >= 3 * group_size
    oracle = DriftEnv()
    seeds = StartQueue(group_size, seed=2)
    for first in firsts:
        np.testing.assert_array_equal(first, oracle.reset(seed=seeds.take().seed)[0])


def test_a_reset_abandons_the_groups_in_flight():
    env = attached(DummyVecEnv([DriftEnv] * 3), group_size=2)
    env.reset()
    assert env.start_indices.tolist() == [0, 1, 2]
    env.reset()
    assert env.start_indices.tolist() == [4, 5, 6]
    assert env.mismatches == 0


def test_minigrid_layouts_are_those_of_the_group():
    pytest.importorskip("minigrid")
    from minigrid.wrappers import ImgObsWrapper

    def make():
        return Monitor(ImgObsWrapper(gym.make("MiniGrid-DoorKey-5x5-v0", max_steps=4)))

    env = attached(DummyVecEnv([make] * 2), group_size=4)
    layouts = []
    env.reset()
    for _ in range(8):
        layouts += [inner.unwrapped.grid.encode() for inner in env.envs]
        for _ in range(4):
            _, _, dones, _ = env.step(np.zeros(2, dtype=int))
        assert dones.all()
    assert all(different(layouts[j : j + 4]) == 1 for j in range(0, 16, 4))
    assert different(layouts) > 1
    assert env.mismatches == 0


# -- what the seeded reset leaves as it is ----------------------------------------------------------------------------


def without_clock(infos) -> list[dict]:
    infos = deepcopy(list(infos))
    for info in infos:
        info.get("episode", {}).pop("t", None)
    return infos


def test_the_first_episodes_are_those_of_a_plain_vec_env(vec_env_class):
    env = attached(vec_env_class([lambda: Monitor(DriftEnv())] * 2), group_size=2)
    plain = vec_env_class([lambda: Monitor(DriftEnv())] * 2)
    plain._seeds = [start_at(j, group_size=2, seed=1).seed for j in range(2)]
    np.testing.assert_array_equal(env.reset(), plain.reset())
    np.testing.assert_equal(list(env.reset_infos), list(plain.reset_infos))
    for _ in range(5):
        actions = np.array([0, 1])
        observations, rewards, dones, infos = env.step(actions)
        plain_observations, plain_rewards, plain_dones, plain_infos = plain.step(actions)
        np.testing.assert_array_equal(rewards, plain_rewards)
        np.testing.assert_array_equal(dones, plain_dones)
        np.testing.assert_equal(without_clock(infos), without_clock(plain_infos))
        if dones.any():
            break
        np.testing.assert_array_equal(observations, plain_observations)
    # Same start, same draws: both environments end here, one terminated and one truncated
    assert dones.all()
    assert [info["TimeLimit.truncated"] for info in infos] == [True, False]
    assert all({"terminal_observation", "episode"} <= info.keys() for info in infos)
    # Sensitivity: the automatic reset's observation is another one
    assert not np.array_equal(observations, plain_observations)


def test_reset_infos_are_those_of_the_seeded_reset_until_the_next_one(vec_env_class):
    env = attached(vec_env_class([DriftEnv] * 2), group_size=4)
    oracle = DriftEnv()
    env.reset()
    for _ in range(30):
        expected = [oracle.reset(seed=start_at(j, 4, seed=1).seed)[1] for j in env.start_indices]
        assert list(env.reset_infos) == expected
        assert list(env.venv.reset_infos) == expected
        env.step(np.zeros(2, dtype=int))
    assert env.start_indices.min() > 4
    env.reset()
    expected = env.get_attr("reset_info")
    env.set_attr("steps_left", 3)
    env.step(np.zeros(2, dtype=int))
    assert list(env.reset_infos) == expected


def test_reset_infos_from_before_a_use_while_detached_are_forgotten():
    env = attached(DummyVecEnv([DriftEnv] * 2))
    run_starts(env)
    queue = env.start_queue
    env.detach()
    env.reset()
    env.attach(queue)
    env.set_attr("steps_left", 3)
    env.step(np.zeros(2, dtype=int))
    assert env.reset_infos == env.get_attr("reset_info")


def test_an_array_that_the_base_owns_is_not_written_to():
    env = attached(BufferSharingVecEnv([DriftEnv] * 2))
    env.reset()
    dones = np.zeros(2, dtype=bool)
    while not dones.any():
        observations, _, dones, _ = env.step(np.zeros(2, dtype=int))
    done = int(np.flatnonzero(dones)[0])
    np.testing.assert_array_equal(observations[done], env.envs[done].first_observation)
    assert not np.array_equal(env.venv.buf_obs[None][done], observations[done])


# -- transparency -----------------------------------------------------------------------------------------------------


def trace(env: VecEnv, seed: int, n_steps: int = 50) -> list:
    """Everything that a run shows of an environment."""
    rng = np.random.default_rng(seed)
    env.seed(seed)
    shown = [env.reset(), list(env.reset_infos)]
    for _ in range(n_steps):
        observations, rewards, dones, infos = env.step(rng.integers(0, 2, env.num_envs))
        shown += [observations, rewards, dones, list(infos), list(env.reset_infos)]
    return shown


@pytest.mark.parametrize("queue_before", [False, True], ids=["never attached", "detached"])
def test_detached_it_is_the_plain_vec_env_bit_for_bit(queue_before, vec_env_class):
    env = SeededVecEnv(vec_env_class([DriftEnv] * 2))
    if queue_before:
        env.attach(StartQueue(2, seed=1))
        run_starts(env)
        env.detach()
    plain = trace(vec_env_class([DriftEnv] * 2), seed=5)
    np.testing.assert_equal(trace(env, seed=5), plain)

    env.attach(StartQueue(2, seed=1))
    with pytest.raises(AssertionError):
        np.testing.assert_equal(trace(env, seed=5), plain)


def test_unshared_starts_are_numbered_but_are_those_of_the_plain_vec_env(vec_env_class):
    env = attached(vec_env_class([DriftEnv] * 2), group_size=4, share_starts=False)
    assert not env.shares_starts
    np.testing.assert_equal(trace(env, seed=5), trace(vec_env_class([DriftEnv] * 2), seed=5))
    assert env.start_queue.next_index > 20
    assert env.start_indices.max() == env.start_queue.next_index - 1


def start_by_reset(env):
    env.reset()


def start_by_step(env):
    queue = env.start_queue
    env.detach()
    env.reset()
    env.attach(queue)
    env.set_attr("steps_left", 1)
    env.step(np.zeros(2, dtype=int))


@pytest.mark.parametrize("start", [start_by_reset, start_by_step], ids=["started by reset", "started by step"])
@pytest.mark.parametrize(
    "stop_sharing",
    [lambda env: env.detach(), lambda env: env.attach(env.start_queue, share_starts=False)],
    ids=["detached", "unshared"],
)
def test_equal_generators_of_group_members_do_not_outlive_the_sharing(start, stop_sharing, vec_env_class):
    env = attached(vec_env_class([DriftEnv] * 2), group_size=2)
    start(env)
    assert different(env.get_attr("first_observation")) == 1
    # This is what it would be: the environments draw the same again
    assert different(list(env.venv.reset())) == 1
    stop_sharing(env)
    firsts = run_starts(env)
    assert different(firsts) == len(firsts)

    twin = attached(vec_env_class([DriftEnv] * 2), group_size=2)
    start(twin)
    stop_sharing(twin)
    np.testing.assert_array_equal(run_starts(twin), firsts)


def test_use_while_detached_is_noted_until_a_reset_with_a_queue():
    env = SeededVecEnv(DummyVecEnv([DriftEnv] * 2))
    queue = StartQueue(2, seed=1)
    assert not env.stepped_while_detached
    env.attach(queue)
    env.reset()
    env.step(np.zeros(2, dtype=int))
    env.detach()
    env.attach(queue)
    assert not env.stepped_while_detached and env.start_indices.tolist() == [0, 1]
    for use in [lambda: env.step(np.zeros(2, dtype=int)), env.reset]:
        env.detach()
        use()
        assert env.stepped_while_detached and env.start_indices.tolist() == [-1, -1]
        env.attach(queue)
        assert env.stepped_while_detached
        env.reset()
        assert not env.stepped_while_detached


def test_a_group_is_verified_across_detach_and_attach_but_not_across_queues():
    env = SeededVecEnv(DummyVecEnv([DriftEnv]))
    queue = StartQueue(50, seed=1)

    def run_on(queue, n_steps=10):
        env.attach(queue)
        for _ in range(n_steps):
            env.step(np.zeros(1, dtype=int))
        env.detach()

    env.attach(queue)
    env.reset()
    run_on(queue)
    env.set_attr("kind", "nan")  # the same seed shows something else from here on
    with pytest.warns(UserWarning, match="does not reproduce its initial state"):
        run_on(queue)
    seen = env.mismatches
    assert seen > 0
    env.attach(StartQueue(50, seed=2))
    assert env.start_indices.tolist() == [-1]
    run_on(env.start_queue)
    assert env.mismatches == seen and env.start_indices.min() >= 0


def test_what_belongs_to_the_base_is_the_bases_own():
    base = DummyVecEnv([DriftEnv] * 2)
    env = SeededVecEnv(base)
    for name in [
        "num_envs",
        "observation_space",
        "action_space",
        "reset_infos",
        "render_mode",
        "metadata",
        "_seeds",
        "_options",
    ]:
        assert getattr(env, name) is getattr(base, name)
        marker = object()
        setattr(env, name, marker)
        assert getattr(base, name) is marker
    assert env.envs is base.envs and env.buf_infos is base.buf_infos and env.unwrapped is base
    with pytest.raises(AttributeError, match="no_such_thing"):
        env.no_such_thing  # noqa: B018
    # As while a copy is being built
    assert not hasattr(SeededVecEnv.__new__(SeededVecEnv), "envs")


def test_options_seeds_and_methods_reach_the_environments(vec_env_class):
    env = SeededVecEnv(vec_env_class([lambda: Monitor(DriftEnv())] * 2))
    assert env.seed(3) == [3, 4] == env.venv._seeds
    env.set_options({"level": 1})
    assert env.venv._options == [{"level": 1}] * 2
    env.reset()
    assert env.has_attr("steps_left") and not env.has_attr("no_such_thing")
    env.set_attr("mark", 8)
    env.set_attr("mark", 9, indices=[1])
    env.step(np.zeros(2, dtype=int))
    assert env.get_attr("mark", indices=[1]) == [9] and env.get_attr("mark") == [8, 9]
    assert env.env_method("get_total_steps", indices=[1]) == [1] and env.env_method("get_total_steps") == [1, 1]
    assert env.env_is_wrapped(Monitor) == [True, True] and env.env_is_wrapped(gym.wrappers.TimeLimit) == [False, False]
    with pytest.warns(UserWarning, match="assumes it is `rgb_array`"):
        assert env.get_images() == [None, None]
    with pytest.warns(UserWarning, match="no `render_mode` was passed"):
        assert env.render() is None
    env.close()


@pytest.mark.parametrize(
    "wrap",
    [VecNormalize, lambda venv: VecMonitor(VecFrameStack(VecNormalize(venv), 2))],
    ids=["one wrapper", "three wrappers"],
)
def test_attributes_are_found_through_wrappers(wrap):
    env = wrap(attached(DummyVecEnv([DriftEnv] * 2)))
    env.reset()
    assert env.envs is env.unwrapped.envs
    assert env.start_indices.tolist() == [0, 1] and env.mismatches == 0 and not env.stepped_while_detached
    assert find_seeded_vec_env(env).reset_infos[0].keys() == {"token"}


@pytest.mark.parametrize("copy", [deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"])
def test_a_copy_continues_identically(copy):
    env = attached(DummyVecEnv([DriftEnv] * 2))
    run_starts(env, n_steps=7)
    twin = copy(env)
    assert twin.venv is not env.venv and type(twin) is SeededVecEnv
    for _ in range(20):
        np.testing.assert_equal(twin.step(np.zeros(2, dtype=int)), env.step(np.zeros(2, dtype=int)))
        assert (twin.start_indices == env.start_indices).all()


# -- its place among the wrappers -------------------------------------------------------------------------------------


def test_it_is_inserted_innermost_and_once():
    base = DummyVecEnv([DriftEnv])
    env = VecMonitor(VecNormalize(base))
    with pytest.raises(ValueError, match=r"No SeededVecEnv in .*VecMonitor"):
        find_seeded_vec_env(env)
    assert insert_seeded_vec_env(env) is env
    seeded = find_seeded_vec_env(env)
    assert type(seeded) is SeededVecEnv and env.venv.venv is seeded and seeded.venv is base
    assert insert_seeded_vec_env(env) is env and find_seeded_vec_env(env) is seeded

    bare = insert_seeded_vec_env(base)
    assert type(bare) is SeededVecEnv and bare.venv is base
    assert insert_seeded_vec_env(bare) is bare and find_seeded_vec_env(bare) is bare


@pytest.mark.parametrize("wrap", [VecNormalize, SeededVecEnv], ids=["wrapper", "seeded"])
def test_it_goes_around_a_base_only(wrap):
    with pytest.raises(ValueError, match=r"SeededVecEnv goes around a base VecEnv, got .*use `insert_seeded_vec_env"):
        SeededVecEnv(wrap(DummyVecEnv([DriftEnv])))


def test_a_wrapper_around_something_else_is_refused():
    class Adapter(PassThrough):
        def __init__(self, native):
            self.venv = native

    with pytest.raises(ValueError, match="`env` is a Adapter around 7, which is no `VecEnv`"):
        insert_seeded_vec_env(Adapter(7))


def test_normalisation_statistics_reach_an_evaluation_env_that_has_none_of_it():
    evaluation = VecNormalize(DummyVecEnv([DriftEnv]))
    training = insert_seeded_vec_env(VecNormalize(DummyVecEnv([DriftEnv] * 2)))
    run_starts(training, n_steps=5)
    sync_envs_normalization(training, evaluation)
    np.testing.assert_array_equal(evaluation.obs_rms.mean, training.obs_rms.mean)

    with pytest.raises(AssertionError, match="expected the eval env to be a VecEnvWrapper"):
        sync_envs_normalization(VecNormalize(PassThrough(DummyVecEnv([DriftEnv] * 2))), evaluation)


def evaluate_while_training(training_env: VecEnv, evaluation_env: VecEnv) -> float:
    """Train for a moment with SB3's EvalCallback, where any warning is an error."""
    callback = EvalCallback(evaluation_env, eval_freq=4, verbose=0)
    model = PPO("MlpPolicy", training_env, n_steps=8, batch_size=8, policy_kwargs={"net_arch": [4]}, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(8, callback=callback)
    return callback.last_mean_reward


def monitored() -> VecEnv:
    return DummyVecEnv([lambda: Monitor(DriftEnv())])


@pytest.mark.parametrize("wrap", [lambda venv: venv, VecNormalize], ids=["bare", "normalize"])
def test_eval_callback_finds_training_and_evaluation_wrapped_alike(wrap):
    training_env = insert_seeded_vec_env(wrap(monitored()))
    find_seeded_vec_env(training_env).attach(StartQueue(2, seed=1))
    assert np.isfinite(evaluate_while_training(training_env, wrap(monitored())))


def test_eval_callback_would_warn_if_the_bases_class_were_hidden():
    class Undisguised(SeededVecEnv):
        __class__ = property(lambda self: Undisguised)

    seeded = SeededVecEnv(monitored())
    assert isinstance(seeded, SeededVecEnv) and isinstance(seeded, DummyVecEnv) and not isinstance(seeded, VecEnvWrapper)
    with pytest.raises(UserWarning, match="Training and eval env are not of the same type"):
        evaluate_while_training(Undisguised(monitored()), monitored())


# -- when starts cannot be shared -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: gym.make("SeedBlind-v0"), "SeedBlind-v0"), (lambda: Monitor(SeedBlindEnv()), "SeedBlindEnv")],
    ids=["registered", "class"],
)
def test_an_environment_that_ignores_seeds_is_counted_and_warned_of_once_by_name(make, name, vec_env_class):
    env = attached(vec_env_class([make] * 2), group_size=4)
    with pytest.warns(UserWarning, match=f"The environment '{name}' does not reproduce its initial state") as record:
        firsts = run_starts(env)
    assert len([warning for warning in record if "reproduce" in str(warning.message)]) == 1
    message = str(record[0].message)
    assert "super().reset(seed=seed)" in message and "self.np_random" in message and "share_starts=False" in message
    # All but the first member of each group
    assert env.mismatches == len(firsts) - -(-len(firsts) // 4)
    assert env.shares_starts


@pytest.mark.parametrize("kind", SPACES)
def test_a_well_behaved_environment_is_not_warned_of(kind, vec_env_class):
    env = attached(vec_env_class([lambda: DriftEnv(kind)] * 2), group_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_starts(env)
    assert env.mismatches == 0 and env.shares_starts


def test_ignored_seeds_do_not_matter_where_starts_are_not_shared():
    env = attached(DummyVecEnv([SeedBlindEnv] * 2), share_starts=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_starts(env)
    assert env.mismatches == 0


def test_one_differing_part_of_a_dict_is_a_mismatch():
    class HalfSeeded(DriftEnv):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            return {**observation, "far": int(np.random.default_rng().integers(100_000))}, info

    env = attached(DummyVecEnv([lambda: HalfSeeded("dict")] * 2))
    with pytest.warns(UserWarning, match="'HalfSeeded' does not reproduce"):
        env.reset()
    assert env.mismatches == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DummyVecEnv([lambda: SeedRefusingEnv(TypeError)] * 2), "'SeedRefusingEnv' .* TypeError: no seeds, please"),
        (lambda: DummyVecEnv([lambda: SeedRefusingEnv(KeyError, 1)] * 2), "'SeedRefusingEnv' .* KeyError: 'no seeds, please'"),
        (lambda: DummyVecEnv([lambda: SeedRefusingEnv(OSError, 3)] * 2), "'SeedRefusingEnv' .* OSError: no seeds, please"),
        (lambda: VecEnvWithoutEnvMethod([DriftEnv] * 2), "'DriftEnv' .* NotImplementedError: no env_method here"),
    ],
    ids=["refuses at the first reset", "refuses at the second", "refuses at the third", "no env_method"],
)
def test_where_a_seeded_reset_fails_the_run_goes_on_unshared_and_says_so_once(build, message):
    env = attached(build(), group_size=4)
    with pytest.warns(UserWarning, match=message) as record:
        observations = env.reset()
        dones = np.zeros(2, dtype=bool)
        for _ in range(30):
            observations, _, dones, _ = env.step(np.zeros(2, dtype=int))
            for i in np.flatnonzero(dones).tolist():
                np.testing.assert_array_equal(observations[i], env.envs[i].get_wrapper_attr("first_observation"))
            assert env.reset_infos == env.get_attr("reset_info")
    assert len(record) == 1
    assert "share_starts=False" in str(record[0].message) and "without shared starts" in str(record[0].message)
    assert not env.shares_starts
    assert env.start_indices.max() == env.start_queue.next_index - 1 > 10

    env.attach(env.start_queue)
    assert not env.shares_starts


def test_a_finished_environment_is_reset_once():
    """SB3's automatic reset takes no seed: the seeded one replaces it, rather than following it."""
    env = attached(DummyVecEnv([lambda: Monitor(DriftEnv(), allow_early_resets=False)] * 2), group_size=4)
    env.reset()
    for _ in range(30):
        env.step(np.zeros(2, dtype=int))
    assert env.shares_starts and env.start_queue.next_index > 10


def test_an_environment_that_fails_without_a_seed_too_fails_with_its_own_error():
    class Broken(DriftEnv):
        def reset(self, *, seed=None, options=None):
            raise ZeroDivisionError("broken for good")

    env = attached(DummyVecEnv([Broken]))
    with (
        pytest.warns(UserWarning, match="cannot be reset"),
        pytest.raises(EnvironmentFault, match="Environment 0 raised ZeroDivisionError in `reset`: broken for good"),
    ):
        env.reset()


@pytest.mark.parametrize("refuses_from", [0, 1], ids=["first reset", "later reset"])
def test_an_interrupt_is_not_swallowed(refuses_from):
    env = attached(DummyVecEnv([lambda: SeedRefusingEnv(KeyboardInterrupt, refuses_from)]))
    with pytest.raises(KeyboardInterrupt):
        run_starts(env)
    assert env.shares_starts


@pytest.mark.parametrize("refuses_from", [0, 1], ids=["first reset", "later reset"])
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_worker_that_dies_of_a_seed_is_named_with_the_remedy(refuses_from, start_method, subproc):
    env_fns = [lambda: SeedRefusingEnv(TypeError, refuses_from), DriftEnv]
    # A forked worker holds the pipes of those before it open, so that waiting for an answer alone would never end
    env = attached(subproc(env_fns, start_method=start_method))
    with pytest.raises(EnvironmentFault, match=r"Environment 0 is gone: .*exit code 1, .*pass `share_starts=False`") as raised:
        run_starts(env)
    assert raised.value.env_idx == 0

    run_starts(attached(subproc(env_fns, start_method=start_method), share_starts=False))
