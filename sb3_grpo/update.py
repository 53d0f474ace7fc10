"""The gradient steps of an update, and the metrics of all of them. The loss itself is in :mod:`sb3_grpo.losses`."""

import copy
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.preprocessing import get_action_dim
from torch.distributions import Distribution as TorchDistribution
from torch.nn.utils import parameters_to_vector

from sb3_grpo import losses
from sb3_grpo.buffers import GroupRolloutBuffer, GroupRolloutBufferSamples
from sb3_grpo.compiled import CompiledPolicy, compiled_policy, is_unaltered
from sb3_grpo.graphs import Captured, gradient_step, may_capture_steps
from sb3_grpo.kl_penalty import KLPenalty
from sb3_grpo.losses import MinibatchLoss
from sb3_grpo.machine_code import Metrics, Settings
from sb3_grpo.natural import NaturalStep, fisher_stride, natural_step
from sb3_grpo.policies import ENCODING_BATCH, ActorPolicy


class ClipRange(NamedTuple):
    """Current limits of the importance ratio: from ``1 - low`` to ``1 + high``."""

    low: float
    high: float


NO_CLIPPING = ClipRange(math.inf, math.inf)
#: Whether products with the Fisher matrix of a policy are taken from differences, which its first natural step finds out
FISHER_BY_DIFFERENCES: "WeakKeyDictionary[ActorPolicy, bool]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Objective:
    """
    The objective of an update: surrogate, entropy bonus and KL penalty, with the present values of GRPO's arguments.
    :meth:`take_clipped_steps` and :meth:`take_natural_steps` improve a policy by it.
    """

    clip_range: ClipRange
    importance_sampling_level: losses.ImportanceSamplingLevel
    ent_coef: float
    kl_coef: float
    kl_penalty: KLPenalty
    max_grad_norm: float

    def take_clipped_steps(
        self,
        policy: ActorPolicy,
        rollout_buffer: GroupRolloutBuffer,
        n_epochs: int,
        batch_size: int,
        target_kl: float | None = None,
    ) -> "Steps":
        """
        Take a gradient step with each minibatch of several epochs. The update ends at a minibatch whose approximate KL
        divergence exceeds ``1.5 target_kl``.

        :return: The steps that were taken
        """
        max_kl = math.inf if target_kl is None else 1.5 * target_kl
        update = self._update(policy, rollout_buffer, max_kl)
        epochs: list[Epoch] = []
        for _ in range(n_epochs):
            epoch, approx_kl = update.take_epoch(batch_size)
            epochs.append(epoch)
            if approx_kl > max_kl:
                return Steps(epochs, excessive_kl=approx_kl)
        return Steps(epochs)

    def take_natural_steps(
        self, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer, n_steps: int, limit: float
    ) -> "Steps":
        """
        Take natural-gradient steps with all transitions of the update. Importance ratios are not clipped, because the limit of
        the divergence keeps them close to one.

        :param limit: Limit of the divergence of a step, see :func:`~sb3_grpo.natural.natural_step`
        :return: The steps, each of which counts as an epoch
        """
        update = replace(self, clip_range=NO_CLIPPING)._update(policy, rollout_buffer)
        epochs, natural = [], []
        for _ in range(n_steps):
            natural.append(natural_step(update, limit))
            if not natural[-1].is_accepted:
                update.loss()  # the metrics are those of the weights that stay
            epochs.append(update.epoch()._replace(n_steps=1.0, grad_norm=natural[-1].grad_norm))
        return Steps(epochs, natural=natural)

    def compiled_policy(self, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer) -> CompiledPolicy | str:
        """:return: The policy in machine code, or a reason why it is updated by torch"""
        estimator = self.kl_penalty.estimator if self.kl_coef > 0 else "exact"
        return compiled_policy(policy, rollout_buffer, self.importance_sampling_level, estimator)

    def _update(
        self, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer, max_kl: float = math.inf
    ) -> "TorchUpdate | CompiledUpdate":
        compiled = self.compiled_policy(policy, rollout_buffer)
        if isinstance(compiled, str):
            return TorchUpdate(self, policy, rollout_buffer, max_kl)
        return CompiledUpdate(self, policy, rollout_buffer, max_kl, compiled)

    def evaluate(self, policy: ActorPolicy, rollout_data: GroupRolloutBufferSamples) -> MinibatchLoss:
        """:return: The loss of a minibatch of ``n`` transitions, and its parts"""
        observations, actions, masking = rollout_data.observations, rollout_data.actions, rollout_data.masking
        is_exact = self.kl_coef > 0 and self.kl_penalty.is_exact
        distribution = policy.get_distribution(observations, **masking) if is_exact else None
        if distribution is not None and is_unaltered(policy, ("evaluate_actions",)):
            # One pass of the policy serves the surrogate and the divergence.
            log_prob, entropy = policy.evaluate_distribution(distribution, actions)
        else:
            log_prob, entropy = policy.evaluate_actions(observations, actions, **masking)
        return losses.minibatch_loss(
            log_prob,
            rollout_data.old_log_prob,
            rollout_data.advantages,
            *self.clip_range,
            entropy=entropy,
            ent_coef=self.ent_coef,
            kl=self.kl_penalty.estimate(rollout_data, log_prob, distribution) if self.kl_coef > 0 else None,
            kl_coef=self.kl_coef,
            weights=rollout_data.weights,
            trajectories=rollout_data.trajectories if self.importance_sampling_level == "trajectory" else None,
        )


class TorchUpdate:
    """
    An update by torch, for every policy. It is a :class:`~sb3_grpo.natural.LocalModel` of the policy as well.

    :param objective: Objective
    :param policy: Policy
    :param rollout_buffer: Buffer with the transitions of the update
    :param max_kl: Limit of the approximate KL divergence of a minibatch
    """

    def __init__(self, objective: Objective, policy: ActorPolicy, rollout_buffer: GroupRolloutBuffer, max_kl: float):
        self._objective = objective
        self._policy = policy
        self._rollout_buffer = rollout_buffer
        self._max_kl = max_kl
        self._whole_trajectories = objective.importance_sampling_level == "trajectory"
        self._before: list[Distribution] = []
        self._random_states = [generator.get_state() for generator in self._generators()]

    def take_epoch(self, batch_size: int) -> "tuple[Epoch, float]":
        """
        Take a gradient step with each minibatch of an epoch, up to one whose approximate KL divergence exceeds the limit.

        :param batch_size: Minibatch size
        :return: Metrics of the epoch, and the divergence of the last minibatch, if there is a limit
        """
        policy, objective = self._policy, self._objective
        minibatches: list[MinibatchLoss] = []
        gradient_norms: list[th.Tensor] = []
        approx_kl = 0.0
        rates = [group["lr"] for group in policy.optimizer.param_groups]
        numbers = th.tensor([*rates, *objective.clip_range], device=policy.device)
        graph: Captured | None = None
        for rollout_data in self._rollout_buffer.get(batch_size, self._whole_trajectories):
            is_full = len(rollout_data.advantages) == batch_size
            if graph is None and is_full and self._may_capture():
                graph = self._graph(rollout_data, numbers)
            if graph is not None and is_full:
                *fields, norm = graph([*rollout_data.tensors(), numbers])
                minibatches.append(MinibatchLoss(*fields))
                gradient_norms.append(norm)
                continue
            minibatch = objective.evaluate(policy, rollout_data)
            minibatches.append(MinibatchLoss(*(field.detach() for field in minibatch)))
            if self._max_kl < math.inf:
                approx_kl = losses.approximate_kl(minibatches[-1].log_ratio).item()
                if approx_kl > self._max_kl:  # not NaN, which is left to the check of the gradient
                    break
            policy.optimizer.zero_grad()
            minibatch.loss.backward()
            gradient_norms.append(th.nn.utils.clip_grad_norm_(policy.parameters(), objective.max_grad_norm))
            policy.optimizer.step()
        return _epoch(minibatches, gradient_norms, objective.clip_range), approx_kl

    def _may_capture(self) -> bool:
        """:return: Whether nothing in a step but numbers changes from one minibatch to the next, and nothing waits for them"""
        is_plain = self._objective.kl_coef == 0 and self._max_kl == math.inf and not self._whole_trajectories
        return is_plain and may_capture_steps(self._policy)

    def _graph(self, batch: GroupRolloutBufferSamples, numbers: th.Tensor) -> Captured | None:
        """
        :param batch: A minibatch
        :param numbers: Learning rates and clip range, shape ``(k,)``
        :return: A gradient step with a minibatch of this size as a graph, or ``None`` if there can be none
        """
        objective, policy = self._objective, self._policy

        def evaluate(*arguments: th.Tensor) -> MinibatchLoss:
            *tensors, low, high = arguments
            given = iter(tensors)
            samples = batch.map(lambda _: next(given))
            return replace(objective, clip_range=ClipRange(low, high)).evaluate(policy, samples)  # type: ignore[arg-type]

        state = objective.ent_coef, batch.action_masks is None, batch.weights is None
        return gradient_step(policy, state, objective.max_grad_norm, numbers, batch.tensors(), evaluate)

    # --- the policy as a natural-gradient step sees it ----------------------------------------------------------------

    @functools.cached_property
    def _batches(self) -> list[GroupRolloutBufferSamples]:
        """All transitions, in batches that fit into memory."""
        return list(self._rollout_buffer.get(ENCODING_BATCH, self._whole_trajectories))

    @functools.cached_property
    def _parameters(self) -> list[th.nn.Parameter]:
        return [parameter for parameter in self._policy.parameters() if parameter.requires_grad]

    @property
    def n_components(self) -> int:
        return get_action_dim(self._policy.action_space)

    def _generators(self) -> list[th.Generator]:
        device = self._policy.device
        return [th.default_generator, *([th.cuda.default_generators[device.index or 0]] if device.type == "cuda" else [])]

    def _rewind(self) -> None:
        """Give all passes of a step the same random numbers, so that dropout has the same masks in what is compared."""
        for generator, state in zip(self._generators(), self._random_states, strict=True):
            generator.set_state(state)

    def loss_and_gradient(self) -> tuple[float, th.Tensor]:
        self._policy.optimizer.zero_grad()
        n, total = self._rollout_buffer.n_samples, 0.0
        self._rewind()
        for batch in self._batches:
            loss = self._objective.evaluate(self._policy, batch).loss * (len(batch.advantages) / n)
            loss.backward()
            total += loss.item()
        self._some = self._rollout_buffer.update.take(slice(None, None, fisher_stride(n)))
        with th.no_grad():  # a policy has one distribution object, in which every call puts another distribution of torch
            self._rewind()
            self._before = [copy.copy(self._distribution(batch)) for batch in self._batches]
            self._rewind()
            self._some_before = copy.copy(self._distribution(self._some))
        self._slope: th.Tensor | None = None
        return total, self._flat([parameter.grad for parameter in self._parameters]).clone()

    def fisher_product(self, vector: th.Tensor) -> th.Tensor:
        if self._policy not in FISHER_BY_DIFFERENCES:
            FISHER_BY_DIFFERENCES[self._policy] = self._loses_second_derivatives(vector)
        if FISHER_BY_DIFFERENCES[self._policy]:
            return self._difference(vector)
        return self._second_derivative(vector)

    def _second_derivative(self, vector: th.Tensor) -> th.Tensor:
        if self._slope is None:
            self._slope = self._gradient_of_divergence(create_graph=True)
        along = self._slope.dot(vector)
        return self._flat(th.autograd.grad(along, self._parameters, retain_graph=True, allow_unused=True)).clone()

    def _difference(self, vector: th.Tensor) -> th.Tensor:
        """:return: The same product as :meth:`fisher_product`, from first derivatives a little along the vector and back"""
        weights, norm = self.weights(), vector.norm().item()
        if norm == 0.0:
            return th.zeros_like(vector)
        length, gradients = 1e-3 * max(weights.norm().item(), 1.0) / norm, []
        for sign in (1.0, -1.0):
            self.move(weights.add(vector, alpha=sign * length))
            gradients.append(self._gradient_of_divergence())
        self.move(weights)
        return gradients[0].sub_(gradients[1]).div_(2.0 * length)

    def _gradient_of_divergence(self, create_graph: bool = False) -> th.Tensor:
        self._rewind()
        divergence = losses.exact_kl(self._distribution(self._some), self._some_before).mean()
        return self._flat(th.autograd.grad(divergence, self._parameters, create_graph=create_graph, allow_unused=True))

    def _loses_second_derivatives(self, vector: th.Tensor) -> bool:
        """:return: Whether some operation, as fused attention, has no second derivative, or silently one of zero"""
        sizes, head = [each.numel() for each in self._parameters], set(
            getattr(self._policy, "action_net", th.nn.Identity()).parameters()
        )
        # The entries of the action layer, which are far larger at first, would hide what the layers below it lose.
        below = [part * (each not in head) for each, part in zip(self._parameters, vector.split(sizes), strict=True)]
        vector = th.cat(below)
        approximate = self._difference(vector)
        try:
            exact = self._second_derivative(vector)
        except RuntimeError:
            return True
        smallest = 1e-5 * approximate.norm()  # below that, differences are rounding errors
        parts = zip(exact.split(sizes), approximate.split(sizes), strict=True)
        return any((own - other).norm() > 0.5 * th.maximum(other.norm(), smallest) for own, other in parts)

    def largest_changes(self, limit: float) -> th.Tensor:
        return self._policy.largest_changes(self._parameters, limit)

    def weights(self) -> th.Tensor:
        return parameters_to_vector(self._parameters).detach().clone()

    @th.no_grad()
    def move(self, weights: th.Tensor) -> None:
        parts = weights.split([parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))

    @th.no_grad()
    def loss(self) -> float:
        self._rewind()
        evaluated = [self._objective.evaluate(self._policy, batch) for batch in self._batches]
        sizes = [len(each.ratio) for each in evaluated]
        means, rows = zip(*((each[:2], each[2:]) for each in evaluated), strict=True)  # of each batch, of each transition
        weights = th.tensor(sizes, device=self._rollout_buffer.device) / sum(sizes)
        mean = [weights.dot(th.stack(field)) for field in zip(*means, strict=True)]
        self._evaluated = MinibatchLoss(*mean, *map(th.cat, zip(*rows, strict=True)))
        return self._evaluated.loss.item()

    @th.no_grad()
    def divergence(self) -> float:
        total = 0.0
        self._rewind()
        for batch, before in zip(self._batches, self._before, strict=True):
            total += losses.exact_kl(self._distribution(batch), before).sum().item()
        return total / self._rollout_buffer.n_samples

    def epoch(self) -> "Epoch":
        """:return: Metrics of the last :meth:`loss`"""
        return _epoch([self._evaluated], [], self._objective.clip_range)

    def _distribution(self, batch: GroupRolloutBufferSamples) -> Distribution:
        return self._policy.get_distribution(batch.observations, **batch.masking)

    def _flat(self, tensors: Sequence[th.Tensor | None]) -> th.Tensor:
        """:return: Gradients with respect to the parameters in one vector; ``None`` is zero"""
        pairs = zip(tensors, self._parameters, strict=True)
        return th.cat([(th.zeros_like(like) if each is None else each).flatten() for each, like in pairs])


class CompiledUpdate:
    """
    The same in machine code.

    :param objective: Objective
    :param policy: Policy
    :param rollout_buffer: Buffer with the transitions of the update
    :param max_kl: Limit of the approximate KL divergence of a minibatch
    :param compiled: The policy in machine code
    """

    def __init__(
        self,
        objective: Objective,
        policy: ActorPolicy,
        rollout_buffer: GroupRolloutBuffer,
        max_kl: float,
        compiled: CompiledPolicy,
    ):
        self._compiled = compiled
        self._policy = policy
        self._rollout_buffer = rollout_buffer
        self._has_penalty = objective.kl_coef > 0
        reference = objective.kl_penalty.policy if self._has_penalty else None
        self._batch = compiled.batch(policy, rollout_buffer.update, reference)
        numbers = *objective.clip_range, objective.ent_coef, objective.kl_coef, objective.max_grad_norm, max_kl
        self._settings = Settings(*map(float, numbers))

    def take_epoch(self, batch_size: int) -> "tuple[Epoch, float]":
        """See :meth:`TorchUpdate.take_epoch`."""
        permutation = self._rollout_buffer.permutation()
        sums, approx_kl = self._compiled.epoch(self._batch, permutation, batch_size, self._settings)
        return self._epoch(sums), approx_kl

    # --- the policy as a natural-gradient step sees it ----------------------------------------------------------------

    @property
    def n_components(self) -> int:
        return get_action_dim(self._policy.action_space)

    def loss_and_gradient(self) -> tuple[float, th.Tensor]:
        gradient = np.empty_like(self._compiled.parameters)
        self._evaluated = self._compiled.evaluate(self._batch, self._settings, gradient)
        self._before = self._compiled.parameters.copy()
        self._fisher = self._compiled.fisher(self._batch, fisher_stride(len(self._batch.features)))
        return self._evaluated.loss, th.from_numpy(gradient)

    def fisher_product(self, vector: th.Tensor) -> th.Tensor:
        return th.from_numpy(self._fisher(vector.numpy()))

    def largest_changes(self, limit: float) -> th.Tensor:
        return self._policy.largest_changes(self._compiled.tensors, limit)

    def weights(self) -> th.Tensor:
        return th.from_numpy(self._compiled.parameters.copy())

    def move(self, weights: th.Tensor) -> None:
        self._compiled.parameters[:] = weights.numpy()

    def loss(self) -> float:
        self._evaluated = self._compiled.evaluate(self._batch, self._settings)
        return self._evaluated.loss

    def divergence(self) -> float:
        return self._compiled.divergence(self._before, self._batch)

    def epoch(self) -> "Epoch":
        """:return: Metrics of the last :meth:`loss`"""
        return self._epoch(self._evaluated)

    def _epoch(self, sums: Metrics) -> "Epoch":
        return Epoch(
            n=sums.n,
            n_minibatches=sums.n_minibatches,
            n_steps=sums.n_steps,
            entropy=sums.entropy / sums.n,
            policy_gradient_loss=sums.surrogate / sums.n_minibatches,
            approx_kl=sums.approx_kl / sums.n,
            clip_fraction_low=sums.clipped_low / sums.n,
            clip_fraction_high=sums.clipped_high / sums.n,
            effective_sample_size=sums.ratio**2 / (sums.n * sums.ratio_squared),
            kl=sums.kl / sums.n if self._has_penalty else None,
            grad_norm=sums.grad_norm / max(sums.n_steps, 1.0),
            loss=sums.loss,
        )


class Epoch(NamedTuple):
    """
    Means over the transitions of an epoch, if nothing else is said.

    :param n: Number of transitions
    :param n_minibatches: Number of minibatches
    :param n_steps: Number of gradient steps, which is smaller if the update ended early
    :param entropy: Entropy of the policy
    :param policy_gradient_loss: Clipped surrogate, a mean over minibatches
    :param approx_kl: :func:`~sb3_grpo.losses.approximate_kl`
    :param clip_fraction_low: See :func:`~sb3_grpo.losses.clip_fractions`
    :param clip_fraction_high: Likewise
    :param effective_sample_size: :func:`~sb3_grpo.losses.effective_sample_size`
    :param kl: Divergence from the reference; ``None`` without a penalty
    :param grad_norm: Norm of the gradient before clipping, a mean over gradient steps
    :param loss: Loss of the last minibatch
    """

    n: float
    n_minibatches: float
    n_steps: float
    entropy: float
    policy_gradient_loss: float
    approx_kl: float
    clip_fraction_low: float
    clip_fraction_high: float
    effective_sample_size: float
    kl: float | None
    grad_norm: float
    loss: float


class Steps(NamedTuple):
    """
    The steps of an update.

    :param epochs: Metrics of each epoch
    :param excessive_kl: The approximate KL divergence that ended the update early, if one did
    :param natural: The natural-gradient steps, if they were such
    """

    epochs: list[Epoch]
    excessive_kl: float | None = None
    natural: Sequence[NaturalStep] = ()


def _epoch(minibatches: list[MinibatchLoss], gradient_norms: list[th.Tensor], clip_range: ClipRange) -> Epoch:
    """:return: Metrics of an epoch, from the losses of its minibatches and the norms of their gradients"""
    every = MinibatchLoss(
        *(th.stack(field) if field[0].dim() == 0 else th.cat(field) for field in zip(*minibatches, strict=True))
    )
    clipped_low, clipped_high = losses.clip_fractions(every.ratio, *clip_range)
    return Epoch(
        n=len(every.ratio),
        n_minibatches=len(minibatches),
        n_steps=len(gradient_norms),
        entropy=every.entropy.mean().item(),
        policy_gradient_loss=every.policy_gradient_loss.mean().item(),
        approx_kl=losses.approximate_kl(every.log_ratio).item(),
        clip_fraction_low=clipped_low.item(),
        clip_fraction_high=clipped_high.item(),
        effective_sample_size=losses.effective_sample_size(every.ratio).item(),
        kl=every.kl.mean().item() if len(every.kl) > 0 else None,
        grad_norm=th.stack(gradient_norms).mean().item() if gradient_norms else 0.0,
        loss=every.loss[-1].item(),
    )


def describe_update(steps: Steps) -> dict[str, float]:
    """:return: Metrics of the update, from those of its epochs"""
    epochs, last = steps.epochs, steps.epochs[-1]

    def mean(name: str, weight: str = "n") -> float:
        weights = [getattr(epoch, weight) for epoch in epochs]
        return sum(w * getattr(epoch, name) for w, epoch in zip(weights, epochs, strict=True)) / sum(weights)

    metrics = {
        "train/entropy_loss": -mean("entropy"),
        "train/policy_gradient_loss": mean("policy_gradient_loss", "n_minibatches"),
        "train/approx_kl": last.approx_kl,
        "train/effective_sample_size": last.effective_sample_size,
        "train/loss": last.loss,
    }
    if steps.natural:
        metrics["train/kl_divergence_loss"] = float(np.mean([step.divergence for step in steps.natural]))
        metrics["train/line_search_steps"] = float(np.mean([step.n_tried for step in steps.natural]))
        metrics["train/is_line_search_success"] = float(np.mean([step.is_accepted for step in steps.natural]))
    else:
        low, high = mean("clip_fraction_low"), mean("clip_fraction_high")
        metrics["train/clip_fraction"] = low + high
        metrics["train/clip_fraction_low"], metrics["train/clip_fraction_high"] = low, high
    if any(epoch.n_steps > 0 for epoch in epochs):
        metrics["train/grad_norm"] = mean("grad_norm", "n_steps")
    if last.kl is not None:
        metrics["train/kl_loss"] = mean("kl")
    return metrics


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
    before = _copied(policy.state_dict()), _copied(policy.optimizer.state_dict())
    kl_state = kl_penalty.get_state()
    try:
        yield
    except BaseException:
        policy.load_state_dict(before[0])
        policy.optimizer.load_state_dict(before[1])
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
    return copy.deepcopy(state)


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
