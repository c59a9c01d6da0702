"""The log under a fence: which log is the job's, what a lost disk gets back, and when an old head is refused."""

import shutil
import threading

import pytest

from headrace.blob.blob_store import open_blobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.trainer.journal import fenced_log
from headrace.trainer.journal import log as log_module
from headrace.trainer.journal.fence import BlobFence, FenceSequence, LogMode
from headrace.trainer.journal.fenced_log import LOG_ID, FencedLog, facts_with_id, log_id_in, prepare
from headrace.trainer.journal.log import Log, LogFailed, Superseded, newest_generation, read
from headrace.trainer.journal.records import Void

SOON = Deadline.after(3600.0)  # from the import of this module on, so longer than all tests
OPEN: list[Log] = []


@pytest.fixture
def blobs(tmp_path):
    return open_blobs(parse(str(tmp_path / "objects")), "store", SOON)


def sequence(blobs, generation=0):
    made = FenceSequence(BlobFence(blobs), generation)
    made.catch_up(SOON)
    return made


@pytest.fixture(autouse=True)
def opened():
    """Logs that a test leaves open, as a head that is killed does."""
    yield OPEN
    while OPEN:
        OPEN.pop().close()


def claimed(blobs, folder, generation, mode=LogMode.SYNC, timeline="t1"):
    """What a head does: complete the log on its disk, then claim."""
    made = sequence(blobs, generation)
    folder.parent.mkdir(exist_ok=True)
    whole = prepare(folder, made.history)
    fence = FencedLog(made, mode)
    facts = facts_with_id({"host": "vm"}, folder)
    OPEN.append(Log.claim(folder, generation, SOON, timeline=timeline, facts=facts, fence=fence))
    return OPEN[-1], whole


def void(number):
    return Void(number=number, reason="é" * number)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.log")}


def test_with_sync_a_lost_disk_gets_the_log_back_byte_for_byte(blobs, tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "PART_BYTES", 200)
    log, _ = claimed(blobs, tmp_path / "one" / "log", 1)
    for number in range(1, 6):
        log.append(void(number))
        log.roll()
    log.close()
    whole = contents(log.folder)
    assert len(whole) > 2
    again, was_whole = claimed(blobs, tmp_path / "two" / "log", 2)
    again.append(void(6))
    again.close()
    there = contents(again.folder)
    assert was_whole and {name: there[name] for name in whole} == whole
    assert [r.content for r in read(again.folder) if isinstance(r.content, Void)] == [void(n) for n in range(1, 7)]
    assert log_id_in(again.folder) == log_id_in(log.folder)


def test_with_sync_a_record_that_only_the_fence_has_is_written_to_the_disk(blobs, tmp_path):
    """The head died between the two."""
    log, _ = claimed(blobs, tmp_path / "log", 1)
    log.append(void(1))
    log.close()
    (path,) = (tmp_path / "log").glob("*.log")
    path.write_bytes(path.read_bytes()[:-20])
    again, _ = claimed(blobs, tmp_path / "log", 2)
    assert void(1) in [record.content for record in read(again.folder)]


def test_with_async_a_lost_disk_has_lost_the_log_and_a_kept_one_goes_on(blobs, tmp_path):
    log, _ = claimed(blobs, tmp_path / "one" / "log", 1, LogMode.ASYNC)
    log.append(void(1))
    log.close()
    again, whole = claimed(blobs, tmp_path / "one" / "log", 2, LogMode.ASYNC)
    assert whole and void(1) in [record.content for record in read(again.folder)]
    lost, whole = claimed(blobs, tmp_path / "two" / "log", 3, LogMode.ASYNC, "t2")
    assert not whole and len(read(lost.folder)) == 1
    assert sequence(blobs).history.timeline == "t2"
    with pytest.raises(Superseded):
        claimed(blobs, tmp_path / "four" / "log", 3, LogMode.ASYNC)
    back, whole = claimed(blobs, tmp_path / "one" / "log", 4, LogMode.ASYNC, "t3")
    assert not whole and len(read(back.folder)) == 1, "another head went on: this log is not the job's any more"
    assert len(list((back.folder / "superseded-before-g4").glob("*.log"))) == 2


def test_a_log_that_becomes_sync_brings_its_old_records(blobs, tmp_path):
    log, _ = claimed(blobs, tmp_path / "one" / "log", 1, LogMode.ASYNC)
    log.append(void(1))
    log.close()
    sync, _ = claimed(blobs, tmp_path / "one" / "log", 2)
    sync.append(void(2))
    sync.close()
    shutil.rmtree(tmp_path / "one")
    again, whole = claimed(blobs, tmp_path / "two" / "log", 3)
    assert whole and [r.content for r in read(again.folder) if isinstance(r.content, Void)] == [void(1), void(2)]


def test_with_sync_an_old_head_can_log_nothing_and_its_disk_is_corrected(blobs, tmp_path):
    old, _ = claimed(blobs, tmp_path / "old" / "log", 1)
    new, _ = claimed(blobs, tmp_path / "new" / "log", 2)
    with pytest.raises(Superseded):
        old.append(void(1))
    new.append(void(2))
    new.close()
    again, _ = claimed(blobs, tmp_path / "old" / "log", 3)
    assert [r.content for r in read(again.folder) if isinstance(r.content, Void)] == [void(2)]
    assert newest_generation(again.folder) == 3


def test_a_log_that_a_tool_continued_offline_is_kept_and_brought(blobs, tmp_path):
    log, _ = claimed(blobs, tmp_path / "log", 1)
    log.close()
    tool = Log.claim(tmp_path / "log", 2, SOON, timeline="t2", base="t1-0000000001-g1")
    tool.append(void(1))
    tool.close()
    claimed(blobs, tmp_path / "log", 3, timeline="t2")[0].close()
    again, _ = claimed(blobs, tmp_path / "other" / "log", 4, timeline="t2")
    assert void(1) in [record.content for record in read(again.folder)]


def voids(folder):
    return [record.content for record in read(folder) if isinstance(record.content, Void)]


def test_a_record_waits_for_a_store_that_fails_and_counts_once(blobs, tmp_path, monkeypatch, caplog):
    """The store refuses the record, then loses its reply; commits of the same head are refused meanwhile."""
    monkeypatch.setattr("headrace.retry.PAUSE_S", 0.0)
    made, facts = sequence(blobs, 1), facts_with_id({}, tmp_path / "log")
    log = Log.claim(tmp_path / "log", 1, SOON, timeline="t1", facts=facts, fence=FencedLog(made, LogMode.SYNC))
    OPEN.append(log)
    put_new, troubles = blobs.put_new, []

    def fail(key, content, deadline):
        troubles.append(log.trouble)
        if len(troubles) == 1:
            with pytest.raises(Unavailable, match="down"):
                made.append_commit("t1-0000000001-g1", "ab" * 32, [], SOON)
        elif len(troubles) == 4:
            monkeypatch.setattr(blobs, "put_new", put_new)
            put_new(key, content, deadline)
        raise Unavailable("down")

    monkeypatch.setattr(blobs, "put_new", fail)
    log.append(void(1))
    log.append(void(2))
    assert "training waits, for the object store does not take the log" in troubles[-1]
    assert "the workers start again after 600 s of it: down" in troubles[-1] and log.trouble == ""
    assert len([each for each in caplog.records if "training waits" in each.getMessage()]) == 1
    assert voids(log.folder) == [void(1), void(2)]
    again, _ = claimed(blobs, tmp_path / "other" / "log", 2)
    assert voids(again.folder) == [void(1), void(2)]


def test_other_changes_of_the_store_wait_as_long_as_a_record_may(blobs, tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_WAIT_S", 0.01)
    log, _ = claimed(blobs, tmp_path / "log", 1)
    holds, held = threading.Event(), threading.Event()

    def hold():
        with log.exclusive():
            holds.set()
            held.wait(0.1)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holds.wait(20)
    log.append(void(1))
    holder.join()
    assert voids(log.folder) == [void(1)]


def test_a_record_whose_fate_is_unknown_ends_the_process_and_counts_once(blobs, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fenced_log, "APPEND_S", 0.1)  # shorter than the pause between two tries
        log, _ = claimed(blobs, tmp_path / "log", 1)

    def lose_reply(key, content, deadline):
        monkeypatch.undo()
        blobs.put_new(key, content, deadline)
        raise Unavailable("no reply")

    monkeypatch.setattr(blobs, "put_new", lose_reply)
    with pytest.raises(LogFailed, match="no reply, so it is unknown whether the record counts"):
        log.append(void(1))
    with pytest.raises(LogFailed):
        log.append(void(1))
    again, _ = claimed(blobs, tmp_path / "log", 2)
    assert [r.content for r in read(again.folder) if isinstance(r.content, Void)] == [void(1)]


def test_the_id_of_a_log_stays_with_its_disk(tmp_path):
    (tmp_path / "log").mkdir()
    first = facts_with_id({}, tmp_path / "log")
    Log.claim(tmp_path / "log", 1, SOON, timeline="t1", facts=first).close()
    Log.claim(tmp_path / "log", 2, SOON, timeline="t1", facts={"by": "a tool"}).close()
    assert facts_with_id({"pid": 1}, tmp_path / "log") == {"pid": 1, LOG_ID: first[LOG_ID]}
