"""Hot loops of a replica: pools rows in memory into the inputs of a model; moves keys of an index to other rows.

trainer.replica.replica_table owns the rows and the two indexes. Indexes have the layout of pserver.rows.kernels.

Shapes: S slots of a table, B samples, N signs in the order slot, sample, place; R rows in memory, I places of an index,
W floats of a row; U unique keys.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, key_of_reference
from headrace.prefetch import AHEAD, prefetch_row
from headrace.pserver.rows.kernels import EMPTY, find, shift_of

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

SUM, MEAN, SQRTN, SEQUENCE = 0, 1, 2, 3
"""Codes of the kinds of pooling."""
GROUP, POOLING, MAX_LEN, TAIL, PADDED, BEGIN, MASK = range(7)
"""Columns of `slot_S7`. MAX_LEN 0 means none; BEGIN and MASK are the offsets of the slot's floats and marks in a
sample."""


@njit(nogil=True, cache=True)
def pool(index_I, keys_R, rows_RW, default_W, sign_N, weight_N, offset_SB1, slot_S7, padding_S, out, mask):  # type: ignore[no-untyped-def]
    """Write the model's inputs from one table's slots to `out` and `mask`, which must be zero.

    The B samples of slot s follow each other from B * BEGIN on: W floats each, or MAX_LEN times W for a sequence, whose
    MAX_LEN marks are in `mask` from B * MASK on. An empty `weight_N` means that all weights are 1. Sums equal those of
    trainer.features.lookup_kernels.pool, in the order of signs.
    """
    num_slots, num_samples, width = offset_SB1.shape[0], offset_SB1.shape[1] - 1, np.uint64(len(default_W))
    row_N = _rows_of(index_I, keys_R, sign_N, offset_SB1, slot_S7)
    rows, last = rows_RW.reshape(-1), np.int64(len(row_N) - 1)
    for s in range(num_slots):
        pooling, max_len, padded = slot_S7[s, POOLING], slot_S7[s, MAX_LEN], slot_S7[s, PADDED]
        for b in range(num_samples):
            begin, end = offset_SB1[s, b], offset_SB1[s, b + 1]
            there = end - begin
            if padded:
                for n in range(begin, end):
                    there -= sign_N[n] == padding_S[s]
            kept = min(there, max_len) if max_len else there
            skipped = there - kept if slot_S7[s, TAIL] else 0
            divisor = np.float32(1)
            if pooling == MEAN:
                divisor = np.float32(max(kept, 1))
            elif pooling == SQRTN:
                divisor = np.sqrt(np.float32(max(kept, 1)))
            seen = 0
            for n in range(begin, end):
                later = row_N[min(n + np.int64(AHEAD), last)]
                if later != EMPTY:
                    prefetch_row(rows, np.uint64(np.uint32(later)) * width, width)
                if padded and sign_N[n] == padding_S[s]:
                    continue
                place = seen - skipped
                seen += 1
                if place < 0 or place >= kept:
                    continue
                scale = (weight_N[n] if len(weight_N) else np.float32(1)) / divisor
                to = np.uint64(num_samples * slot_S7[s, BEGIN]) + np.uint64(b) * width
                if pooling == SEQUENCE:
                    to = np.uint64(num_samples * slot_S7[s, BEGIN]) + np.uint64(b * max_len + place) * width
                    mask[num_samples * slot_S7[s, MASK] + b * max_len + place] = True
                if row_N[n] == EMPTY:
                    for w in range(width):
                        out[to + w] += scale * default_W[w]
                    continue
                row = np.uint64(np.uint32(row_N[n])) * width
                for w in range(width):
                    out[to + w] += scale * rows[row + w]


@njit(nogil=True, cache=True)
def _rows_of(index_I, keys_R, sign_N, offset_SB1, slot_S7):  # type: ignore[no-untyped-def]
    """(N,) the row of each sign, or EMPTY. Signs of all slots are found together, so that cache misses overlap."""
    key_N, row_N = np.empty(len(sign_N), np.uint64), np.empty(len(sign_N), np.int32)
    for s in range(offset_SB1.shape[0]):
        step = np.uint64(slot_S7[s, GROUP] + 1) * np.uint64(GOLDEN)
        for n in range(offset_SB1[s, 0], offset_SB1[s, -1]):
            key_N[n] = mix(sign_N[n] + step)
    find(index_I, keys_R, key_N, row_N)
    return row_N


def pool_reference(
    rows: dict[int, F32],
    default_W: F32,
    signs: list[list[tuple[int, np.float32]]],
    slot: dict[str, int],
    padding: int | None,
) -> tuple[F32, list[list[bool]]]:
    """Reference for `pool` on a dictionary, for one slot: (B, W) or (B, MAX_LEN, W), and the marks of a sequence.

    `signs` are (sign, weight) by sample; `slot` has "group", "pooling", "max_len", "tail".
    """
    found, marks = [], []
    for sample in signs:
        kept = [(sign, weight) for sign, weight in sample if sign != padding]
        if slot["max_len"]:
            kept = kept[-slot["max_len"] :] if slot["tail"] else kept[: slot["max_len"]]
        values = [(rows.get(key_of_reference(sign, slot["group"]), default_W), weight) for sign, weight in kept]
        if slot["pooling"] == SEQUENCE:
            empty = slot["max_len"] - len(kept)
            found.append(np.array([row * weight for row, weight in values] + [0 * default_W] * empty, np.float32))
            marks.append([True] * len(kept) + [False] * empty)
            continue
        count = np.float32(max(1, len(kept)))
        divisor = {SUM: np.float32(1), MEAN: count, SQRTN: np.sqrt(count)}[slot["pooling"]]
        total = np.zeros_like(default_W)
        for row, weight in values:
            total += np.float32(weight / divisor) * row
        found.append(total)
    return np.array(found, np.float32), marks


@njit(nogil=True, cache=True)
def replace(index_I, keys_R, old_U, new_U):  # type: ignore[no-untyped-def]
    """Point the keys of rows `old_U` to the rows `new_U`, which have the same keys."""
    shift, last = shift_of(index_I), np.uint64(len(index_I) - 1)
    for u in range(len(old_U)):
        at = keys_R[np.uint32(old_U[u])] >> shift
        while index_I[at] != old_U[u]:
            at = (at + np.uint64(1)) & last
        index_I[at] = new_U[u]


def replace_reference(row_of: dict[int, int], keys: list[int], new: list[int]) -> None:
    """Reference for `replace` on a dictionary."""
    for key, row in zip(keys, new, strict=True):
        assert key in row_of
        row_of[key] = row
