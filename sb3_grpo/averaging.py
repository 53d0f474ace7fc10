"""The average of the weights after the last updates, with which a model acts outside of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch as th

from sb3_grpo.policies import ActorPolicy

#: Weight of an update in the average relative to the update after it. The average lags by four updates.
DECAY = 0.8


class WeightAverage:
    """
    An exponential moving average of the weights after each update.

    Returns of neighbouring policies differ much: within the limit of an update, a policy that walks may fall (Rahn et al.
    2023, "Policy Optimization in a Noisy Neighborhood", https://arxiv.org/abs/2309.14597). Their average has less of this
    noise, as in Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging". The policy that is trained
    samples with the *latest* weights, those after the last update, and the average is *shown* to everybody else.
    """

    def __init__(self) -> None:
        #: Number of updates in the average.
        self.n_updates = 0
        self._average = list[th.Tensor]()
        # While the policy has the average; None while it has the latest weights itself
        self._latest: list[th.Tensor] | None = None

    @th.no_grad()
    def add(self, policy: ActorPolicy) -> None:
        """Take the weights of the policy into the average."""
        self.n_updates = 1 + (self.n_updates if self._fits(policy) else 0)
        if self.n_updates == 1:
            self._average = [each.clone() for each in policy.parameters()]
            return
        share = (1.0 - DECAY) / (1.0 - DECAY**self.n_updates)
        for average, latest in zip(self._average, policy.parameters(), strict=True):
            average.lerp_(latest, share)

    def show(self, policy: ActorPolicy) -> None:
        """Give the average to the policy, if there is one."""
        if self._latest is None and self._fits(policy):
            self._latest = [each.detach().clone() for each in policy.parameters()]
            _copy(self._average, policy)

    def resume(self, policy: ActorPolicy) -> None:
        """Give its latest weights back to the policy. If somebody has changed the average, a new one begins from there."""
        if self._latest is None:
            return
        if self._fits(policy) and all(map(th.equal, self._average, policy.parameters())):
            _copy(self._latest, policy)
        else:
            self.n_updates = 0
            self._average.clear()
        self._latest = None

    @contextmanager
    def shown(self, policy: ActorPolicy) -> Iterator[None]:
        """A context in which the policy has the average."""
        is_visit = self._latest is None
        try:
            self.show(policy)
            yield
        finally:
            if is_visit and self._latest is not None:
                _copy(self._latest, policy)
                self._latest = None

    def _fits(self, policy: ActorPolicy) -> bool:
        """:return: Whether there is an average, and it is one of weights like those of the policy"""
        return [each.shape for each in self._average] == [each.shape for each in policy.parameters()] and self.n_updates > 0

    def get_state(self) -> dict[str, Any]:
        """:return: Everything that changes during training, for :meth:`set_state`. Call it while the average is shown"""
        # On the CPU, so that a saved run of a GPU can be continued without one.
        latest = None if self._latest is None else [each.cpu() for each in self._latest]
        return {"n_updates": self.n_updates, "average": [each.cpu() for each in self._average], "latest": latest}

    def set_state(self, state: dict[str, Any], policy: ActorPolicy) -> None:
        """Go on from a state of :meth:`get_state`."""
        self.n_updates = state["n_updates"]
        self._average = [each.to(policy.device) for each in state["average"]]
        self._latest = None if state["latest"] is None else [each.to(policy.device) for each in state["latest"]]


@th.no_grad()
def _copy(weights: list[th.Tensor], policy: ActorPolicy) -> None:
    for own, other in zip(policy.parameters(), weights, strict=True):
        own.copy_(other)
