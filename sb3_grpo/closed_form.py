"""
Actors that need no autograd: multilayer perceptrons whose gradient is written out.

On networks as small as those of control, building autograd's graph and walking it backwards takes longer than the arithmetic.
:class:`ClosedFormActor` does the arithmetic alone: the same operations forwards, the textbook's backpropagation backwards
(Rumelhart, Hinton & Williams 1986), the gradients of all weights side by side in one array. It gives the same numbers as the
modules, up to rounding in the gradients; :func:`closed_form_layers` says for which networks.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch as th
from torch import nn

from sb3_grpo.distributions import Evaluation, LeanDistribution, Sample


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
