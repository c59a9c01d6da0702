"""Partitions of a real topic with a backlog advance together in time."""

import contextlib
from pathlib import Path

import pytest

from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kafka_source import KafkaStream
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import StreamEnded
from tests.faults.stream_side import StreamSide

pytestmark = pytest.mark.kafka

START_MS = 1_700_000_000_000
SKEW_S = 3_600
SLOW, FAST, EMPTY = 0, 1, 2
LENGTH_MS = 20 * SKEW_S * 1000


@pytest.fixture(scope="module")
def topic(kafka):
    """Twenty hours of a partition with a record in two minutes, of one with ten times as many, and an empty one."""
    topic = kafka.create_topic(3)
    with contextlib.closing(kafka.producer()) as producer:
        for partition, step_ms in ((SLOW, 120_000), (FAST, 12_000)):
            for ms in range(START_MS, START_MS + LENGTH_MS, step_ms):
                producer.send(topic, value=b"%d" % ms, partition=partition, timestamp_ms=ms)
        producer.flush()
    return topic


def side(kafka, topic, end, **passes):
    config = KafkaSource(kind="kafka", topics=(topic,), options={"bootstrap_servers": kafka.servers}, end=end)
    return StreamSide(
        lambda known: KafkaStream(config, job="job", folder=Path(), deadline=Deadline.after(20)), **passes
    )


def stamps(source, plan):
    """The time stamps of a pass's records, by partition."""
    found = {}
    for segment in (segment for rank in plan.segments for segment in rank):
        for block in source.read(segment, Deadline.after(20)):
            found.setdefault(segment.number, []).extend(block.timestamp_ms_E.tolist())
    return found


@pytest.mark.parametrize("end", ["latest", "never"])
@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_from_the_earliest_offset_no_pass_spans_more_than_is_allowed(kafka, topic, end, restarts):
    job = side(kafka, topic, end)
    planner, plans = job.start(), []
    total = LENGTH_MS // 120_000 + LENGTH_MS // 12_000
    while sum(plan.num_positions for plan in plans) < total:
        plans.append(job.plans(None if restarts else planner))
    planner.close()
    source = job.open_source(())
    spans = []
    for plan in plans:
        found = stamps(source, plan)
        assert set(found) == {SLOW, FAST}
        every = [ms for each in found.values() for ms in each]
        spans.append(max(every) - min(every))
    source.close()
    assert max(spans) <= SKEW_S * 1000
    assert len(plans) <= 23  # and passes are as long as that allows
    assert job.positions == {f"{topic}/{SLOW}": total // 11, f"{topic}/{FAST}": total // 11 * 10}


def test_within_the_bound_a_pass_takes_of_each_in_proportion(kafka, topic):
    plan = side(kafka, topic, "latest", max_events=110).plans()
    assert isinstance(plan, PassPlan)
    assert plan.positions() == {f"{topic}/{SLOW}": 10, f"{topic}/{FAST}": 100}


def test_a_partition_that_has_caught_up_holds_nobody_and_is_held(kafka):
    topic = kafka.create_topic(2)
    hours = lambda first, last: range(START_MS + first * 3_600_000, START_MS + last * 3_600_000, 600_000)  # noqa: E731

    def send(partition, times_ms):
        with contextlib.closing(kafka.producer()) as producer:
            for ms in times_ms:
                producer.send(topic, value=b"x", partition=partition, timestamp_ms=ms)
            producer.flush()

    send(0, hours(0, 1))
    send(1, hours(10, 11))
    job = side(kafka, topic, "never")
    planner = job.start()
    assert job.plans(planner).positions() == {f"{topic}/0": 6}  # the older ones first
    send(0, hours(1, 2))  # one that trickles, with old time stamps
    assert job.plans(planner).positions() == {f"{topic}/0": 12, f"{topic}/1": 6}  # does not starve the other
    planner.close()


def test_a_bounded_stream_is_looked_at_again_when_it_has_ended(kafka):
    topic = kafka.create_topic(1)
    kafka.produce(topic, 0, [b"a", b"b"])
    job = side(kafka, topic, "latest")
    assert job.trains() == [b"a", b"b"]
    assert isinstance(job.plans(), StreamEnded)
    kafka.produce(topic, 0, [b"c"])
    planner = job.start()
    kafka.produce(topic, 0, [b"d"])
    assert job.trains(planner) == [b"c", b"d"]
    assert isinstance(job.plans(planner), StreamEnded)
    planner.close()


def test_the_broker_says_where_records_of_a_time_begin(kafka, topic):
    source = side(kafka, topic, "latest").open_source(())
    times = {f"{topic}/{SLOW}": START_MS + 1, f"{topic}/{FAST}": START_MS + 24_000, f"{topic}/{EMPTY}": 0}
    found = source.positions_at(times, Deadline.after(20))
    assert found == {f"{topic}/{SLOW}": 1, f"{topic}/{FAST}": 2}
    assert next(iter(source.read(Segment(f"{topic}/{FAST}", 0, 2, 3), Deadline.after(20)))).value(0) == b"%d" % (
        START_MS + 24_000
    )
    source.close()
