"""A job's log in words: each kind of record says on one line what a person wants to know of it."""

import json

import pytest

from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.service.history.log_text import log_lines, print_log
from headrace.trainer.journal.log import Log, LogDamaged, read
from headrace.trainer.journal.partitions import MAX_NAMED
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import PassClose, SpecOperation, Void
from tests.fakes.records import operation


def segment(partition, number, begin, end):
    return Segment(partition, number, begin, end)


def plan(number, *ranks, learn=True):
    return PassPlan(number, tuple(map(tuple, ranks)), learn)


def close(number, rejected=()):
    digests = {"dense": "1111111122222222", "pushes": "3" * 32, "metrics": "4" * 64}
    return PassClose(number=number, day=2, events=1400, samples=2800, rejected=dict(rejected), digests=digests)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def claim(folder):
    logs = []

    def claimed(generation, timeline=None, base=None, **facts):
        logs.append(Log.claim(folder, generation, Deadline.after(5), timeline=timeline, base=base, facts=facts))
        return logs[-1]

    yield claimed
    for log in logs:
        log.close()


def words(folder):
    return [line.text for line in log_lines(read(folder))]


def test_a_claim_says_who_and_where_and_a_new_timeline_from_where(claim, folder):
    claim(1, timeline="t1", base=None, host="mill").close()
    claim(2, timeline="t1", base=None, host="mill").close()
    claim(3, timeline="t2", base="t1-0000000004-g2", host="race", by="headrace rewind")
    assert words(folder) == [
        "generation 1 on mill begins timeline t1 at the initial state",
        "generation 2 on mill",
        "generation 3 on race by headrace rewind begins timeline t2 at commit t1-0000000004-g2",
    ]


def test_a_plan_says_how_many_events_from_where_to_where(claim, folder):
    log = claim(1)
    log.append(plan(1, [segment("a", 0, 0, 700)], [segment("b", 1, 5, 705)]))
    log.append(plan(2, [segment("a", 0, 700, 800)], [segment("a", 0, 800, 900)], learn=False))
    log.append(plan(3, [segment("a", 0, 900, 950), segment("a", 0, 960, 970)]))
    assert words(folder)[1:] == [
        "pass 1: 1,400 events: a 0-700, b 5-705",
        "pass 2: 200 events, only predicted: a 700-900",
        "pass 3: 60 events: a 900-950, a 960-970",
    ]


def test_a_line_names_so_many_partitions_and_counts_the_others(claim, folder):
    claim(1).append(plan(1, [segment(f"t/{n}", n, 0, 1) for n in range(MAX_NAMED + 3)]))
    assert words(folder)[1].endswith(f"t/{MAX_NAMED - 1} 0-1, and 3 more")


def test_a_close_says_what_was_read_and_how_its_digests_begin(claim, folder):
    log = claim(1)
    log.append(close(1))
    log.append(close(2, {"unparsable": 3, "too_long": 0}))
    digests = "day 2; dense 11111111 pushes 33333333 metrics 44444444"
    assert words(folder)[1:] == [
        f"pass 1: 1,400 events, 2,800 samples, 0 rejected, {digests}",
        f"pass 2: 1,400 events, 2,800 samples, 3 rejected (unparsable 3), {digests}",
    ]


def test_operations_say_what_they_do(claim, folder):
    log = claim(1)
    known = {"name": "a", "number": 0, "start": 5, "end": 90, "identity": "x"}
    bodies = [
        {"op": "partitions", "partitions": [known, {**known, "name": "b", "number": 1, "end": None}]},
        {"op": "gap", "partition": "a", "position": 10, "go_on": 1510},
        {"op": "skip", "partition": "a", "begin": 3, "end": 7, "reason": "half a line"},
        {"op": "restore", "commit": "t1-0000000004-g2", "passed_over": {"t1-0000000005-g2": "a file has 3 bytes"}},
        {"op": "restore", "commit": None, "passed_over": {}},
        {"op": "day_tick", "id": "x", "to": 3},
        {"op": "set", "id": "x", "keys": {"tables.default.decay": 0.5, "tables.default.delete_below": None}},
        {"op": "shrink", "id": None, "table": "t", "delete_below": None, "delete_after_days": None, "at_once": True},
        {"op": "shrink", "id": "x", "table": "t", "delete_below": 0.5, "delete_after_days": 3, "at_once": False},
        {"op": "forget", "id": "x", "slot": "user", "table": "t", "group": 0, "key": 9},
        {"op": "slot", "id": "x", "change": {"op": "clear", "slot": "user", "table": "t", "group": 0}},
    ]
    for body in bodies:
        log.append(operation(body))
    log.append(Void(number=3, reason="changed: seed"))
    assert words(folder)[1:] == [
        "partitions: 0 is a from 5 to 90, 1 is b from 5",
        "gap: a: 1,500 positions from 10 on are no longer retained; continues at 1510",
        "skip: a 3-7: half a line",
        "restore: begins at t1-0000000004-g2; t1-0000000005-g2 is not used: a file has 3 bytes",
        "restore: begins at the initial state",
        "day tick: day 3 begins",
        "set: tables.default.decay = 0.5, tables.default.delete_below = null",
        "shrink: table t, by its own rule",
        "shrink: table t, delete_below 0.5 and delete_after_days 3",
        "forget: slot user, key 9",
        "clear: all rows of slot user are deleted",
        "pass 3 is void: changed: seed",
    ]


def test_a_spec_is_told_by_what_it_changes(claim, folder):
    log = claim(1)
    first = {"name": "news", "train": {"batch_size": 64}, "seed": 3}
    log.append(SpecOperation(spec=first))
    second = {"name": "news", "train": {"batch_size": 128, "amp": "bfloat16"}}
    log.append(SpecOperation(spec=second))
    assert words(folder)[1:] == [
        "spec: of job news, 3 keys",
        'spec: seed 3 -> (not given), train.amp (not given) -> "bfloat16", train.batch_size 64 -> 128',
    ]


def test_a_record_that_says_when_is_told_with_it(claim, folder):
    claim(1, host="mill", at="2026-01-02T03:04:05+00:00")
    line = next(log_lines(read(folder)))
    assert str(line) == "      1  2026-01-02T03:04:05+00:00  claim      generation 1 on mill"


def test_the_last_records_are_told_by_what_came_before_them(claim, folder, capsys):
    log = claim(1)
    for seed in (3, 4):
        log.append(SpecOperation(spec={"seed": seed}))
    print_log(folder, last=1, as_json=False)
    assert capsys.readouterr().out == "      3  operation  spec: seed 3 -> 4\n"


def test_json_is_the_records_one_a_line(claim, folder, capsys):
    claim(1, host="mill").append(Void(number=1, reason="x"))
    print_log(folder, last=1, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"n": 2, "kind": "void", "number": 1, "reason": "x"}
    ]


def test_of_a_damaged_log_what_is_good_is_printed_before_the_error(claim, folder, capsys):
    first = claim(1)
    first.append(close(1))
    first.close()
    second = claim(2)
    for number in (2, 3, 4):
        second.append(close(number))
    second.close()
    path = folder / "00000002-0001.log"
    content = bytearray(path.read_bytes())
    content[content.index(b'"number":3') + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(LogDamaged, match=r"00000002-0001.log: byte \d+, record 5"):
        print_log(folder, last=None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
    assert "pass 2" in lines[-1]


def test_a_log_whose_file_is_gone_is_told_up_to_there(claim, folder, capsys):
    for generation in (1, 2, 3):
        claim(generation).close()
    (folder / "00000002-0001.log").unlink()
    with pytest.raises(LogDamaged, match=r"continues after 00000002-0001.log, which is not there"):
        print_log(folder, last=None, as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_what_lies_behind_a_seal_is_not_told(claim, folder, capsys):
    claim(1).close()
    claim(2).close()
    path = folder / "00000001-0001.log"
    path.write_bytes(path.read_bytes() * 2)
    print_log(folder, last=None, as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_store_without_a_log_says_so(tmp_path):
    with pytest.raises(HeadraceError, match="contains no log: no job has run in this store"):
        print_log(tmp_path / "log", last=None, as_json=False)
