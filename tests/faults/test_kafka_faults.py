"""What a job sees when its broker goes away."""

import logging
import threading
import time
from pathlib import Path

import pytest

from headrace.dataset.sources import kafka_source
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kafka_options import KafkaLibrary
from headrace.dataset.sources.kafka_source import KafkaStream
from headrace.dataset.stream.errors import SourceUnavailable
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from tests.kafka.cluster import free_ports

pytestmark = pytest.mark.kafka

NUM_EVENTS = 20_000


def config(servers: str, topic: str, **settings) -> KafkaSource:
    return KafkaSource(kind="kafka", topics=(topic,), options={"bootstrap_servers": servers}, **settings)


def open_source(config: KafkaSource, deadline_s: float = 20) -> KafkaStream:
    return KafkaStream(config, job="job", folder=Path(), deadline=Deadline.after(deadline_s))


def test_a_broker_that_is_down_at_start_is_a_clear_error_at_the_deadline():
    (port,) = free_ports(1)
    before = threading.active_count()
    since_s = time.monotonic()
    with pytest.raises(SourceUnavailable, match=rf"no broker of 127\.0\.0\.1:{port} answered within 1.0 s .*REFUSED"):
        open_source(config(f"127.0.0.1:{port}", "t", connect_deadline=1.0))
    assert time.monotonic() - since_s < 5
    assert threading.active_count() == before


@pytest.fixture(params=list(KafkaLibrary))
def library(request, monkeypatch):
    """A test runs with each library."""
    monkeypatch.setattr(kafka_source, "library_of", lambda *_: request.param)


@pytest.fixture
def filled(own_kafka):
    """A broker of our own with one topic of NUM_EVENTS."""
    topic = own_kafka.create_topic()
    own_kafka.produce(topic, 0, [b"%d" % n for n in range(NUM_EVENTS)])
    return own_kafka, topic


@pytest.mark.usefixtures("library")
def test_a_broker_killed_in_mid_read_is_waited_for_and_no_event_is_lost_or_repeated(filled, caplog):
    cluster, topic = filled
    # Small fetches, so that most of the partition is still at the broker when it dies.
    ours = {"bootstrap_servers": cluster.servers, "max_partition_fetch_bytes": 10_000}
    source = open_source(KafkaSource(kind="kafka", topics=(topic,), options=ours))
    blocks = source.read(Segment(f"{topic}/0", 0, 0, NUM_EVENTS), Deadline.after(60))
    positions, values = [], []

    def take(block) -> None:
        positions.extend(block.position_E.tolist())
        values.extend(block.value(i) for i in range(len(block)))

    take(next(blocks))
    cluster.kill()
    again = threading.Timer(4.0, cluster.start)
    again.start()
    with caplog.at_level(logging.WARNING):
        for block in blocks:
            take(block)
    again.join()
    source.close()
    assert positions == list(range(NUM_EVENTS))
    assert values == [b"%d" % n for n in range(NUM_EVENTS)]
    said = [record.message for record in caplog.records if record.name == "headrace.dataset.sources.kafka_client"]
    assert [text.split(":")[0].split(" after")[0] for text in said] == ["Kafka does not answer", "Kafka answers again"]


@pytest.mark.usefixtures("library")
def test_a_broker_that_stays_away_ends_the_wait_at_the_deadline(filled):
    cluster, topic = filled
    source = open_source(config(cluster.servers, topic))
    cluster.kill()
    since_s = time.monotonic()
    with pytest.raises(SourceUnavailable, match=rf"{cluster.servers} did not answer in time while reading {topic}/0"):
        list(source.read(Segment(f"{topic}/0", 0, 0, NUM_EVENTS), Deadline.after(2)))
    with pytest.raises(SourceUnavailable, match="asking for last offsets"):
        source.partitions(Deadline.after(1))
    with pytest.raises(SourceUnavailable, match="asking for the ids of topics"):
        source._client.ask_identities([topic], Deadline.after(1))
    with pytest.raises(SourceUnavailable):
        source.commit({f"{topic}/0": 1}, Deadline.after(1))
    source.close()
    assert time.monotonic() - since_s < 15


@pytest.mark.parametrize("question", ["ids", "ends"])
def test_a_wait_for_an_answer_is_announced_whether_tries_fail_slowly_or_at_once(filled, caplog, question):
    cluster, topic = filled
    source = open_source(config(cluster.servers, topic))
    cluster.kill()
    with pytest.raises(SourceUnavailable):
        if question == "ids":
            source._client.ask_identities([topic], Deadline.after(5))
        else:
            source._ask_ends(source._partitions, Deadline.after(5))
    source.close()
    said = [record.message for record in caplog.records if record.name == "headrace.dataset.sources.kafka_client"]
    assert [text.split(":")[0] for text in said] == ["Kafka does not answer"]


def test_ends_are_told_again_once_the_broker_is_back(filled):
    cluster, topic = filled
    source = open_source(config(cluster.servers, topic))
    cluster.stop()
    again = threading.Timer(0.5, cluster.start)
    again.start()
    assert [partition.end for partition in source.partitions(Deadline.after(60))] == [NUM_EVENTS]
    again.join()
    assert len(list(source.read(Segment(f"{topic}/0", 0, NUM_EVENTS - 5, NUM_EVENTS), Deadline.after(20)))) == 1
    source.close()
