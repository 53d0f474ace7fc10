"""The KL penalty: the reference policy and its age, estimates of the divergence, and the adaptive coefficient."""

import copy
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch as th
from stable_baselines3.common.distributions import Distribution
from torch.overrides import TorchFunctionMode

from sb3_grpo.buffers.rollout import GroupRolloutBufferSamples
from sb3_grpo.losses import exact_kl, k3
from sb3_grpo.policies import COMPILED, ActorPolicy
from sb3_grpo.validation import require_at_least, require_one_of

KLEstimator = Literal["exact", "k3"]
KLReference = Literal["old", "initial"] | int

#: Limits of an adaptive coefficient.
KL_COEF_BOUNDS = (1e-6, 1e6)


def adapted_kl_coef(kl_coef: float, kl: float, target: float) -> float:
    """
    The adaptive penalty of PPO (https://arxiv.org/abs/1707.06347, section 4): the coefficient is doubled if the divergence
    after the last update is above ``1.5 target``, and halved if it is below ``target / 1.5``.

    Departures: the coefficient stays within ``KL_COEF_BOUNDS``, and the divergence is KL(pi || reference) instead of
    KL(pi_old || pi).

    :return: Coefficient of the next update
    """
    if kl > 1.5 * target:
        return min(2.0 * kl_coef, KL_COEF_BOUNDS[1])
    if kl < target / 1.5:
        return max(0.5 * kl_coef, KL_COEF_BOUNDS[0])
    return kl_coef


class ComputedTensorsCopied(TorchFunctionMode):
    """
    Within this context, ``copy.deepcopy`` copies the values of tensors that have a gradient function. Otherwise, torch refuses
    to copy them, and modules hold such tensors after a forward pass: SB3's distributions, gSDE, and ``weight_norm``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is th.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


class KLPenalty:
    """
    The divergence KL(pi || reference) that the loss penalises.

    :param reference: ``"old"``, ``"initial"``, or the number of updates between two renewals
    :raises ValueError: If an argument is out of range
    """

    def __init__(self, reference: KLReference, estimator: KLEstimator):
        if isinstance(reference, str):
            require_one_of("kl_reference", reference, ("old", "initial"))
        else:
            require_at_least("kl_reference", reference, 1, or_else="or 'old' or 'initial'")
        require_one_of("kl_estimator", estimator, ("exact", "k3"))
        self.reference = reference
        self.estimator = estimator
        #: The reference policy; ``None`` until an update needs it.
        self.policy: ActorPolicy | None = None
        #: Number of updates since the reference policy was renewed.
        self.age = 0

    @property
    def is_exact(self) -> bool:
        """Whether the divergence is computed in closed form, from distributions."""
        return self.estimator == "exact"

    def renew(self, policy: ActorPolicy) -> None:
        """Prepare the reference for an update: take the policy before it as the reference if that is due."""
        if self._uses_stored_log_probs():
            return
        lifetime = {"old": 1, "initial": math.inf}.get(self.reference, self.reference)  # type: ignore[arg-type]
        if self.policy is None or self.age >= lifetime:
            self.policy, self.age = self._copy_of(policy), 0
        self.age += 1

    def forget(self) -> None:
        """Take the policy of the next update as the reference."""
        self.policy = None
        self.age = 0

    def _uses_stored_log_probs(self) -> bool:
        # The policy at the start of the update has left its log-probabilities in the buffer.
        return self.reference == "old" and not self.is_exact

    @staticmethod
    def _copy_of(policy: ActorPolicy) -> ActorPolicy:
        """:return: A copy of a policy, which may have modules that its constructor does not know of, without an optimizer"""
        policy = getattr(policy, COMPILED, policy)
        try:
            with ComputedTensorsCopied():
                reference = copy.deepcopy(policy, {id(policy.optimizer): None})
        except Exception as error:
            raise TypeError(
                f"The KL penalty needs a copy of the policy as its reference, and copying it failed with {error!r}. Define "
                "`__deepcopy__` for the module that cannot be copied, or pass kl_coef=0."
            ) from error
        reference.set_training_mode(False)
        return reference

    def estimate(
        self, batch: GroupRolloutBufferSamples, log_prob: th.Tensor, distribution: Distribution | None = None
    ) -> th.Tensor:
        """
        :param log_prob: Log-probabilities of the actions under the policy, shape ``(n,)``
        :param distribution: Distributions of the policy, which the exact divergence needs
        :return: KL(pi || reference) or its estimate for each transition, shape ``(n,)``
        """
        if self._uses_stored_log_probs():
            reference_log_prob = batch.old_log_prob
        else:
            assert self.policy is not None, "renew() comes before estimate()"
            with th.no_grad():
                reference = self.policy.get_distribution(batch.observations, **batch.context)
            if self.is_exact:
                assert distribution is not None
                return exact_kl(distribution, reference)
            with th.no_grad():
                reference_log_prob, _ = self.policy.evaluate_distribution(reference, batch.actions)
        return k3(log_prob, reference_log_prob)

    @th.no_grad()
    def mean(self, policy: ActorPolicy, batches: Iterable[GroupRolloutBufferSamples]) -> float:
        """:return: Mean divergence of the policy from the reference after an update, over its transitions"""
        policy.set_training_mode(False)  # layers such as batch normalisation work differently in training
        divergences = []
        for batch in batches:
            distribution = policy.get_distribution(batch.observations, **batch.context)
            log_prob, _ = policy.evaluate_distribution(distribution, batch.actions)
            divergences.append(self.estimate(batch, log_prob, distribution))
        return th.cat(divergences).mean().item()

    def get_state(self) -> dict[str, Any]:
        """:return: A copy of everything that changes during training, for :meth:`set_state`"""
        # On the CPU, so that a saved run of a GPU can be continued without one.
        weights = None if self.policy is None else {k: v.cpu().clone() for k, v in self.policy.state_dict().items()}
        return {"age": self.age, "weights": weights}

    def set_state(self, state: dict[str, Any], policy: ActorPolicy) -> None:
        """
        Go on from a state of :meth:`get_state`. The reference is a copy of the policy that is trained, with other weights.
        """
        self.forget()
        if state["weights"] is not None:
            self.policy = self._copy_of(policy)
            self.policy.load_state_dict(state["weights"])
        self.age = state["age"]
