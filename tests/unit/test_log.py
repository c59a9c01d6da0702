"""The log: appended records, claims and seals, pruning, damage, full and failing disks."""

import errno
import json
import subprocess
import sys
import threading
import zlib
from types import SimpleNamespace

import pytest

from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.durable import REAL
from headrace.errors import DeadlineExceeded
from headrace.trainer.checkpoint.commit_store import CommitStore
from headrace.trainer.journal import log as log_module
from headrace.trainer.journal.log import (
    RESERVE_BYTES,
    Log,
    LogDamaged,
    LogFailed,
    LogFull,
    LogTooNew,
    RecordKind,
    Superseded,
    UnknownRecord,
    newest_generation,
    read,
)
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import SpecOperation, UndecodableRecord, Void
from tests.fakes.records import close
from tests.fakes.troubled_disk import TroubledDisk
from tests.small_disk import small_disk


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def claim(folder):
    logs = []

    def claimed(generation, disk=REAL, **more):
        logs.append(Log.claim(folder, generation, Deadline.after(5), disk=disk, **more))
        return logs[-1]

    yield claimed
    for log in logs:
        log.close()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(log_module, "PART_BYTES", 100)


def told(folder):
    """The records without their places: (number, kind, pass)."""
    return [(record.number, record.kind, record.body.get("number")) for record in read(folder)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Appended records


def test_appended_records_are_read_in_order_with_their_places(claim, folder):
    log = claim(1, facts={"host": "here"})
    plan = log.append(PassPlan(1, ((Segment("line\nfeed \u2028 é", 0, 0, 5),),)))
    end = log.append(close(1, digests={"dense": "ab"}))
    first, *rest = read(folder)
    assert (first.number, first.kind, first.body) == (
        1,
        RecordKind.CLAIM,
        {"host": "here", "generation": 1, "sealed": {}, "closed": 0},
    )
    assert rest == [plan, end]
    path = folder / "00000001-0001.log"
    assert path.read_bytes()[plan.place.byte :].startswith(b"2 ")
    assert str(end.place) == f"{path}: byte {end.place.byte}"


def test_a_line_is_format_checksum_and_json(claim, folder):
    claim(1).append(Void(number=7, reason="none"))
    line = (folder / "00000001-0001.log").read_bytes().splitlines()[1]
    content = b'{"n":2,"kind":"void","number":7,"reason":"none"}'
    assert line == b"2 %08x %s" % (zlib.crc32(content), content)


def test_a_folder_without_a_log_has_no_records(folder):
    assert (read(folder), newest_generation(folder)) == ([], 0)


def test_content_that_is_not_json_is_refused_and_nothing_is_written(claim, folder):
    log = claim(1)
    for value in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            log.append(SpecOperation(spec={"x": value}))
    assert log.append(PassPlan(1, ())).number == 2
    assert len(read(folder)) == 2


def test_threads_append_whole_records_each_with_its_own_number(claim, folder):
    log = claim(1)
    threads = [threading.Thread(target=lambda i=i: [log.append(Void(number=i)) for _ in range(10)]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read(folder)
    assert [record.number for record in records] == list(range(1, 32))
    assert sorted(record.content.number for record in records[1:]) == [0] * 10 + [1] * 10 + [2] * 10


def test_the_control_plane_reads_a_log_without_torch():
    code = "import sys, trainer.journal.log, trainer.journal.job_history; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Generations


def test_a_claim_seals_the_file_before_it_and_numbers_continue(claim, folder):
    claim(1).append(PassPlan(1, ()))
    length = (folder / "00000001-0001.log").stat().st_size
    claim(2).append(close(1))
    assert told(folder) == [(1, "claim", None), (2, "plan", 1), (3, "claim", None), (4, "close", 1)]
    assert read(folder)[2].body["sealed"] == {"00000001-0001.log": length}
    assert newest_generation(folder) == 2


@pytest.mark.parametrize("generation", [1, 2])
def test_a_claim_that_is_not_newer_is_refused_and_leaves_nothing(claim, folder, generation):
    claim(2)
    before = names(folder)
    with pytest.raises(Superseded, match=f"generation 2 .* generation {generation} is too late") as refused:
        claim(generation)
    assert refused.value.exit_code == 75
    assert names(folder) == before


def test_one_of_two_claims_of_a_generation_wins(folder):
    start, outcomes = threading.Barrier(4), []

    def contend():
        start.wait()
        try:
            Log.claim(folder, 1, Deadline.after(30)).close()
            outcomes.append("won")
        except Superseded:
            outcomes.append("late")

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["late"] * 3 + ["won"]
    assert len(read(folder)) == 1


def test_a_generation_that_was_replaced_can_change_nothing(claim, folder, small_parts):
    old = claim(1)
    old.append(PassPlan(1, ()))
    claim(2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for attempt in (lambda: old.append(PassPlan(2, ())), old.roll, lambda: old.prune(99)):
        with pytest.raises(Superseded):
            attempt()
    with pytest.raises(Superseded), old.exclusive():
        pytest.fail("let in")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("late", [b"1 00000000 {}\n", b"\0" * 50, b"whole"])
def test_bytes_of_a_late_writer_behind_the_seal_are_ignored(claim, folder, late):
    old = claim(1)
    old.append(PassPlan(1, ()))
    path = folder / "00000001-0001.log"
    claim(2).append(close(1))
    before = read(folder)
    if late == b"whole":
        late = path.read_bytes().splitlines(keepends=True)[1].replace(b'"n":2', b'"n":3')
    with path.open("ab") as file:
        file.write(late)
    assert read(folder) == before


def test_the_holder_of_the_store_excludes_others_and_may_append(claim, folder, monkeypatch):
    log = claim(1)
    monkeypatch.setattr(log_module, "MAX_WAIT_S", 0.02)
    refused = []

    def other():
        try:
            log.append(Void(number=2))
        except DeadlineExceeded as error:
            refused.append(str(error))

    with log.exclusive():
        log.append(PassPlan(1, ()))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(DeadlineExceeded, match="lock is locked by another"):
            Log.claim(folder, 2, Deadline.after(0))
    assert len(refused) == 1
    assert [record.kind for record in read(folder)] == [RecordKind.CLAIM, RecordKind.PLAN]
    log.append(Void(number=2))


# Files


def test_a_long_file_is_followed_by_one_that_seals_it_and_repeats_the_claim(claim, folder, small_parts):
    log = claim(1, timeline="t1")
    log.append(PassPlan(1, ()))
    log.append(close(1))
    assert log.roll()
    assert log.append(PassPlan(2, ())).number == 5
    first, second = log.files()
    assert (first.path.name, first.sealed, first.first) == ("00000001-0001.log", True, 1)
    assert (second.path.name, second.sealed, second.first) == ("00000001-0002.log", False, 4)
    assert [kept.length for kept in (first, second)] == [kept.path.stat().st_size for kept in (first, second)]
    again = read(folder)[3]
    assert again.body == {
        "timeline": "t1",
        "base": None,
        "generation": 1,
        "sealed": {first.path.name: first.length},
        "closed": 1,
    }
    claim(2)
    assert [record.number for record in read(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_short_file_is_continued(claim, folder):
    log = claim(1)
    assert not log.roll()
    assert len(log.files()) == 1


def closed(log, number):
    """Close a pass after the next one is planned, as rank 0 does; returns the close's record number."""
    log.append(PassPlan(number + 1, ()))
    record = log.append(close(number)).number
    assert log.roll()
    return record


def test_pruning_keeps_the_plan_after_the_commit_though_its_file_is_older_than_the_close(claim, folder, small_parts):
    log = claim(1)
    log.append(PassPlan(1, ()))
    closes = [closed(log, number) for number in (1, 2, 3)]
    assert [path.name for path in log.prune(closes[1])] == ["00000001-0001.log"]
    assert [number for _, kind, number in told(folder) if kind == RecordKind.PLAN][0] == 3
    claim(2).append(close(4))
    assert read(folder)[0].number > 1


def test_the_beginning_is_kept_until_there_are_as_many_commits_as_are_to_be_kept(claim, folder, small_parts, tmp_path):
    log, store = claim(1), CommitStore(tmp_path)
    log.append(PassPlan(1, ()))
    kept = []
    store.commits = SimpleNamespace(prune=lambda *_: kept.__delitem__(slice(None, -2)), whole=lambda: kept)
    closed(log, 1)
    for number in (2, 3):
        kept.append(SimpleNamespace(log_from=closed(log, number)))
        store.prune(2, log)
        assert (read(folder)[0].number == 1) == (number == 2), "from there a job runs again"


def test_pruning_keeps_operations_that_did_not_act(claim, folder, small_parts):
    log = claim(1)
    log.append(SpecOperation(spec={"why": "x" * 100}))
    log.roll()
    assert log.prune(99) == []
    end = log.append(close(1)).number
    assert log.prune(end - 1) == []
    assert len(log.prune(end)) == 1


def test_open_plans_of_an_abandoned_timeline_are_pruned(claim, folder, small_parts):
    log = claim(1, timeline="t1")
    log.append(PassPlan(1, ()))
    log = claim(2, timeline="t2")
    assert [path.name for path in log.prune(log.append(close(1)).number)] == ["00000001-0001.log"]
    assert names(folder) == ["00000002-0001.log", "lock"]


def test_a_reader_starts_over_when_files_are_pruned_meanwhile(claim, folder, small_parts, monkeypatch):
    log = claim(1)
    log.append(Void(number=1))
    log.roll()
    real, looks = log_module.read_files, []

    def pruned_meanwhile(folder):
        looks.append(1)
        if len(looks) == 1:
            raise FileNotFoundError
        return real(folder)

    monkeypatch.setattr(log_module, "read_files", pruned_meanwhile)
    assert len(read(folder)) == 3


# Damage


def two_generations(claim):
    claim(1).append(PassPlan(1, ()))
    log = claim(2)
    log.append(close(1))
    log.append(PassPlan(2, ()))


def test_a_flipped_bit_is_found_wherever_it_is(claim, folder):
    two_generations(claim)
    before = read(folder)
    for path in sorted(folder.glob("*.log")):
        whole = path.read_bytes()
        for at in range(len(whole)):
            for flip in (0x01, 0x02, 0x20):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
                try:
                    found = read(folder)
                except (LogDamaged, LogTooNew) as error:
                    assert str(path) in str(error) or "which is not there" in str(error)
                else:  # no one can tell a damaged last record from one that was never finished
                    assert found == before[:-1] and before[-1].place.path == path and at >= before[-1].place.byte
        path.write_bytes(whole)


def test_a_cut_anywhere_in_the_newest_file_leaves_whole_records_or_is_damage(claim, folder):
    two_generations(claim)
    before, path = read(folder), folder / "00000002-0001.log"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if length < before[3].place.byte:
            with pytest.raises(LogDamaged, match="does not begin with a good claim"):
                read(folder)
        else:
            assert read(folder) == [
                r for r in before if r.place.path != path or whole[:length].count(b"\n") > r.number - 3
            ]


def test_a_cut_in_a_sealed_file_is_damage_with_its_place_and_advice(claim, folder):
    two_generations(claim)
    path = folder / "00000001-0001.log"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(
        LogDamaged, match=r"00000001-0001.log: byte \d+: .*ends here.*restore the file.*headrace rewind"
    ):
        read(folder)
    with pytest.raises(LogDamaged):
        claim(3)
    assert newest_generation(folder) == 2


def test_a_file_that_cannot_be_read_is_damage(claim, folder):
    two_generations(claim)
    (folder / "00000001-0001.log").unlink()
    (folder / "00000001-0001.log").mkdir()
    with pytest.raises(LogDamaged, match="00000001-0001.log: byte 0: the file cannot be read: Is a directory"):
        read(folder)


def test_a_missing_file_is_damage(claim, folder, small_parts):
    log = claim(1)
    for number in (1, 2, 3):
        log.append(Void(number=number, reason="x" * 100))
        log.roll()
    (folder / "00000001-0003.log").unlink()
    with pytest.raises(LogDamaged, match="0004.log: byte 0: .*after 00000001-0003.log, which is not there"):
        read(folder)


def test_a_torn_tail_is_ignored_then_cut_by_the_next_claim(claim, folder):
    claim(1).append(PassPlan(1, ()))
    path = folder / "00000001-0001.log"
    whole = path.read_bytes()
    path.write_bytes(whole + b'1 0badc0de {"n":3,"ki')
    assert len(read(folder)) == 2
    claim(2)
    assert len(read(folder)) == 3
    assert path.read_bytes() == whole


def test_a_newer_format_is_refused_by_name(claim, folder):
    claim(1)
    with (folder / "00000001-0001.log").open("ab") as file:
        file.write(b'3 00000000 {"what": "we cannot know"}\n')
    with pytest.raises(LogTooNew, match="format 3, and this program reads up to 2"):
        read(folder)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"kind": "vote"}, "record 2: the kind 'vote' is unknown; known are claim, plan"),
        ({"kind": "operation", "op": "swap"}, "record 2: the operation 'swap' is unknown; known are spec"),
        ({"kind": "void"}, "record 2: the void is not understood: Object missing required field `number`"),
    ],
)
def test_a_record_that_this_program_does_not_know_is_named_and_never_cut(claim, folder, body, why):
    claim(1)
    path = folder / "00000001-0001.log"
    content = json.dumps({"n": 2, **body}).encode()
    path.write_bytes(path.read_bytes() + b"2 %08x %s\n" % (zlib.crc32(content), content))
    whole = path.read_bytes()
    for act in (lambda: read(folder), lambda: claim(2)):
        with pytest.raises(UnknownRecord, match=why) as caught:
            act()
        assert isinstance(caught.value.__cause__, UndecodableRecord)
    assert path.read_bytes() == whole and newest_generation(folder) == 1


def test_a_record_out_of_its_order_is_damage(claim, folder):
    claim(1).append(PassPlan(1, ()))
    path = folder / "00000001-0001.log"
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(LogDamaged, match="record 2: it comes after record 2"):
        read(folder)


# Trouble with the disk


def test_an_append_on_a_full_disk_changes_nothing_and_may_be_tried_again(claim, folder):
    disk = TroubledDisk()
    log = claim(1, disk=disk)
    whole = (folder / "00000001-0001.log").read_bytes()
    disk.fails = {"append": errno.ENOSPC}
    with pytest.raises(LogFull, match="00000001-0001.log: append failed: .*make room"):
        log.append(PassPlan(1, ()))
    assert (folder / "00000001-0001.log").read_bytes() == whole
    disk.fails = {}
    assert log.append(PassPlan(1, ())).number == 2
    assert told(folder) == [(1, "claim", None), (2, "plan", 1)]


@pytest.mark.parametrize(
    "fails",
    [
        {"sync": errno.EIO},
        {"sync": errno.ENOSPC},
        {"append": errno.EIO},
        {"append": errno.ENOSPC, "truncate": errno.EIO},
    ],
)
def test_a_write_that_may_be_lost_ends_the_log_in_this_process(claim, folder, fails):
    disk = TroubledDisk()
    log = claim(1, disk=disk)
    disk.fails = fails
    with pytest.raises(LogFailed):
        log.append(PassPlan(1, ()))
    disk.fails = {}
    with pytest.raises(LogFailed, match="an earlier write or sync failed"):
        log.append(PassPlan(1, ()))
    assert told(folder) == [(1, "claim", None)]  # nobody was told of the plan, and it is not there
    claim(2).append(PassPlan(1, ()))
    assert told(folder) == [(1, "claim", None), (2, "claim", None), (3, "plan", 1)]


@pytest.mark.parametrize(("operation", "error"), [("append", LogFull), ("sync", LogFailed), ("link", LogFull)])
def test_a_claim_that_fails_leaves_nothing(claim, folder, operation, error):
    disk = TroubledDisk()
    folder.mkdir()
    disk.fails = {operation: errno.EIO if error is LogFailed else errno.ENOSPC}
    with pytest.raises(error):
        claim(1, disk=disk)
    assert names(folder) == ["lock"]
    disk.fails = {}
    claim(1, disk=disk)


def test_without_room_for_a_new_file_the_log_continues_in_the_old_one(claim, folder, small_parts):
    disk = TroubledDisk()
    log = claim(1, disk=disk)
    log.append(Void(number=1))
    disk.fails = {"append": errno.ENOSPC}
    with pytest.raises(LogFull):
        log.roll()
    disk.fails = {}
    assert log.append(Void(number=2)).place.path.name == "00000001-0001.log"
    assert log.roll() and len(log.files()) == 2
    assert names(folder) == ["00000001-0001.log", "00000001-0002.log", "lock"]


def test_after_a_new_file_whose_name_may_be_lost_nothing_is_appended_to_the_old_one(claim, folder, small_parts):
    disk = TroubledDisk()
    log = claim(1, disk=disk)
    log.append(Void(number=1))
    disk.fails = {"sync_folder": errno.EIO}
    with pytest.raises(LogFailed):
        log.roll()
    disk.fails = {}
    with pytest.raises(LogFailed):
        log.append(Void(number=2))
    assert [kind for _, kind, _ in told(folder)] == ["claim", "void", "claim"]


def test_on_a_full_disk_the_log_continues_in_reserved_room_then_waits(tmp_path):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        folder = disk.folder / "log"
        log = Log.claim(folder, 1, Deadline.after(5))
        disk.leave(0)
        with pytest.raises(LogFull, match="No space left on device"):
            for _ in range(10_000):
                log.append(SpecOperation(spec={"x": "x" * 1000}))
        logged = len(read(folder))
        assert logged * 1000 > RESERVE_BYTES // 3
        with pytest.raises(LogFull):
            Log.claim(folder, 2, Deadline.after(5))
        disk.free()
        assert log.append(Void(number=1)).number == logged + 1
        log.close()
        Log.claim(folder, 2, Deadline.after(5)).close()
        assert json.dumps([record.number for record in read(folder)]) == json.dumps(list(range(1, logged + 3)))
