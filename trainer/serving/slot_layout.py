"""From signs to the inputs of a model: how the slots of one table are pooled from rows in memory, by model.json.

A row is found by an index of pserver.rows.kernels. trainer.replica.replica_table changes rows and index version by
version; `view_of` makes them once.

Shapes: B samples, S slots of a table, N signs of a table in the order slot, sample, place; R rows in memory, I places
of an index, W floats of a row; U unique keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.pserver.rows.arrays import allocate
from headrace.pserver.rows.kernels import EMPTY, enter
from headrace.trainer.serving import pooling_kernels

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
MIN_PLACES = 1 << 10
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
POOLINGS = {
    "sum": pooling_kernels.SUM,
    "mean": pooling_kernels.MEAN,
    "sqrtn": pooling_kernels.SQRTN,
    "none": pooling_kernels.SEQUENCE,
}
NO_WEIGHTS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class TableView:
    """One version for readers. Nothing of it changes while it is read."""

    index_I: I32
    keys_R: U64
    rows_RW: F32


def empty_index(num_rows: int) -> I32:
    """An empty index with room for 1.5 times `num_rows` keys."""
    places = MIN_PLACES
    while places < 3 * num_rows:
        places *= 2
    index_I: I32 = allocate((places,), np.int32)
    index_I.fill(EMPTY)
    return index_I


def view_of(keys_U: U64, rows_UW: F32) -> TableView:
    """A view of rows that never change. Each key is there once."""
    index_I = empty_index(len(keys_U))
    enter(index_I, keys_U, np.arange(len(keys_U), dtype=np.int32))
    return TableView(index_I, keys_U, rows_UW)


@dataclass(frozen=True, slots=True)
class TableSigns:
    """The signs of the slots of one table, for some samples."""

    sign_N: U64
    offset_SB1: I64
    """Slot s of sample b has the signs from [s, b] to [s, b + 1]."""
    weight_N: F32
    """Weight of each sign; NO_WEIGHTS where all are 1."""


@dataclass(frozen=True, slots=True)
class InferenceInputs:
    """B samples for a model: signs in the order of `Model.tables`, dense slots by name."""

    num_samples: int
    signs: Sequence[TableSigns]
    dense: Mapping[str, F32]
    """(B, size)."""
    events: Sequence[int] | None = None
    """(B,) the event of each sample, where a request has raw events."""
    left_out: tuple[str, ...] = ()
    """Slots that the job fills and the request lacks: they are filled here."""
    time_s_B: F64 | None = None
    """(B,) unix seconds at which windows of counters end; None: now."""


@dataclass(frozen=True, slots=True)
class _Input:
    """Position of one input of the graph, for one sample, in the output of `kernels.pool`."""

    name: str
    begin: int
    shape: tuple[int, ...]
    is_mask: bool
    end: int


class SlotLayout:
    """The slots of one table, as `kernels.pool` needs them."""

    def __init__(self, name: str, table: Mapping[str, Any], slots: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.slots = name, tuple(slots)
        self.width = int(table["dim"]) + int(table["first_order"])
        default = table["default_row"]
        self.default_W = np.zeros(self.width, np.float32) if default == "zeros" else np.array(default, np.float32)
        if self.default_W.shape != (self.width,):
            raise BadInput(f"model.json: the default row of table {name!r} does not have {self.width} numbers")
        inputs: list[_Input] = []
        rows, self.num_floats, self.num_marks = [], 0, 0
        for slot in slots:
            pooling, length = POOLINGS[slot["pooling"]], int(slot["max_len"] or 0)
            rows.append([slot["group"], pooling, length, slot["keep"] == "tail", slot["padding"] is not None])
            rows[-1] += [self.num_floats, self.num_marks]
            shape = (length, self.width) if pooling == pooling_kernels.SEQUENCE else (self.width,)
            end = self.num_floats + int(np.prod(shape))
            inputs.append(_Input(slot["name"], self.num_floats, shape, is_mask=False, end=end))
            self.num_floats = end
            if pooling == pooling_kernels.SEQUENCE:
                end = self.num_marks + length
                inputs.append(_Input(f"{slot['name']}.mask", self.num_marks, (length,), is_mask=True, end=end))
                self.num_marks = end
        self._inputs = tuple(inputs)
        self._slot_S7 = np.array(rows, np.int64)
        self._padding_S = np.array([int(slot["padding"] or 0) for slot in slots], np.uint64)

    def buffers(self, num_samples: int) -> tuple[F32, NDArray[np.bool_]]:
        """Zeros for the floats and the marks of these slots."""
        floats, marks = num_samples * self.num_floats, num_samples * self.num_marks
        return np.zeros(floats, np.float32), np.zeros(marks, np.bool_)

    def pool(self, view: TableView, signs: TableSigns, out: F32, mask: NDArray[np.bool_]) -> None:
        """Pool rows into arrays of `buffers` that are zero."""
        pooling_kernels.pool(
            view.index_I, view.keys_R, view.rows_RW, self.default_W, signs.sign_N, signs.weight_N, signs.offset_SB1,
            self._slot_S7, self._padding_S, out, mask,
        )  # fmt: skip

    def inputs_of(self, view: TableView, signs: TableSigns, num_samples: int) -> dict[str, NDArray[Any]]:
        """The graph's inputs of these slots, in arrays of their own."""
        out, mask = self.buffers(num_samples)
        self.pool(view, signs, out, mask)
        return self.named(out, mask, num_samples)

    def named(self, out: F32, mask: NDArray[np.bool_], num_samples: int) -> dict[str, NDArray[Any]]:
        """The graph's inputs of these slots, as parts of the arrays of `buffers`."""
        found: dict[str, NDArray[Any]] = {}
        for each in self._inputs:
            values = mask if each.is_mask else out
            begin, end = num_samples * each.begin, num_samples * each.end
            found[each.name] = values[begin:end].reshape(num_samples, *each.shape)
        return found
