"""The commands about a job's past, on real jobs: what they say is so, and the next run does what they wrote."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.trainer.checkpoint.commits import Commits, order_of
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.journal.log_file import line_of, listed
from headrace.trainer.journal.records import PassClose
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import headrace, write_job

OFTEN = ("commit.every_passes=1", "commit.keep=100", "passes.max_events=100")


@dataclass(frozen=True)
class Ran:
    """A job that ran, and its store."""

    job: Path
    store: Path

    def say(self, command, *words, code=0):
        """`headrace COMMAND JOB WORDS`; what it prints, its standard error at the end."""
        line = [sys.executable, "-m", "headrace.service", *command.split(), str(self.job), *map(str, words)]
        line += ["--set", f"store.path={self.store}"]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def run(self, *settings):
        """`headrace run`; the report."""
        ended = headrace(self.job, *settings, store=str(self.store))
        assert ended.code == 0, ended.output
        return ended.report

    @property
    def history(self):
        return JobHistory.of(read(self.store / "log"))

    @property
    def names(self):
        return Commits(self.store).names()

    @property
    def early(self):
        """A commit from before the end."""
        return next(name for name in self.names if order_of(name)[1] < self.history.closed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job that ran to the end of its stream, with a commit after most of its passes; and its report."""
    folder = tmp_path_factory.mktemp("past")
    ran = Ran(write_job(folder), folder / "store")
    return ran, ran.run(*OFTEN)


@pytest.fixture
def copied(whole, tmp_path):
    """The same with a copy of its store, to change; the stream's files are the very same."""
    shutil.copytree(whole[0].store, tmp_path / "store")
    return Ran(whole[0].job, tmp_path / "store")


@pytest.mark.long
def test_log_and_commits_tell_of_every_pass_and_all_is_sound(whole):
    ran, report = whole
    lines = ran.say("log").splitlines()
    assert len(lines) == len(read(ran.store / "log"))
    assert sum(" close " in line for line in lines) == report["passes"] == ran.history.closed
    entries = json.loads(ran.say("commits list", "--json"))
    assert [entry["name"] for entry in entries] == ran.names
    assert [entry["name"] for entry in entries if entry["next"]] == ran.names[-1:]
    assert ran.say("commits verify").count(": sound; ") == len(ran.names)


@pytest.mark.long
def test_a_rerun_gives_the_same_closes_from_a_commit_and_from_the_start(whole):
    ran, report = whole
    begin = order_of(ran.early)[1]
    passes = report["passes"] - begin
    assert f"{passes} of {passes} passes are identical" in ran.say("rerun", "--from", begin)
    assert ran.say("rerun", "--from", 0).count(": identical") == report["passes"]
    assert not list((ran.store / "reruns").iterdir())
    assert not list((ran.store / "holds").iterdir())


@pytest.mark.slow
def test_a_rerun_tells_which_pass_came_out_otherwise_and_keeps_its_store(copied):
    number = order_of(copied.early)[1] + 1
    (path,) = listed(copied.store / "log")
    lines = [line_of(record.number, other_digest(record.content, number)) for record in read(path.parent)]
    path.write_bytes(b"".join(lines))
    said = copied.say("rerun", "--from", copied.early, code=1)
    assert f"pass {number}: 100 events: digests differ in dense" in said
    assert f"pass {number + 1}: 100 events: identical" in said
    assert (copied.store / "reruns" / "1" / "report.json").exists()


def other_digest(content, number):
    """A record's content; of the close of that pass with another digest."""
    if isinstance(content, PassClose) and content.number == number:
        return replace(content, digests={**content.digests, "dense": "0" * 64})
    return content


@pytest.mark.long
def test_after_a_rewind_the_stream_is_trained_again_as_new_passes(copied, whole):
    _, before = whole
    commit, last = copied.early, copied.names[-1]
    said = copied.say("rewind", "--to", commit)
    assert f"timeline t2 begins at commit {commit}" in said
    assert f"up to commit {last}" in said
    after = copied.run(*OFTEN)
    for what in ("events", "samples", "positions", "passes", "digest"):  # the stream is bounded: cut as before
        assert after[what] == before[what]
    now = copied.history
    assert (now.timeline, now.base) == ("t2", commit)
    assert all(close.number > now.plans[number].number for number, close in now.closes.items())
    assert last in copied.names, "what was left behind can be come back to"
    copied.say("rewind", "--to", last)
    assert (copied.history.timeline, copied.history.closed) == ("t3", before["passes"])


def test_a_damaged_commit_is_no_place_to_rewind_to(copied):
    commit = copied.early
    (copied.store / "commits" / commit / "dense.safetensors").write_bytes(b"")
    assert f"error: {commit}: dense.safetensors has 0 bytes" in copied.say("rewind", "--to", commit, code=1)
    assert copied.history.timeline == "t1"


@pytest.mark.slow
def test_a_bad_range_is_gone_past_and_every_other_event_is_trained(tmp_path):
    ran = Ran(write_job(tmp_path, num_parts=2, num_lines=300), tmp_path / "store")
    lines = (tmp_path / "part-0.txt").read_text().splitlines()
    lines[120] = "BAD"
    (tmp_path / "part-0.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "pipe.py").write_text(
        "import sys\nt = sys.stdin.read()\n'BAD' in t and sys.exit('bad')\nprint(t, end='')"
    )
    settings = ('pipe.command=["python", "pipe.py"]', "pipe.tries=1", "passes.max_events=100")
    stopped = headrace(ran.job, *settings)
    assert stopped.code == 1
    assert "part-0.txt" in stopped.output
    said = ran.say("skip", "part-0.txt", 120, 121, "--reason", "half a line")
    assert "void passes" in said
    assert "skip: part-0.txt 120-121: half a line" in ran.say("log")
    assert ran.run(*settings)["events"] == 300 + 293 - 1
    assert "part-0.txt 120-121" in ran.say("commits show", order_of(ran.names[-1])[1])
    assert "is already trained or skipped" in ran.say("skip", "part-0.txt", 120, 121, "--reason", "x", code=1)


@pytest.mark.slow
def test_a_running_job_commits_when_asked_and_is_not_steered(tmp_path):
    ran = Ran(write_job(tmp_path), tmp_path / "store")
    running = RunningJob(ran.job, tmp_path, "sources.lines.follow=true", "commit.every=1h", "passes.wait=100ms")
    try:
        running.until_events(1000)
        assert ran.names == []
        name = ran.say("commit").strip()
        assert ran.names == [name]
        for words in (["rewind", "--to", name], ["commits prune"]):
            refused = ran.say(*words, code=2)
            assert "is in use by a run that has not ended; this is possible only while it is stopped" in refused
        assert "not verified" in ran.say("commits list")
    finally:
        running.kill()
    assert ran.history.timeline == "t1"
