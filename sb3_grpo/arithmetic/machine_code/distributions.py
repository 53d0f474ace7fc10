"""
The action distributions: independent Gaussians, categorical choices, and yes-or-no choices (Bernoulli variables).

Symbols: ``n`` rows, ``k`` outputs of the network, ``d`` components of an action. ``pi`` is the policy that is trained, ``q``
the reference of a KL divergence. The functions of all families take the same arguments, and leave the empty ones alone:

- the outputs, which are the parameters of the distribution, shape ``(n, k)``: means ``mu``, or logits ``x`` of a one, or
  logarithms of probabilities ``p``, which :func:`log_softmax` makes of the logits of choices;
- ``log_std``: logarithms of the standard deviations ``sigma`` of a Gaussian, shape ``(d,)``; else empty;
- ``n_categories``: number of categories of each choice, shape ``(d,)``; else empty;
- the outputs of the reference, shape ``(n, k)``; no rows without one; and ``reference_log_std``, shape ``(d,)``;
- ``actions``: actions ``a``, shape ``(n, d)``;
- ``noise``: random numbers that make the samples, shape ``(n, k)``;
- ``terms``: the terms of the loss, a row of log-probabilities, one of entropies and one of divergences KL(pi || q), shape
  ``(3, n)``; and ``grad_terms``, the gradient with respect to them;
- the gradients with respect to the outputs, shape ``(n, k)``, and to ``log_std``;
- ``tangent``: derivatives ``t`` of the outputs in a direction of parameters, shape ``(n, k)``.

What a function computes, it writes into the last of its arguments.
"""

import math

import numpy as np

from sb3_grpo.arithmetic.machine_code.jit import entry_point, inner

#: Signatures of the functions of a family
SAMPLING = "void(f4[:, ::1], f4[::1], i8[::1], f4[:, ::1], f4[:, ::1])"
EVALUATING = "void(f4[:, ::1], f4[::1], i8[::1], f4[:, ::1], f4[::1], f4[:, ::1], f4[:, ::1])"
BACKWARD = "void(f4[:, ::1], f4[::1], i8[::1], f4[:, ::1], f4[::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[::1])"
FISHER = "void(f4[:, ::1], f4[::1], i8[::1], f4[:, ::1])"

ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
HALF_LOG_2_PI = np.float32(0.5 * math.log(2.0 * math.pi))

# --- Gaussian ---------------------------------------------------------------------------------------------------------


@entry_point(SAMPLING)
def sample_gaussian(
    means: np.ndarray, log_std: np.ndarray, n_categories: np.ndarray, noise: np.ndarray, actions: np.ndarray
) -> None:
    """``a = mu + sigma noise``, with normal noise."""
    for j in range(len(log_std)):
        std = math.exp(log_std[j])
        for i in range(len(means)):
            actions[i, j] = means[i, j] + noise[i, j] * std


@entry_point(EVALUATING)
def evaluate_gaussian(
    means: np.ndarray,
    log_std: np.ndarray,
    n_categories: np.ndarray,
    reference_means: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    terms: np.ndarray,
) -> None:
    """
    With ``z = (a - mu) / sigma``: ``log p = -z^2 / 2 - log sigma - log(2 pi) / 2``, ``H = 1/2 + log(2 pi) / 2 + log sigma``,
    ``KL = log sigma_q - log sigma + (sigma^2 + (mu - mu_q)^2) / (2 sigma_q^2) - 1/2``, summed over the components.
    """
    n, d = actions.shape
    precision = np.empty(d, np.float32)
    fixed_log_prob, fixed_entropy = ZERO, ZERO
    for j in range(d):
        precision[j] = math.exp(-log_std[j])
        fixed_log_prob -= log_std[j] + HALF_LOG_2_PI
        fixed_entropy += HALF + HALF_LOG_2_PI + log_std[j]
    for i in range(n):
        log_prob = fixed_log_prob
        for j in range(d):
            z = (actions[i, j] - means[i, j]) * precision[j]
            log_prob -= HALF * z * z
        terms[0, i], terms[1, i], terms[2, i] = log_prob, fixed_entropy, ZERO
    if len(reference_means) > 0:
        fixed_kl = ZERO
        for j in range(d):
            precision[j] = math.exp(-reference_log_std[j])
            log_ratio = log_std[j] - reference_log_std[j]
            fixed_kl += HALF * (math.expm1(log_ratio + log_ratio) - log_ratio - log_ratio)
        for i in range(n):
            kl = fixed_kl
            for j in range(d):
                z = (means[i, j] - reference_means[i, j]) * precision[j]
                kl += HALF * z * z
            terms[2, i] = kl


@entry_point(BACKWARD)
def backward_gaussian(
    means: np.ndarray,
    log_std: np.ndarray,
    n_categories: np.ndarray,
    reference_means: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    grad_terms: np.ndarray,
    grad_means: np.ndarray,
    grad_log_std: np.ndarray,
) -> None:
    """
    The chain rule through :func:`evaluate_gaussian`: ``d log p / dmu = z / sigma``, ``d log p / dlog sigma = z^2 - 1``,
    ``dH / dlog sigma = 1``, ``dKL / dmu = (mu - mu_q) / sigma_q^2``, ``dKL / dlog sigma = sigma^2 / sigma_q^2 - 1``.
    """
    n, d = actions.shape
    precision, growth = np.empty(d, np.float32), np.empty(d, np.float32)
    for j in range(d):
        precision[j] = math.exp(-log_std[j])
        grad_log_std[j] = ZERO
    for i in range(n):
        for j in range(d):
            z = (actions[i, j] - means[i, j]) * precision[j]
            grad_means[i, j] = grad_terms[0, i] * z * precision[j]
            grad_log_std[j] += grad_terms[0, i] * (z * z - ONE) + grad_terms[1, i]
    if len(reference_means) > 0:
        for j in range(d):
            precision[j] = math.exp(-reference_log_std[j])
            log_ratio = log_std[j] - reference_log_std[j]
            growth[j] = math.expm1(log_ratio + log_ratio)
        for i in range(n):
            for j in range(d):
                distance = (means[i, j] - reference_means[i, j]) * precision[j]
                grad_means[i, j] += grad_terms[2, i] * distance * precision[j]
                grad_log_std[j] += grad_terms[2, i] * growth[j]


@entry_point(FISHER)
def fisher_gaussian(means: np.ndarray, log_std: np.ndarray, n_categories: np.ndarray, tangent: np.ndarray) -> None:
    """Multiply derivatives of the means, in place, by the Fisher matrix: ``t / sigma^2``."""
    for j in range(len(log_std)):
        precision = math.exp(-log_std[j])
        for i in range(len(tangent)):
            tangent[i, j] *= precision * precision


# --- categorical: one choice (Discrete) or several independent ones (MultiDiscrete) -----------------------------------


@entry_point("void(f4[:, ::1], i8[::1])")
def log_softmax(logits: np.ndarray, n_categories: np.ndarray) -> None:
    """``log p_j = x_j - log sum_i exp(x_i)`` for each choice, in place. A logit of minus infinity forbids a category."""
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


@entry_point(SAMPLING)
def sample_categorical(
    log_p: np.ndarray, log_std: np.ndarray, n_categories: np.ndarray, noise: np.ndarray, actions: np.ndarray
) -> None:
    """The category with the largest ``p_j / noise_j``, with exponential noise (an exponential race)."""
    for i in range(len(log_p)):
        first = 0
        for choice in range(len(n_categories)):
            best = ZERO
            actions[i, choice] = ZERO
            for j in range(n_categories[choice]):
                chance = math.exp(log_p[i, first + j]) / noise[i, first + j]
                if chance > best:
                    best = chance
                    actions[i, choice] = j
            first += n_categories[choice]


@entry_point(EVALUATING)
def evaluate_categorical(
    log_p: np.ndarray,
    log_std: np.ndarray,
    n_categories: np.ndarray,
    log_q: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    terms: np.ndarray,
) -> None:
    """``log p_a``, ``H = -sum_j p_j log p_j`` and ``KL = sum_j p_j (log p_j - log q_j)``, summed over the choices."""
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
        terms[0, i], terms[1, i], terms[2, i] = log_prob, entropy, kl


@entry_point(BACKWARD)
def backward_categorical(
    log_p: np.ndarray,
    log_std: np.ndarray,
    n_categories: np.ndarray,
    log_q: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    grad_terms: np.ndarray,
    grad_logits: np.ndarray,
    grad_log_std: np.ndarray,
) -> None:
    """
    The chain rule through :func:`evaluate_categorical` and :func:`log_softmax`: for the logits ``x_j`` of each choice,
    ``d log p_a / dx_j = 1[j = a] - p_j``, ``dH / dx_j = -p_j (log p_j + H)``, ``dKL / dx_j = p_j (log p_j - log q_j - KL)``.
    """
    has_reference = len(log_q) > 0
    for i in range(len(log_p)):
        grad_log_prob, grad_entropy, grad_kl = grad_terms[0, i], grad_terms[1, i], grad_terms[2, i]
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
                grad_logits[i, j] = change
            grad_logits[i, first + int(actions[i, choice])] += grad_log_prob
            first = stop


@entry_point(FISHER)
def fisher_categorical(log_p: np.ndarray, log_std: np.ndarray, n_categories: np.ndarray, tangent: np.ndarray) -> None:
    """Multiply derivatives of the logits, in place, by the Fisher matrix: ``p_j (t_j - sum_i p_i t_i)`` for each choice."""
    for i in range(len(tangent)):
        first = 0
        for size in n_categories:
            mean = ZERO
            for j in range(first, first + size):
                mean += math.exp(log_p[i, j]) * tangent[i, j]
            for j in range(first, first + size):
                tangent[i, j] = math.exp(log_p[i, j]) * (tangent[i, j] - mean)
            first += size


# --- Bernoulli (MultiBinary) ------------------------------------------------------------------------------------------


@inner
def softplus(x: np.float32) -> np.float32:
    """:return: ``log(1 + exp(x))``"""
    return math.log1p(math.exp(-abs(x))) + (x if x > ZERO else ZERO)


@inner
def sigmoid(x: np.float32) -> np.float32:
    """:return: ``1 / (1 + exp(-x))``"""
    e = math.exp(-abs(x))
    return (ONE if x >= ZERO else e) / (ONE + e)


@entry_point(SAMPLING)
def sample_bernoulli(
    logits: np.ndarray, log_std: np.ndarray, n_categories: np.ndarray, noise: np.ndarray, actions: np.ndarray
) -> None:
    """``a = 1[noise < p]``, with uniform noise."""
    for i in range(len(logits)):
        for j in range(logits.shape[1]):
            actions[i, j] = ONE if noise[i, j] < sigmoid(logits[i, j]) else ZERO


@entry_point(EVALUATING)
def evaluate_bernoulli(
    logits: np.ndarray,
    log_std: np.ndarray,
    n_categories: np.ndarray,
    reference: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    terms: np.ndarray,
) -> None:
    """
    With ``p = sigmoid(x)`` and ``s(x) = log(1 + exp(x))``: ``log p_a = a x - s(x)``, ``H = s(x) - p x``,
    ``KL = p (x - x_q) - s(x) + s(x_q)``, summed over the components.
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
        terms[0, i], terms[1, i], terms[2, i] = log_prob, entropy, kl


@entry_point(BACKWARD)
def backward_bernoulli(
    logits: np.ndarray,
    log_std: np.ndarray,
    n_categories: np.ndarray,
    reference: np.ndarray,
    reference_log_std: np.ndarray,
    actions: np.ndarray,
    grad_terms: np.ndarray,
    grad_logits: np.ndarray,
    grad_log_std: np.ndarray,
) -> None:
    """
    The chain rule through :func:`evaluate_bernoulli`: ``d log p_a / dx = a - p``, ``dH / dx = -x p (1 - p)``,
    ``dKL / dx = (x - x_q) p (1 - p)``.
    """
    has_reference = len(reference) > 0
    for i in range(len(logits)):
        for j in range(logits.shape[1]):
            x = logits[i, j]
            p = sigmoid(x)
            slope = p * sigmoid(-x)
            grad_logits[i, j] = grad_terms[0, i] * (actions[i, j] - p) - grad_terms[1, i] * x * slope
            if has_reference:
                grad_logits[i, j] += grad_terms[2, i] * (x - reference[i, j]) * slope


@entry_point(FISHER)
def fisher_bernoulli(logits: np.ndarray, log_std: np.ndarray, n_categories: np.ndarray, tangent: np.ndarray) -> None:
    """Multiply derivatives of the logits, in place, by the Fisher matrix: ``p (1 - p) t``."""
    for i in range(len(tangent)):
        for j in range(tangent.shape[1]):
            tangent[i, j] *= sigmoid(logits[i, j]) * sigmoid(-logits[i, j])
