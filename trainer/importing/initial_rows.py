"""Rows of a warm start in the store's format: weights and statistics of the source, and the state of its optimizer if
the table's is the same; otherwise a fresh one.

`changed_version` is VERSION, which is the number of no pass: a row exists from a version above 0 on, and a pass treats
rows of its own version as touched by itself. `last_seen_day` is 0, the day of the first pass: rows count as just seen.

Shapes: U rows given, D weights of a row, W floats of a row in the slab, W' its words.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.key_kernels import keys_of
from headrace.keys import sign_of
from headrace.pserver.config import TableSection
from headrace.pserver.rows.row_format import HEAD, pack
from headrace.pserver.rows.row_settings import RowSettings
from headrace.pserver.rows.table_rows import COLUMNS, RowArrays, bits_of
from headrace.trainer.importing.source import F32, U64, SourceRows

U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

VERSION = 1
"""The version of an imported state; the job's first pass is the next one."""


class RowMaker:
    """Makes the rows of one table."""

    def __init__(self, name: str, section: TableSection, groups: Mapping[str, int], seed: int) -> None:
        """`groups`: slot groups of the table's slots, by name."""
        self.name, self._section = name, section
        self._settings = RowSettings.of(section, groups)
        self._rows = RowArrays(name, self._settings, seed, room=1)
        self.num_words = HEAD + self._rows.width

    def words(self, keys_U: U64, group_U: U16, brought: SourceRows, *, exact: bool = False) -> U32:
        """(U, W') words of rows; `exact`: weights are bits, not numbers.

        Raises BadInput for vectors of another length, and for numbers that are not finite.
        """
        if not exact:
            self._check(brought, keys_U, group_U)
        num_rows, first = len(keys_U), self._settings.first_order
        slab_UW = np.empty((num_rows, self._rows.width), np.float32)
        self._rows.initialise(slab_UW, keys_U, group_U, 0, num_rows)
        if first and brought.weight_R is not None:
            slab_UW[:, 0] = brought.weight_R
        whole_U = self._whole(group_U, brought)
        if self._section.dim and brought.vector_RD is not None:
            slab_UW[whole_U, first : first + self._section.dim] = brought.vector_RD[whole_U]
        if brought.state_RK is not None:
            self._put_state(slab_UW, whole_U, brought.state_RK)
        if self._settings.ftrl:
            start_ftrl(slab_UW, group_U, self._settings)
        if self._settings.extends:
            leave_out_vectors(slab_UW, ~whole_U & self._waits(group_U), self._settings)
        columns: dict[str, NDArray[Any]] = {name: np.zeros(num_rows, dtype) for name, dtype in COLUMNS.items()}
        columns |= {name: np.asarray(values, np.float32) for name, values in brought.statistics.items()}
        columns |= {"keys": keys_U, "group": group_U, "changed_version": np.full(num_rows, VERSION, np.uint32)}
        words_UW = np.empty((num_rows, self.num_words), np.uint32)
        bits = bits_of(slab_UW, columns)
        pack(*bits, np.arange(num_rows, dtype=np.int32), 0, num_rows, np.empty_like(keys_U), words_UW)
        return words_UW

    def _put_state(self, slab_UW: F32, whole_U: NDArray[np.bool_], state_UK: F32) -> None:
        """Write the state of the weight, and that of the vector in rows that have one."""
        begin = self._settings.num_weights
        part_K = self._settings.parts_W[begin : begin + state_UK.shape[1]]
        slab_UW[:, begin + np.flatnonzero(part_K == 0)] = state_UK[:, part_K == 0]
        slab_UW[np.ix_(whole_U, begin + np.flatnonzero(part_K == 1))] = state_UK[np.ix_(whole_U, part_K == 1)]

    def _whole(self, group_U: U16, brought: SourceRows) -> NDArray[np.bool_]:
        """(U,) whether a row has a vector. Where rows wait for theirs, zeros mean none; others get an initial one."""
        if brought.vector_RD is None:
            return np.zeros(len(group_U), np.bool_)
        whole_U = np.ones(len(group_U), np.bool_) if brought.whole_R is None else brought.whole_R
        whole: NDArray[np.bool_] = whole_U & (brought.vector_RD.any(axis=1) | ~self._waits(group_U))
        return whole

    def _waits(self, group_U: U16) -> NDArray[np.bool_]:
        """(U,) whether a row gets its vector later, once its score is high enough."""
        waits_U: NDArray[np.bool_] = ~np.isneginf(self._settings.extend_G[group_U])
        return waits_U

    def _check(self, brought: SourceRows, keys_U: U64, group_U: U16) -> None:
        vector_RD, dim = brought.vector_RD, self._section.dim
        if vector_RD is not None and len(vector_RD) and vector_RD.shape[1] != dim:
            raise BadInput(
                f"{brought.where(0)}: has dim {vector_RD.shape[1]}; table {self.name!r} of the job has {dim}"
            )
        values = {"weight": brought.weight_R, "vector": vector_RD, "state": brought.state_RK, **brought.statistics}
        for what, array in values.items():
            if array is None or np.isfinite(array).all():
                continue
            row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])
            slot = brought.slots[int(brought.slot_R[row])]
            sign = sign_of(int(keys_U[row]), int(group_U[row]))
            raise BadInput(f"{brought.where(row)}: slot {slot!r}, sign {sign}: its {what} is not a finite number")


def leave_out_vectors(slab_UW: F32, chosen_U: NDArray[np.bool_], settings: RowSettings) -> None:
    """Make rows without a vector, in the format of pserver.rows.split_slab: zeros for it, and in the last float."""
    slab_UW[np.ix_(chosen_U, settings.parts_W == 1)] = 0
    slab_UW[chosen_U, -1] = 0


def start_ftrl(slab_UW: F32, group_U: U16, settings: RowSettings) -> None:
    """Choose FTRL's z so that it yields the weights; otherwise the first push would discard them."""
    num_weights = settings.num_weights
    own_U = settings.settings_C[settings.class_G[group_U]]
    for part, (begin, end) in enumerate(((0, settings.first_order), (settings.first_order, num_weights))):
        lr, beta, l1, l2 = (own_U[:, part, place, None] for place in (2, 3, 4, 5))
        w = slab_UW[:, begin:end]
        threshold = np.where(w < 0, l1, np.where(w > 0, -l1, np.float32(0)))
        slab_UW[:, num_weights + begin : num_weights + end] = threshold - w * (beta / lr + l2)


def keys_in(signs: U64, group: int) -> U64:
    """(U,) keys of feature ids (`signs`) in a slot group."""
    keys = np.empty(len(signs), np.uint64)
    keys_of(np.ascontiguousarray(signs), group, keys)
    return keys
