"""
The network of a policy: a multilayer perceptron, of which the first layer may be a convolution.

Symbols: ``n`` rows, ``k`` outputs. Layer ``l`` gives ``x_l = phi(x_(l-1)) W_l^T + b_l``, where ``phi`` is the activation
function, and the identity for the inputs ``x_0``. The numbers ``x_l`` of all layers are in one array, layer after layer, and
so are the weights and biases, as in :class:`torch.nn.Linear`.

A convolution comes before the linear layers. It has functions of its own, and its outputs are the inputs of the linear layers,
which are then activated first (``is_hidden``). So may a recurrent layer, whose outputs are not activated, see
:mod:`~sb3_grpo.arithmetic.machine_code.recurrent`.

Arguments that :func:`forward` and :func:`convolve` explain mean the same in other functions. :func:`backward` and
:func:`forward_tangent` take ``values`` as :func:`forward` has left them.
"""

import numpy as np

from sb3_grpo.arithmetic.machine_code.jit import entry_point, inner
from sb3_grpo.arithmetic.machine_code.linear_algebra import ZERO, fill_with_zeros, matmul, matmul_transposed, transposed_matmul

TANH, RELU = 0, 1

ONE = np.float32(1.0)
#: Standardised observations are clipped to this range, as in ``normalization``, which a test compares.
MAX_STANDARDISED = 10.0
#: ``tanh(x) = x P(x^2) / Q(x^2)`` for ``|x| <= 9``, the constant term first: the fit with the smallest largest relative error,
#: 2e-8, for polynomials of degree 4. In single precision the error is below 4e-7.
P0, P1, P2, P3, P4 = (np.float32(c) for c in (0.99999998, 0.13381019, 0.0034955800, 2.0608955e-05, 1.3354498e-08))
Q0, Q1, Q2, Q3, Q4 = (np.float32(c) for c in (1.0, 0.46714334, 0.025876951, 0.00032856218, 7.7764887e-07))
TANH_LIMIT = np.float32(9.0)


@entry_point("void(f4[::1], f4[::1], f8[:, ::1], f4[:, ::1])")
def standardise(shift: np.ndarray, scale: np.ndarray, observations: np.ndarray, features: np.ndarray) -> None:
    """
    ``clip((x - shift) scale, -10, 10)``.

    :param shift: Shift of each input; empty to take the observations as they are
    :param observations: Observations in double precision, shape ``(n, n_inputs)``
    :param features: Receives the standardised observations, same shape
    """
    for i in range(observations.shape[0]):
        for j in range(observations.shape[1]):
            x = observations[i, j]
            if len(shift) > 0:
                x = (x - shift[j]) * scale[j]
                x = MAX_STANDARDISED if x > MAX_STANDARDISED else x
                x = -MAX_STANDARDISED if x < -MAX_STANDARDISED else x
            features[i, j] = x


@inner
def tanh(values: np.ndarray) -> None:
    """The hyperbolic tangent of any numbers with one axis, in place."""
    for i in range(len(values)):
        x = values[i]
        x = TANH_LIMIT if x > TANH_LIMIT else x  # NaN stays NaN
        x = -TANH_LIMIT if x < -TANH_LIMIT else x
        u = x * x
        p = (((P4 * u + P3) * u + P2) * u + P1) * u + P0
        q = (((Q4 * u + Q3) * u + Q2) * u + Q1) * u + Q0
        values[i] = x * p / q


@inner
def activate(values: np.ndarray, activation: int) -> None:
    """Apply the activation function in place to any numbers with one axis."""
    if activation == TANH:
        tanh(values)
    else:
        for i in range(len(values)):
            values[i] = ZERO if values[i] < ZERO else values[i]


@inner
def activate_backward(gradient: np.ndarray, values: np.ndarray, activation: int) -> None:
    """
    The chain rule through :func:`activate`, in place: ``d tanh(x)/dx = 1 - tanh(x)^2``, and 1 or 0 for ReLU.

    :param gradient: Gradient with respect to the values; becomes that with respect to the arguments
    :param values: Values of the function
    """
    if activation == TANH:
        for i in range(len(values)):
            gradient[i] *= ONE - values[i] * values[i]
    else:
        for i in range(len(values)):
            gradient[i] = gradient[i] if values[i] > ZERO else ZERO


@entry_point("void(i8[::1], i8, b1, f4[::1], f4[::1], i8)")
def forward(sizes: np.ndarray, activation: int, is_hidden: bool, parameters: np.ndarray, values: np.ndarray, n: int) -> None:
    """
    Compute the numbers ``x_l`` of all layers from those of the first. Those before the last one are activated on the way.

    :param sizes: Number of inputs, of the units of each hidden layer, and of outputs
    :param activation: ``TANH`` or ``RELU``
    :param is_hidden: Whether the inputs are those of a hidden layer, such as a convolution, which are activated first
    :param parameters: Weight and bias of each layer
    :param values: The inputs, row by row, and space for the numbers of the other layers
    :param n: Number of rows
    """
    start, stop, at = 0, n * sizes[0], 0
    for layer in range(1, len(sizes)):
        n_in, n_out = sizes[layer - 1], sizes[layer]
        if layer > 1 or is_hidden:
            activate(values[start:stop], activation)
        inputs = values[start:stop].reshape(n, n_in)
        start, stop = stop, stop + n * n_out
        split = at + n_out * n_in
        outputs, bias = values[start:stop].reshape(n, n_out), parameters[split : split + n_out]
        matmul_transposed(inputs, parameters[at:split].reshape(n_out, n_in), outputs)
        for i in range(n):
            for j in range(n_out):
                outputs[i, j] += bias[j]
        at = split + n_out


@entry_point("void(i8[::1], i8, b1, f4[::1], f4[::1], f4[:, ::1], f4[::1], f4[:, ::1])")
def backward(
    sizes: np.ndarray,
    activation: int,
    is_hidden: bool,
    parameters: np.ndarray,
    values: np.ndarray,
    grad_outputs: np.ndarray,
    gradient: np.ndarray,
    grad_inputs: np.ndarray,
) -> None:
    """
    The chain rule through :func:`forward` (backpropagation, Rumelhart, Hinton & Williams 1986): with ``g_l`` the gradient with
    respect to ``x_l``, ``dW_l = g_l^T phi(x_(l-1))``, ``db_l = sum g_l``, ``g_(l-1) = phi'(x_(l-1)) g_l W_l``.

    :param grad_outputs: Gradient with respect to the outputs, shape ``(n, k)``
    :param gradient: Receives the gradient with respect to the weights and biases
    :param grad_inputs: Receives the gradient with respect to the outputs of the layer before, shape ``(n, n_inputs)``; no rows
        without one
    """
    n = len(grad_outputs)
    stop, at = 0, 0
    for layer in range(1, len(sizes)):
        stop += n * sizes[layer - 1]
        at += sizes[layer] * (sizes[layer - 1] + 1)
    grad = grad_outputs
    for layer in range(len(sizes) - 1, 0, -1):
        n_in, n_out = sizes[layer - 1], sizes[layer]
        start, split = stop - n * n_in, at - n_out
        grad_bias = gradient[split:at]
        for j in range(n_out):
            grad_bias[j] = ZERO
        for i in range(n):
            for j in range(n_out):
                grad_bias[j] += grad[i, j]
        at = split - n_out * n_in
        transposed_matmul(grad, values[start:stop].reshape(n, n_in), gradient[at:split].reshape(n_out, n_in))
        if layer > 1 or len(grad_inputs) > 0:
            below = grad_inputs if layer == 1 else np.empty((n, n_in), np.float32)
            matmul(grad, parameters[at:split].reshape(n_out, n_in), below)
            if layer > 1 or is_hidden:
                activate_backward(below.reshape(-1), values[start:stop], activation)
            grad = below
        stop = start


@entry_point("void(i8[::1], i8, b1, f4[::1], f4[::1], f4[::1], f4[:, ::1], f4[:, ::1])")
def forward_tangent(
    sizes: np.ndarray,
    activation: int,
    is_hidden: bool,
    parameters: np.ndarray,
    values: np.ndarray,
    vector: np.ndarray,
    tangent_inputs: np.ndarray,
    tangent: np.ndarray,
) -> None:
    """
    The derivative of the outputs of :func:`forward` in the direction of a vector of parameters (Pearlmutter 1994, "Fast exact
    multiplication by the Hessian"): with ``U_l`` and ``u_l`` the parts of the vector that belong to ``W_l`` and ``b_l``,
    ``t_l = phi'(x_(l-1)) t_(l-1) W_l^T + phi(x_(l-1)) U_l^T + u_l``.

    :param vector: Direction, shape of ``parameters``
    :param tangent_inputs: Derivatives ``t_0`` of the outputs of the layer before, shape ``(n, n_inputs)``, which are
        overwritten; no rows without one, where ``t_0 = 0``
    :param tangent: Receives the derivatives, shape ``(n, k)``
    """
    n = len(tangent)
    start, stop, at = 0, n * sizes[0], 0
    below = tangent_inputs
    for layer in range(1, len(sizes)):
        n_in, n_out = sizes[layer - 1], sizes[layer]
        split = at + n_out * n_in
        above = tangent if layer == len(sizes) - 1 else np.empty((n, n_out), np.float32)
        matmul_transposed(values[start:stop].reshape(n, n_in), vector[at:split].reshape(n_out, n_in), above)
        if len(below) > 0:
            if layer > 1 or is_hidden:
                activate_backward(below.reshape(-1), values[start:stop], activation)
            from_below = np.empty((n, n_out), np.float32)
            matmul_transposed(below, parameters[at:split].reshape(n_out, n_in), from_below)
            for i in range(n):
                for j in range(n_out):
                    above[i, j] += from_below[i, j]
        bias = vector[split : split + n_out]
        for i in range(n):
            for j in range(n_out):
                above[i, j] += bias[j]
        below = above
        start, stop, at = stop, stop + n * n_out, split + n_out


# --- convolutions -----------------------------------------------------------------------------------------------------


@inner
def take_patches(row: np.ndarray, patches: np.ndarray, taken: np.ndarray) -> None:
    """
    :param row: Inputs, shape ``(n_inputs,)``
    :param patches: The inputs that each position sees: their indices, shape ``(n_seen, n_positions)``, or the transpose
    :param taken: Receives these inputs, same shape
    """
    for i in range(patches.shape[0]):
        for j in range(patches.shape[1]):
            taken[i, j] = row[patches[i, j]]


@entry_point("void(i8[:, ::1], f4[:, ::1], f4[:, ::1], f4[::1], f4[:, ::1])")
def convolve(patches: np.ndarray, inputs: np.ndarray, weight: np.ndarray, bias: np.ndarray, outputs: np.ndarray) -> None:
    """
    ``W x + b`` at each position, whose inputs :func:`take_patches` takes.

    :param inputs: Inputs, shape ``(n, n_inputs)``
    :param weight: Weight, shape ``(n_channels, n_seen)``
    :param bias: Bias, shape ``(n_channels,)``
    :param outputs: Receives the outputs, ordered as in torch, channel after channel, shape ``(n, n_channels * n_positions)``
    """
    taken = np.empty(patches.shape, np.float32)
    for i in range(len(inputs)):
        take_patches(inputs[i], patches, taken)
        channels = outputs[i].reshape(len(bias), patches.shape[1])
        matmul(weight, taken, channels)
        for channel in range(len(bias)):
            for position in range(patches.shape[1]):
                channels[channel, position] += bias[channel]


@entry_point("void(i8[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[::1])")
def convolve_backward(
    patches_transposed: np.ndarray, inputs: np.ndarray, grad: np.ndarray, grad_weight: np.ndarray, grad_bias: np.ndarray
) -> None:
    """
    The gradient of :func:`convolve` in its weight and its bias, summed over positions.

    :param patches_transposed: Transpose of ``patches``, shape ``(n_positions, n_seen)``
    :param grad: Gradient with respect to the outputs, shape ``(n, n_channels * n_positions)``
    """
    n_positions = len(patches_transposed)
    taken, part = np.empty(patches_transposed.shape, np.float32), np.empty(grad_weight.shape, np.float32)
    fill_with_zeros(grad_weight)
    for channel in range(len(grad_bias)):
        grad_bias[channel] = ZERO
    for i in range(len(inputs)):
        take_patches(inputs[i], patches_transposed, taken)
        channels = grad[i].reshape(len(grad_bias), n_positions)
        matmul(channels, taken, part)
        for channel in range(len(grad_bias)):
            for seen in range(grad_weight.shape[1]):
                grad_weight[channel, seen] += part[channel, seen]
            for position in range(n_positions):
                grad_bias[channel] += channels[channel, position]
