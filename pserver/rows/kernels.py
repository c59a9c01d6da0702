"""Hot loops on rows: find, reserve, gather, record statistics, scale gradients.

Free functions on arrays, compiled without the GIL, each with a plain twin (`_reference`) that defines it. Initial
values are in pserver.rows.initial_values, optimizers in pserver.row_optimizer_kernels, the hash of rows in
pserver.rows.digest, merging of ranks in pserver.rows.gradient_merge; pserver.tables.table decides what may run at the
same time.

Shapes: U unique keys of a batch, R rows of a table, I slots of the index (a power of two), W floats of a row in the
slab (weights, then the optimizer's state), D weights of a row.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.prefetch import AHEAD, prefetch, prefetch_row

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]

EMPTY = -1
"""An index slot without a row; the row number of a key without a row."""
BLOCK = 32
"""Keys whose first probes are in flight together: their cache misses overlap."""


@njit(nogil=True, cache=True)
def _probe_ahead(index_I, keys_R, keys_U, begin, end, shift, rows):  # type: ignore[no-untyped-def]
    """Row of each key of a block whose first probe hits, else EMPTY. Loads have no branches, so they overlap."""
    for i in range(end - begin):
        rows[i] = index_I[keys_U[begin + i] >> shift]
    for i in range(end - begin):
        row = rows[i]
        hit = row >= 0 and keys_R[np.uint32(max(row, 0))] == keys_U[begin + i]
        rows[i] = row if hit else EMPTY


@njit(nogil=True, cache=True)
def find(index_I, keys_R, keys_U, rows_U):  # type: ignore[no-untyped-def]
    """Write the row number of each key to `rows_U`, EMPTY for a key without a row."""
    shift, mask = shift_of(index_I), np.uint64(len(index_I) - 1)
    rows = np.empty(BLOCK, np.int32)
    for begin in range(0, len(keys_U), BLOCK):
        end = min(begin + BLOCK, len(keys_U))
        _probe_ahead(index_I, keys_R, keys_U, begin, end, shift, rows)
        for u in range(begin, end):
            row = rows[u - begin]
            if row == EMPTY:
                slot = keys_U[u] >> shift
                row = index_I[slot]
                while row != EMPTY and keys_R[np.uint32(row)] != keys_U[u]:
                    slot = (slot + np.uint64(1)) & mask
                    row = index_I[slot]
            rows_U[u] = row


@njit(nogil=True, cache=True)
def find_or_reserve(index_I, keys_R, group_R, keys_U, group_U, rows_U, done, num_rows, max_rows):  # type: ignore[no-untyped-def]
    """As `find`, but give a key without a row the next number and write its key and group.

    Starts at key `done` with `num_rows` rows and stops early when `max_rows` are in use. -> (done, num_rows).
    """
    shift, mask = shift_of(index_I), np.uint64(len(index_I) - 1)
    rows = np.empty(BLOCK, np.int32)
    for begin in range(done, len(keys_U), BLOCK):
        end = min(begin + BLOCK, len(keys_U))
        _probe_ahead(index_I, keys_R, keys_U, begin, end, shift, rows)
        for u in range(begin, end):
            row = rows[u - begin]
            if row == EMPTY:
                slot = keys_U[u] >> shift
                row = index_I[slot]
                while row != EMPTY and keys_R[np.uint32(row)] != keys_U[u]:
                    slot = (slot + np.uint64(1)) & mask
                    row = index_I[slot]
                if row == EMPTY:
                    if num_rows >= max_rows:
                        return u, num_rows
                    row = np.int32(num_rows)
                    keys_R[num_rows], group_R[num_rows] = keys_U[u], group_U[u]
                    index_I[slot] = row
                    num_rows += 1
            rows_U[u] = row
    return len(keys_U), num_rows


def find_or_reserve_reference(row_of: dict[int, int], keys_U: list[int], max_rows: int) -> tuple[list[int], int]:
    """The twin of `find_or_reserve` on a dictionary: rows of the keys done, and their number."""
    rows = []
    for key in keys_U:
        if key not in row_of:
            if len(row_of) >= max_rows:
                break
            row_of[key] = len(row_of)
        rows.append(row_of[key])
    return rows, len(rows)


@njit(nogil=True, cache=True)
def rebuild_index(index_I, keys_R, num_rows):  # type: ignore[no-untyped-def]
    """Enter rows 0 .. num_rows - 1 into an index full of EMPTY."""
    shift, mask = shift_of(index_I), np.uint64(len(index_I) - 1)
    for row in range(num_rows):
        slot = keys_R[row] >> shift
        while index_I[slot] != EMPTY:
            slot = (slot + np.uint64(1)) & mask
        index_I[slot] = row


@njit(nogil=True, cache=True)
def enter(index_I, keys_R, rows_U):  # type: ignore[no-untyped-def]
    """Add rows to the index; their keys are written and not in it."""
    shift, mask = shift_of(index_I), np.uint64(len(index_I) - 1)
    for u in range(len(rows_U)):
        slot = keys_R[np.uint32(rows_U[u])] >> shift
        while index_I[slot] != EMPTY:
            slot = (slot + np.uint64(1)) & mask
        index_I[slot] = rows_U[u]


@njit(nogil=True, cache=True)
def take_out(index_I, keys_R, rows_U):  # type: ignore[no-untyped-def]
    """Take rows out of the index.

    Slots after a gap move up (Knuth, vol. 3, 6.4, algorithm R), so that no probe meets a gap.
    """
    shift, mask = shift_of(index_I), np.uint64(len(index_I) - 1)
    for u in range(len(rows_U)):
        gap = keys_R[np.uint32(rows_U[u])] >> shift
        while index_I[gap] != rows_U[u]:
            gap = (gap + np.uint64(1)) & mask
        probe = (gap + np.uint64(1)) & mask
        while index_I[probe] != EMPTY:
            home = keys_R[np.uint32(index_I[probe])] >> shift
            if ((probe - home) & mask) >= ((probe - gap) & mask):
                index_I[gap] = index_I[probe]
                gap = probe
            probe = (probe + np.uint64(1)) & mask
        index_I[gap] = EMPTY


@njit(nogil=True, cache=True)
def shift_of(index_I):  # type: ignore[no-untyped-def]
    """Right shift of a key to its first slot: the top bits. The low bits chose the shard, so they do not spread."""
    bits = np.uint64(0)
    while (1 << bits) < len(index_I):
        bits += np.uint64(1)
    return np.uint64(64) - bits


@njit(nogil=True, cache=True)
def gather(slab_RW, rows_U, begin, end, out_UD):  # type: ignore[no-untyped-def]
    """Copy the weights of rows_U[begin:end] to `out_UD`."""
    slab, width, num_weights = slab_RW.reshape(-1), np.uint64(slab_RW.shape[1]), np.uint64(out_UD.shape[1])
    last = np.uint64(end) - np.uint64(1)
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(rows_U[min(u + AHEAD, last)]) * width, num_weights)
        row = np.uint64(rows_U[u]) * width
        for w in range(num_weights):
            out_UD[u, w] = slab[row + w]


def gather_reference(slab_RW: F32, rows_U: I32, out_UD: F32) -> None:
    """The twin of `gather` over all of `rows_U`."""
    out_UD[:] = slab_RW[rows_U, : out_UD.shape[1]]


@njit(nogil=True, cache=True)
def gather_learning(slab_RW, rows_U, begin, end, absent, group_R, class_G, rests_G, steps_C2, out_UE):  # type: ignore[no-untyped-def]
    """As `gather`, with two columns after the D weights, for a table whose first-order weights learn by Adagrad.

    With its accumulator n, they are (sqrt(n) + epsilon)^2 / rate^2 and 1 / rate^2: a step by a gradient g is
    g / sqrt(first), and adds g^2 * second to first. Infinity and 0, which are no step, for a key without a row, whose
    weights are `absent`, and for a row that rests: `rests_G` says so by slot group, or is empty.
    """
    num_weights = out_UE.shape[1] - 2
    last = np.uint64(end) - np.uint64(1)
    slab, width, count = slab_RW.reshape(-1), np.uint64(slab_RW.shape[1]), np.uint64(num_weights + 1)
    for u in range(np.uint64(begin), np.uint64(end)):
        prefetch_row(slab, np.uint64(max(rows_U[min(u + AHEAD, last)], 0)) * width, count)
        out_UE[u, num_weights], out_UE[u, num_weights + 1] = np.inf, np.float32(0)
        if rows_U[u] == EMPTY:
            out_UE[u, :num_weights] = absent
            continue
        row = np.uint64(rows_U[u]) * width
        for w in range(np.uint64(num_weights)):
            out_UE[u, w] = slab[row + w]
        group = group_R[rows_U[u]]
        rate, epsilon = steps_C2[class_G[group], 0], steps_C2[class_G[group], 1]
        if rate > 0 and not (len(rests_G) and rests_G[group]):
            root = (np.sqrt(slab[row + np.uint64(num_weights)]) + epsilon) / rate
            out_UE[u, num_weights], out_UE[u, num_weights + 1] = root * root, np.float32(1) / (rate * rate)


def gather_learning_reference(
    slab_RW: F32,
    rows_U: I32,
    absent: np.float32,
    group_R: NDArray[np.uint16],
    class_G: NDArray[np.uint8],
    rests_G: NDArray[np.bool_],
    steps_C2: F32,
    out_UE: F32,
) -> None:
    """The twin of `gather_learning` over all of `rows_U`."""
    num_weights = out_UE.shape[1] - 2
    for u, row in enumerate(rows_U):
        out_UE[u] = [absent] * num_weights + [np.inf, 0]
        if row != EMPTY:
            out_UE[u, :num_weights] = slab_RW[row, :num_weights]
            rate, epsilon = steps_C2[class_G[group_R[row]]]
            if rate > 0 and not (len(rests_G) and rests_G[group_R[row]]):
                root = (np.sqrt(slab_RW[row, num_weights]) + epsilon) / rate
                out_UE[u, num_weights:] = root * root, np.float32(1) / (rate * rate)


@njit(nogil=True, cache=True)
def gather_present(slab_RW, changed_R, rows_U, absent, out_UD):  # type: ignore[no-untyped-def]
    """As `gather`, with `absent` for every weight of a key without a row or with a reserved one."""
    num_weights = out_UD.shape[1]
    for u in range(len(rows_U)):
        row = rows_U[u]
        present = row != EMPTY and changed_R[np.uint32(max(row, 0))] != 0
        for w in range(num_weights):
            out_UD[u, w] = slab_RW[np.uint32(row), w] if present else absent


def gather_present_reference(
    slab_RW: F32, changed_R: NDArray[np.uint32], rows_U: I32, absent: np.float32, out_UD: F32
) -> None:
    """The twin of `gather_present`."""
    for u, row in enumerate(rows_U):
        out_UD[u] = slab_RW[row, : out_UD.shape[1]] if row != EMPTY and changed_R[row] else absent


@njit(nogil=True, cache=True)
def record(  # type: ignore[no-untyped-def]
    rows_U, show_U, click_U, nonclk_coeff, click_coeff, version, columns, rows_by_group, touched, num_touched
):
    """Add a merged record to each row's statistics, list rows first touched by `version`, count rows first made.

    `columns` = (show, click, delta_score, changed_version, group), each (R,). -> (num_touched, rows made).
    Source of the score: semantics of rows (show, click), as in Paddle's parameter server.
    """
    show_R, click_R, delta_R, changed_R, group_R = columns
    made, last = 0, np.uint64(len(rows_U)) - np.uint64(1)
    for u in range(np.uint64(len(rows_U))):
        later = np.uint64(rows_U[min(u + AHEAD, last)])
        prefetch(show_R, later)
        prefetch(click_R, later)
        prefetch(delta_R, later)
        prefetch(changed_R, later)
        row = np.uint32(rows_U[u])
        show, click = show_U[u], click_U[u]
        show_R[row] += show
        click_R[row] += click
        delta_R[row] += (show - click) * nonclk_coeff + click * click_coeff
        before = changed_R[row]
        if before != version:
            changed_R[row] = version
            touched[num_touched] = rows_U[u]
            num_touched += 1
            if before == 0:
                rows_by_group[group_R[row]] += 1
                made += 1
    return num_touched, made


def record_reference(rows_U, show_U, click_U, nonclk_coeff, click_coeff, version, columns):  # type: ignore[no-untyped-def]
    """The twin of `record` for unique rows: -> (rows first touched, rows first made), in order."""
    show_R, click_R, delta_R, changed_R, _ = columns
    touched = [int(row) for row in rows_U if changed_R[row] != version]
    made = [int(row) for row in rows_U if changed_R[row] == 0]
    show_R[rows_U] += show_U
    click_R[rows_U] += click_U
    delta_R[rows_U] += (show_U - click_U) * np.float32(nonclk_coeff) + click_U * np.float32(click_coeff)
    changed_R[rows_U] = version
    return touched, made


@njit(nogil=True, cache=True)
def scale_by_show(grads_UD, show_U, batch_samples, out_UD):  # type: ignore[no-untyped-def]
    """Scale gradients of the batch's mean into `out_UD`: times its samples, divided by the record's shows.

    A record without shows keeps its gradient. Source: Paddle's `show_scale`.
    """
    for u in range(len(show_U)):
        factor = batch_samples / show_U[u] if show_U[u] > 0 else np.float32(1)
        for d in range(grads_UD.shape[1]):
            out_UD[u, d] = grads_UD[u, d] * factor


def scale_by_show_reference(grads_UD: F32, show_U: F32, batch_samples: np.float32) -> F32:
    """The twin of `scale_by_show`."""
    factor_U = np.array([batch_samples / show if show > 0 else 1 for show in show_U], np.float32)
    return grads_UD * factor_U[:, None]


@njit(nogil=True, cache=True)
def clip_rows(grads_UD, begin, end, most, out_UD):  # type: ignore[no-untyped-def]
    """Write gradients begin .. end - 1 to `out_UD`, each scaled to a norm of `most` if it is longer."""
    for u in range(begin, end):
        squares = 0.0
        for d in range(grads_UD.shape[1]):
            squares += np.float64(grads_UD[u, d]) * np.float64(grads_UD[u, d])
        if squares <= most * most:
            for d in range(grads_UD.shape[1]):
                out_UD[u, d] = grads_UD[u, d]
        else:
            factor = most / math.sqrt(squares)
            for d in range(grads_UD.shape[1]):
                out_UD[u, d] = np.float32(np.float64(grads_UD[u, d]) * factor)


def clip_rows_reference(grads_UD: F32, most: float) -> F32:
    """The twin of `clip_rows` over all rows."""
    clipped_UD = grads_UD.copy()
    for u, grad_D in enumerate(grads_UD):
        if (squares := sum(float(g) ** 2 for g in grad_D)) > most * most:
            clipped_UD[u] = [float(g) * (most / math.sqrt(squares)) for g in grad_D]
    return clipped_UD
