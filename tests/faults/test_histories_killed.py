"""Histories and counters after deaths, with other numbers of trainers and shards, are those of one calm trainer."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.failpoints import Failpoint
from headrace.keys import key_of_reference
from headrace.pserver.config import ShardProcess
from headrace.pserver.consistency.policy import FEATURES
from headrace.pserver.protocol.shards import Keys
from headrace.pserver.rows.history_kernels import unpacked
from headrace.pserver.server.commands import RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.spec.shard_tables import tables_on_shards
from tests.integration.stream_job import SPEC, write_job
from tests.integration.test_resizing import resized, worlds
from tests.jobs import changed

pytestmark = pytest.mark.usefixtures("warm")

HISTORIES = """
[[slots]]
name = "clicked"
pooling = "mean"
history = { key = "a", of = "b", last = 7, when = "click" }

[[slots]]
name = "seen"
pooling = "none"
share = "seen"
history = { key = "group", of = "history", last = 3 }

[[slots]]
name = "counts"
kind = "dense"
counters = { key = "a", windows = ["all"], click = "click" }

[[slots]]
name = "shown"
kind = "dense"
counters = { key = ["a", "group"], what = ["shows"], windows = ["all"] }

[[tasks]]"""
WITH_HISTORIES = (
    SPEC.replace("[[tasks]]", HISTORIES.strip(), 1)
    .replace('names = ["click", "group"]\nkind = "meta"', 'name = "click"\nkind = "meta"\n\n[[slots]]\nname = "group"')
    .replace('gauc_by = "group"\n', "")
)
"""The job of tests.integration.stream_job, whose last slot is sparse here, and the key of a history."""
ON_SHARDS = "dense.strategy=shards"
SGD = "{kind='sgd', lr=0.1}"
ON_COPIES = (
    "train={mode='geo', k_steps=3, threads=1}",
    f"dense={{strategy='shards', optimizer={SGD}}}",
    f"tables.default.optimizer={SGD}",
)
MODES = [
    pytest.param((), id="sync"),
    pytest.param(("train.mode=async", ON_SHARDS), id="async"),
    pytest.param(ON_COPIES, id="geo", marks=pytest.mark.slow),
]
DEATHS = (
    AtFailpoint("shard-1", Failpoint.PARTLY_PUSHED, 5),
    AtFailpoint(RANK_0, Failpoint.CLOSED, 2),
)


def job_at(folder: Path, store: str, *settings: str):
    every = "commit={every='600s', every_passes=3}"
    return load_job(folder / "job.toml", [f"store.path={store}", every, "passes.max_events=150", *settings])


def ended(job, deaths=()):
    """Run a job to its end, with deaths; its report and the deaths."""
    said, planned = [], Deaths(job.store, iter(deaths))
    assert run(job, planned, lambda worker, text: said.append(f"{worker}: {text}")).code == 0, said[-20:]
    assert [died.death for died in planned.died] == list(deaths)
    return json.loads((job.store / "report.json").read_text()), planned


@contextmanager
def committed(job, live):
    """The tables of histories in the newest commit."""
    commit, tables = Commits(job.store).whole()[-1], tables_on_shards({}, job.spec.dense, job.spec.slots)
    groups = {slot.name: slot.group for slot in Schema.of(job.spec.slots).sparse}
    shards = EmbeddedShards(ShardProcess.alone(tables, job.spec.seed, live=live, groups=groups))
    try:
        shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), Deadline.after(60))
        yield shards
    finally:
        shards.close()


def remembered(job, live):
    """The rows of the tables of histories and counters in the newest commit, by table.

    No digests: they have the versions of rows, and a pause for an export may put an empty pass between two others.
    """
    groups = {slot.name: slot.group for slot in Schema.of(job.spec.slots).sparse}
    a, group = groups["a"], groups["group"]
    keys_a = [key_of_reference(sign, a) for sign in range(20)]
    keys = {
        "counters-counts": (a, keys_a),
        "counters-shown": (group, [key_of_reference(key ^ sign, group) for key in keys_a for sign in range(40)]),
        "history-clicked": (a, keys_a),
        "history-seen": (group, [key_of_reference(sign, group) for sign in range(40)]),
    }
    asked = {
        name: Keys(np.array(of, np.uint64), np.full(len(of), group, np.uint16)) for name, (group, of) in keys.items()
    }
    with committed(job, live) as shards:
        return shards.look(asked, Deadline.after(60))


def clicked(job, live):
    """What the keys of slot "a" clicked last."""
    count_U, sign_UL = unpacked(remembered(job, live)["history-clicked"])
    return [signs[:count] for count, signs in zip(count_U.tolist(), sign_UL.tolist(), strict=True)]


def exported(job):
    """The histories of the one export, by the sign of their key."""
    (path,) = (job.store / "exports" / "serving").rglob("histories-clicked-*.parquet")
    told = json.loads((path.parent / "manifest.json").read_text())["histories"]
    rows = pq.read_table(path).to_pydict()
    assert set(rows["slot"]) == {"a"} and told["clicked"]["rows"] == len(rows["sign"]) == 20
    return dict(zip(rows["sign"], rows["history"], strict=True))


def counted(job):
    """Shows and clicks of each sign in the one export, and shows of all pairs."""
    (path,) = (job.store / "exports" / "serving").rglob("counters-counts-*.parquet")
    told = json.loads((path.parent / "manifest.json").read_text())["counters"]
    assert told["counts"]["windows_s"] == [0] and told["counts"]["rows"] == 20 and told["shown"]["key"] == "a group"
    (pairs,) = path.parent.glob("counters-shown-*.parquet")
    rows = pq.read_table(path).to_pydict()
    found = {sign: list(counts) for sign, *counts in zip(rows["sign"], rows["shows"], rows["clicks"], strict=True)}
    return found, sum(pq.read_table(pairs)["shows"].to_pylist())


def counted_by_hand(folder):
    """The same from the lines of the job: 2 x y 1 a 1 b n history.. 1 click 1 group."""
    found, lines = {}, [line for part in sorted(folder.glob("part-*.txt")) for line in part.read_text().splitlines()]
    for line in lines:
        words = line.split()
        shows, clicks = found.setdefault(int(words[4]), [0, 0])
        found[int(words[4])] = [shows + 1, clicks + int(words[-3])]
    return found, len(lines)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_histories_are_those_of_one_undisturbed_trainer(tmp_path, mode):
    write_job(tmp_path, num_lines=200, spec=WITH_HISTORIES)
    calm = job_at(tmp_path, "calm", "exports={serving={}}")
    killed = job_at(tmp_path, "killed", "cluster={trainers=3, shards=2}", "train.threads=1", *mode)
    one, _ = ended(calm)
    three, deaths = ended(killed, DEATHS)
    names = {name for body in deaths.closes.values() for name in body["digests"]}
    assert names == ({FEATURES} if mode else {"dense", "metrics", "pushes"})
    assert one["samples"] == three["samples"]
    found, again = remembered(calm, tmp_path / "live-1"), remembered(killed, tmp_path / "live-3")
    for table, rows_UD in found.items():
        assert rows_UD.any() and rows_UD.tobytes() == again[table].tobytes(), table
    assert exported(calm) == dict(enumerate(clicked(calm, tmp_path / "live-2")))
    assert counted(calm) == counted_by_hand(tmp_path)
    assert one["slots"]["clicked"] == three["slots"]["clicked"] and one["slots"]["clicked"]["mean_count"] > 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_trainer_in_async_has_the_bits_of_sync(tmp_path):
    write_job(tmp_path, num_lines=100, spec=WITH_HISTORIES)
    sync, other = (job_at(tmp_path, mode, ON_SHARDS, f"train.mode={mode}") for mode in ("sync", "async"))
    assert ended(sync)[0]["digest"] == ended(other)[0]["digest"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_resized_remembers_what_one_does_that_is_not(tmp_path):
    (tmp_path / "pipe.sh").write_text("if [ -e slowly ]; then sleep 0.5; fi; exec cat\n")
    write_job(tmp_path, num_lines=2400, spec=changed(WITH_HISTORIES, {"pipe.command": ["sh", "pipe.sh"]}))
    calm = job_at(tmp_path, "calm")
    ended(calm)
    steps = [("--trainers", "3", "--shards", "2"), ("--trainers", "2")]
    running = resized(tmp_path / "job.toml", "resized", ("cluster.shards=0",), steps)
    assert worlds(running.store) == [(1, 0), (3, 2), (2, 2)]
    found = clicked(job_at(tmp_path, "resized/store"), tmp_path / "live-2")
    assert found == clicked(calm, tmp_path / "live-1") and all(len(signs) == 7 for signs in found)
