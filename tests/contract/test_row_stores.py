"""The contract of row stores: rows come back as written, checkpoints do not change, failures leave nothing behind."""

import errno
import hashlib
import json
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.pserver.errors import StoreDamaged, StoreFailed
from headrace.pserver.store import rocks_store
from headrace.pserver.store.memory_store import MemoryRowStore
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.pserver.store.row_store import keys_in_order, sort_order_of
from headrace.retry import Backoff
from tests.small_disk import small_disk

WORDS = 5
KINDS = pytest.mark.parametrize("kind", [MemoryRowStore, RocksRowStore], ids=["memory", "rocks"])


def some_rows(count, seed=0, words=WORDS):
    draw = np.random.default_rng(seed)
    keys_U = np.unique(draw.integers(0, 1 << 64, count, dtype=np.uint64))
    draw.shuffle(keys_U)
    return keys_U, draw.integers(0, 1 << 32, (len(keys_U), words), dtype=np.uint32)


def contents(store, *buckets):
    chunks = list(store.scan(*buckets))
    return {key: row for keys_U, rows_UW in chunks for key, row in zip(keys_U.tolist(), rows_UW.tolist(), strict=True)}


def as_dict(keys_U, rows_UW):
    return dict(zip(keys_U.tolist(), rows_UW.tolist(), strict=True))


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@KINDS
def test_rows_come_back_in_the_order_asked_for_and_missing_ones_are_told(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    keys_U, rows_UW = some_rows(5000)
    store.write(keys_U, rows_UW)
    assert store.memory_bytes() > 0
    asked_U = np.concatenate([keys_U[3000:], keys_U[:1500] + np.uint64(1)])
    np.random.default_rng(1).shuffle(asked_U)
    found_U, got_FW = store.get(asked_U)
    expected = as_dict(keys_U, rows_UW)
    assert found_U.tolist() == [key in expected for key in asked_U.tolist()]
    assert got_FW.tolist() == [expected[key] for key in asked_U.tolist() if key in expected]
    store.close()


@KINDS
def test_nothing_asked_and_nothing_there_are_no_errors(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    none_U, none_UW = np.empty(0, np.uint64), np.empty((0, WORDS), np.uint32)
    store.write(none_U, none_UW)
    for asked_U in (none_U, np.arange(3, dtype=np.uint64)):
        found_U, rows_FW = store.get(asked_U)
        assert found_U.shape == asked_U.shape and not found_U.any()
        assert rows_FW.shape == (0, WORDS) and rows_FW.dtype == np.uint32
    assert list(store.scan()) == []
    files = store.checkpoint(tmp_path / "empty")
    store.close()
    again = kind.open(tmp_path / "again", tmp_path / "empty", num_words=WORDS, known=files)
    assert list(again.scan()) == []
    again.close()
    again.close()


@KINDS
def test_a_scan_is_in_order_by_buckets_and_of_the_state_at_the_call(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    keys_U, rows_UW = some_rows(70_000)
    store.write(keys_U, rows_UW)
    scan = store.scan()
    last = keys_in_order(sort_order_of(keys_U).max(keepdims=True) + np.uint64(1))
    store.write(np.append(keys_U[:100], last), rows_UW[:101] + np.uint32(1))
    chunks = list(scan)
    assert (np.concatenate([keys for keys, _ in chunks]) == keys_in_order(np.sort(sort_order_of(keys_U)))).all()
    assert {key: row for keys, rows in chunks for key, row in as_dict(keys, rows).items()} == as_dict(keys_U, rows_UW)
    of_some = contents(store, 17, 19)
    assert of_some.keys() == {key for key in keys_U.tolist() if key % 4096 in (17, 18)}
    assert contents(store, 4095).keys() == {key for key in [*keys_U.tolist(), *last.tolist()] if key % 4096 == 4095}
    assert contents(store, 5, 5) == {}
    store.close()


@KINDS
def test_rows_go_in_the_write_that_brings_others_and_stay_gone(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    keys_U, rows_UW = some_rows(5000)
    never_N = some_rows(100, seed=1)[0]
    store.write(keys_U[:3000], rows_UW[:3000])
    store.write(keys_U[3000:], rows_UW[3000:], np.concatenate([keys_U[1000:2000], never_N]))
    expected = as_dict(np.delete(keys_U, slice(1000, 2000)), np.delete(rows_UW, slice(1000, 2000), axis=0))
    assert contents(store) == expected and len(expected) == 4000
    assert store.get(keys_U)[0].tolist() == [key in expected for key in keys_U.tolist()]
    files = store.checkpoint(tmp_path / "c")
    store.close()
    again = kind.open(tmp_path / "again", tmp_path / "c", num_words=WORDS, known=files)
    assert contents(again) == expected and not again.get(keys_U[1000:2000])[0].any()
    again.write(keys_U[1500:1600], rows_UW[1500:1600])  # some come back
    assert contents(again) == expected | as_dict(keys_U[1500:1600], rows_UW[1500:1600])
    again.close()


@KINDS
def test_a_write_may_only_take_rows_away_all_of_them_too(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    none_U, none_UW = np.empty(0, np.uint64), np.empty((0, WORDS), np.uint32)
    keys_U, rows_UW = some_rows(3000)
    store.write(none_U, none_UW, keys_U)  # none of them is there
    store.write(keys_U, rows_UW)
    store.write(none_U, none_UW, keys_U[:1000])
    assert contents(store) == as_dict(keys_U[1000:], rows_UW[1000:])
    store.write(none_U, none_UW, keys_U)
    assert contents(store) == {} and not store.get(keys_U)[0].any()
    files = store.checkpoint(tmp_path / "c")
    store.close()
    again = kind.open(tmp_path / "again", tmp_path / "c", num_words=WORDS, known=files)
    assert list(again.scan()) == []
    again.write(keys_U[:10], rows_UW[:10])
    assert contents(again) == as_dict(keys_U[:10], rows_UW[:10])
    again.close()


@KINDS
def test_a_key_cannot_be_written_and_go_at_once(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    keys_U, rows_UW = some_rows(10)
    with pytest.raises(AssertionError):
        store.write(keys_U, rows_UW, keys_U[3:4])
    assert contents(store) == {}
    store.close()


KEYS = st.sampled_from([0, 1, 4095, 4096, 4097, 1 << 52, (1 << 64) - 1, (1 << 64) - 4096, 12345678901234567890])
ACTS = st.one_of(
    st.tuples(st.just("write"), st.dictionaries(KEYS, st.one_of(st.none(), st.integers(0, (1 << 32) - 1)), max_size=6)),
    st.tuples(st.just("checkpoint"), st.none()),
    st.tuples(st.just("reopen"), st.integers(0, 5)),
    st.tuples(st.just("compact"), st.none()),
)


@KINDS
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(acts=st.lists(ACTS, max_size=14))
def test_any_sequence_gives_what_a_dictionary_gives_and_checkpoints_never_change(kind, acts):
    with tempfile.TemporaryDirectory() as name:
        _play(kind, acts, Path(name))


def _play(kind, acts, folder):
    store, model, made = kind.open(folder / "live", None, num_words=WORDS), {}, []
    for number, (act, given_with) in enumerate(acts):
        if act == "write":
            stay = {key: value for key, value in given_with.items() if value is not None}
            keys_U = np.array(list(stay), np.uint64)
            rows_UW = np.array([[value] * WORDS for value in stay.values()], np.uint32).reshape(-1, WORDS)
            store.write(keys_U, rows_UW, np.array([key for key in given_with if key not in stay], np.uint64))
            model = {key: row for key, row in model.items() if key not in given_with} | as_dict(keys_U, rows_UW)
        elif act == "checkpoint":
            made.append((folder / f"c{number}", store.checkpoint(folder / f"c{number}"), dict(model)))
        elif act == "reopen" and made:
            path, files, model = made[given_with % len(made)]
            store.close()
            model = dict(model)
            store = kind.open(folder / f"live-{number}", path, num_words=WORDS, known=files)
        elif act == "compact" and kind is RocksRowStore:
            store._db.compact_range(None, None)
        assert contents(store) == model
        found_U, rows_FW = store.get(np.array([*model, 77], np.uint64))
        assert found_U.tolist() == [True] * len(model) + [False] and rows_FW.tolist() == list(model.values())
    store.close()
    for path, files, _ in made:
        assert hashes(path) == {name: file.sha256 for name, file in files.items()}
        assert {name: file.num_bytes for name, file in files.items()} == {
            p.name: p.stat().st_size for p in path.iterdir()
        }


@KINDS
def test_a_checkpoint_with_other_words_or_of_another_format_is_refused(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    store.write(*some_rows(10))
    store.checkpoint(tmp_path / "c")
    store.close()
    with pytest.raises(StoreDamaged, match="words"):
        kind.open(tmp_path / "live2", tmp_path / "c", num_words=WORDS + 1)
    with pytest.raises(StoreDamaged):
        kind.open(tmp_path / "live2", tmp_path / "nothing", num_words=WORDS)
    if kind is RocksRowStore:
        (tmp_path / "c" / "rows.json").write_text(json.dumps({"format": 2, "words": WORDS}))
        with pytest.raises(StoreDamaged, match="format 2; this program reads format 1"):
            kind.open(tmp_path / "live2", tmp_path / "c", num_words=WORDS)
    assert not (tmp_path / "live2").exists()


def test_order_is_a_bijection_that_puts_buckets_first():
    keys_U, _ = some_rows(1000)
    assert (keys_in_order(sort_order_of(keys_U)) == keys_U).all() and (
        sort_order_of(keys_in_order(keys_U)) == keys_U
    ).all()
    assert (sort_order_of(keys_U) >> np.uint64(52) == keys_U % np.uint64(4096)).all()
    assert sort_order_of(np.array([1, 4096], np.uint64)).tolist() == [1 << 52, 1]


# --- RocksDB alone --------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """A checkpoint of 20,000 rows, and what the manifest would know of it."""
    store = RocksRowStore.open(tmp_path / "live", None, num_words=WORDS)
    keys_U, rows_UW = some_rows(20_000)
    store.write(keys_U, rows_UW)
    files = store.checkpoint(tmp_path / "c")
    store.close()
    return tmp_path, files, keys_U, rows_UW


def test_rows_files_are_shared_between_commits_and_live_folders_and_hashed_once(made, monkeypatch):
    folder, files, keys_U, rows_UW = made
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        rocks_store.hashlib, "file_digest", lambda file, name: hashed.append(file.name) or digest(file, name)
    )
    store = RocksRowStore.open(folder / "live2", folder / "c", num_words=WORDS, known=files)
    (shared,) = (name for name in files if name.endswith(".sst"))
    assert (folder / "live2" / shared).samefile(folder / "c" / shared)
    store.write(keys_U[:10], rows_UW[:10])
    second = store.checkpoint(folder / "c2")
    assert (folder / "c2" / shared).samefile(folder / "c" / shared) and second[shared] == files[shared]
    assert store.checkpoint(folder / "c3").keys() == second.keys()
    (new,) = (name for name in second if name.endswith(".sst") and name != shared)
    assert [Path(name).name for name in hashed if name.endswith(".sst")] == [new]
    store.close()


def test_nothing_but_files_of_rows_and_their_list_is_in_a_checkpoint(made):
    kinds = sorted(name.split("-")[0] if name.startswith("MANIFEST") else name for name in made[1])
    assert kinds[1:] == ["CURRENT", "MANIFEST", "rows.json"] and kinds[0].endswith(".sst")


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 4
    path.unlink()  # its other names keep what they had
    path.write_bytes(bytes(content))


def cut(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


DAMAGES = {
    "sst flipped at once": ("*.sst", lambda path: flip(path, 0.0)),
    "sst flipped": ("*.sst", flip),
    "sst index flipped": ("*.sst", lambda path: flip(path, 0.998)),
    "sst cut": ("*.sst", cut),
    "sst gone": ("*.sst", Path.unlink),
    "manifest flipped": ("MANIFEST-*", flip),
    "manifest cut": ("MANIFEST-*", cut),
    "manifest gone": ("MANIFEST-*", Path.unlink),
    "current flipped": ("CURRENT", flip),
    "current gone": ("CURRENT", Path.unlink),
    "header flipped": ("rows.json", flip),
    "header gone": ("rows.json", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reading", ["get", "scan"])
def test_damage_is_recognised_when_opened_or_read(made, damage, reading):
    folder, files, keys_U, _ = made
    name, act = DAMAGES[damage]
    act(next((folder / "c").glob(name)))
    with pytest.raises(StoreDamaged, match=str(folder)):
        store = RocksRowStore.open(folder / "live2", folder / "c", num_words=WORDS, known=files)
        try:
            store.get(keys_U) if reading == "get" else list(store.scan())
        finally:
            store.close()
    if damage not in ("sst flipped", "sst flipped at once"):
        assert not (folder / "live2").exists()


def test_a_damaged_filter_hides_no_row(made):
    folder, files, keys_U, rows_UW = made
    path = next((folder / "c").glob("*.sst"))
    content = path.read_bytes()
    index = content.rindex(b"rocksdb.block.based.table.index.type")  # the properties follow filter and index
    begin = int(len(content) * 0.965)
    path.unlink()
    path.write_bytes(content[:begin] + bytes(2000) + content[begin + 2000 :])
    assert begin + 2000 < index
    store = RocksRowStore.open(folder / "live2", folder / "c", num_words=WORDS, known=files)
    found_U, got_UW = store.get(keys_U)
    assert found_U.all() and (got_UW == rows_UW).all()
    store.close()


def test_a_file_of_rows_that_cannot_be_synced_again_is_damaged_and_no_checkpoint_is_left(made, monkeypatch):
    folder, *_ = made
    store = RocksRowStore.open(folder / "live2", folder / "c", num_words=WORDS)

    def failing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(rocks_store, "_sync", failing)
    with pytest.raises(StoreDamaged, match="Input/output error"):
        store.checkpoint(folder / "c2")
    assert not (folder / "c2").exists()
    with pytest.raises(StoreFailed, match="Input/output error"):
        store.write(*some_rows(10, seed=9))
    assert not (folder / "live2" / rocks_store.NEXT).exists() and len(contents(store)) == 20_000
    store.close()


def test_what_rocksdb_says_is_told_apart():
    for text, meaning in {
        "IO error: No space left on device: While appending to file: x": StoreFailed,
        "IO error: Input/output error: While fsync: x": StoreFailed,
        "Corruption: block checksum mismatch: stored = 1, computed = 2": StoreDamaged,
        "IO error: No such file or directory: While open a file for random read: 000008.sst": StoreDamaged,
        "Invalid argument: x/CURRENT: does not exist (create_if_missing is false)": StoreDamaged,
    }.items():
        assert type(rocks_store.store_error_of(text)) is meaning


def test_threads_read_while_one_writes(made):
    folder, files, keys_U, rows_UW = made
    store = RocksRowStore.open(folder / "live2", folder / "c", num_words=WORDS, known=files)
    wrong, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            found_U, got_UW = store.get(keys_U[:3000])
            if not (found_U.all() and (got_UW == rows_UW[:3000]).all()):
                wrong.append(got_UW)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for seed in range(8):
        store.write(*some_rows(2000, seed + 1))
        store.checkpoint(folder / f"c-{seed}")
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    store.close()


# --- a full disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


def listed(folder):
    return sorted(path.name for path in folder.rglob("*") if "LOG" not in path.name)


@pytest.mark.parametrize("leave", [0, 4096, 100_000])
def test_a_full_disk_fails_the_write_leaves_nothing_and_room_lets_the_next_one_pass(disk, leave):
    store = RocksRowStore.open(disk.folder / "live", None, num_words=WORDS)
    keys_U, rows_UW = some_rows(20_000)
    store.write(keys_U, rows_UW)
    disk.leave(leave)
    before = listed(disk.folder)
    more = some_rows(20_000, seed=1)
    with pytest.raises(StoreFailed, match="No space left"):
        store.write(*more)
    assert listed(disk.folder) == before and contents(store) == as_dict(keys_U, rows_UW)
    disk.free()
    store.write(*more)
    files = store.checkpoint(disk.folder / "c")
    assert contents(store) == as_dict(keys_U, rows_UW) | as_dict(*more)
    assert {name: file.sha256 for name, file in files.items()} == hashes(disk.folder / "c")
    store.close()


def test_a_full_disk_fails_the_checkpoint_and_leaves_nothing_of_it(disk):
    store = RocksRowStore.open(disk.folder / "live", None, num_words=WORDS)
    rows = some_rows(20_000)
    store.write(*rows)
    disk.leave(0)
    before = listed(disk.folder)
    with pytest.raises(StoreFailed, match="No space left"):
        store.checkpoint(disk.folder / "commits" / "c")
    assert [name for name in listed(disk.folder) if name != "commits"] == before
    disk.free()
    files = store.checkpoint(disk.folder / "commits" / "c")
    store.close()
    again = RocksRowStore.open(disk.folder / "live2", disk.folder / "commits" / "c", num_words=WORDS, known=files)
    assert contents(again) == as_dict(*rows)
    again.close()


def test_a_full_disk_fails_the_opening_and_leaves_no_live_folder(disk):
    store = RocksRowStore.open(disk.folder / "live", None, num_words=WORDS)
    store.write(*some_rows(1000))
    files = store.checkpoint(disk.folder / "c")
    store.close()
    disk.leave(0)
    with pytest.raises(StoreFailed, match="No space left"):
        RocksRowStore.open(disk.folder / "live2", disk.folder / "c", num_words=WORDS, known=files)
    assert not (disk.folder / "live2").exists()


@pytest.mark.long
def test_a_disk_full_in_rocksdbs_own_bookkeeping_recovers_once_there_is_room(disk, monkeypatch):
    store = RocksRowStore.open(disk.folder / "live", None, num_words=WORDS)
    sync = rocks_store._sync

    def sync_and_fill(path):
        sync(path)
        disk.leave(0)

    monkeypatch.setattr(rocks_store, "_sync", sync_and_fill)
    monkeypatch.setattr(rocks_store, "RECOVERY", Backoff(()))
    written, failed = {}, False
    for seed in range(60):  # until the next edit of the MANIFEST needs a page of its own
        rows = some_rows(10, seed)
        try:
            store.write(*rows)
        except StoreFailed:
            failed = True
            break
        written |= as_dict(*rows)
        disk.free()
    assert failed and contents(store) == written
    assert store.get(rows[0])[0].sum() == 0
    monkeypatch.undo()
    disk.free()
    store.write(*rows)
    assert contents(store) == written | as_dict(*rows)
    store.checkpoint(disk.folder / "c")
    store.close()


@KINDS
def test_writes_that_are_over_are_counted_others_are_not(kind, tmp_path):
    store = kind.open(tmp_path / "live", None, num_words=WORDS)
    keys_U, rows_UW = some_rows(5)
    assert store.num_writes == 0
    store.write(keys_U, rows_UW)
    store.write(keys_U[:1], rows_UW[:1], keys_U[1:2])
    assert store.num_writes == 2
    with pytest.raises(AssertionError):
        store.write(keys_U, rows_UW, keys_U)
    assert store.num_writes == 2
    store.close()
