"""The Kafka source against a real broker."""

import contextlib
import random
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kafka_options import KafkaLibrary
from headrace.dataset.sources.kafka_source import KafkaStream
from headrace.dataset.stream.errors import SourceGap, SourceUnavailable
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import SpecError

pytestmark = pytest.mark.kafka


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture(params=list(KafkaLibrary))
def opened(kafka, request):
    """Opens sources on the shared broker that read by one library, and closes them."""
    with contextlib.ExitStack() as stack:

        def opened(*topics: str, options: dict | None = None, **settings) -> KafkaStream:
            every = {"bootstrap_servers": kafka.servers} | (options or {})
            settings = {"library": request.param} | settings
            config = KafkaSource(kind="kafka", topics=topics, options=every, **settings)
            source = KafkaStream(config, job="job", folder=Path(), deadline=soon())
            stack.callback(source.close)
            return source

        yield opened


def read(source: KafkaStream, name: str, begin: int, end: int) -> list[tuple[int, bytes | None]]:
    blocks = source.read(Segment(name, 0, begin, end), soon())
    return [(int(block.position_E[i]), block.value(i)) for block in blocks for i in range(len(block))]


def ends(source: KafkaStream) -> dict[str, int]:
    return {partition.name: partition.end for partition in source.partitions(soon())}


def transaction(producer, topic: str, values: list[bytes], *, commit: bool) -> None:
    producer.begin_transaction()
    for value in values:
        producer.send(topic, value=value, partition=0)
    producer.flush()
    producer.commit_transaction() if commit else producer.abort_transaction()


@pytest.fixture
def transactional(kafka):
    with contextlib.closing(kafka.producer(transactional_id=f"id-{time.monotonic_ns()}")) as producer:
        producer.init_transactions()
        yield producer


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_every_codec_is_read(kafka, opened, codec):
    topic = kafka.create_topic()
    values = [b"%d " % n * 50 for n in range(200)]
    kafka.produce(topic, 0, values, compression_type=codec)
    source = opened(topic, end="latest")
    assert read(source, f"{topic}/0", 0, 200) == list(enumerate(values))
    assert read(source, f"{topic}/0", 50, 60) == list(enumerate(values))[50:60]


def test_values_times_keys_and_headers_arrive(kafka, opened):
    topic = kafka.create_topic()
    with contextlib.closing(kafka.producer()) as producer:
        producer.send(topic, value=b"a", key=b"k", headers=[("h", b"v")], partition=0, timestamp_ms=1234)
        producer.send(topic, value=None, key=b"d", partition=0, timestamp_ms=1235)
        producer.send(topic, value=b"", partition=0, timestamp_ms=1236)
        producer.flush()
    (block,) = opened(topic).read(Segment(f"{topic}/0", 0, 0, 3), soon())
    assert [block.value(i) for i in range(3)] == [b"a", None, b""]
    assert block.begin_E[1] == -1
    assert block.timestamp_ms_E.tolist() == [1234, 1235, 1236]
    assert list(block.keys) == [b"k", b"d", None]
    assert [list(each) for each in block.headers] == [[("h", b"v")], [], []]


def test_aborted_transactions_are_not_read_and_segments_still_end(kafka, opened, transactional):
    topic = kafka.create_topic()
    transaction(transactional, topic, [b"a1", b"a2"], commit=True)  # offsets 0, 1; 2 is the mark
    transaction(transactional, topic, [b"x1", b"x2"], commit=False)  # 3, 4; 5
    transaction(transactional, topic, [b"b1"], commit=True)  # 6; 7
    transaction(transactional, topic, [b"y1"], commit=False)  # 8; 9
    kafka.wait_for_marks(topic)
    source = opened(topic, end="latest")
    name = f"{topic}/0"
    assert ends(source) == {name: 10}
    assert read(source, name, 0, 10) == [(0, b"a1"), (1, b"a2"), (6, b"b1")]
    assert [read(source, name, n, n + 1) for n in range(10)] == [
        [(0, b"a1")], [(1, b"a2")], [], [], [], [], [(6, b"b1")], [], [], [],
    ]  # fmt: skip
    assert read(source, name, 3, 6) == read(source, name, 7, 10) == []
    everything = opened(topic, end="latest", options={"isolation_level": "read_uncommitted"})
    assert [value for _, value in read(everything, name, 0, 10)] == [b"a1", b"a2", b"x1", b"x2", b"b1", b"y1"]


def test_a_segment_may_end_inside_an_aborted_transaction_where_nothing_follows(kafka, opened, transactional):
    topic = kafka.create_topic()
    transaction(transactional, topic, [b"a"], commit=True)  # 0; 1
    transaction(transactional, topic, [b"x"] * 5, commit=False)  # 2 to 6; 7
    kafka.wait_for_marks(topic)
    for begin, end in ((0, 4), (2, 3), (3, 8), (7, 8)):
        source = opened(topic, end="latest")  # a new one each time: nothing is known of the partition
        assert read(source, f"{topic}/0", begin, end) == ([(0, b"a")] if begin == 0 else [])


def test_segments_in_any_order_give_the_same_events(kafka, opened, transactional):
    topic = kafka.create_topic(2)
    for first in range(0, 600, 60):
        transaction(transactional, topic, [b"%d" % n for n in range(first, first + 60)], commit=first % 180 > 0)
    kafka.wait_for_marks(topic)
    kafka.produce(topic, 1, [b"%d" % n for n in range(500)], compression_type="lz4", batch_size=700)
    source, draw = opened(topic, end="latest"), random.Random(1)
    whole = {name: dict(read(source, name, 0, end)) for name, end in ends(source).items()}
    for _ in range(150):
        name, end = draw.choice(list(ends(source).items()))
        first, last = sorted(draw.choices(range(end + 1), k=2))
        assert read(source, name, first, last) == [each for each in whole[name].items() if first <= each[0] < last]


def test_many_partitions_share_a_small_buffer(kafka, opened, monkeypatch):
    librdkafka_reader = pytest.importorskip("headrace.dataset.sources.librdkafka_reader")
    monkeypatch.setattr(librdkafka_reader, "MAX_BUFFER_BYTES", 20_000)
    topic = kafka.create_topic(5)
    values = [b"%04d" % n + b"x" * 40 for n in range(1_000)]
    for number in range(5):
        kafka.produce(topic, number, values)
    source = opened(topic, end="latest")
    for begin in range(0, 1_000, 125):
        for number in range(5):
            assert read(source, f"{topic}/{number}", begin, begin + 125) == list(enumerate(values))[begin : begin + 125]


def test_an_open_transaction_is_beyond_the_end(kafka, opened, transactional):
    topic = kafka.create_topic()
    name = f"{topic}/0"
    transaction(transactional, topic, [b"a"], commit=True)
    kafka.wait_for_marks(topic)
    transactional.begin_transaction()
    transactional.send(topic, value=b"b", partition=0)
    transactional.flush()
    kafka.produce(topic, 0, [b"plain"])
    bounded, following = opened(topic, end="latest"), opened(topic)
    assert ends(bounded) == ends(following) == {name: 2}
    with pytest.raises(SourceGap, match="it ends at 2"):
        read(following, name, 2, 4)
    transactional.commit_transaction()
    kafka.wait_for_marks(topic)
    assert ends(bounded) == {name: 2}
    assert ends(following) == {name: 5}
    assert read(following, name, 0, 5) == [(0, b"a"), (2, b"b"), (3, b"plain")]


def test_compaction_leaves_gaps_that_segments_pass_over(kafka, opened):
    topic = kafka.create_topic(cleanup_policy="compact", segment_ms="1", min_cleanable_dirty_ratio="0.01")
    name = f"{topic}/0"
    kafka.produce(topic, 0, [b"%d" % n for n in range(100)], batch_size=200)  # one key: the last stays
    source = opened(topic)
    until = soon()
    number = 100
    while (kept := read(source, name, 0, 100)) != [(99, b"99")]:
        until.check("waiting for the cleaner")
        # The active part of the log is not cleaned; another key, or the last of the others would go in turn.
        kafka.produce(topic, 0, [b"%d" % number], key=b"other")
        number += 1
    pieces = [event for begin in range(0, 100, 7) for event in read(source, name, begin, min(begin + 7, 100))]
    assert pieces == kept == read(source, name, 0, 100)


def test_topics_come_in_the_order_of_the_spec_then_by_partition(kafka, opened):
    first, second = kafka.create_topic(3), kafka.create_topic(1)
    source = opened(second, first)
    assert list(ends(source)) == [f"{second}/0", f"{first}/0", f"{first}/1", f"{first}/2"]


def test_partitions_found_later_come_last_and_start_at_their_beginning(kafka, opened):
    first, second = kafka.create_topic(1), kafka.create_topic(1)
    kafka.produce(first, 0, [b"a"])
    source = opened(first, second, start="latest", options={"metadata_max_age_ms": 50})
    other = opened(first, second)  # as a rank that only reads
    assert [p.start for p in source.partitions(soon())] == [1, 0]
    with contextlib.closing(kafka.admin()) as admin:
        admin.create_partitions({first: 2})
    kafka.produce(first, 1, [b"b"])
    until = soon()
    while len(partitions := source.partitions(soon())) == 2:
        until.check("waiting for the new partition")
    assert [(p.name, p.number, p.start) for p in partitions][2:] == [(f"{first}/1", 2, 0)]
    for each in (source, other):
        assert read(each, f"{first}/1", 0, 1) == [(0, b"b")]


def test_start_and_end_may_be_times(kafka, opened):
    topic = kafka.create_topic(2)
    noon_ms = 1_714_564_800_000
    with contextlib.closing(kafka.producer()) as producer:
        for n in range(10):
            producer.send(topic, value=b"%d" % n, partition=0, timestamp_ms=noon_ms + n * 1000)
        producer.flush()

    def at(seconds: float) -> str:
        return datetime.fromtimestamp(noon_ms / 1000 + seconds, UTC).isoformat()

    partitions = opened(topic, start=at(2.5), end=at(7)).partitions(soon())
    assert [(p.start, p.end, p.final) for p in partitions] == [(3, 7, True), (0, 0, True)]
    future = opened(topic, start=at(10_000), end=at(20_000)).partitions(soon())
    assert [(p.start, p.end) for p in future] == [(10, 10), (0, 0)]
    reversed_ = opened(topic, start=at(7), end=at(2)).partitions(soon())
    assert [(p.start, p.end) for p in reversed_] == [(7, 7), (0, 0)]


def test_since_starts_earlier_by_the_overlap_and_in_the_future_at_the_end(kafka, opened):
    topic = kafka.create_topic(2)
    base_ms = 1_714_521_600_000
    producer = kafka.producer()
    for n in range(10):
        producer.send(topic, value=b"%d" % n, partition=0, timestamp_ms=base_ms + 1_800_000 * n)
    producer.close()
    keys = {"event_time": {"kind": "record"}, "since": "2024-05-01T03:00:00+00:00"}
    assert [p.start for p in opened(topic, **keys).partitions(soon())] == [4, 0]  # an hour before record 6
    assert [p.start for p in opened(topic, **keys, overlap="0s").partitions(soon())] == [6, 0]
    assert [p.start for p in opened(topic, **keys, overlap="90d").partitions(soon())] == [0, 0]
    future = keys | {"since": "2099-05-01T03:00:00+00:00"}
    assert [p.start for p in opened(topic, **future).partitions(soon())] == [10, 0]


def test_start_may_be_latest_and_end_never(kafka, opened):
    topic = kafka.create_topic()
    kafka.produce(topic, 0, [b"a", b"b"])
    source = opened(topic, start="latest")
    (partition,) = source.partitions(soon())
    assert not source.bounded
    assert (partition.start, partition.begin, partition.end, partition.final) == (2, 0, 2, False)
    kafka.produce(topic, 0, [b"c"])
    assert ends(source) == {f"{topic}/0": 3}


def test_positions_are_shown_to_the_group_and_a_new_job_may_start_there(kafka, opened):
    topic = kafka.create_topic(2)
    kafka.produce(topic, 0, [b"%d" % n for n in range(5)])
    source = opened(topic, group=topic)
    source.commit({f"{topic}/0": 3}, soon())
    source.commit({f"{topic}/0": 4}, soon())
    with contextlib.closing(kafka.admin()) as admin:
        offsets = admin.list_group_offsets(topic)
    assert "4" in str(offsets)
    assert [p.start for p in opened(topic, group=topic, start="group").partitions(soon())] == [4, 0]
    assert [p.start for p in opened(topic, group=topic).partitions(soon())] == [0, 0]


def test_the_group_is_the_jobs_name_unless_set(kafka, opened):
    topic = kafka.create_topic()
    assert opened(topic)._group == "job"
    assert opened(topic, group="ours")._group == "ours"


def test_what_retention_took_is_a_gap_with_what_is_kept(kafka, opened):
    topic = kafka.create_topic()
    kafka.produce(topic, 0, [b"%d" % n for n in range(10)])
    with contextlib.closing(kafka.admin()) as admin:
        admin.delete_records({TopicPartition(topic, 0): 4})
    source = opened(topic)
    (partition,) = source.partitions(soon())
    assert (partition.start, partition.begin, partition.end) == (4, 4, 10)
    with pytest.raises(SourceGap, match=rf"{topic}/0: position 2 does not exist, the broker has 4 to 10"):
        read(source, f"{topic}/0", 2, 10)
    assert len(read(source, f"{topic}/0", 4, 10)) == 6


def test_a_topic_that_does_not_exist_is_named_and_not_made(kafka, opened):
    topic = kafka.create_topic()
    with pytest.raises(SourceUnavailable, match="topic 'no-such-topic' does not exist"):
        opened(topic, "no-such-topic", connect_deadline=1.0)
    with contextlib.closing(kafka.admin()) as admin:
        assert "no-such-topic" not in admin.list_topics()


def test_a_name_that_can_be_no_topic_is_refused(opened):
    with pytest.raises(SpecError, match="topics"):
        opened("no/topic")


def test_options_that_do_not_go_together_are_refused(opened, kafka):
    with pytest.raises(SpecError, match=r"options: .*request_timeout_ms"):
        opened(kafka.create_topic(), options={"request_timeout_ms": 1})


def test_reading_a_large_partition_is_no_slower_than_a_floor(kafka, opened):
    topic = kafka.create_topic()
    kafka.produce(topic, 0, [b"x" * 300] * 20_000, linger_ms=50)
    source = opened(topic, end="latest")
    since_s = time.perf_counter()
    count = sum(len(block) for block in source.read(Segment(f"{topic}/0", 0, 0, 20_000), soon()))
    assert count == 20_000
    assert count / (time.perf_counter() - since_s) > 5_000, "some 100,000 a second are usual"


def test_a_group_offset_of_another_client_is_taken_too(kafka, opened):
    topic = kafka.create_topic()
    kafka.produce(topic, 0, [b"a", b"b"])
    with contextlib.closing(kafka.admin()) as admin:
        admin.alter_group_offsets(topic, {TopicPartition(topic, 0): OffsetAndMetadata(1, "", -1)})
    assert [p.start for p in opened(topic, group=topic, start="group").partitions(soon())] == [1]
