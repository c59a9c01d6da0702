"""The news example on real data, out of Kafka: every event once, and one model for one log. Minutes: `make soak`."""

import contextlib
import gzip
import json
import os
from pathlib import Path

import pytest

from tests.integration.stream_job import headrace

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("HEADRACE_DATA", ROOT.parent / "shared" / "data")) / "ebnerd" / "impressions.jsonl.gz"
NUM_PARTITIONS = 4
NUM_EVENTS = 50_080
NUM_SAMPLES = 583_054

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}; name its folder in HEADRACE_DATA"),
]


@pytest.fixture(scope="module")
def topic(kafka):
    """The impressions in turn over four partitions; the last one written in transactions, some of them aborted."""
    name = kafka.create_topic(NUM_PARTITIONS)
    lines = gzip.decompress(DATA.read_bytes()).splitlines()
    assert len(lines) == NUM_EVENTS
    for number in range(NUM_PARTITIONS - 1):
        kafka.produce(name, number, lines[number::NUM_PARTITIONS])
    rest = lines[NUM_PARTITIONS - 1 :: NUM_PARTITIONS]
    with contextlib.closing(kafka.producer(transactional_id=name)) as producer:
        producer.init_transactions()
        for begin in range(0, len(rest), 5000):
            for commit in (False, True):
                producer.begin_transaction()
                for value in rest[begin : begin + (5000 if commit else 50)]:
                    producer.send(name, value=value, partition=NUM_PARTITIONS - 1)
                producer.flush()
                producer.commit_transaction() if commit else producer.abort_transaction()
    kafka.wait_for_marks(name, NUM_PARTITIONS - 1)
    return name


@pytest.fixture(scope="module")
def job(kafka, topic, tmp_path_factory):
    """The shipped spec, its source replaced."""
    folder = tmp_path_factory.mktemp("news")
    example = ROOT / "deploy" / "examples" / "news"
    (folder / "generator.py").write_text((example / "generator.py").read_text())
    text = (example / "job.toml").read_text()
    begin, end = text.index("[sources."), text.index("[pipe]")
    source = f"""[sources.impressions]
kind = "kafka"
topics = ["{topic}"]
end = "latest"
event_time = {{ field = "ts", unit = "s" }}
options = {{ bootstrap_servers = "{kafka.servers}" }}

"""
    (folder / "job.toml").write_text(text[:begin] + source + text[end:])
    return folder / "job.toml"


def run(job, trainers, shards):
    store = f"store-{trainers}-{shards}"
    ended = headrace(job, f"cluster.trainers={trainers}", f"cluster.shards={shards}", store=store, timeout_s=300)
    assert ended.code == 0, ended.output
    report = ended.report
    assert (report["events"], report["samples"]) == (NUM_EVENTS, NUM_SAMPLES)
    assert report["rejected"] == {}
    last = report["halves"]["last"]["ctr"]
    print(json.dumps({"trainers": trainers, "shards": shards, "auc": last["auc"], "gauc": last["gauc"],
                      "wall_s": report["wall_s"], "digest": report["digest"]}))  # fmt: skip
    return report["digest"]


def test_one_trainer_gives_one_model_embedded_and_on_one_two_and_three_shards(job):
    assert len({run(job, 1, shards) for shards in (0, 1, 2, 3)}) == 1


def test_two_trainers_on_two_shards_give_one_model_again(job):
    first = run(job, 2, 2)
    (job.parent / "store-2-2").rename(job.parent / "first")
    assert run(job, 2, 2) == first


def test_three_trainers_give_one_model_on_one_two_and_three_shards(job):
    assert len({run(job, 3, shards) for shards in (1, 2, 3)}) == 1
