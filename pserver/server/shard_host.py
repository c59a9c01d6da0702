"""One shard as commands find it: its rows, the state of its passes, and the lock of its steps.

It is in a trainer's process (pserver.server.embedded), or in one of its own (pserver.server.shard_server). Commands
come to both through `run`, which holds their gates.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.pserver.consistency.sync import names
from headrace.pserver.errors import InvalidShardCall, StepTimedOut
from headrace.pserver.protocol.shard_command import CommandCall, ShardCommand
from headrace.pserver.protocol.shards import ShardFigures
from headrace.pserver.server.pass_state import PassState
from headrace.pserver.server.shard import Shard
from headrace.pserver.tables.rank_answers import Answer, RankAnswers, Sent
from headrace.rpc.tls_listener import TlsEndpoint

Reply = TypeVar("Reply")

UNBOUNDED = 1 << 62
"""Bytes that no message has."""
ANSWER_S = 0.5
"""Part of a caller's deadline reserved to name the late ranks; at most a quarter of the time left."""


def waiting_s(left_s: float) -> float:
    """How long a call may wait for other ranks, so that its caller still gets an answer."""
    return left_s - min(ANSWER_S, left_s / 4)


class ShardHost:
    """Any thread may call."""

    def __init__(
        self,
        shard: Shard,
        state: PassState,
        feed_at: Callable[[], TlsEndpoint | None],
        number: int | None = None,
        max_message_bytes: int = UNBOUNDED,
    ) -> None:
        """`feed_at`: where the live feed is served, if not at loopback. `number`: of a shard that is a process."""
        self.shard, self.state, self.feed_at, self.number = shard, state, feed_at, number
        self.max_message_bytes = max_message_bytes
        self.turn = threading.Condition()
        """Guards `state` and the rows of steps; notified when pushes were applied, a pass has closed, or all ranks have
        asked for what they wait for."""
        self.opening = threading.Lock()
        """Held while the port of the feed is opened."""
        self.num_taken = 0
        """Rows in the last snapshot."""
        self.close_digest = ""
        """The digest of the last closed pass."""
        self.closed: Callable[[], None] = lambda: None
        """Called when a pass has closed, or a rank has left it, which may allow answers to pushes."""
        self._stopping = False
        self.figures: Callable[[], ShardFigures | None] = lambda: None
        """Returns traffic, waits and refusals of a shard that is a process."""

    def run(self, command: ShardCommand[Reply, Any], rank: int, deadline: Deadline) -> Reply:
        """The reply of this shard. Raises InvalidShardCall for a caller that the gate does not admit."""
        if command.gate.only_rank_0 and rank != 0:
            raise InvalidShardCall(f"rank {rank} makes a call that only rank 0 may make")
        with self.turn if command.gate.between_steps else nullcontext():
            return command.apply(self, CommandCall(rank, deadline))

    def wait(
        self, done: Callable[[], bool], what: str, pass_number: int, deadline: Deadline, missing: Callable[[], str]
    ) -> None:
        """Wait for other ranks, under the lock. Raises StepTimedOut with the `missing` ones, Unavailable."""
        left_s = deadline.left_s()
        over = self.turn.wait_for(lambda: done() or self._stopping, waiting_s(left_s))
        if self._stopping and not done():
            raise Unavailable(f"shard {self.number} is stopping")
        if not over:
            raise StepTimedOut(
                f"shard {self.number} waited {left_s:.1f} s in {what} of pass {pass_number} "
                f"for {missing()}: is that trainer alive, or much slower than the others?"
            )

    def answer(
        self, asked: RankAnswers[Sent, Answer], sent: Sent, pass_number: int, what: str, call: CommandCall
    ) -> Answer:
        """The answer to a rank, once all ranks have asked."""
        rank, ranks = call.rank, self.state.num_ranks

        def is_answered() -> bool:
            self.state.check_open(pass_number, rank)
            return asked.answers(rank) is not None

        with self.turn:
            self.state.check_open(pass_number, rank)
            if asked.ask(rank, sent, ranks):
                self.turn.notify_all()
            self.wait(is_answered, what, pass_number, call.deadline, lambda: f"rank {names(asked.missing(ranks))}")
            answers = asked.answers(rank)
        assert answers is not None, "it was waited for"
        return answers

    def stop(self) -> None:
        """End all waiting calls, since a process ends only after its last call."""
        with self.turn:
            self._stopping = True
            self.turn.notify_all()
