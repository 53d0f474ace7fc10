"""Metrics of an update, and those that are logged."""

from typing import NamedTuple

from sb3_grpo.arithmetic.natural import NaturalStep


class Epoch(NamedTuple):
    """
    Metrics of an epoch: means over its transitions, if nothing else is said. :mod:`~sb3_grpo.losses` has the functions that
    define ``approx_kl``, the clip fractions and ``effective_sample_size``.

    :param n: Number of transitions
    :param n_steps: Number of gradient steps, which is smaller than that of minibatches if the update ended early
    :param policy_gradient_loss: Clipped surrogate, a mean over minibatches
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


class UpdateReport(NamedTuple):
    """
    What an update did.

    :param excessive_kl: The approximate KL divergence that ended the update early, if one did
    :param natural: The natural-gradient step, if it was one
    """

    epochs: list[Epoch]
    excessive_kl: float | None = None
    natural: NaturalStep | None = None


def describe_update(report: UpdateReport) -> dict[str, float]:
    """:return: Metrics of the update, from those of its epochs"""
    epochs, last = report.epochs, report.epochs[-1]

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
    if report.natural is not None:
        metrics["train/kl_divergence_loss"] = report.natural.divergence
        metrics["train/line_search_steps"] = float(report.natural.n_tried)
        metrics["train/is_line_search_success"] = float(report.natural.is_accepted)
    else:
        low, high = mean("clip_fraction_low"), mean("clip_fraction_high")
        metrics["train/clip_fraction"] = low + high
        metrics["train/clip_fraction_low"], metrics["train/clip_fraction_high"] = low, high
    if any(epoch.n_steps > 0 for epoch in epochs):
        metrics["train/grad_norm"] = mean("grad_norm", "n_steps")
    if last.kl is not None:
        metrics["train/kl_loss"] = mean("kl")
    return metrics
