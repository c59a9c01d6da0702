"""Workers die at random, their disks with them, and the object store is slow and fails: nothing is lost or doubled."""

import json
import re
import shutil
import threading
from contextlib import contextmanager, suppress
from itertools import islice
from random import Random

import pytest

from headrace.blob.blob_store import open_blobs
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.failpoints import Failpoint
from headrace.rpc.job_client import JobClient
from headrace.service.cluster.store import CACHE, LIVE
from headrace.service.faults.deaths import EVERYBODY, RANK_0, AtFailpoint, AtInstant, JobFeatures, deaths
from headrace.service.faults.injection import Deaths, run
from headrace.service.faults.rounds import FALLBACK
from headrace.service.spec.job import load_job
from headrace.trainer.journal.fence import key_of
from headrace.trainer.journal.log_file import listed, newest_generation, read_files
from headrace.trainer.journal.records import Claim, PassClose
from tests.faults.test_kills import report, said_by
from tests.integration.stream_job import write_job
from tests.object_servers import azure, gcs  # noqa: F401
from tests.s3_server import proxy, s3  # noqa: F401

pytestmark = pytest.mark.usefixtures("warm")

FEATURES = JobFeatures(mirrored=True, uploaded=True)
OF_DISK = ("log", "commits", "holds", "dead_letters")
"""Folders of the store that are rank 0's disk."""


class CopiedDeaths(Deaths):
    """Deaths after which the log comes back from the object store."""

    def _keep_log(self):
        """Link the log's files, and the longer of two: a restored one is another file on the disk."""
        super()._keep_log()
        for path in listed(self._log):
            kept, link = self.log / path.name, self.log / "restored"
            with suppress(FileNotFoundError):  # pruned meanwhile
                if not kept.samefile(path) and kept.stat().st_size < path.stat().st_size:
                    link.hardlink_to(path)
                    link.replace(kept)


class WipedDeaths(CopiedDeaths):
    """Deaths of workers, and of the disks of those that died: all folders that only they have."""

    def __init__(self, store, planned, trouble=lambda: None, *, restored=True):
        """`restored`: whether a log that was lost comes back, so that its files belong together."""
        super().__init__(store, planned, FALLBACK)
        self._store, self._trouble, self._restored = store, trouble, restored
        self._seen = 0
        self.wiped = []

    def faults(self, generation, worker):
        if generation != self._seen:
            self._seen = generation
            if self.died and len(self.died) > len(self.wiped):
                with self._lock:  # the watch reads the log
                    self._wipe(self.died[-1].death.worker)
            self._trouble()
        return super().faults(generation, worker)

    def _wipe(self, worker):
        if self._restored:
            self._keep_log()
        self.wiped.append(worker)
        everybody = worker == EVERYBODY
        if everybody or worker == RANK_0:
            for name in OF_DISK:
                shutil.rmtree(self._store / name, ignore_errors=True)
        for path in [*(self._store / CACHE).glob("*"), *(self._store / LIVE).glob("*")]:
            if everybody or path.name.endswith(worker):
                shutil.rmtree(path)

    def _keep_log(self):
        if not self._restored and len(self.died) == len(self.wiped):
            shutil.rmtree(self.log, ignore_errors=True)
        super()._keep_log()


def job_at(folder, store, trainers, shards, *more):
    return load_job(
        folder / "job.toml",
        [f"store.path={store}", "commit={every='600s', every_passes=3, keep=2}", "passes.max_events=16"]
        + [f"cluster={{trainers={trainers}, shards={shards}}}", "train.threads=1", "train.batch_size=8", *more],
    )


def objects(uri, *more):
    return ("store.parts='object'", f"store.mirror={json.dumps(uri)}", *more)


OUTAGE_S = 15.0
"""Longer than all tries of one call (headrace.blob.blob_retry)."""


@contextmanager
def outage_after_a_close(link, store):
    """The store refuses everything for OUTAGE_S, from a close of the first generation on.

    Gives the list that gets the trouble in the status near the end of this time.
    """
    ended, troubles = threading.Event(), []

    def refuse():
        while not ended.wait(0.01):
            records = [each.content for file in read_files(store / "log") for each in file.records]
            if any(isinstance(each, PassClose) for each in records):
                link.refuse(1_000_000)
                ended.wait(OUTAGE_S - 2.0)
                with suppress(HeadraceError):  # there is no worker
                    troubles.append(JobClient(store).status(Deadline.after(1.0))["trouble"])
                ended.wait(2.0)
                link.heal()
                return

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        yield troubles
    finally:
        ended.set()
        thread.join()


def undisturbed(folder, trainers, shards):
    job, said = job_at(folder, "calm", trainers, shards), []
    calm = Deaths(job.store, iter([]))
    assert run(job, calm, said_by(said)).code == 0, said
    return calm.closes, report(job.store)


def timelines(log):
    records = [record.content for file in read_files(log) for record in file.records]
    return list(dict.fromkeys(record.timeline for record in records if isinstance(record, Claim)))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("trainers", "shards", "seed"),
    [pytest.param(1, 0, 1, marks=pytest.mark.slow), (2, 2, 2)],
    ids=["embedded", "2 x 2"],
)
def test_ten_deaths_with_their_disks_change_nothing(tmp_path, s3, proxy, trainers, shards, seed):  # noqa: F811
    """The object store is slow, refuses, and cuts connections meanwhile."""
    write_job(tmp_path, num_lines=500)
    closes, expected = undisturbed(tmp_path, trainers, shards)
    random, said = Random(seed), []

    def trouble():
        proxy.heal()
        random.choice([lambda: proxy.refuse(2), lambda: proxy.cut_after(30_000), lambda: proxy.slow(0.01)])()
        threading.Timer(2.0, proxy.heal).start()

    uri = s3.uri("bucket", f"kills-{trainers}x{shards}", proxy.port)
    job = job_at(tmp_path, "killed", trainers, shards, *objects(uri, "store.log_mirror='sync'"))
    dying = WipedDeaths(job.store, islice(deaths(seed, trainers, shards, FEATURES), 10), trouble)
    outcome = run(job, dying, said_by(said))
    assert outcome.code == 0, (outcome, said[-40:])
    assert len(dying.died) >= 8 and {RANK_0, EVERYBODY} & {*dying.wiped}, (dying.died, dying.missed)
    assert dying.closes == closes
    assert report(job.store) == expected
    assert timelines(job.store / "log") == ["t1"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "where"), [("async", "folder"), ("sync", "folder"), ("sync", "gcs"), ("sync", "azure")]
)
def test_a_head_without_its_disk_goes_on_and_says_how(tmp_path, request, mode, where):
    """With `async` on a new timeline from the newest commit, with `sync` on the same with the same bits."""
    write_job(tmp_path, num_lines=200)
    closes, expected = undisturbed(tmp_path, 1, 0)
    said, mirror = [], str(tmp_path / "mirror")
    if where != "folder":
        mirror = request.getfixturevalue(where).uri("bucket", f"lost-{mode}")
    job = job_at(tmp_path, "lost", 1, 0, *objects(mirror, f"store.log_mirror='{mode}'"))
    planned = [AtFailpoint(RANK_0, Failpoint.CLOSED, 8)]
    dying = WipedDeaths(job.store, iter(planned), restored=mode == "sync")
    outcome = run(job, dying, said_by(said))
    assert outcome.code == 0, (outcome, said[-40:])
    assert dying.wiped == [RANK_0]
    assert report(job.store) == expected
    told = [
        line for line in said if "the log of timeline t1 was on another disk, so this job continues on a new" in line
    ]
    if mode == "sync":
        assert timelines(job.store / "log") == ["t1"] and not told
        assert dying.closes == closes
    else:
        assert timelines(job.store / "log") == ["t2"] and len(told) == 1
        assert re.search("from t1-000000000[36]-g1$", told[0]), "the newest that counts; the last one may still be made"
    soon = Deadline.after(30)
    assert open_blobs(parse(mirror), "mirror", soon).get(key_of(1), 1 << 20, soon)


def behind_a_proxy(folder, server, way):
    """A job whose every record goes to a store behind a proxy; the closes and the report of one that is left alone."""
    write_job(folder, num_lines=160)
    closes, expected = undisturbed(folder, 1, 0)
    uri = server.uri("bucket", folder.name, way.port)
    return job_at(folder, "waits", 1, 0, *objects(uri, "store.log_mirror='sync'")), closes, expected


@pytest.mark.long
def test_training_waits_for_a_store_that_refuses_everything_for_a_while(tmp_path, s3, proxy):  # noqa: F811
    """No worker ends, and no restart is counted."""
    job, closes, expected = behind_a_proxy(tmp_path, s3, proxy)
    said, watched = [], Deaths(job.store, iter([]))
    with outage_after_a_close(proxy, job.store) as troubles:
        outcome = run(job, watched, said_by(said))
    assert outcome.code == 0, (outcome, said[-40:])
    waits = "training waits, for the object store does not take the log"
    assert any(waits in line for line in said) and all(waits in each for each in troubles) and troubles
    assert newest_generation(job.store / "log") == 1 and not watched.unasked
    assert watched.closes == closes
    assert report(job.store) == expected


@pytest.mark.long
def test_a_worker_that_dies_while_the_store_refuses_everything_is_started_again_later(tmp_path, s3, proxy):  # noqa: F811
    job, closes, expected = behind_a_proxy(tmp_path, s3, proxy)
    said, dying = [], CopiedDeaths(job.store, iter([AtInstant(RANK_0, closes=1, delay_s=2.0)]))
    with outage_after_a_close(proxy, job.store):
        outcome = run(job, dying, said_by(said))
    assert outcome.code == 0, (outcome, said[-40:])
    assert len(dying.died) == 1 and not dying.unasked
    assert len([line for line in said if "the workers start once the object store can be reached" in line]) == 1
    assert newest_generation(job.store / "log") == 2
    assert dying.closes == closes
    assert report(job.store) == expected
