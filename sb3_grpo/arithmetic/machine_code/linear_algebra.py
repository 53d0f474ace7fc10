"""
Products of matrices, all in single precision and contiguous.

BLAS is no faster for matrices as small as these, and would use threads where one is better. Blocks of four rows by four terms
of the sums keep what they load in registers, and compilers vectorise the inner loops.

Shapes are those of the arguments, in their order. The last argument receives the result.
"""

import numpy as np

from sb3_grpo.arithmetic.machine_code.jit import inlined, inner

ZERO = np.float32(0.0)
#: Columns that are transposed at a time: those of a line of the cache
LINE = 16


@inner
def fill_with_zeros(out: np.ndarray) -> None:
    """Fill a matrix in a loop, because numba compiles much more for an assignment to a slice."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = ZERO


@inner
def transpose(a: np.ndarray, out: np.ndarray) -> None:
    """``out = a^T``, shapes ``(m, n)`` and ``(n, m)``."""
    m, n = a.shape
    for first in range(0, m, LINE):
        for j in range(n):
            for i in range(first, min(first + LINE, m)):
                out[j, i] = a[i, j]


@inner
def add_products(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Add ``a b`` to ``out``, one term of the sums after the other. Shapes: ``(m, l)``, ``(l, n)`` and ``(m, n)``."""
    for i in range(len(a)):
        row = out[i]
        for k in range(len(b)):
            factor, terms = a[i, k], b[k]
            for j in range(len(terms)):
                row[j] += factor * terms[j]


@inner
def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``out = a b``, shapes ``(m, l)``, ``(l, n)`` and ``(m, n)``."""
    m, n_terms = a.shape
    n = b.shape[1]
    fill_with_zeros(out)
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
    add_products(a[m - m % 4 :], b, out[m - m % 4 :])


@inner
def dot_products(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``out = a b^T``, each number as a sum of its own. Shapes: ``(m, l)``, ``(n, l)`` and ``(m, n)``."""
    m, n_terms = a.shape
    n = b.shape[0]
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


@inlined
def matmul_transposed(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``out = a b^T``, shapes ``(m, l)``, ``(n, l)`` and ``(m, n)``."""
    m, n_terms = a.shape
    n = b.shape[0]
    if m < 4 or n < LINE:
        dot_products(a, b, out)
    else:
        transposed = np.empty((n_terms, n), np.float32)  # the copy pays
        transpose(b, transposed)
        if m >= 16:
            matmul(a, transposed, out)
        else:  # in the order of the dot products
            fill_with_zeros(out)
            add_products(a, transposed, out)


@inlined
def transposed_matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``out = a^T b``, shapes ``(l, m)``, ``(l, n)`` and ``(m, n)``."""
    transposed = np.empty((a.shape[1], a.shape[0]), np.float32)
    transpose(a, transposed)
    matmul(transposed, b, out)
