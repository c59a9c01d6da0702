"""What `headrace rewind` and `headrace skip` say, and when they refuse."""

import shutil
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import HeadraceError, SpecError
from headrace.service.history.rewind import format_rewound, format_skipped, rewind_job, skip_job
from headrace.service.spec.job import LoadedJob, load_job
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import newest_generation, read
from headrace.trainer.journal.partitions import SkippedRange
from tests.fakes.past import Past

NEWS = Path(__file__).parents[1] / "golden" / "news.toml"


def job_in(tmp_path, *overrides):
    loaded = load_job(NEWS, overrides)
    return LoadedJob(spec=loaded.spec, raw=loaded.raw, folder=loaded.folder, store=tmp_path / "store")


@pytest.fixture
def job(tmp_path):
    return job_in(tmp_path)


@pytest.fixture
def past(job):
    """A stopped job with commits of versions 1 and 2; pass 3 is planned."""
    made = Past(job.store).begin()
    made.meet("a")
    for version in (1, 2):
        made.close(version, a=(100 * version - 100, 100 * version))
        made.commit(version)
    made.plan(3, a=(200, 300))
    made.end()
    return made


def test_a_rewind_says_where_it_begins_and_how_to_come_back(past, job):
    assert list(format_rewound(rewind_job(job, "1"))) == [
        "timeline t2 begins at commit t1-0000000001-g1, version 1; `headrace run` continues there",
        "left behind: the versions after it on timeline t1, up to commit t1-0000000002-g1. While that exists, "
        "`headrace rewind --to t1-0000000002-g1` returns to it; `headrace commits pin` keeps it from being pruned",
    ]


def test_a_rewind_to_the_newest_commit_leaves_no_commit_behind(past, job):
    done = rewind_job(job, "2")
    assert (done.timeline, done.commit, done.left) == ("t2", "t1-0000000002-g1", None)
    assert len(list(format_rewound(done))) == 1


def test_a_timeline_has_no_name_that_the_mirror_knows(past, job, tmp_path):
    mirror = tmp_path / "mirror" / "commits"
    mirror.mkdir(parents=True)
    name = "t4-0000000002-g9"
    past.timeline, past.generation = "t4", 9
    shutil.copytree(Commits(job.store).folder / "t1-0000000002-g1", Commits(job.store).folder / name)
    commit = Commits(job.store).read("t1-0000000002-g1")
    past.write_manifest(name, 2, commit.shards, commit.files)
    shutil.move(Commits(job.store).folder / name / "manifest.json", mirror / f"{name}.json")
    shutil.rmtree(Commits(job.store).folder / name)
    assert rewind_job(job_in(tmp_path, f"store.mirror={mirror.parent}"), "1").timeline == "t5"


def test_a_job_with_a_damaged_log_is_rewound_with_a_log_begun_anew(past, job):
    path = job.store / "log" / "00000001-0001.log"
    path.write_bytes(path.read_bytes().replace(b'"number":2', b'"number":9', 1))
    said = next(format_rewound(rewind_job(job, "2")))
    aside = path.parent / "damaged-before-g2"
    assert f"the log is damaged (00000001-0001.log, byte {read_at(aside)})" in said
    now = JobHistory.of(read(path.parent))
    assert (now.timeline, now.base, now.closed) == ("t2", "t1-0000000002-g1", 2)


def read_at(aside):
    content = (aside / "00000001-0001.log").read_bytes()
    return content.rindex(b"\n", 0, content.index(b'"number":9')) + 1


def test_a_commit_that_is_damaged_is_not_rewound_to(past, job):
    (Commits(job.store).folder / "t1-0000000001-g1" / "dense.safetensors").unlink()
    with pytest.raises(CommitDamaged, match="t1-0000000001-g1: dense.safetensors cannot be read"):
        rewind_job(job, "1")
    assert newest_generation(job.store / "log") == 1


def test_a_skip_says_what_is_gone_past_and_which_passes_are_withdrawn(past, job):
    wanted = SkippedRange("a", 250, 260)
    assert list(format_skipped(wanted, skip_job(job, wanted, "half a line"))) == [
        "a: 10 positions are skipped, 250-260; the next run continues after them",
        "void passes, to be planned again without them: 3",
    ]


def test_a_skip_without_a_reason_is_refused(past, job):
    with pytest.raises(HeadraceError, match="--reason is empty"):
        skip_job(job, SkippedRange("a", 250, 260), " ")
    assert newest_generation(job.store / "log") == 1


def test_a_job_that_runs_is_not_steered(past, job):
    with locked(job.store / "lock", Deadline.after(5)):
        for steer in (lambda: rewind_job(job, "1"), lambda: skip_job(job, SkippedRange("a", 250, 260), "x")):
            with pytest.raises(SpecError, match="is in use by a run that has not ended; this is possible only while"):
                steer()
    assert newest_generation(job.store / "log") == 1


def test_a_store_of_another_job_is_not_steered(past, job, tmp_path):
    with pytest.raises(SpecError, match="holds a run of job 'news', not of 'olds'"):
        rewind_job(job_in(tmp_path, "name=olds"), "1")
