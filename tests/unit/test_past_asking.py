"""A commit on demand: rank 0 of the running job is found, asked, waited for; the one after it is asked again."""

import json
from contextlib import ExitStack

import pytest

from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.rpc.job_client import JobClient, NotRunning
from headrace.rpc.role import serve_role
from headrace.service.history.commit_request import make_commit, request_commit
from tests.fakes.past import Past


class RankZeros:
    """The ranks 0 of one job, generation after generation. A commit asked for is made at once, unless `commits` is
    off."""

    def __init__(self, past: Past, held: ExitStack) -> None:
        self.past, self.store, self._held = past, past.store, held
        self.version, self.committed, self.asked = 2, 0, 0
        self.commits, self.failing = True, None
        self.serving = None

    def run(self, generation: int) -> None:
        """A rank 0 that serves its Role as a launcher has it do."""
        folder = self.store / "workers" / f"g{generation}"
        folder.mkdir(parents=True)
        socket = folder / "trainer-0.socket"
        self.serving = self._held.enter_context(serve_role(self.status, print, "s", socket, self.commit))
        (folder / "rank0.json").write_text(json.dumps({"address": self.serving.address, "secret": "s"}))

    def status(self):
        return {"version": self.version, "commit": {"version": self.committed, "failing": self.failing}}

    def commit(self):
        self.asked += 1
        if self.commits:
            self.past.commit(self.version)
            self.committed = self.version


@pytest.fixture
def rank0s(tmp_path):
    past = Past(tmp_path / "store").begin()
    past.close(1, a=(0, 100))
    past.close(2, a=(100, 200))
    with ExitStack() as held:
        held.callback(past.end)
        held.enter_context(locked(past.store / "lock", Deadline.after(5)))
        yield RankZeros(past, held)


def soon():
    return Deadline.after(20)


def test_a_commit_is_made_of_what_was_closed_when_it_was_asked_for(rank0s):
    rank0s.run(1)
    assert make_commit(rank0s.store, soon()) == "t1-0000000002-g1"
    assert rank0s.asked == 1


def test_the_rank0_of_the_newest_generation_is_asked(rank0s):
    for generation in (2, 10, 9):
        (rank0s.store / "workers" / f"g{generation}").mkdir(parents=True)
    with pytest.raises(Unavailable, match="rank 0 of the run in .* is starting"), JobClient(rank0s.store).rank0():
        pass
    rank0s.run(11)
    with JobClient(rank0s.store).rank0() as client:
        assert request_commit(client) == 2


def test_a_rank0_that_has_closed_nothing_is_asked_for_the_first_version(rank0s):
    rank0s.run(1)
    rank0s.version, rank0s.commits = 0, False
    with JobClient(rank0s.store).rank0() as client:
        assert request_commit(client) == 1


def test_the_rank0_that_follows_one_that_dies_is_asked_again(rank0s, monkeypatch):
    rank0s.run(1)
    rank0s.commits = False
    first = rank0s.serving

    def the_job_is_restarted(_seconds):
        if rank0s.serving is first:
            assert rank0s.asked == 1
            first.close()
            rank0s.run(2)
            rank0s.commits = True

    monkeypatch.setattr("headrace.service.history.commit_request.time.sleep", the_job_is_restarted)
    assert make_commit(rank0s.store, soon()) == "t1-0000000002-g1"
    assert rank0s.asked == 2


def test_a_commit_that_fails_is_told_with_its_reason(rank0s):
    rank0s.run(1)
    rank0s.commits, rank0s.failing = False, "no room on the disk"
    with pytest.raises(
        HeadraceError, match="the commit failed; the job continues and will try again: no room on the disk"
    ):
        make_commit(rank0s.store, soon())


def test_a_commit_that_does_not_come_ends_with_the_deadline(rank0s):
    rank0s.run(1)
    rank0s.commits = False
    with pytest.raises(DeadlineExceeded, match="out of time while waiting for version 2"):
        make_commit(rank0s.store, Deadline.after(0.3))


def test_where_nothing_runs_there_is_nobody_to_ask(tmp_path):
    past = Past(tmp_path / "store").begin()
    past.end()
    (past.store / "workers" / "g1").mkdir(parents=True)  # of a launcher that was killed
    with pytest.raises(NotRunning, match="no run is active"):
        make_commit(past.store, soon())
