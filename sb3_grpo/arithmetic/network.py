"""A network and its action distribution in machine code: what is called in which order, and where its numbers lie."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sb3_grpo.arithmetic.machine_code import distributions, layers, optimizer, recurrent
from sb3_grpo.arithmetic.machine_code.jit import EntryPoint
from sb3_grpo.losses import UpdateRule

#: Of a network without a convolution
NO_PATCHES = np.zeros((0, 0), np.int64)
#: In the place of an array for convolutions, or of action masks
NO_ROWS = np.zeros((0, 0), np.float32)
#: In the place of an array for sequences
NO_STEPS = np.zeros(0, np.int64)


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
    A multilayer perceptron, of which the first layer may be a convolution or recurrent, with the action distribution on top of
    it. The parameters of all layers are in one array, tensor after tensor, with ``log_std`` at the end. Where the first layer
    is recurrent, rows are steps of sequences, in the order that :mod:`~sb3_grpo.arithmetic.machine_code.recurrent` explains.

    :param sizes: Number of inputs, of the units of each hidden layer, and of outputs
    :param patches: For a convolution, the inputs that each position sees, see
        :func:`~sb3_grpo.arithmetic.machine_code.layers.take_patches`. No columns without a convolution
    :param activation: ``TANH`` or ``RELU``, between the layers
    :param family: Family of the action distributions
    :param n_categories: Number of categories of each choice; empty for other families
    :param cell: ``LSTM`` or ``GRU``, if the first layer is recurrent
    """

    sizes: np.ndarray
    patches: np.ndarray
    activation: int
    family: Family
    n_categories: np.ndarray
    cell: int | None = None

    def is_like(self, other: "Network") -> bool:
        """:return: Whether two descriptions are equal"""
        same = all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ("sizes", "patches", "n_categories"))
        return same and all(getattr(self, name) == getattr(other, name) for name in ("activation", "family", "cell"))

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

    @cached_property
    def has_memory(self) -> bool:
        """Whether the first layer is recurrent."""
        return self.cell is not None

    def acting_entry_points(self) -> Iterable[EntryPoint]:
        """:return: The functions that acting calls, small ones first"""
        first = (layers.convolve,) * self.has_convolution + (recurrent.forward,) * self.has_memory
        softmax = (distributions.log_softmax,) if self.family is CATEGORICAL else ()
        return layers.standardise, *softmax, self.family.sample, self.family.evaluate, *first, layers.forward

    def update_entry_points(self, rule: UpdateRule) -> Iterable[EntryPoint]:
        """:return: The functions that an update calls"""
        natural = self.family.fisher, *(recurrent.forward_tangent,) * self.has_memory, layers.forward_tangent
        steps = natural if rule == "natural" else (optimizer.clip_gradient, optimizer.adam)
        first = (layers.convolve_backward,) * self.has_convolution + (recurrent.backward,) * self.has_memory
        return *self.acting_entry_points(), self.family.backward, *first, optimizer.surrogate, layers.backward, *steps

    def log_std(self, parameters: np.ndarray) -> np.ndarray:
        """:return: The view of ``log_std`` in an array of all parameters; empty for families without it"""
        return parameters[len(parameters) - (self.n_outputs if self.family is GAUSSIAN else 0) :]

    def distribution(self, outputs: np.ndarray, log_std: np.ndarray) -> Distribution:
        """:return: The action distributions for outputs, which are brought into their form in place"""
        if self.family is CATEGORICAL:
            distributions.log_softmax.run(outputs, self.n_categories)
        return Distribution(outputs, log_std, self.n_categories)

    def new_values(self, n: int, n_sequences: int = 0) -> np.ndarray:
        """:return: Space for the numbers of all layers for ``n`` rows, of which the inputs come first"""
        of_memory = 3 * n * int(self.sizes[1]) + (n + n_sequences) * self.state_size if self.has_memory else 0
        return np.empty(n * self._n_values + of_memory, np.float32)

    @cached_property
    def _n_values(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def state_size(self) -> int:
        """Number of entries of the state of the memory: hidden state, and for an LSTM cell state."""
        return 0 if self.cell is None else int(self.sizes[1]) * (2 if self.cell == recurrent.LSTM else 1)

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

    def _memory(self, parameters: np.ndarray) -> tuple[np.ndarray, ...]:
        """:return: Views of the weights and biases of the recurrent layer, and of the parameters of the linear layers"""
        units = int(self.sizes[1])
        n_gates = (4 if self.cell == recurrent.LSTM else 3) * units
        of_states = n_gates * self.n_inputs
        biases = of_states + n_gates * units
        linear = biases + 2 * n_gates
        w, v = parameters[:of_states].reshape(n_gates, -1), parameters[of_states:biases].reshape(n_gates, -1)
        return w, v, parameters[biases : biases + n_gates], parameters[biases + n_gates : linear], parameters[linear:]

    def _steps(self, values: np.ndarray, n: int, running: np.ndarray) -> tuple[np.ndarray, ...]:
        """:return: Views of inputs, gates, cells and hidden states, and of the numbers of the linear layers"""
        units, n_states = int(self.sizes[1]), n + int(running[0])
        shapes = (n, self.n_inputs), (n, 4 * units), (n_states, self.state_size - units), (n_states, units)
        views, at = [], 0
        for n_rows, n_columns in shapes:
            views.append(values[at : at + n_rows * n_columns].reshape(n_rows, n_columns))
            at += n_rows * n_columns
        return *views, values[at - n * units :]

    def states_after(self, values: np.ndarray, n: int) -> np.ndarray:
        """:return: The states after the only step of ``n`` sequences, shape ``(n, state_size)``"""
        *_, cells, hidden, _ = self._steps(values, n, np.array([n]))
        return np.concatenate((hidden[n:], cells[n:]), axis=1)

    def forward(
        self,
        parameters: np.ndarray,
        values: np.ndarray,
        n: int,
        forced: np.ndarray = NO_ROWS,
        running: np.ndarray = NO_STEPS,
        states: np.ndarray = NO_ROWS,
    ) -> np.ndarray:
        """
        :param parameters: All parameters
        :param values: The inputs, and space for the numbers of the other layers
        :param n: Number of rows
        :param forced: Logits that action masks put in the place of outputs, and zero elsewhere, see
            :func:`sb3_grpo.masks.forced_logits`, shape ``(n, k)``; no rows without masks
        :param running: With a recurrent layer: number of sequences that have each step
        :param states: With a recurrent layer: states of which the first are those before the first steps
        :return: The outputs, a view of ``values``, shape ``(n, k)``
        """
        if self.has_memory:
            inputs, gates, cells, hidden, above = self._steps(values, n, running)
            *memory, linear = self._memory(parameters)
            m = running[0]
            hidden[:m], cells[:m] = states[:m, : self.sizes[1]], states[:m, self.sizes[1] :]
            recurrent.forward.run(self.cell, running, *memory, inputs, gates, cells, hidden)
            layers.forward.run(self.sizes[1:], self.activation, False, linear, above, n)
        elif self.has_convolution:
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

    def backward(
        self,
        parameters: np.ndarray,
        values: np.ndarray,
        grad_outputs: np.ndarray,
        gradient: np.ndarray,
        running: np.ndarray = NO_STEPS,
    ) -> None:
        """
        :param parameters: All parameters
        :param values: As :meth:`forward` has left them
        :param grad_outputs: Gradient with respect to the outputs, shape ``(n, k)``
        :param gradient: Receives the gradient with respect to weights and biases, shape of ``parameters``
        :param running: As for :meth:`forward`
        """
        n, sizes, activation = len(grad_outputs), self.sizes, self.activation
        if self.has_memory:
            *steps, above = self._steps(values, n, running)
            _, v, _, _, linear = self._memory(parameters)
            *grad_memory, grad_linear = self._memory(gradient)
            grad_hidden = np.empty((n, int(sizes[1])), np.float32)
            layers.backward.run(sizes[1:], activation, False, linear, above, grad_outputs, grad_linear, grad_hidden)
            recurrent.backward.run(self.cell, running, v, *steps, grad_hidden, *grad_memory)
            return
        if not self.has_convolution:
            layers.backward.run(sizes, activation, False, parameters, values, grad_outputs, gradient, NO_ROWS)
            return
        inputs, hidden = self._split(values, n)
        grad_hidden = np.empty((n, int(sizes[1])), np.float32)
        grad_weight, grad_bias, grad_linear = self._convolution(gradient)
        linear = self._convolution(parameters)[2]
        layers.backward.run(sizes[1:], activation, True, linear, hidden, grad_outputs, grad_linear, grad_hidden)
        layers.convolve_backward.run(self._patches_transposed, inputs, grad_hidden, grad_weight, grad_bias)

    def tangent(
        self, parameters: np.ndarray, values: np.ndarray, vector: np.ndarray, n: int, running: np.ndarray = NO_STEPS
    ) -> np.ndarray:
        """
        :param parameters: All parameters
        :param values: As :meth:`forward` has left them
        :param vector: A direction, shape of ``parameters``
        :param n: Number of rows
        :param running: As for :meth:`forward`
        :return: Derivatives of the outputs in this direction, shape ``(n, k)``
        """
        sizes, activation = self.sizes, self.activation
        tangent = np.empty((n, self.n_outputs), np.float32)
        if self.has_memory:
            *steps, above = self._steps(values, n, running)
            _, v, _, _, linear = self._memory(parameters)
            *along_memory, along = self._memory(vector)
            of_memory = np.empty((n, int(sizes[1])), np.float32)
            recurrent.forward_tangent.run(self.cell, running, v, *steps, *along_memory, of_memory)
            layers.forward_tangent.run(sizes[1:], activation, False, linear, above, along, of_memory, tangent)
            return tangent
        if not self.has_convolution:
            layers.forward_tangent.run(sizes, activation, False, parameters, values, vector, NO_ROWS, tangent)
            return tangent
        inputs, hidden = self._split(values, n)
        weight, bias, along = self._convolution(vector)
        of_convolution = np.empty((n, int(sizes[1])), np.float32)
        layers.convolve.run(self.patches, inputs, weight, bias, of_convolution)
        linear = self._convolution(parameters)[2]
        layers.forward_tangent.run(sizes[1:], activation, True, linear, hidden, along, of_convolution, tangent)
        return tangent
