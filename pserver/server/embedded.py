"""The one shard inside a trainer's process, without messages: the same kernels in the same order as in a process."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.deadline import Deadline
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.config import ShardProcess
from headrace.pserver.consistency.policy import policy_of
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.histories import Answers, Questions
from headrace.pserver.protocol.joins import JoinAnswers, JoinEvents
from headrace.pserver.protocol.shard_command import ShardCommand
from headrace.pserver.protocol.shards import (
    F32,
    Floats,
    Gradients,
    Keys,
    Prepared,
    Result,
    StepScale,
)
from headrace.pserver.protocol.wire import rounded_gradients, rounded_rows, wires_of
from headrace.pserver.rows.placed_rows import PlacedMaker
from headrace.pserver.server.commands import ClosePass, OpenPass, Recall, SendJoinEvents
from headrace.pserver.server.pass_state import CallVerdict, PassState
from headrace.pserver.server.pushes import Push, ResolvedBatch
from headrace.pserver.server.shard import NONE_PLACED, Shard
from headrace.pserver.server.shard_host import ShardHost
from headrace.rpc.tls_listener import TlsEndpoint
from headrace.traffic import Links


class EmbeddedShards:
    """Implements pserver.protocol.shards.Shards for a job with one trainer.

    One thread calls `prepare`, one `recall` and `join`, one writes and settles snapshots, one makes the other calls.
    """

    def __init__(
        self,
        config: ShardProcess,
        num_threads: int = 1,
        feed_at: TlsEndpoint | None = None,
        placed: Mapping[str, PlacedMaker] = NONE_PLACED,
    ) -> None:
        """`feed_at`: where the live feed is served, if not at loopback. Rows and gradients are rounded as if they
        travelled. `placed`: tables whose rows learn on a device of this process, and their slabs."""
        self._pool = ThreadPoolExecutor(num_threads - 1, thread_name_prefix="rows") if num_threads > 1 else None
        self._shard = Shard(config, self._pool, placed)
        self._wires = wires_of(config.tables, config.wire)
        self._ledger = PassState(1, policy_of(config.mode, merge=config.merge, max_ahead=config.max_ahead))
        self._host = ShardHost(self._shard, self._ledger, lambda: feed_at)
        self._predicted: ResolvedBatch | None = None
        """The last pulled batch that is only predicted, so that no exchange releases it."""

    def open_pass(self, pass_number: int, deadline: Deadline, samples: int = 0) -> None:
        self.call(OpenPass(pass_number, samples), deadline)

    def split(self, slices: Keys, slices_each: int, *, rows_first: bool) -> None:
        """There are no messages."""

    def await_slices(self, num_slices: int) -> None:
        """All are here."""

    def prepare(self, tables: Mapping[str, Keys], *, learn: bool) -> ResolvedBatch:
        return self._shard.resolve(tables, learn=learn)

    def pull(self, batch: Prepared, deadline: Deadline) -> dict[str, Floats]:
        mine, before = _own(batch), self._predicted
        if before is not None and before is not mine:
            self._shard.release(before)
        self._predicted = None if mine.learn else mine
        return self._rows(mine)

    def look(self, tables: Mapping[str, Keys], deadline: Deadline) -> dict[str, F32]:
        batch = self._shard.resolve(tables, learn=False)
        try:
            return self._host_rows(batch)
        finally:
            self._shard.release(batch)

    def ask_early(self, step: int, batch: Prepared | None, following: Prepared | None, deadline: Deadline) -> None:
        """Nothing travels."""

    def exchange(
        self,
        step: int,
        batch: Prepared | None,
        gradients: Mapping[str, Gradients] | None,
        following: Prepared | None,
        scale: StepScale,
        deadline: Deadline,
    ) -> dict[str, Floats] | None:
        push = None
        if batch is not None and gradients:
            push = Push(_own(batch), rounded_gradients(gradients, self._wires), scale.batch_samples)
            self._shard.check(push)
        ledger = self._ledger
        if ledger.push(ledger.pass_number, step, rank=0) is CallVerdict.ACT:
            if push is not None:
                self._shard.apply([push], ledger.pass_number)
            self._shard.count(scale.batch_samples)
            failpoint(Failpoint.PARTLY_PUSHED)
            ledger.steps.applied()
            if batch is not None:
                self._shard.release(_own(batch))
        return None if following is None else self._rows(_own(following))

    def _rows(self, batch: ResolvedBatch) -> dict[str, Floats]:
        return {**self._host_rows(batch), **self._shard.placed(batch)}

    def _host_rows(self, batch: ResolvedBatch) -> dict[str, F32]:
        return rounded_rows(self._shard.rows(batch), self._wires)

    def unanswered(self) -> Sequence[int]:
        """An embedded shard always answers."""
        return ()

    def recall(self, pass_number: int, questions: Questions, deadline: Deadline) -> Answers:
        return self.call(Recall(pass_number, questions), deadline)

    def join(self, events: JoinEvents, deadline: Deadline) -> JoinAnswers:
        return self.call(SendJoinEvents(events), deadline)

    def close_pass(self, day: int, deadline: Deadline) -> dict[str, str]:
        return self.call(ClosePass(self._ledger.pass_number, day), deadline)

    def call(self, command: ShardCommand[Any, Result], deadline: Deadline) -> Result:
        return command.combine([self._host.run(command, 0, deadline)])

    def links(self) -> Links:
        return {}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._shard.close()


def _own(batch: Prepared) -> ResolvedBatch:
    if not isinstance(batch, ResolvedBatch):
        raise InvalidShardCall("the batch was prepared by other shards than these")
    return batch
