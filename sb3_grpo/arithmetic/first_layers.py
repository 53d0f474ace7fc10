"""
What a network in machine code has before its linear layers: nothing, a convolution, or a recurrent layer. All three answer
the same questions, so that a :class:`~sb3_grpo.arithmetic.network.Network` does not ask which one it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sb3_grpo.arithmetic.machine_code import layers, recurrent
from sb3_grpo.arithmetic.machine_code.jit import EntryPoint
from sb3_grpo.losses import UpdateRule

#: In the place of an array with two axes that a network does not have
NO_ROWS = np.zeros((0, 0), np.float32)
#: In the place of an array for sequences
NO_STEPS = np.zeros(0, np.int64)

#: Views of a flat array
Views = Sequence[np.ndarray]


class FirstLayer:
    """
    No layer before the linear ones.

    Arguments of its methods: the weights ``own``, the numbers ``below`` that a layer needs for its derivatives, the gradient
    ``grad_hidden`` with respect to its outputs, shape ``(n, n_units)``, and ``running``, the number of sequences that have
    each step, which only recurrent layers have (see :mod:`~sb3_grpo.arithmetic.machine_code.recurrent`).
    """

    #: Number of inputs, and of outputs, of a layer before the linear ones
    n_inputs: int
    n_units: int
    #: Number of layers before the linear ones
    n_layers = 0
    #: Whether its outputs pass through the activation function
    is_activated = False
    #: Number of entries of a state of the memory: the hidden state, and for an LSTM the cell state
    state_size = 0

    @property
    def acting_entry_points(self) -> tuple[EntryPoint, ...]:
        """The functions that acting calls."""
        return ()

    def update_entry_points(self, rule: UpdateRule) -> tuple[EntryPoint, ...]:
        """:return: The functions that an update calls besides"""
        return ()

    def weights(self, parameters: np.ndarray) -> Views:
        """:return: Views of its own weights and biases, and last of the parameters of the linear layers"""
        return (parameters,)

    def n_own_values(self, n: int, n_sequences: int) -> int:
        """:return: Number of numbers for ``n`` rows, besides its inputs and its outputs"""
        return 0

    def split(self, values: np.ndarray, n: int, running: np.ndarray) -> Views:
        """:return: Views of what its derivatives need, and last of the numbers of the linear layers"""
        return (values,)

    def forward(self, own: Views, below: Views, above: np.ndarray, running: np.ndarray, states: np.ndarray) -> None:
        """Compute the outputs, which are the first numbers ``above``. The first ``states`` are those before the steps."""

    def hidden_rows(self, n: int) -> np.ndarray:
        """:return: Memory for derivatives of ``n`` outputs or with respect to them, shape ``(n, n_units)``"""
        return np.empty((n, self.n_units), np.float32) if self.n_layers > 0 else NO_ROWS

    def backward(self, own: Views, below: Views, grad_hidden: np.ndarray, grad_own: Views, running: np.ndarray) -> None:
        """Compute the gradient with respect to its weights and biases."""

    def tangent(self, own: Views, below: Views, along: Views, hidden: np.ndarray, running: np.ndarray) -> None:
        """Compute the derivatives of its outputs in a direction of its weights and biases."""


@dataclass(frozen=True, eq=False)
class Convolution(FirstLayer):
    """A convolution. Its ``patches`` are those of :func:`~sb3_grpo.arithmetic.machine_code.layers.take_patches`."""

    n_inputs: int
    n_units: int
    patches: np.ndarray

    n_layers = 1
    is_activated = True
    acting_entry_points = (layers.convolve,)

    def update_entry_points(self, rule: UpdateRule) -> tuple[EntryPoint, ...]:
        return (layers.convolve_backward,)

    @cached_property
    def _patches_transposed(self) -> np.ndarray:
        return np.ascontiguousarray(self.patches.T)

    def weights(self, parameters: np.ndarray) -> Views:
        n_seen, n_positions = self.patches.shape
        n_channels = self.n_units // n_positions
        split = n_channels * n_seen
        return (
            parameters[:split].reshape(n_channels, -1),
            parameters[split : split + n_channels],
            parameters[split + n_channels :],
        )

    def split(self, values: np.ndarray, n: int, running: np.ndarray) -> Views:
        split = n * self.n_inputs
        return values[:split].reshape(n, -1), values[split:]

    def forward(self, own: Views, below: Views, above: np.ndarray, running: np.ndarray, states: np.ndarray) -> None:
        n = len(below[0])
        layers.convolve.run(self.patches, *below, *own, above[: n * self.n_units].reshape(n, -1))

    def backward(self, own: Views, below: Views, grad_hidden: np.ndarray, grad_own: Views, running: np.ndarray) -> None:
        layers.convolve_backward.run(self._patches_transposed, *below, grad_hidden, *grad_own)

    def tangent(self, own: Views, below: Views, along: Views, hidden: np.ndarray, running: np.ndarray) -> None:
        layers.convolve.run(self.patches, *below, *along, hidden)


@dataclass(frozen=True, eq=False)
class Recurrent(FirstLayer):
    """A recurrent layer. Its ``cell`` is ``LSTM`` or ``GRU``."""

    n_inputs: int
    n_units: int
    cell: int

    n_layers = 1
    acting_entry_points = (recurrent.forward,)

    @cached_property
    def state_size(self) -> int:  # type: ignore[override]
        return self.n_units * (2 if self.cell == recurrent.LSTM else 1)

    def update_entry_points(self, rule: UpdateRule) -> tuple[EntryPoint, ...]:
        return recurrent.backward, *((recurrent.forward_tangent,) if rule == "natural" else ())

    def weights(self, parameters: np.ndarray) -> Views:
        n_gates = (4 if self.cell == recurrent.LSTM else 3) * self.n_units
        of_inputs, of_states = n_gates * self.n_inputs, n_gates * self.n_units
        w, v, b, c, linear = np.split(parameters, np.cumsum((of_inputs, of_states, n_gates, n_gates)))
        return w.reshape(n_gates, -1), v.reshape(n_gates, -1), b, c, linear

    def n_own_values(self, n: int, n_sequences: int) -> int:
        return 3 * n * self.n_units + (n + n_sequences) * self.state_size

    def split(self, values: np.ndarray, n: int, running: np.ndarray) -> Views:
        """:return: Views of inputs, gates, cells and hidden states, and of the numbers of the linear layers"""
        n_units, n_states = self.n_units, n + int(running[0])
        shapes = (n, self.n_inputs), (n, 4 * n_units), (n_states, self.state_size - n_units), (n_states, n_units)
        views, at = [], 0
        for n_rows, n_columns in shapes:
            views.append(values[at : at + n_rows * n_columns].reshape(n_rows, n_columns))
            at += n_rows * n_columns
        return *views, values[at - n * n_units :]  # the states after the steps are the outputs

    def forward(self, own: Views, below: Views, above: np.ndarray, running: np.ndarray, states: np.ndarray) -> None:
        *_, cells, hidden = below
        m = running[0]
        hidden[:m], cells[:m] = states[:m, : self.n_units], states[:m, self.n_units :]
        recurrent.forward.run(self.cell, running, *own, *below)

    def backward(self, own: Views, below: Views, grad_hidden: np.ndarray, grad_own: Views, running: np.ndarray) -> None:
        recurrent.backward.run(self.cell, running, own[1], *below, grad_hidden, *grad_own)

    def tangent(self, own: Views, below: Views, along: Views, hidden: np.ndarray, running: np.ndarray) -> None:
        recurrent.forward_tangent.run(self.cell, running, own[1], *below, *along, hidden)
