"""
The actor without autograd.

On networks as small as those of control tasks, building and walking autograd's graph takes longer than the arithmetic, and so
does constructing SB3's distribution objects. This module writes the arithmetic out. :func:`fast_actor` returns ``None`` for
policies that are not eligible, and its docstring is the list of what makes a policy eligible.

The numbers are those of the ordinary path up to rounding, and actions are drawn from the same random numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution, Distribution
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_grpo.policies import ActorPolicy

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


# --- distributions ----------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """
    :param actions: Actions, shape ``(n,)`` if discrete, else ``(n, action_dim)``
    :param log_prob: Their log-probabilities, shape ``(n,)``
    """

    actions: th.Tensor
    log_prob: th.Tensor


class Evaluation(NamedTuple):
    """
    :param log_prob: Log-probabilities of given actions, shape ``(n,)``
    :param entropy: Entropies of the distributions, shape ``(n,)``
    """

    log_prob: th.Tensor
    entropy: th.Tensor


class FastDistribution(Protocol):
    """
    A family of action distributions, as functions of the output of the actor's last layer.

    Arguments are not validated: parameters that are NaN give NaN, which GRPO checks for.
    """

    def sample(self, params: th.Tensor, log_std: th.Tensor | None) -> Sample:
        """
        :param params: Output of the last layer, shape ``(n, n_params)``
        :param log_std: Log standard deviations of the actions, shape ``(action_dim,)``, for families that have them
        :return: Actions and their log-probabilities
        """

    def evaluate(self, params: th.Tensor, log_std: th.Tensor | None, actions: th.Tensor) -> Evaluation:
        """
        :param params: Output of the last layer, shape ``(n, n_params)``
        :param log_std: See :meth:`sample`
        :param actions: Actions, shape ``(n,)`` if discrete, else ``(n, action_dim)``
        :return: Log-probabilities and entropies
        """

    def backward(
        self,
        params: th.Tensor,
        log_std: th.Tensor | None,
        actions: th.Tensor,
        grad_log_prob: th.Tensor,
        grad_entropy: th.Tensor | None,
    ) -> tuple[th.Tensor, th.Tensor | None]:
        """
        The chain rule through :meth:`evaluate`.

        :param params: See :meth:`evaluate`
        :param log_std: See :meth:`evaluate`
        :param actions: See :meth:`evaluate`
        :param grad_log_prob: Gradient of a loss with respect to the log-probabilities, shape ``(n,)``
        :param grad_entropy: Gradient with respect to the entropies, shape ``(n,)``; ``None`` for zero
        :return: Gradients with respect to ``params`` and to ``log_std``; ``None`` for the latter if there is none
        """


class FastCategorical:
    """One of several actions; the parameters are logits, shape ``(n, n_actions)``."""

    def sample(self, params: th.Tensor, log_std: th.Tensor | None) -> Sample:
        log_probs = th.log_softmax(params, dim=1)
        # An exponential race; torch.multinomial draws a single sample in the same way.
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
        grad_log_prob: th.Tensor,
        grad_entropy: th.Tensor | None,
    ) -> tuple[th.Tensor, None]:
        # d log p_a / dx = 1_a - p, and dH / dx = -p (log p + H)
        log_probs = th.log_softmax(params, dim=1)
        probs = log_probs.exp()
        column = grad_log_prob[:, None]
        gradient = (probs * -column).scatter_add_(1, actions.long().reshape(-1, 1), column)
        if grad_entropy is not None:
            weighted = self._finite(log_probs) * probs
            gradient -= (weighted - probs * weighted.sum(dim=1, keepdim=True)) * grad_entropy[:, None]
        return gradient, None

    @staticmethod
    def _finite(log_probs: th.Tensor) -> th.Tensor:
        # An action with a logit of minus infinity is forbidden: it adds nothing to the entropy, instead of 0 * inf.
        return log_probs.clamp(min=th.finfo(log_probs.dtype).min)


class FastGaussian:
    """Independent Gaussians; the parameters are means, shape ``(n, action_dim)``."""

    def sample(self, params: th.Tensor, log_std: th.Tensor | None) -> Sample:
        assert log_std is not None
        actions = params + th.randn_like(params) * log_std.exp()
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
        grad_log_prob: th.Tensor,
        grad_entropy: th.Tensor | None,
    ) -> tuple[th.Tensor, th.Tensor]:
        # With z = (a - mu) / sigma: d log p / dmu = z / sigma, d log p / dlog sigma = z^2 - 1, dH / dlog sigma = 1
        assert log_std is not None
        precision = (-log_std).exp()
        noise = (actions - params) * precision
        weighted = noise * grad_log_prob[:, None]
        grad_log_std = (weighted * noise).sum(dim=0) - grad_log_prob.sum()
        if grad_entropy is not None:
            grad_log_std += grad_entropy.sum()
        return weighted * precision, grad_log_std

    @staticmethod
    def _log_prob(mean: th.Tensor, log_std: th.Tensor, actions: th.Tensor) -> th.Tensor:
        noise = (actions - mean) * (-log_std).exp()
        return -0.5 * noise.square().sum(dim=1) - (log_std + HALF_LOG_2_PI).sum()


#: Keys are exact classes: a subclass of SB3's distributions may mean something else.
FAST_DISTRIBUTIONS: dict[type[Distribution], FastDistribution] = {
    CategoricalDistribution: FastCategorical(),
    DiagGaussianDistribution: FastGaussian(),
}


# --- layers -----------------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """
    An activation function whose derivative is a function of its value.

    :param apply_: Function of the argument, which it overwrites with the value
    :param backward: Function of the gradient with respect to the value, and of the value; gives the gradient with respect to
        the argument
    """

    apply_: Callable[[th.Tensor], th.Tensor]
    backward: Callable[[th.Tensor, th.Tensor], th.Tensor]


#: Keys are exact classes, as in ``FAST_DISTRIBUTIONS``.
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: Activation(th.tanh_, lambda gradient, value: th.addcmul(gradient, gradient * value, value, value=-1.0)),
    nn.ReLU: Activation(th.relu_, lambda gradient, value: gradient * (value > 0)),
}


class Layers(NamedTuple):
    """
    Linear layers with one kind of activation between them.

    :param weights: Weight of each layer, shape ``(n_outputs, n_inputs)``
    :param biases: Bias of each layer, shape ``(n_outputs,)``
    :param activation: Activation between the layers
    """

    weights: list[nn.Parameter]
    biases: list[nn.Parameter]
    activation: Activation


def linear_layers(modules: Sequence[nn.Module]) -> Layers | None:
    """
    :param modules: Modules that features pass one after the other, the action layer last
    :return: Their parameters; ``None`` unless they are linear layers with a bias, with one kind of activation from
        ``ACTIVATIONS`` between them, and without hooks
    """
    linear, between = modules[::2], modules[1::2]
    activations = {type(module) for module in between} or {nn.Tanh}
    is_known = len(activations) == 1 and activations <= set(ACTIVATIONS) and len(linear) == len(between) + 1
    if not is_known or any(type(module) is not nn.Linear or module.bias is None for module in linear):
        return None
    if any(has_hooks(module) for module in modules):
        return None
    weights, biases = zip(*((module.weight, module.bias) for module in linear), strict=True)
    return Layers(list(weights), list(biases), ACTIVATIONS[activations.pop()])


def has_hooks(module: nn.Module) -> bool:
    """
    :param module: Any module
    :return: Whether there are hooks on it, on all modules, or on one of its own parameters, or its ``forward`` is replaced
    """
    hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    for parameter in module.parameters(recurse=False):
        hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # type: ignore[list-item]
    return any(hooks) or "forward" in vars(module) or nn.modules.module._has_any_global_hook()


# --- the actor --------------------------------------------------------------------------------------------------------


class FastActor:
    """
    Chooses and evaluates actions, and computes the gradient of a loss, without autograd: for use under ``torch.no_grad()``.
    It shares the parameters of the policy.

    :param layers: Layers from features to the parameters of the action distribution
    :param distribution: Family of the action distribution
    :param log_std: Log standard deviations of the actions, shape ``(action_dim,)``, for families that have them
    """

    def __init__(self, layers: Layers, distribution: FastDistribution, log_std: nn.Parameter | None):
        self.layers = layers
        self.distribution = distribution
        self.log_std = log_std
        self._parameters = [*layers.weights, *layers.biases, *([] if log_std is None else [log_std])]
        sizes = [parameter.numel() for parameter in self._parameters]
        # All gradients are views of one array, so that their norm is a single operation.
        self._gradient = th.zeros(sum(sizes), dtype=self._parameters[0].dtype, device=self._parameters[0].device)
        self._views = [
            view.view_as(parameter) for view, parameter in zip(self._gradient.split(sizes), self._parameters, strict=True)
        ]
        self._values: list[th.Tensor] = []
        self._actions = th.empty(0)

    def sample(self, features: th.Tensor) -> Sample:
        """
        :param features: Features, shape ``(n, features_dim)``
        :return: Sampled actions and their log-probabilities
        """
        return self.distribution.sample(self._forward(features)[-1], self.log_std)

    def evaluate(self, features: th.Tensor, actions: th.Tensor) -> Evaluation:
        """
        :param features: Features, shape ``(n, features_dim)``
        :param actions: Actions, shape ``(n,)`` if discrete, else ``(n, action_dim)``
        :return: Log-probabilities and entropies, which :meth:`backward` differentiates
        """
        self._values, self._actions = self._forward(features), actions
        return self.distribution.evaluate(self._values[-1], self.log_std, actions)

    def _forward(self, features: th.Tensor) -> list[th.Tensor]:
        """
        :param features: Features, shape ``(n, features_dim)``
        :return: The features, the values of the hidden layers, and the parameters of the distribution
        """
        values = [features]
        for weight, bias in zip(self.layers.weights, self.layers.biases, strict=True):
            if len(values) > 1:
                self.layers.activation.apply_(values[-1])
            values.append(th.addmm(bias, values[-1], weight.t()))
        return values

    def backward(self, grad_log_prob: th.Tensor, grad_entropy: th.Tensor | None) -> None:
        """
        Set the gradients of the parameters to those of a loss (backpropagation, Rumelhart, Hinton & Williams 1986).

        :param grad_log_prob: Gradient with respect to the log-probabilities of the last :meth:`evaluate`, shape ``(n,)``
        :param grad_entropy: Gradient with respect to the entropies, shape ``(n,)``; ``None`` for zero
        """
        gradient, grad_log_std = self.distribution.backward(
            self._values[-1], self.log_std, self._actions, grad_log_prob, grad_entropy
        )
        n_layers = len(self.layers.weights)
        for layer in reversed(range(n_layers)):
            th.mm(gradient.t(), self._values[layer], out=self._views[layer])
            th.sum(gradient, dim=0, out=self._views[n_layers + layer])
            if layer > 0:
                gradient = self.layers.activation.backward(gradient @ self.layers.weights[layer], self._values[layer])
        if grad_log_std is not None:
            self._views[-1].copy_(grad_log_std)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def clip_gradient(self, max_norm: float) -> th.Tensor:
        """
        Clip the gradient as :func:`torch.nn.utils.clip_grad_norm_` does.

        :param max_norm: Maximum norm of the gradient
        :return: Norm before clipping, a scalar
        """
        norm = th.linalg.vector_norm(self._gradient)
        self._gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm


#: Maps observations to actions, shape ``(n, *action_shape)``, their log-probabilities, shape ``(n,)``, and the output of the
#: features extractor, shape ``(n, features_dim)``, or ``None`` if the policy does not expose it.
Actor = Callable[[PyTorchObs], tuple[th.Tensor, th.Tensor, th.Tensor | None]]

#: Methods that choose actions. A subclass that overrides one of them acts in its own way.
ACTING = ("__call__", "forward", "forward_features", "extract_features", "get_distribution", "_distribution", "_latent")


def actor(policy: ActorPolicy) -> Actor:
    """
    :param policy: Policy
    :return: The function that chooses actions during a rollout: the fast actor for eligible policies, else the policy itself
    """
    if not is_unaltered(policy, ACTING) or has_hooks(policy):
        return lambda obs: (*policy(obs), None)
    fast = fast_actor(policy)

    def act(obs: PyTorchObs) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        features = policy.extract_features(obs)
        actions, log_prob = policy.forward_features(features) if fast is None else fast.sample(features)
        return actions.reshape((-1, *policy.action_space.shape)), log_prob, features  # type: ignore[misc]

    return act


def is_unaltered(policy: ActorPolicy, methods: Sequence[str]) -> bool:
    """
    :param policy: Policy
    :param methods: Names of methods of ``ActorPolicy``
    :return: Whether no subclass, no attribute of the policy and no wrapper of ``torch.compile`` replaces one of them
    """
    return all(getattr(getattr(policy, name), "__func__", None) is getattr(ActorPolicy, name) for name in methods)


def fast_actor(policy: ActorPolicy) -> FastActor | None:
    """
    The actor of a policy without autograd. A policy is eligible if

    - the action distribution is in ``FAST_DISTRIBUTIONS``: Discrete actions or independent Gaussians, no gSDE;
    - the features extractor is ``FlattenExtractor``: no images, no Dict observations, no custom extractor;
    - the hidden layers are linear with a bias, with tanh or ReLU between them;
    - no subclass overrides how actions are chosen or evaluated, and there are no hooks and no compiled modules;
    - no other parameters exist, and all of them are trained.

    :param policy: Policy
    :return: The actor; ``None`` if the policy is not eligible
    """
    if not is_unaltered(policy, (*ACTING, "evaluate_actions", "evaluate_distribution")):
        return None
    distribution = FAST_DISTRIBUTIONS.get(type(policy.action_dist))
    if distribution is None or type(policy.features_extractor) is not FlattenExtractor:
        return None
    if type(policy.policy_net) is not nn.Sequential:
        return None
    if any(has_hooks(module) for module in (policy, policy.features_extractor, policy.policy_net)):
        return None
    layers = linear_layers([*policy.policy_net, policy.action_net])
    if layers is None:
        return None
    log_std = getattr(policy, "log_std", None)
    ours = [*layers.weights, *layers.biases, *([] if log_std is None else [log_std])]
    is_whole = len(ours) == len(set(ours)) and set(ours) == set(policy.parameters())
    if not is_whole or not all(parameter.requires_grad for parameter in ours):
        return None
    return FastActor(layers, distribution, log_std)
