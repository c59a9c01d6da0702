"""Parquet files of vectors, as a source of an import: columns slot, sign or key, vector and, optionally, weight.

`slot` is text; it may be missing if only one slot is imported. `sign` is uint64 (or int64, not negative); for slots
with string values it may be the text itself. `key`, instead of `sign`, is the key as *this* job computes it. `vector`
is a list with as many numbers as the table's dim. `show`, `click` and `delta_score`, if there, are those of the row.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.keys import sign_of_text
from headrace.trainer.importing.source import SourceRows

BATCH_ROWS = 65_536
STATISTICS = ("show", "click", "delta_score")
KNOWN = ("slot", "sign", "key", "vector", "weight", *STATISTICS)


def parquets_of(path: Path) -> list[Path]:
    """The file itself, or the Parquet files of a folder, in order."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted(path.glob("*.parquet")) if path.is_dir() else []


class ParquetSource:
    def __init__(self, path: Path, slot: str | None) -> None:
        """`slot`: the slot of all rows, for files without that column. Raises BadInput."""
        self._path, self._slot = path, slot
        self._files = parquets_of(path)
        for file in self._files:
            with _parquet(file) as parquet:
                self._check(file, parquet.schema_arrow)

    def _check(self, file: Path, schema: pa.Schema) -> None:
        names = set(schema.names)
        if "slot" not in names and self._slot is None:
            raise BadInput(f"{file}: has no column 'slot'; add one, or name the only slot with --slots")
        if len(names & {"sign", "key"}) != 1:
            raise BadInput(
                f"{file}: must have either a column 'sign' or a column 'key'; it has {', '.join(schema.names)}"
            )
        if not names & {"vector", "weight"}:
            raise BadInput(f"{file}: has neither a column 'vector' nor 'weight'; it has {', '.join(schema.names)}")

    def batches(self) -> Iterator[SourceRows]:
        for file in self._files:
            try:
                with _parquet(file) as parquet:
                    names = [name for name in KNOWN if name in parquet.schema_arrow.names]
                    first = 0
                    for batch in parquet.iter_batches(BATCH_ROWS, columns=names):
                        yield self._brought(file.name, first, batch)
                        first += batch.num_rows
            except (OSError, pa.ArrowException) as error:
                raise BadInput(f"{file}: cannot be read: {error}") from error

    def _brought(self, file: str, first: int, batch: pa.RecordBatch) -> SourceRows:
        columns = {name: batch.column(name) for name in batch.schema.names}
        for name, column in columns.items():
            if column.null_count:
                row = first + int(np.flatnonzero(~column.is_valid().to_numpy(zero_copy_only=False))[0])
                raise BadInput(f"{file}, row {row}: {name} is null")
        slots, slot_R = self._slots_of(columns, batch.num_rows)
        floats = {
            name: _floats(columns[name], f"{file}: {name}") for name in ("weight", *STATISTICS) if name in columns
        }
        return SourceRows(
            slots=slots,
            slot_R=slot_R,
            sign_R=_whole(columns["sign"], f"{file}: sign") if "sign" in columns else None,
            key_R=_whole(columns["key"], f"{file}: key") if "key" in columns else None,
            weight_R=floats.pop("weight", None),
            vector_RD=_vectors(columns["vector"], file, first) if "vector" in columns else None,
            whole_R=None,
            statistics=floats,
            where=lambda row: f"{file}, row {first + row}",
        )

    def _slots_of(self, columns: Mapping[str, pa.Array], num_rows: int) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        if "slot" not in columns:
            assert self._slot is not None
            return (self._slot,), np.zeros(num_rows, np.int32)
        slots = columns["slot"]
        slots = slots if pa.types.is_dictionary(slots.type) else slots.dictionary_encode()
        names = tuple(str(name) for name in slots.dictionary.to_pylist())
        return names, slots.indices.to_numpy(zero_copy_only=False).astype(np.int32)

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """None."""
        return {}

    def facts(self) -> Mapping[str, Any]:
        return {"kind": "parquet", "path": str(self._path)}


def _parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{file}: cannot be read: {error}") from error


def _whole(column: pa.Array, what: str) -> NDArray[np.uint64]:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.array([sign_of_text(text.encode()) for text in column.to_pylist()], np.uint64)
    if not pa.types.is_integer(column.type):
        raise BadInput(f"{what}: is {column.type}, must be uint64")
    numbers = column.to_numpy(zero_copy_only=False)
    if len(numbers) and numbers.min() < 0:
        raise BadInput(f"{what}: {int(numbers.min())} is negative; write it as uint64")
    return np.asarray(numbers, np.uint64)


def _floats(column: pa.Array, what: str) -> NDArray[np.float32]:
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise BadInput(f"{what}: is {column.type}, must be a number")
    with np.errstate(over="ignore"):  # see _vectors
        numbers: NDArray[np.float32] = column.to_numpy(zero_copy_only=False).astype(np.float32)
    return numbers


def _vectors(column: pa.Array, file: str, first: int) -> NDArray[np.float32]:
    kind = column.type
    if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise BadInput(f"{file}: vector is {kind}, must be a list of numbers")
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if len(lengths) and (lengths != lengths[0]).any():
        row = int(np.flatnonzero(lengths != lengths[0])[0])
        raise BadInput(f"{file}, row {first + row}: its vector has {lengths[row]} numbers, others have {lengths[0]}")
    values = column.flatten()
    if values.null_count or not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
        raise BadInput(f"{file}: vector is {kind}, must be a list of numbers without nulls")
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite; an error then names the row
        numbers: NDArray[np.float32] = values.to_numpy(zero_copy_only=False).astype(np.float32)
    return numbers.reshape(len(column), int(lengths[0]) if len(lengths) else 0)
