"""A job that follows a file, so that a test says when there is something to train, and one that is not disturbed."""

import time
from pathlib import Path

from headrace.deadline import Deadline
from headrace.rpc.job_client import JobClient
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.integration.running_job import RunningJob
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

PASS_EVENTS = 100
FOLLOW = {"sources.lines.follow": True, "sources.lines.poll": "10ms"}


def by_count(spec: str) -> str:
    """The spec of a job whose passes have PASS_EVENTS events each."""
    return changed(spec, {"passes.max_events": PASS_EVENTS, "passes.cut": "count"})


SPEC_BY_COUNT = by_count(SPEC)


class FollowedJob:
    """A job in `folder`, its store in `folder`/store; it has the lines of no pass yet."""

    def __init__(self, folder: Path, num_passes: int, spec: str = SPEC_BY_COUNT) -> None:
        self.folder, self._spec = folder, spec
        self.spec = write_job(folder, 1, num_passes * PASS_EVENTS, spec)
        self._stream = folder / "part-0.txt"
        self._lines = self._stream.read_text().splitlines(keepends=True)
        self.num_passes = num_passes

    def undisturbed(self) -> dict:
        """The closes of a run over all lines that nothing happens to."""
        ran = headrace(self.spec, store="undisturbed")
        assert ran.code == 0, ran.output
        return closes(self.folder / "undisturbed")

    def start(self, *settings: str) -> RunningJob:
        """Follow the file."""
        self.follow()
        return RunningJob(self.spec, self.folder, *settings)

    def follow(self) -> None:
        """The spec follows the file from now on, and nothing has arrived, unless some has before."""
        self.spec.write_text(changed(self._spec, FOLLOW))
        if self._stream.stat().st_size == sum(map(len, self._lines)):
            self._stream.write_text("")

    def arrive(self, up_to_pass: int) -> None:
        """The events of the passes up to this one are there."""
        begin = self._stream.read_text().count("\n")
        with self._stream.open("a") as stream:
            stream.write("".join(self._lines[begin : up_to_pass * PASS_EVENTS]))


def closes(store: Path) -> dict:
    """What the log says of each closed pass."""
    return {number: record.body for number, record in JobHistory.of(read(store / "log")).closes.items()}


def status_of(job: RunningJob) -> dict:
    """What its rank 0 says now."""
    with JobClient(job.store).rank0() as client:
        return client.status(Deadline.after(10))


def until(job: RunningJob, true_of, what: str) -> dict:
    """Ask its rank 0 until `true_of` its status."""
    deadline = Deadline.after(40)
    while not true_of(status := status_of(job)):
        deadline.check(what)
        time.sleep(0.05)
    return status
