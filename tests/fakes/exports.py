"""Exports made by hand, as `trainer.exports` writes them: for tests of what reads them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from headrace.keys import key_of_reference
from headrace.pserver.store.row_store import sort_order_of

GROUPS = {"a": 0, "b": 1, "history": 2}
"""Slot groups as in tests.integration.stream_job."""
ROWS_A_FILE = 1_000_000


def name_of(version: int, kind: str) -> str:
    return f"{version:010d}-{kind}"


def write_export(
    folder: Path,
    kind: str,
    version: int,
    rows: Mapping[tuple[str, int], Any],
    gone: list[tuple[str, int]] = [],  # noqa: B006
    *,
    parent: tuple[int, str] | None = None,
    table: str = "default",
    dim: int = 4,
    first_order: bool = True,
    dtype: str = "float32",
    dense: Mapping[str, Any] = {},  # noqa: B006
    rows_a_file: int = ROWS_A_FILE,
    groups: Mapping[str, int] = GROUPS,
    **manifest: Any,
) -> Path:
    """An export in `folder`/<name>; `rows` gives (slot, sign) its values: weight, if there is one, then the vector."""
    out = folder / name_of(version, kind)
    out.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(_parts(sorted_rows(rows, groups), rows_a_file)):
        _parquet(out, files, f"rows-{table}-{number}.parquet", _rows_of(part, rows, dim, first_order, dtype, groups))
    if gone:
        _parquet(out, files, f"tombstones-{table}-0.parquet", _names_of(sorted_rows(gone, groups), groups))
    save_file({name: np.asarray(value, np.float32) for name, value in dense.items()}, out / "dense.safetensors")
    _note(out, files, "dense.safetensors")
    (out / "model.json").write_text("{}")
    _note(out, files, "model.json")
    by_slot = {slot: {"rows": sum(s == slot for s, _ in rows), "tombstones": sum(s == slot for s, _ in gone)}
               for slot in groups}  # fmt: skip
    facts = {"rows": len(rows), "tombstones": len(gone), "pending": 0, "pending_by": {}, "by_slot": by_slot,
             "model_rows": len(rows), "dim": dim, "first_order": first_order, "dtype": dtype}  # fmt: skip
    whole = {
        "format": 1, "job": "small", "timeline": "t1", "stream": "main", "kind": kind, "version": version,
        "name": out.name, "parent": None if parent is None else {"name": name_of(*parent), "version": parent[0]},
        "made_at": "2024-05-01T00:00:00+00:00", "positions": {"part-0.txt": 10 * version},
        "event_time": [0.0, 3600.0 * version], "day": 0, "tables": {table: facts}, "thresholds": {}, "metrics": {},
        "gates": {}, "onnx": {"ok": False, "why": "by hand"}, "golden": {"ok": False, "why": ""},
        "files": files, "why": "", "headrace": "0",
    } | manifest  # fmt: skip
    (out / "manifest.json").write_text(json.dumps(whole, indent=1))
    (out / "_DONE").touch()
    return out


def key(slot: str, sign: int, groups: Mapping[str, int] = GROUPS) -> int:
    return key_of_reference(sign, groups[slot])


def sorted_rows(rows: Any, groups: Mapping[str, int] = GROUPS) -> list[tuple[str, int]]:
    """As files have them."""
    return sorted(rows, key=lambda row: int(sort_order_of(np.array([key(*row, groups)], np.uint64))[0]))


def _parts(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _names_of(rows: list[tuple[str, int]], groups: Mapping[str, int]) -> dict[str, pa.Array]:
    return {
        "slot": pa.array([slot for slot, _ in rows], pa.string()).dictionary_encode(),
        "sign": pa.array([sign for _, sign in rows], pa.uint64()),
        "key": pa.array([key(*row, groups) for row in rows], pa.uint64()),
    }


def _rows_of(part: Any, rows: Any, dim: int, first_order: bool, dtype: str, groups: Any) -> dict[str, pa.Array]:
    columns = _names_of(part, groups)
    values = np.array([rows[row] for row in part], np.float32).reshape(len(part), dim + first_order)
    plain = np.float32 if dtype == "int8" else np.dtype(dtype)
    if first_order:
        columns["weight"] = pa.array(values[:, 0].astype(plain))
    if dim:
        vectors = values[:, int(first_order) :]
        if dtype == "int8":
            scale = (np.abs(vectors).max(axis=1) / 127).astype(np.float32)
            vectors = np.round(vectors / np.where(scale, scale, 1)[:, None]).astype(np.int8)
        vectors = vectors.astype(dtype)
        columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dim)
        if dtype == "int8":
            columns["scale"] = pa.array(scale)
    return columns


def _parquet(out: Path, files: dict[str, dict[str, Any]], name: str, columns: dict[str, pa.Array]) -> None:
    pq.write_table(pa.table(columns), out / name)
    _note(out, files, name, len(columns["key"]))


def _note(out: Path, files: dict[str, dict[str, Any]], name: str, rows: int | None = None) -> None:
    content = (out / name).read_bytes()
    files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    files[name] |= {} if rows is None else {"rows": rows}
