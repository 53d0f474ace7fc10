"""A network and its action distribution in machine code: what is called in which order, and where its numbers lie."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sb3_grpo.arithmetic.first_layers import NO_ROWS, NO_STEPS, FirstLayer
from sb3_grpo.arithmetic.machine_code import distributions, layers, optimizer
from sb3_grpo.arithmetic.machine_code.jit import EntryPoint
from sb3_grpo.losses import UpdateRule


class Family(NamedTuple):
    """
    The functions of a family of action distributions, see :mod:`~sb3_grpo.arithmetic.machine_code.distributions`.

    :param noise: Method of torch's tensors that draws the noise of samples
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
    Action distributions of ``n`` observations, as the first arguments of the functions in
    :mod:`~sb3_grpo.arithmetic.machine_code.distributions`, which explains them.
    """

    outputs: np.ndarray
    log_std: np.ndarray
    n_categories: np.ndarray


@dataclass(frozen=True, eq=False)
class Network:
    """
    A multilayer perceptron, perhaps with another layer before it, and the action distribution on top. The parameters of all
    layers are in one array, tensor after tensor, with ``log_std`` at the end. Where the first layer is recurrent, rows are
    steps of sequences, in the order that :mod:`~sb3_grpo.arithmetic.machine_code.recurrent` explains.

    Arguments of its methods: all ``parameters``, the number of rows ``n``, the ``values`` of :meth:`new_values`, in which
    :meth:`forward` leaves the numbers of all layers, and ``running``, the number of sequences that have each step, which only
    recurrent layers need.

    :param sizes: Number of inputs, of the units of each hidden layer, and of outputs
    :param first: What comes before the linear layers
    :param activation: ``TANH`` or ``RELU``, between the layers
    :param n_categories: Number of categories of each choice; empty for other families than ``CATEGORICAL``
    """

    sizes: np.ndarray
    first: FirstLayer
    activation: int
    family: Family
    n_categories: np.ndarray

    def is_like(self, other: "Network") -> bool:
        """:return: Whether two descriptions of the same parameters are equal"""
        same = all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ("sizes", "n_categories"))
        same &= all(getattr(self, name) == getattr(other, name) for name in ("activation", "family"))
        return same and type(self.first) is type(other.first)

    @cached_property
    def n_inputs(self) -> int:
        return int(self.sizes[0])

    @cached_property
    def n_outputs(self) -> int:
        return int(self.sizes[-1])

    @cached_property
    def n_components(self) -> int:
        """Number of components of an action."""
        return len(self.n_categories) or self.n_outputs

    @property
    def has_memory(self) -> bool:
        """Whether the first layer is recurrent."""
        return self.first.state_size > 0

    def acting_entry_points(self) -> Iterable[EntryPoint]:
        """:return: The functions that acting calls, small ones first"""
        softmax = (distributions.log_softmax,) if self.family is CATEGORICAL else ()
        of_family = self.family.sample, self.family.evaluate
        return layers.standardise, *softmax, *of_family, *self.first.acting_entry_points, layers.forward

    def update_entry_points(self, rule: UpdateRule) -> Iterable[EntryPoint]:
        """:return: The functions that an update calls"""
        natural = self.family.fisher, layers.forward_tangent
        steps = natural if rule == "natural" else (optimizer.clip_gradient, optimizer.adam)
        first = self.first.update_entry_points(rule)
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
        return np.empty(n * int(self.sizes.sum()) + self.first.n_own_values(n, n_sequences), np.float32)

    @cached_property
    def _linear(self) -> tuple[np.ndarray, int, bool]:
        """Sizes of the linear layers, the activation, and whether it comes before them as well."""
        return self.sizes[self.first.n_layers :], self.activation, self.first.is_activated

    def outputs(self, values: np.ndarray, n: int) -> np.ndarray:
        """:return: The view of the outputs, shape ``(n, k)``"""
        return values[len(values) - n * self.n_outputs :].reshape(n, self.n_outputs)

    def states_after(self, values: np.ndarray, n: int) -> np.ndarray:
        """:return: The states after the only step of ``n`` sequences, shape ``(n, state_size)``"""
        *_, cells, hidden, _ = self.first.split(values, n, np.array([n]))
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
        :param forced: Logits that action masks put in the place of outputs, and zero elsewhere, see
            :func:`sb3_grpo.masks.forced_logits`, shape ``(n, k)``; no rows without masks
        :param states: With a recurrent layer: states of which the first are those before the first steps
        :return: The outputs, a view of ``values``, shape ``(n, k)``
        """
        *own, linear = self.first.weights(parameters)
        *below, above = self.first.split(values, n, running)
        self.first.forward(own, below, above, running, states)
        layers.forward.run(*self._linear, linear, above, n)
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
        :param grad_outputs: Gradient with respect to the outputs, shape ``(n, k)``
        :param gradient: Receives the gradient with respect to weights and biases, shape of ``parameters``
        """
        *own, linear = self.first.weights(parameters)
        *grad_own, grad_linear = self.first.weights(gradient)
        *below, above = self.first.split(values, len(grad_outputs), running)
        grad_hidden = self.first.hidden_rows(len(grad_outputs))
        layers.backward.run(*self._linear, linear, above, grad_outputs, grad_linear, grad_hidden)
        self.first.backward(own, below, grad_hidden, grad_own, running)

    def tangent(
        self, parameters: np.ndarray, values: np.ndarray, vector: np.ndarray, n: int, running: np.ndarray = NO_STEPS
    ) -> np.ndarray:
        """
        :param vector: A direction, shape of ``parameters``
        :return: Derivatives of the outputs in this direction, shape ``(n, k)``
        """
        *own, linear = self.first.weights(parameters)
        *along_own, along = self.first.weights(vector)
        *below, above = self.first.split(values, n, running)
        hidden, tangent = self.first.hidden_rows(n), np.empty((n, self.n_outputs), np.float32)
        self.first.tangent(own, below, along_own, hidden, running)
        layers.forward_tangent.run(*self._linear, linear, above, along, hidden, tangent)
        return tangent
