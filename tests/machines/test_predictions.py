"""Predictions on the launcher of a job: workers on several machines without a common folder write the bytes of one."""

import json
from io import BytesIO

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.contract.predict_world import content
from tests.integration.stream_job import headrace, write_job
from tests.machines.external_job import HEADRACE, setting

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PREDICTED = {"input": {"paths": ["part-*.txt"]}, "segment_events": 100, "columns": ["a", "event_time"]}
FETCH = """
import sys
from pathlib import Path
from headrace.blob.s3 import S3Blobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
blobs, deadline = S3Blobs.open(parse(sys.argv[1]), "test", Deadline.after(60)), Deadline.after(60)
Path("fetched").mkdir()
for key in blobs.below("", deadline):
    path = Path("fetched") / key
    path.parent.mkdir(parents=True, exist_ok=True)
    blobs.download(key, path, deadline)
"""


def toml(section):
    """An inline table."""
    if isinstance(section, dict):
        return "{" + ", ".join(f"{name} = {toml(value)}" for name, value in section.items()) + "}"
    return json.dumps(section)


def test_predictions_on_three_machines_are_those_of_one(world, tmp_path):
    (head, second, third), job_of = world
    write_job(tmp_path)
    two = "cluster.trainers=2", "cluster.shards=2"
    alone = headrace(tmp_path / "job.toml", *two, f"predict={toml({**PREDICTED, 'output': 'out'})}", timeout_s=300)
    assert alone.code == 0, alone.output
    expected = content(tmp_path / "out")
    for machine in (head, second, third):
        write_job(machine.tmp)
    job = job_of(trainers=2, shards=2)
    mirror = next(each for each in job.settings if each.startswith("store.mirror="))
    store = json.loads(mirror.partition("=")[2])
    places = {name: store.replace("of-the-job", name) for name in ("at-the-end", "later", "measured")}
    plain = [*job.settings]
    job.settings.append(f"predict={toml({**PREDICTED, 'output': places['at-the-end'], 'on': 'cluster'})}")
    token, launcher = job.token(), job.run()
    launcher.until("waits for 4 of 4 workers")
    agents = [job.agent(machine, "--role", role, token=token) for machine, role in four(head, second, third)]
    assert launcher.end(200) == 0, launcher.said
    assert [agent.end() for agent in agents] == [0] * 4
    assert "1,179 samples predicted" in launcher.said, "by the agents that have trained"
    assert fetched(job, head, places["at-the-end"]) == expected

    job.settings[:] = plain
    words = ("--input", "part-*.txt", "--on", "cluster")
    columns = ("--output", places["later"], "--columns", "a,event_time", "--segment-events", "100")
    predicting = job.start(head, *HEADRACE, "predict", "job.toml", *words, *columns, *setting(plain))
    predicting.until("the prediction waits for 4 of 4 workers")
    agents = [job.agent(machine, "--role", role, token=token) for machine, role in four(head, second, third)]
    for shard in range(2):
        predicting.until(f"shard {shard} of 2 serves")
    agents[1].kill()  # one that holds rows, or reads them now
    predicting.until_often("the prediction waits for 4 of 4 workers", 2)  # before, another one would be refused
    agents.append(job.agent(third, "--role", "shard", token=token))
    assert predicting.end(200) == 0, predicting.said
    assert renamed(fetched(job, head, places["later"])) == renamed(expected)
    assert not [*(second.tmp / "store").glob("live/*")], "no rows are left"


def test_an_evaluation_on_another_machine_measures_as_here_and_leaves_nothing(world):
    (head, second, third), job_of = world
    for machine in (head, second, third):
        write_job(machine.tmp, num_lines=60)
    job = job_of(trainers=1, shards=1)
    mirror = next(each for each in job.settings if each.startswith("store.mirror="))
    place = json.loads(mirror.partition("=")[2]).replace("of-the-job", "measured")
    token, launcher = job.token(), job.run()
    agents = [
        job.agent(machine, "--role", role, token=token) for machine, role in ((head, "trainer"), (third, "shard"))
    ]
    assert launcher.end(200) == 0, launcher.said
    assert [agent.end() for agent in agents] == [0, 0]
    command = (*HEADRACE, "evaluate", "job.toml", "--input", "part-*.txt", "--json", *setting(job.settings))
    alone = ("--trainers", "1", "--shards", "0")
    measuring = job.start(head, *command, *alone, "--on", "cluster", "--scratch", place)
    measuring.until("the prediction waits for 1 of 1 workers")
    agent = job.agent(second, token=token)
    assert measuring.end(200) == 0 and agent.end() == 0, measuring.said
    here = job.start(head, *command, *alone)
    assert here.end(200) == 0, here.said
    there, expected = (said[said.index("\n{\n") :] for said in (measuring.said, here.said))
    assert json.loads(there) == json.loads(expected)
    assert fetched(job, head, place) == {}, "nothing is left of it"
    assert not [*(second.tmp / "store").glob("live/*")], "no rows are left"


def four(head, second, third):
    """Two trainers and two shards on three machines."""
    return (third, "shard"), (second, "shard"), (second, "trainer"), (head, "trainer")


def renamed(output):
    """The parts as tables; a file that a command names is known by its whole path."""
    tables = [pq.read_table(BytesIO(part)) for name, part in output.items() if name.startswith("part-")]
    return [
        table.set_column(0, "partition", pc.replace_substring(table["partition"], "/tmp/", "")) for table in tables
    ], output["_metrics.json"]


def fetched(job, head, address):
    """All objects of an output."""
    fetching = job.start(head, "-c", FETCH, address)
    assert fetching.end() == 0, fetching.said
    found = content(head.tmp / "fetched")
    (head.tmp / "fetched").rename(head.tmp / f"fetched-{len(job.outputs)}")
    return found
