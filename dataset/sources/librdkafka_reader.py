"""Reads Kafka records by librdkafka: it fetches and decodes in threads of its own, outside of the interpreter's lock.

The partitions that are read stay assigned, so the records of the next pass are fetched while this one is trained. They
come mixed; records of another partition than the one being read wait in a buffer. All buffers together hold at most
MAX_BUFFER_BYTES: a partition whose share is full is taken off until it is read.

librdkafka's position follows the records it gives, and it gives no marks and no aborted records. So a position is
reached by the first record at or after it, or by librdkafka's event at the end of a partition.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as Assigned
from kafka import TopicPartition

from headrace.dataset.sources.kafka_client import LastWarning
from headrace.dataset.sources.kafka_reader import (
    MAX_BLOCK_RECORDS,
    BrokenRecords,
    PositionGone,
    ReadRefused,
    join_records,
)
from headrace.dataset.stream.source import Events
from headrace.errors import SpecError

LOGGER = "librdkafka"
MAX_BUFFER_BYTES = 32 << 20
"""Bytes of all buffers. Each partition has an equal share, and goes beyond it by one call's records at most."""
EVENT_BYTES = 32
"""Bytes of an event's numbers."""
MAX_IDLE_TURNS = 8
"""A partition that was not read while each other one was read so often is taken off and its buffer dropped."""
GONE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION)  # noqa: SLF001
BROKEN = (
    KafkaError._BAD_MSG,  # noqa: SLF001
    KafkaError._BAD_COMPRESSION,  # noqa: SLF001
    KafkaError._NOT_IMPLEMENTED,  # noqa: SLF001
    KafkaError.INVALID_MSG,
)
REFUSED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNSUPPORTED_COMPRESSION_TYPE)


@dataclass(slots=True)
class PartitionBuffer:
    """Records of one partition that were given and not yet read."""

    position: int
    """The position of the next read."""
    reached: int
    """All records before this position were given."""
    blocks: deque[Events] = field(default_factory=deque)
    num_bytes: int = 0
    assigned: bool = False
    error: KafkaError | None = None
    turn: int = 0
    """The reader's turn when it was last read."""

    def add(self, events: Events) -> None:
        """Append records."""
        self.blocks.append(events)
        self.num_bytes += _num_bytes(events)
        self.reached = max(self.reached, int(events.position_E[-1]) + 1)

    def skip(self, position: int) -> None:
        """Drop what is before `position`, which was reached."""
        while self.position < position:
            self.take(position)

    def take(self, end: int) -> Events | None:
        """The first block's records before `end`. `position` becomes that of the next record, at most `end`."""
        events = None
        if self.blocks:
            block = self.blocks.popleft()
            self.num_bytes -= _num_bytes(block)
            cut = int(np.searchsorted(block.position_E, end))
            if cut < len(block):
                self.blocks.appendleft(rest := block.slice(cut, len(block)))
                self.num_bytes += _num_bytes(rest)
            events = block.slice(0, cut) if cut else None
        following = int(self.blocks[0].position_E[0]) if self.blocks else self.reached
        self.position = max(self.position, min(end, following))
        return events


class LibrdkafkaReader:
    """A `dataset.sources.kafka_reader.KafkaReader`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` are librdkafka's own. Raises SpecError if it rejects them."""
        self._last_warning = LastWarning(LOGGER)
        try:
            self._consumer = Consumer(dict(options), logger=logging.getLogger(LOGGER))
        except (KafkaException, ValueError, TypeError) as error:
            self._last_warning.close()
            raise SpecError(f"librdkafka rejects them: {error}", "sources.*.options") from error
        self._buffers: dict[TopicPartition, PartitionBuffer] = {}
        self._reading: TopicPartition | None = None
        self._turn = 0
        self._closed = False

    def poll(self, part: TopicPartition, position: int, end: int, timeout_ms: int) -> tuple[Events | None, int]:
        buffer = self._turn_to(part, position)
        if not buffer.blocks and buffer.reached <= position:
            self._fetch(timeout_ms / 1000)
            if not buffer.blocks and buffer.error is not None:
                _raise(buffer.error)
                time.sleep(timeout_ms / 1000)  # it may pass; the next call asks again
        return buffer.take(end), buffer.position

    def reason(self) -> str:
        return self._last_warning.text

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._buffers.clear()
            self._consumer.close()
            self._last_warning.close()

    # Buffers

    def _turn_to(self, part: TopicPartition, position: int) -> PartitionBuffer:
        """The buffer of `part` at `position`; what was given before is dropped if it is of another position."""
        if self._reading != part:
            self._reading = part
            self._turn += 1
            self._drop_idle()
        buffer = self._buffers.get(part)
        if buffer is not None and buffer.error is None and buffer.position <= position <= buffer.reached:
            buffer.skip(position)
        else:
            if buffer is not None:
                self._take_off(part, buffer)
            buffer = self._buffers[part] = PartitionBuffer(position, position)
        buffer.turn = self._turn
        if not buffer.assigned and buffer.num_bytes <= self._share() // 2:
            self._consumer.incremental_assign([Assigned(part.topic, part.partition, buffer.reached)])
            buffer.assigned = True
        return buffer

    def _share(self) -> int:
        return MAX_BUFFER_BYTES // max(1, len(self._buffers))

    def _drop_idle(self) -> None:
        max_turns = MAX_IDLE_TURNS * max(1, len(self._buffers))
        for part in [part for part, buffer in self._buffers.items() if self._turn - buffer.turn > max_turns]:
            self._take_off(part, self._buffers.pop(part))

    def _take_off(self, part: TopicPartition, buffer: PartitionBuffer) -> None:
        """Fetch no more of a partition. What librdkafka has fetched of it is dropped."""
        if buffer.assigned:
            self._consumer.incremental_unassign([Assigned(part.topic, part.partition)])
            buffer.assigned = False

    # Fetching

    def _fetch(self, timeout_s: float) -> None:
        """Take what librdkafka has; wait for the first message if it has none."""
        messages = self._consumer.consume(MAX_BLOCK_RECORDS, 0)
        if not messages:
            messages = self._consumer.consume(1, timeout_s)
            messages += self._consumer.consume(MAX_BLOCK_RECORDS, 0) if messages else []
        self._sort(messages)

    def _sort(self, messages: Sequence[Message]) -> None:
        errors = [message for message in messages if message.error() is not None]
        records = [message for message in messages if message.error() is None] if errors else messages
        places = zip(map(Message.topic, records), map(Message.partition, records), strict=True)
        at = 0
        for place, run in groupby(places):
            num = sum(1 for _ in run)
            self._add(TopicPartition(*place), records[at : at + num])
            at += num
        for message in errors:
            self._note(message)
        # Only now: a partition may have several runs in one call.
        for part, buffer in self._buffers.items():
            if part != self._reading and buffer.num_bytes > self._share():
                self._take_off(part, buffer)

    def _add(self, part: TopicPartition, records: Sequence[Message]) -> None:
        buffer = self._buffers[part]
        assert buffer.assigned and records[0].offset() >= buffer.reached, f"{part}: records of an earlier position"
        buffer.add(_events(records))

    def _note(self, message: Message) -> None:
        """An end of a partition, or an error."""
        error = message.error()
        buffer = self._buffers.get(TopicPartition(message.topic(), message.partition()))
        if buffer is None:
            self._last_warning.text = error.str()
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
            buffer.reached = max(buffer.reached, message.offset())
        else:
            buffer.error = error


def _raise(error: KafkaError) -> None:
    """Raise what a retry would not change."""
    if error.code() in GONE:
        raise PositionGone(error.str())
    if error.code() in BROKEN:
        raise BrokenRecords(f"{error.name()}: {error.str()}")
    if error.code() in REFUSED or error.fatal():
        raise ReadRefused(f"{error.name()}: {error.str()}")


def _num_bytes(events: Events) -> int:
    return int(events.end_E[-1] - max(0, int(events.begin_E[0]))) + EVENT_BYTES * len(events)


def _events(records: Sequence[Message]) -> Events:
    times = list(map(Message.timestamp, records))
    return join_records(
        list(map(Message.value, records)),
        list(map(Message.offset, records)),
        [-1 if kind == TIMESTAMP_NOT_AVAILABLE else ms for kind, ms in times],
        list(map(Message.key, records)),
        list(map(Message.headers, records)),
    )
