"""An update of the policy: by clipped gradient steps or by a natural-gradient step, and undone if it fails."""

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch as th
from torch.distributions import Distribution as TorchDistribution

from sb3_grpo.arithmetic.choice import choose_learner
from sb3_grpo.arithmetic.kl_penalty import KLPenalty
from sb3_grpo.arithmetic.machine import MachineLearner
from sb3_grpo.arithmetic.metrics import Epoch, UpdateReport
from sb3_grpo.arithmetic.natural import N_SIZES, SHRINKING, natural_step
from sb3_grpo.arithmetic.objective import NO_CLIPPING, Objective
from sb3_grpo.arithmetic.torch_learner import TorchLearner
from sb3_grpo.buffers import GroupRolloutBuffer
from sb3_grpo.losses import approximate_kl
from sb3_grpo.policies import ActorPolicy

#: Without a ``target_kl``, a clipped update ends after an epoch whose mean divergence exceeds this, and is shortened to this
#: divergence. Where a task is solved, standardised advantages are mere noise, and the gradients of actions that are nearly
#: certain are tiny, until within a few steps of Adam the policy tips over.
MAX_KL = 0.05


def clipped_update(
    objective: Objective,
    policy: ActorPolicy,
    rollout_buffer: GroupRolloutBuffer,
    n_epochs: int,
    batch_size: int,
    target_kl: float | None = None,
) -> UpdateReport:
    """
    Take a gradient step with each minibatch of several epochs over the transitions in the buffer. The update ends at a
    minibatch whose approximate KL divergence exceeds ``1.5 target_kl``. Without a ``target_kl``, it ends after the first epoch
    whose mean divergence exceeds :data:`MAX_KL`, and goes no further than that.
    """
    max_kl = math.inf if target_kl is None else 1.5 * target_kl
    learner = choose_learner(objective, policy, rollout_buffer, "clipped", max_kl)
    epochs, before = list[Epoch](), learner.weights()
    for _ in range(n_epochs):
        epoch, approx_kl = learner.take_epoch(batch_size)
        epochs.append(epoch)
        if approx_kl > max_kl:
            return UpdateReport(epochs, excessive_kl=approx_kl)
        if target_kl is None and epoch.approx_kl > MAX_KL:
            _shorten(learner, before)
            break
    return UpdateReport(epochs)


def _shorten(learner: TorchLearner | MachineLearner, before: th.Tensor) -> None:
    """Move the weights back towards those before the update until the divergence from there is at most :data:`MAX_KL`."""
    after, size = learner.weights(), 1.0
    learner.move(before)
    log_probs = learner.log_probs()
    for _ in range(N_SIZES):
        learner.move(before.lerp(after, size))
        if approximate_kl(learner.log_probs() - log_probs) <= MAX_KL:
            break
        size *= SHRINKING


def natural_learner(
    objective: Objective, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer
) -> TorchLearner | MachineLearner:
    """:return: What a natural-gradient step with all transitions in the buffer sees of the policy"""
    return choose_learner(replace(objective, clip_range=NO_CLIPPING), policy, rollout_buffer, "natural", math.inf)


def natural_update(
    objective: Objective, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer, limit: float
) -> UpdateReport:
    """
    Take a natural-gradient step with all transitions in the buffer. Importance ratios are not clipped, because the limit of
    the divergence keeps them close to one.

    :param limit: Limit of the divergence, see :func:`~sb3_grpo.arithmetic.natural.natural_step`
    :return: Metrics of the step, which counts as an epoch
    """
    learner = natural_learner(objective, policy, rollout_buffer)
    step = natural_step(learner, limit)
    if not step.is_accepted:
        learner.loss()  # the metrics are those of the weights that stay
    return UpdateReport([learner.epoch()._replace(n_steps=1.0, grad_norm=step.grad_norm)], natural=step)


class UncheckedDistributions:
    """
    A context in which torch's distributions do not check their arguments, for which they would wait for a GPU. In an update,
    all that could be wrong with them is NaN, which :func:`check_update` finds. The switch is one for the whole process, so the
    first of several threads takes it and the last gives it back.
    """

    _lock, _n_inside, _before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        cls = UncheckedDistributions
        with cls._lock:
            if cls._n_inside == 0:
                cls._before = TorchDistribution._validate_args
                TorchDistribution.set_default_validate_args(False)
            cls._n_inside += 1

    def __exit__(self, *_: object) -> None:
        cls = UncheckedDistributions
        with cls._lock:
            cls._n_inside -= 1
            if cls._n_inside == 0:
                TorchDistribution.set_default_validate_args(cls._before)


@contextmanager
def rolled_back_on_error(policy: ActorPolicy, kl_penalty: KLPenalty) -> Iterator[None]:
    """Undo an update that fails or is interrupted: the model is that before the update or after it, never in between."""
    # An optimizer of the user may have no state.
    parts: list[Any] = [each for each in (policy, policy.optimizer) if hasattr(each, "state_dict")]
    before = [_copied(each.state_dict()) for each in parts]
    kl_state = kl_penalty.get_state()
    try:
        yield
    except BaseException:
        for each, state in zip(parts, before, strict=True):
            each.load_state_dict(state)
        kl_penalty.set_state(kl_state, policy)
        raise


def _copied(state: Any) -> Any:
    """:return: What ``copy.deepcopy`` gives for the state of a module or an optimizer, in a fraction of its time"""
    if isinstance(state, th.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        copied = copy.copy(state)  # with the versions of a module's parts, which are an attribute
        copied.update((key, _copied(value)) for key, value in state.items())
        return copied
    if isinstance(state, list):
        return [_copied(value) for value in state]
    try:
        return copy.deepcopy(state)
    except TypeError:  # for example of a lock
        return state


def check_update(policy: ActorPolicy, epochs: list[Epoch]) -> None:
    """Raise a ``ValueError`` if a gradient or a parameter is NaN or infinite."""
    is_finite = all(math.isfinite(epoch.grad_norm) for epoch in epochs)
    if is_finite and all(bool(th.isfinite(parameter).all()) for parameter in policy.parameters()):
        return
    what = "weights after the update are" if is_finite else "gradient of the update is"
    raise ValueError(
        f"The {what} not finite. The update has been undone, so the model can be saved. Lower `learning_rate`, or limit the "
        "scale of observations and advantages (`normalize_observations`, `normalize_advantage`, `scale`)."
    )
