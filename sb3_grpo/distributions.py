"""
What a policy needs of its action distribution, and no more.

Stable-Baselines3 wraps one of torch's distribution objects, which validates its arguments and offers much that neither acting
nor learning asks for; on networks as small as those of control, that takes longer than the network. The functions here draw
the same actions from the same random numbers, and give the same log-probabilities and entropies, up to rounding. What they
leave out is validation: parameters that are NaN give NaN, which GRPO looks for in what the policy returns.
"""

import math
from typing import NamedTuple, Protocol

import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution, Distribution

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


class Sample(NamedTuple):
    """
    :param actions: shape ``(n,)`` if discrete, else ``(n, action_dim)``
    :param log_prob: of the actions, shape ``(n,)``
    """

    actions: th.Tensor
    log_prob: th.Tensor


class Evaluation(NamedTuple):
    """
    :param log_prob: of the actions given, shape ``(n,)``
    :param entropy: of the distributions, shape ``(n,)``
    """

    log_prob: th.Tensor
    entropy: th.Tensor


class LeanDistribution(Protocol):
    """A family of distributions, as functions of the parameters that the actor's last layer returns."""

    def sample(self, params: th.Tensor, log_std: th.Tensor | None, deterministic: bool) -> Sample:
        """
        :param params: one row per observation, shape ``(n, n_params)``
        :param log_std: log standard deviations of the actions, shape ``(action_dim,)``, for those that have them
        :param deterministic: whether to take the mode
        :return: actions, and their log-probabilities
        """

    def evaluate(self, params: th.Tensor, log_std: th.Tensor | None, actions: th.Tensor) -> Evaluation:
        """
        :param params: one row per observation, shape ``(n, n_params)``
        :param log_std: see :meth:`sample`
        :param actions: shape ``(n,)`` if discrete, else ``(n, action_dim)``
        :return: log-probabilities and entropies
        """

    def backward(
        self,
        params: th.Tensor,
        log_std: th.Tensor | None,
        actions: th.Tensor,
        of_log_prob: th.Tensor,
        of_entropy: th.Tensor | None,
    ) -> tuple[th.Tensor, th.Tensor | None]:
        """
        The chain rule through :meth:`evaluate`, written out.

        :param params: see :meth:`evaluate`
        :param log_std: see :meth:`evaluate`
        :param actions: see :meth:`evaluate`
        :param of_log_prob: gradient of a loss with respect to the log-probabilities, shape ``(n,)``
        :param of_entropy: gradient with respect to the entropies, shape ``(n,)``, ``None`` for zero
        :return: gradient with respect to ``params``, of their shape, and to ``log_std``, of its shape, ``None`` without one
        """


class LeanCategorical:
    """One of several actions; the parameters are logits, shape ``(n, n_actions)``."""

    def sample(self, params: th.Tensor, log_std: th.Tensor | None, deterministic: bool) -> Sample:
        log_probs = th.log_softmax(params, dim=1)
        if deterministic:
            actions = log_probs.argmax(dim=1)
        else:
            # An exponential race, which is how torch.multinomial draws a single sample
            probs = log_probs.exp()
            actions = (probs / th.empty_like(probs).exponential_()).argmax(dim=1)
        return Sample(actions, log_probs.gather(1, actions[:, None])[:, 0])

    def evaluate(self, params: th.Tensor, log_std: th.Tensor | None, actions: th.Tensor) -> Evaluation:
        log_probs = th.log_softmax(params, dim=1)
        entropy = -(self._finite(log_probs) * log_probs.exp()).sum(dim=1)
        return Evaluation(log_probs.gather(1, actions.long().reshape(-1, 1))[:, 0], entropy)

    def backward(
        self,
        params: th.Tensor,
        log_std: th.Tensor | None,
        actions: th.Tensor,
        of_log_prob: th.Tensor,
        of_entropy: th.Tensor | None,
    ) -> tuple[th.Tensor, None]:
        # d log p_a / dx = 1_a - p, and dH / dx = -p (log p + H)
        log_probs = th.log_softmax(params, dim=1)
        probs = log_probs.exp()
        column = of_log_prob[:, None]
        gradient = (probs * -column).scatter_add_(1, actions.long().reshape(-1, 1), column)
        if of_entropy is not None:
            weighted = self._finite(log_probs) * probs
            gradient -= (weighted - probs * weighted.sum(dim=1, keepdim=True)) * of_entropy[:, None]
        return gradient, None

    @staticmethod
    def _finite(log_probs: th.Tensor) -> th.Tensor:
        # A logit of minus infinity forbids an action: it adds nothing to the entropy, rather than 0 * inf
        return log_probs.clamp(min=th.finfo(log_probs.dtype).min)


class LeanGaussian:
    """Independent Gaussians; the parameters are means, shape ``(n, action_dim)``."""

    def sample(self, params: th.Tensor, log_std: th.Tensor | None, deterministic: bool) -> Sample:
        assert log_std is not None
        actions = params if deterministic else params + th.randn_like(params) * log_std.exp()
        return Sample(actions, self._log_prob(params, log_std, actions))

    def evaluate(self, params: th.Tensor, log_std: th.Tensor | None, actions: th.Tensor) -> Evaluation:
        assert log_std is not None
        entropy = (0.5 + HALF_LOG_2_PI + log_std).sum().expand(len(params))
        return Evaluation(self._log_prob(params, log_std, actions), entropy)

    def backward(
        self,
        params: th.Tensor,
        log_std: th.Tensor | None,
        actions: th.Tensor,
        of_log_prob: th.Tensor,
        of_entropy: th.Tensor | None,
    ) -> tuple[th.Tensor, th.Tensor]:
        # With z = (a - mu) / sigma: d log p / dmu = z / sigma, d log p / dlog sigma = z^2 - 1, dH / dlog sigma = 1
        assert log_std is not None
        precision = (-log_std).exp()
        noise = (actions - params) * precision
        weighted = noise * of_log_prob[:, None]
        of_log_std = (weighted * noise).sum(dim=0) - of_log_prob.sum()
        if of_entropy is not None:
            of_log_std += of_entropy.sum()
        return weighted * precision, of_log_std

    @staticmethod
    def _log_prob(mean: th.Tensor, log_std: th.Tensor, actions: th.Tensor) -> th.Tensor:
        noise = (actions - mean) * (-log_std).exp()
        return -0.5 * noise.square().sum(dim=1) - (log_std + HALF_LOG_2_PI).sum()


#: By the exact class of SB3's distribution; a subclass may mean something else.
LEAN_DISTRIBUTIONS: dict[type[Distribution], LeanDistribution] = {
    CategoricalDistribution: LeanCategorical(),
    DiagGaussianDistribution: LeanGaussian(),
}
