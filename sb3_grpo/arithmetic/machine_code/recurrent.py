"""
A recurrent layer before the linear layers: an LSTM or a GRU, as in :class:`torch.nn.LSTM` and :class:`torch.nn.GRU`.

Symbols: ``n`` steps of ``m`` sequences, ``u`` units. The steps are rows, ordered by time: first the first steps of all
sequences, then the second steps of those that have one, and so on. Sequences stand in the order of their length, the longest
first, so no row is empty. The functions take the same arguments:

- ``cell``: ``LSTM`` or ``GRU``;
- ``running``: number of sequences that have each step, not increasing;
- ``w``, ``v``, ``b`` and ``c``: the weights ``W`` for inputs ``x``, ``V`` for hidden states ``h``, and their biases, with
  ``4 u`` rows for an LSTM (in the order ``i, f, g, o``) and ``3 u`` for a GRU (``r, z, n``);
- ``inputs``: ``x``, shape ``(n, n_inputs)``;
- ``gates``: values of the gates, shape ``(n, 4 u)``. For a GRU, the last quarter is ``q = V_n h' + c_n``;
- ``cells``: the cell states before the first steps, and after each step, shape ``(m + n, u)``; no columns for a GRU;
- ``hidden``: hidden states likewise.

With ``s = W x + b + V h' + c`` and ``'`` for the state before the step: an LSTM (Hochreiter & Schmidhuber 1997) has
``i, f, o = sigmoid(s)``, ``g = tanh(s)``, ``c = f c' + i g``, ``h = o tanh(c)``; a GRU (https://arxiv.org/abs/1406.1078) has
``r, z = sigmoid(s)``, ``n = tanh(W_n x + b_n + r q)``, ``h = (1 - z) n + z h'``.
"""

import numpy as np

from sb3_grpo.arithmetic.machine_code.jit import entry_point, inner
from sb3_grpo.arithmetic.machine_code.layers import ONE, tanh
from sb3_grpo.arithmetic.machine_code.linear_algebra import (
    ZERO,
    add_products,
    fill_with_zeros,
    matmul,
    matmul_transposed,
    transpose,
    transposed_matmul,
)

LSTM, GRU = 0, 1

HALF = np.float32(0.5)
#: Types of the weights and biases
WEIGHTS = "f4[:, ::1], f4[:, ::1], f4[::1], f4[::1]"


@inner
def sigmoid(values: np.ndarray) -> None:
    """``(1 + tanh(x / 2)) / 2`` of any numbers with one axis, in place."""
    for i in range(len(values)):
        values[i] *= HALF
    tanh(values)
    for i in range(len(values)):
        values[i] = HALF + HALF * values[i]


@inner
def take_states_before(running: np.ndarray, hidden: np.ndarray, previous: np.ndarray) -> None:
    """Write the hidden state before each step into ``previous``, shape ``(n, u)``."""
    before, at, row = 0, running[0], 0
    for n in running:
        for i in range(n):
            for j in range(hidden.shape[1]):
                previous[row, j] = hidden[before + i, j]
            row += 1
        before, at = at, at + n


@entry_point(f"void(i8, i8[::1], {WEIGHTS}, f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def forward(
    cell: int,
    running: np.ndarray,
    w: np.ndarray,
    v: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    inputs: np.ndarray,
    gates: np.ndarray,
    cells: np.ndarray,
    hidden: np.ndarray,
) -> None:
    """
    Compute ``gates``, and the states after each step.

    The products of less than 16 rows are sums in order, as those of the linear layers, so that an environment's actions do not
    depend on how many others act with it.
    """
    u, n_sums = hidden.shape[1], len(b)
    sums, transposed = np.empty((len(inputs), n_sums), np.float32), np.empty((u, n_sums), np.float32)
    recurrent = np.empty((running[0], n_sums), np.float32)
    matmul_transposed(inputs, w, sums)
    transpose(v, transposed)
    before, at, row = 0, running[0], 0
    for n in running:
        products = recurrent[:n]
        if n >= 16:
            matmul(hidden[before : before + n], transposed, products)
        else:
            fill_with_zeros(products)
            add_products(hidden[before : before + n], transposed, products)
        for i in range(n):
            gate, x, y = gates[row], sums[row], products[i]
            for j in range(n_sums if cell == LSTM else 2 * u):
                gate[j] = x[j] + b[j] + y[j] + c[j]
            sigmoid(gate[: 2 * u])
            new, old = hidden[at + i], hidden[before + i]
            if cell == LSTM:
                tanh(gate[2 * u : 3 * u])
                sigmoid(gate[3 * u :])
                state, old = cells[at + i], cells[before + i]
                for j in range(u):
                    state[j] = gate[u + j] * old[j] + gate[j] * gate[2 * u + j]
                    new[j] = state[j]
                tanh(new)
                for j in range(u):
                    new[j] *= gate[3 * u + j]
            else:
                for j in range(u):
                    gate[3 * u + j] = y[2 * u + j] + c[2 * u + j]
                    gate[2 * u + j] = x[2 * u + j] + b[2 * u + j] + gate[j] * gate[3 * u + j]
                tanh(gate[2 * u : 3 * u])
                for j in range(u):
                    new[j] = gate[2 * u + j] + gate[u + j] * (old[j] - gate[2 * u + j])
            row += 1
        before, at = at, at + n


@entry_point(f"void(i8, i8[::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], {WEIGHTS})")
def backward(
    cell: int,
    running: np.ndarray,
    v: np.ndarray,
    inputs: np.ndarray,
    gates: np.ndarray,
    cells: np.ndarray,
    hidden: np.ndarray,
    grad_hidden: np.ndarray,
    grad_w: np.ndarray,
    grad_v: np.ndarray,
    grad_b: np.ndarray,
    grad_c: np.ndarray,
) -> None:
    """
    The chain rule through :func:`forward`, back through time over whole sequences (Werbos 1990).

    :param grad_hidden: Gradient with respect to the hidden states after each step, as far as the layers above use them, shape
        ``(n, u)``
    :param grad_w: Receives the gradient, as the arguments that follow
    """
    n_rows, u = grad_hidden.shape
    of_inputs = np.empty((n_rows, len(grad_b)), np.float32)  # gradient with respect to W x + b
    of_states = np.empty((n_rows, len(grad_b)), np.float32)  # and to V h + c
    squashed = cells[running[0] :].copy()
    tanh(squashed.reshape(-1))
    # What later steps add for each sequence: to the gradient with respect to h, and beside the gates, to c or to h
    later, beside = np.empty((running[0], u), np.float32), np.empty((running[0], u), np.float32)
    fill_with_zeros(later)
    fill_with_zeros(beside)
    at = len(hidden)
    for step in range(len(running) - 1, -1, -1):
        n = running[step]
        at -= n
        before, first = at - (running[step - 1] if step > 0 else n), at - running[0]
        for i in range(n):
            row = first + i
            gate, x, y, up, carried = gates[row], of_inputs[row], of_states[row], later[i], beside[i]
            old = hidden[before + i]
            for j in range(u):
                up[j] += grad_hidden[row, j]
            if cell == LSTM:
                tanh_c, old = squashed[row], cells[before + i]
                for j in range(u):
                    gi, gf, gg, go, t = gate[j], gate[u + j], gate[2 * u + j], gate[3 * u + j], tanh_c[j]
                    d = carried[j] + up[j] * go * (ONE - t * t)
                    x[j] = d * gg * gi * (ONE - gi)
                    x[u + j] = d * old[j] * gf * (ONE - gf)
                    x[2 * u + j] = d * gi * (ONE - gg * gg)
                    x[3 * u + j] = up[j] * t * go * (ONE - go)
                    carried[j] = d * gf
                for j in range(4 * u):
                    y[j] = x[j]
            else:
                for j in range(u):
                    gr, gz, gn = gate[j], gate[u + j], gate[2 * u + j]
                    d = up[j] * (ONE - gz) * (ONE - gn * gn)
                    x[j] = y[j] = d * gate[3 * u + j] * gr * (ONE - gr)
                    x[u + j] = y[u + j] = up[j] * (old[j] - gn) * gz * (ONE - gz)
                    x[2 * u + j], y[2 * u + j] = d, d * gr
                    carried[j] = up[j] * gz
        matmul(of_states[first : first + n], v, later[:n])
        if cell == GRU:
            for i in range(n):
                for j in range(u):
                    later[i, j] += beside[i, j]
    previous = np.empty((n_rows, u), np.float32)
    take_states_before(running, hidden, previous)
    transposed_matmul(of_inputs, inputs, grad_w)
    transposed_matmul(of_states, previous, grad_v)
    for j in range(len(grad_b)):
        grad_b[j], grad_c[j] = ZERO, ZERO
    for row in range(n_rows):
        for j in range(len(grad_b)):
            grad_b[j] += of_inputs[row, j]
            grad_c[j] += of_states[row, j]


@entry_point(f"void(i8, i8[::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], {WEIGHTS}, f4[:, ::1])")
def forward_tangent(
    cell: int,
    running: np.ndarray,
    v: np.ndarray,
    inputs: np.ndarray,
    gates: np.ndarray,
    cells: np.ndarray,
    hidden: np.ndarray,
    along_w: np.ndarray,
    along_v: np.ndarray,
    along_b: np.ndarray,
    along_c: np.ndarray,
    tangent: np.ndarray,
) -> None:
    """
    The derivative of the hidden states in a direction of the parameters, carried forward in time, as in
    :func:`~sb3_grpo.arithmetic.machine_code.layers.forward_tangent`.

    :param along_w: Direction, as the arguments that follow
    :param tangent: Receives the derivatives of the hidden states after each step, shape ``(n, u)``
    """
    n_rows, u = tangent.shape
    of_inputs, of_states = np.empty((n_rows, len(along_b)), np.float32), np.empty((n_rows, len(along_b)), np.float32)
    previous, transposed = np.empty((n_rows, u), np.float32), np.empty((u, len(along_b)), np.float32)
    take_states_before(running, hidden, previous)
    matmul_transposed(inputs, along_w, of_inputs)
    matmul_transposed(previous, along_v, of_states)
    transpose(v, transposed)
    squashed = cells[running[0] :].copy()
    tanh(squashed.reshape(-1))
    recurrent = np.empty((running[0], len(along_b)), np.float32)
    along_h, along_cell = np.empty((running[0], u), np.float32), np.empty((running[0], u), np.float32)
    fill_with_zeros(along_h)
    fill_with_zeros(along_cell)
    before, at, row = 0, running[0], 0
    for n in running:
        matmul(along_h[:n], transposed, recurrent[:n])
        for i in range(n):
            gate, x, y, dh, dc = gates[row], of_inputs[row], of_states[row], along_h[i], along_cell[i]
            for j in range(len(along_b)):
                x[j] += along_b[j]
                y[j] += along_c[j] + recurrent[i, j]
            if cell == LSTM:
                tanh_c, old = squashed[row], cells[before + i]
                for j in range(u):
                    gi, gf, gg, go, t = gate[j], gate[u + j], gate[2 * u + j], gate[3 * u + j], tanh_c[j]
                    di, df = gi * (ONE - gi) * (x[j] + y[j]), gf * (ONE - gf) * (x[u + j] + y[u + j])
                    dg = (ONE - gg * gg) * (x[2 * u + j] + y[2 * u + j])
                    do = go * (ONE - go) * (x[3 * u + j] + y[3 * u + j])
                    dc[j] = gf * dc[j] + df * old[j] + di * gg + gi * dg
                    dh[j] = do * t + go * (ONE - t * t) * dc[j]
            else:
                old = hidden[before + i]
                for j in range(u):
                    gr, gz, gn = gate[j], gate[u + j], gate[2 * u + j]
                    dr, dz = gr * (ONE - gr) * (x[j] + y[j]), gz * (ONE - gz) * (x[u + j] + y[u + j])
                    dn = (ONE - gn * gn) * (x[2 * u + j] + dr * gate[3 * u + j] + gr * y[2 * u + j])
                    dh[j] = (ONE - gz) * dn + gz * dh[j] + dz * (old[j] - gn)
            for j in range(u):
                tangent[row, j] = dh[j]
            row += 1
        before, at = at, at + n
