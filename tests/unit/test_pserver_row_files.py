"""RocksDB's files read by our kernels, against RocksDB itself; and the hashes, against published code."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocksdict import Rdict, SstFileWriter

from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.store import block_kernels, rocks_store, row_files
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.pserver.store.row_file import RowFile
from headrace.pserver.store.row_files import RowFiles
from headrace.pserver.store.row_store import sort_order_of
from headrace.pserver.store.xxh3 import xxh3

CONTENT = bytes(i * 7 % 256 for i in range(5000))
HASHES = {
    17: 0xF34C3C9CF5A112D1,
    32: 0x99CB9AD0F1A11FBE,
    33: 0xC077B45492D29CDE,
    64: 0x6EFB76FF16F37561,
    65: 0x2640848E9137156B,
    96: 0x764D2D5DB92942DF,
    97: 0x077ACB7E5F4FD940,
    128: 0x65F3C2C00FA93185,
    129: 0x28065C6EC25F5B25,
    240: 0x4917A75C0EF8EED7,
    241: 0x541B19226F0052E8,
    1024: 0xDC5ACF0B043C445B,
    1025: 0xE1D9CD946277AE26,
    4096: 0x8FB047A89E810965,
    5000: 0x6ABE8BE5ABCB2760,
}
"""XXH3, 64 bits, of the first bytes of CONTENT; by python-xxhash 4.1."""


@pytest.mark.parametrize("size", HASHES)
def test_xxh3_is_the_published_one(size):
    words_M = np.zeros(700, np.uint64)
    bytes_N = words_M.view(np.uint8)
    bytes_N[:5000] = np.frombuffer(CONTENT, np.uint8)
    assert int(xxh3(bytes_N, words_M, size)) == HASHES[size]


def written(path, rows):
    """A file of rows by RocksDB, {number of a key: bytes or None for a deletion}."""
    writer = SstFileWriter(rocks_store._options())
    writer.open(str(path))
    for key in sorted(rows):
        if rows[key] is None:
            del writer[key.to_bytes(8, "big")]
        else:
            writer[key.to_bytes(8, "big")] = rows[key]
    writer.finish()
    return RowFile(path, min(rows).to_bytes(8, "big"), max(rows).to_bytes(8, "big"))


KEYS = st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.integers(2**64 - 300, 2**64 - 1)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.dictionaries(KEYS, st.binary(min_size=8, max_size=8) | st.none(), min_size=1, max_size=900),
    asked=st.sets(KEYS, min_size=1),
)
def test_a_file_has_the_rows_that_rocksdb_wrote(tmp_path_factory, rows, asked):
    file = written(tmp_path_factory.mktemp("file") / "a.sst", rows)
    files = RowFiles({"a": file}, [["a"]], num_words=2)
    order_U = np.array(sorted({*asked, *rows}), np.uint64)
    with ThreadPoolExecutor(2) as threads:
        found_U, rows_FW = files.get(order_U, threads)
    present = {key: row for key, row in rows.items() if row is not None}
    assert found_U.tolist() == [int(key) in present for key in order_U]
    assert rows_FW.tobytes() == b"".join(present[key] for key in sorted(present))
    chunks = list(files.scan(0, 1 << 64))
    assert [int(key) for order_C, _ in chunks for key in order_C] == sorted(present)
    assert b"".join(rows_CW.tobytes() for _, rows_CW in chunks) == rows_FW.tobytes()


@settings(max_examples=20, deadline=None)
@given(keys=st.sets(KEYS, min_size=1, max_size=2000))
def test_the_filter_of_rocksdb_has_every_key_and_few_others(tmp_path_factory, keys):
    file = written(tmp_path_factory.mktemp("file") / "a.sst", dict.fromkeys(keys, b"row."))
    lines, probes = (int(file.columns_C[c]) for c in (block_kernels.FILTER_LINES, block_kernels.PROBES))
    assert lines and all(block_kernels.may_have(file._filter_N, lines, probes, np.uint64(key)) for key in keys)
    others = np.random.default_rng(1).integers(0, 2**64, 2000, np.uint64)
    assert sum(block_kernels.may_have(file._filter_N, lines, probes, key) for key in others) < 200


def test_a_key_of_another_size_a_row_of_another_size_and_an_empty_store(tmp_path):
    file = written(tmp_path / "a.sst", {1: b"12345678", 2: b"1234"})
    with pytest.raises(StoreDamaged, match="damaged block"):
        list(RowFiles({"a": file}, [["a"]], num_words=2).scan(0, 1 << 64))
    with pytest.raises(StoreDamaged, match="keys of other than 8 bytes"):
        RowFile(tmp_path / "a.sst", b"1", b"2")
    with ThreadPoolExecutor(1) as threads:
        found_U, rows_FW = RowFiles({}, [], num_words=2).get(np.array([5], np.uint64), threads)
    assert found_U.tolist() == [False] and rows_FW.shape == (0, 2)
    assert list(RowFiles({}, [], num_words=2).scan(0, 1 << 64)) == []


def test_files_that_rocksdb_merges_and_deletes_stay_readable(tmp_path):
    store = RocksRowStore.open(tmp_path / "live", None, num_words=3)
    draw = np.random.default_rng(0)
    keys_U = np.unique(draw.integers(0, 2**64, 20_000, np.uint64))
    expected = {}
    for number in range(14):  # more than level 0 holds, so that merging runs beside
        some_U = draw.permutation(keys_U)[:4000]
        gone_G = np.setdiff1d(draw.permutation(keys_U)[:500], some_U)
        store.write(some_U, np.full((4000, 3), number, np.uint32), gone_G)
        expected |= dict.fromkeys(some_U.tolist(), number)
        for key in gone_G.tolist():
            expected.pop(key, None)
        found_U, rows_FW = store.get(keys_U)
        assert found_U.tolist() == [key in expected for key in keys_U.tolist()]
        assert rows_FW[:, 1].tolist() == [expected[key] for key in keys_U.tolist() if key in expected]
    scan = store.scan()
    first = next(scan)
    store._db.compact_range(None, None)
    keys = [key for chunk in (first, *scan) for key in chunk[0].tolist()]
    assert sorted(keys) == sorted(expected) and store.get(keys_U)[0].sum() == len(expected)
    store.close()


def deleted_but_open(folder):
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [link for link in links if str(link).startswith(str(folder)) and str(link).endswith(".sst (deleted)")]


def test_a_failed_write_closes_merged_files_as_a_full_disk_lacks_their_room(tmp_path, monkeypatch):
    store = RocksRowStore.open(tmp_path / "live", None, num_words=3)
    keys_U, rows_UW = np.arange(5000, dtype=np.uint64), np.zeros((5000, 3), np.uint32)
    for _ in range(3):
        store.write(keys_U, rows_UW)
    store._db.compact_range(None, None)
    assert deleted_but_open(tmp_path)
    monkeypatch.setattr(rocks_store, "_sync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(StoreFailed):
        store.write(keys_U, rows_UW)
    assert not deleted_but_open(tmp_path)
    assert store.num_writes == 3 and store.get(keys_U)[0].all()
    store.close()


def test_a_write_taken_in_is_counted_once_its_rows_are_read(tmp_path, monkeypatch):
    store = RocksRowStore.open(tmp_path / "live", None, num_words=1)
    key_U, row_UW = np.array([5], np.uint64), np.array([[1]], np.uint32)
    with monkeypatch.context() as few:
        few.setattr(row_files, "RowFile", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(StoreFailed):
            store.write(key_U, row_UW)
        assert store.num_writes == 0 and not store.get(key_U)[0].any()
    store.write(key_U, row_UW + 1)
    assert store.num_writes == 2 and store.get(key_U)[1].tolist() == [[2]]
    store.close()


def test_rows_that_only_the_disk_has_are_waited_for_by_threads(tmp_path, monkeypatch):
    store = RocksRowStore.open(tmp_path / "live", None, num_words=3)
    keys_U = np.unique(np.random.default_rng(0).integers(0, 2**64, 50_000, np.uint64))
    store.write(keys_U[::2], np.arange(3 * len(keys_U[::2]), dtype=np.uint32).reshape(-1, 3))
    expected = [part.tolist() for part in store.get(keys_U)]
    assert expected[0] == [True, False] * (len(keys_U) // 2) + [True] * (len(keys_U) % 2)
    for path in (tmp_path / "live").glob("*.sst"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert [part.tolist() for part in store.get(keys_U)] == expected
    find = block_kernels.find
    late = []

    def none_cached(*given):
        *before, wait, state_U, rows_UB = given
        if wait:
            return find(*given)
        late.append(len(state_U))
        state_U[:] = block_kernels.LATE
        return block_kernels.SOUND, 0

    monkeypatch.setattr(block_kernels, "find", none_cached)
    assert [part.tolist() for part in store.get(keys_U)] == expected and late == [len(keys_U)]
    store.close()


def test_orders_are_what_rocksdb_sorts_by(tmp_path):
    store = RocksRowStore.open(tmp_path / "live", None, num_words=1)
    keys_U = np.arange(1, 5000, dtype=np.uint64)
    store.write(keys_U, keys_U.astype(np.uint32)[:, None])
    assert isinstance(store._db, Rdict)
    theirs = [int.from_bytes(key, "big") for key in store._db.keys()]
    assert theirs == np.sort(sort_order_of(keys_U)).tolist()
    ours = np.concatenate([sort_order_of(keys_C) for keys_C, _ in store.scan()])
    assert ours.tolist() == theirs
    store.close()
