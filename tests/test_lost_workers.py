"""Nothing is lost when a worker of Ray is."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
import ray
import torch as th
from helpers import same, weights
from ray_helpers import N_STEPS, Observer, Walk, make, monitored, ray_env, trained
from stable_baselines3.common.callbacks import BaseCallback

from sb3_grpo import GRPO, EnvironmentFault
from sb3_grpo.distributed.worker import RolloutWorker
from sb3_grpo.observations import same_values
from sb3_grpo.persistence import VERSION

# Ray runs once in a process of the tests
pytestmark = [pytest.mark.xdist_group("lost workers"), pytest.mark.usefixtures("ray_ends_with_the_module")]

# Workers cannot import this module
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Any]:
    """Workers take seconds to start, and those that a test has lost are replaced for the next."""
    env = ray_env()
    yield env
    env.close()


@pytest.fixture(scope="module")
def undisturbed(two_workers: Any) -> dict[str, th.Tensor]:
    """Weights after a training with two workers of which none is lost."""
    return weights(make(two_workers).learn(3 * N_STEPS * 4))


class Account(BaseCallback):
    """Counts the transitions that were taken, and those of all updates. No two of a trajectory have the same observation."""

    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.taken: Counter[tuple[float, ...]] = Counter()
        self.used: Counter[tuple[float, ...]] = Counter()

    def _on_step(self) -> bool:
        groups, members, _ = self.locals["position"]
        self.taken.update(keys(2 * groups + members, self.locals["obs_tensor"]))
        return True

    def _on_rollout_end(self) -> None:
        update = self.model.rollout_buffer._update
        self.used.update(keys(update.trajectories, update.observations))


def keys(*arrays: Any) -> list[tuple[float, ...]]:
    return [(trajectory, *row) for trajectory, row in zip(*(array.tolist() for array in arrays), strict=True)]


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 70, pytest.param(150, marks=pytest.mark.slow)])
def test_a_worker_that_dies_changes_nothing(at: int, undisturbed: dict[str, th.Tensor], tmp_path: pathlib.Path):
    env = ray_env(faulty=3, fault="dies", marker=str(tmp_path / "marker"), at=at)
    pids, account = env.worker_pids, Account()
    model = make(env).learn(3 * N_STEPS * 4, callback=account)
    assert (tmp_path / "marker").exists()
    assert env.worker_pids[0] == pids[0] and env.worker_pids[1] != pids[1]
    assert same(weights(model), undisturbed)
    assert account.used == account.taken and set(account.used.values()) == {1}, "a transition is not in one update"
    assert account.used.total() == 3 * N_STEPS * 4
    env.close()


@pytest.mark.slow
def test_a_worker_that_dies_between_rollouts_changes_nothing(undisturbed: dict[str, th.Tensor]):
    env = ray_env()
    model = make(env).learn(N_STEPS * 4)
    os.kill(env.worker_pids[0], signal.SIGKILL)
    model.learn(2 * N_STEPS * 4, reset_num_timesteps=False)
    assert same(weights(model), undisturbed)
    env.close()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_replaces_another_changes_nothing(
    undisturbed: dict[str, th.Tensor], tmp_path: pathlib.Path
):
    env = ray_env(faulty=3, fault="dies in its first reset if told so", marker=str(tmp_path / "marker"))
    model = make(env).learn(N_STEPS * 4)
    (tmp_path / "marker").touch()
    os.kill(env.worker_pids[1], signal.SIGKILL)
    model.learn(2 * N_STEPS * 4, reset_num_timesteps=False)
    assert not (tmp_path / "marker").exists()
    assert same(weights(model), undisturbed)
    env.close()


@pytest.mark.slow
def test_a_worker_that_hangs_costs_its_timeout_and_nothing_else(undisturbed: dict[str, th.Tensor], tmp_path: pathlib.Path):
    env = ray_env(faulty=0, fault="hangs", marker=str(tmp_path / "marker"), timeout=6.0)
    began = time.monotonic()
    assert same(trained(env), undisturbed)
    assert 6.0 < time.monotonic() - began < 60.0


class SavesAndDies(BaseCallback):
    """Saves after the first update, and kills the learner in the next rollout."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def _on_rollout_start(self) -> None:
        if self.num_timesteps > 0:
            self.model.save(self.path)

    def _on_step(self) -> bool:
        if self.num_timesteps > N_STEPS * 4 + 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return True


LEARNER = """
import sys
import torch as th
th.set_num_threads(1)
from sb3_grpo import distributed
from ray_helpers import make, ray_env
from test_lost_workers import SavesAndDies
distributed.connect(sys.argv[2])
env = ray_env()
print("workers:", *env.worker_pids, flush=True)
make(env).learn(10_000, callback=SavesAndDies(sys.argv[1]))
"""


@pytest.mark.slow
def test_after_the_learner_has_died_a_checkpoint_continues_as_if_it_had_been_saved_and_loaded(tmp_path: pathlib.Path):
    env = ray_env()
    make(env).learn(N_STEPS * 4).save(tmp_path / "undisturbed")
    arguments = [str(tmp_path / "killed"), ray.get_runtime_context().gcs_address]
    done = subprocess.run(
        [sys.executable, "-c", LEARNER, *arguments], capture_output=True, text=True, timeout=240, env=with_tests_on_path()
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    continued = []
    for name in ("undisturbed", "killed"):
        again: Any = GRPO.load(tmp_path / name, env=env).learn(2 * N_STEPS * 4, reset_num_timesteps=False)
        assert again.num_timesteps == 3 * N_STEPS * 4
        assert again.rollout_buffer.groups.min() > 3  # no start comes twice
        continued.append(weights(again))
    assert same(*continued)
    env.close()
    listed = done.stdout.partition("workers:")[2].splitlines()[0]
    deadline, pids = time.monotonic() + 60.0, [int(pid) for pid in listed.split()]
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == 2 and not any(map(is_running, pids)), "workers have outlived their learner"


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_values_that_were_set_are_set_in_the_new_worker(two_workers: Any):
    two_workers.set_attr("size", "small")
    two_workers.set_attr("size", "large", indices=[2])
    os.kill(two_workers.worker_pids[1], signal.SIGKILL)
    assert two_workers.get_attr("size") == ["small", "small", "large", "small"]


@pytest.mark.slow
def test_environments_that_do_not_repeat_themselves_begin_new_episodes(tmp_path: pathlib.Path):
    env = ray_env(faulty=2, fault="dies", marker=str(tmp_path / "marker"), at=100, repeats=False)
    with pytest.warns(UserWarning, match=r"do not come to the same state again.*All environments begin new episodes"):
        model = make(env).learn(3 * N_STEPS * 4)
    assert model.num_timesteps == 3 * N_STEPS * 4
    env.close()


@pytest.mark.slow
def test_environments_without_seeds_begin_new_episodes(tmp_path: pathlib.Path):
    env = ray_env(faulty=2, fault="dies", marker=str(tmp_path / "marker"), at=100)
    with pytest.warns(UserWarning, match="were reset with a seed. All environments begin new episodes"):
        make(env, share_starts=False).learn(3 * N_STEPS * 4)
    env.close()


VECTORS = np.array([0.0, np.nan]), np.array([0.0, 1.0])


@pytest.mark.parametrize(
    ("observation", "other"),
    [
        pytest.param(*VECTORS, id="vector"),
        pytest.param(3, 2, id="Discrete"),
        pytest.param({"a": VECTORS[0], "b": 1}, {"a": VECTORS[0], "b": 2}, id="Dict"),
        pytest.param((VECTORS[0], 1), (VECTORS[1], 1), id="Tuple"),
        pytest.param({"a": [1, VECTORS[0]]}, {"a": [1, VECTORS[1]]}, id="nested"),
    ],
)
def test_observations_are_compared_part_by_part_and_none_is_like_none(observation: Any, other: Any):
    assert same_values(deepcopy(observation), observation)
    assert not same_values(observation, other)
    assert not same_values(None, observation)


def test_a_replay_gives_the_observation_of_the_buffer_and_one_that_ends_early_is_another_episode():
    worker = RolloutWorker(0)
    worker.build([cloudpickle.dumps(partial(monitored, Walk))] * 2, VERSION)
    few = [np.zeros(1, np.float32)] * 4
    brought_back = worker.restore([5, 5], [few, few[:3]])
    oracle = Walk()
    oracle.reset(seed=5)
    expected = [oracle.step(action)[0] for action in few]
    np.testing.assert_array_equal(brought_back, [expected[3], expected[2]])
    assert worker.restore([5, 5], [few * 30, few]) is None
    assert worker.venv.get_attr("n_steps")[1] == 7, "the others are not brought back"


@pytest.mark.parametrize("is_lost", [pytest.param(True, marks=pytest.mark.slow), False])
def test_between_rollouts_lost_environments_can_be_asked_and_the_next_rollout_begins_anew(
    is_lost: bool, two_workers: Any, monkeypatch: pytest.MonkeyPatch
):
    env, seen = two_workers, Observer()
    monkeypatch.setattr(env, "max_replay", 0)
    model = make(env).learn(N_STEPS * 4)
    if is_lost:
        os.kill(env.worker_pids[1], signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert env.get_attr("colour") == ["blue"] * 4
        assert len(env.env_method("_observation")) == 4
        model.learn(N_STEPS * 4, callback=seen, reset_num_timesteps=False)
    messages = [str(each.message) for each in caught if "All environments begin new episodes" in str(each.message)]
    assert [
        "lost its worker 1" in each and "One of its episodes is longer than max_replay=0 steps" in each for each in messages
    ] == [True] * is_lost
    firsts = [Walk().reset(seed=model.ledger.seed_of(group))[0] for group in model.rollout_buffer.groups[:, 0].tolist()]
    begins_anew = (model.rollout_buffer.observations[:, 0] == firsts).all(1)
    assert begins_anew.tolist() == [is_lost] * 4
    assert (model.rollout_buffer.steps[:, 0] == 0).tolist() == [is_lost] * 4
    assert (seen.rows[0]["obs_tensor"].numpy() == model.rollout_buffer.observations[:, 0]).all()


def test_nobody_steps_from_an_episode_that_was_lost(two_workers: Any):
    env = two_workers
    env.reset()  # with the seeds that a training has left
    env.reset()
    os.kill(env.worker_pids[0], signal.SIGKILL)
    assert env.get_attr("n_steps")[:2] == [0, 0]  # of a new worker
    actions = np.zeros((4, 1), np.float32)
    with pytest.raises(EnvironmentFault, match=r"Environment 0 has lost its worker 0 .* were reset with a seed"):
        env.step(actions)
    env.reset()
    assert len(env.step(actions)[0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("max_replay", [10_000, -1], ids=["brought-back", "reset"])
def test_a_worker_that_dies_again_and_again_is_given_up(max_replay: int):
    env = ray_env(faulty=3, fault="dies", at=10)
    env.max_retries, env.max_replay = 1, max_replay
    model = make(env)
    with (
        warnings.catch_warnings(),
        pytest.raises(
            EnvironmentFault,
            match=r"Environment 2 has lost its worker 1 \(process \d+ on node [\d.]+\)",
        ) as fault,
    ):
        warnings.simplefilter("ignore")
        model.learn(N_STEPS * 4)
    assert type(fault.value) is EnvironmentFault
    assert env._n_lost == [0, 2]
    env.close()


def test_an_error_of_an_environment_is_not_repaired_but_named(tmp_path: pathlib.Path):
    env = ray_env(n_workers=1, faulty=3, fault="raises", marker=str(tmp_path / "marker"), at=20)
    with pytest.raises(ZeroDivisionError, match="no way on") as raised:
        make(env).learn(N_STEPS * 4)
    assert sys.version_info < (3, 11) or raised.value.__notes__[0].startswith("This was raised by `step` of environment 3.")
    env.close()


def with_tests_on_path() -> dict[str, str]:
    here = pathlib.Path(__file__).parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])}


CLUSTER = """
import os
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
import ray
from ray.cluster_utils import Cluster
import torch as th
from helpers import same, weights
from ray_helpers import N_STEPS, Walk, make, monitored
from functools import partial
from sb3_grpo.distributed import RayVecEnv

if __name__ == "__main__":
    th.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False))
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    results = []
    for is_disturbed in (False, True):
        env = RayVecEnv([partial(monitored, Walk) for _ in range(4)], n_workers=2)
        model = make(env).learn(N_STEPS * 4)
        if is_disturbed:
            cluster.remove_node(nodes[0])
        model.learn(2 * N_STEPS * 4, reset_num_timesteps=False)
        results.append(weights(model))
        env.close()
    print("SAME" if same(*results) else "DIFFERENT")
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_node_that_is_lost_changes_nothing(tmp_path: pathlib.Path):
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=with_tests_on_path())
    assert done.stdout.strip().endswith("SAME"), done.stdout + done.stderr
