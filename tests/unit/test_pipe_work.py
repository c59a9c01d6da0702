"""Which events reach a command, and as which bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.pipe import multislot_runner
from headrace.dataset.pipe.answer_samples import rebatch
from headrace.dataset.pipe.multislot_runner import lines_of, whole_lines
from headrace.dataset.pipe.segment_work import BYTES_OF_EVENT, SkippedValues, cut_events, reject_early
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.stream.event_values import bytes_of, concat_values, find_line_feeds, take_events
from headrace.dataset.stream.source import Events, Segment

VALUES = st.lists(st.binary(max_size=8), min_size=1, max_size=6)
SEGMENT = Segment("topic/1", 1, 10, 99)


class Child:
    """A child that prints these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [*pieces, b""]

    def read(self) -> bytes:
        return self._pieces.pop(0)


@given(st.lists(st.text("ab\n", min_size=1, max_size=6).map(str.encode), max_size=8), st.integers(1, 9))
def test_output_is_cut_at_line_ends_however_it_comes(pieces, num_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multislot_runner, "PARSE_BYTES", num_bytes)
        found = list(whole_lines(Child(pieces)))
    assert b"".join(found) == b"".join(pieces)
    assert all(chunk.endswith(b"\n") and len(chunk) for chunk in found[:-1])


def block(values: list[bytes | None], first: int = 10) -> Events:
    return Events.of(values, range(first, first + len(values)), keys=values)


@given(VALUES, st.sampled_from([-1, 10]))
def test_values_are_joined_as_bytes_join(values, ending):
    expected = b"".join(value + (b"\n" if ending == 10 else b"") for value in values)
    assert concat_values(block(list(values)), ending).tobytes() == expected


@given(st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=6), st.booleans())
def test_events_become_lines_whether_or_not_they_already_lie_so(values, in_place):
    events = block(list(values))
    if in_place:
        data = b"before\n" + b"".join(value + b"\n" for value in values) + b"after"
        end = 7 + np.cumsum([len(value) + 1 for value in values]) - 1
        begin = end - [len(value) for value in values]
        events = Events(data, begin, end, events.position_E, events.timestamp_ms_E)
    lines = lines_of(events)
    assert bytes(lines) == b"".join(value + b"\n" for value in values)
    if in_place:
        assert np.shares_memory(np.frombuffer(lines, np.uint8), np.frombuffer(events.data, np.uint8))


@given(VALUES)
def test_line_feeds_are_found_as_in_finds_them(values):
    events = block(list(values))
    found = np.zeros(len(values), np.bool_)
    find_line_feeds(bytes_of(events.data), events.begin_E, events.end_E, found)
    assert found.tolist() == [b"\n" in value for value in values]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=8)), max_size=8), st.booleans())
def test_events_no_command_should_see_are_split_off(values, lines):
    work = reject_early(SEGMENT, [block(values[:3], 10), block(values[3:], 13)], 5, lines=lines)
    wrong = {}
    for position, value in enumerate(values, 10):
        if value is None:
            wrong[position] = Reason.NULL
        elif len(value) > 5:
            wrong[position] = Reason.TOO_LONG
        elif lines and b"\n" in value:
            wrong[position] = Reason.LINE_FEED
    assert {rejection.offset: rejection.reason for rejection in work.rejections} == wrong
    kept = {int(p): events.value(i) for events in work.blocks for i, p in enumerate(events.position_E)}
    assert kept == {position: value for position, value in enumerate(values, 10) if position not in wrong}
    assert work.num_events == len(values)
    assert work.num_bytes == sum(len(value) for value in kept.values() if value is not None)
    assert all(len(rejection.data or b"") <= 5 for rejection in work.rejections)


def test_keys_go_with_their_events():
    taken = take_events(block([b"a", b"b", b"c"]), np.array([0, 2]))
    assert taken.keys == [b"a", b"c"] and taken.position_E.tolist() == [10, 12]


def test_an_event_with_a_fault_of_the_source_is_rejected_with_its_words_in_every_cut_of_its_block():
    plain = block([b"a", b"b", b"c"])
    faulty = replace(plain, faults=[None, "the words", None])
    for events in (faulty, take_events(faulty, np.array([1, 2])), faulty.slice(1, 3)):
        work = reject_early(SEGMENT, [events], 5, lines=True)
        assert [(each.offset, each.reason, each.detail) for each in work.rejections] == [
            (11, Reason.UNPARSABLE, "the words")
        ]
        assert sum(map(len, work.blocks)) == len(events) - 1


@pytest.mark.parametrize(
    ("section", "left_out", "rejected"),
    [
        (KafkaSource(kind="kafka", topics=("t",)), {"null value": 2}, []),
        (KafkaSource(kind="kafka", topics=("t",), null_values="reject"), {}, [10, 13]),
        (FilesSource(kind="files", paths=("x",)), {"blank line": 1}, [10, 13]),
        (FilesSource(kind="files", paths=("x",), blank_lines="read"), {}, [10, 13]),
    ],
)
def test_events_without_a_value_are_left_out_and_counted_apart_and_positions_stay(section, left_out, rejected):
    values = [None, b"a", b"", None, b"b"]
    work = reject_early(SEGMENT, [block(values)], 5, lines=True, skipped=SkippedValues.of(section))
    assert work.left_out == left_out
    assert [each.offset for each in work.rejections] == rejected
    assert work.num_events == 5 - sum(left_out.values())
    positions = [position for each in work.blocks for position in each.position_E.tolist()]
    assert positions == [11, 14] if "blank line" in left_out else [11, 12, 14]


BLOCKS = st.lists(st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=5), max_size=5)


def blocks_of(values: list[list[bytes | None]]) -> list[Events]:
    firsts = np.cumsum([10, *map(len, values)]).tolist()
    return [block(list(each), first) for each, first in zip(values, firsts, strict=False)]


def values_of(blocks: list[Events]) -> list[bytes | None]:
    return [each.value(at) for each in blocks for at in range(len(each))]


@given(BLOCKS, st.integers(1, 300))
def test_a_segment_is_cut_by_the_bytes_of_its_events_however_they_came(values, max_bytes):
    segment = replace(SEGMENT, end=10 + sum(map(len, values)))
    parts = list(cut_events(segment, blocks_of(values), max_bytes))
    expected, sizes = [[]], []
    for value in (value for each in values for value in each):
        if expected[-1] and sum(len(each or b"") + BYTES_OF_EVENT for each in expected[-1]) >= max_bytes:
            expected.append([])
        expected[-1].append(value)
    assert [values_of(blocks) for _, blocks in parts] == expected
    sizes = [part.end - part.begin for part, _ in parts]
    assert sizes == [len(each) for each in expected] and parts[0][0].begin == 10 and parts[-1][0].end == segment.end


def test_positions_without_events_belong_to_the_part_before_the_next_cut_and_none_is_lost():
    compacted = Events.of([b"a" * 50, b"b" * 50, b"c"], [12, 30, 31])
    parts = [(part.begin, part.end) for part, _ in cut_events(SEGMENT, [compacted], 1)]
    assert parts == [(10, 13), (13, 31), (31, 32), (32, 99)]
    assert [(part.begin, part.end) for part, _ in cut_events(SEGMENT, [], 1)] == [(10, 99)]


@given(
    BLOCKS.map(lambda blocks: [[each or b"" for each in block] for block in blocks]),
    st.integers(1, 6),
    st.integers(1, 90),
)
def test_a_batch_of_large_events_has_fewer(values, num, max_bytes):
    expected = [[]]
    for value in (value for each in values for value in each):
        if len(expected[-1]) == num or sum(map(len, expected[-1])) >= max_bytes:
            expected.append([])
        expected[-1].append(value)
    found = [values_of([batch]) for batch in rebatch(blocks_of(values), num, max_bytes)]
    assert found == [each for each in expected if each]
