"""Parquet in a bucket until a time, and from that time on a live stream: each event once, whatever dies when."""

import json
from datetime import UTC, datetime

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from headrace.dataset.pipe.time_window import AFTER, BEFORE
from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from tests.faults.test_kills import report, said_by
from tests.integration.stream_job import SPEC
from tests.s3_server import ENVIRONMENT, s3  # noqa: F401

pytestmark = pytest.mark.usefixtures("warm")

T_S = 1_714_521_600
NUM, SWITCH = 1_500, 1_000
"""Events, and the first of them at or after the time."""
HISTORY, LIVE = (0, 1_150), (900, NUM)
"""Events of each source: both have those around the time."""
MAX_EVENTS = 100
NUM_HISTORY_PASSES = -(-(HISTORY[1] - HISTORY[0]) // MAX_EVENTS)

GENERATOR = """
import json

import numpy as np

from headrace.dataset.generator import DataGenerator


class Clicks(DataGenerator):
    def generate_columns(self, events):
        clicks = [json.loads(event) for event in events]
        numbers = ("a", "b", "click", "group")
        columns = {name: [click[name] for click in clicks] for name in numbers}
        lengths = [len(click["history"]) for click in clicks]
        history = [sign for click in clicks for sign in click["history"]]
        columns |= {"d": [click["d"] for click in clicks], "history": (history, lengths)}
        return {"event": np.arange(len(clicks))} | columns


Clicks().run()
"""
TIME = 'event_time = { field = "ms", unit = "ms" }'
SOURCES = f"""
[sources.history]
kind = "files"
format = "parquet"
paths = ["clicks/{{day}}.parquet"]
{TIME}
until = "2024-05-01T00:00:00+00:00"

[sources.live]
LIVE
after = "history"
{TIME}
since = "2024-05-01T00:00:00+00:00"
"""
FILES = 'kind = "files"\npaths = ["live/*.jsonl"]'


def write_history_job(folder, live):
    """The spec, its generator and events; `live`: the keys of the live source."""
    rng = np.random.default_rng(3)
    taste_A = rng.normal(size=20)
    events = []
    for number in range(NUM):
        a = int(rng.integers(20))
        click = float(rng.random() < 1 / (1 + np.exp(-taste_A[a])))
        signs = rng.integers(0, 50, rng.integers(0, 4)).tolist()
        at_ms = (T_S + (number - SWITCH) * 10) * 1000
        event = {"ms": at_ms, "d": rng.normal(size=2).round(3).tolist(), "a": a, "b": int(rng.integers(300))}
        events.append(event | {"history": signs, "click": click, "group": float(rng.integers(40))})
    spec = SPEC.replace('[sources.lines]\nkind = "files"\npaths = ["part-*.txt"]', SOURCES.replace("LIVE", live))
    spec = spec.replace('command = ["cat"]', 'command = ["python", "generator.py"]\nprotocol = "arrow"')
    (folder / "job.toml").write_text(spec.replace("max_events = 400", f"max_events = {MAX_EVENTS}"))
    (folder / "generator.py").write_text(GENERATOR)
    return events


def put_history(server, events):
    """Parquet objects by day, with times of type timestamp; the address."""
    store = S3Store(
        "bucket",
        config={"aws_endpoint_url_s3": f"http://127.0.0.1:{server.port}", "region": "us-east-1"},
        client_options={"allow_http": True},
        access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    )
    days = [datetime.fromtimestamp(event["ms"] / 1000, UTC).date().isoformat() for event in events]
    for day in sorted(set(days)):
        table = pa.Table.from_pylist([event for event, its in zip(events, days, strict=True) if its == day])
        times = table["ms"].cast(pa.timestamp("ms", "UTC"))
        sink = pa.BufferOutputStream()
        pq.write_table(table.set_column(0, "ms", times), sink, row_group_size=70)
        obstore.put(store, f"warehouse/clicks/{day}.parquet", sink.getvalue().to_pybytes())
    return server.uri("bucket", "warehouse")


def dies_in_history_at_the_switch_and_live():
    """Each generation logs its own plans only."""
    at_switch = NUM_HISTORY_PASSES + 1
    return [AtFailpoint(RANK_0, Failpoint.PLAN_LOGGED, hit) for hit in (4, at_switch - 4, 3)]


def calm_and_killed(folder, *settings):
    """The reports of a run that is left alone, and of one that is killed three times; their closes are equal."""
    said, found = [], []
    for store, planned in (("calm", []), ("killed", dies_in_history_at_the_switch_and_live())):
        every = "commit={every='600s', every_passes=3, keep=2}"
        job = load_job(folder / "job.toml", [f"store.path={store}", every, "train.threads=1", *settings])
        deaths = Deaths(job.store, iter(planned))
        assert run(job, deaths, said_by(said)).code == 0, said[-20:]
        assert [died.death for died in deaths.died] == planned
        left_out = json.loads((job.store / "report.json").read_text())["left_out"]
        found.append((report(job.store), left_out, deaths.closes))
    assert found[0] == found[1]
    return found[0]


def check(found):
    """Each event is in one of the sources, and what is left out is counted."""
    total, left_out, closes = found
    assert (total["events"], total["samples"], total["rejected"]) == (NUM, NUM, {})
    assert left_out == {BEFORE: SWITCH - LIVE[0], AFTER: HISTORY[1] - SWITCH}
    by_pass = [closes[number]["events"] for number in sorted(closes)]
    assert sum(by_pass[:NUM_HISTORY_PASSES]) == SWITCH, "the live source begins when the history has ended"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_parquet_in_a_bucket_and_then_files_give_each_event_once_whatever_dies(s3, tmp_path):  # noqa: F811
    events = write_history_job(tmp_path, FILES)
    root = put_history(s3, events[slice(*HISTORY)])
    (tmp_path / "live").mkdir()
    lines = [json.dumps(event) + "\n" for event in events[slice(*LIVE)]]
    (tmp_path / "live" / "a.jsonl").write_text("".join(lines))
    check(calm_and_killed(tmp_path, f"sources.history.root={root}"))


@pytest.mark.kafka
@pytest.mark.timeout(300)
def test_parquet_in_a_bucket_and_then_kafka_give_each_event_once_whatever_dies(s3, kafka, tmp_path):  # noqa: F811
    events = write_history_job(tmp_path, 'kind = "kafka"\ntopics = ["TOPIC"]\nend = "latest"')
    root = put_history(s3, events[slice(*HISTORY)])
    topic = kafka.create_topic(2)
    producer = kafka.producer()
    for number, event in enumerate(events[slice(*LIVE)]):
        wrong_ms = (-1) ** number * 1_800_000  # the clock of each other producer is half an hour slow, or fast
        stamp = event["ms"] + wrong_ms
        producer.send(topic, value=json.dumps(event).encode(), partition=number % 2, timestamp_ms=stamp)
    producer.close()
    broker = f"sources.live.options.bootstrap_servers={kafka.servers}"
    settings = f'sources.live.topics=["{topic}"]', broker, f"sources.history.root={root}", "passes.max_skew=30d"
    check(calm_and_killed(tmp_path, *settings))
