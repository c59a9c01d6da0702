"""The buffer of a partition against a plain list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka")

from dataset.sources.librdkafka_reader import PartitionBuffer
from dataset.stream.source import Events

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
