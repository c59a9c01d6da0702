"""All rows in a folder, and back: plain .npy columns and JSON headers. Nothing is pickled.

    <folder>/save.json                          format number, tables, parts; the mark that the save is whole
    <folder>/part-<shard>/<table>/rows.json     rows and digest of one shard's part
    <folder>/part-<shard>/<table>/<column>.npy  keys, statistics, and slab: weights, then the optimizer's state

A save is written under another name and renamed last. It can be loaded onto any number of shards, whose rows are
chosen by key. The caller says which: this module knows no placement.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from pserver.config import TableSection
from pserver.digest import add
from pserver.errors import BadSave
from pserver.table import CHUNK_ROWS, COLUMNS, Table

FORMAT = 1
"""Number of the layout above; a reader that meets a newer one stops."""


@contextmanager
def new_save(folder: Path, tables: Mapping[str, TableSection], num_parts: int) -> Iterator[Path]:
    """A folder to write parts to, which becomes `folder` when the block ends well, and is removed otherwise.

    1. Make the unfinished folder. 2. Parts are written. 3. The header. 4. The rename: the save exists from here on.
    """
    if folder.exists():
        raise BadSave(f"{folder}: exists already; a save is never written over another")
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    try:
        if unfinished.exists():  # of a process that was killed
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)  # 1
        yield unfinished  # 2
        header = {"format": FORMAT, "parts": num_parts, "tables": {name: _layout(s) for name, s in tables.items()}}
        (unfinished / "save.json").write_text(json.dumps(header, indent=2))  # 3
        unfinished.rename(folder)  # 4
    except OSError as error:
        raise BadSave(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _layout(section: TableSection) -> dict[str, Any]:
    """What must be alike where rows are loaded."""
    kind = section.optimizer.kind
    per = getattr(section.optimizer, "per", None)
    return {"dim": section.dim, "first_order": section.first_order, "optimizer": f"{kind} by {per}" if per else kind}


def write_part(folder: Path, shard: int, tables: Mapping[str, Table]) -> None:
    """Write one shard's rows into the folder of `new_save`. Between passes only."""
    for name, table in tables.items():
        place = folder / f"part-{shard}" / name
        place.mkdir(parents=True)
        num_rows = table.num_rows
        files = {
            column: open_memmap(place / f"{column}.npy", mode="w+", dtype=dtype, shape=(num_rows,))
            for column, dtype in COLUMNS.items()
        }
        files["slab"] = open_memmap(place / "slab.npy", mode="w+", dtype=np.float32, shape=(num_rows, table.width))
        begin = 0
        for chunk in table.chunks():
            end = begin + len(chunk["keys"])
            for column, file in files.items():
                file[begin:end] = chunk[column]
            begin = end
        for file in files.values():
            file.flush()
        (place / "rows.json").write_text(json.dumps({"rows": num_rows, "digest": f"{table.digest():032x}"}))


def read_parts(folder: Path, tables: Mapping[str, Table], mine: Callable[[NDArray[np.uint64]], Any]) -> None:
    """Enter the rows of a save whose keys are `mine` into empty tables.

    Raises BadSave for what is no save, is of a newer format, does not fit the tables, or is damaged.
    """
    num_parts = check_header(folder, {name: table.section for name, table in tables.items()})
    for name, table in tables.items():
        if table.num_rows:
            raise BadSave(f"{folder}: cannot be loaded: table {name!r} holds {table.num_rows:,} rows already")
        for part in range(num_parts):
            place = folder / f"part-{part}" / name
            try:
                rows = json.loads((place / "rows.json").read_text())
                num_rows, digest = int(rows["rows"]), str(rows["digest"])
                files = {c: np.load(place / f"{c}.npy", mmap_mode="r", allow_pickle=False) for c in (*COLUMNS, "slab")}
            except (OSError, ValueError, KeyError) as error:
                raise BadSave(f"{place}: cannot be read: {error}") from error
            _read_part(place, table, files, num_rows, digest, mine)


def _read_part(
    place: Path,
    table: Table,
    files: Mapping[str, NDArray[Any]],
    num_rows: int,
    digest: str,
    mine: Callable[[NDArray[np.uint64]], Any],
) -> None:
    shapes = {column: (num_rows,) for column in COLUMNS} | {"slab": (num_rows, table.width)}
    for column, array in files.items():
        dtype = np.dtype(COLUMNS.get(column, np.float32))
        if array.dtype != dtype:
            raise BadSave(f"{place}/{column}.npy: holds {array.dtype}, not {dtype}: the save is damaged")
        if array.shape != shapes[column]:
            raise BadSave(f"{place}/{column}.npy: holds {array.shape}, not {shapes[column]}: the save is damaged")
    found = []
    for begin in range(0, num_rows, CHUNK_ROWS):
        chunk = {column: np.array(array[begin : begin + CHUNK_ROWS]) for column, array in files.items()}
        found.append(table.digest_of(chunk))
        chosen = mine(chunk["keys"])
        table.insert({column: array[chosen] for column, array in chunk.items()})
    if f"{add(found):032x}" != digest:
        raise BadSave(f"{place}: its rows do not have the digest written beside them: the save is damaged")


def check_header(folder: Path, tables: Mapping[str, TableSection]) -> int:
    """The number of parts of the save in `folder`, which must fit `tables`."""
    try:
        header = json.loads((folder / "save.json").read_text())
    except OSError as error:
        raise BadSave(f"{folder}: holds no whole save: {error}") from error
    except ValueError as error:
        raise BadSave(f"{folder}/save.json: not JSON: {error}") from error
    if header.get("format") != FORMAT:
        raise BadSave(f"{folder}: is of format {header.get('format')}; this Millrace reads format {FORMAT}")
    wanted = {name: _layout(section) for name, section in tables.items()}
    if header["tables"] != wanted:
        raise BadSave(f"{folder}: was saved from tables {header['tables']}; these are {wanted}")
    return int(header["parts"])
