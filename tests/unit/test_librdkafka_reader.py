"""The buffer of a partition against a plain list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka")

from confluent_kafka import Message
from kafka import TopicPartition

from headrace.dataset.sources import librdkafka_reader
from headrace.dataset.sources.librdkafka_reader import PartitionBuffer
from headrace.dataset.stream.source import Events

LENGTH = 40


def block(positions):
    return Events.of([b"%d" % n for n in positions], positions)


@st.composite
def streams(draw):
    """Positions with a record, cut into blocks; and the ends of segments."""
    positions = sorted(draw(st.sets(st.integers(0, LENGTH - 1))))
    cuts = sorted(draw(st.sets(st.integers(0, len(positions)))) | {0, len(positions)})
    blocks = [positions[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    return positions, blocks, sorted(draw(st.sets(st.integers(1, LENGTH))) | {LENGTH})


@given(streams())
def test_a_buffer_gives_every_record_once_and_in_order(stream):
    positions, blocks, ends = stream
    buffer, taken = PartitionBuffer(0, 0), []
    for each in blocks:
        buffer.add(block(each))
    buffer.reached = LENGTH  # librdkafka's event at the end of the partition
    for end in ends:
        while buffer.position < end:
            events = buffer.take(end)
            taken += [] if events is None else events.position_E.tolist()
            assert buffer.position <= end
    assert taken == positions
    assert buffer.num_bytes == 0 and not buffer.blocks


@given(streams(), st.integers(0, LENGTH))
def test_skipping_is_taking_and_forgetting(stream, position):
    positions, blocks, _ = stream
    buffer, taken = PartitionBuffer(0, 0), []
    for each in blocks:
        buffer.add(block(each))
    buffer.reached = LENGTH
    buffer.skip(position)
    while buffer.position < LENGTH:
        events = buffer.take(LENGTH)
        taken += [] if events is None else events.position_E.tolist()
    assert taken == [each for each in positions if each >= position]


def test_a_position_is_not_reached_before_a_record_after_it():
    buffer = PartitionBuffer(0, 0)
    assert buffer.take(10) is None and buffer.position == 0
    buffer.add(block([3, 4]))
    assert np.array_equal(buffer.take(10).position_E, [3, 4]) and buffer.position == 5
    assert buffer.take(10) is None and buffer.position == 5
    buffer.add(block([12]))
    assert buffer.take(10) is None and buffer.position == 10


class Mixed:
    """In place of librdkafka: gives all of its messages at once."""

    def __init__(self, *_options, **_more):
        self.messages, self.assigned = [], {}

    def incremental_assign(self, parts):
        self.assigned |= {part.partition: part.offset for part in parts}

    def incremental_unassign(self, parts):
        for part in parts:
            del self.assigned[part.partition]

    def consume(self, _most, _timeout_s):
        given, self.messages = self.messages, []
        return given


def test_a_partition_over_its_share_keeps_all_of_its_records_of_one_call(monkeypatch):
    monkeypatch.setattr(librdkafka_reader, "Consumer", Mixed)
    monkeypatch.setattr(librdkafka_reader, "MAX_BUFFER_BYTES", 200)
    reader = librdkafka_reader.LibrdkafkaReader({})
    first, second = TopicPartition("clicks", 0), TopicPartition("clicks", 1)
    assert reader.poll(first, 0, 4, 1) == (None, 0)
    places = [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 3)]
    reader._consumer.messages = [
        Message(topic="clicks", partition=number, offset=offset, value=bytes(100)) for number, offset in places
    ]
    assert reader.poll(second, 0, 2, 1)[1] == 1
    assert reader._consumer.assigned == {1: 0}
    position, taken = 0, []
    while position < 4:
        events, position = reader.poll(first, position, 4, 1)
        taken += events.position_E.tolist()
    assert taken == [0, 1, 2, 3]
