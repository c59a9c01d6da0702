"""Reads Kafka records by kafka-python.

Only the partition being read is assigned. Pausing the others would keep their fetched records, but kafka-python 3.0 can
then fail to return them. Its position follows fetched batches, so it passes offsets without records by itself.
"""

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import (
    CorruptRecordError,
    KafkaError,
    LogTruncationError,
    OffsetOutOfRangeError,
    RetriableError,
    UnsupportedCodecError,
)

from headrace.dataset.sources.kafka_reader import (
    MAX_BLOCK_RECORDS,
    BrokenRecords,
    PositionGone,
    ReadRefused,
    join_records,
)
from headrace.dataset.stream.source import Events


class KafkaPythonReader:
    """A `dataset.sources.kafka_reader.KafkaReader` on a consumer that others use for its metadata."""

    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer
        self._reading: TopicPartition | None = None

    def poll(self, part: TopicPartition, position: int, end: int, timeout_ms: int) -> tuple[Events | None, int]:
        self._turn_to(part, position)
        max_records = min(MAX_BLOCK_RECORDS, end - position)
        try:
            records = self._consumer.poll(timeout_ms=timeout_ms, max_records=max_records).get(part, [])
            now = int(self._consumer.position(part, timeout_ms=1))
        except (OffsetOutOfRangeError, LogTruncationError) as error:
            raise PositionGone(str(error)) from error
        except (CorruptRecordError, UnsupportedCodecError) as error:
            raise BrokenRecords(f"{type(error).__name__}: {error}") from error
        except RetriableError:
            return None, position
        except KafkaError as error:
            raise ReadRefused(f"{type(error).__name__}: {error}") from error
        while records and records[-1].offset >= end:
            records.pop()
        return _events(records) if records else None, min(now, end)

    def reason(self) -> str:
        """The client of the metadata keeps it."""
        return ""

    def close(self) -> None:
        """The consumer belongs to the client."""

    def _turn_to(self, part: TopicPartition, position: int) -> None:
        if self._reading != part:
            self._consumer.assign([part])
            self._consumer.seek(part, position)
            self._reading = part
        elif self._consumer.position(part, timeout_ms=1) != position:
            self._consumer.seek(part, position)


def _events(records: list) -> Events:  # type: ignore[type-arg]  # of kafka-python's records
    return join_records(
        [record.value for record in records],
        [record.offset for record in records],
        [record.timestamp if record.timestamp is not None else -1 for record in records],
        [record.key for record in records],
        [record.headers for record in records],
    )
