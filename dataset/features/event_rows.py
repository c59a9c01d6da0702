"""The decoded fields of some events, by event and by sample, and the events that are rejected.

Shapes: E events, G good ones, B samples, R rows: the events or the samples, as the field has them.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.dataset.features.cells import Cells, cells_of
from headrace.dataset.features.conversion import as_lists, is_list, list_parts
from headrace.dataset.features.slot_rules import is_below
from headrace.dataset.spec.event_format import Decoded, EventField, FieldKind
from headrace.errors import BadInput

MAX_REPEATED, MAX_REPEATED_BYTES = 1 << 20, 2_000_000
"""Most values of a list, and most bytes of a text, of an event in all its samples together."""
MAX_BLOCK_VALUES, MAX_BLOCK_TEXT = 1 << 24, 1 << 28
"""Of a block of several events, above which it is answered in parts: numbers of one field, and bytes of its texts."""
Bool = NDArray[np.bool_]
I64 = NDArray[np.int64]


class LargeBlock(BadInput):
    """The samples of a block are too large together; those of each of its events are not."""


class EventRows:
    """The fields of the events that could be decoded. `errors` has the reason for each rejected event; rows of an
    event that is rejected later stay, with any values."""

    def __init__(self, decoded: Decoded, fields: Sequence[EventField], explode: str | None) -> None:
        self.errors: dict[int, str] = dict(decoded.errors)
        self.explode = explode
        self._kinds = {field.path: field.kind for field in fields}
        columns: dict[str, pa.Array] = {}
        for index, field in enumerate(fields):
            column = columns[field.path] = decoded.fields.column(index)
            kind = column.type.value_type if is_list(column.type) else column.type
            if not kind.equals(field.type):
                raise ValueError(f"a decoder gave field {field.path!r} as {column.type}; it must be of {field.type}")
        self._find_unexploded(columns)
        good_E = np.ones(decoded.fields.num_rows, np.bool_)
        good_E[list(self.errors)] = False
        if self.errors:
            columns = {path: column.filter(pa.array(good_E)) for path, column in columns.items()}
        self._columns = columns
        self._event_G = np.flatnonzero(good_E).astype(np.int64)
        self.row_B = self._rows()

    def _find_unexploded(self, columns: dict[str, pa.Array]) -> None:
        root = next((path for path in columns if is_below(path, self.explode)), None)
        if root is not None and columns[root].null_count:
            for event in np.flatnonzero(columns[root].is_null().to_numpy(zero_copy_only=False)).tolist():
                self.errors.setdefault(event, f"field {self.explode!r} of pipe.explode is absent")

    def _rows(self) -> I64:
        """(B,) the good event of each sample."""
        all_G = np.arange(len(self._event_G), dtype=np.int64)
        root = next((path for path in self._columns if is_below(path, self.explode)), None)
        return all_G if root is None else np.repeat(all_G, self.lengths(root).value_N)

    @property
    def event_B(self) -> I64:
        """(B,) the event of each sample."""
        return self._event_G[self.row_B]

    def lengths(self, path: str) -> Cells:
        """(G) the number of elements of a list of each event; a single value counts as one."""
        column = self._columns[path]
        if self._kinds[path] is not FieldKind.LENGTH:
            column = pc.list_value_length(as_lists(column)).cast(pa.int64())
        return cells_of(column)

    def cells(self, path: str) -> Cells:
        """(R) the values of a field: by sample if it is below pipe.explode, else by event."""
        column = self._columns[path]
        if not is_below(path, self.explode):
            return cells_of(column)
        _, values = list_parts(as_lists(column))
        if len(values) != len(self.row_B):
            raise ValueError(f"field {path!r} has {len(values)} elements in {len(self.row_B)} exploded ones")
        return cells_of(values)

    def by_sample(self, path: str, cells: Cells) -> Cells:
        """(B) cells that were made from `cells(path)`, by sample.

        Rejects events whose values would be repeated too often; raises LargeBlock for several that are too large
        together."""
        if self.explode is None or is_below(path, self.explode):
            return cells
        texts = isinstance(cells.value_N, pa.Array)
        most, unit = (MAX_REPEATED_BYTES, "bytes") if texts else (MAX_REPEATED, "values")
        size_R, repeats_R = cells.sizes(), np.bincount(self.row_B, minlength=len(cells))
        if (wrong_R := size_R * repeats_R > np.maximum(most, repeats_R)).any():
            self.reject(path, wrong_R, f"field {path!r}: more than {most:,} {unit} in the samples of an event")
            cells, size_R = cells.without(wrong_R), np.where(wrong_R, 0, size_R)
        self.check_block(int((size_R * repeats_R).sum()), f"{unit} of field {path!r}", texts=texts)
        return cells.take(self.row_B)

    def check_block(self, size: int, what: str, *, texts: bool = False) -> None:
        """Raise LargeBlock if several events have more values, or bytes of texts, than a block may have."""
        if size > (MAX_BLOCK_TEXT if texts else MAX_BLOCK_VALUES) and len(self._event_G) > 1:
            raise LargeBlock(f"a block of events has {size:,} {what}; lower pipe.batch_events")

    def reject(self, path: str, wrong_R: Bool, reason: str) -> None:
        """Reject the events of some rows of `cells(path)`, where they have samples."""
        if wrong_R.any():
            self.reject_samples(wrong_R if is_below(path, self.explode) else wrong_R[self.row_B], reason)

    def reject_samples(self, wrong_B: Bool, reason: str) -> None:
        """Reject the events of some samples."""
        for event in np.unique(self.event_B[wrong_B]).tolist() if wrong_B.any() else ():
            self.errors.setdefault(event, reason)
