"""What a job sees of a topic whose records, partitions or very self change while it runs and while it is down."""

import contextlib
import time
from pathlib import Path

import pytest
from kafka import TopicPartition
from kafka.admin import NewTopic

from headrace.dataset.sources import kafka_source
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kafka_options import KafkaLibrary
from headrace.dataset.sources.kafka_source import KafkaStream
from headrace.dataset.stream.errors import SourceGap
from headrace.deadline import Deadline
from headrace.trainer.journal.records import GapOperation
from headrace.trainer.rank0.planner import StreamEnded
from tests.faults.stream_side import StreamSide

pytestmark = pytest.mark.kafka


@pytest.fixture(params=list(KafkaLibrary), autouse=True)
def library(request, monkeypatch):
    """Each test runs with each library."""
    monkeypatch.setattr(kafka_source, "library_of", lambda *_: request.param)


FIRST = [b"first %d" % n for n in range(10)]


@pytest.fixture
def topic(kafka):
    topic = kafka.create_topic()
    kafka.produce(topic, 0, FIRST)
    return topic


def side(kafka, topic, on_gap="fail", **settings):
    options = {"bootstrap_servers": kafka.servers, "metadata_max_age_ms": 50}
    config = KafkaSource(kind="kafka", topics=(topic,), options=options, **settings)
    return StreamSide(lambda _: KafkaStream(config, job="job", folder=Path(), deadline=Deadline.after(20)), on_gap)


@pytest.fixture(params=["running", "down"])
def started(request, kafka, topic):
    """A job after its first pass, and the planner that goes on: the same, or None for a new one."""
    job = side(kafka, topic)
    planner = job.start()
    assert job.trains(planner) == FIRST
    if request.param == "running":
        yield job, planner
    planner.close()
    if request.param == "down":
        yield job, None


def drop_before(kafka, topic, position):
    with contextlib.closing(kafka.admin()) as admin:
        admin.delete_records({TopicPartition(topic, 0): position})


def recreate(kafka, topic, values):
    until = Deadline.after(20)
    with contextlib.closing(kafka.admin()) as admin:
        admin.delete_topics([topic])
        while topic in admin.list_topics():
            until.check("waiting for the topic to be gone")
            time.sleep(0.02)
        admin.create_topics([NewTopic(topic, 1, 1)])
        admin.wait_for_topics([topic])
    kafka.produce(topic, 0, values)


def add_partition(kafka, topic, values):
    with contextlib.closing(kafka.admin()) as admin:
        admin.create_partitions({topic: 2})
        admin.wait_for_topics([topic])
    kafka.produce(topic, 1, values)


@pytest.mark.parametrize(("on_gap", "begin"), [("fail", None), ("earliest", 13), ("latest", 15)])
def test_retention_that_passed_us_while_we_were_down_is_met_as_the_spec_says(kafka, topic, on_gap, begin):
    job = side(kafka, topic, on_gap)
    assert job.trains() == FIRST
    kafka.produce(topic, 0, [b"lost"] * 3 + [b"kept"] * 2)
    drop_before(kafka, topic, 13)
    if begin is None:
        job.fails(None, rf"{topic}/0: position 10 is no longer retained, the first one is 13")
        return
    planner = job.start()
    planner.request(2, job.positions, 0)
    if on_gap == "latest":
        assert planner.take(0.5) is None
        kafka.produce(topic, 0, [b"new"])
    plan = planner.take(20.0)
    planner.close()
    assert job.reads(plan) == ([b"new"] if on_gap == "latest" else [b"kept"] * 2)
    gap = GapOperation(partition=f"{topic}/0", position=10, go_on=begin)
    assert job.journal.operations[1:] == [gap]


def test_retention_that_takes_what_a_logged_plan_needs_always_fails(kafka, topic):
    job = side(kafka, topic, "earliest")
    plan = job.plans()
    drop_before(kafka, topic, 4)
    with pytest.raises(SourceGap, match=rf"{topic}/0: position 0 does not exist, the broker has 4 to 10"):
        job.reads(plan)


@pytest.mark.parametrize("size", [3, 10, 500])
def test_a_topic_made_anew_stops_the_job_however_long_it_is(kafka, topic, started, size):
    job, planner = started
    old = job.journal.plans[0]
    recreate(kafka, topic, [b"other"] * size)
    job.fails(planner, rf"{topic}/0 is not what it was .*deleted and created again.*--fresh")
    with pytest.raises(SourceGap, match=rf"{topic}/0"):
        job.reads(old)


def test_a_partition_added_is_read_from_its_beginning_and_numbers_stay(kafka, topic, started):
    job, planner = started
    add_partition(kafka, topic, [b"a", b"b"])
    assert job.trains(planner) == [b"a", b"b"]
    kafka.produce(topic, 0, [b"c"])
    assert job.trains() == [b"c"]
    assert job.numbers == {f"{topic}/0": 0, f"{topic}/1": 1}


def test_a_job_that_starts_at_the_latest_loses_nothing_of_what_came_while_it_was_down(kafka, topic):
    job = side(kafka, topic, start="latest")
    planner = job.start()
    planner.request(1, {}, 0)
    assert planner.take(0.5) is None
    job.known = planner.known
    planner.close()
    kafka.produce(topic, 0, [b"while down"])
    add_partition(kafka, topic, [b"new"])
    assert sorted(job.trains()) == [b"new", b"while down"]


def test_a_stream_up_to_the_latest_ends_where_it_did_at_the_first_start(kafka, topic):
    job = side(kafka, topic, end="latest")
    planner = job.start()
    plan = job.plans(planner)
    kafka.produce(topic, 0, [b"later"] * 5)
    add_partition(kafka, topic, [b"new"])
    assert isinstance(job.plans(planner), StreamEnded)
    planner.close()
    job.positions, job.number = {}, 0
    assert job.plans() == plan
    assert job.reads(plan) == FIRST
    assert sorted(job.trains()) == [*[b"later"] * 5, b"new"]  # the next run, of a stream that has ended
    assert isinstance(job.plans(), StreamEnded)
