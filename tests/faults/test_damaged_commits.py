"""Damaged commits and logs at a restart: detected and reported; avoided where possible, else refused."""

import json
import shutil
import subprocess

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import MANIFEST, Commits, problems_of
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.faults.test_kills import report, said_by
from tests.integration.stream_job import headrace, write_job

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(300)]
SETTINGS = ("commit={every='600s', every_passes=4, keep=3}", "passes.max_events=16", "train.threads=1")
"""Seven commits: of eight files RocksDB makes one when it has time (pserver.store.rocks_store), and two tests need
files that commits share."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A job whose log is whole, one whose log has lost its beginning, one with a mirror; reports are alike."""
    folder = tmp_path_factory.mktemp("finished")
    write_job(folder, num_lines=150)
    killed = [AtFailpoint(RANK_0, Failpoint.CLOSED, 5)]
    for store, planned, more in (("whole", [], []), ("pruned", killed, []), ("mirrored", killed, mirror(folder))):
        job = load_job(folder / "job.toml", [f"store.path={store}", *SETTINGS, *more])
        assert run(job, Deaths(job.store, iter(planned)), said_by([])).code == 0
    return folder


def mirror(folder):
    return [f"store.mirror='{folder / 'mirror'}'"]


@pytest.fixture
def again(finished, tmp_path):
    """Runs the job in a copy of one of the stores, after some damage; returns its store and the ended run."""

    def runs(store, harm, *settings):
        copy = tmp_path / store
        subprocess.run(["cp", "-a", finished / store, copy], check=True)  # hard links stay such
        harm(copy)
        ended = headrace(finished / "job.toml", *SETTINGS, *settings, store=str(copy))
        return copy, ended

    return runs


def restored(store):
    """The restore operation of the last restart."""
    operations = [
        record.body for record in JobHistory.of(read(store / "log")).operations if record.body["op"] == "restore"
    ]
    return operations[-1]["commit"], operations[-1]["passed_over"]


def newest(store, back=1):
    return Commits(store).read(Commits(store).names()[-back])


def largest(commit):
    return max(commit.files, key=lambda name: commit.files[name].num_bytes)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)  # the same inode: links to it share the harm


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


HARMS = {
    "a truncated file": (lambda commit: cut(commit.folder / largest(commit)), "bytes, not"),
    "a flipped bit": (lambda commit: flip(commit.folder / "dense.safetensors"), "has other bytes"),
    "a missing part": (lambda commit: shutil.rmtree(commit.folder / "shard-0"), "cannot be read"),
    "a damaged manifest": (lambda commit: flip(commit.folder / MANIFEST), "its manifest"),
}


def unshared(commit):
    """Copy every shared file of a commit, so that damage stays in that commit."""
    for name in commit.files:
        content = (commit.folder / name).read_bytes()
        (commit.folder / name).unlink()
        (commit.folder / name).write_bytes(content)
    return commit


def assert_as_before(finished, store, ended):
    assert ended.code == 0, ended.output
    assert report(store) == report(finished / "whole")
    found = json.loads((store / "report.json").read_text())["compared"]
    assert found and not any(differences for _, differences in found), "passes were trained again, and came out alike"
    assert not any(problems_of(commit) for commit in Commits(store).whole())


MORE_HARMS = ("a truncated file", "a damaged manifest")


@pytest.mark.long
@pytest.mark.parametrize(
    "harm", [pytest.param(harm, marks=[pytest.mark.slow] * (harm in MORE_HARMS)) for harm in HARMS]
)
def test_the_newest_sound_commit_is_used_in_place_of_a_damaged_one(finished, again, harm):
    act, words = HARMS[harm]
    damaged, sound = newest(finished / "pruned").name, newest(finished / "pruned", 2).name
    store, ended = again("pruned", lambda store: act(unshared(newest(store))))
    assert_as_before(finished, store, ended)
    name, passed_over = restored(store)
    assert name == sound
    assert list(passed_over) == [damaged] and words in passed_over[damaged]
    assert damaged in ended.output


def shared_file(store):
    """A file that all commits share, by hard links."""
    first = newest(store, 3)
    return next(first.folder / name for name in first.files if (first.folder / name).stat().st_nlink >= 3)


def damage_all(store):
    for name in Commits(store).names():
        cut(Commits(store).folder / name / "dense.safetensors")


@pytest.mark.slow
def test_a_damaged_file_that_all_commits_share_and_a_whole_log_everything_is_trained_again(finished, again):
    store, ended = again("whole", lambda store: flip(shared_file(store)))
    assert_as_before(finished, store, ended)
    name, passed_over = restored(store)
    assert name is None and len(passed_over) == 3
    compared = json.loads((store / "report.json").read_text())["compared"]
    assert len(compared) == report(store)["passes"]


@pytest.mark.slow
def test_no_sound_commit_and_a_log_without_its_beginning_end_the_job_for_good(finished, again):
    store, ended = again("pruned", damage_all)
    assert ended.code == 1
    assert "no commit can be restored, and the log does not reach back to the first pass" in ended.output
    assert "store.mirror" in ended.output and "restarting" not in ended.output
    assert not (store / "report.json").exists()
    assert len(Commits(store).names()) == 3, "what may still be mended is kept"


@pytest.mark.long
def test_damaged_files_come_back_from_the_mirror(finished, again):
    store, ended = again("mirrored", lambda store: flip(shared_file(store)), *mirror(finished))
    assert ended.code == 0, ended.output
    assert report(store) == report(finished / "whole")
    name, passed_over = restored(store)
    assert name == newest(finished / "mirrored").name and not passed_over
    assert "1 damaged files were restored from the mirror" in ended.output
    assert not problems_of(newest(store))


@pytest.mark.long
def test_a_log_damaged_in_its_middle_ends_the_job_for_good(again):
    store, ended = again("whole", lambda store: flip(next((store / "log").glob("*.log"))))
    assert ended.code == 1
    assert "00000001-0001.log" in ended.output and "restarting" not in ended.output
    assert not (store / "log" / "00000002-0001.log").exists(), "nothing is claimed over a damaged log"
