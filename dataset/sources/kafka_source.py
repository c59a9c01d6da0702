"""Records of Kafka topics as a stream: each Kafka partition is a partition, position = offset.

Partitions are assigned by hand and positions are the job's own; offsets are committed to the group only for lag tools.
A segment ends when the position reaches its end, not when a record is seen: control records, aborted transactions and
compaction leave offsets without records. Ends are the last stable offset under read_committed (the default).

Partitions are numbered topic by topic in the order of the spec, then by Kafka's number; one found later comes last
and starts at its beginning. A partition's identity is its topic's id (brokers before 2.8 have none), so a recreated
topic is noticed even if it is longer; the id is checked after each segment.

dataset.sources.kafka_client connects and waits: by kafka-python, which knows topics' ids. dataset.sources.kafka_reader
reads records: by librdkafka where it is installed, else by kafka-python.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import assert_never

from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kafka_client import BoundedWait, KafkaClient
from headrace.dataset.sources.kafka_options import KafkaLibrary, consumer_options, library_of, librdkafka_options
from headrace.dataset.sources.kafka_reader import BrokenRecords, KafkaReader, PositionGone, ReadRefused
from headrace.dataset.spec.config import unix_us
from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.source import Events, Partition, Segment, check_identity
from headrace.deadline import Deadline

BEGIN_AGE_S = 1.0
"""Largest age of the first retained positions in `partitions`; `read` checks them itself."""
LOOK_AGAIN_S = 0.25
"""Pause between two looks for a missing topic while opening."""


class KafkaStream:
    """A source of Kafka records."""

    missing: Sequence[str] = ()
    """See Source: a topic that does not exist is refused."""

    def __init__(self, config: KafkaSource, *, job: str, folder: Path, deadline: Deadline) -> None:
        """Connect, and determine where partitions start and, for a bounded source, end.

        Raises SpecError for wrong options, SourceUnavailable if there is no broker or topic in time.
        """
        self.bounded = config.end != "never"
        self._config = config
        self._options = consumer_options(config.options, folder)
        self._library = library_of(config.library, config.options)
        self._reader: KafkaReader | None = None
        self._group = config.group or job
        self._group_client: KafkaClient | None = None
        self._partitions: list[TopicPartition] = []  # by number
        self._starts: dict[TopicPartition, int] = {}
        self._begins: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}
        self._identities: dict[str, str] = {}  # by topic
        self._begins_at_s = -float("inf")
        deadline = Deadline.after(min(config.connect_deadline, deadline.left_s()))
        self._client = KafkaClient(self._options, deadline)
        try:
            self._open(deadline)
        except BaseException:
            self.close()
            raise

    def resume(self, positions: Mapping[str, int]) -> None:
        """Nothing to do, the records exist."""

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        """A bounded source keeps the partitions of its opening."""
        if not self.bounded:
            if found := self._unknown():
                self._add(found, deadline)
                self._starts.update({part: self._begins[part] for part in found})
            self._ends = self._ask_ends(self._partitions, deadline)
        if time.monotonic() - self._begins_at_s >= BEGIN_AGE_S:
            self._begins = self._ask_begins(self._partitions, deadline)
            self._begins_at_s = time.monotonic()
        self._identities = self._client.ask_identities(
            self._config.topics, deadline
        )  # last, so that the ends belong to these topics
        return [self._partition(number, part) for number, part in enumerate(self._partitions)]

    def look_again(self, deadline: Deadline) -> None:
        self._client.refresh(self._config.topics, deadline)
        found = self._unknown()
        self._add(found, deadline)
        self._starts |= {part: self._begins[part] for part in found}
        self._ends = self._ask_ends(self._partitions, deadline)
        if self._config.end not in ("never", "latest"):
            ends = self._places(self._config.end, self._partitions, self._ends, deadline)
            self._ends = {part: max(end, self._starts[part]) for part, end in ends.items()}

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> Mapping[str, int]:
        """One request for all partitions."""
        if not times_ms:
            return {}
        found = self._offsets_at({_part(name): ms for name, ms in times_ms.items()}, deadline)
        return {_name(part): offset for part, offset in found.items()}

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        """The deadline bounds each time without a record, not the time of the reader."""
        wait = BoundedWait(f"reading {segment.partition} from {segment.begin}", deadline.left_s())
        part = self._checked(segment, deadline)
        position = segment.begin
        while position < segment.end:
            since_s = time.monotonic()
            events, now = self._poll(part, position, wait, segment)
            if now > position:
                wait.progress()
            elif wait.empty(time.monotonic() - since_s):
                raise self._client.unavailable(wait.doing, self._record_reader().reason())
            position = now
            if position >= segment.end and segment.identity:
                self._check_identity(segment, part.topic, Deadline.after(wait.max_wait_s))
            if events is not None:
                yield events

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Positions are committed to the group as offsets."""
        offsets = {_part(name): OffsetAndMetadata(position, "", -1) for name, position in positions.items()}
        consumer = self._group_consumer(deadline).consumer
        self._client.ask(
            f"committing to group {self._group}", lambda ms: consumer.commit(offsets, timeout_ms=ms), deadline
        )

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._client.close()
        if self._group_client is not None:
            self._group_client.close()

    # Opening

    def _open(self, deadline: Deadline) -> None:
        self._client.refresh(self._config.topics, deadline)
        while missing := [topic for topic in self._config.topics if not self._client.partitions(topic)]:
            if deadline.left_s() <= LOOK_AGAIN_S:
                raise SourceUnavailable(
                    f"topic {missing[0]!r} does not exist at {self._client.servers}, or may not be read; "
                    f"create it or correct sources.*.topics"
                )
            time.sleep(LOOK_AGAIN_S)
            self._client.refresh(self._config.topics, deadline)
        found = self._unknown()
        self._add(found, deadline)
        ends = self._ask_ends(found, deadline)
        self._starts = self._first_positions(found, ends, deadline)
        if self.bounded:
            ends = self._places(self._config.end, found, ends, deadline)
            ends = {part: max(end, self._starts[part]) for part, end in ends.items()}
        self._ends = ends

    def _first_positions(
        self, parts: Sequence[TopicPartition], ends: Mapping[TopicPartition, int], deadline: Deadline
    ) -> dict[TopicPartition, int]:
        """Where a new job starts: with `since`, `overlap` before that time; the events before it are left out later."""
        if self._config.since is None:
            return self._places(self._config.start, parts, ends, deadline)
        ms = max(0, unix_us(self._config.since) // 1000 - round(1000 * self._config.overlap))
        return self._places_at(ms, parts, ends, deadline)

    def _places(
        self, where: str, parts: Sequence[TopicPartition], ends: Mapping[TopicPartition, int], deadline: Deadline
    ) -> dict[TopicPartition, int]:
        """The positions that "earliest", "latest", "group" or a time means; a time in the future means the end."""
        if where == "earliest":
            return {part: self._begins[part] for part in parts}
        if where == "latest":
            return {part: ends[part] for part in parts}
        if where == "group":
            return {part: self._committed(part, deadline) for part in parts}
        return self._places_at(int(datetime.fromisoformat(where).timestamp() * 1000), parts, ends, deadline)

    def _places_at(
        self, ms: int, parts: Sequence[TopicPartition], ends: Mapping[TopicPartition, int], deadline: Deadline
    ) -> dict[TopicPartition, int]:
        """The positions of the first records of a time or later; the end without one."""
        found = self._offsets_at(dict.fromkeys(parts, ms), deadline)
        return {part: min(found.get(part, ends[part]), ends[part]) for part in parts}

    def _offsets_at(self, times_ms: Mapping[TopicPartition, int], deadline: Deadline) -> dict[TopicPartition, int]:
        """The offset of each partition's first record of a time or later, if it has one."""
        found = self._client.ask(
            "asking for offsets by time",
            lambda timeout_ms: self._client.consumer.offsets_for_times(dict(times_ms), timeout_ms),
            deadline,
        )
        return {part: int(at.offset) for part, at in found.items() if at is not None}

    def _committed(self, part: TopicPartition, deadline: Deadline) -> int:
        consumer = self._group_consumer(deadline).consumer
        offset = self._client.ask(
            f"asking for the offset of group {self._group}",
            lambda ms: consumer.committed(part, timeout_ms=ms),
            deadline,
        )
        return self._begins[part] if offset is None else int(offset)

    def _group_consumer(self, deadline: Deadline) -> KafkaClient:
        # A consumer with a group asks its coordinator before every poll; reading must not depend on that.
        if self._group_client is None:
            self._group_client = KafkaClient(self._options, deadline, self._group)
        return self._group_client

    # Partitions

    def _partition(self, number: int, part: TopicPartition) -> Partition:
        start, begin, end = self._starts[part], self._begins[part], self._ends[part]
        return Partition(_name(part), number, start, begin, end, self.bounded, self._identities.get(part.topic, ""))

    def _unknown(self) -> list[TopicPartition]:
        known = set(self._partitions)
        found = [TopicPartition(topic, n) for topic in self._config.topics for n in self._client.partitions(topic)]
        return [part for part in found if part not in known]

    def _add(self, found: Sequence[TopicPartition], deadline: Deadline) -> None:
        self._begins.update(self._ask_begins(found, deadline))
        self._partitions += found

    def _ask_begins(self, parts: Sequence[TopicPartition], deadline: Deadline) -> dict[TopicPartition, int]:
        consumer = self._client.consumer
        return self._client.ask(
            "asking for first offsets", lambda ms: dict(consumer.beginning_offsets(parts, ms)), deadline
        )

    def _ask_ends(self, parts: Sequence[TopicPartition], deadline: Deadline) -> dict[TopicPartition, int]:
        consumer = self._client.consumer
        return self._client.ask("asking for last offsets", lambda ms: dict(consumer.end_offsets(parts, ms)), deadline)

    # Reading

    def _check_identity(self, segment: Segment, topic: str, deadline: Deadline) -> None:
        """Raise SourceGap if the topic was recreated. Ids are never reused, so one check at the end is enough."""
        now = self._client.ask_identities([topic], deadline).get(topic, "")
        check_identity(segment.partition, segment.identity, now)

    def _checked(self, segment: Segment, deadline: Deadline) -> TopicPartition:
        """The Kafka partition of a segment. Raises SourceGap if the segment reaches beyond its end."""
        part = _part(segment.partition)
        if part not in self._partitions:
            self._client.refresh(self._config.topics, deadline)
            if part not in self._unknown():
                raise SourceGap(f"{segment.partition}: Kafka has no such partition of {', '.join(self._config.topics)}")
            found = self._unknown()
            self._add(found, deadline)
            self._starts.update({new: self._begins[new] for new in found})
            self._ends.update({new: self._begins[new] for new in found})
        if segment.end > self._ends[part] and segment.end > (end := self._ask_ends([part], deadline)[part]):
            raise SourceGap(
                f"{segment.partition}: positions up to {segment.end} were requested, but it ends at {end}; "
                f"was the topic deleted and created again?"
            )
        return part

    def _record_reader(self) -> KafkaReader:
        """The reader of records; made at the first read, since a planner reads none."""
        if self._reader is None:
            match self._library:
                case KafkaLibrary.LIBRDKAFKA:
                    from headrace.dataset.sources.librdkafka_reader import LibrdkafkaReader

                    self._reader = LibrdkafkaReader(librdkafka_options(self._options, self._group))
                case KafkaLibrary.KAFKA_PYTHON:
                    from headrace.dataset.sources.kafka_python_reader import KafkaPythonReader

                    self._reader = KafkaPythonReader(self._client.consumer)
                case _:
                    assert_never(self._library)
        return self._reader

    def _poll(
        self, part: TopicPartition, position: int, wait: BoundedWait, segment: Segment
    ) -> tuple[Events | None, int]:
        """New records, and the position after them."""
        try:
            return self._record_reader().poll(part, position, segment.end, wait.poll_ms())
        except PositionGone as error:
            deadline = Deadline.after(wait.max_wait_s)
            begin, end = self._ask_begins([part], deadline)[part], self._ask_ends([part], deadline)[part]
            raise SourceGap(
                f"{segment.partition}: position {position} does not exist, the broker has {begin} to {end}; "
                f"older records were deleted by retention, or the topic was created again; "
                f"retain records longer than a job may be stopped"
            ) from error
        except (ReadRefused, BrokenRecords) as error:
            raise self._client.refused(wait.doing, error) from error


def _name(part: TopicPartition) -> str:
    return f"{part.topic}/{part.partition}"


def _part(name: str) -> TopicPartition:
    topic, _, number = name.rpartition("/")
    return TopicPartition(topic, int(number))
