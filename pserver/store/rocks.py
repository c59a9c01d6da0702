"""Committed rows in RocksDB: one live folder per table and shard, linked from a checkpoint and into the next one.

Nothing is ever in a memtable and RocksDB's own log is never written: `write` makes one sorted file, syncs it and lets
RocksDB take it in whole. A row is durable only as part of a commit, whose manifest names every file of a checkpoint
by its hash; whatever came after the newest commit is trained again from the job's log, which therefore is the log.
A live folder of a process that died is garbage.

Key: 8 bytes, big-endian, of `order_of(key)`. Value: the row's W words, little-endian. `rows.json` beside RocksDB's
files holds the format's number and W.

Shapes: U unique keys, W words (uint32) of a row.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DbClosedError,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    SstFileWriter,
)

from millrace.keys import NUM_BUCKETS
from millrace.points import Point, reach
from pserver.errors import PserverError, StoreDamaged, StoreFailed
from pserver.store.base import BUCKET_BITS, U32, U64, StoredFile, keys_at, order_of

FORMAT = 1
"""Number of the layout above; a reader that meets a newer one stops."""
HEADER = "rows.json"
NEXT = "next.sst.part"
"""The file `write` makes, in the live folder: RocksDB leaves alone what it cannot name."""

WRITE_CHUNK = 65_536
GET_CHUNK = 1_024
SCAN_CHUNK, SCAN_BITE = 65_536, 4_096
READAHEAD_BYTES = 2 << 20


class RocksRows:
    """See pserver.store.base.RowStore."""

    def __init__(self, live: Path, num_words: int, known: Mapping[str, StoredFile]) -> None:
        self.num_words = num_words
        self._live = live
        self._known = dict(known)
        self._db = _opened(live)

    @classmethod
    def open(
        cls, live: Path, checkpoint: Path | None, *, num_words: int, known: Mapping[str, StoredFile] | None = None
    ) -> Self:
        """Make the folder `live`, which does not exist, from a checkpoint's files or empty, and open it.

        `known` are the checkpoint's files as a manifest lists them: those that stay as they are are not hashed again.
        Raises StoreDamaged where the checkpoint is not whole or its rows are not of `num_words` words.
        """
        assert not live.exists(), live
        try:
            with _translated(live):
                live.mkdir(parents=True)
                if checkpoint is None:
                    (live / HEADER).write_text(json.dumps({"format": FORMAT, "words": num_words}))
                else:
                    _link(checkpoint, live)
            _check_header(live / HEADER, num_words)
            reach(Point.RESTORE_LINKED)
            return cls(live, num_words, known or {})
        except PserverError:
            shutil.rmtree(live, ignore_errors=True)
            raise

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        """See RowStore."""
        order_U = np.argsort(keys := order_of(keys_U))
        wanted = _key_bytes(keys[order_U])
        values: list[Any] = []
        with _translated(self._live):
            for begin in range(0, len(wanted), GET_CHUNK):
                chunk: list[Any] = wanted[begin : begin + GET_CHUNK]
                values += self._db.get(chunk) or []
        sorted_found_U = np.fromiter((value is not None for value in values), bool, len(values))
        rows_UW = self._rows_of([value for value in values if value is not None])
        found_U = np.empty_like(sorted_found_U)
        found_U[order_U] = sorted_found_U
        return found_U, rows_UW[np.argsort(order_U[sorted_found_U])]

    def write(self, keys_U: U64, rows_UW: U32) -> None:
        """See RowStore."""
        assert rows_UW.shape == (len(keys_U), self.num_words) and rows_UW.dtype == np.uint32
        if not len(keys_U):
            return
        path = self._live / NEXT
        try:
            with _translated(self._live):
                self._write_sorted(path, keys_U, rows_UW)
                _sync(path)
                taking = IngestExternalFileOptions()
                taking.set_move_files(True)
                self._db.ingest_external_file([str(path)], taking)
        finally:
            path.unlink(missing_ok=True)

    def scan(self, begin_bucket: int = 0, end_bucket: int = NUM_BUCKETS) -> Iterator[tuple[U64, U32]]:
        """See RowStore."""
        options = ReadOptions()
        options.set_readahead_size(READAHEAD_BYTES)
        options.fill_cache(False)  # type: ignore[call-arg]  # its stub lacks the argument
        begin = (begin_bucket << 64 - BUCKET_BITS).to_bytes(8, "big")
        if end_bucket < NUM_BUCKETS:
            options.set_iterate_upper_bound((end_bucket << 64 - BUCKET_BITS).to_bytes(8, "big"))
        with _translated(self._live):
            snapshot = self._db.snapshot()
            return self._chunks(snapshot, options, begin)

    def checkpoint(self, folder: Path) -> dict[str, StoredFile]:
        """See RowStore."""
        assert not folder.exists(), folder
        try:
            with _translated(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                Checkpoint(self._db).create_checkpoint(str(folder))
                shutil.copyfile(self._live / HEADER, folder / HEADER)
                files = {path.name: self._stored(path) for path in sorted(folder.iterdir()) if _kept(path)}
                _sync(folder)
                _sync(folder.parent)
        except PserverError:
            for leftover in (folder, folder.with_name(folder.name + ".tmp")):  # the latter is RocksDB's own
                shutil.rmtree(leftover, ignore_errors=True)
            raise
        self._known = files
        return files

    def close(self) -> None:
        """See RowStore."""
        with suppress(DbClosedError):
            self._db.close()

    def memory_bytes(self) -> int:
        """Held by filters and indexes of all files, and by the cache of blocks."""
        names = ("rocksdb.estimate-table-readers-mem", "rocksdb.block-cache-usage")
        return sum(self._db.property_int_value(name) or 0 for name in names)

    def _write_sorted(self, path: Path, keys_U: U64, rows_UW: U32) -> None:
        keys = order_of(keys_U)
        order_U = np.argsort(keys)
        writer = SstFileWriter(_options())
        writer.open(str(path))
        for begin in range(0, len(order_U), WRITE_CHUNK):
            chosen = order_U[begin : begin + WRITE_CHUNK]
            for key, value in zip(_key_bytes(keys[chosen]), _row_bytes(rows_UW[chosen]), strict=True):
                writer[key] = value
        writer.finish()

    def _chunks(self, snapshot: Any, options: ReadOptions, begin: bytes) -> Iterator[tuple[U64, U32]]:
        items = snapshot.items(read_opt=options, from_key=begin)
        while True:
            pairs: list[tuple[bytes, bytes]] = []
            with _translated(self._live):
                while len(pairs) < SCAN_CHUNK and (bite := list(itertools.islice(items, SCAN_BITE))):
                    pairs += bite
                if not pairs:
                    return _check_end(snapshot, options, begin)
            begin = pairs[-1][0] + b"\0"  # what follows the last key
            order_R = np.frombuffer(b"".join(key for key, _ in pairs), ">u8").astype(np.uint64)
            yield keys_at(order_R), self._rows_of([value for _, value in pairs])

    def _rows_of(self, values: list[bytes]) -> U32:
        joined = b"".join(values)
        if len(joined) != len(values) * self.num_words * 4:
            raise StoreDamaged(f"{self._live}: rows of other than {self.num_words} words")
        return np.frombuffer(joined, "<u4").astype(np.uint32, copy=False).reshape(-1, self.num_words)

    def _stored(self, path: Path) -> StoredFile:
        if path.suffix == ".sst" and path.name in self._known:
            return self._known[path.name]
        _sync(path)
        with path.open("rb") as file:
            return StoredFile(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def _options() -> Options:
    table = BlockBasedOptions()
    table.set_bloom_filter(10, False)
    table.set_block_cache(Cache(8 << 20))
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_max_background_jobs(2)
    return options


def _opened(live: Path) -> Rdict:
    options = _options()
    with _translated(live):
        # rocksdict prefers the options it finds in the folder unless column families are named
        return Rdict(str(live), options, {"default": options}, AccessType.read_write())


def _link(checkpoint: Path, live: Path) -> None:
    """Files of rows never change and are linked; the others are small, and RocksDB writes to them."""
    for path in checkpoint.iterdir():
        if path.suffix == ".sst":
            os.link(path, live / path.name)
        else:
            shutil.copyfile(path, live / path.name)


def _check_header(path: Path, num_words: int) -> None:
    try:
        header = json.loads(path.read_text())
        number, words = header["format"], header["words"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path}: {error}") from error
    if number != FORMAT:
        raise StoreDamaged(f"{path}: format {number}; this program reads format {FORMAT}")
    if words != num_words:
        raise StoreDamaged(f"{path}: rows of {words} words; the table's have {num_words}")


def _check_end(snapshot: Any, options: ReadOptions, begin: bytes) -> None:
    """Rdict's iterators end without a word at a damaged block: ask whether nothing follows."""
    probe = snapshot.iter(options)
    probe.seek(begin)
    probe.status()
    assert not probe.valid()


def _kept(path: Path) -> bool:
    """Drop what opening makes anew: options (they are the code's), the empty log, rocksdict's notes."""
    kept = path.suffix == ".sst" or path.name in ("CURRENT", HEADER) or path.name.startswith("MANIFEST-")
    if not kept:
        path.unlink()
    return kept


def _key_bytes(order_U: U64) -> list[bytes]:
    keys: list[bytes] = order_U.astype(">u8").view("V8").tolist()
    return keys


def _row_bytes(rows_UW: U32) -> list[bytes]:
    rows: list[bytes] = np.ascontiguousarray(rows_UW, "<u4").view(f"V{rows_UW.shape[1] * 4}").ravel().tolist()
    return rows


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _translated(where: Path) -> Iterator[None]:
    try:
        yield
    except PserverError:
        raise
    except Exception as error:  # noqa: BLE001  # rocksdict raises nothing narrower
        if type(error) is not Exception and not isinstance(error, OSError):
            raise
        raise error_of(f"{where}: {error}") from error


def error_of(text: str) -> PserverError:
    """What RocksDB's or the system's text means."""
    damaged = any(sign in text for sign in ("Corruption", "No such file", "does not exist"))
    return StoreDamaged(text) if damaged else StoreFailed(text)
