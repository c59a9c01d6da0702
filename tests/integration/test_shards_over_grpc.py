"""Shards as servers and processes: authorization, and ranks or messages that are late, gone or too large."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded
from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall, MessageTooLarge, ShardUnavailable, StaleGeneration, StepTimedOut
from headrace.pserver.protocol.shards import StepScale
from headrace.pserver.server.commands import (
    CountRows,
    DigestRows,
    RestoreCommit,
    SettleSnapshot,
    TakeSnapshot,
    WriteSnapshot,
)
from headrace.pserver.server.shard_server import ShardServer
from headrace.pserver.server.step_calls import StepCalls
from headrace.pserver.store.rocks_store import RocksRowStore
from headrace.retry import Backoff
from tests.contract import shards_world as w
from tests.fakes.rendezvous import RendezvousHere

DYING = {"partly-pushed": 1, "snapshot-taken": 1, "rows-written": 2, "checkpoint-made": 1}
"""Points that a shard reaches, and how often in a pass of one step or in a commit."""


@pytest.fixture
def server():
    with ShardServer(w.process(0, 1, 1, w.TABLES)) as made:
        yield made


def connect(address, **changes):
    return w.remote([address], **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"secret": "another"}, InvalidShardCall, "another job"),
        ({"generation": 2}, StaleGeneration, "generation 1 of the job's workers, the caller of 2"),
        ({"world": 2}, InvalidShardCall, r"\(0, 1, 1\) here, the caller expects \(0, 1, 2\)"),
        ({"rank": 1}, InvalidShardCall, "rank 1 of a job with 1 trainers"),
        ({"tables": {"default": TableSection()}}, InvalidShardCall, "other tables or settings"),
    ],
)
def test_an_unauthorized_caller_is_refused(server, changes, error, message):
    with pytest.raises(error, match=message):
        connect(server.address, **changes)


def test_shards_in_the_wrong_order_are_refused():
    with ShardServer(w.process(0, 2, 1, w.TABLES)) as a, ShardServer(w.process(1, 2, 1, w.TABLES)) as b:
        with pytest.raises(InvalidShardCall, match="the caller expects"):
            w.client([b, a], 0, 1)


def test_an_old_generation_is_refused_in_the_middle(server):
    shards = connect(server.address)
    shards.open_pass(1, w.soon())
    shards._me = replace(shards._me, generation=7)
    with pytest.raises(StaleGeneration):
        shards.exchange(0, None, None, None, StepScale(1), w.soon())
    shards.close()


def test_a_rank_whose_wait_times_out_learns_the_missing_ranks():
    with w.job(2, num_ranks=3) as world:
        world.each(lambda rank, shards: shards.open_pass(1, w.soon()))

        def push(rank, shards):
            if rank == 1:
                return None
            with pytest.raises(StepTimedOut, match="step 0 of pass 1 for rank 1") as caught:
                shards.exchange(0, None, None, None, StepScale(1), Deadline.after(2))
            return caught.value.exit_code

        assert world.each(push) == [75, None, 75]


def test_a_push_in_time_after_a_time_out_still_counts_once():
    with w.job(2, num_ranks=2) as world:
        batches = [[{"default": w.keys(1, 2)}], [{"default": w.keys(2, 3)}]]
        late, early = world.ranks
        early.open_pass(1, w.soon())
        prepared = early.prepare(batches[1][0], learn=True)
        early.pull(prepared, w.soon())
        push = {"default": w.push_of(batches[1][0]["default"], 5, 1000)}
        with pytest.raises(StepTimedOut):
            early.exchange(0, prepared, push, None, StepScale(64), Deadline.after(0.3))
        again = threading.Thread(target=early.exchange, args=(0, prepared, push, None, StepScale(64), w.soon()))
        again.start()
        late.open_pass(1, w.soon())
        mine = late.prepare(batches[0][0], learn=True)
        late.exchange(0, mine, {"default": w.push_of(batches[0][0]["default"], 5, 0)}, None, StepScale(64), w.soon())
        again.join()
        digest = late.call(DigestRows(), w.soon())
    with w.job(1, num_ranks=2) as world:
        world.each(lambda rank, shards: w.train(shards, 1, batches[rank], seed=rank, steps=1))
        assert world.one.call(DigestRows(), w.soon())["default"] != 0
        # The passes of `train` are closed, which sets the day; the rows' day is 0 in both.
        assert world.one.call(DigestRows(), w.soon()) == digest


def test_a_close_waits_for_every_rank():
    with w.job(2, num_ranks=2) as world:
        world.each(lambda rank, shards: shards.open_pass(1, w.soon()))
        with pytest.raises(StepTimedOut, match="the close of pass 1 for rank 1"):
            world.one.close_pass(0, Deadline.after(2))
        closes = world.each(lambda rank, shards: shards.close_pass(0, w.soon()))
        assert closes[0] == closes[1]


def test_ranks_that_disagree_are_refused():
    with w.job(1, num_ranks=2) as world:
        world.each(lambda rank, shards: shards.open_pass(1, w.soon()))
        one = {"default": w.keys(1)}
        outcomes = []

        def push(rank, shards):
            prepared = shards.prepare(one, learn=True)
            try:
                shards.exchange(
                    0, prepared, {"default": w.push_of(one["default"], 5, 1)}, None, StepScale(rank), Deadline.after(1)
                )
            except (InvalidShardCall, StepTimedOut) as error:
                outcomes.append(type(error))

        world.each(push)
        assert InvalidShardCall in outcomes and len(outcomes) == 2
        assert world.one.call(DigestRows(), w.soon())["default"] == 0


def test_a_message_too_large_names_the_batch_size():
    with w.job(1, max_message=64 << 10) as world:
        world.one.open_pass(1, w.soon())
        with pytest.raises(MessageTooLarge, match=r"lower train.batch_size"):
            world.one.pull(world.one.prepare({"default": w.keys(*range(20_000))}, learn=True), w.soon())


def test_a_batch_that_was_never_announced_is_refused(server):
    shards = connect(server.address)
    shards.open_pass(1, w.soon())
    with pytest.raises(InvalidShardCall, match="prepared by other shards"):
        shards.pull(object(), w.soon())
    shards.close()


def test_more_batches_ahead_than_a_shard_keeps_are_refused(server, monkeypatch):
    monkeypatch.setattr("headrace.pserver.server.step_calls.MAX_BATCHES_AHEAD", 3)
    shards = connect(server.address)
    shards.open_pass(1, w.soon())
    batches = [shards.prepare({"default": w.keys(n)}, learn=True) for n in range(4)]
    shards.pull(batches[0], w.soon())
    with pytest.raises(InvalidShardCall, match="announced 3 batches and used none"):
        shards.pull(batches[3], w.soon())
    shards.pull(batches[2], w.soon())
    with pytest.raises(InvalidShardCall, match="announced 3 batches and used none"):
        shards.pull(shards.prepare({"default": w.keys(8)}, learn=True), w.soon())  # the others may still be pushed
    shards.exchange(0, batches[2], {"default": w.push_of(w.keys(2), 5, 0)}, None, StepScale(64), w.soon())
    shards.pull(shards.prepare({"default": w.keys(9)}, learn=True), w.soon())
    shards.close()


def test_a_shard_that_is_gone_is_named_within_the_deadline(monkeypatch):
    monkeypatch.setattr("headrace.pserver.client.connection.BACKOFF", Backoff((0.001, 0.002, 0.004, 0.008, 0.016)))
    server = ShardServer(w.process(0, 1, 1, w.TABLES))
    shards = connect(server.address)
    server.close()
    with pytest.raises(ShardUnavailable, match=r"shard 0 at .* did not answer in 6 attempts.* is its process alive"):
        shards.open_pass(1, w.soon())
    shards.close()


def test_a_call_without_an_answer_is_retried_and_counts_once(server, monkeypatch):
    """The answer of the first exchange is lost; its repeat gets the same answer."""
    shards = connect(server.address)
    shards.open_pass(1, w.soon())
    first, second = (shards.prepare({"default": w.keys(*signs)}, learn=True) for signs in ([1, 2], [2, 3]))
    pushed, push = [], StepCalls.push
    monkeypatch.setattr(
        StepCalls, "push", lambda self, request, *more: pushed.append(request) or push(self, request, *more)
    )
    steps, answers = shards._steps, []
    take = steps._take

    def lose_the_first_answer(link, message):
        answers.append([bytes(part) for part in message])
        if len(answers) == 1:
            steps._lose(link, "lost")
        else:
            take(link, message)

    monkeypatch.setattr(steps, "_take", lose_the_first_answer)
    shards.exchange(0, first, {"default": w.push_of(w.keys(1, 2), 5, 0)}, second, StepScale(64), w.soon())
    assert len(pushed) == 2 and pushed[0].request == pushed[1].request and answers[0] == answers[1]
    shards.close_pass(0, w.soon())
    digest = shards.call(DigestRows(), w.soon())
    shards.close()
    with w.job(0) as plain:
        w.train(plain.one, 1, [{"default": w.keys(1, 2)}], seed=0, steps=1)
        assert plain.one.call(DigestRows(), w.soon()) == digest


def test_only_rank_0_commits_and_restores(tmp_path):
    with w.job(1, num_ranks=2, live=tmp_path / "live") as world:
        other = world.ranks[1]
        for call in (
            lambda: other.call(RestoreCommit(tmp_path, [], 0), w.soon()),
            lambda: other.call(TakeSnapshot(0), w.soon()),
            lambda: other.call(WriteSnapshot(tmp_path), w.soon()),
            lambda: other.call(SettleSnapshot(True), w.soon()),
        ):
            with pytest.raises(InvalidShardCall, match="rank 1 makes a call that only rank 0 may make"):
                call()
        assert not (tmp_path / "live").exists()
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        assert w.commit(world.one, tmp_path / "commit", 0)


def test_a_settle_whose_wait_for_a_write_times_out_may_be_repeated(tmp_path, monkeypatch):
    may_write, write = threading.Event(), RocksRowStore.write

    def slowly(*args):
        assert may_write.wait(20)
        write(*args)

    monkeypatch.setattr(RocksRowStore, "write", slowly)
    with w.job(1, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        w.train(world.one, 1, [{"default": w.keys(1, 2)}], seed=1, steps=1)
        world.one.call(TakeSnapshot(1), w.soon())
        (tmp_path / "commit").mkdir()
        with pytest.raises(StepTimedOut):
            world.one.call(WriteSnapshot(tmp_path / "commit"), Deadline.after(0.5))
        with pytest.raises(StepTimedOut):
            world.one.call(SettleSnapshot(False), Deadline.after(0.5))
        may_write.set()
        world.one.call(SettleSnapshot(False), w.soon())
        assert list((tmp_path / "commit").iterdir()) == []  # the late write has cleaned up behind itself
        assert world.one.call(TakeSnapshot(1), w.soon()) == 2


# --- processes


class Process:
    """`python -m headrace.pserver`, with a pipe as its standard input."""

    def __init__(self, folder: Path, **changes) -> None:
        self.rendezvous = RendezvousHere(folder, "shard-0")
        self.socket = folder / "shard-0.socket"
        where = {"socket": self.socket, "launcher": self.rendezvous.contact("shard-0")}
        config = w.process(0, 1, 1, w.TABLES, **where).model_dump(mode="json") | changes
        (folder / "config.json").write_text(json.dumps(config))
        self.child = subprocess.Popen(
            [sys.executable, "-m", "headrace.pserver", "--config", str(folder / "config.json")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def address(self) -> str:
        return self.rendezvous.address("shard-0", self.alive)

    def alive(self) -> None:
        assert self.child.poll() is None, self.child.stderr.read()

    def end(self) -> tuple[int, str]:
        self.child.wait(20)  # before its standard input closes, which would kill it
        _, said = self.child.communicate(timeout=20)
        return self.child.returncode, said


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(**changes):
        started.append(Process(tmp_path, **changes))
        return started[-1]

    yield begin
    for process in started:
        if process.child.poll() is None:
            os.killpg(process.child.pid, signal.SIGKILL)
        process.child.communicate()
        process.rendezvous.close()


def test_a_process_serves_and_ends_with_0_on_sigterm(start):
    process = start()
    shards = connect(process.address())
    _, close = w.train(shards, 1, [{"default": w.keys(1, 2)}], seed=1, steps=1)
    assert list(close) == ["0"] and shards.call(CountRows(), w.soon()).tables["default"].num_rows == 2
    process.child.send_signal(signal.SIGTERM)
    code, said = process.end()
    assert code == 0 and f"shard-0: shard 0 of 1 serves at unix:{process.socket}" in said
    shards.close()


@pytest.mark.parametrize("point", [*DYING, None])
def test_a_commit_survives_a_shard_killed_at_any_point_of_the_next(start, tmp_path, monkeypatch, point):
    """The failpoint is passed once in the first commit, which is complete, and kills the process in the second."""
    monkeypatch.setattr("headrace.pserver.client.connection.BACKOFF", Backoff((0.001, 0.002, 0.004, 0.008, 0.016)))
    faults = [] if point is None else [{"point": point, "hit": 1 + DYING[point]}]
    process = start(live=str(tmp_path / "live-1"), faults=faults)
    shards = connect(process.address())
    shards.call(RestoreCommit(tmp_path, [], 0), w.soon())
    w.train(shards, 1, [{"default": w.keys(1, 2)}], seed=1, steps=1)
    parts = w.commit(shards, tmp_path / "commit-1", 1)
    digest = shards.call(DigestRows(), w.soon())
    try:
        w.train(shards, 2, [{"default": w.keys(2, 3)}], seed=2, steps=1)
        w.commit(shards, tmp_path / "commit-2", 2)
        assert point is None
        os.kill(process.child.pid, signal.SIGKILL)
    except ShardUnavailable:
        assert point is not None
    assert process.child.wait(10) == -signal.SIGKILL
    shards.close()
    with w.job(0, live=tmp_path / "live-2") as world:
        world.one.call(RestoreCommit(tmp_path / "commit-1", parts, 1), w.soon())
        assert world.one.call(DigestRows(), w.soon()) == digest


def test_a_process_that_stops_ends_all_waiting_calls(start):
    process = start(num_ranks=2)
    shards = connect(process.address(), world=2)
    shards.open_pass(1, w.soon())
    failures = []

    def push():
        try:
            shards.exchange(0, None, None, None, StepScale(1), Deadline.after(60))
        except (ShardUnavailable, DeadlineExceeded) as error:
            failures.append(error)

    waiting = threading.Thread(target=push)
    waiting.start()
    process.child.send_signal(signal.SIGTERM)
    assert process.child.wait(10) == 0
    waiting.join(20)
    assert len(failures) == 1
    shards.close()


def test_a_process_ends_when_its_launcher_is_gone(start):
    process = start()
    process.address()
    process.child.stdin.close()
    assert process.child.wait(20) == -signal.SIGKILL
    process.child.stdin = None


def test_a_wrong_config_is_exit_code_2_and_says_which_key(start):
    code, said = start(num_shards=0).end()
    assert code == 2 and "num_shards" in said and "Traceback" not in said


def test_only_the_owner_may_connect(start):
    process = start()
    process.address()
    assert os.stat(process.socket).st_mode & 0o077 == 0


def test_initial_values_are_the_same_in_another_process(start):
    shards = connect(start().address())
    shards.open_pass(1, w.soon())
    theirs = shards.pull(shards.prepare({"default": w.keys(*range(9))}, learn=True), w.soon())
    shards.close()
    with w.job(0) as plain:
        plain.one.open_pass(1, w.soon())
        ours = plain.one.pull(plain.one.prepare({"default": w.keys(*range(9))}, learn=True), w.soon())
    assert np.array_equal(theirs["default"], ours["default"])
