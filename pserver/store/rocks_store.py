"""Committed rows in RocksDB: one live folder per table and shard, linked from a checkpoint and into the next one.

Memtables stay empty and RocksDB's own log is never written: `write` makes one sorted file, syncs it, and RocksDB
ingests it whole. A row is durable only as part of a commit, whose manifest names every file of a checkpoint by its
hash. A restart trains everything after the newest commit again from the job's log, so no other log is needed. The live
folder of a process that died is garbage.

RocksDB keeps the files, merges them and makes checkpoints. Rows are read by pserver.store.row_files.

Key: 8 bytes, big-endian, of `order_of(key)`. Value: the row's W words, little-endian. `rows.json` beside RocksDB's
files holds the version of the format and W.

Shapes: U unique keys, A all keys of a write, G deleted keys, W words (uint32) of a row.
"""

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    ChecksumType,
    DbClosedError,
    DBCompactionStyle,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
)

from headrace import documents, retry
from headrace.failpoints import Failpoint, failpoint
from headrace.keys import NUM_BUCKETS
from headrace.pserver.errors import PserverError, StoreDamaged, StoreFailed
from headrace.pserver.store.row_files import RowFiles
from headrace.pserver.store.row_store import BUCKET_BITS, U32, U64, StoredFile, keys_in_order, sort_order_of
from headrace.retry import Backoff

FORMAT = 1
"""Version of the layout above; a newer one is refused."""
HEADER = "rows.json"
NEXT = "next.sst.part"
"""The file that `write` makes in the live folder. RocksDB ignores names that it does not know."""

CACHE_BYTES = 1 << 20
"""Block cache of RocksDB, per table and shard: only merging reads through it."""
MAX_OPEN_FILES = 64
"""Files that RocksDB holds open, with their indexes and filters, for merging."""
WRITE_CHUNK, BREATH_S = 1024, 5e-6
"""Rows written to a file while the interpreter's lock is held, 0.4 ms, and the sleep after them. The sleep takes 60 us
in fact, the time to wake a thread, so that a thread waiting for the lock gets it first."""
GET_THREADS = 8
"""Threads that wait for the disk."""
# The interpreter's lock in rocksdict, measured with a thread that spins: writing a row to a file, ingesting a file (5
# ms once it is synced), making a checkpoint and opening hold it; merging, closing and our syncs do not.
RECOVERY = Backoff((1.0,) * 7)
"""Between tries of a write: after a full disk RocksDB refuses all writes, and checks every 5 s for room."""


class RocksRowStore:
    def __init__(self, live: Path, db: Rdict, num_words: int, known: Mapping[str, StoredFile]) -> None:
        self.num_words, self.num_writes, self._num_taken_in = num_words, 0, 0
        self._live = live
        self._known = dict(known)
        self._db = db
        self._files = RowFiles.of(live, db.live_files, None, num_words)
        self._getters = ThreadPoolExecutor(GET_THREADS, thread_name_prefix="rows")

    @classmethod
    def open(
        cls, live: Path, checkpoint: Path | None, *, num_words: int, known: Mapping[str, StoredFile] | None = None
    ) -> Self:
        """Create the folder `live`, which does not exist, from a checkpoint's files or empty, and open it.

        `known` are the checkpoint's files in a manifest: unchanged ones are not hashed again. Raises StoreDamaged if a
        file is missing or truncated, a small file differs, or rows do not have `num_words` words. A damaged block of
        rows is found when it is read.
        """
        assert not live.exists(), live
        try:
            with _translated(live):
                live.mkdir(parents=True)
                if checkpoint is None:
                    (live / HEADER).write_text(json.dumps({"format": FORMAT, "words": num_words}))
                else:
                    _link(checkpoint, live, known or {})
            _check_header(live / HEADER, num_words)
            failpoint(Failpoint.RESTORE_LINKED)
            db = _opened(live, new=checkpoint is None)
            try:
                return cls(live, db, num_words, known or {})
            except PserverError:
                db.close()
                raise
        except PserverError:
            shutil.rmtree(live, ignore_errors=True)
            raise

    def get(self, keys_U: U64) -> tuple[NDArray[np.bool_], U32]:
        by_order_U = np.argsort(keys := sort_order_of(keys_U))
        sorted_found_U, rows_FW = self._files.get(keys[by_order_U], self._getters)
        found_U = np.empty_like(sorted_found_U)
        found_U[by_order_U] = sorted_found_U
        return found_U, rows_FW[np.argsort(by_order_U[sorted_found_U])]

    def write(self, keys_U: U64, rows_UW: U32, gone_G: U64 | None = None) -> None:
        assert rows_UW.shape == (len(keys_U), self.num_words) and rows_UW.dtype == np.uint32
        all_A = keys_U if gone_G is None else np.concatenate([keys_U, gone_G])
        if not len(all_A):
            return
        path = self._live / NEXT
        try:
            with _translated(self._live):
                _write_sorted(path, all_A, rows_UW)
                _sync(path)
            self._take_in(path)
            self._list()
        except PserverError:
            with suppress(PserverError):
                self._list()  # files merged since the last write close: a full disk has their room then
            raise
        finally:
            path.unlink(missing_ok=True)

    def scan(self, begin_bucket: int = 0, end_bucket: int = NUM_BUCKETS) -> Iterator[tuple[U64, U32]]:
        chunks = self._files.scan(*(bucket << 64 - BUCKET_BITS for bucket in (begin_bucket, end_bucket)))
        return ((keys_in_order(order_C), rows_CW) for order_C, rows_CW in chunks)

    def checkpoint(self, folder: Path) -> dict[str, StoredFile]:
        assert not folder.exists(), folder
        try:
            with _translated(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                Checkpoint(self._db).create_checkpoint(str(folder))
                shutil.copyfile(self._live / HEADER, folder / HEADER)
                files = {path.name: self._stored(path) for path in sorted(folder.iterdir()) if _prune(path)}
                _sync(folder)
                _sync(folder.parent)
        except PserverError:
            for leftover in (folder, folder.with_name(folder.name + ".tmp")):  # the latter is RocksDB's own
                shutil.rmtree(leftover, ignore_errors=True)
            raise
        self._known = files
        return files

    def close(self) -> None:
        self._getters.shutdown()
        with suppress(DbClosedError):
            self._db.close()

    def memory_bytes(self) -> int:
        """Memory of the filters and indexes of all files, 2.4 bytes for each row and copy, and of RocksDB."""
        names = ("rocksdb.estimate-table-readers-mem", "rocksdb.block-cache-usage")
        return self._files.num_bytes + sum(self._db.property_int_value(name) or 0 for name in names)

    def _list(self) -> None:
        """Read the files that RocksDB has now, and count the writes that are in them."""
        self._files = RowFiles.of(self._live, self._db.live_files, self._files, self.num_words)
        self.num_writes = self._num_taken_in

    def _take_in(self, path: Path) -> None:
        moving = IngestExternalFileOptions()
        moving.set_move_files(True)

        def ingest(_attempt: int) -> None:
            with _translated(self._live):
                self._db.ingest_external_file([str(path)], moving)

        retry.call(ingest, RECOVERY, lambda error: isinstance(error, StoreFailed) and "No space" in str(error))
        self._num_taken_in += 1

    def _stored(self, path: Path) -> StoredFile:
        of_rows = path.suffix == ".sst"
        if of_rows and path.name in self._known:
            return self._known[path.name]
        try:
            _sync(path)
        except OSError as error:
            if not of_rows:
                raise
            raise StoreDamaged(f"{path}: {error}") from error  # synced before: the content of the disk is unknown now
        with path.open("rb") as file:
            return StoredFile(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def _options() -> Options:
    """Options chosen by measurement: tests/bench/bench_row_stores.py has the alternatives and their numbers."""
    table = BlockBasedOptions()
    table.set_bloom_filter(10, False)  # a lookup of an unknown key reads nothing
    table.set_block_size(2048)
    table.set_format_version(6)  # of pserver.store.row_file
    table.set_checksum_type(ChecksumType.xxh3())
    table.set_block_cache(Cache(CACHE_BYTES))
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(DBCompressionType.none())
    options.set_compaction_style(DBCompactionStyle.level())
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_level_zero_file_num_compaction_trigger(8)
    # With limits on writes, a checkpoint would hold the interpreter's lock until compactions end, which a full disk
    # prevents. So no write waits for compactions.
    options.set_level_zero_slowdown_writes_trigger(1 << 30)
    options.set_level_zero_stop_writes_trigger(1 << 30)
    options.set_soft_pending_compaction_bytes_limit(0)
    options.set_hard_pending_compaction_bytes_limit(0)
    options.set_max_bytes_for_level_base(512 << 20)
    options.set_target_file_size_base(64 << 20)
    options.set_max_background_jobs(2)  # one compacts; the other would flush, but is never needed
    options.set_max_open_files(MAX_OPEN_FILES)
    options.set_write_buffer_size(64 << 10)  # never filled, but RocksDB reserves disk space by it
    options.set_manifest_preallocation_size(64 << 10)
    options.set_max_log_file_size(1 << 20)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    return options


def _write_sorted(path: Path, keys_A: U64, rows_UW: U32) -> None:
    """Write one sorted file: rows of the first U of (A,) keys, deletions of the others."""
    places_A, num_rows = sort_order_of(keys_A), len(rows_UW)
    order_A = np.argsort(places_A)
    sorted_A = places_A[order_A]
    assert (sorted_A[1:] != sorted_A[:-1]).all(), "a key is written or deleted once"
    writer = SstFileWriter(_options())
    writer.open(str(path))
    for begin in range(0, len(order_A), WRITE_CHUNK):
        chosen_C = order_A[begin : begin + WRITE_CHUNK]
        _put(writer, places_A[chosen_C], chosen_C < num_rows, rows_UW[chosen_C[chosen_C < num_rows]])
        time.sleep(BREATH_S)
    writer.finish()


def _put(writer: SstFileWriter, places_C: U64, stays_C: NDArray[np.bool_], rows_SW: U32) -> None:
    """Put rows of the keys that stay and deletions of the others, in order."""
    keys, rows = _key_bytes(places_C), _row_bytes(rows_SW)
    if len(rows) == len(keys):
        deque(map(writer.__setitem__, keys, rows), maxlen=0)  # half the time of a loop
        return
    left = iter(rows)
    for key, stays in zip(keys, stays_C.tolist(), strict=True):
        if stays:
            writer[key] = next(left)
        else:
            del writer[key]


def _opened(live: Path, *, new: bool) -> Rdict:
    options = _options()
    options.create_if_missing(new)
    with _translated(live):
        # rocksdict prefers the options it finds in the folder unless column families are named
        return Rdict(str(live), options, {"default": options}, AccessType.read_write())


def _link(checkpoint: Path, live: Path, known: Mapping[str, StoredFile]) -> None:
    """Link the files of rows, which never change; copy the others, which are small and written by RocksDB."""
    for name in known or [path.name for path in checkpoint.iterdir()]:
        if name.endswith(".sst"):
            os.link(checkpoint / name, live / name)
            continue
        content = (checkpoint / name).read_bytes()
        if known and hashlib.sha256(content).hexdigest() != known[name].sha256:
            raise StoreDamaged(f"{checkpoint / name}: not what was committed")
        (live / name).write_bytes(content)


def _check_header(path: Path, num_words: int) -> None:
    try:
        header = documents.read_object(path)
        number, words = header["format"], header["words"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path}: {error}") from error
    if number != FORMAT:
        raise StoreDamaged(f"{path}: format {number}; this program reads format {FORMAT}")
    if words != num_words:
        raise StoreDamaged(f"{path}: rows of {words} words; the table's have {num_words}")


def _prune(path: Path) -> bool:
    """Delete a file that opening makes again: options, the empty log, rocksdict's notes. Returns whether it stays."""
    stays = path.suffix == ".sst" or path.name in ("CURRENT", HEADER) or path.name.startswith("MANIFEST-")
    if not stays:
        path.unlink()
    return stays


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
        raise store_error_of(f"{where}: {error}") from error


def store_error_of(text: str) -> PserverError:
    """The error of ours for a message of RocksDB or the system."""
    damaged = any(sign in text for sign in ("Corruption", "No such file", "does not exist"))
    return StoreDamaged(text) if damaged else StoreFailed(text)
