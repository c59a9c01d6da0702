"""Events that are rejected after the pipe leave the same dead letters as those that the pipe rejects."""

import base64
import json
from dataclasses import replace

import pytest

from headrace.config import validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.rejection import Reason, RejectedSample
from headrace.dataset.spec.config import ColumnsPipe, DeadLettersSection, PipeSection, SourceSection
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.stream_spec import SlotsSpec
from headrace.dataset.stream.errors import BadEvent
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedGap
from headrace.dataset.stream.source import Segment

SCHEMA = Schema.of(validate(SlotsSpec, {"slots": [{"name": "a"}]}).slots)
EVENTS = [[b'{"a": 1}', b"broken", ScriptedGap(3), b'{"a": 2}', b'{"a": 3}'], [b'{"a": 4}', b'{"a": 5}']]
SEGMENTS = [Segment("memory/0", 0, 0, 7), Segment("memory/1", 1, 0, 2)]
REJECTED = [
    RejectedSample(0, 5, Reason.SAMPLE_TOO_LONG, "why"),
    RejectedSample(0, 5, Reason.NO_TIME),
    RejectedSample(1, 1, Reason.TOO_FAR_AHEAD),
]


def rejected(folder, source, pipe=None, config=None, samples=REJECTED, lost=False):
    """The tally, and the letters of a pass whose samples `samples` are given back."""
    config = config or DeadLettersSection()
    pipe = pipe or ColumnsPipe(kind="columns", batch_events=2)
    letters = DeadLetters(folder / "dead", 0, config)
    reader, tally = SegmentReader(source, pipe, SCHEMA, SourceSection(), letters, folder), PassTally()
    try:
        blocks = list(reader.read(3, SEGMENTS, tally))
        at = {event: number for number, block in enumerate(blocks) for event in block.event_B.tolist()}
        assert len(at) >= 4
        if lost:
            source.drop_before(0, 7)
        places = [at[5], at[5], len(blocks) - 1] if pipe.traced else [0, 0, 1]
        pairs = zip(places, samples, strict=True)
        reader.reject(3, [replace(each, block=place) for place, each in pairs], tally)
        path = letters.publish(3)
    finally:
        reader.close()
    return tally, [json.loads(line) for line in path.read_bytes().splitlines()] if path else []


def test_letters_have_place_reason_and_bytes_once_for_each_event(tmp_path):
    tally, letters = rejected(tmp_path, MemorySource(EVENTS))
    told = [(each["partition"], each["offset"], each["reason"], base64.b64decode(each["bytes"])) for each in letters]
    assert told == [
        ("memory/0", 1, "unparsable", b"broken"),
        ("memory/0", 5, "longer than join.max_sample_bytes", b'{"a": 2}'),
        ("memory/1", 1, "further ahead than join.max_ahead", b'{"a": 5}'),
    ]
    assert tally.rejected == {each["reason"]: 1 for each in letters} and tally.num_dead_letters == 3
    assert tally.first_of["longer than join.max_sample_bytes"] == (
        "memory/0 at 5: longer than join.max_sample_bytes: why"
    )


def test_without_bytes_the_source_is_read_once_and_details_stay_out(tmp_path):
    source = MemorySource(EVENTS)
    _, letters = rejected(tmp_path, source, config=DeadLettersSection(keep_bytes=False))
    assert source.num_reads == len(SEGMENTS)
    assert [sorted(each) for each in letters] == [["offset", "partition", "reason"]] * 3


def test_a_source_that_lost_the_event_meanwhile_leaves_a_letter_without_bytes(tmp_path):
    _, letters = rejected(tmp_path, MemorySource(EVENTS), lost=True)
    assert [each["bytes"] is None for each in letters] == [False, True, False]


def test_fail_stops_at_the_first_one(tmp_path):
    pipe = ColumnsPipe(kind="columns", on_bad_event="fail")
    source = MemorySource([[b'{"a": 1}', ScriptedGap(4), b'{"a": 2}', b'{"a": 3}'], EVENTS[1]])
    with pytest.raises(BadEvent, match=r"memory/0 at 5: longer than join.max_sample_bytes: why; pipe.on_bad_event"):
        rejected(tmp_path, source, pipe)


def test_samples_that_cannot_be_traced_are_told_by_the_line_of_the_output(tmp_path):
    pipe = PipeSection(command=("cat",))
    events = [[b"1 1", b"1 2", b"1 3", b"1 4", b"1 5", b"1 6", b"1 7"], [b"1 8", b"1 9"]]
    samples = [REJECTED[0], REJECTED[0], RejectedSample(1, 8, Reason.NO_TIME)]
    _, letters = rejected(tmp_path, MemorySource(events), pipe, samples=samples)
    assert [(each["partition"], each["offset"], each["line"], each["bytes"]) for each in letters] == [
        ("memory/0", 0, 6, None),
        ("memory/1", 0, 2, None),
    ]
