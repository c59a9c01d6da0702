"""A worker killed at any failpoint, in any role, changes nothing: the job has the results of an undisturbed run."""

import json
import os
from pathlib import Path

import pytest

from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.failpoints import Failpoint
from headrace.pserver.config import ShardProcess
from headrace.pserver.server.commands import RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.service.faults.deaths import RANK_0, AtFailpoint, AtInstant, JobFeatures, failpoint_places
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import MANIFEST, Commits, problems_of
from headrace.trainer.rank0.parts import describe_key
from headrace.trainer.spec.shard_tables import tables_on_shards
from tests.integration.stream_job import write_job

pytestmark = pytest.mark.usefixtures("warm")

COMPARED = ("events", "samples", "rejected", "positions", "metrics", "halves", "digest", "passes")
KEEP = 2
HITS = {Failpoint.LOG_WRITTEN: 3, Failpoint.LOG_SYNCED: 4, Failpoint.PLAN_LOGGED: 2, Failpoint.PARTLY_PUSHED: 2}
"""Not the first time, where the first one is much like another point."""


def in_order(trainers, shards):
    """Every place; a pass is left to be replayed where its replay is to be died in."""
    found = failpoint_places(trainers, shards, JobFeatures(mirrored=True))
    last = [(Failpoint.CLOSED, RANK_0), (Failpoint.REPLAYED, RANK_0)]
    return [
        AtFailpoint(worker, point, HITS.get(point, 1)) for point, worker in [p for p in found if p not in last] + last
    ]


def job_at(folder, store, trainers, shards, *settings):
    mirror = f"store.mirror='{folder / store}-mirror'"
    return load_job(
        folder / "job.toml",
        [f"store.path={store}", mirror, f"commit={{every='600s', every_passes=3, keep={KEEP}}}", "passes.max_events=16"]
        + [f"cluster={{trainers={trainers}, shards={shards}}}", "train.threads=1", "train.batch_size=8", *settings],
    )


@pytest.mark.long
@pytest.mark.timeout(600)  # half a minute and one and a half, on two cores of their own
@pytest.mark.parametrize(
    ("trainers", "shards", "others"),
    [(1, 0, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1, True), (3, 2, False)))],
    ids=["embedded", "2 trainers x 1 shard, others than rank 0", "3 trainers x 2 shards"],
)
def test_a_death_at_every_point_in_every_role_changes_nothing(tmp_path, trainers, shards, others):
    write_job(tmp_path, num_lines=500)
    said = []
    undisturbed, disturbed = (job_at(tmp_path, store, trainers, shards) for store in ("calm", "killed"))
    calm = Deaths(undisturbed.store, iter([]))
    assert run(undisturbed, calm, said_by(said)).code == 0, said
    planned = [death for death in in_order(trainers, shards) if not (others and death.worker == RANK_0)]
    deaths = Deaths(disturbed.store, iter(planned))
    outcome = run(disturbed, deaths, said_by(said))
    assert outcome.code == 0, (outcome, said[-20:])
    assert [(died.death, died.point) for died in deaths.died] == [(death, death.point) for death in planned]
    assert not deaths.unasked
    assert deaths.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)
    assert_nothing_left(disturbed.store, generation=len(planned) + 1)


LONG_PASSES = "passes.max_events=160"
STALE = ("train.staleness=2", LONG_PASSES)
"""Pushes of three steps are under way in most of a pass."""
SLICED = ('dense.strategy="shards"', LONG_PASSES)
"""Shards hold the dense parameters, too."""
IN_PARTS = (*SLICED, "dense.slice_floats=1000", "train.early_rows=true")
"""And slices travel in messages of their own, and rows early."""
MERGED = ("dense.accumulate=2", "dense.average=false", LONG_PASSES)
COMPRESSED = ("dense.compression=bf16", "dense.overlap=true", "dense.bucket_bytes=256B", LONG_PASSES)
SPARSE = ("dense={compression='dgc',dgc={sparsity=0.9},optimizer={kind='sgd',momentum=0.9}}", LONG_PASSES)
DEATHS_IN_LONG_PASSES = {
    (1, 0): [AtFailpoint(RANK_0, Failpoint.PARTLY_PUSHED, hit) for hit in (1, 9)],
    (2, 2): [
        AtFailpoint("shard-1", Failpoint.PARTLY_PUSHED, 7),
        AtInstant("trainer-1", closes=1, delay_s=0.02),
        AtFailpoint("trainer-1", Failpoint.BEFORE_CLOSE, 2),
    ],
}
"""By trainers and shards."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("place", "settings"),
    [
        pytest.param((1, 0), STALE, marks=pytest.mark.slow),
        *(((2, 2), each) for each in (STALE, IN_PARTS)),
        *(pytest.param((2, 2), each, marks=pytest.mark.slow) for each in (MERGED, COMPRESSED)),
        ((2, 2), SPARSE),
    ],
    ids=[
        "embedded, stale rows",
        "2 trainers x 2 shards, stale rows",
        "2 trainers x 2 shards, dense on shards, in parts",
        "2 trainers x 2 shards, merged batches",
        "2 trainers x 2 shards, compressed gradients beside the backward pass",
        "2 trainers x 2 shards, the largest gradients",
    ],
)
def test_a_death_in_the_middle_of_a_pass_changes_nothing(tmp_path, place, settings):
    (undisturbed, calm), (disturbed, deaths) = calm_and_killed(tmp_path, place, settings)
    assert deaths.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)


ON_DEVICES = ("train.rows=device", "train.rows_memory=2KiB", LONG_PASSES)
"""Each of two trainers has a shard in its process, and most rows find no room on its device."""
FEW_OF_TRAINERS = [
    AtFailpoint("trainer-1", Failpoint.PARTLY_PUSHED, 7),
    AtInstant(RANK_0, closes=1, delay_s=0.02),
    AtFailpoint("trainer-1", Failpoint.BEFORE_CLOSE, 2),
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("planned", [FEW_OF_TRAINERS, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
def test_deaths_of_trainers_with_rows_on_their_devices_change_nothing(tmp_path, planned):
    settings, planned = ON_DEVICES, planned or in_order(2, 0)
    (undisturbed, calm), (disturbed, deaths) = calm_and_killed(tmp_path, (2, 2), settings, planned)
    assert deaths.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)


SCHEDULED = (
    "dense.schedule={kind='warmup_cosine', warmup=200, total=1000, final=0.1}",
    "tables.default={dim=4, init='normal', clip_norm=0.01, schedule={kind='inverse_sqrt', warmup=100}}",
    "model.settings={hidden=[8], dropout=0.2}",
)
OPTIMIZERS = {
    "adamw": "{kind='adamw', lr=0.01, weight_decay=0.1}",
    "momentum": "{kind='sgd', lr=0.1, momentum=0.9}",
    "lamb": "{kind='lamb', lr=0.02}",
    "lars": "{kind='lars', lr=5.0}",
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in OPTIMIZERS])
def test_ten_deaths_change_no_optimizer_schedule_or_clipped_row(tmp_path, kind):
    settings = (*SCHEDULED, f"dense.optimizer={OPTIMIZERS[kind]}")
    places = in_order(2, 2)
    planned = [places[number * len(places) // 10] for number in range(10)]
    (undisturbed, calm), (disturbed, deaths) = calm_and_killed(tmp_path, (2, 2), settings, planned)
    assert deaths.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)


def calm_and_killed(tmp_path, place, settings, planned=None):
    """Run a job undisturbed, and once with the deaths for its place; each job with its deaths."""
    write_job(tmp_path, num_lines=500)
    said, planned = [], planned or DEATHS_IN_LONG_PASSES[place]
    undisturbed, disturbed = (job_at(tmp_path, store, *place, *settings) for store in ("calm", "killed"))
    calm = Deaths(undisturbed.store, iter([]))
    assert run(undisturbed, calm, said_by(said)).code == 0, said
    deaths = Deaths(disturbed.store, iter(planned))
    assert run(disturbed, deaths, said_by(said)).code == 0, said[-20:]
    assert [died.death for died in deaths.died] == planned
    assert_nothing_left(disturbed.store, generation=len(planned) + 1)
    return (undisturbed, calm), (disturbed, deaths)


ASYNC = ('train.mode="async"', *SLICED)
SGD = 'optimizer={kind="sgd"}'
GEO = ('train.mode="geo"', "train.k_steps=3", f"dense.{SGD}", f"tables.default.{SGD}", *SLICED)
HALF_ASYNC = ("train.merge={pushes=2, wait='5ms'}", *ASYNC)
OF_CLOSES = ("number", "day", "events", "samples", "rejected", "digests")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("place", "settings"),
    [
        pytest.param((1, 0), ASYNC, marks=pytest.mark.slow),
        ((2, 2), ASYNC),
        pytest.param((2, 2), HALF_ASYNC, marks=pytest.mark.slow),
        pytest.param((1, 0), GEO, marks=pytest.mark.slow),
        ((2, 2), GEO),
    ],
    ids=[
        "embedded, async",
        "2 trainers x 2 shards, async",
        "2 trainers x 2 shards, half-async",
        "embedded, geo",
        "2 trainers x 2 shards, geo",
    ],
)
def test_after_deaths_every_event_counts_once_though_weights_depend_on_the_order_of_pushes(tmp_path, place, settings):
    (undisturbed, calm), (disturbed, deaths) = calm_and_killed(tmp_path, place, settings)
    assert not deaths.unasked
    assert counted(deaths.closes) == counted(calm.closes)
    for key in ("events", "samples", "rejected", "positions", "passes"):
        assert report(disturbed.store)[key] == report(undisturbed.store)[key]
    shown = shows(disturbed, tmp_path / "rows-killed")
    assert shown == shows(undisturbed, tmp_path / "rows-calm") and len(shown) > 300
    assert_nothing_left(disturbed.store, generation=len(deaths.died) + 1)


def counted(closes):
    assert all(body["digests"] == {} for body in closes.values()), "weights are not promised"
    return {number: {key: body[key] for key in OF_CLOSES} for number, body in closes.items()}


def shows(job, live):
    """Shows and clicks of every row in the newest commit, by slot and sign: how often events were learnt."""
    schema, commit = Schema.of(job.spec.slots), Commits(job.store).whole()[-1]
    tables = tables_on_shards(job.spec.tables, job.spec.dense)
    shards = EmbeddedShards(
        ShardProcess.alone(tables, job.spec.seed, live=live, groups={slot.name: slot.group for slot in schema.sparse})
    )
    try:
        shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), Deadline.after(60))
        found = {
            (slot.name, sign): describe_key(shards, schema, slot, sign, Deadline.after(60))
            for slot in schema.sparse
            for sign in range(300)
        }
    finally:
        shards.close()
    return {place: (told["show"], told["click"]) for place, told in found.items() if told["row"]}


def said_by(lines):
    return lambda worker, text: lines.append(f"{worker}: {text}")


def report(store):
    found = json.loads((store / "report.json").read_text())
    return {key: found[key] for key in COMPARED}


def assert_nothing_left(store, generation):
    commits = Commits(store)
    assert len(commits.names()) == KEEP
    assert not any(problems_of(commits.read(name)) for name in commits.names())
    assert {path.name for path in commits.folder.iterdir()} == set(commits.names()), "commits without a manifest"
    assert len(list(commits.folder.glob(f"*/{MANIFEST}"))) == KEEP
    assert all(path.name.startswith(f"g{generation}-") for path in (store / "live").glob("*"))
    assert not list(store.rglob("*.tmp")) and not list(Path(f"{store}-mirror").rglob("*.tmp"))
    assert not (store / "workers").exists()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if names(path, store)], "processes"


def names(cmdline, store):
    try:
        return os.fsencode(store) in cmdline.read_bytes()
    except OSError:
        return False
