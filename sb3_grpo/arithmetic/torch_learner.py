"""Acting and updating by torch, for every policy."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.preprocessing import get_action_dim
from torch.nn.utils import parameters_to_vector

from sb3_grpo import losses
from sb3_grpo.arithmetic.conditions import is_capturable, may_capture_steps
from sb3_grpo.arithmetic.graphs import Captured, gradient_step, graphs_of, memory_of
from sb3_grpo.arithmetic.metrics import Epoch
from sb3_grpo.arithmetic.natural import fisher_stride
from sb3_grpo.arithmetic.objective import ClipRange, Objective
from sb3_grpo.buffers import GroupRolloutBuffer, GroupRolloutBufferSamples
from sb3_grpo.losses import MinibatchLoss
from sb3_grpo.policies import ENCODING_BATCH, ActorPolicy

#: Whether products with the Fisher matrix of a policy are taken from differences, which its first natural step finds out
FISHER_BY_DIFFERENCES: "WeakKeyDictionary[ActorPolicy, bool]" = WeakKeyDictionary()


def torch_actor(policy: ActorPolicy) -> Callable[..., tuple[np.ndarray, th.Tensor]]:
    """:return: A function that chooses actions during a rollout, by a CUDA graph if that is possible"""
    if is_capturable(policy):
        return _graph_actor(policy)

    @th.no_grad()
    def act(_: Any, obs_tensor: Any, **context: Any) -> tuple[Any, ...]:
        actions, log_prob, *states = policy(obs_tensor, **context)
        return actions.cpu().numpy(), log_prob.cpu(), *(each.cpu().numpy() for each in states)

    return act


def _graph_actor(policy: ActorPolicy) -> Callable[..., tuple[np.ndarray, th.Tensor]]:
    """:return: An actor whose network is a graph. The few numbers that it gives are turned into actions on the CPU"""
    names = list(policy.observation_space.spaces) if isinstance(policy.observation_space, spaces.Dict) else []
    state = memory_of([*policy.parameters(), *policy.buffers()])

    def network(*tensors: th.Tensor) -> list[th.Tensor]:
        return [policy.action_net(policy._latent(dict(zip(names, tensors, strict=True)) if names else tensors[0]))]

    @th.no_grad()
    def act(_: Any, obs_tensor: Any, **context: Any) -> tuple[np.ndarray, th.Tensor]:
        tensors = [obs_tensor[name] for name in names] or [obs_tensor]
        graph = graphs_of(policy).get("acting", state, tensors, network, network)
        [output] = network(*tensors) if graph is None else graph(tensors)
        actions, log_prob = policy._sample(policy._distribution_of(output.cpu(), **context))
        return actions.numpy(), log_prob

    return act


class TorchLearner:
    """
    An update by torch, for every policy. It is a :class:`~sb3_grpo.arithmetic.natural.LocalModel` of the policy as well.

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
        """All transitions, in batches that fit into memory. Their random order leaves numpy's generator as it was."""
        state = np.random.get_state()
        batches = list(self._rollout_buffer.get(ENCODING_BATCH, self._whole_trajectories))
        np.random.set_state(state)
        return batches

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
        self._fisher_batch = self._rollout_buffer.update.thin(fisher_stride(n))
        with th.no_grad():  # a policy has one distribution object, in which every call puts another distribution of torch
            self._rewind()
            self._before = [copy.copy(self._distribution(batch)) for batch in self._batches]
            self._rewind()
            self._fisher_before = copy.copy(self._distribution(self._fisher_batch))
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
        divergence = losses.exact_kl(self._distribution(self._fisher_batch), self._fisher_before).mean()
        return self._flat(th.autograd.grad(divergence, self._parameters, create_graph=create_graph, allow_unused=True))

    def _loses_second_derivatives(self, vector: th.Tensor) -> bool:
        """:return: Whether some operation, as fused attention, has no second derivative, or silently one of zero"""
        losses.exact_kl(self._fisher_before, self._fisher_before)  # an error if it has no closed form, before a move
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
    def log_probs(self) -> th.Tensor:
        """:return: Log-probabilities of the actions of the update, in an order that stays the same, shape ``(n,)``"""
        self._rewind()
        policy = self._policy
        return th.cat([policy.evaluate_actions(each.observations, each.actions, **each.context)[0] for each in self._batches])

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
        return self._policy.get_distribution(batch.observations, **batch.context)

    def _flat(self, tensors: Sequence[th.Tensor | None]) -> th.Tensor:
        """:return: Gradients with respect to the parameters in one vector; ``None`` is zero"""
        pairs = zip(tensors, self._parameters, strict=True)
        return th.cat([(th.zeros_like(like) if each is None else each).flatten() for each, like in pairs])


def _epoch(minibatches: list[MinibatchLoss], gradient_norms: list[th.Tensor], clip_range: ClipRange) -> Epoch:
    """:return: Metrics of an epoch, from the losses of its minibatches and the norms of their gradients"""
    joined = MinibatchLoss(
        *(th.stack(field) if field[0].dim() == 0 else th.cat(field) for field in zip(*minibatches, strict=True))
    )
    clipped_low, clipped_high = losses.clip_fractions(joined.ratio, *clip_range)
    return Epoch(
        n=len(joined.ratio),
        n_minibatches=len(minibatches),
        n_steps=len(gradient_norms),
        entropy=joined.entropy.mean().item(),
        policy_gradient_loss=joined.policy_gradient_loss.mean().item(),
        approx_kl=losses.approximate_kl(joined.log_ratio).item(),
        clip_fraction_low=clipped_low.item(),
        clip_fraction_high=clipped_high.item(),
        effective_sample_size=losses.effective_sample_size(joined.ratio).item(),
        kl=joined.kl.mean().item() if len(joined.kl) > 0 else None,
        grad_norm=th.stack(gradient_norms).mean().item() if gradient_norms else 0.0,
        loss=joined.loss[-1].item(),
    )
