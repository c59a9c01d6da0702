import pytest

from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.scripted_source import (
    BLOCK_EVENTS,
    MemorySource,
    ScriptedFault,
    ScriptedGap,
    ScriptedRecord,
)
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline


def read(source, begin, end, partition=0):
    blocks = source.read(Segment(f"memory/{partition}", partition, begin, end), Deadline.after(1))
    return [(int(block.position_E[i]), block.value(i)) for block in blocks for i in range(len(block))]


def partition(source, number=0):
    return source.partitions(Deadline.after(1))[number]


def test_gaps_take_positions_and_give_no_events():
    source = MemorySource([[b"a", ScriptedGap(3), None, b"b", ScriptedGap(1)]])
    assert partition(source).end == 7
    assert read(source, 0, 7) == [(0, b"a"), (4, None), (5, b"b")]
    assert read(source, 1, 4) == []


def test_a_record_carries_time_key_and_headers():
    source = MemorySource([[ScriptedRecord(b"a", 17, b"k", (("h", b"v"),))]])
    (block,) = source.read(Segment("memory/0", 0, 0, 1), Deadline.after(1))
    assert block.timestamp_ms_E.tolist() == [17]
    assert block.keys == [b"k"] and block.headers == [(("h", b"v"),)]


def test_an_unbounded_twin_grows_until_it_is_finished():
    source = MemorySource([[b"a"]], bounded=False)
    assert not source.bounded and not partition(source).final
    source.append(0, [b"b"])
    assert source.add_partition([b"c"]) == 1
    assert (partition(source).end, partition(source, 1).end) == (2, 1)
    source.finish()
    assert partition(source).final


def test_what_retention_took_is_a_gap():
    source = MemorySource([[b"a", b"b", b"c"]])
    source.drop_before(0, 2)
    assert partition(source).begin == 2
    with pytest.raises(SourceGap, match="1 to 3 were requested, 2 to 3 exist"):
        read(source, 1, 3)
    assert read(source, 2, 3) == [(2, b"c")]


def test_a_fault_strikes_the_read_it_is_planned_for_and_no_other():
    source = MemorySource([[b"%d" % n for n in range(2 * BLOCK_EVENTS)]], faults=[ScriptedFault(2, after_events=300)])
    whole = read(source, 0, 2 * BLOCK_EVENTS)
    seen = 0
    with pytest.raises(SourceUnavailable):
        for block in source.read(Segment("memory/0", 0, 0, 2 * BLOCK_EVENTS), Deadline.after(1)):
            seen += len(block)
    assert seen == 300
    assert read(source, 0, 2 * BLOCK_EVENTS) == whole


def test_what_was_committed_can_be_asserted():
    source = MemorySource([[b"a"]])
    source.commit({"memory/0": 1}, Deadline.after(1))
    source.close()
    assert source.committed == {"memory/0": 1} and source.closed
