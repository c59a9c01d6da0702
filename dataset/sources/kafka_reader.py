"""Reads the records of Kafka partitions: the protocol and its errors.

dataset.sources.kafka_source says which positions are read; dataset.sources.kafka_python_reader and
dataset.sources.librdkafka_reader read them. Both give the same events.
"""

from collections.abc import Sequence
from typing import Protocol

from kafka import TopicPartition

from headrace.dataset.stream.source import Events

MAX_BLOCK_RECORDS = 4_096


class PositionGone(Exception):
    """The broker does not have the position: retention deleted it, or the partition is another one."""


class ReadRefused(Exception):
    """The broker refuses to give records, and a retry would not change it."""


class BrokenRecords(Exception):
    """Records cannot be decoded."""


class KafkaReader(Protocol):
    """Reads partitions, one at a time, from any position. One thread."""

    def poll(self, part: TopicPartition, position: int, end: int, timeout_ms: int) -> tuple[Events | None, int]:
        """Some records from `position` on and before `end`, and the position after them, at most `end`.

        Offsets without a record (marks, aborted and compacted records) are passed over. The same position again: no
        news within `timeout_ms`. Raises PositionGone, ReadRefused, BrokenRecords.
        """
        ...

    def reason(self) -> str:
        """The last warning of the library; "" without one."""
        ...

    def close(self) -> None:
        """Close connections and threads. May be called twice."""
        ...


def join_records(
    values: Sequence[bytes | None],
    positions: Sequence[int],
    timestamps_ms: Sequence[int],
    keys: Sequence[bytes | None],
    headers: Sequence[Sequence[tuple[str, bytes]] | None],
) -> Events:
    """A block of records. Absent keys and headers are left out."""
    return Events.of(
        values,
        positions,
        timestamps_ms,
        keys if keys.count(None) < len(keys) else None,
        [each or () for each in headers] if any(headers) else None,
    )
