"""The choice who acts and who updates: machine code where that is possible, else torch."""

import functools
import time
from collections.abc import Callable
from typing import Any

from sb3_grpo.arithmetic.conditions import Parts, is_from, parts_of, unusual_optimizer
from sb3_grpo.arithmetic.machine import MachineLearner, MachinePolicy
from sb3_grpo.arithmetic.machine_code.jit import compile_functions
from sb3_grpo.arithmetic.objective import Objective
from sb3_grpo.arithmetic.torch_learner import TorchLearner, torch_actor
from sb3_grpo.buffers import GroupRolloutBuffer
from sb3_grpo.losses import UpdateRule
from sb3_grpo.policies import ActorPolicy

#: Maps observations, as arrays and as tensors, and ``action_masks`` if there are any, to actions, shape
#: ``(n, *action_shape)``, and their log-probabilities, shape ``(n,)``; with memory also to its states after the step.
Actor = Callable[..., tuple[Any, ...]]

#: Seconds of compiling that are worth a word. Loading from numba's cache takes about half a second.
LONG = 1.0


def machine_policy(
    policy: ActorPolicy,
    update: tuple[Objective, GroupRolloutBuffer, UpdateRule] | None = None,
    announce: Callable[[], None] = lambda: None,
) -> MachinePolicy | str:
    """
    Choose machine code if a policy, and an update if there is one, meet its conditions, and compile what the run needs. The
    conditions are listed in ``docs/speed.md`` and tested by :func:`~sb3_grpo.arithmetic.conditions.parts_of`,
    :func:`~sb3_grpo.arithmetic.conditions.unusual_optimizer` and :func:`_unusual_update`.

    :param update: Objective, buffer and rule of an update; ``None`` for acting
    :param announce: Called before a wait for the compiler
    :return: The policy in machine code, which shares its memory, or a reason why torch is used, a clause
    """
    parts = parts_of(policy)
    if isinstance(parts, str):
        return parts
    if update is not None and (reason := _unusual_update(policy, *update[:2])):
        return reason
    needed = parts.network.acting_entry_points() if update is None else parts.network.update_entry_points(update[2])
    if reason := compile_functions(needed, announce):
        return reason
    machine = _machine_of(policy, parts)
    machine.take_over(None if update is None else policy.optimizer)
    return machine


def _machine_of(policy: ActorPolicy, parts: Parts) -> MachinePolicy:
    machine: MachinePolicy | None = vars(policy).get("_machine")
    if machine is None or not machine.fits(parts):
        machine = vars(policy)["_machine"] = MachinePolicy(parts)
    return machine


def share_memory(policy: ActorPolicy) -> None:
    """Put the parameters where machine code has them, so that views which a user takes of them stay views."""
    parts = parts_of(policy)
    if not isinstance(parts, str):
        _machine_of(policy, parts).take_over(None)


def _unusual_update(policy: ActorPolicy, objective: Objective, rollout_buffer: GroupRolloutBuffer) -> str:
    """:return: A reason why an update is not for machine code; empty if it is"""
    own = [name for name in ("get", "permutation", "whole_batches") if not is_from(rollout_buffer, GroupRolloutBuffer, name)]
    if own:
        return f"{type(rollout_buffer).__name__} overrides `{own[0]}`"
    if objective.importance_sampling_level != "step":
        return f"`importance_sampling_level` is {objective.importance_sampling_level!r}"
    if objective.kl_coef > 0 and not objective.kl_penalty.is_exact:
        return f"`kl_estimator` is {objective.kl_penalty.estimator!r}"
    return unusual_optimizer(policy)


def choose_actor(policy: ActorPolicy) -> Actor:
    """:return: The function that chooses actions during a rollout"""
    machine = machine_policy(policy)
    return torch_actor(policy) if isinstance(machine, str) else machine.actor(policy)


def choose_learner(
    objective: Objective, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer, rule: UpdateRule, max_kl: float
) -> TorchLearner | MachineLearner:
    """:return: The learner that takes the steps of the update. :class:`TorchLearner` explains the arguments"""
    machine = machine_policy(policy, (objective, rollout_buffer, rule))
    if isinstance(machine, str):
        return TorchLearner(objective, policy, rollout_buffer, max_kl)
    return MachineLearner(objective, policy, rollout_buffer, max_kl, machine)


def describe_choice(
    policy: ActorPolicy, objective: Objective, rollout_buffer: GroupRolloutBuffer, rule: UpdateRule, verbose: int
) -> str:
    """
    Compile what a run needs, and with ``verbose`` say before the wait that there is one.

    :return: A sentence about who acts and who updates
    """
    began = time.perf_counter()

    @functools.cache  # once for both
    def announce() -> None:
        if verbose >= 1:
            print("Compiling machine code, which takes some seconds the first time", flush=True)

    acting = machine_policy(policy, announce=announce)
    if isinstance(acting, str):
        return f"Acting and updating with torch, because {acting}"
    updating = machine_policy(policy, (objective, rollout_buffer, rule), announce)
    if isinstance(updating, str):
        return f"Acting in machine code, and updating with torch, because {updating}"
    seconds = time.perf_counter() - began
    return "Acting and updating in machine code" + (f", compiled in {seconds:.0f} s" if seconds >= LONG else "")
