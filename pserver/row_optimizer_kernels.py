"""Kernels of row optimizers: sgd, momentum, adagrad by row or element, adam, ftrl, and Paddle's adagrad and adam.

pserver.row_optimizers has their settings and state. Every weight stays within bounds. Only + - * / and square root are
used, so bits agree between machines; powers are products stored in the row's state. Each kernel has a plain twin.
Gradients are merged and scaled by the caller.

Shapes: U rows of a step, D weights of a row, W floats of a row in the slab: D weights, then the state.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.prefetch import AHEAD, prefetch_row

F32 = NDArray[np.float32]

# The parts below use flat arrays and unsigned offsets, so that the compiler vectorises their loops.
# `row` is where a row begins in `slab`, `grad` where its gradient begins; weights begin .. end - 1 are the part.
ZERO, ONE = np.uint64(0), np.uint64(1)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _bounded(weight, low, high):  # type: ignore[no-untyped-def]
    weight = low if weight < low else weight
    return high if weight > high else weight


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _sgd_part(slab, grads, row, grad, begin, end, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr = settings_6[0], settings_6[1], settings_6[2]
    w, g = row + begin, grad + begin
    for d in range(end - begin):
        slab[w + d] = _bounded(slab[w + d] - lr * grads[g + d], low, high)


@njit(nogil=True, cache=True, error_model="numpy")
def sgd(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """Gradient descent: w -= lr * g."""
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        if first_order:
            _sgd_part(slab, grads, row, grad, ZERO, ONE, settings[0])
        _sgd_part(slab, grads, row, grad, first, num_weights, settings[1])


def sgd_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `sgd` on one row."""
    for d, g in enumerate(grad_D):
        low, high, lr = settings[int(d >= first_order)][:3]
        row_W[d] = min(max(row_W[d] - lr * g, low), high)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _momentum_part(slab, grads, row, grad, begin, end, num_weights, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr, kept = settings_6[0], settings_6[1], settings_6[2], settings_6[3]
    w, g, v = row + begin, grad + begin, row + num_weights + begin
    for d in range(end - begin):
        moved = kept * slab[v + d] + grads[g + d]
        slab[v + d] = moved
        slab[w + d] = _bounded(slab[w + d] - lr * moved, low, high)


@njit(nogil=True, cache=True, error_model="numpy")
def momentum(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """Gradient descent with momentum (Polyak 1964), as torch.optim.SGD has it: v = m * v + g; w -= lr * v. State: v."""
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        if first_order:
            _momentum_part(slab, grads, row, grad, ZERO, ONE, num_weights, settings[0])
        _momentum_part(slab, grads, row, grad, first, num_weights, num_weights, settings[1])


def momentum_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `momentum` on one row."""
    num_weights = len(grad_D)
    for d, g in enumerate(grad_D):
        low, high, lr, kept = settings[int(d >= first_order)][:4]
        row_W[num_weights + d] = kept * row_W[num_weights + d] + g
        row_W[d] = min(max(row_W[d] - lr * row_W[num_weights + d], low), high)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _adagrad_element_part(slab, grads, row, grad, begin, end, num_weights, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr, epsilon = settings_6[0], settings_6[1], settings_6[2], settings_6[3]
    w, g, n = row + begin, grad + begin, row + num_weights + begin
    for d in range(end - begin):
        total = slab[n + d] + grads[g + d] * grads[g + d]
        slab[n + d] = total
        slab[w + d] = _bounded(slab[w + d] - lr * grads[g + d] / (np.sqrt(total) + epsilon), low, high)


@njit(nogil=True, cache=True, error_model="numpy")
def adagrad_element(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """Adagrad (Duchi, Hazan, Singer 2011, "diagonal"): n += g * g; w -= lr * g / (sqrt(n) + epsilon)."""
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        if first_order:
            _adagrad_element_part(slab, grads, row, grad, ZERO, ONE, num_weights, settings[0])
        _adagrad_element_part(slab, grads, row, grad, first, num_weights, num_weights, settings[1])


def adagrad_element_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `adagrad_element` on one row."""
    num_weights = len(grad_D)
    for d, g in enumerate(grad_D):
        low, high, lr, epsilon = settings[int(d >= first_order)][:4]
        row_W[num_weights + d] += g * g
        row_W[d] = min(max(row_W[d] - lr * g / (np.sqrt(row_W[num_weights + d]) + epsilon), low), high)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _adagrad_row_part(slab, grads, row, grad, begin, end, n, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr, epsilon = settings_6[0], settings_6[1], settings_6[2], settings_6[3]
    w, g = row + begin, grad + begin
    squares = np.float32(0)
    for d in range(end - begin):
        squares += grads[g + d] * grads[g + d]
    total = slab[n] + squares / np.float32(max(end - begin, ONE))
    slab[n] = total
    rate = lr / (np.sqrt(total) + epsilon)
    for d in range(end - begin):
        slab[w + d] = _bounded(slab[w + d] - rate * grads[g + d], low, high)


@njit(nogil=True, cache=True, error_model="numpy")
def adagrad_row(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """Adagrad with one accumulator a part: n += mean(g * g); w -= lr / (sqrt(n) + epsilon) * g.

    Source: the row-wise Adagrad of DLRM (Naumov et al. 2019). A part without a gradient does not change.
    """
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        n = row + num_weights
        if first_order:
            _adagrad_row_part(slab, grads, row, grad, ZERO, ONE, n, settings[0])
        _adagrad_row_part(slab, grads, row, grad, first, num_weights, n + ONE, settings[1])


def adagrad_row_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `adagrad_row` on one row."""
    num_weights = len(grad_D)
    for part, (begin, end) in enumerate(((0, first_order), (first_order, num_weights))):
        low, high, lr, epsilon = settings[part][:4]
        squares = np.float32(0)
        for g in grad_D[begin:end]:
            squares += g * g
        row_W[num_weights + part] += squares / np.float32(max(end - begin, 1))
        rate = lr / (np.sqrt(row_W[num_weights + part]) + epsilon) if end > begin else np.float32(0)
        for d in range(begin, end):
            row_W[d] = min(max(row_W[d] - rate * grad_D[d], low), high)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _adam_part(slab, grads, row, grad, begin, end, num_weights, powers, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr, epsilon = settings_6[0], settings_6[1], settings_6[2], settings_6[5]
    beta1, beta2, one = settings_6[3], settings_6[4], np.float32(1)
    power1, power2 = slab[powers] * beta1, slab[powers + ONE] * beta2
    slab[powers], slab[powers + ONE] = power1, power2
    rest1, rest2 = one - power1, one - power2
    w, g = row + begin, grad + begin
    m, v = w + num_weights, w + num_weights + num_weights
    for d in range(end - begin):
        first_moment = beta1 * slab[m + d] + (one - beta1) * grads[g + d]
        second_moment = beta2 * slab[v + d] + (one - beta2) * grads[g + d] * grads[g + d]
        slab[m + d], slab[v + d] = first_moment, second_moment
        move = lr * (first_moment / rest1) / (np.sqrt(second_moment / rest2) + epsilon)
        slab[w + d] = _bounded(slab[w + d] - move, low, high)


@njit(nogil=True, cache=True, error_model="numpy")
def adam(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """Adam (Kingma, Ba 2015, algorithm 1), steps counted by row. State: m, v, then beta1^t, beta2^t a part."""
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        powers = row + np.uint64(3) * num_weights
        if first_order:
            _adam_part(slab, grads, row, grad, ZERO, ONE, num_weights, powers, settings[0])
        _adam_part(slab, grads, row, grad, first, num_weights, num_weights, powers + np.uint64(2), settings[1])


def adam_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `adam` on one row."""
    one, num_weights = np.float32(1), len(grad_D)
    for part, (begin, end) in enumerate(((0, first_order), (first_order, num_weights))):
        if part == 0 and not first_order:
            continue
        low, high, lr, beta1, beta2, epsilon = settings[part]
        powers = 3 * num_weights + 2 * part
        row_W[powers : powers + 2] *= (beta1, beta2)
        for d in range(begin, end):
            m_at, v_at, g = num_weights + d, 2 * num_weights + d, grad_D[d]
            row_W[m_at] = beta1 * row_W[m_at] + (one - beta1) * g
            row_W[v_at] = beta2 * row_W[v_at] + (one - beta2) * g * g
            step = lr * (row_W[m_at] / (one - row_W[powers]))
            row_W[d] -= step / (np.sqrt(row_W[v_at] / (one - row_W[powers + 1])) + epsilon)
            row_W[d] = min(max(row_W[d], low), high)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _paddle_adagrad_row_part(slab, grads, row, grad, begin, end, n, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr, initial = settings_6[0], settings_6[1], settings_6[2], settings_6[3]
    w, g = row + begin, grad + begin
    rate, squares = lr * np.sqrt(initial / (initial + slab[n])), np.float32(0)
    for d in range(end - begin):
        squares += grads[g + d] * grads[g + d]
        slab[w + d] = _bounded(slab[w + d] - rate * grads[g + d], low, high)
    slab[n] += squares / np.float32(max(end - begin, ONE))


@njit(nogil=True, cache=True, error_model="numpy")
def paddle_adagrad_row(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """Paddle's Adagrad with one sum n a part: w -= lr * g * sqrt(initial / (initial + n)); then n += mean(g * g).

    Source: SparseAdaGradSGDRule of Paddle 3.0 (paddle/fluid/distributed/ps/table/sparse_sgd_rule.cc), which computes
    with 64 bits what is computed with 32 here.
    """
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        n = row + num_weights
        if first_order:
            _paddle_adagrad_row_part(slab, grads, row, grad, ZERO, ONE, n, settings[0])
        _paddle_adagrad_row_part(slab, grads, row, grad, first, num_weights, n + ONE, settings[1])


def paddle_adagrad_row_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `paddle_adagrad_row` on one row."""
    num_weights = len(grad_D)
    for part, (begin, end) in enumerate(((0, first_order), (first_order, num_weights))):
        low, high, lr, initial = settings[part][:4]
        n, squares = num_weights + part, np.float32(0)
        rate = lr * np.sqrt(initial / (initial + row_W[n])) if end > begin else np.float32(0)
        for d in range(begin, end):
            squares += grad_D[d] * grad_D[d]
            row_W[d] = min(max(row_W[d] - rate * grad_D[d], low), high)
        row_W[n] += squares / np.float32(max(end - begin, 1))


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _paddle_adagrad_element_part(slab, grads, row, grad, begin, end, num_weights, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr, initial = settings_6[0], settings_6[1], settings_6[2], settings_6[3]
    w, g, n = row + begin, grad + begin, row + num_weights + begin
    for d in range(end - begin):
        rate = lr * np.sqrt(initial / (initial + slab[n + d]))
        slab[n + d] += grads[g + d] * grads[g + d]
        slab[w + d] = _bounded(slab[w + d] - rate * grads[g + d], low, high)


@njit(nogil=True, cache=True, error_model="numpy")
def paddle_adagrad_element(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """As `paddle_adagrad_row`, with a sum for each element. Source: StdAdaGradSGDRule, in the same file."""
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        if first_order:
            _paddle_adagrad_element_part(slab, grads, row, grad, ZERO, ONE, num_weights, settings[0])
        _paddle_adagrad_element_part(slab, grads, row, grad, first, num_weights, num_weights, settings[1])


def paddle_adagrad_element_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `paddle_adagrad_element` on one row."""
    num_weights = len(grad_D)
    for d, g in enumerate(grad_D):
        low, high, lr, initial = settings[int(d >= first_order)][:4]
        rate = lr * np.sqrt(initial / (initial + row_W[num_weights + d]))
        row_W[num_weights + d] += g * g
        row_W[d] = min(max(row_W[d] - rate * g, low), high)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _paddle_adam_part(slab, grads, row, grad, begin, end, num_weights, powers, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr, epsilon = settings_6[0], settings_6[1], settings_6[2], settings_6[5]
    beta1, beta2, one = settings_6[3], settings_6[4], np.float32(1)
    rate = lr * (np.sqrt(one - slab[powers + ONE]) / (one - slab[powers]))
    w, g = row + begin, grad + begin
    m, v = w + num_weights, w + num_weights + num_weights
    for d in range(end - begin):
        first_moment = beta1 * slab[m + d] + (one - beta1) * grads[g + d]
        second_moment = beta2 * slab[v + d] + (one - beta2) * grads[g + d] * grads[g + d]
        slab[m + d], slab[v + d] = first_moment, second_moment
        move = rate * (first_moment / (np.sqrt(second_moment) + epsilon))
        slab[w + d] = _bounded(slab[w + d] - move, low, high)
    slab[powers], slab[powers + ONE] = slab[powers] * beta1, slab[powers + ONE] * beta2


@njit(nogil=True, cache=True, error_model="numpy")
def paddle_adam(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """Paddle's Adam. State: m, v, then the beta1 ^ t, beta2 ^ t of the next step t for each part.

    m, v as in `adam`; w -= lr * sqrt(1 - beta2 ^ t) / (1 - beta1 ^ t) * m / (sqrt(v) + epsilon). Source:
    SparseAdamSGDRule of Paddle 3.0 (paddle/fluid/distributed/ps/table/sparse_sgd_rule.cc).
    """
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        powers = row + np.uint64(3) * num_weights
        if first_order:
            _paddle_adam_part(slab, grads, row, grad, ZERO, ONE, num_weights, powers, settings[0])
        _paddle_adam_part(slab, grads, row, grad, first, num_weights, num_weights, powers + np.uint64(2), settings[1])


def paddle_adam_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `paddle_adam` on one row."""
    one, num_weights = np.float32(1), len(grad_D)
    for part, (begin, end) in enumerate(((0, first_order), (first_order, num_weights))):
        if part == 0 and not first_order:
            continue
        low, high, lr, beta1, beta2, epsilon = settings[part]
        powers = 3 * num_weights + 2 * part
        rate = lr * (np.sqrt(one - row_W[powers + 1]) / (one - row_W[powers]))
        for d in range(begin, end):
            m_at, v_at, g = num_weights + d, 2 * num_weights + d, grad_D[d]
            row_W[m_at] = beta1 * row_W[m_at] + (one - beta1) * g
            row_W[v_at] = beta2 * row_W[v_at] + (one - beta2) * g * g
            move = rate * (row_W[m_at] / (np.sqrt(row_W[v_at]) + epsilon))
            row_W[d] = min(max(row_W[d] - move, low), high)
        row_W[powers : powers + 2] *= (beta1, beta2)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _ftrl_part(slab, grads, row, grad, begin, end, num_weights, settings_6):  # type: ignore[no-untyped-def]
    low, high, lr = settings_6[0], settings_6[1], settings_6[2]
    beta, l1, l2 = settings_6[3], settings_6[4], settings_6[5]
    w, g = row + begin, grad + begin
    z_at, n_at = w + num_weights, w + num_weights + num_weights
    for d in range(end - begin):
        squares = slab[n_at + d] + grads[g + d] * grads[g + d]
        root = np.sqrt(squares)
        z = slab[z_at + d] + grads[g + d] - (root - np.sqrt(slab[n_at + d])) / lr * slab[w + d]
        slab[n_at + d], slab[z_at + d] = squares, z
        shrunk = z - l1 if z > l1 else z + l1 if z < -l1 else np.float32(0)
        slab[w + d] = _bounded(-shrunk / ((beta + root) / lr + l2), low, high)


@njit(nogil=True, cache=True, error_model="numpy")
def ftrl(slab_RW, rows_U, grads_UD, begin, end, first_order, settings):  # type: ignore[no-untyped-def]
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1). State: z, n."""
    slab, grads = slab_RW.reshape(-1), grads_UD.reshape(-1)
    width, num_weights, first = np.uint64(slab_RW.shape[1]), np.uint64(grads_UD.shape[1]), np.uint64(first_order)
    last = np.uint64(end) - ONE
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, width)
        row, grad = np.uint64(rows_U[u]) * width, u * num_weights
        if first_order:
            _ftrl_part(slab, grads, row, grad, ZERO, ONE, num_weights, settings[0])
        _ftrl_part(slab, grads, row, grad, first, num_weights, num_weights, settings[1])


def ftrl_reference(row_W: F32, grad_D: F32, first_order: int, settings: F32) -> None:
    """The twin of `ftrl` on one row."""
    num_weights = len(grad_D)
    for d, g in enumerate(grad_D):
        low, high, lr, beta, l1, l2 = settings[int(d >= first_order)]
        z_at, n_at = num_weights + d, 2 * num_weights + d
        root_before = np.sqrt(row_W[n_at])
        row_W[n_at] += g * g
        root = np.sqrt(row_W[n_at])
        row_W[z_at] = z = row_W[z_at] + g - (root - root_before) / lr * row_W[d]
        shrunk = z - l1 if z > l1 else z + l1 if z < -l1 else np.float32(0)
        row_W[d] = min(max(-shrunk / ((beta + root) / lr + l2), low), high)


@njit(nogil=True, cache=True, error_model="numpy")
def ftrl_start(slab_RW, group_R, begin, end, first_order, num_weights, settings_C, class_G):  # type: ignore[no-untyped-def]
    """Set z of rows so that FTRL gives their weights; the paper starts z at 0, which would lose them."""
    for row in range(begin, end):
        own = class_G[group_R[row]]
        for d in range(num_weights):
            settings = settings_C[own, 1 if d >= first_order else 0]
            lr, beta, l1, l2 = settings[2], settings[3], settings[4], settings[5]
            w = slab_RW[row, d]
            threshold = l1 if w < 0 else -l1 if w > 0 else np.float32(0)
            slab_RW[row, num_weights + d] = threshold - w * (beta / lr + l2)


@njit(nogil=True, cache=True, error_model="numpy")
def ftrl_adapt(slab_RW, rows_U, begin, end, first_order, num_weights, settings):  # type: ignore[no-untyped-def]
    """Set z of rows so that FTRL gives their weights at this rate, with their n; z of a weight of 0 stays.

    The next step is then the proximal step from the present weights, whatever the rate of the steps before.
    """
    for u in range(begin, end):
        row = np.uint32(rows_U[u])
        for d in range(num_weights):
            part = 1 if d >= first_order else 0
            lr, beta, l1, l2 = settings[part, 2], settings[part, 3], settings[part, 4], settings[part, 5]
            w, root = slab_RW[row, d], np.sqrt(slab_RW[row, 2 * num_weights + d])
            if w != 0:
                threshold = l1 if w < 0 else -l1
                slab_RW[row, num_weights + d] = threshold - w * ((beta + root) / lr + l2)


def ftrl_adapt_reference(row_W: F32, num_weights: int, first_order: int, settings: F32) -> None:
    """The twin of `ftrl_adapt` on one row."""
    for d in range(num_weights):
        lr, beta, l1, l2 = settings[int(d >= first_order)][2:]
        if w := row_W[d]:
            strength = (beta + np.sqrt(row_W[2 * num_weights + d])) / lr + l2
            row_W[num_weights + d] = (l1 if w < 0 else -l1) - w * strength
