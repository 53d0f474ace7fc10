"""
The arithmetic of acting and of an update for small networks: functions of numpy arrays that numba compiles.

They are plain Python as well, only slow. :mod:`sb3_grpo.compiled` compiles :func:`act`, :func:`update` and those of the last
section, which call the others. All are in one file, because numba's cache on disk notes a change in the file of a compiled
function, and none in the files of those that it calls.

Symbols: ``n`` transitions, ``k`` outputs of the network, ``d`` components of an action. ``pi`` is the policy that is trained,
``q`` the reference of the KL penalty. Arrays are in single precision and contiguous, a row for each transition.

The outputs of the network are the parameters of the action distribution. Its family is one of

- ``GAUSSIAN``: independent Gaussians (``Box``). Outputs are the means ``mu``; ``log_std`` is a parameter of its own;
- ``CATEGORICAL``: one choice (``Discrete``) or several independent ones (``MultiDiscrete``). Outputs are the logits;
- ``BERNOULLI``: independent yes-or-no choices (``MultiBinary``). Outputs are the logits.

:func:`forward` and :func:`backward` know nothing of the objective. :func:`fisher_product` has :func:`forward_tangent` and the
same :func:`backward`, with the derivatives of the outputs between them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

_Function = TypeVar("_Function", bound=Callable[..., Any])

try:
    from numba.extending import register_jitable
except Exception:  # numba is missing or broken, and nothing will be compiled

    def register_jitable(**_: Any) -> Callable[[_Function], _Function]:
        """:return: A decorator that changes nothing"""
        return lambda function: function


#: Divisions by zero give infinity without a check, which would keep loops from being vectorised. There is no `fastmath`: it is
#: a fifth faster, but code that was just compiled and code from the cache then round differently, so that a seed does not
#: reproduce a run.
OPTIONS: dict[str, Any] = dict(error_model="numpy")
compilable = register_jitable(**OPTIONS)

GAUSSIAN, CATEGORICAL, BERNOULLI = 0, 1, 2
TANH, RELU = 0, 1

#: As in ``losses`` and ``normalization``, which a test compares.
MAX_LOG_RATIO = 20.0
MAX_STANDARDISED = 10.0

ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
HALF_LOG_2_PI = np.float32(0.5 * math.log(2.0 * math.pi))
#: ``tanh(x) = x P(x^2) / Q(x^2)`` for ``|x| <= 9``, the constant term first: the fit with the smallest largest relative error,
#: 2e-8, for polynomials of degree 4. In single precision the error is below 4e-7.
TANH_P = tuple(np.float32(c) for c in (0.99999998, 0.13381019, 0.0034955800, 2.0608955e-05, 1.3354498e-08))
TANH_Q = tuple(np.float32(c) for c in (1.0, 0.46714334, 0.025876951, 0.00032856218, 7.7764887e-07))
TANH_LIMIT = np.float32(9.0)
P0, P1, P2, P3, P4 = TANH_P
Q0, Q1, Q2, Q3, Q4 = TANH_Q


class Network(NamedTuple):
    """
    A multilayer perceptron, of which the first layer may be a convolution, and the action distribution on top of it.

    :param sizes: Number of inputs, of the units of each hidden layer, and of outputs
    :param patches: For a convolution, the inputs that each position sees: their indices, shape ``(n_seen, n_positions)``. Its
        units are ordered as in torch, channel after channel. No columns without a convolution
    :param activation: ``TANH`` or ``RELU``, between the layers
    :param family: ``GAUSSIAN``, ``CATEGORICAL`` or ``BERNOULLI``
    :param n_categories: Number of categories of each choice; empty for other families
    """

    sizes: np.ndarray
    patches: np.ndarray
    activation: int
    family: int
    n_categories: np.ndarray


class Batch(NamedTuple):
    """
    The transitions of an update.

    :param features: Standardised observations, shape ``(n, n_inputs)``
    :param actions: Actions, shape ``(n, d)``
    :param old_log_prob: Log-probabilities under the policy that sampled the actions, shape ``(n,)``
    :param advantages: Advantages, shape ``(n,)``
    :param weights: Weights in the loss, shape ``(n,)``
    :param reference: Outputs of the reference's network, shape ``(n, k)``; no rows without a penalty
    :param reference_log_std: The reference's log standard deviations, shape ``(d,)``; empty for other families
    :param forced: See :func:`forward`
    """

    features: np.ndarray
    actions: np.ndarray
    old_log_prob: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    reference: np.ndarray
    reference_log_std: np.ndarray
    forced: np.ndarray


class Settings(NamedTuple):
    """
    The objective of an update.

    :param clip_range: Lower limit of the importance ratio, as the distance from 1
    :param clip_range_high: Upper limit, likewise
    :param ent_coef: Coefficient of the entropy bonus
    :param kl_coef: Coefficient of the penalty KL(pi || q)
    :param max_grad_norm: Maximum norm of the gradient
    :param max_kl: The update ends at a minibatch with a larger approximate divergence; infinity for no limit
    """

    clip_range: float
    clip_range_high: float
    ent_coef: float
    kl_coef: float
    max_grad_norm: float
    max_kl: float


class Optimizer(NamedTuple):
    """
    The state of Adam. All parameters are in one array, tensor after tensor.

    :param gradient: Gradient, shape ``(n_parameters,)``
    :param exp_avg: First moments, same shape
    :param exp_avg_sq: Second moments, same shape
    :param steps: Number of steps of each tensor so far
    :param bounds: Index of the first number of each tensor, and their total
    :param rates: For each tensor the learning rate, the two decay rates and ``eps``, shape ``(n_tensors, 4)``
    """

    gradient: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    steps: np.ndarray
    bounds: np.ndarray
    rates: np.ndarray


class Metrics(NamedTuple):
    """
    Sums over the minibatches of an epoch, except for ``loss``.

    :param n_minibatches: Number of minibatches
    :param n_steps: Number of those that a gradient step was made with
    :param n: Number of transitions
    :param entropy: Sum of their entropies
    :param approx_kl: Sum of the estimates of the divergence from the old policy
    :param clipped_low: Number of ratios below the clip range
    :param clipped_high: Number of ratios above the clip range
    :param ratio: Sum of the ratios
    :param ratio_squared: Sum of their squares
    :param kl: Sum of the divergences from the reference
    :param surrogate: Sum of the minibatches' mean surrogates
    :param grad_norm: Sum of the norms of the gradients before clipping
    :param loss: Loss of the last minibatch
    """

    n_minibatches: float
    n_steps: float
    n: float
    entropy: float
    approx_kl: float
    clipped_low: float
    clipped_high: float
    ratio: float
    ratio_squared: float
    kl: float
    surrogate: float
    grad_norm: float
    loss: float


N_METRICS = len(Metrics._fields)
N_MINIBATCHES, N_STEPS, N, ENTROPY, APPROX_KL, CLIPPED_LOW, CLIPPED_HIGH = range(7)
RATIO, RATIO_SQUARED, KL, SURROGATE, GRAD_NORM, LOSS = range(7, N_METRICS)

# --- products of matrices ---------------------------------------------------------------------------------------------

# BLAS is no faster for matrices as small as these, and would use threads where one is better. Blocks of four rows by four
# terms of the sums keep what they load in registers, and compilers vectorise the inner loops.


@compilable
def add_products(a: np.ndarray, b: np.ndarray, out: np.ndarray, first: int) -> None:
    """
    Add rows of ``a b`` to those of ``out``, one term of the sums after the other.

    :param a: Shape ``(m, l)``, of any layout
    :param b: Shape ``(l, n)``, contiguous
    :param out: Shape ``(m, n)``, contiguous
    :param first: First row
    """
    for i in range(first, len(a)):
        row = out[i]
        for k in range(len(b)):
            factor, terms = a[i, k], b[k]
            for j in range(len(terms)):
                row[j] += factor * terms[j]


@compilable
def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """
    ``out = a b``.

    :param a: Shape ``(m, l)``, of any layout
    :param b: Shape ``(l, n)``, contiguous
    :param out: Shape ``(m, n)``, contiguous
    """
    m, n_terms = a.shape
    n = b.shape[1]
    out[:] = ZERO
    for i in range(0, m - m % 4, 4):
        o0, o1, o2, o3 = out[i], out[i + 1], out[i + 2], out[i + 3]
        for k in range(0, n_terms - n_terms % 4, 4):
            b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            a00, a01, a02, a03 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
            a10, a11, a12, a13 = a[i + 1, k], a[i + 1, k + 1], a[i + 1, k + 2], a[i + 1, k + 3]
            a20, a21, a22, a23 = a[i + 2, k], a[i + 2, k + 1], a[i + 2, k + 2], a[i + 2, k + 3]
            a30, a31, a32, a33 = a[i + 3, k], a[i + 3, k + 1], a[i + 3, k + 2], a[i + 3, k + 3]
            for j in range(n):
                x0, x1, x2, x3 = b0[j], b1[j], b2[j], b3[j]
                o0[j] += a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3
                o1[j] += a10 * x0 + a11 * x1 + a12 * x2 + a13 * x3
                o2[j] += a20 * x0 + a21 * x1 + a22 * x2 + a23 * x3
                o3[j] += a30 * x0 + a31 * x1 + a32 * x2 + a33 * x3
        for k in range(n_terms - n_terms % 4, n_terms):
            b0 = b[k]
            a00, a10, a20, a30 = a[i, k], a[i + 1, k], a[i + 2, k], a[i + 3, k]
            for j in range(n):
                x0 = b0[j]
                o0[j] += a00 * x0
                o1[j] += a10 * x0
                o2[j] += a20 * x0
                o3[j] += a30 * x0
    add_products(a, b, out, m - m % 4)


@compilable
def matmul_transposed(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """
    ``out = a b^T``.

    :param a: Shape ``(m, l)``, contiguous
    :param b: Shape ``(n, l)``, contiguous
    :param out: Shape ``(m, n)``
    """
    m, n_terms = a.shape
    n = b.shape[0]
    if m >= 4 and n >= 16:  # copying the transposed matrix pays
        transposed = np.empty((n_terms, n), np.float32)
        for first in range(0, n, 16):  # a line of the cache
            for k in range(n_terms):
                for j in range(first, min(first + 16, n)):
                    transposed[k, j] = b[j, k]
        if m >= 16:
            matmul(a, transposed, out)
        else:  # in the order of the loops below
            out[:] = ZERO
            add_products(a, transposed, out, 0)
        return
    for i in range(0, m - m % 4, 4):
        a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
        for j in range(0, n - n % 2, 2):
            b0, b1 = b[j], b[j + 1]
            s00, s10, s20, s30 = ZERO, ZERO, ZERO, ZERO
            s01, s11, s21, s31 = ZERO, ZERO, ZERO, ZERO
            for k in range(n_terms):
                x0, x1, x2, x3 = a0[k], a1[k], a2[k], a3[k]
                y0, y1 = b0[k], b1[k]
                s00 += x0 * y0
                s10 += x1 * y0
                s20 += x2 * y0
                s30 += x3 * y0
                s01 += x0 * y1
                s11 += x1 * y1
                s21 += x2 * y1
                s31 += x3 * y1
            out[i, j], out[i + 1, j], out[i + 2, j], out[i + 3, j] = s00, s10, s20, s30
            out[i, j + 1], out[i + 1, j + 1], out[i + 2, j + 1], out[i + 3, j + 1] = s01, s11, s21, s31
        for j in range(n - n % 2, n):
            b0 = b[j]
            s00, s10, s20, s30 = ZERO, ZERO, ZERO, ZERO
            for k in range(n_terms):
                y0 = b0[k]
                s00 += a0[k] * y0
                s10 += a1[k] * y0
                s20 += a2[k] * y0
                s30 += a3[k] * y0
            out[i, j], out[i + 1, j], out[i + 2, j], out[i + 3, j] = s00, s10, s20, s30
    for i in range(m - m % 4, m):
        a0 = a[i]
        for j in range(n):
            b0 = b[j]
            s00 = ZERO
            for k in range(n_terms):
                s00 += a0[k] * b0[k]
            out[i, j] = s00


# --- the network ------------------------------------------------------------------------------------------------------


@compilable
def activate(values: np.ndarray, activation: int) -> None:
    """
    Apply the activation function in place.

    :param values: Any numbers, one axis
    :param activation: ``TANH`` or ``RELU``
    """
    if activation == TANH:
        for i in range(len(values)):
            x = values[i]
            x = TANH_LIMIT if x > TANH_LIMIT else x  # NaN stays NaN
            x = -TANH_LIMIT if x < -TANH_LIMIT else x
            u = x * x
            p = (((P4 * u + P3) * u + P2) * u + P1) * u + P0
            q = (((Q4 * u + Q3) * u + Q2) * u + Q1) * u + Q0
            values[i] = x * p / q
    else:
        for i in range(len(values)):
            values[i] = ZERO if values[i] < ZERO else values[i]


@compilable
def activate_backward(gradient: np.ndarray, values: np.ndarray, activation: int) -> None:
    """
    The chain rule through :func:`activate`, in place: ``d tanh(x)/dx = 1 - tanh(x)^2``, and 1 or 0 for ReLU.

    :param gradient: Gradient with respect to the values; becomes that with respect to the arguments
    :param values: Values of the function
    :param activation: ``TANH`` or ``RELU``
    """
    if activation == TANH:
        for i in range(len(values)):
            gradient[i] *= ONE - values[i] * values[i]
    else:
        for i in range(len(values)):
            gradient[i] = gradient[i] if values[i] > ZERO else ZERO


@compilable
def weight_shape(network: Network, layer: int) -> tuple[int, int]:
    """
    :param network: Network
    :param layer: Number of the layer, from 1
    :return: Shape of its weight: number of units and of inputs, for a convolution of channels and of inputs of a position
    """
    n_seen, n_positions = network.patches.shape
    if layer == 1 and n_positions > 0:
        return network.sizes[1] // n_positions, n_seen
    return network.sizes[layer], network.sizes[layer - 1]


@compilable
def take_patches(row: np.ndarray, patches: np.ndarray, taken: np.ndarray) -> None:
    """
    :param row: Inputs, shape ``(n_inputs,)``
    :param patches: See :class:`Network`, or the transpose
    :param taken: Receives the inputs that each position sees, same shape
    """
    for i in range(patches.shape[0]):
        for j in range(patches.shape[1]):
            taken[i, j] = row[patches[i, j]]


@compilable
def multiply(network: Network, layer: int, inputs: np.ndarray, weight: np.ndarray, outputs: np.ndarray) -> None:
    """
    ``x W^T``, for a convolution at each position.

    :param network: Network
    :param layer: Number of the layer, from 1
    :param inputs: Inputs ``x`` of the layer, shape ``(n, n_in)``
    :param weight: Weight ``W``, of the shape from :func:`weight_shape`
    :param outputs: Receives the products, shape ``(n, n_out)``
    """
    n_positions = network.patches.shape[1]
    if layer > 1 or n_positions == 0:
        matmul_transposed(inputs, weight, outputs)
        return
    taken = np.empty(network.patches.shape, np.float32)
    for i in range(len(inputs)):
        take_patches(inputs[i], network.patches, taken)
        matmul(weight, taken, outputs[i].reshape(len(weight), n_positions))


@compilable
def multiply_backward(network: Network, layer: int, inputs: np.ndarray, grad: np.ndarray, grad_weight: np.ndarray) -> None:
    """
    The gradient of :func:`multiply` in the weight: ``dW = g^T x``, for a convolution summed over positions.

    :param network: Network
    :param layer: Number of the layer, from 1
    :param inputs: Inputs ``x`` of the layer, shape ``(n, n_in)``
    :param grad: Gradient ``g`` with respect to the products, shape ``(n, n_out)``
    :param grad_weight: Receives the gradient, shape of the weight
    """
    n_positions = network.patches.shape[1]
    if layer > 1 or n_positions == 0:
        matmul(grad.T, inputs, grad_weight)
        return
    taken, part = np.empty(network.patches.T.shape, np.float32), np.empty(grad_weight.shape, np.float32)
    grad_weight[:] = ZERO
    for i in range(len(inputs)):
        take_patches(inputs[i], network.patches.T, taken)
        matmul(grad[i].reshape(len(part), n_positions), taken, part)
        grad_weight += part


@compilable
def add_bias(outputs: np.ndarray, bias: np.ndarray) -> None:
    """
    :param outputs: Outputs of a layer, shape ``(n, n_out)``, to which the bias is added
    :param bias: One number for each unit, or for each channel
    """
    n, n_units = outputs.shape
    if n_units == len(bias):  # a loop that compilers vectorise
        for i in range(n):
            for j in range(n_units):
                outputs[i, j] += bias[j]
        return
    channels = outputs.reshape(n, len(bias), n_units // len(bias))
    for i in range(n):
        for j in range(len(bias)):
            for k in range(channels.shape[2]):
                channels[i, j, k] += bias[j]


@compilable
def add_bias_backward(grad: np.ndarray, grad_bias: np.ndarray) -> None:
    """
    :param grad: Gradient with respect to the outputs of a layer, shape ``(n, n_out)``
    :param grad_bias: Receives that with respect to the bias
    """
    n, n_units = grad.shape
    grad_bias[:] = ZERO
    if n_units == len(grad_bias):
        for i in range(n):
            for j in range(n_units):
                grad_bias[j] += grad[i, j]
        return
    channels = grad.reshape(n, len(grad_bias), n_units // len(grad_bias))
    for i in range(n):
        for j in range(len(grad_bias)):
            for k in range(channels.shape[2]):
                grad_bias[j] += channels[i, j, k]


@compilable
def forward(network: Network, parameters: np.ndarray, values: np.ndarray, n: int, forced: np.ndarray) -> np.ndarray:
    """
    ``x_l = phi(x_(l-1)) W_l^T + b_l`` for each layer ``l``; ``phi`` is the identity for the inputs.

    :param network: Network
    :param parameters: Weight and bias of each layer, as in :class:`torch.nn.Linear` or ``Conv2d``, in one array
    :param values: The inputs, row by row, and space for the values of the layers behind them
    :param n: Number of rows
    :param forced: Logits that action masks put in the place of outputs, and zero elsewhere, see
        :func:`sb3_grpo.masks.forced_logits`, shape ``(n, k)``; no rows without masks
    :return: The outputs, a view of ``values``, shape ``(n, k)``
    """
    sizes = network.sizes
    start, stop, at = 0, n * sizes[0], 0
    for layer in range(1, len(sizes)):
        n_in, n_out = sizes[layer - 1], sizes[layer]
        n_rows, n_columns = weight_shape(network, layer)
        if layer > 1:
            activate(values[start:stop], network.activation)
        inputs = values[start:stop].reshape(n, n_in)
        start, stop = stop, stop + n * n_out
        split = at + n_rows * n_columns
        outputs = values[start:stop].reshape(n, n_out)
        multiply(network, layer, inputs, parameters[at:split].reshape(n_rows, n_columns), outputs)
        add_bias(outputs, parameters[split : split + n_rows])
        at = split + n_rows
    outputs = values[start:stop].reshape(n, sizes[-1])
    for i in range(len(forced)):
        for j in range(sizes[-1]):
            if forced[i, j] != ZERO:
                outputs[i, j] = forced[i, j]
    return outputs


@compilable
def backward(
    network: Network, parameters: np.ndarray, values: np.ndarray, grad_outputs: np.ndarray, gradient: np.ndarray
) -> None:
    """
    The chain rule through :func:`forward` (backpropagation, Rumelhart, Hinton & Williams 1986): with ``g_l`` the gradient with
    respect to ``x_l``, ``dW_l = g_l^T phi(x_(l-1))``, ``db_l = sum g_l``, ``g_(l-1) = phi'(x_(l-1)) g_l W_l``.

    :param network: Network
    :param parameters: As for :func:`forward`
    :param values: As :func:`forward` has left them
    :param grad_outputs: Gradient with respect to the outputs, shape ``(n, k)``
    :param gradient: Receives the gradient with respect to the weights and biases
    """
    sizes = network.sizes
    n = len(grad_outputs)
    stop, at = 0, 0
    for layer in range(1, len(sizes)):
        n_rows, n_columns = weight_shape(network, layer)
        stop += n * sizes[layer - 1]
        at += n_rows * (n_columns + 1)
    grad = grad_outputs
    for layer in range(len(sizes) - 1, 0, -1):
        n_in = sizes[layer - 1]
        n_rows, n_columns = weight_shape(network, layer)
        start = stop - n * n_in
        split = at - n_rows
        add_bias_backward(grad, gradient[split:at])
        at = split - n_rows * n_columns
        inputs = values[start:stop].reshape(n, n_in)
        multiply_backward(network, layer, inputs, grad, gradient[at:split].reshape(n_rows, n_columns))
        if layer > 1:
            grad_inputs = np.empty((n, n_in), np.float32)
            matmul(grad, parameters[at:split].reshape(n_rows, n_columns), grad_inputs)
            activate_backward(grad_inputs.reshape(-1), values[start:stop], network.activation)
            grad = grad_inputs
        stop = start


@compilable
def forward_tangent(network: Network, parameters: np.ndarray, values: np.ndarray, vector: np.ndarray, n: int) -> np.ndarray:
    """
    The derivative of the outputs of :func:`forward` in the direction of a vector of parameters (Pearlmutter 1994, "Fast exact
    multiplication by the Hessian"): with ``U_l`` and ``u_l`` the parts of the vector that belong to ``W_l`` and ``b_l``,
    ``t_l = phi'(x_(l-1)) t_(l-1) W_l^T + phi(x_(l-1)) U_l^T + u_l`` and ``t_0 = 0``.

    :param network: Network
    :param parameters: As for :func:`forward`
    :param values: As :func:`forward` has left them
    :param vector: Direction, shape of ``parameters``
    :param n: Number of rows
    :return: The derivatives, shape ``(n, k)``
    """
    sizes = network.sizes
    start, stop, at = 0, n * sizes[0], 0
    tangent = np.empty((0, 0), np.float32)
    for layer in range(1, len(sizes)):
        n_in, n_out = sizes[layer - 1], sizes[layer]
        n_rows, n_columns = weight_shape(network, layer)
        split = at + n_rows * n_columns
        following = np.empty((n, n_out), np.float32)
        inputs = values[start:stop].reshape(n, n_in)
        multiply(network, layer, inputs, vector[at:split].reshape(n_rows, n_columns), following)
        if layer > 1:
            activate_backward(tangent.reshape(-1), values[start:stop], network.activation)
            from_below = np.empty((n, n_out), np.float32)
            matmul_transposed(tangent, parameters[at:split].reshape(n_rows, n_columns), from_below)
            for i in range(n):
                for j in range(n_out):
                    following[i, j] += from_below[i, j]
        add_bias(following, vector[split : split + n_rows])
        tangent = following
        start, stop, at = stop, stop + n * n_out, split + n_rows
    return tangent


# --- action distributions ---------------------------------------------------------------------------------------------


@compilable
def log_softmax(logits: np.ndarray, n_categories: np.ndarray) -> None:
    """
    ``log p_j = x_j - log sum_i exp(x_i)`` for each choice, in place.

    :param logits: Logits ``x`` of all choices, shape ``(n, k)``; minus infinity forbids a category
    :param n_categories: Number of categories of each choice
    """
    for i in range(len(logits)):
        row = logits[i]
        first = 0
        for size in n_categories:
            largest = row[first]
            for j in range(first + 1, first + size):
                largest = row[j] if row[j] > largest else largest
            total = ZERO
            for j in range(first, first + size):
                total += math.exp(row[j] - largest)
            shift = largest + math.log(total)
            for j in range(first, first + size):
                row[j] -= shift
            first += size


@compilable
def evaluate_categorical(
    log_p: np.ndarray, log_q: np.ndarray, n_categories: np.ndarray, actions: np.ndarray, found: np.ndarray
) -> None:
    """
    ``log p_a``, ``H = -sum_j p_j log p_j`` and ``KL = sum_j p_j (log p_j - log q_j)``, summed over the choices.

    :param log_p: Logarithms of the probabilities, shape ``(n, k)``
    :param log_q: Those of the reference; no rows without one
    :param n_categories: Number of categories of each choice
    :param actions: Chosen categories ``a``, shape ``(n, d)``
    :param found: Receives a row of log-probabilities, one of entropies and one of divergences, shape ``(3, n)``
    """
    has_reference = len(log_q) > 0
    for i in range(len(log_p)):
        log_prob, entropy, kl = ZERO, ZERO, ZERO
        first = 0
        for choice in range(len(n_categories)):
            log_prob += log_p[i, first + int(actions[i, choice])]
            for j in range(first, first + n_categories[choice]):
                p = math.exp(log_p[i, j])
                if p != ZERO:  # a forbidden category adds nothing, instead of 0 * inf
                    entropy -= p * log_p[i, j]
                    if has_reference:
                        kl += p * (log_p[i, j] - log_q[i, j])
            first += n_categories[choice]
        found[0, i], found[1, i], found[2, i] = log_prob, entropy, kl


@compilable
def backward_categorical(
    log_p: np.ndarray,
    log_q: np.ndarray,
    n_categories: np.ndarray,
    actions: np.ndarray,
    grad_found: np.ndarray,
    gradient: np.ndarray,
) -> None:
    """
    The chain rule through :func:`evaluate_categorical` and :func:`log_softmax`: for the logits ``x_j`` of each choice,
    ``d log p_a / dx_j = 1[j = a] - p_j``, ``dH / dx_j = -p_j (log p_j + H)``, ``dKL / dx_j = p_j (log p_j - log q_j - KL)``.

    :param log_p: See :func:`evaluate_categorical`
    :param log_q: See :func:`evaluate_categorical`
    :param n_categories: See :func:`evaluate_categorical`
    :param actions: See :func:`evaluate_categorical`
    :param grad_found: Gradient with respect to the three rows that it gave, shape ``(3, n)``
    :param gradient: Receives the gradient with respect to the logits, shape ``(n, k)``
    """
    has_reference = len(log_q) > 0
    for i in range(len(log_p)):
        grad_log_prob, grad_entropy, grad_kl = grad_found[0, i], grad_found[1, i], grad_found[2, i]
        first = 0
        for choice in range(len(n_categories)):
            stop = first + n_categories[choice]
            entropy, kl = ZERO, ZERO
            for j in range(first, stop):
                p = math.exp(log_p[i, j])
                if p != ZERO:
                    entropy -= p * log_p[i, j]
                    if has_reference:
                        kl += p * (log_p[i, j] - log_q[i, j])
            for j in range(first, stop):
                p = math.exp(log_p[i, j])
                change = -p * grad_log_prob
                if p != ZERO:
                    change -= p * (log_p[i, j] + entropy) * grad_entropy
                    if has_reference:
                        change += p * (log_p[i, j] - log_q[i, j] - kl) * grad_kl
                gradient[i, j] = change
            gradient[i, first + int(actions[i, choice])] += grad_log_prob
            first = stop


@compilable
def evaluate_gaussian(
    means: np.ndarray,
    log_std: np.ndarray,
    reference_means: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    found: np.ndarray,
) -> None:
    """
    With ``z = (a - mu) / sigma``: ``log p = -z^2 / 2 - log sigma - log(2 pi) / 2``, ``H = 1/2 + log(2 pi) / 2 + log sigma``,
    ``KL = log sigma_q - log sigma + (sigma^2 + (mu - mu_q)^2) / (2 sigma_q^2) - 1/2``, summed over the components.

    :param means: Means ``mu``, shape ``(n, d)``
    :param log_std: ``log sigma``, shape ``(d,)``
    :param reference_means: ``mu_q``, shape ``(n, d)``; no rows without a reference
    :param reference_log_std: ``log sigma_q``, shape ``(d,)``
    :param actions: Actions ``a``, shape ``(n, d)``
    :param found: See :func:`evaluate_categorical`
    """
    n, d = actions.shape
    precision = np.exp(-log_std)
    fixed_log_prob, fixed_entropy = ZERO, ZERO
    for j in range(d):
        fixed_log_prob -= log_std[j] + HALF_LOG_2_PI
        fixed_entropy += HALF + HALF_LOG_2_PI + log_std[j]
    for i in range(n):
        log_prob = fixed_log_prob
        for j in range(d):
            z = (actions[i, j] - means[i, j]) * precision[j]
            log_prob -= HALF * z * z
        found[0, i], found[1, i], found[2, i] = log_prob, fixed_entropy, ZERO
    if len(reference_means) > 0:
        precision_q = np.exp(-reference_log_std)
        log_ratio = log_std - reference_log_std
        fixed_kl = ZERO
        for j in range(d):
            fixed_kl += HALF * (math.expm1(log_ratio[j] + log_ratio[j]) - log_ratio[j] - log_ratio[j])
        for i in range(n):
            kl = fixed_kl
            for j in range(d):
                z = (means[i, j] - reference_means[i, j]) * precision_q[j]
                kl += HALF * z * z
            found[2, i] = kl


@compilable
def backward_gaussian(
    means: np.ndarray,
    log_std: np.ndarray,
    reference_means: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    grad_found: np.ndarray,
    gradient: np.ndarray,
    grad_log_std: np.ndarray,
) -> None:
    """
    The chain rule through :func:`evaluate_gaussian`: ``d log p / dmu = z / sigma``, ``d log p / dlog sigma = z^2 - 1``,
    ``dH / dlog sigma = 1``, ``dKL / dmu = (mu - mu_q) / sigma_q^2``, ``dKL / dlog sigma = sigma^2 / sigma_q^2 - 1``.

    :param means: See :func:`evaluate_gaussian`
    :param log_std: See :func:`evaluate_gaussian`
    :param reference_means: See :func:`evaluate_gaussian`
    :param reference_log_std: See :func:`evaluate_gaussian`
    :param actions: See :func:`evaluate_gaussian`
    :param grad_found: See :func:`backward_categorical`
    :param gradient: Receives the gradient with respect to the means, shape ``(n, d)``
    :param grad_log_std: Receives the gradient with respect to ``log_std``, shape ``(d,)``
    """
    n, d = actions.shape
    has_reference = len(reference_means) > 0
    precision = np.exp(-log_std)
    grad_log_std[:] = ZERO
    for i in range(n):
        for j in range(d):
            z = (actions[i, j] - means[i, j]) * precision[j]
            gradient[i, j] = grad_found[0, i] * z * precision[j]
            grad_log_std[j] += grad_found[0, i] * (z * z - ONE) + grad_found[1, i]
    if has_reference:
        precision_q = np.exp(-reference_log_std)
        grow = np.empty(d, np.float32)
        for j in range(d):
            difference = log_std[j] - reference_log_std[j]
            grow[j] = math.expm1(difference + difference)
        for i in range(n):
            for j in range(d):
                distance = (means[i, j] - reference_means[i, j]) * precision_q[j]
                gradient[i, j] += grad_found[2, i] * distance * precision_q[j]
                grad_log_std[j] += grad_found[2, i] * grow[j]


@compilable
def softplus(x: np.float32) -> np.float32:
    """
    :param x: A number
    :return: ``log(1 + exp(x))``
    """
    return math.log1p(math.exp(-abs(x))) + (x if x > ZERO else ZERO)


@compilable
def sigmoid(x: np.float32) -> np.float32:
    """
    :param x: A number
    :return: ``1 / (1 + exp(-x))``
    """
    e = math.exp(-abs(x))
    return (ONE if x >= ZERO else e) / (ONE + e)


@compilable
def evaluate_bernoulli(logits: np.ndarray, reference: np.ndarray, actions: np.ndarray, found: np.ndarray) -> None:
    """
    With ``p = sigmoid(x)`` and ``s(x) = log(1 + exp(x))``: ``log p_a = a x - s(x)``, ``H = s(x) - p x``,
    ``KL = p (x - x_q) - s(x) + s(x_q)``, summed over the components.

    :param logits: Logits ``x`` of a one, shape ``(n, d)``
    :param reference: ``x_q``, shape ``(n, d)``; no rows without a reference
    :param actions: Actions ``a``, zeros and ones, shape ``(n, d)``
    :param found: See :func:`evaluate_categorical`
    """
    has_reference = len(reference) > 0
    for i in range(len(logits)):
        log_prob, entropy, kl = ZERO, ZERO, ZERO
        for j in range(logits.shape[1]):
            x = logits[i, j]
            p, s = sigmoid(x), softplus(x)
            log_prob += actions[i, j] * x - s
            entropy += s - p * x
            if has_reference:
                kl += p * (x - reference[i, j]) - s + softplus(reference[i, j])
        found[0, i], found[1, i], found[2, i] = log_prob, entropy, kl


@compilable
def backward_bernoulli(
    logits: np.ndarray, reference: np.ndarray, actions: np.ndarray, grad_found: np.ndarray, gradient: np.ndarray
) -> None:
    """
    The chain rule through :func:`evaluate_bernoulli`: ``d log p_a / dx = a - p``, ``dH / dx = -x p (1 - p)``,
    ``dKL / dx = (x - x_q) p (1 - p)``.

    :param logits: See :func:`evaluate_bernoulli`
    :param reference: See :func:`evaluate_bernoulli`
    :param actions: See :func:`evaluate_bernoulli`
    :param grad_found: See :func:`backward_categorical`
    :param gradient: Receives the gradient with respect to the logits, shape ``(n, d)``
    """
    has_reference = len(reference) > 0
    for i in range(len(logits)):
        for j in range(logits.shape[1]):
            x = logits[i, j]
            p = sigmoid(x)
            slope = p * sigmoid(-x)
            gradient[i, j] = grad_found[0, i] * (actions[i, j] - p) - grad_found[1, i] * x * slope
            if has_reference:
                gradient[i, j] += grad_found[2, i] * (x - reference[i, j]) * slope


@compilable
def fisher_of_outputs(network: Network, outputs: np.ndarray, log_std: np.ndarray, tangent: np.ndarray) -> None:
    """
    Multiply derivatives of the outputs, in place, by the Fisher matrix of the action distribution: ``t / sigma^2`` for the
    means of a Gaussian, ``p (t - sum_j p_j t_j)`` for each categorical choice, and ``p (1 - p) t`` for a Bernoulli variable.

    :param network: Network
    :param outputs: Its outputs, shape ``(n, k)``
    :param log_std: ``log sigma``, shape ``(d,)``; empty for other families
    :param tangent: Derivatives ``t``, shape ``(n, k)``
    """
    n, k = tangent.shape
    if network.family == GAUSSIAN:
        precision = np.exp(-log_std)
        for i in range(n):
            for j in range(k):
                tangent[i, j] *= precision[j] * precision[j]
    elif network.family == CATEGORICAL:
        p = outputs.copy()
        log_softmax(p, network.n_categories)
        for i in range(n):
            first = 0
            for size in network.n_categories:
                mean = ZERO
                for j in range(first, first + size):
                    p[i, j] = math.exp(p[i, j])
                    mean += p[i, j] * tangent[i, j]
                for j in range(first, first + size):
                    tangent[i, j] = p[i, j] * (tangent[i, j] - mean)
                first += size
    else:
        for i in range(n):
            for j in range(k):
                tangent[i, j] *= sigmoid(outputs[i, j]) * sigmoid(-outputs[i, j])


# --- acting -----------------------------------------------------------------------------------------------------------


@compilable
def n_values(sizes: np.ndarray) -> int:
    """
    :param sizes: Sizes of a network
    :return: Number of values that :func:`forward` has for each row
    """
    total = 0
    for size in sizes:
        total += size
    return total


@compilable
def split_log_std(network: Network, parameters: np.ndarray) -> np.ndarray:
    """
    :param network: Network
    :param parameters: All parameters
    :return: A view of ``log_std``, which comes last, shape ``(d,)``; empty for families without it
    """
    n_actions = network.sizes[-1] if network.family == GAUSSIAN else 0
    return parameters[len(parameters) - n_actions :]


def act(
    network: Network,
    parameters: np.ndarray,
    shift: np.ndarray,
    scale: np.ndarray,
    observations: np.ndarray,
    noise: np.ndarray,
    forced: np.ndarray,
    features: np.ndarray,
    actions: np.ndarray,
    log_prob: np.ndarray,
) -> None:
    """
    Standardise observations, ``clip((x - shift) scale, -10, 10)``, and sample an action for each.

    The noise makes the sample: ``mu + sigma noise`` for a Gaussian, the category with the largest ``p_j / noise_j`` (an
    exponential race), and ``noise < p`` for a Bernoulli variable.

    :param network: Network
    :param parameters: Its parameters, and ``log_std``
    :param shift: Shift of each input; empty to take the observations as they are
    :param scale: Scale of each input
    :param observations: Observations in double precision, shape ``(n, n_inputs)``
    :param noise: Normal, exponential or uniform random numbers, according to the family, shape ``(n, k)``
    :param forced: See :func:`forward`
    :param features: Receives the standardised observations, shape ``(n, n_inputs)``
    :param actions: Receives the actions, shape ``(n, d)``
    :param log_prob: Receives their log-probabilities, shape ``(n,)``
    """
    n, n_inputs = observations.shape
    for i in range(n):
        for j in range(n_inputs):
            x = observations[i, j]
            if len(shift) > 0:
                x = (x - shift[j]) * scale[j]
                x = MAX_STANDARDISED if x > MAX_STANDARDISED else x
                x = -MAX_STANDARDISED if x < -MAX_STANDARDISED else x
            features[i, j] = x
    values = np.empty(n * n_values(network.sizes), np.float32)
    values[: n * n_inputs] = features.reshape(-1)
    outputs = forward(network, parameters, values, n, forced)
    none = np.empty((0, 0), np.float32)
    found = np.empty((3, n), np.float32)
    n_components = actions.shape[1]
    if network.family == GAUSSIAN:
        log_std = split_log_std(network, parameters)
        std = np.exp(log_std)
        for i in range(n):
            for j in range(n_components):
                actions[i, j] = outputs[i, j] + noise[i, j] * std[j]
        evaluate_gaussian(outputs, log_std, none, none[0:0].reshape(-1), actions, found)
    elif network.family == CATEGORICAL:
        log_softmax(outputs, network.n_categories)
        for i in range(n):
            first = 0
            for choice in range(n_components):
                best = ZERO
                actions[i, choice] = ZERO
                for j in range(network.n_categories[choice]):
                    chance = math.exp(outputs[i, first + j]) / noise[i, first + j]
                    if chance > best:
                        best = chance
                        actions[i, choice] = j
                first += network.n_categories[choice]
        evaluate_categorical(outputs, none, network.n_categories, actions, found)
    else:
        for i in range(n):
            for j in range(n_components):
                actions[i, j] = ONE if noise[i, j] < sigmoid(outputs[i, j]) else ZERO
        evaluate_bernoulli(outputs, none, actions, found)
    log_prob[:] = found[0]


# --- updating ---------------------------------------------------------------------------------------------------------


@compilable
def surrogate(
    found: np.ndarray,
    old_log_prob: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    settings: Settings,
    grad_found: np.ndarray,
    metrics: np.ndarray,
) -> float:
    """
    The loss ``1/n sum_t w_t (S_t - c_ent H_t + c_kl KL_t)`` of a minibatch, its derivatives with respect to log-probabilities,
    entropies and divergences, and its metrics. ``S`` is :func:`sb3_grpo.losses.clipped_surrogate`; with ``rho`` the ratio and
    ``A`` the advantage, ``dS / dlog p = -rho A`` where it is not clipped, and 0 elsewhere.

    :param found: Log-probabilities, entropies and divergences, shape ``(3, n)``
    :param old_log_prob: See :class:`Batch`
    :param advantages: See :class:`Batch`
    :param weights: See :class:`Batch`
    :param settings: Objective
    :param grad_found: Receives the derivatives, shape ``(3, n)``
    :param metrics: The :class:`Metrics` of the epoch, to which those of the minibatch are added
    :return: Estimate of the divergence from the old policy
    """
    n = found.shape[1]
    low, high = np.float32(1.0 - settings.clip_range), np.float32(1.0 + settings.clip_range_high)
    change_low, change_high = np.float32(-settings.clip_range), np.float32(settings.clip_range_high)
    limit = np.float32(MAX_LOG_RATIO)
    total_loss, total_entropy, total_kl = 0.0, 0.0, 0.0
    total_approx_kl = 0.0
    for i in range(n):
        log_ratio = found[0, i] - old_log_prob[i]
        bounded = limit if log_ratio > limit else log_ratio
        approx_kl = math.expm1(bounded) - bounded
        bounded = -limit if bounded < -limit else bounded
        ratio = math.exp(bounded)
        clipped = low if ratio < low else ratio
        clipped = high if clipped > high else clipped
        gain, clipped_gain = advantages[i] * ratio, advantages[i] * clipped
        # NaN compares as false, so it stays visible.
        is_flat = gain > clipped_gain or abs(log_ratio) > limit
        loss = -clipped_gain if gain > clipped_gain else -gain
        share = weights[i] / np.float32(n)
        grad_found[0, i] = ZERO if is_flat else -gain * share
        grad_found[1, i] = -np.float32(settings.ent_coef) * share
        grad_found[2, i] = np.float32(settings.kl_coef) * share
        total_loss += share * loss
        total_entropy += share * found[1, i]
        total_kl += share * found[2, i]
        metrics[ENTROPY] += found[1, i]
        metrics[KL] += found[2, i]
        total_approx_kl += float(approx_kl)
        metrics[RATIO] += ratio
        metrics[RATIO_SQUARED] += np.float64(ratio) * ratio
        metrics[CLIPPED_LOW] += ratio - ONE < change_low
        metrics[CLIPPED_HIGH] += ratio - ONE > change_high
    metrics[N_MINIBATCHES] += 1.0
    metrics[N] += n
    metrics[APPROX_KL] += total_approx_kl
    metrics[SURROGATE] += total_loss
    metrics[LOSS] = total_loss
    # A coefficient of zero removes its term, also one that is infinite.
    if settings.ent_coef != 0.0:
        metrics[LOSS] -= settings.ent_coef * total_entropy
    if settings.kl_coef != 0.0:
        metrics[LOSS] += settings.kl_coef * total_kl
    return total_approx_kl / n


@compilable
def clip_gradient(gradient: np.ndarray, max_norm: float) -> float:
    """
    Clip the gradient as :func:`torch.nn.utils.clip_grad_norm_` does.

    :param gradient: Gradient, changed in place
    :param max_norm: Maximum norm
    :return: Norm before clipping
    """
    squares = ZERO
    for i in range(len(gradient)):
        squares += gradient[i] * gradient[i]
    norm = math.sqrt(squares)
    factor = np.float32(max_norm) / (norm + np.float32(1e-6))
    if not factor >= ONE:  # also NaN
        for i in range(len(gradient)):
            gradient[i] *= factor
    return norm


@compilable
def adam(parameters: np.ndarray, optimizer: Optimizer) -> None:
    """
    A step of Adam (https://arxiv.org/abs/1412.6980, algorithm 1) as :class:`torch.optim.Adam` takes it:
    ``m <- beta1 m + (1 - beta1) g``, ``v <- beta2 v + (1 - beta2) g^2``,
    ``theta <- theta - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)``.

    :param parameters: Parameters ``theta``, changed in place
    :param optimizer: Gradient and moments, of which the moments and the number of steps ``t`` change
    """
    for tensor in range(len(optimizer.steps)):
        optimizer.steps[tensor] += ONE
        t = np.float64(optimizer.steps[tensor])
        lr, beta1, beta2 = optimizer.rates[tensor, 0], optimizer.rates[tensor, 1], optimizer.rates[tensor, 2]
        eps = np.float32(optimizer.rates[tensor, 3])
        step_size = np.float32(lr / (1.0 - beta1**t))
        root = np.float32(math.sqrt(1.0 - beta2**t))
        new1, new2, decay2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2), np.float32(beta2)
        first, stop = optimizer.bounds[tensor], optimizer.bounds[tensor + 1]
        theta, g = parameters[first:stop], optimizer.gradient[first:stop]
        m, v = optimizer.exp_avg[first:stop], optimizer.exp_avg_sq[first:stop]
        for i in range(len(theta)):
            m[i] += new1 * (g[i] - m[i])
            v[i] = decay2 * v[i] + new2 * g[i] * g[i]
            theta[i] -= step_size * m[i] / (np.sqrt(v[i]) / root + eps)


@compilable
def take_rows(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """
    :param array: Shape ``(n, k)``
    :param index: Rows to take; ignored if there are no rows at all
    :return: A copy of them
    """
    taken = np.empty((len(index) if len(array) > 0 else 0, array.shape[1]), np.float32)
    for i in range(len(taken)):
        taken[i] = array[index[i]]
    return taken


@compilable
def evaluate(
    network: Network,
    parameters: np.ndarray,
    outputs: np.ndarray,
    reference: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    found: np.ndarray,
) -> None:
    """
    Log-probabilities, entropies and divergences of the action distribution.

    :param network: Network
    :param parameters: Its parameters, and ``log_std``
    :param outputs: Outputs of the network, shape ``(n, k)``; logits of choices become logarithms of probabilities
    :param reference: Those of the reference, which become likewise; no rows without one
    :param reference_log_std: The reference's log standard deviations, shape ``(d,)``
    :param actions: Actions, shape ``(n, d)``
    :param found: See :func:`evaluate_categorical`
    """
    if network.family == CATEGORICAL:
        log_softmax(outputs, network.n_categories)
        log_softmax(reference, network.n_categories)
        evaluate_categorical(outputs, reference, network.n_categories, actions, found)
    elif network.family == GAUSSIAN:
        evaluate_gaussian(outputs, split_log_std(network, parameters), reference, reference_log_std, actions, found)
    else:
        evaluate_bernoulli(outputs, reference, actions, found)


@compilable
def minibatch(
    network: Network,
    parameters: np.ndarray,
    batch: Batch,
    index: np.ndarray,
    settings: Settings,
    gradient: np.ndarray,
    metrics: np.ndarray,
) -> float:
    """
    The loss of a minibatch: its gradient, and its metrics.

    :param network: Network
    :param parameters: Its parameters, and ``log_std``
    :param batch: Transitions of the update
    :param index: Transitions of the minibatch
    :param settings: Objective
    :param gradient: Receives the gradient, shape of ``parameters``; empty if only the metrics are wanted
    :param metrics: See :func:`surrogate`
    :return: Estimate of the divergence from the old policy
    """
    n, n_inputs = len(index), network.sizes[0]
    values = np.empty(n * n_values(network.sizes), np.float32)
    values[: n * n_inputs] = take_rows(batch.features, index).reshape(-1)
    actions, reference = take_rows(batch.actions, index), take_rows(batch.reference, index)
    found, grad_found = np.empty((3, n), np.float32), np.empty((3, n), np.float32)
    outputs = forward(network, parameters, values, n, take_rows(batch.forced, index))
    evaluate(network, parameters, outputs, reference, batch.reference_log_std, actions, found)
    rows = batch.old_log_prob[index], batch.advantages[index], batch.weights[index]
    approx_kl = surrogate(found, rows[0], rows[1], rows[2], settings, grad_found, metrics)
    if len(gradient) == 0:
        return approx_kl
    grad_outputs = np.empty((n, network.sizes[-1]), np.float32)
    if network.family == CATEGORICAL:
        backward_categorical(outputs, reference, network.n_categories, actions, grad_found, grad_outputs)
    elif network.family == GAUSSIAN:
        log_std, grad_log_std = split_log_std(network, parameters), split_log_std(network, gradient)
        backward_gaussian(
            outputs, log_std, reference, batch.reference_log_std, actions, grad_found, grad_outputs, grad_log_std
        )
    else:
        backward_bernoulli(outputs, reference, actions, grad_found, grad_outputs)
    backward(network, parameters, values, grad_outputs, gradient)
    return approx_kl


def update(
    network: Network,
    parameters: np.ndarray,
    optimizer: Optimizer,
    batch: Batch,
    permutation: np.ndarray,
    batch_size: int,
    settings: Settings,
    metrics: np.ndarray,
) -> float:
    """
    Take a gradient step with each minibatch of an epoch.

    :param network: Network
    :param parameters: Its parameters, and ``log_std``, changed in place
    :param optimizer: State of Adam, changed in place
    :param batch: Transitions of the update
    :param permutation: Order of the transitions
    :param batch_size: Minibatch size; the last minibatch may be smaller
    :param settings: Objective
    :param metrics: Receives the :class:`Metrics`, shape ``(N_METRICS,)``
    :return: The approximate divergence of the last minibatch; the update has ended early if it is above the limit
    """
    metrics[:] = 0.0
    approx_kl = 0.0
    for first in range(0, len(permutation), batch_size):
        index = permutation[first : first + batch_size]
        approx_kl = minibatch(network, parameters, batch, index, settings, optimizer.gradient, metrics)
        if approx_kl > settings.max_kl:  # not NaN, which is left to the check of the gradient
            break
        metrics[GRAD_NORM] += clip_gradient(optimizer.gradient, settings.max_grad_norm)
        metrics[N_STEPS] += 1.0
        adam(parameters, optimizer)
    return approx_kl


# --- natural-gradient steps -------------------------------------------------------------------------------------------


def evaluate_all(
    network: Network,
    parameters: np.ndarray,
    batch: Batch,
    settings: Settings,
    gradient: np.ndarray,
    metrics: np.ndarray,
) -> None:
    """
    The loss of all transitions as one minibatch.

    :param network: Network
    :param parameters: Its parameters, and ``log_std``
    :param batch: Transitions of the update
    :param settings: Objective
    :param gradient: Receives the gradient, shape of ``parameters``; empty if only the metrics are wanted
    :param metrics: Receives the :class:`Metrics`, shape ``(N_METRICS,)``
    """
    metrics[:] = 0.0
    minibatch(network, parameters, batch, np.arange(len(batch.advantages)), settings, gradient, metrics)


@compilable
def linearize(network: Network, parameters: np.ndarray, features: np.ndarray, forced: np.ndarray, values: np.ndarray) -> None:
    """
    Compute the values of all layers, which :func:`fisher_product` needs.

    :param network: Network
    :param parameters: Its parameters, and ``log_std``
    :param features: Standardised observations, shape ``(n, n_inputs)``
    :param forced: See :func:`forward`
    :param values: Receives the values of all layers as :func:`forward` leaves them
    """
    values[: features.size] = features.reshape(-1)
    forward(network, parameters, values, len(features), forced)


def fisher_product(
    network: Network, parameters: np.ndarray, values: np.ndarray, n: int, vector: np.ndarray, product: np.ndarray
) -> None:
    """
    The product of the Fisher matrix with a vector, ``1/n sum_t J_t' M_t J_t v``, where ``J`` is the Jacobian of the outputs
    and ``M`` the Fisher matrix of the action distribution. That of ``log sigma`` is twice the identity.

    :param network: Network
    :param parameters: Its parameters, and ``log_std``
    :param values: From :func:`linearize`
    :param n: Number of rows of ``values``
    :param vector: Vector ``v``, shape of ``parameters``
    :param product: Receives the product, same shape
    """
    tangent = forward_tangent(network, parameters, values, vector, n)
    outputs = values[len(values) - n * network.sizes[-1] :].reshape(n, network.sizes[-1])
    fisher_of_outputs(network, outputs, split_log_std(network, parameters), tangent)
    share = ONE / np.float32(n)
    for i in range(n):
        for j in range(tangent.shape[1]):
            tangent[i, j] *= share
    backward(network, parameters, values, tangent, product)
    of_log_std, along = split_log_std(network, product), split_log_std(network, vector)
    for j in range(len(of_log_std)):
        of_log_std[j] = np.float32(2.0) * along[j]


def divergence(
    network: Network, parameters: np.ndarray, before: np.ndarray, features: np.ndarray, forced: np.ndarray
) -> float:
    """
    The mean divergence KL(pi || q) from the policy ``q`` with other parameters.

    :param network: Network
    :param parameters: Parameters of ``pi``
    :param before: Parameters of ``q``
    :param features: Standardised observations, shape ``(n, n_inputs)``
    :param forced: See :func:`forward`
    :return: The divergence, summed over the components of an action
    """
    n, k = len(features), network.sizes[-1]
    values = np.empty(n * n_values(network.sizes), np.float32)
    linearize(network, before, features, forced, values)
    reference = values[len(values) - n * k :].reshape(n, k).copy()
    linearize(network, parameters, features, forced, values)
    outputs = values[len(values) - n * k :].reshape(n, k)
    d = len(network.n_categories) if network.family == CATEGORICAL else k
    found = np.empty((3, n), np.float32)
    evaluate(network, parameters, outputs, reference, split_log_std(network, before), np.zeros((n, d), np.float32), found)
    total = 0.0
    for i in range(n):
        total += np.float64(found[2, i])
    return total / n
