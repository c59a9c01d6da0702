"""One shard as commands find it: its rows, the state of its passes, and the lock of its steps.

It is in a trainer's process (pserver.server.embedded), or in one of its own (pserver.server.shard_server). Commands
come to both through `run`, which holds their gates.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from headrace.deadline import Deadline
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.shard_command import CommandCall, ShardCommand
from headrace.pserver.protocol.shards import ShardFigures
from headrace.pserver.server.pass_state import PassState
from headrace.pserver.server.shard import Shard
from headrace.rpc.tls_listener import TlsEndpoint

Reply = TypeVar("Reply")


class ShardHost:
    """See module docstring. Any thread may call."""

    def __init__(
        self, shard: Shard, state: PassState, feed_at: Callable[[], TlsEndpoint | None], number: int | None = None
    ) -> None:
        """`feed_at`: where the live feed is served, if not at loopback. `number`: of a shard that is a process."""
        self.shard, self.state, self.feed_at, self.number = shard, state, feed_at, number
        self.turn = threading.Condition()
        """Guards `state` and the rows of steps; notified when pushes were applied, a pass has closed, or all ranks have
        asked for what they wait for."""
        self.opening = threading.Lock()
        """Held while the port of the feed is opened."""
        self.num_taken = 0
        """Rows in the last snapshot."""
        self.figures: Callable[[], ShardFigures | None] = lambda: None
        """Returns traffic, waits and refusals of a shard that is a process."""

    def run(self, command: ShardCommand[Reply, Any], rank: int, deadline: Deadline) -> Reply:
        """The reply of this shard. Raises InvalidShardCall for a caller that the gate does not admit."""
        if command.gate.only_rank_0 and rank != 0:
            raise InvalidShardCall(f"rank {rank} makes a call that only rank 0 may make")
        with self.turn if command.gate.between_steps else nullcontext():
            return command.apply(self, CommandCall(rank, deadline))
