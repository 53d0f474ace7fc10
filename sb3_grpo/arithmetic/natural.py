"""
Natural-gradient steps inside a trust region, as in TRPO (https://arxiv.org/abs/1502.05477, appendix C).

What a step needs to know about a policy is in a :class:`LocalModel`, of which there is one for torch and one for machine code.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch as th

#: Limit of the divergence per component of the action, by default
LIMIT = 0.02
#: Number of timesteps after which the default limit falls
CONSTANT_UNTIL = 300_000
#: Added to the diagonal of the Fisher matrix, whose unit is the divergence per component of the action
DAMPING = 0.1
#: Number of transitions that the Fisher matrix is a mean over; fewer than twice as many are all taken
FISHER_SAMPLES = 512
#: Largest number of steps of conjugate gradients
CG_STEPS = 15
#: Conjugate gradients end at a squared residual of this fraction of that at the beginning.
CG_TOLERANCE = 1e-10
#: Factor of the size of a step that was too large
SHRINKING = 0.8
#: Number of sizes that are tried
N_SIZES = 10


class LocalModel(Protocol):
    """A policy, with what the size and the direction of a natural-gradient step depend on. ``m`` is the number of weights."""

    @property
    def n_components(self) -> int:
        """Number of components of an action, over which divergences are averaged."""

    def loss_and_gradient(self) -> tuple[float, th.Tensor]:
        """:return: Loss at the present weights, and its gradient, shape ``(m,)``"""

    def fisher_product(self, vector: th.Tensor) -> th.Tensor:
        """
        :return: Product of a vector with the Fisher matrix at the weights of the last :meth:`loss_and_gradient`, which is the
            second derivative of :meth:`divergence`, shape ``(m,)``
        """

    def largest_changes(self, limit: float) -> th.Tensor:
        """
        :param limit: Limit of the divergence
        :return: Largest change of each weight in a step, shape ``(m,)``; infinite where only the limit counts
        """

    def weights(self) -> th.Tensor:
        """:return: A copy of the present weights, shape ``(m,)``"""

    def move(self, weights: th.Tensor) -> None:
        """Set the weights, shape ``(m,)``."""

    def loss(self) -> float:
        """:return: Loss at the present weights"""

    def divergence(self) -> float:
        """:return: Mean KL divergence from the policy of the last :meth:`loss_and_gradient`, summed over action components"""


class NaturalStep(NamedTuple):
    """
    A step that was tried.

    :param divergence: Divergence from the policy before, a mean over the components of an action; 0 if the step was rejected
    :param n_tried: Number of sizes that were tried
    :param is_accepted: Whether one of them was taken
    """

    grad_norm: float
    divergence: float
    n_tried: int
    is_accepted: bool


def default_limit(num_timesteps: int) -> float:
    """
    :return: Limit of the divergence where none is set: constant at first, then inversely proportional to the timesteps of the
        run so far, as the step sizes of stochastic approximation (Robbins & Monro 1951), because most of a gradient is noise
    """
    return LIMIT * shortening(num_timesteps)


def shortening(num_timesteps: int) -> float:
    """:return: Factor of the default limit after the timesteps of the run so far, from 1 to 0"""
    return CONSTANT_UNTIL / max(num_timesteps, CONSTANT_UNTIL)


def default_lambda(first: float, late: float, num_timesteps: int) -> float:
    """
    :param first: Lambda at first
    :param late: The largest
    :param num_timesteps: Timesteps of the run so far
    :return: Lambda of generalized advantage estimation where none is set. Its distance from 1 falls like the default limit: a
        smaller lambda has less noise and more bias, and the shorter the steps are, the more updates average the noise, but
        not the bias
    """
    return min(1.0 - (1.0 - first) * shortening(num_timesteps), late)


def fisher_stride(n_samples: int) -> int:
    """:return: Distance between the transitions that the Fisher matrix is a mean over, if an update has ``n_samples``"""
    return max(n_samples // FISHER_SAMPLES, 1)


def conjugate_gradient(
    product: Callable[[th.Tensor], th.Tensor], right: th.Tensor, n_steps: int = CG_STEPS, tolerance: float = CG_TOLERANCE
) -> th.Tensor:
    """
    Solve ``A x = b`` approximately for a symmetric, positive definite ``A`` (Hestenes & Stiefel 1952).

    :param product: Multiplies a vector by ``A``
    :param right: ``b``, shape ``(m,)``
    :param n_steps: Largest number of steps
    :param tolerance: Squared norm of the residual at which to stop, as a fraction of that of ``b``
    :return: ``x``, shape ``(m,)``
    """
    solution, residual = th.zeros_like(right), right.clone()
    direction = residual.clone()
    squared = first = residual.dot(residual).item()
    for _ in range(n_steps):
        if not squared > tolerance * first:
            break
        multiplied = product(direction)
        length = squared / direction.dot(multiplied).item()
        solution.add_(direction, alpha=length)
        residual.sub_(multiplied, alpha=length)
        before, squared = squared, residual.dot(residual).item()
        direction.mul_(squared / before).add_(residual)
    return solution


def metric_product(local: LocalModel, vector: th.Tensor) -> th.Tensor:
    """:return: Product of a vector with the matrix that measures steps, ``F / n_components + DAMPING I``, shape ``(m,)``"""
    return local.fisher_product(vector).div_(local.n_components).add_(vector, alpha=DAMPING)


def natural_step(local: LocalModel, limit: float) -> NaturalStep:
    """
    Move a policy along its natural gradient ``F^-1 g``, to where a quadratic model of the divergence reaches a limit, or less
    far if the divergence itself would exceed it or the loss would not fall (TRPO, appendix C).

    Departures: Limit, Fisher matrix and damping are means over the components of an action, as in sb3-contrib, so that one
    limit serves spaces with few of them and with many. And standard deviations have a limit of their own, as in trust-region
    layers (https://arxiv.org/abs/2101.09207): the other weights use the whole limit, and the change of each log standard
    deviation is bounded apart. As the Fisher matrix of a Gaussian has no entries that connect means and standard deviations,
    the loss still falls.
    """
    loss_before, gradient = local.loss_and_gradient()
    grad_norm = gradient.norm().item()
    if not grad_norm > 0 or not math.isfinite(grad_norm):
        return NaturalStep(grad_norm, 0.0, 0, False)
    product = partial(metric_product, local)
    direction = conjugate_gradient(product, -gradient)
    largest = local.largest_changes(limit)
    unbounded = direction.where(largest.isinf(), 0.0)
    curvature = unbounded.dot(product(unbounded)).item()
    if curvature > 0:
        direction.mul_(math.sqrt(2.0 * limit / curvature))
    step = direction.clamp(-largest, largest)
    size, before = 1.0, local.weights()
    for n_tried in range(1, N_SIZES + 1):
        local.move(before.add(step, alpha=size))
        divergence = local.divergence() / local.n_components
        if divergence <= limit and local.loss() < loss_before:
            return NaturalStep(grad_norm, divergence, n_tried, True)
        size *= SHRINKING
    local.move(before)
    return NaturalStep(grad_norm, 0.0, N_SIZES, False)
