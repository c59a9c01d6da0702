"""A Kafka topic trained to its latest offsets, by real processes: every event once, one log one model."""

import contextlib
import shutil

import pytest
from kafka import KafkaConsumer, TopicPartition

from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

pytestmark = pytest.mark.kafka

NUM_PARTITIONS = 4
SPY = """
import pathlib, sys, uuid
lines = sys.stdin.buffer.read()
(pathlib.Path("seen") / uuid.uuid4().hex).write_bytes(lines)
sys.stdout.buffer.write(lines)
"""
"""A pipe command that passes lines on and leaves a file of what each process of it was given."""


class Stream:
    """A topic, what a job must learn of it, and the job."""

    def __init__(self, kafka, folder):
        self.kafka, self.folder = kafka, folder
        kafka_source = {"kind": "kafka", "topics": ["to be named"]}
        spec = changed(SPEC, {"sources.lines": kafka_source, "pipe.command": ["python", "spy.py"]})
        self.job = write_job(folder, spec=spec)
        (folder / "spy.py").write_text(SPY)
        self.lines = [line for part in sorted(folder.glob("part-*.txt")) for line in part.read_bytes().splitlines()]
        self.topic = kafka.create_topic(NUM_PARTITIONS)
        self.ends = {f"{self.topic}/{n}": end for n, end in enumerate(self._fill())}

    def _fill(self):
        """Partitions of unlike size and codec, one of them written in transactions; their ends."""
        quarter = len(self.lines) // 4
        plain, zipped = self.lines[:quarter], self.lines[quarter : quarter + 50]
        by_transaction, packed = self.lines[quarter + 50 : 3 * quarter], self.lines[3 * quarter :]
        self.kafka.produce(self.topic, 0, plain)
        self.kafka.produce(self.topic, 1, zipped, compression_type="gzip", batch_size=1000)
        self._transactions(2, by_transaction)
        self.kafka.produce(self.topic, 3, packed, compression_type="zstd")
        return len(plain), len(zipped), len(by_transaction) + 30 + 3, len(packed)  # 30 aborted, a mark for each end

    def _transactions(self, partition, lines):
        """Three of them; the second is aborted, and would be trained were its records read."""
        parts = [(lines[:200], True), (lines[:30], False), (lines[200:], True)]
        with contextlib.closing(self.kafka.producer(transactional_id=self.topic)) as producer:
            producer.init_transactions()
            for records, commit in parts:
                producer.begin_transaction()
                for value in records:
                    producer.send(self.topic, value=value, partition=partition)
                producer.flush()
                producer.commit_transaction() if commit else producer.abort_transaction()
        self.kafka.wait_for_marks(self.topic, partition)

    def run(self, trainers, shards, store, *more):
        """Train it all; the report, once it is sure that every event was handed out once."""
        seen = self.folder / "seen"
        shutil.rmtree(seen, ignore_errors=True)
        seen.mkdir()
        ended = headrace(
            self.job,
            f'sources.lines.topics=["{self.topic}"]',
            f"sources.lines.options.bootstrap_servers={self.kafka.servers}",
            "sources.lines.end=latest",
            f"sources.lines.group={store}",
            f"cluster.trainers={trainers}",
            f"cluster.shards={shards}",
            *more,
            store=store,
        )
        assert ended.code == 0, ended.output
        given = [line for path in seen.iterdir() for line in path.read_bytes().splitlines()]
        assert sorted(given) == sorted(self.lines)
        report = ended.report
        assert report["events"] == report["samples"] == len(self.lines)
        assert report["metrics"]["life"]["ctr"]["count"] == len(self.lines)
        assert report["rejected"] == {}
        assert report["positions"] == self.ends
        return report

    def offsets(self, group):
        """What a lag tool reads of a group."""
        consumer = KafkaConsumer(bootstrap_servers=self.kafka.servers, group_id=group, metrics_enabled=False)
        with contextlib.closing(consumer):
            numbers = range(NUM_PARTITIONS)
            return {f"{self.topic}/{n}": consumer.committed(TopicPartition(self.topic, n)) for n in numbers}


@pytest.fixture(scope="module")
def stream(kafka, tmp_path_factory):
    return Stream(kafka, tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def embedded(stream):
    return stream.run(1, 0, "embedded")


def test_every_event_is_trained_once_and_lag_tools_see_the_ends(stream, embedded):
    assert embedded["passes"] == -(-sum(stream.ends.values()) // 400)  # cut by count of positions, 400 a pass
    assert stream.offsets("embedded") == stream.ends


def test_both_libraries_give_the_same_model(stream, embedded):
    other = stream.run(1, 0, "kafka-python", "sources.lines.library=kafka-python")
    assert other["digest"] == embedded["digest"]
    assert other["metrics"] == embedded["metrics"]


@pytest.mark.slow
def test_the_same_topic_gives_the_same_model_again(stream, embedded):
    again = stream.run(1, 0, "again")
    assert again["digest"] == embedded["digest"]
    assert again["metrics"] == embedded["metrics"]


@pytest.mark.slow
def test_one_trainer_ends_with_the_same_bits_on_two_shards(stream, embedded):
    assert stream.run(1, 2, "one-two")["digest"] == embedded["digest"]


def test_readers_of_the_topic_give_the_same_model_and_lag(stream, embedded):
    read = stream.run(1, 0, "read", "cluster.readers=2", "pipe.processes=2")
    assert read["digest"] == embedded["digest"]
    assert read["metrics"] == embedded["metrics"]
    assert stream.offsets("read") == stream.ends


def test_two_trainers_on_two_shards_share_the_topic(stream):
    stream.run(2, 2, "two-two")
    assert stream.offsets("two-two") == stream.ends


@pytest.mark.slow  # the same promise is kept on files in test_training, and on news
def test_three_trainers_end_with_the_same_bits_on_one_shard_and_on_two(stream):
    one, two = stream.run(3, 1, "three-one"), stream.run(3, 2, "three-two")
    assert one["digest"] == two["digest"]
    assert one["metrics"] == two["metrics"]
