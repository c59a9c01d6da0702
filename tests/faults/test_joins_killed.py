"""Late labels, after deaths and with any numbers of workers, are those of an offline join of the same events."""

import base64
import json
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.failpoints import Failpoint
from headrace.pserver.config import ShardProcess
from headrace.pserver.protocol.joins import JOIN_TABLE
from headrace.pserver.rows.join_kernels import join_reference
from headrace.pserver.server.commands import DigestRows, RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.log import read
from headrace.trainer.journal.records import PassClose
from headrace.trainer.rank0.parts import describe_key
from headrace.trainer.spec.shard_tables import tables_on_shards
from tests.e2e.test_examples import headrace
from tests.faults.test_histories_killed import MODES, ON_SHARDS

pytestmark = pytest.mark.usefixtures("warm")

WINDOW_S, PASS, YEAR_2099 = 60, 80, 4_070_908_800
NUM_SIGNS = 30
SPEC = """
name = "late"
seed = 3

[sources.events]
kind = "files"
paths = ["events.jsonl"]
event_time = { slot = "ts" }

[pipe]
kind = "columns"

[[slots]]
name = "user"

[[slots]]
name = "item"

[[slots]]
name = "click"
kind = "meta"

[[slots]]
name = "ts"
kind = "meta"
type = "int64"

[[slots]]
name = "key"
kind = "meta"
type = "uint64"

[join]
label = "click"
key = "key"
window = "60s"
max_ahead = "1h"
max_sample_bytes = 64

[[tasks]]
name = "ctr"
label = "click"

[tables.default]
dim = 4

[model]
name = "deepfm"
[model.settings]
hidden = [8]

[train]
batch_size = 4096

[passes]
max_events = 80

[store]
path = "store"
"""
OFFLINE = (
    SPEC.replace('paths = ["events.jsonl"]', 'paths = ["joined.jsonl"]')
    .replace('kind = "columns"', 'kind = "columns"\nexplode = "samples"')
    .replace(SPEC[SPEC.index("[join]") : SPEC.index("[[tasks]]")], "")
)
for _name in ("user", "item", "click", "ts", "key"):
    OFFLINE = OFFLINE.replace(f'name = "{_name}"\n', f'name = "{_name}"\nfrom = "samples.{_name}"\n')
DEATHS = (
    AtFailpoint("shard-1", Failpoint.PARTLY_PUSHED, 3),
    AtFailpoint(RANK_0, Failpoint.CLOSED, 2),
)


def events_of(num_impressions):
    """Impressions with clicks that come within the window, too late, twice, before them or for none; in log order. A
    few events are of 2099, or too long."""
    rng, found = np.random.default_rng(7), []
    for key in range(num_impressions):
        user, item, at_s = int(rng.integers(20)), int(rng.integers(30)), 1_700_006_400 + 2 * key
        found.append((at_s + 0.5, {"ts": at_s, "key": key, "user": user, "item": item}))
        if rng.random() < 0.15 + 0.5 * (item % 3 == 0):
            delay_s = int(rng.exponential(25))
            early = rng.random() < 0.1
            read_s = at_s - 3 if early else at_s + delay_s + 1
            found.append((read_s, {"ts": at_s + delay_s, "key": key, "click": 1}))
            if rng.random() < 0.2:
                found.append((at_s + delay_s + 4, {"ts": at_s + delay_s + 4, "key": key, "click": 1}))
        if rng.random() < 0.03:
            found.append((at_s, {"ts": at_s, "key": 10**6 + key, "click": 1}))
        if key % 197 == 50:
            found.append((at_s + 0.7, {"ts": YEAR_2099, "key": key, "click": 1}))
        if key % 211 == 60:
            found.append((at_s + 0.8, {"ts": at_s, "key": 10**7 + key, "user": [user] * 5, "item": item}))
    return [event for _, event in sorted(found, key=lambda each: each[0])]


def is_wrong(event):
    return event["ts"] == YEAR_2099 or isinstance(event.get("user"), list)


def offline(events, size=PASS):
    """The events of the offline join: as many, each with the samples that it releases; and how many clicks are late."""
    known, found, late = {}, [], 0
    for number, begin in enumerate(range(0, len(events), size), 1):
        part = events[begin : begin + size]
        given = [
            (each["key"], number << 32 | place, each["ts"], each.get("click", 0), json.dumps(each).encode())
            for place, each in enumerate(part)
            if not is_wrong(each)
        ]
        told, ended, _ = join_reference(given, WINDOW_S, known, holds=True)
        late += sum(outcome == 4 for outcome, *_ in told)
        samples = [[] for _ in part]
        for place, _, _, label, sample in ended:
            samples[place].append(json.loads(sample) | {"click": label})
        found += [{"samples": each} for each in samples]
    return found, late


def write_jobs(folder: Path, num_impressions=300, size=PASS):
    """Write a job with late labels and an offline one, for passes of `size` events; what `offline` found."""
    events = events_of(num_impressions)
    joined, late = offline(events, size)
    for name, lines in (("events", events), ("joined", joined)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "job.toml").write_text(SPEC)
    (folder / "offline.toml").write_text(OFFLINE)
    return joined, late


def letters_of(job):
    """Place and event of each dead letter, in the order of the log."""
    lines = [line for path in (job.store / "dead_letters").glob("pass-*") for line in path.read_bytes().splitlines()]
    letters = sorted((json.loads(line) for line in lines), key=lambda each: each["offset"])
    return [(each["reason"], json.loads(base64.b64decode(each["bytes"]))) for each in letters]


def job_at(path: Path, store: str, *settings: str):
    every = "commit={every='600s', every_passes=2}"
    return load_job(path, [f"store.path={store}", every, "train.threads=1", *settings])


def ended(job, deaths=()):
    """Run a job to its end, with deaths; its report."""
    said, planned = [], Deaths(job.store, iter(deaths))
    assert run(job, planned, lambda worker, text: said.append(f"{worker}: {text}")).code == 0, said[-20:]
    assert [died.death for died in planned.died] == list(deaths)
    return json.loads((job.store / "report.json").read_text())


def learnt(job):
    """The digests of every close that depend on what was learnt alone."""
    closes = {each.content.number: each.content for each in read(job.store / "log") if type(each.content) is PassClose}
    return {
        number: (close.samples, {key: value for key, value in close.digests.items() if key in ("dense", "metrics")})
        for number, close in closes.items()
    }


@contextmanager
def committed(job, live):
    """The shards of the newest commit."""
    commit = Commits(job.store).whole()[-1]
    groups = {slot.name: slot.group for slot in Schema.of(job.spec.slots).sparse}
    tables = tables_on_shards(job.spec.tables, job.spec.dense, job.spec.slots, job.spec.join)
    shards = EmbeddedShards(ShardProcess.alone(tables, job.spec.seed, live=live, groups=groups))
    try:
        shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), Deadline.after(60))
        yield shards
    finally:
        shards.close()


def counts_of(job):
    """Shows and clicks of every row in the newest commit, by slot and sign: which samples were learnt."""
    schema = Schema.of(job.spec.slots)
    with committed(job, job.store.with_name(f"{job.store.name}-live")) as shards:
        found = {
            (slot.name, sign): describe_key(shards, schema, slot, sign, Deadline.after(60))
            for slot in schema.sparse
            for sign in range(NUM_SIGNS)
        }
    return {place: (told["show"], told["click"]) for place, told in found.items() if told["row"]}


def counts_by_hand(joined):
    """The same of the samples of an offline join."""
    samples = [sample for event in joined for sample in event["samples"]]
    shows = Counter((slot, sample[slot]) for sample in samples for slot in ("user", "item"))
    clicks = Counter((slot, sample[slot]) for sample in samples if sample["click"] for slot in ("user", "item"))
    return {place: (show, clicks[place]) for place, show in shows.items()}


def assert_rows_have_the_bits_of(job, oracle):
    """The rows of a job with [join] are those of an offline one."""
    live = [each.store.with_name(f"{each.store.name}-bits") for each in (job, oracle)]
    with committed(job, live[0]) as ours, committed(oracle, live[1]) as theirs:
        digests = ours.call(DigestRows(), Deadline.after(60))
        assert (
            digests["default"] == theirs.call(DigestRows(), Deadline.after(60))["default"] and digests[JOIN_TABLE] != 0
        )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_late_labels_are_learnt_as_an_offline_join_has_them(tmp_path):
    joined, late = write_jobs(tmp_path)
    wrong = [event for event in events_of(300) if is_wrong(event)]
    alone = "tables.default.in_batch=false"  # samples of one event follow none of it, and a join has other events
    calm = job_at(tmp_path / "job.toml", "calm", alone)
    killed = job_at(tmp_path / "job.toml", "killed", "cluster={trainers=1, shards=2}", alone)
    oracle = job_at(tmp_path / "offline.toml", "offline", alone)
    one, other, offline_run = ended(calm), ended(killed, DEATHS), ended(oracle)
    assert one["samples"] == offline_run["samples"] == sum(len(event["samples"]) for event in joined)
    assert learnt(calm) == learnt(oracle) and len(learnt(calm)) > 4
    assert learnt(calm) == learnt(killed) and one["digest"] == other["digest"]
    assert one["left_out"] == other["left_out"] and one["left_out"]["click after the window"] == late > 0
    assert {"repeated click", "click without an impression"} <= one["left_out"].keys()
    assert [event for _, event in letters_of(calm)] == wrong and letters_of(killed) == letters_of(calm)
    assert one["rejected"] == other["rejected"] == Counter(reason for reason, _ in letters_of(calm))
    assert sorted(one["rejected"].values()) == [2, 2]
    assert_rows_have_the_bits_of(calm, oracle)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_trainers_learns_the_samples_of_an_offline_join(tmp_path, mode):
    joined, late = write_jobs(tmp_path, 200)
    one = job_at(tmp_path / "job.toml", "one")
    three = job_at(tmp_path / "job.toml", "three", "cluster={trainers=3, shards=2}", *mode)
    for job, deaths in (one, ()), (three, DEATHS if mode else ()):
        assert ended(job, deaths)["left_out"]["click after the window"] == late > 0
    assert counts_of(one) == counts_of(three) == counts_by_hand(joined) != {}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_trainer_in_async_has_the_bits_of_sync(tmp_path):
    write_jobs(tmp_path, 100)
    sync, other = (job_at(tmp_path / "job.toml", mode, ON_SHARDS, f"train.mode={mode}") for mode in ("sync", "async"))
    assert ended(sync)["digest"] == ended(other)["digest"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_change_nothing(tmp_path):
    """`headrace faults` compares each close of killed runs with a calm one. A calm run of the same settings has learnt
    the samples of the offline join, and one trainer its bits."""
    joined, late = write_jobs(tmp_path, 3000, size=40)
    size, workers = "passes.max_events=40", "cluster={trainers=2,shards=2}"
    one, two = job_at(tmp_path / "job.toml", "one", size), job_at(tmp_path / "job.toml", "two", size, workers)
    oracle = job_at(tmp_path / "offline.toml", "offline", size)
    of_one, of_two, of_oracle = ended(one), ended(two), ended(oracle)
    assert of_one["samples"] == of_two["samples"] == of_oracle["samples"]
    assert of_one["left_out"] == of_two["left_out"] and of_one["left_out"]["click after the window"] == late > 0
    assert learnt(one) == learnt(oracle) and len(learnt(one)) > 80
    assert_rows_have_the_bits_of(one, oracle)
    assert counts_of(one) == counts_of(two) == counts_of(oracle) == counts_by_hand(joined) != {}

    sets, kills, seed = [word for setting in (size, "train.threads=1", workers) for word in ("--set", setting)], 0, 0
    while kills < 100:
        seed += 1
        told = headrace("faults", tmp_path / "job.toml", "--rounds", 4, "--seed", seed, *sets, limit_s=900)
        (numbers,) = re.findall(r"(\d+) kills, (\d+) recovered, (\d+) identical \(seed", told)
        assert len(set(numbers)) == 1, told
        kills += int(numbers[0])
