"""The average of the weights after the last updates, with which a model acts outside of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch as th

from sb3_grpo.policies import ActorPolicy

#: The newest of ``n`` weights has the share ``ETA / (n + ETA - 1)`` of the average, and at least ``SMALLEST_SHARE``. So the
#: average lags by a seventeenth of the updates, and at most by four.
ETA = 16
SMALLEST_SHARE = 0.2


class WeightAverage:
    """
    An average of the weights after the last updates.

    Returns of neighbouring policies differ much: within the limit of an update, a policy that walks may fall (Rahn et al.
    2023, "Policy Optimization in a Noisy Neighborhood", https://arxiv.org/abs/2309.14597). Their average has less of this
    noise. Shares fall as in the polynomial-decay averaging of Shamir & Zhang 2013 (https://arxiv.org/abs/1212.1824), until the
    average is an exponential one. The policy that is trained samples with the *latest* weights, those after the last update,
    and the average is *shown* to everybody else.
    """

    def __init__(self) -> None:
        #: Number of updates in the average.
        self.n_updates = 0
        self._average = list[th.Tensor]()
        self._latest = list[th.Tensor]()
        self._is_shown = False

    @th.no_grad()
    def add(self, policy: ActorPolicy) -> None:
        """Take the weights of the policy, which an update has just changed, into the average."""
        self._latest = [each.clone() for each in policy.parameters()]
        self.n_updates += 1
        if self.n_updates == 1:
            self._average = [each.clone() for each in self._latest]
        share = max(ETA / (self.n_updates + ETA - 1), SMALLEST_SHARE)
        for average, latest in zip(self._average, self._latest, strict=True):
            average.lerp_(latest, share)

    def show(self, policy: ActorPolicy) -> None:
        """Give the average to the policy, unless somebody has changed its weights since the last update."""
        if not self._is_shown and self.n_updates > 0 and _are(self._latest, policy):
            self._is_shown = True
            _copy(self._average, policy)

    def resume(self, policy: ActorPolicy) -> None:
        """Give its latest weights back to the policy. If somebody has changed its weights, a new average begins with them."""
        if not _are(self._average if self._is_shown else self._latest, policy):
            self.n_updates = 0
        elif self._is_shown:
            _copy(self._latest, policy)
        self._is_shown = False

    @contextmanager
    def shown(self, policy: ActorPolicy) -> Iterator[None]:
        """A context in which the policy has the average."""
        was_shown = self._is_shown
        try:
            self.show(policy)
            yield
        finally:
            if self._is_shown and not was_shown:
                _copy(self._latest, policy)
                self._is_shown = False

    def get_state(self) -> dict[str, Any]:
        """:return: A copy of everything that changes during training, for :meth:`set_state`"""
        # On the CPU, so that a saved run of a GPU can be continued without one.
        average, latest = ([each.cpu() for each in weights] for weights in (self._average, self._latest))
        return {"n_updates": self.n_updates, "average": average, "latest": latest}

    def set_state(self, state: dict[str, Any], policy: ActorPolicy) -> None:
        """Go on from a state of :meth:`get_state`, with a policy that was saved while the average was shown."""
        self.n_updates, self._is_shown = state["n_updates"], state["n_updates"] > 0
        self._average, self._latest = ([each.to(policy.device) for each in state[name]] for name in ("average", "latest"))


def _are(weights: list[th.Tensor], policy: ActorPolicy) -> bool:
    """:return: Whether a policy has these weights"""
    own = list(policy.parameters())
    return len(weights) == len(own) and all(
        one.device == other.device and th.equal(one, other) for one, other in zip(weights, own, strict=True)
    )


@th.no_grad()
def _copy(weights: list[th.Tensor], policy: ActorPolicy) -> None:
    for own, other in zip(policy.parameters(), weights, strict=True):
        own.copy_(other)
