"""The catalogue of items of a retrieval job: files with one item in each line, read whole and checked.

A line is a JSON object with the slots of the item, as samples have them; more fields are for filters alone. A Parquet
file has the same as columns. The order of items is that of the files.

Shapes: I items, N signs of one slot, B items of a block.
"""

import glob
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet
from numpy.typing import NDArray

from headrace.dataset.formats.arrow_columns import hash_texts
from headrace.errors import BadInput
from headrace.trainer.serving.slot_layout import F32, I64, NO_WEIGHTS, U64, InferenceInputs, TableSigns

MAX_ITEMS = 1 << 20
"""Most items of a catalogue: their vectors are computed anew for each version."""
MAX_BYTES = 2 << 30
"""Most bytes of all files of a catalogue, uncompressed."""
MAX_FILES = 10_000
MAX_FIELDS = 256
"""Most fields of an item."""
MAX_VALUES = 1 << 26
"""Most signs of one slot for all items."""
BLOCK_BYTES = 1 << 22
"""Bytes of lines that are parsed at a time; a line has fewer than two of them."""
WEIGHT = ".weight"

Bools = NDArray[np.bool_]


class CatalogueRefused(BadInput):
    """A catalogue that cannot be used; the one before it is still searched."""


@dataclass(frozen=True, slots=True)
class ItemSigns:
    """The signs of one slot for all items."""

    sign_N: U64
    offset_I1: I64
    weight_N: F32
    """NO_WEIGHTS where all are 1."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemCatalogue:
    """All items, checked against the slots of a model."""

    id_I: pa.Array
    """The values of the slot that tells items apart: texts, or uint64."""
    sign_I: U64
    slots: Mapping[str, ItemSigns]
    dense: Mapping[str, F32]
    """(I, size)."""
    fields: pa.Table
    """All fields, for filters."""

    def __len__(self) -> int:
        return len(self.id_I)

    def block(self, layout: Sequence[Any], dense: Mapping[str, int], begin: int, end: int) -> InferenceInputs:
        """The inputs of items `begin` to `end` for tables with these layouts; slots of no item have no signs."""
        num_items = end - begin
        signs = []
        for table in layout:
            parts, weights, offsets, place = [np.empty(0, np.uint64)], [], [], 0
            any_weighted = any(self._is_weighted(slot["name"]) for slot in table.slots)
            for slot in table.slots:
                item = self.slots.get(slot["name"])
                if item is None:
                    offsets.append(np.full(num_items + 1, place))
                    continue
                offset_B1 = item.offset_I1[begin : end + 1]
                of = slice(offset_B1[0], offset_B1[-1])
                parts.append(item.sign_N[of])
                if any_weighted:
                    has = len(item.weight_N)
                    weights.append(item.weight_N[of] if has else np.ones(len(parts[-1]), np.float32))
                offsets.append(offset_B1 - offset_B1[0] + place)
                place += len(parts[-1])
            weight_N = np.concatenate(weights) if weights else NO_WEIGHTS
            offset_SB1 = np.array(offsets, np.int64).reshape(len(table.slots), num_items + 1)
            signs.append(TableSigns(np.concatenate(parts), offset_SB1, weight_N))
        values = {
            name: self.dense[name][begin:end] if name in self.dense else np.zeros((num_items, size), np.float32)
            for name, size in dense.items()
        }
        return InferenceInputs(num_items, signs, values)

    def _is_weighted(self, slot: str) -> bool:
        return slot in self.slots and len(self.slots[slot].weight_N) > 0


def files_of(patterns: Sequence[str]) -> list[Path]:
    """The files of a catalogue, by pattern and name. Raises CatalogueRefused where there is none."""
    found: list[Path] = []
    for pattern in patterns:
        names = sorted(glob.glob(pattern, recursive=True))
        if not names:
            raise CatalogueRefused(f"catalogue: there is no file {pattern}")
        found += [Path(each) for each in names]
    if len(found) > MAX_FILES:
        raise CatalogueRefused(f"catalogue: {len(found):,} files; at most {MAX_FILES:,}")
    return list(dict.fromkeys(found))


def read_catalogue(
    patterns: Sequence[str], slot: str, item_slots: Sequence[str], described: Sequence[Mapping[str, Any]]
) -> ItemCatalogue:
    """Read the files. `slot` tells items apart; `described`: the slots of model.json. Raises CatalogueRefused: nothing
    of it may then be used."""
    by_name = {each["name"]: each for each in described if each["name"] in item_slots}
    tables, num_items, num_bytes = [], 0, 0
    for path in files_of(patterns):
        table, size = _table(path, by_name, MAX_BYTES - num_bytes)
        num_items, num_bytes = num_items + len(table), num_bytes + size
        if num_items > MAX_ITEMS:
            raise CatalogueRefused(f"{path}: more than {MAX_ITEMS:,} items; an index has room for so many")
        tables.append(table)
    try:
        whole = pa.concat_tables(tables, promote_options="default").combine_chunks()
    except pa.ArrowException as error:
        raise CatalogueRefused(f"catalogue: its files do not fit together: {error}") from None
    return catalogue_of(whole, slot, item_slots, described)


def catalogue_of(
    whole: pa.Table, slot: str, item_slots: Sequence[str], described: Sequence[Mapping[str, Any]]
) -> ItemCatalogue:
    """The catalogue of items whose fields are in memory, as in `read_catalogue`. Raises CatalogueRefused."""
    by_name = {each["name"]: each for each in described if each["name"] in item_slots}
    if len(whole) > MAX_ITEMS:
        raise CatalogueRefused(f"catalogue: more than {MAX_ITEMS:,} items; an index has room for so many")
    if not len(whole):
        raise CatalogueRefused("catalogue: its files have no item")
    slots, dense = dict[str, ItemSigns](), dict[str, F32]()
    for name, each in by_name.items():
        if each["kind"] == "dense":
            dense[name] = _dense(whole, name, int(each["size"]))
        else:
            slots[name] = _signs(whole, name, each["values"] == "string")
            if each["weighted"] and name + WEIGHT in whole.column_names:
                slots[name] = _weighted(whole, name, slots[name])
    id_I = _ids(whole, slot, slots[slot])
    return ItemCatalogue(id_I, slots[slot].sign_N, slots, dense, whole)


def _table(path: Path, by_name: Mapping[str, Mapping[str, Any]], room: int) -> tuple[pa.Table, int]:
    """The items of one file, and its bytes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CatalogueRefused(f"{path}: is no file; name files, or a pattern that only files fit")
        if path.suffix == ".parquet":
            file = pyarrow.parquet.ParquetFile(path)
            told = file.metadata
            if told.num_rows > MAX_ITEMS:
                raise CatalogueRefused(f"{path}: {told.num_rows:,} items; an index has room for {MAX_ITEMS:,}")
            size = sum(told.row_group(group).total_byte_size for group in range(told.num_row_groups))
            if size > room:
                raise CatalogueRefused(f"{path}: the catalogue has more than {MAX_BYTES:,} bytes")
            table = file.read()
        else:
            with pa.input_stream(str(path), compression="detect") as stream:
                content = stream.read(room + 1)
            size = len(content)
            if size > room:
                raise CatalogueRefused(f"{path}: the catalogue has more than {MAX_BYTES:,} bytes")
            if content.count(b"\n") > MAX_ITEMS:
                raise CatalogueRefused(f"{path}: more than {MAX_ITEMS:,} items; an index has room for so many")
            table = _of_lines(path, content, by_name)
        table.validate(full=True)  # texts that are not UTF-8 could not be answered
    except (pa.ArrowException, OSError) as error:
        raise CatalogueRefused(f"{path}: cannot be read: {error}") from None
    if table.num_columns > MAX_FIELDS:
        raise CatalogueRefused(f"{path}: {table.num_columns} fields; an item may have {MAX_FIELDS}")
    if len(set(table.column_names)) < table.num_columns:
        raise CatalogueRefused(f"{path}: two columns have one name")
    return table, size


def _of_lines(path: Path, content: bytes, by_name: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    content = content.lstrip()
    if not content:
        return pa.table({})
    reading = pyarrow.json.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
    end = content.find(b"\n")
    first = pyarrow.json.read_json(pa.BufferReader(content[: len(content) if end < 0 else end]), read_options=reading)
    known = []
    for name, slot in by_name.items():
        if name not in first.column_names:
            raise CatalogueRefused(f"{path}, line 1: the item has no {name!r}; it is a slot of the model's items")
        kind = _kind(slot)
        listed = pa.types.is_list(first.schema.field(name).type)
        known.append((name, pa.list_(kind) if listed else kind))
    parsing = pyarrow.json.ParseOptions(explicit_schema=pa.schema(known))
    return pyarrow.json.read_json(pa.BufferReader(content), read_options=reading, parse_options=parsing)


def _kind(slot: Mapping[str, Any]) -> pa.DataType:
    if slot["kind"] == "dense":
        return pa.float64()
    return pa.string() if slot["values"] == "string" else pa.uint64()


def _column(whole: pa.Table, name: str) -> pa.Array:
    """A field that no item may lack."""
    if name not in whole.column_names:
        raise CatalogueRefused(f"catalogue: items have no {name!r}; it is a slot of the model's items")
    column = whole[name].combine_chunks()
    column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if column.null_count:
        first = int(np.argmax(np.asarray(pc.is_null(column))))
        raise CatalogueRefused(
            f"catalogue, item {first + 1}: has no {name!r}; write an empty list for a slot without values"
        )
    return column


def _values(whole: pa.Table, name: str) -> tuple[pa.Array, I64]:
    """(N,) the values of a field and (I + 1,) where each item's begin."""
    column = _column(whole, name)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        offset_I1 = np.zeros(len(column) + 1, np.int64)
        np.cumsum(np.asarray(pc.list_value_length(column)), out=offset_I1[1:])
        values = column.flatten()
    else:
        offset_I1, values = np.arange(len(column) + 1, dtype=np.int64), column
    if values.null_count:
        raise CatalogueRefused(
            f"catalogue, item {_item(offset_I1, np.asarray(pc.is_null(values)))}: {name!r} has an empty value in a list"
        )
    if len(values) > MAX_VALUES:
        raise CatalogueRefused(f"catalogue: {name!r} has {len(values):,} values; at most {MAX_VALUES:,}")
    return values, offset_I1


def _signs(whole: pa.Table, name: str, is_text: bool) -> ItemSigns:
    values, offset_I1 = _values(whole, name)
    kind = values.type
    if is_text:
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)) and len(values):
            raise CatalogueRefused(f"catalogue: {name!r} is {kind}; the slot has texts")
        data = values.cast(pa.large_binary())
        ends = np.frombuffer(data.buffers()[1], np.int64)[data.offset : data.offset + len(data) + 1]
        content = data.buffers()[2]
        raw = np.frombuffer(content, np.uint8) if content is not None else np.empty(0, np.uint8)
        sign_N: U64 = np.empty(len(data), np.uint64)
        hash_texts(raw, ends, sign_N)
    else:
        if not pa.types.is_integer(kind):
            raise CatalogueRefused(f"catalogue: {name!r} is {kind}; the slot has whole numbers from 0")
        try:
            sign_N = values.cast(pa.uint64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException as error:
            raise CatalogueRefused(f"catalogue: {name!r} has a number that is no sign: {error}") from None
    return ItemSigns(sign_N, offset_I1, NO_WEIGHTS)


def _weighted(whole: pa.Table, name: str, signs: ItemSigns) -> ItemSigns:
    values, offset_I1 = _values(whole, name + WEIGHT)
    if not np.array_equal(offset_I1, signs.offset_I1):
        raise CatalogueRefused(f"catalogue: {name + WEIGHT!r} has not one number for each value of {name!r}")
    return ItemSigns(signs.sign_N, signs.offset_I1, _finite(values, offset_I1, name + WEIGHT))


def _dense(whole: pa.Table, name: str, size: int) -> F32:
    values, offset_I1 = _values(whole, name)
    lengths = np.diff(offset_I1)
    if (lengths != size).any():
        first = int(np.argmax(lengths != size))
        raise CatalogueRefused(
            f"catalogue, item {first + 1}: {name!r} has {lengths[first]} numbers; the slot has {size}"
        )
    return _finite(values, offset_I1, name).reshape(-1, size)


def _item(offset_I1: I64, wrong_N: Bools) -> int:
    """The number of the item, from 1, with the first wrong value."""
    return int(np.searchsorted(offset_I1, int(np.argmax(wrong_N)), side="right"))


def _finite(values: pa.Array, offset_I1: I64, name: str) -> F32:
    try:
        with np.errstate(over="ignore"):
            found: F32 = values.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float32)
    except pa.ArrowException as error:
        raise CatalogueRefused(f"catalogue: {name!r} is no number: {error}") from None
    if not (is_finite_N := np.isfinite(found)).all():
        raise CatalogueRefused(
            f"catalogue, item {_item(offset_I1, ~is_finite_N)}: {name!r} has a number that is not finite, or too large"
        )
    return found


def _ids(whole: pa.Table, slot: str, signs: ItemSigns) -> pa.Array:
    """One value for each item, each once."""
    lengths = np.diff(signs.offset_I1)
    if (lengths != 1).any():
        first = int(np.argmax(lengths != 1))
        raise CatalogueRefused(
            f"catalogue, item {first + 1}: has {lengths[first]} values of {slot!r}, which tells items apart; write one"
        )
    values, _ = _values(whole, slot)
    order = np.argsort(signs.sign_N, kind="stable")
    same = np.flatnonzero(signs.sign_N[order[1:]] == signs.sign_N[order[:-1]])
    if len(same):
        one, other = sorted((int(order[same[0]]), int(order[same[0] + 1])))
        raise CatalogueRefused(
            f"catalogue: items {one + 1} and {other + 1} have the same {slot!r}, {values[other].as_py()!r}; keep one"
        )
    return values
