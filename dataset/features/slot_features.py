"""The values of one slot: from the fields of events, by the keys of the slot, in this order.

`from`; `split`, `time`, `count` or `in`; `buckets` or `log`, then `scale`; `default`; `hash`.

Shapes: R rows, N values of all rows, B samples.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.dataset.features.cells import Cells, cross, part_of_time, seconds_of, split_texts
from headrace.dataset.features.conversion import conform
from headrace.dataset.features.event_rows import EventRows
from headrace.dataset.features.feature_kernels import find_members, hash_signs, log_values
from headrace.dataset.features.slot_rules import source_of
from headrace.dataset.formats.arrow_columns import META_TYPES
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.event_format import EventField, FieldKind
from headrace.dataset.spec.feature_keys import TimeUnit
from headrace.dataset.spec.schema import Slot
from headrace.errors import BadInput
from headrace.keys import sign_of_text

MAX_CROSSED_SIGNS = 1024
"""Most ids of a cross in one sample; an event with more is rejected."""
MAX_OFFSET = (1 << 31) - 1
"""Largest offset of a list column."""

Bool = NDArray[np.bool_]


def _numbers(slot: Slot, path: str, rows: EventRows, kind: FieldKind) -> tuple[str, Cells]:
    """The values of a slot before `buckets`, `log` and `scale`, and the path whose rows they have: by event, or below
    pipe.explode by sample. Texts are split to values of `kind`."""
    entry = slot.entry
    if entry.count:
        return "", rows.lengths(path)
    cells = rows.cells(path)
    if entry.time is not None:
        second_N, wrong_N = seconds_of(cells, entry.unit or TimeUnit.SECONDS)
        _reject(rows, path, cells, wrong_N, f"slot {slot.name!r}: field {path!r} is no time of the years 1 to 9999")
        return path, cells.with_values(part_of_time(second_N, entry.time))
    if entry.split is not None:
        cells = split_texts(cells, entry.split)
        found, wrong = conform(cells.value_N, EventField(path, kind))
        wrong_N = np.zeros(len(found), np.bool_)
        wrong_N[[n for n, _ in wrong]] = True
        _reject(rows, path, cells, wrong_N, f"slot {slot.name!r}: {wrong[0][1] if wrong else ''}")
        if kind is not FieldKind.TEXT:
            return path, cells.with_values(found.fill_null(0).to_numpy(zero_copy_only=False))
    return path, cells


def _reject(rows: EventRows, path: str, cells: Cells, wrong_N: Bool, reason: str) -> None:
    """Reject the events of some values of a field."""
    if wrong_N.any():
        wrong_R = np.zeros(len(cells), np.bool_)
        wrong_R[cells.row_of()[wrong_N]] = True
        rows.reject(path, wrong_R, reason)


def signs_of(slot: Slot, rows: EventRows) -> Cells:
    """(B) the ids of a sparse slot."""
    entry = slot.sparse
    texts = entry.values == "string"
    path, cells = _numbers(slot, source_of(slot, rows.explode), rows, FieldKind.TEXT if texts else FieldKind.WHOLE)
    if entry.buckets:
        value_N = np.asarray(cells.value_N, np.float64)
        _reject(rows, path, cells, ~np.isfinite(value_N), f"slot {slot.name!r}: a value is not finite")
        cells = cells.with_values(np.searchsorted(np.array(entry.buckets, np.float64), value_N, side="right"))
    cells = _as_signs(slot, path, rows, cells)
    if entry.default is not None:
        cells = cells.filled(_default_sign(entry))
    return rows.by_sample(path, _hashed(entry, cells))


def _as_signs(slot: Slot, path: str, rows: EventRows, cells: Cells) -> Cells:
    """Texts by their hash; whole numbers as they are, if they are not negative."""
    if not isinstance(cells.value_N, pa.Array) and cells.value_N.dtype == np.int64:
        _reject(rows, path, cells, cells.value_N < 0, f"slot {slot.name!r}: an id is negative")
    return cells.signs()


def _default_sign(entry: SparseSlot) -> np.uint64:
    if isinstance(entry.default, str):
        return np.uint64(sign_of_text(entry.default.encode()))
    return np.uint64(int(entry.default or 0))


def _hashed(entry: SparseSlot, cells: Cells) -> Cells:
    if entry.hash is None:
        return cells
    out_N = np.empty(len(cells.value_N), np.uint64)
    hash_signs(cells.value_N, entry.hash, out_N)
    return cells.with_values(out_N)


def crossed_of(slot: Slot, rows: EventRows, signs: Mapping[str, Cells]) -> Cells:
    """(B) the ids of a cross; `signs` has those of the plain sparse slots."""
    parts = []
    for part in slot.entry.cross:
        if part in signs:
            parts.append(signs[part])
        else:
            cells = _as_signs(slot, part, rows, rows.cells(part))
            parts.append(rows.by_sample(part, cells))
    if any(part.offset_R1 is not None for part in parts):
        num_B = np.prod([np.diff(part.offsets) for part in parts], axis=0, dtype=np.float64)
        if (wrong_B := num_B > MAX_CROSSED_SIGNS).any():
            rows.reject_samples(wrong_B, f"slot {slot.name!r}: more than {MAX_CROSSED_SIGNS} ids in a sample")
        empty_B = wrong_B | (num_B == 0)
        if empty_B.any():  # also where the last part alone is empty: all before it are crossed
            parts[0] = parts[0].without(empty_B)
        rows.check_block(int(num_B[~empty_B].sum()), f"ids of slot {slot.name!r}")
    return _hashed(slot.sparse, cross(parts))


def sign_lists(cells: Cells) -> pa.Array:
    """(B,) ids as a list column. Raises BadInput beyond 2**31."""
    offset_B1 = cells.offsets
    if offset_B1[-1] > MAX_OFFSET:
        raise BadInput(f"a block of events has {offset_B1[-1]:,} ids in one slot; lower pipe.batch_events")
    return pa.ListArray.from_arrays(pa.array(offset_B1.astype(np.int32)), pa.array(cells.value_N))


def dense_of(slot: Slot, rows: EventRows) -> pa.Array:
    """(B,) the floats of a dense slot, in lists of its size."""
    entry = slot.entry
    assert isinstance(entry, DenseSlot)
    source = source_of(slot, rows.explode)
    path, cells = _numbers(slot, source, rows, FieldKind.NUMBER)
    cells = _scaled(slot, path, rows, cells)
    if entry.default is not None:
        cells = cells.filled(float(entry.default))
    length_R = np.diff(cells.offsets)
    wrong_R = length_R != entry.size
    needs = f"slot {slot.name!r} needs {entry.size} number{'s' * (entry.size > 1)} from field {source!r}"
    rows.reject(path, wrong_R & (length_R == 0), f"{needs}, which is absent")
    rows.reject(path, wrong_R, f"{needs}, which has another number of values")
    if wrong_R.any():
        filled_RD = np.zeros((len(cells), entry.size))
        filled_RD[~wrong_R] = cells.without(wrong_R).value_N.reshape(-1, entry.size)
    else:
        filled_RD = np.asarray(cells.value_N, np.float64).reshape(-1, entry.size)
    with np.errstate(over="ignore"):  # to infinity, which is rejected where answers are read
        matrix_RD = filled_RD.astype(np.float32)
    matrix_BD = rows.by_sample(path, Cells(np.arange(len(matrix_RD), dtype=np.int64))).value_N
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix_RD[matrix_BD].reshape(-1)), entry.size)


def _scaled(slot: Slot, path: str, rows: EventRows, cells: Cells) -> Cells:
    entry = slot.entry
    if entry.log:
        value_N = np.asarray(cells.value_N, np.float64)
        out_N = np.empty(len(value_N), np.float64)
        log_values(value_N, out_N)
        wrong_N = np.isnan(out_N) & ~np.isnan(value_N)
        _reject(rows, path, cells, wrong_N, f"slot {slot.name!r}: a value has no logarithm: it is -1 or less")
        cells = cells.with_values(out_N)
    if entry.scale is not None:
        with np.errstate(over="ignore"):
            cells = cells.with_values(np.asarray(cells.value_N, np.float64) * entry.scale)
    return cells


def meta_of(slot: Slot, rows: EventRows) -> pa.Array:
    """(B,) the values of a meta slot; null where there is none."""
    entry = slot.entry
    assert isinstance(entry, MetaSlot)
    path = source_of(slot, rows.explode)
    if entry.members is not None:
        return _members(slot, path, rows)
    path, cells = _numbers(slot, path, rows, FieldKind.NUMBER)
    length_R = np.diff(cells.offsets)
    if (many_R := length_R > 1).any():
        rows.reject(path, many_R, f"slot {slot.name!r} needs one value, and has several")
        cells = cells.without(many_R)
    if entry.type == "uint64" and cells.value_N.dtype == np.int64:
        _reject(rows, path, cells, cells.value_N < 0, f"slot {slot.name!r}: a value is negative")
    cells = _scaled(slot, path, rows, cells)
    if not isinstance(cells.value_N, pa.Array):
        with np.errstate(over="ignore"):  # to infinity, which is rejected where answers are read
            cells = cells.with_values(cells.value_N.astype(META_TYPES[entry.type].to_pandas_dtype()))
    if entry.default is not None:
        cells = cells.filled(entry.default)
    return rows.by_sample(path, cells).nullable()


def _members(slot: Slot, path: str, rows: EventRows) -> pa.Array:
    """(B,) 1 where the value of a sample is in a list of its event, else 0; null where there is no value."""
    cells, lists = (
        each.signs() if isinstance(each.value_N, pa.Array) else each
        for each in (rows.cells(path), rows.cells(slot.entry.members or ""))
    )
    value_B = rows.by_sample(path, cells)
    many_B = np.diff(value_B.offsets) > 1
    rows.reject_samples(many_B, f"slot {slot.name!r} looks for one value, and has several")
    value_B = value_B.without(many_B) if many_B.any() else value_B
    sample_N = value_B.row_of()
    out_N = np.empty(len(sample_N), np.float32)
    find_members(value_B.value_N, rows.row_B[sample_N], lists.value_N, lists.offsets, out_N)
    return value_B.with_values(out_N).nullable()
