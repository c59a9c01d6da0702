"""Jobs whose commits are in an object store, through the command line: moved to an empty disk, back, and refused."""

import shutil

import pytest

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError
from headrace.service.cluster.fetched_commits import HeadReplaced, check_fresh
from headrace.service.cluster.generation_plans import GenerationPlans
from headrace.service.cluster.store import CACHE
from headrace.service.faults.injection import Deaths, run
from headrace.service.history.commit_list import prune
from headrace.service.history.verification import damage_in
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.checkpoint.object_store import ObjectStore
from headrace.trainer.journal.fence import FenceClaim, LogMode
from tests.faults.test_kills import report, said_by
from tests.faults.test_kills_with_objects import job_at, objects
from tests.integration.stream_job import write_job

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.long]
SOON = Deadline.after(3600.0)  # from the import of this module on, so longer than all tests


def finished(job):
    """Run a job on an empty disk: nothing of an earlier run is there but its object store."""
    said = []
    shutil.rmtree(f"{job.store}-log", ignore_errors=True)
    outcome = run(job, Deaths(job.store, iter([])), said_by(said))
    assert outcome.code == 0, (outcome, said)
    return report(job.store)


def test_no_process_reads_a_folder_of_another_one_and_digests_stay(tmp_path):
    """Shards and the second trainer keep their files in folders of their own, and start again on empty ones."""
    write_job(tmp_path, num_lines=160)
    expected = finished(job_at(tmp_path, "calm", 2, 2))
    mirror = str(tmp_path / "objects")
    job = job_at(tmp_path, "own", 2, 2, *objects(mirror))
    assert finished(job) == expected
    commits = Commits(job.store)
    newest = commits.whole()[-1]
    assert sorted(path.name for path in newest.folder.iterdir()) == [
        "dense.safetensors",
        "manifest.json",
        "metrics.safetensors",
    ]
    assert {path.name for path in (job.store / CACHE).iterdir()} == {"shard-0", "shard-1"}
    for shard in ("shard-0", "shard-1"):
        (cached,) = (job.store / CACHE / shard).iterdir()
        assert cached.name == newest.name and [path.name for path in cached.iterdir()] == [shard]
    moved = job_at(tmp_path, "own", 1, 1, *objects(mirror))
    assert finished(moved)["digest"] == expected["digest"], "one trainer and one shard on an empty disk"
    assert damage_in(job.store, Commits(job.store).names()[-1]) == {}
    with pytest.raises(HeadraceError, match="is in the object store, where the running job removes it"):
        prune(job.store, 1)


def test_a_head_that_was_replaced_ends_and_a_fresh_start_on_a_used_prefix_is_refused(tmp_path):
    write_job(tmp_path, num_lines=40)
    mirror = str(tmp_path / "objects")
    job = job_at(tmp_path, "one", 1, 0, *objects(mirror))
    check_fresh(job)
    finished(job)
    with pytest.raises(SpecError, match="holds a run, up to generation 1, and --fresh removes only folders: choose"):
        check_fresh(job)
    plans = GenerationPlans(job, tmp_path / "run")
    assert plans.next(1).generation == 2
    other = ObjectStore.open(mirror, SOON).sequence(2)
    other.catch_up(SOON)
    other.claim(FenceClaim(log_id="other", timeline="t2", mode=LogMode.ASYNC), SOON)
    with pytest.raises(HeadReplaced, match="generation 2 of small was claimed on another machine, after generation 1"):
        plans.next(1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["store.parts='object'"], 'parts = "object" needs a mirror'),
        (["store.log_mirror='sync'", "store.mirror='m'"], 'log_mirror = "sync" needs parts = "object"'),
    ],
)
def test_keys_that_do_not_fit_are_refused_with_words(tmp_path, more, message):
    write_job(tmp_path, num_lines=10)
    with pytest.raises(SpecError, match=message):
        job_at(tmp_path, "store", 1, 0, *more)


def test_a_store_that_somebody_without_the_key_changed_is_refused(tmp_path, monkeypatch):
    write_job(tmp_path, num_lines=40)
    monkeypatch.setenv("JOB_KEY", "k" * 64)
    mirror = tmp_path / "objects"
    job = job_at(tmp_path, "one", 1, 0, *objects(str(mirror)), "store.key={env='JOB_KEY'}")
    first = finished(job)
    assert finished(job)["digest"] == first["digest"], "an empty disk is completed from what is signed"
    record = sorted((mirror / "fence").iterdir())[-1]
    record.write_bytes(record.read_bytes().replace(b'"nonce":"', b'"nonce":"0'))
    said = []
    assert run(job, Deaths(job.store, iter([])), said_by(said)).code == 1
    assert any("has a wrong signature: it was changed" in line for line in said), said
