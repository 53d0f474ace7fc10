"""The vectorised environment, which replaces workers that are lost, and the connection to a cluster."""

import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
import ray
import torch as th
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_grpo.collection import ActedStep, EnvStep
from sb3_grpo.distributed.worker import Description, RolloutWorker, merged
from sb3_grpo.observations import map_observations, same_values, take_observations
from sb3_grpo.persistence import VERSION
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.starts import EnvironmentFault, Position, RolloutLost, SeededVecEnv
from sb3_grpo.validation import require_at_least, require_positive

#: How long to wait until the address of a cluster answers, for a new worker, and until environments are closed.
CONNECT_TIMEOUT_S, START_TIMEOUT_S, CLOSE_TIMEOUT_S = 5.0, 120.0, 5.0


class RayVecEnv(VecEnv):
    """
    A ``VecEnv`` whose environments live in workers of a Ray cluster::

        make_vec_env("HalfCheetah-v5", n_envs=64, vec_env_cls=RayVecEnv, vec_env_kwargs=dict(n_workers=8))

    Without an ``address``, and if the script is not connected to a cluster yet, Ray starts one on this machine.

    GRPO lets the workers act by themselves, one call per rollout. Other algorithms can step it like any other ``VecEnv``; that
    takes a call per step.

    :param env_fns: Functions that construct the environments
    :param n_workers: Number of workers, each with one thread; neighbouring environments share a worker. ``None`` for one per
        CPU of the cluster, and at most one per environment
    :param address: Address of the cluster, as ``"10.0.0.1:6379"``, or ``"auto"`` for the cluster of this machine. Unused if
        the script is connected to a cluster already
    :param timeout: Seconds after which a worker that does not answer is replaced. If each step is a call, an error is raised
    :param max_retries: How often a worker is replaced within one rollout
    :param max_replay: Longest episode, in steps, that is brought back after a worker was lost
    :raises ValueError: If an argument is out of range, or if an environment cannot be pickled
    :raises ConnectionError: If the address does not answer
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        n_workers: int | None = None,
        address: str | None = None,
        timeout: float = 300.0,
        max_retries: int = 3,
        max_replay: int = 10_000,
    ):
        n_envs = len(env_fns)
        if n_envs == 0:
            raise ValueError("`env_fns` is empty: pass a function for each environment.")
        if n_workers is not None:
            require_at_least("n_workers", n_workers, 1)
            if n_workers > n_envs:
                raise ValueError(f"`n_workers` is {n_workers}, and there are {n_envs} environments: pass 1 to {n_envs}.")
        require_positive("timeout", timeout)
        require_at_least("max_retries", max_retries, 0)
        require_at_least("max_replay", max_replay, 0)
        pickled = [_pickled(env_fn, env_idx) for env_idx, env_fn in enumerate(env_fns)]
        connect(address)
        self.n_workers = n_workers or max(1, min(n_envs, int(ray.cluster_resources().get("CPU", 1))))
        self.timeout, self.max_retries, self.max_replay = timeout, max_retries, max_replay
        #: Index of the worker of each environment.
        self.worker_of_env = [env_idx * self.n_workers // n_envs for env_idx in range(n_envs)]
        firsts = [self.worker_of_env.index(w) for w in range(self.n_workers)]
        self._slices = [slice(first, last) for first, last in zip(firsts, [*firsts[1:], n_envs], strict=True)]
        self._env_fns = [pickled[own] for own in self._slices]
        self._n_lost = [0] * self.n_workers  # since the last transitions
        self._workers: dict[int, Any] = {}
        self._described: dict[int, Description] = {}
        self._start(*range(self.n_workers))
        # What a new worker needs: the seed of each environment's last reset, None if that cannot be repeated, its number of
        # steps since, the latest actions of all environments, and values that `set_attr` has set, by name and environment
        self._start_seeds: list[int | None] = [None] * n_envs
        self._n_steps = [0] * n_envs
        self._taken: list[np.ndarray] = []
        self._attributes: dict[tuple[str, int], Any] = {}
        #: Whether environments that are done are reset at once, see :class:`~sb3_grpo.starts.adapters.VecEnvAdapter`.
        self.autoreset = True
        self._obs: Any = None  # latest observations; None before the first reset
        # Set if a new worker could not bring its episodes back; raised when they are to go on
        self._rollout_lost: RolloutLost | None = None
        self._has_warned = self._closed = False
        super().__init__(n_envs, self._described[0].observation_space, self._described[0].action_space)

    @property
    def worker_pids(self) -> list[int]:
        """Process id of each worker, on its own machine."""
        return [described.pid for described in self._described.values()]

    @property
    def worker_nodes(self) -> list[str]:
        """IP address of the machine of each worker."""
        return [described.node for described in self._described.values()]

    # --- workers ------------------------------------------------------------------------------------------------------

    def _start(self, *workers: int) -> None:
        """Start workers, all at the same time, and wait until they have built their environments."""
        # Workers on a single machine share its cores, as processes do. On many, they have one CPU each, and SPREAD keeps them
        # from crowding on one machine.
        n_cpus = 1 if len(ray.nodes()) > 1 else 0
        options = dict(num_cpus=n_cpus, max_restarts=0, scheduling_strategy="SPREAD")
        path = [folder or os.getcwd() for folder in sys.path]  # as `multiprocessing` hands it on
        for w in workers:
            self._workers[w] = ray.remote(RolloutWorker).options(**options).remote(self._slices[w].start)
        building = [self._workers[w].build.remote(self._env_fns[w], VERSION, path) for w in workers]
        for w, reference in zip(workers, building, strict=True):
            try:
                self._described[w] = self._wait(reference, START_TIMEOUT_S)
            except GetTimeoutError as error:
                raise RuntimeError(
                    f"Worker {w} has not started within {START_TIMEOUT_S:g} s. Either its environments take longer to build, "
                    "or there are too few CPUs, because on several machines each worker needs one: pass a smaller `n_workers`."
                ) from error

    def _wait(self, reference: Any, timeout: float) -> Any:
        """Wait for an answer. Errors of environments are raised as they are; a ``RayError`` says that the worker is lost."""
        try:
            return ray.get(reference, timeout=timeout)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error

    def _ask(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """
        Ask workers, all at the same time. Those that are lost are replaced and asked again, at most ``max_retries`` times.

        :param requests: Index of a worker, name of one of its methods, and arguments; at most one for each worker
        """
        if self._closed:
            raise EnvironmentFault(0, "has no worker, because its RayVecEnv was closed")
        sent = [self._send(*request) for request in requests]
        try:
            return [self._answer(reference, *request) for reference, request in zip(sent, requests, strict=True)]
        except Exception:
            ray.wait(sent, num_returns=len(sent), timeout=self.timeout)  # Ray complains of answers that nobody has seen
            raise

    def _send(self, w: int, method: str, *args: Any) -> Any:
        if method in ("collect", "step") and self._rollout_lost is not None:
            raise self._rollout_lost
        return getattr(self._workers[w], method).remote(*args)

    def _answer(self, reference: Any, w: int, *request: Any) -> Any:
        while True:
            try:
                return self._wait(reference, self.timeout)
            except RayError as error:
                self._replace(w, error)
                reference = self._send(w, *request)

    def _replace(self, w: int, error: Exception) -> None:
        """Start another worker, and bring its environments to where those of the lost one were, if that is possible."""
        own, lost = self._slices[w], self._described[w]
        is_silent = isinstance(error, GetTimeoutError)
        why = f"has not answered for {self.timeout:g} s" if is_silent else f"is gone: {type(error).__name__}"
        what = (
            f"has lost its worker {w} (process {lost.pid} on node {lost.node}), which {why}. "
            f"The first of its environments was reset with seed {self._start_seeds[own.start]}"
        )
        self._n_lost[w] += 1
        if self._n_lost[w] > self.max_retries:
            raise EnvironmentFault(own.start, what) from error
        ray.kill(self._workers[w])
        try:
            self._start(w)
            for (name, env_idx), value in self._attributes.items():
                if self.worker_of_env[env_idx] == w:
                    arguments = (name, value, [env_idx - own.start])
                    self._wait(self._workers[w].run.remote("set_attr", arguments, {}), self.timeout)
            obstacle = self._bring_back(w) if self._obs is not None else ""  # else they have not been reset yet
            if obstacle:
                self._rollout_lost = RolloutLost(own.start, f"{what}. {obstacle}")
        except RayError as another:
            self._replace(w, another)

    def _bring_back(self, w: int) -> str:
        """
        Bring the environments of a new worker to where those of the lost one were, and return why that is impossible, if it
        is. They are reset then, so that they can be asked, and nobody can act in them before the next :meth:`reset`.
        """
        own, obstacle = self._slices[w], ""
        seeds, lengths = self._start_seeds[own], self._n_steps[own]
        if None in seeds:
            obstacle = "Not all of its environments were reset with a seed"
        elif max(lengths) > self.max_replay:
            obstacle = f"One of its episodes is longer than max_replay={self.max_replay} steps"
        if obstacle:
            seeds, lengths = [None] * len(seeds), [0] * len(seeds)
        actions = [
            [taken[env_idx] for taken in self._taken[len(self._taken) - n_steps :]]
            for env_idx, n_steps in enumerate(lengths, own.start)
        ]
        found = self._wait(self._workers[w].restore.remote(seeds, actions), self.timeout)
        is_same = same_values(found, take_observations(self._obs, own))
        return obstacle or ("" if is_same else "Its environments do not come to the same state again")

    # --- the interface of a VecEnv ------------------------------------------------------------------------------------

    def reset(self) -> VecEnvObs:
        seeds, options = self._seeds, self._options
        self._obs = self._rollout_lost = None
        answers = self._ask([(w, "reset", seeds[own], options[own]) for w, own in enumerate(self._slices)])
        # An environment that was reset with options is not brought back.
        self._start_seeds = [None if each else seed for seed, each in zip(seeds, options, strict=True)]
        self._n_steps, self._taken = [0] * self.num_envs, []
        self._seeds = [None] * self.num_envs  # both are for one reset
        self.set_options()
        self.reset_infos = list(chain(*(infos for _, infos in answers)))
        self._obs = _joined([observations for observations, _ in answers])
        return self._obs

    def step_async(self, actions: np.ndarray) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "Each step of this RayVecEnv is a call to all its workers, which takes milliseconds. GRPO avoids this while "
                "it collects; for evaluation and for other algorithms use DummyVecEnv or SubprocVecEnv.",
                stacklevel=2,
            )
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        self._start_seeds = [None] * self.num_envs  # the actions are not kept
        answers = self._ask([(w, "step", self._actions[own], self.autoreset) for w, own in enumerate(self._slices)])
        observations, rewards, dones, infos, reset_infos = zip(*answers, strict=True)
        self._obs, self.reset_infos = _joined(observations), list(chain(*reset_infos))
        self._n_lost = [0] * self.n_workers
        return self._obs, np.concatenate(rewards), np.concatenate(dones), list(chain(*infos))

    def reset_envs(self, env_indices: list[int], seeds: list[int | None]) -> tuple[list[Any], list[dict[str, Any]]]:
        """:return: First observation of each of these environments, which are reset with their seeds, and its info"""
        resets = self._call_envs(env_indices, "reset_envs", dict(zip(env_indices, seeds, strict=True)))
        return [observation for observation, _ in resets], [info for _, info in resets]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        closing = [worker.run.remote("close", (), {}) for worker in self._workers.values()]
        ray.wait(closing, num_returns=self.n_workers, timeout=CLOSE_TIMEOUT_S)
        for worker in self._workers.values():
            ray.kill(worker)

    def _call_envs(self, indices: VecEnvIndices, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """:return: Results of a method of the workers, one for each of the requested environments"""
        wanted = self._numbers(indices)
        workers = sorted({self.worker_of_env[env_idx] for env_idx in wanted})
        asked = [[env_idx for env_idx in wanted if self.worker_of_env[env_idx] == w] for w in workers]
        requests = [
            (w, "run", method, args, {**kwargs, "indices": [env_idx - self._slices[w].start for env_idx in own]})
            for w, own in zip(workers, asked, strict=True)
        ]
        answers = zip(asked, self._ask(requests), strict=True)
        # Setting an attribute has no answer.
        by_env = {env_idx: each for own, answer in answers for env_idx, each in zip(own, answer or own, strict=True)}
        return [by_env[env_idx] for env_idx in wanted]

    def _numbers(self, indices: VecEnvIndices) -> list[int]:
        return [range(self.num_envs)[env_idx] for env_idx in self._get_indices(indices)]  # negative ones count from the end

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return self._call_envs(indices, "get_attr", attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        self._attributes.update({(attr_name, env_idx): value for env_idx in self._numbers(indices)})
        self._call_envs(indices, "set_attr", attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        return self._call_envs(indices, "env_method", method_name, *args, **kwargs)

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return self._call_envs(indices, "env_is_wrapped", wrapper_class)

    def get_images(self) -> Sequence[np.ndarray | None]:
        return list(chain(*self._ask([(w, "run", "get_images", (), {}) for w in range(self.n_workers)])))

    # --- whole rollouts -----------------------------------------------------------------------------------------------

    def collect_by_workers(
        self,
        make_policy: Callable[[], ActorPolicy],
        policy: ActorPolicy,
        starts: SeededVecEnv,
        obs: VecEnvObs,
        states: np.ndarray,
        *settings: Any,
    ) -> Iterator[ActedStep]:
        """
        Let the workers act by themselves, with policies from ``make_policy`` that have the weights of ``policy``, and yield
        the steps of all environments. The other arguments are those of :func:`~sb3_grpo.collection.run_policy`.
        ``RolloutLost`` says that a worker was lost, now or since the last rollout, and its environments cannot be brought
        back.
        """
        ledger, seed = starts.ledger, int(th.randint(2**31 - 1, ()))
        # Once in the object store of each machine, however many workers are there
        weights = {name: tensor.cpu().numpy() for name, tensor in policy.state_dict().items()}
        sent = ray.put((cloudpickle.dumps(make_policy), weights))
        requests = []
        for w, (own, part) in enumerate(zip(self._slices, ledger.split(), strict=True)):
            own_seed = int(np.random.SeedSequence((seed, w)).generate_state(1)[0])
            own_obs = take_observations(obs, own)
            requests.append((w, "collect", sent, own_obs, states[own], part, starts.share_starts, own_seed, *settings))
        parts, ledgers, mismatches, messages = zip(*self._ask(requests), strict=True)
        self._n_lost = [0] * self.n_workers
        ledger.join(ledgers)
        starts.mismatches += sum(mismatches)
        for message in chain(*messages):
            starts.warn(message)
        steps = merged(lambda *arrays: np.concatenate(arrays, axis=1), parts)
        taken = policy.within_bounds(steps.actions)
        self._obs = take_observations(steps.new_obs, -1)
        groups, self._n_steps = ledger.position.groups.tolist(), ledger.position.steps.tolist()
        self._start_seeds = [ledger.seed_of(group) if starts.share_starts else None for group in groups]
        self._taken.extend(taken)
        del self._taken[: len(self._taken) - min(max(self._n_steps), self.max_replay)]
        return _replay(steps._replace(log_probs=th.as_tensor(steps.log_probs)), taken, obs, policy)


def _replay(steps: EnvStep, taken: np.ndarray, obs: Any, policy: ActorPolicy) -> Iterator[ActedStep]:
    """:return: The steps one by one, with the observations before them and the actions as the environments took them"""
    *arrays, infos_of_workers = steps
    whole: Any = steps.new_obs
    obs_tensor, new_obs = obs_as_tensor(obs, policy.device), obs_as_tensor(whole, policy.device)
    for t, infos in enumerate(zip(*infos_of_workers, strict=True)):
        step = EnvStep._make([*(take_observations(each, t) for each in arrays), list(chain(*infos))])
        yield obs_tensor, taken[t], step._replace(position=Position(*step.position))
        obs_tensor = take_observations(new_obs, t)


def _joined(observations: Sequence[Any]) -> Any:
    return map_observations(lambda *arrays: np.concatenate(arrays), *observations)


def _pickled(env_fn: Callable[[], gym.Env], env_idx: int) -> bytes:
    try:
        return cloudpickle.dumps(env_fn)
    except Exception as error:
        raise ValueError(
            f"Environment {env_idx} cannot be sent to a worker, because {env_fn!r} cannot be pickled "
            f"({type(error).__name__}: {error}). Construct what it needs inside the function."
        ) from error


def connect(address: str | None = None) -> None:
    """Connect to a cluster, or to a new one on this machine without an address, unless the script has done so."""
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = dict(log_to_driver=False, logging_level=logging.WARNING)
    if address is None:
        # All connections stay within this machine. Workers share its cores, as the processes of a SubprocVecEnv do.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # "local", because Ray would look for other clusters without an address, and fail where it finds one
        ray.init("local", _node_ip_address="127.0.0.1", include_dashboard=False, **quiet)
        return
    try:
        host, _, port = address.rpartition(":")
        if host and "//" not in address:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConnectionError(
            f"No Ray cluster answers at {address!r} ({error.__cause__ or error}). Start one with `ray start --head`, or leave "
            "`address` out for a cluster on this machine alone."
        ) from error
