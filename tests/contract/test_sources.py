"""What every source promises, whatever it reads from.

Each world makes a bounded source of two partitions: "the long one" of 2,500 events and a short one.
"""

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.dataset.sources.composite import CompositeSource
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kafka_options import KafkaLibrary
from headrace.dataset.sources.kinds import open_source
from headrace.dataset.sources.simulated import SimulatedSource
from headrace.dataset.spec.config import Opening, SourceSection
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedGap
from headrace.dataset.stream.source import Events, Partition, Segment, Source
from headrace.deadline import Deadline

LONG, SHORT = 2_500, 7


def soon() -> Deadline:
    return Deadline.after(20)


def value(number: int) -> bytes:
    return b'{"n":%d,"pad":"%s"}' % (number, b"x" * (number % 50))


@dataclass
class World:
    """How to open the same stream again and again."""

    open: Callable[[], Source]
    values: list[bytes] | None
    """Values of the long partition, where they are known beforehand."""


def files_world(tmp_path: Path, *, packed: bool) -> World:
    write = gzip.open if packed else open
    suffix = ".jsonl.gz" if packed else ".jsonl"
    values = [value(n) for n in range(LONG)]
    for name, count in (("a", LONG), ("b", SHORT)):
        with write(tmp_path / (name + suffix), "wb") as file:
            file.write(b"\n".join(values[:count]))
    config = FilesSource(kind="files", paths=("*" + suffix,))
    return World(lambda: open_source(config, Opening(folder=tmp_path, job="job", seed=1, deadline=soon())), values)


def memory_world() -> World:
    values = [value(n) for n in range(LONG)]
    entries = [*values[:10], ScriptedGap(5), *values[10:]]
    return World(lambda: MemorySource([entries, [b"x"] * SHORT]), values)


def parquet_world(tmp_path: Path) -> World:
    for name, count in (("a", LONG), ("b", SHORT)):
        table = pa.table({"n": list(range(count)), "pad": ["x" * (n % 50) for n in range(count)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=700)
    config = FilesSource(kind="files", paths=("*.parquet",), format="parquet")
    values = [value(n) for n in range(LONG)]
    return World(lambda: open_source(config, Opening(folder=tmp_path, job="job", seed=1, deadline=soon())), values)


def composite_world(tmp_path: Path) -> World:
    """The long partition in lines, the short one in memory of another source."""
    values = [value(n) for n in range(LONG)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(values))
    config = FilesSource(kind="files", paths=("*.jsonl",))
    names = SourceSet({"long": config, "short": SourceSection()})

    def opened() -> Source:
        lines = open_source(config, Opening(folder=tmp_path, job="job", seed=1, deadline=soon()))
        return CompositeSource(names, {"long": lines, "short": MemorySource([[b"x"] * SHORT])})

    return World(opened, values)


def simulated_world(tmp_path: Path) -> World:
    config = SimulatedSource(kind="simulated", events=2 * LONG, partitions=2, users=100, items=50)
    return World(lambda: open_source(config, Opening(folder=tmp_path, job="job", seed=1, deadline=soon())), None)


@pytest.fixture(scope="module")
def kafka_config(kafka) -> KafkaSource:
    """A topic of two partitions, written by plain, compressing and transactional producers."""
    topic = kafka.create_topic(2)
    values = [value(n) for n in range(LONG)]
    kafka.produce(topic, 0, values[:1000], compression_type="gzip")
    producer = kafka.producer(transactional_id=topic)
    producer.init_transactions()
    for first in range(1000, LONG, 500):
        producer.begin_transaction()
        for each in values[first : first + 500]:
            producer.send(topic, value=each, partition=0)
        producer.commit_transaction()
    producer.close()
    kafka.wait_for_marks(topic)
    kafka.produce(topic, 1, [b"x"] * SHORT)
    options = {"bootstrap_servers": kafka.servers}
    return KafkaSource(kind="kafka", topics=(topic,), options=options, end="latest")


def kafka_world(config: KafkaSource, library: str, tmp_path: Path) -> World:
    config = config.model_copy(update={"library": KafkaLibrary(library)})
    values = [value(n) for n in range(LONG)]
    return World(lambda: open_source(config, Opening(folder=tmp_path, job="job", seed=1, deadline=soon())), values)


WITHOUT_BROKER = ["plain", "gzip", "memory", "simulated", "parquet", "composite"]


@pytest.fixture(params=[*WITHOUT_BROKER, *(pytest.param(each.value, marks=pytest.mark.kafka) for each in KafkaLibrary)])
def world(request, tmp_path) -> World:
    match request.param:
        case "plain" | "gzip":
            return files_world(tmp_path, packed=request.param == "gzip")
        case "memory":
            return memory_world()
        case "simulated":
            return simulated_world(tmp_path)
        case "parquet":
            return parquet_world(tmp_path)
        case "composite":
            return composite_world(tmp_path)
    return kafka_world(request.getfixturevalue("kafka_config"), request.param, tmp_path)


@pytest.fixture
def source(world) -> Iterator[Source]:
    opened = world.open()
    yield opened
    opened.close()


def long_one(source: Source) -> Partition:
    return source.partitions(soon())[0]


def read(source: Source, partition: Partition, begin: int, end: int) -> list[tuple[int, bytes | None]]:
    """Position and value of every event of a segment."""
    blocks = list(source.read(Segment(partition.name, partition.number, begin, end), soon()))
    for block in blocks:
        check(block)
    return [(int(block.position_E[i]), block.value(i)) for block in blocks for i in range(len(block))]


def check(block: Events) -> None:
    assert len(block)
    assert {len(block.begin_E), len(block.end_E), len(block.position_E), len(block.timestamp_ms_E)} == {len(block)}
    assert all(column.dtype == np.int64 for column in (block.begin_E, block.end_E, block.position_E))
    assert (np.diff(block.position_E) > 0).all()


def test_a_bounded_source_knows_its_ends_at_once(source):
    partitions = source.partitions(soon())
    assert source.bounded
    assert [partition.number for partition in partitions] == [0, 1]
    assert all(partition.final and partition.begin == partition.start == 0 for partition in partitions)
    assert partitions == source.partitions(soon())


def test_the_whole_partition_is_read_in_order_and_once(source, world):
    partition = long_one(source)
    events = read(source, partition, 0, partition.end)
    assert len(events) == LONG
    assert world.values is None or [value for _, value in events] == world.values
    assert all(0 <= position < partition.end for position, _ in events)


def test_a_segment_read_again_gives_the_same_events(source):
    partition = long_one(source)
    first = read(source, partition, 700, 1900)
    assert read(source, partition, 0, 100)
    assert read(source, partition, 700, 1900) == first


def test_a_source_opened_again_gives_the_same_events(source, world):
    partition = long_one(source)
    again = world.open()
    assert read(again, long_one(again), 100, 2000) == read(source, partition, 100, 2000)
    again.close()


def test_segments_in_a_row_are_the_whole(source):
    partition = long_one(source)
    cuts = [0, 1, 2, 130, 131, 999, 1000, 1001, 2048, partition.end]
    pieces = [event for a, b in zip(cuts[:-1], cuts[1:], strict=True) for event in read(source, partition, a, b)]
    assert pieces == read(source, partition, 0, partition.end)


def test_segments_backwards_are_the_whole_too(source):
    partition = long_one(source)
    cuts = [0, 800, 1600, partition.end]
    pieces = [read(source, partition, a, b) for a, b in reversed(list(zip(cuts[:-1], cuts[1:], strict=True)))]
    assert [event for piece in reversed(pieces) for event in piece] == read(source, partition, 0, partition.end)


def test_partitions_may_be_read_in_turns(source):
    long, short = source.partitions(soon())
    whole, other = read(source, long, 0, long.end), read(source, short, 0, short.end)
    turns = [source.read(Segment(p.name, p.number, 0, p.end), soon()) for p in (long, short)]
    first = next(turns[0])
    assert [block.value(i) for block in turns[1] for i in range(len(block))] == [value for _, value in other]
    rest = [block.value(i) for block in (first, *turns[0]) for i in range(len(block))]
    assert rest == [value for _, value in whole]


def test_an_empty_segment_has_no_events(source):
    partition = long_one(source)
    assert read(source, partition, 5, 5) == []
    assert read(source, partition, partition.end, partition.end) == []


def test_a_position_beyond_the_end_was_never_there(source):
    partition = long_one(source)
    with pytest.raises(SourceGap, match=str(partition.end)):
        read(source, partition, partition.end, partition.end + 1)


def test_a_partition_nobody_knows_is_a_gap(source):
    name = long_one(source).name + "9"
    with pytest.raises(SourceGap, match=name):
        list(source.read(Segment(name, 9, 0, 1), soon()))


def test_a_partition_has_an_identity_that_stays_and_a_segment_of_another_one_is_refused(source, world):
    partition = long_one(source)
    again = world.open()
    assert partition.identity and long_one(again).identity == partition.identity
    again.close()
    segment = Segment(partition.name, partition.number, 0, 50, partition.identity)
    assert sum(len(block) for block in source.read(segment, soon())) in (45, 50)
    with pytest.raises(SourceGap, match=f"{partition.name}.* is not what it was"):
        list(source.read(replace(segment, identity="another"), soon()))


def test_the_name_of_a_partition_decides_what_is_read_whatever_its_number(source):
    partition = long_one(source)
    assert read(source, replace(partition, number=7), 3, 30) == read(source, partition, 3, 30)


def test_resuming_changes_nothing_that_is_read(source):
    partition = long_one(source)
    source.resume({partition.name: 40})
    assert long_one(source) == partition
    assert len(read(source, partition, 0, 40)) in (35, 40)


def test_looking_again_at_what_has_not_changed_changes_nothing(source):
    partitions = source.partitions(soon())
    before = read(source, partitions[0], 0, 50)
    source.look_again(soon())
    assert source.partitions(soon()) == partitions
    assert read(source, partitions[0], 0, 50) == before


def test_positions_by_time_are_those_of_the_first_record_of_that_time(source):
    partition = long_one(source)
    (block,) = source.read(Segment(partition.name, 0, 100, 101), soon())
    stamp_ms = int(block.timestamp_ms_E[0])
    found = source.positions_at({partition.name: max(stamp_ms, 0)}, soon())
    if found is None:  # no time stamps, or nobody needs to ask
        return
    at = found[partition.name]
    (first,) = source.read(Segment(partition.name, 0, at, at + 1), soon())
    assert at <= 100 and first.timestamp_ms_E[0] == stamp_ms
    assert source.positions_at({partition.name: 1 << 61}, soon()) == {}


def test_committing_changes_nothing_that_is_read(source):
    partition = long_one(source)
    before = read(source, partition, 0, 50)
    source.commit({partition.name: 40}, soon())
    assert read(source, partition, 0, 50) == before
    assert long_one(source) == partition


def test_a_source_may_be_left_in_the_middle_and_closed_twice(world):
    source = world.open()
    partition = long_one(source)
    next(iter(source.read(Segment(partition.name, 0, 0, partition.end), soon())))
    source.close()
    source.close()
