"""Parses MultiSlot text to samples: `count v1 .. vcount` for each slot in the order of the spec, one sample per line.

The parser takes chunks of whole lines. Bad lines are rejected one by one with reason and place; the others are kept.
The loops are in `dataset.formats.multislot_kernels`; `parse_line_reference` is their plain twin and the definition.
`dataset.samples.trim` drops padding and cuts long sequences.

Shapes: S slots, C sparse slots, F float cells, W word cells, B lines, N signs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.formats.multislot_kernels import CellKind, LineFault, gather_signs, scan
from headrace.dataset.formats.plain_lines import LINE_FEED, MAX_TOKEN_BYTES, parse_singles
from headrace.dataset.samples.batch import F32, I64, U64, Ragged, Samples
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SlotKind
from headrace.dataset.spec.schema import Schema, Slot
from headrace.keys import sign_of_text

REASONS = {
    LineFault.WRONG_COUNT: Reason.WRONG_COUNT,
    LineFault.UNPARSABLE: Reason.UNPARSABLE,
    LineFault.LABEL_MISSING: Reason.LABEL_MISSING,
    LineFault.NON_FINITE: Reason.NON_FINITE,
    LineFault.NOT_UTF8: Reason.NOT_UTF8,
    LineFault.GENERATOR: Reason.GENERATOR,
}
NUMBERS = frozenset({CellKind.SIGN, CellKind.DENSE, CellKind.META_FLOAT})
"""Slots of these alone may be read the quick way."""
MAX_TAIL_BYTES = 1 << 16
"""Most bytes at the end of a text that are copied, to have room behind them."""
SKIPPED_CHUNKS = 16
"""Chunks that are not tried the quickest way after one that it could not read."""
META_CELLS = {
    "float": CellKind.META_FLOAT,
    "uint64": CellKind.META_UNSIGNED,
    "int64": CellKind.META_SIGNED,
    "string": CellKind.META_TEXT,
}


@dataclass(frozen=True, slots=True)
class BadLine:
    """A rejected line."""

    line: int
    """Number of the line, from 1."""
    reason: Reason
    detail: str
    data: bytes
    slot: str | None
    """The slot with the fault; None if the fault is of the whole line."""


def cell_kind_of(slot: Slot) -> CellKind:
    """How values of a slot are stored."""
    match slot.entry:
        case DenseSlot():
            return CellKind.DENSE
        case MetaSlot(type=kind):
            return META_CELLS[kind]
        case _:
            return CellKind.SIGN if slot.sparse.values == "uint64" else CellKind.TEXT_SIGN


class MultiSlotParser:
    """Parses the output of one segment, chunk by chunk.

    `masks` maps a label that may be absent to the meta slot that is 0 where it is, or to "" if it may always be absent.
    Such an absent label becomes NaN. Any other absent label is a fault.
    """

    def __init__(self, schema: Schema, masks: Mapping[str, str] | None = None) -> None:
        self._schema, self._masks = schema, dict(masks or {})
        self._cells = [cell_kind_of(slot) for slot in schema.slots]
        self._sizes = [slot.entry.size if isinstance(slot.entry, DenseSlot) else 1 for slot in schema.slots]
        self._columns: list[int] = []
        self._num_sparse = self._num_floats = self._num_words = 0
        for cell, size in zip(self._cells, self._sizes, strict=True):
            match cell:
                case CellKind.SIGN | CellKind.TEXT_SIGN:
                    self._columns.append(self._num_sparse)
                    self._num_sparse += 1
                case CellKind.DENSE | CellKind.META_FLOAT:
                    self._columns.append(self._num_floats)
                    self._num_floats += size
                case _:
                    self._columns.append(self._num_words)
                    self._num_words += 1
        self._tries_singles = bool(self._cells) and NUMBERS.issuperset(self._cells)
        self._num_skipped = SKIPPED_CHUNKS
        self._slots_S3 = np.array([self._cells, self._sizes, self._columns], np.int64).T.copy().reshape(-1, 3)

    def parse(self, data: bytes, num_before: int = 0) -> tuple[Samples, list[BadLine]]:
        """Samples and bad lines of `data`, in which every line ends with a line feed.

        `num_before`: number of lines before `data`; numbering continues there. `event_B` is a line's number minus 1.
        """
        text: NDArray[np.uint8] = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
        num_lines = int(np.count_nonzero(text == LINE_FEED))  # many times as fast as data.count
        text.setflags(write=False)
        if self._tries_singles and (samples := self._singles(text, num_lines, num_before)) is not None:
            return samples, []
        value_N = np.empty(len(data) // 2 + 1, np.uint64)
        count_CB = np.empty((self._num_sparse, num_lines), np.int64)
        float_BF = np.empty((num_lines, self._num_floats), np.float32)
        word_BW = np.empty((num_lines, self._num_words), np.uint64)
        slow_N5 = np.empty((len(data) // 2 + 1 if self._num_floats else 0, 5), np.int64)
        line_B4 = np.zeros((num_lines, 4), np.int64)
        num_slow = scan(text, 0, len(text), self._slots_S3, value_N, count_CB, float_BF, word_BW, slow_N5, line_B4)
        self._finish_slow(data, slow_N5[:num_slow], float_BF, line_B4)
        self._check_labels(float_BF, word_BW, line_B4)
        bad_lines = list(self._bad_lines(data, line_B4, num_before))
        good_B = line_B4[:, 0] == LineFault.FINE
        sparse = self._sparse(value_N, count_CB, line_B4)
        if bad_lines:
            float_BF, word_BW = float_BF[good_B], word_BW[good_B]
        return self._samples(data, sparse, float_BF, word_BW, np.flatnonzero(good_B) + num_before), bad_lines

    def _singles(self, text: NDArray[np.uint8], num_lines: int, num_before: int) -> Samples | None:
        """The samples of plain lines with one sign in each sparse slot; None if any line is not so."""
        if self._num_skipped < SKIPPED_CHUNKS:
            self._num_skipped += 1
            return None
        sign_CB = np.empty((self._num_sparse, num_lines), np.uint64)
        float_M = np.empty(num_lines * self._num_floats, np.float32)
        kind, slots_S3 = int(CellKind.SIGN), self._slots_S3
        at, row = parse_singles(text, 0, len(text), 0, kind, slots_S3, sign_CB, float_M)
        num_left = len(text) - at
        if 0 < num_left <= MAX_TAIL_BYTES:  # no word beyond the text may be read
            tail = np.zeros(num_left + MAX_TOKEN_BYTES, np.uint8)
            tail[:num_left] = text[at:]
            tail.setflags(write=False)
            at, row = parse_singles(tail, 0, num_left, row, kind, slots_S3, sign_CB, float_M)
            num_left -= at
        if num_left:
            self._num_skipped = 0
            return None
        offset_B1 = np.arange(num_lines + 1, dtype=np.int64)
        sparse: dict[str, Ragged] = {}
        dense: dict[str, F32] = {}
        meta: dict[str, NDArray[Any]] = {}
        for slot, cell, column, size in zip(self._schema.slots, self._cells, self._columns, self._sizes, strict=True):
            floats = float_M[column * num_lines : (column + size) * num_lines]
            if cell is CellKind.SIGN:
                sparse[slot.name] = Ragged(sign_CB[column], offset_B1)
            elif cell is CellKind.DENSE:
                dense[slot.name] = floats.reshape(num_lines, size)
            else:
                meta[slot.name] = floats
        line_B = np.arange(num_before, num_before + num_lines, dtype=np.int64)
        return Samples(sparse, dense, meta, line_B, np.full(num_lines, np.nan))

    def _finish_slow(self, data: bytes, slow_N5: I64, float_BF: F32, line_B4: I64) -> None:
        """Parse the numbers that the kernel left to Python."""
        for row, column, slot, begin, end in slow_N5.tolist():
            with np.errstate(over="ignore", under="ignore"):
                value = np.float32(float(data[begin:end]))
            float_BF[row, column] = value
            if not np.isfinite(value) and line_B4[row, 0] == LineFault.FINE:
                line_B4[row, :2] = LineFault.NON_FINITE, slot << 32 | begin

    def _check_labels(self, float_BF: F32, word_BW: U64, line_B4: I64) -> None:
        """Mark lines without a required label."""
        for slot, (cell, column) in enumerate(zip(self._cells, self._columns, strict=True)):
            if cell is CellKind.META_FLOAT:
                absent_B = np.isnan(float_BF[:, column]) & (line_B4[:, 0] == LineFault.FINE)
                if absent_B.any():
                    absent_B &= ~self._masked(self._schema.slots[slot].name, float_BF, word_BW)
                    line_B4[absent_B, 0] = LineFault.LABEL_MISSING
                    line_B4[absent_B, 1] = slot << 32 | line_B4[absent_B, 2]

    def _masked(self, label: str, float_BF: F32, word_BW: U64) -> NDArray[np.bool_]:
        """(B,) whether the label's mask is 0."""
        mask = self._masks.get(label)
        if mask is None:
            return np.zeros(len(float_BF), np.bool_)
        if not mask:
            return np.ones(len(float_BF), np.bool_)
        index = [slot.name for slot in self._schema.slots].index(mask)
        cells = float_BF if self._cells[index] is CellKind.META_FLOAT else word_BW
        return np.asarray(cells[:, self._columns[index]] == 0)

    def _bad_lines(self, data: bytes, line_B4: I64, num_before: int) -> Iterator[BadLine]:
        for row in np.flatnonzero(line_B4[:, 0] != LineFault.FINE).tolist():
            code, place, begin, _ = line_B4[row].tolist()
            fault, slot, at = LineFault(code), place >> 32, place & 0xFFFFFFFF
            reason = REASONS[fault]
            line = data[begin : data.index(b"\n", begin)]
            if fault is LineFault.GENERATOR:
                detail, name = line[1:].decode("utf-8", "replace").strip(), None
                reason = Reason.of_error(detail)
            elif slot == len(self._schema.slots):
                detail, name = f"more values than slots from byte {at - begin + 1}", None
            else:
                name = self._schema.slots[slot].name
                token = re.split(rb"[ \t\r\n]", data[at : at + 40], maxsplit=1)[0].decode("utf-8", "replace")
                found = f"{token!r}" if token else "the line's end"
                text = fault is LineFault.UNPARSABLE and self._cells[slot] is CellKind.SIGN and token[:1].isalpha()
                hint = '; for text, set values = "string" in the slot' if text and at > begin else ""
                detail = f"slot {name!r}: {found} at byte {at - begin + 1}{hint}"
            yield BadLine(num_before + row + 1, reason, detail, line, name)

    def _sparse(self, value_N: U64, count_CB: I64, line_B4: I64) -> Iterator[Ragged]:
        """The sparse slots, in order, of the lines without a fault."""
        good_B = line_B4[:, 0] == LineFault.FINE
        num_signs = int(count_CB[:, good_B].sum()) if not good_B.all() else int(count_CB.sum())
        out_N = np.empty(num_signs, np.uint64)
        offset_CB1 = np.zeros((self._num_sparse, len(line_B4) + 1), np.int64)
        num_rows = gather_signs(value_N, count_CB, line_B4, out_N, offset_CB1)
        for offset_B1 in offset_CB1[:, : num_rows + 1]:
            yield Ragged(out_N[offset_B1[0] : offset_B1[-1]], offset_B1 - offset_B1[0])

    def _samples(self, data: bytes, sparse: Iterator[Ragged], float_BF: F32, word_BW: U64, line_B: I64) -> Samples:
        dense: dict[str, F32] = {}
        meta: dict[str, NDArray[Any]] = {}
        for slot, cell, column, size in zip(self._schema.slots, self._cells, self._columns, self._sizes, strict=True):
            match cell:
                case CellKind.DENSE:
                    dense[slot.name] = np.ascontiguousarray(float_BF[:, column : column + size])
                case CellKind.META_FLOAT:
                    meta[slot.name] = np.ascontiguousarray(float_BF[:, column])
                case CellKind.META_UNSIGNED:
                    meta[slot.name] = np.ascontiguousarray(word_BW[:, column])
                case CellKind.META_SIGNED:
                    meta[slot.name] = np.ascontiguousarray(word_BW[:, column]).view(np.int64)
                case CellKind.META_TEXT:
                    places = word_BW[:, column].tolist()
                    texts = np.empty(len(places), object)
                    texts[:] = [data[place >> 32 : place & 0xFFFFFFFF].decode() for place in places]
                    meta[slot.name] = texts
                case CellKind.SIGN | CellKind.TEXT_SIGN:
                    pass
        columns = {slot.name: next(sparse) for slot in self._schema.slots if slot.kind is SlotKind.SPARSE}
        return Samples(columns, dense, meta, line_B.astype(np.int64), np.full(len(line_B), np.nan))


NUMERAL = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE)


def parse_line_reference(
    line: bytes, schema: Schema, masks: Mapping[str, str] | None = None
) -> dict[str, Any] | tuple[LineFault, str | None]:
    """Values of a line by slot; or its fault and the slot with the fault. Defines what the parser does."""
    if line.startswith(b"!"):
        return LineFault.GENERATOR, None
    tokens = [token for token in re.split(rb"[ \t\r]+", line) if token]
    values: dict[str, Any] = {}
    for slot in schema.slots:
        if not tokens:
            return LineFault.WRONG_COUNT, slot.name
        count = _unsigned_reference(tokens.pop(0))
        if count is None:
            return LineFault.UNPARSABLE, slot.name
        if slot.kind is not SlotKind.SPARSE:
            size = slot.entry.size if isinstance(slot.entry, DenseSlot) else 1
            if count != size and not (count == 0 and slot.kind is SlotKind.META):
                return LineFault.WRONG_COUNT, slot.name
        taken, tokens = tokens[:count], tokens[count:]
        read = [_value_reference(token, cell_kind_of(slot)) for token in taken]
        fault = next((value for value in read if isinstance(value, LineFault)), None)
        if fault is None and len(taken) < count:
            fault = LineFault.WRONG_COUNT
        if fault is None and count == 0 and slot.kind is SlotKind.META:
            read = [np.float32(np.nan)]
            fault = None if cell_kind_of(slot) is CellKind.META_FLOAT else LineFault.LABEL_MISSING
        if fault is not None:
            return fault, slot.name
        values[slot.name] = read[0] if slot.kind is SlotKind.META else read
    if tokens:
        return LineFault.WRONG_COUNT, None
    for slot in schema.meta:
        mask = (masks or {}).get(slot.name)
        if values[slot.name] != values[slot.name] and mask != "" and values.get(mask or "", 1) != 0:
            return LineFault.LABEL_MISSING, slot.name
    return values


def _unsigned_reference(token: bytes) -> int | None:
    if not re.fullmatch(rb"[0-9]+", token):
        return None
    # int() refuses thousands of digits; any number of leading zeros is allowed.
    digits = token.lstrip(b"0") or b"0"
    return int(digits) if len(digits) <= 20 and int(digits) < 1 << 64 else None


def _value_reference(token: bytes, cell: CellKind) -> Any:
    match cell:
        case CellKind.SIGN | CellKind.META_UNSIGNED:
            value = _unsigned_reference(token)
            return LineFault.UNPARSABLE if value is None else value
        case CellKind.META_SIGNED:
            value = _unsigned_reference(token[1:] if token[:1] in (b"+", b"-") else token)
            if value is None or value > (1 << 63) - (token[:1] != b"-"):
                return LineFault.UNPARSABLE
            return -value if token[:1] == b"-" else value
        case CellKind.TEXT_SIGN | CellKind.META_TEXT:
            try:
                text = token.decode()
            except UnicodeDecodeError:
                return LineFault.NOT_UTF8
            return text if cell is CellKind.META_TEXT else sign_of_text(token)
        case CellKind.DENSE | CellKind.META_FLOAT:
            if not NUMERAL.fullmatch(token):
                return LineFault.UNPARSABLE
            with np.errstate(over="ignore", under="ignore"):
                number = np.float32(float(token))
            return LineFault.NON_FINITE if np.isinf(number) or (cell is CellKind.DENSE and np.isnan(number)) else number
