"""A network and its action distribution in machine code: what is called in which order, and where its numbers lie."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sb3_grpo.arithmetic.machine_code import distributions, layers, optimizer
from sb3_grpo.arithmetic.machine_code.jit import EntryPoint
from sb3_grpo.losses import UpdateRule

#: Of a network without a convolution
NO_PATCHES = np.zeros((0, 0), np.int64)
#: In the place of an array for convolutions, or of action masks
NO_ROWS = np.zeros((0, 0), np.float32)


class Family(NamedTuple):
    """
    The functions of a family of action distributions, see :mod:`~sb3_grpo.arithmetic.machine_code.distributions`.

    :param noise: Method of torch's tensors that draws the noise of samples
    :param sample: Draws actions
    :param evaluate: Computes log-probabilities, entropies and divergences
    :param backward: Applies the chain rule to ``evaluate``
    :param fisher: Multiplies derivatives of the outputs by the Fisher matrix
    """

    noise: str
    sample: EntryPoint
    evaluate: EntryPoint
    backward: EntryPoint
    fisher: EntryPoint


#: Independent Gaussians (``Box``). The outputs of the network are the means.
GAUSSIAN = Family(
    "normal_",
    distributions.sample_gaussian,
    distributions.evaluate_gaussian,
    distributions.backward_gaussian,
    distributions.fisher_gaussian,
)
#: One choice (``Discrete``) or several independent ones (``MultiDiscrete``). The outputs are logits.
CATEGORICAL = Family(
    "exponential_",
    distributions.sample_categorical,
    distributions.evaluate_categorical,
    distributions.backward_categorical,
    distributions.fisher_categorical,
)
#: Independent yes-or-no choices (``MultiBinary``). The outputs are logits.
BERNOULLI = Family(
    "uniform_",
    distributions.sample_bernoulli,
    distributions.evaluate_bernoulli,
    distributions.backward_bernoulli,
    distributions.fisher_bernoulli,
)


class Distribution(NamedTuple):
    """
    Action distributions of ``n`` observations.

    :param outputs: Outputs of the network, shape ``(n, k)``; logarithms of probabilities for ``CATEGORICAL``
    :param log_std: Log standard deviations, shape ``(d,)``; empty for other families than ``GAUSSIAN``
    :param n_categories: Number of categories of each choice; empty for other families than ``CATEGORICAL``
    """

    outputs: np.ndarray
    log_std: np.ndarray
    n_categories: np.ndarray


@dataclass(frozen=True, eq=False)
class Network:
    """
    A multilayer perceptron, of which the first layer may be a convolution, with the action distribution on top of it. The
    parameters of all layers are in one array, tensor after tensor, with ``log_std`` at the end.

    :param sizes: Number of inputs, of the units of each hidden layer, and of outputs
    :param patches: For a convolution, the inputs that each position sees, see
        :func:`~sb3_grpo.arithmetic.machine_code.layers.take_patches`. No columns without a convolution
    :param activation: ``TANH`` or ``RELU``, between the layers
    :param family: Family of the action distributions
    :param n_categories: Number of categories of each choice; empty for other families
    """

    sizes: np.ndarray
    patches: np.ndarray
    activation: int
    family: Family
    n_categories: np.ndarray

    def is_like(self, other: "Network") -> bool:
        """:return: Whether two descriptions are equal"""
        same = all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ("sizes", "patches", "n_categories"))
        return same and (self.activation, self.family) == (other.activation, other.family)

    @cached_property
    def n_inputs(self) -> int:
        """Number of inputs."""
        return int(self.sizes[0])

    @cached_property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return int(self.sizes[-1])

    @cached_property
    def n_components(self) -> int:
        """Number of components of an action."""
        return len(self.n_categories) or self.n_outputs

    @cached_property
    def has_convolution(self) -> bool:
        """Whether the first layer is a convolution."""
        return self.patches.size > 0

    def acting_entry_points(self) -> Iterable[EntryPoint]:
        """:return: The functions that acting calls, small ones first"""
        convolution = (layers.convolve,) if self.has_convolution else ()
        softmax = (distributions.log_softmax,) if self.family is CATEGORICAL else ()
        return layers.standardise, *softmax, self.family.sample, self.family.evaluate, *convolution, layers.forward

    def update_entry_points(self, rule: UpdateRule) -> Iterable[EntryPoint]:
        """:return: The functions that an update calls"""
        natural = self.family.fisher, layers.forward_tangent
        steps = natural if rule == "natural" else (optimizer.clip_gradient, optimizer.adam)
        convolution = (layers.convolve_backward,) if self.has_convolution else ()
        return *self.acting_entry_points(), self.family.backward, *convolution, optimizer.surrogate, layers.backward, *steps

    def log_std(self, parameters: np.ndarray) -> np.ndarray:
        """:return: The view of ``log_std`` in an array of all parameters; empty for families without it"""
        return parameters[len(parameters) - (self.n_outputs if self.family is GAUSSIAN else 0) :]

    def distribution(self, outputs: np.ndarray, log_std: np.ndarray) -> Distribution:
        """:return: The action distributions for outputs, which are brought into their form in place"""
        if self.family is CATEGORICAL:
            distributions.log_softmax.run(outputs, self.n_categories)
        return Distribution(outputs, log_std, self.n_categories)

    def new_values(self, n: int) -> np.ndarray:
        """:return: Space for the numbers of all layers for ``n`` rows, of which the inputs come first"""
        return np.empty(n * self._n_values, np.float32)

    @cached_property
    def _n_values(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def _patches_transposed(self) -> np.ndarray:
        return np.ascontiguousarray(self.patches.T)

    def outputs(self, values: np.ndarray, n: int) -> np.ndarray:
        """:return: The view of the outputs, shape ``(n, k)``"""
        return values[len(values) - n * self.n_outputs :].reshape(n, self.n_outputs)

    def _convolution(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """:return: Views of the convolution's weight and bias, and of the parameters of the linear layers"""
        n_seen, n_positions = self.patches.shape
        n_channels = int(self.sizes[1]) // n_positions
        split = n_channels * n_seen
        weight = parameters[:split].reshape(n_channels, n_seen)
        return weight, parameters[split : split + n_channels], parameters[split + n_channels :]

    def _split(self, values: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """:return: Views of the inputs of a convolution, shape ``(n, n_inputs)``, and of the numbers of the linear layers"""
        split = n * self.n_inputs
        return values[:split].reshape(n, -1), values[split:]

    def forward(self, parameters: np.ndarray, values: np.ndarray, n: int, forced: np.ndarray = NO_ROWS) -> np.ndarray:
        """
        :param parameters: All parameters
        :param values: The inputs, and space for the numbers of the other layers
        :param n: Number of rows
        :param forced: Logits that action masks put in the place of outputs, and zero elsewhere, see
            :func:`sb3_grpo.masks.forced_logits`, shape ``(n, k)``; no rows without masks
        :return: The outputs, a view of ``values``, shape ``(n, k)``
        """
        if self.has_convolution:
            inputs, hidden = self._split(values, n)
            weight, bias, linear = self._convolution(parameters)
            layers.convolve.run(self.patches, inputs, weight, bias, hidden[: n * int(self.sizes[1])].reshape(n, -1))
            layers.forward.run(self.sizes[1:], self.activation, True, linear, hidden, n)
        else:
            layers.forward.run(self.sizes, self.activation, False, parameters, values, n)
        outputs = self.outputs(values, n)
        if len(forced) > 0:
            np.copyto(outputs, forced, where=forced != 0)
        return outputs

    def backward(self, parameters: np.ndarray, values: np.ndarray, grad_outputs: np.ndarray, gradient: np.ndarray) -> None:
        """
        :param parameters: All parameters
        :param values: As :meth:`forward` has left them
        :param grad_outputs: Gradient with respect to the outputs, shape ``(n, k)``
        :param gradient: Receives the gradient with respect to weights and biases, shape of ``parameters``
        """
        if not self.has_convolution:
            layers.backward.run(self.sizes, self.activation, parameters, values, grad_outputs, gradient, NO_ROWS)
            return
        n = len(grad_outputs)
        inputs, hidden = self._split(values, n)
        grad_hidden = np.empty((n, int(self.sizes[1])), np.float32)
        grad_weight, grad_bias, grad_linear = self._convolution(gradient)
        linear = self._convolution(parameters)[2]
        layers.backward.run(self.sizes[1:], self.activation, linear, hidden, grad_outputs, grad_linear, grad_hidden)
        layers.convolve_backward.run(self._patches_transposed, inputs, grad_hidden, grad_weight, grad_bias)

    def tangent(self, parameters: np.ndarray, values: np.ndarray, vector: np.ndarray, n: int) -> np.ndarray:
        """
        :param parameters: All parameters
        :param values: As :meth:`forward` has left them
        :param vector: A direction, shape of ``parameters``
        :param n: Number of rows
        :return: Derivatives of the outputs in this direction, shape ``(n, k)``
        """
        tangent = np.empty((n, self.n_outputs), np.float32)
        if not self.has_convolution:
            layers.forward_tangent.run(self.sizes, self.activation, parameters, values, vector, NO_ROWS, tangent)
            return tangent
        inputs, hidden = self._split(values, n)
        weight, bias, along = self._convolution(vector)
        of_convolution = np.empty((n, int(self.sizes[1])), np.float32)
        layers.convolve.run(self.patches, inputs, weight, bias, of_convolution)
        linear = self._convolution(parameters)[2]
        layers.forward_tangent.run(self.sizes[1:], self.activation, linear, hidden, along, of_convolution, tangent)
        return tangent
