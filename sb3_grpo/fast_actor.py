"""
Actors that need no autograd: multilayer perceptrons whose gradient is written out.

On networks as small as those of control, building autograd's graph and walking it backwards takes longer than the arithmetic.
:class:`ClosedFormActor` does the arithmetic alone: the same operations forwards, the textbook's backpropagation backwards
(Rumelhart, Hinton & Williams 1986), the gradients of all weights side by side in one array. It gives the same numbers as the
modules, up to rounding in the gradients; :func:`closed_form_layers` says for which networks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution, Distribution
from torch import nn

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


class Activation(Protocol):
    """An activation function whose derivative can be told from its value."""

    def apply_(self, x: th.Tensor) -> th.Tensor:
        """
        :param x: its argument, overwritten
        :return: its value, of the same shape
        """

    def backward(self, gradient: th.Tensor, value: th.Tensor) -> th.Tensor:
        """
        :param gradient: of something with respect to the value
        :param value: of the function, of the same shape
        :return: the gradient with respect to its argument
        """


class Tanh:
    """``tanh' = 1 - tanh^2``"""

    def apply_(self, x: th.Tensor) -> th.Tensor:
        return x.tanh_()

    def backward(self, gradient: th.Tensor, value: th.Tensor) -> th.Tensor:
        return th.addcmul(gradient, gradient * value, value, value=-1.0)


class ReLU:
    """Slope one above zero, none below."""

    def apply_(self, x: th.Tensor) -> th.Tensor:
        return x.relu_()

    def backward(self, gradient: th.Tensor, value: th.Tensor) -> th.Tensor:
        return gradient * (value > 0)


#: By the exact class of the module; a subclass may mean something else.
ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.Tanh: Tanh(), nn.ReLU: ReLU()}


class Layers(NamedTuple):
    """
    Linear layers with one kind of activation between them.

    :param weights: of each layer, shape ``(n_outputs, n_inputs)``
    :param biases: of each layer, shape ``(n_outputs,)``
    :param activation: between the layers
    """

    weights: list[nn.Parameter]
    biases: list[nn.Parameter]
    activation: Activation


def closed_form_layers(modules: Sequence[nn.Module]) -> Layers | None:
    """
    :param modules: through which features pass one after the other, the action layer last
    :return: the layers, or ``None`` if these are not linear layers with a bias, with one kind of activation known to
        :data:`ACTIVATIONS` between them, or if somebody listens to the modules by hooks
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
    :param module: any
    :return: whether somebody listens to it, to all modules, or to one of its own parameters; or has replaced its ``forward``
    """
    hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    for parameter in module.parameters(recurse=False):
        hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # type: ignore[list-item]
    return any(hooks) or "forward" in vars(module) or nn.modules.module._has_any_global_hook()


class ClosedFormActor:
    """
    Acts, evaluates actions, and differentiates what it has evaluated, without autograd: to be used under ``torch.no_grad()``.

    :param layers: from features to the parameters of the action distribution
    :param distribution: of the actions
    :param log_std: log standard deviations of the actions, shape ``(action_dim,)``, for those that have them
    """

    def __init__(self, layers: Layers, distribution: LeanDistribution, log_std: nn.Parameter | None):
        self.layers = layers
        self.distribution = distribution
        self.log_std = log_std
        parameters = [*layers.weights, *layers.biases, *([] if log_std is None else [log_std])]
        sizes = [parameter.numel() for parameter in parameters]
        # One array, so that its norm is one operation
        self._gradient = th.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self._views = [
            view.view_as(parameter) for view, parameter in zip(self._gradient.split(sizes), parameters, strict=True)
        ]
        self._parameters = parameters
        self._values: list[th.Tensor] = []
        self._actions = th.empty(0)

    def sample(self, features: th.Tensor) -> Sample:
        """
        :param features: shape ``(n, features_dim)``
        :return: actions, and their log-probabilities
        """
        return self.distribution.sample(self._forward(features)[-1], self.log_std, deterministic=False)

    def evaluate(self, features: th.Tensor, actions: th.Tensor) -> Evaluation:
        """
        :param features: shape ``(n, features_dim)``
        :param actions: shape ``(n,)`` if discrete, else ``(n, action_dim)``
        :return: log-probabilities and entropies, which :meth:`backward` differentiates
        """
        self._values, self._actions = self._forward(features), actions
        return self.distribution.evaluate(self._values[-1], self.log_std, actions)

    def _forward(self, features: th.Tensor) -> list[th.Tensor]:
        """
        :param features: shape ``(n, features_dim)``
        :return: the features, the values of the hidden layers, the parameters of the distribution
        """
        values = [features]
        for weight, bias in zip(self.layers.weights, self.layers.biases, strict=True):
            if len(values) > 1:
                self.layers.activation.apply_(values[-1])
            values.append(th.addmm(bias, values[-1], weight.t()))
        return values

    def backward(self, of_log_prob: th.Tensor, of_entropy: th.Tensor | None) -> None:
        """
        Set the gradients of the parameters to those of a loss.

        :param of_log_prob: its gradient with respect to the log-probabilities of the last :meth:`evaluate`, shape ``(n,)``
        :param of_entropy: its gradient with respect to the entropies, shape ``(n,)``, ``None`` for zero
        """
        gradient, of_log_std = self.distribution.backward(
            self._values[-1], self.log_std, self._actions, of_log_prob, of_entropy
        )
        n_layers = len(self.layers.weights)
        for layer in reversed(range(n_layers)):
            th.mm(gradient.t(), self._values[layer], out=self._views[layer])
            th.sum(gradient, dim=0, out=self._views[n_layers + layer])
            if layer > 0:
                gradient = self.layers.activation.backward(gradient @ self.layers.weights[layer], self._values[layer])
        if of_log_std is not None:
            self._views[-1].copy_(of_log_std)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def clip_gradient(self, max_norm: float) -> th.Tensor:
        """
        As :func:`torch.nn.utils.clip_grad_norm_`.

        :param max_norm: largest norm of the gradient that is left as it is
        :return: the norm before clipping, a scalar
        """
        norm = th.linalg.vector_norm(self._gradient)
        self._gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm
