"""The calls of every step on one shard: batches announced ahead, rows pulled, pushes held until they are due.

pserver.server.pass_state decides what a push means; pserver.server.shard changes rows. pserver.server.data_server waits
and answers.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.config import ShardProcess
from headrace.pserver.consistency.sync import names
from headrace.pserver.errors import InvalidShardCall, StaleGeneration
from headrace.pserver.protocol.frames import DataCall, DataRequest
from headrace.pserver.protocol.parts import WHOLE, Part
from headrace.pserver.protocol.shards import F32, Gradients, Keys
from headrace.pserver.protocol.wire import wires_of
from headrace.pserver.rows.arrays import Empty
from headrace.pserver.rows.placed_rows import PlacedGradients
from headrace.pserver.server.early_rows import EarlyRows
from headrace.pserver.server.pass_state import CallVerdict, PassState
from headrace.pserver.server.pushes import NONE_SENT, Push, ResolvedBatch, as_one_step
from headrace.pserver.server.shard import Shard
from headrace.pserver.server.step_floats import ComingFloats, StepFloats
from headrace.pserver.tables.placed_table import PlacedTable
from headrace.timeline import stepped

MAX_BATCHES_AHEAD = 2048
"""Most batches that a rank may have announced and not used; one more is refused."""


class StepCalls:
    """Any thread may call `announce`, one makes the other calls."""

    def __init__(
        self,
        config: ShardProcess,
        shard: Shard,
        ledger: PassState,
        turn: threading.Condition,
        floats: StepFloats | None = None,
    ) -> None:
        """`turn` guards `ledger` and the rows of steps; it is notified when pushes were applied. `floats`: where rows
        are on devices."""
        self._floats = floats
        self._placed = {name: table for name, table in shard.tables.items() if isinstance(table, PlacedTable)}
        """The tables whose rows are on a device."""
        widths = {name: table.rows.num_weights for name, table in shard.tables.items()}
        self.config, self.widths = config, widths | dict.fromkeys(self._placed, 0)
        """Floats of a gradient as it comes."""
        self.wires = wires_of(config.tables, config.wire)
        self.announces_at_once = config.num_ranks == 1 and all(t.memory is None for t in config.tables.values())
        """Whether an announcement waits for nothing, and keeps no other rank waiting."""
        self._shard, self._ledger, self._turn = shard, ledger, turn
        self._pushes: dict[tuple[int, int, int], Push | None] = {}  # by part, step and rank: accepted, not applied yet
        self._samples: dict[tuple[int, int, int], int] = {}  # of these steps, also of those without gradients
        self._early, self._early_pass = EarlyRows(config.num_ranks), 0
        self._announcing = threading.Lock()
        self._batches: dict[int, dict[int, ResolvedBatch]] = {rank: {} for rank in range(config.num_ranks)}
        self._pushed = dict.fromkeys(range(config.num_ranks), -1)
        """By rank: the last batch that it pushed."""

    def announce(self, request: DataRequest, tables: Mapping[str, Keys]) -> None:
        """Find or reserve the rows of a later batch."""
        batch = self._shard.resolve(tables, learn=request.learn)
        assert request.batch is not None, "checked when it came"
        with self._announcing:
            mine = self._batches[request.rank]
            if request.batch in mine:  # repeated
                self._shard.release(batch)
            elif len(mine) >= MAX_BATCHES_AHEAD:
                self._shard.release(batch)
                raise InvalidShardCall(f"rank {request.rank} announced {len(mine)} batches and used none of them")
            else:
                mine[request.batch] = batch

    def pull(self, pass_number: int, rank: int, number: int, empty: Empty) -> dict[str, F32]:
        """The rows of an announced batch as they are now, in arrays made by `empty`.

        Batches pulled before, which the rank has yet to push, are kept.
        """
        self._release_before(rank, number, pulled=True)
        rows = self.rows(rank, number, empty)
        if self._floats is None:
            return rows
        found = self._shard.placed(self._batch(rank, number))
        placed = {name: self._placed[name].to_host(floats_UD) for name, floats_UD in found.items()}
        self._floats.pulled(pass_number, rank, {name: len(rows_UD) for name, rows_UD in placed.items()})
        return rows | placed

    def rows(self, rank: int, number: int, empty: Empty, part: Part = WHOLE) -> dict[str, F32]:
        """The rows of a part of an announced batch, in arrays made by `empty`.

        The policy changes no row of a rank's next step before its next push, so reading needs no lock.
        """
        without = NONE_SENT if part.number else self._early.of(rank, number)
        return self._shard.rows(self._batch(rank, number), empty, part, without)

    def leave_rows(self, request: DataRequest) -> None:
        """Where rows are on a device: leave those of a rank's next batch to the trainer of this process."""
        if self._floats is not None:
            wanted = request.following
            rows = {} if wanted is None else self._shard.placed(self._batch(request.rank, wanted))
            self._floats.leave_rows(request.pass_number, request.step, request.rank, rows)

    def ask_early(self, request: DataRequest) -> None:
        """A rank asks for the early rows of its next batch."""
        if self._early_pass != request.pass_number:
            self._early, self._early_pass = EarlyRows(self.config.num_ranks), request.pass_number
        learnt, wanted = (
            None if number is None else self._batch(request.rank, number)
            for number in (request.batch, request.following)
        )
        self._early.ask(request.step, request.rank, learnt, wanted, request.following)

    def early_rows(self, rank: int, number: int | None) -> tuple[dict[str, F32], dict[str, NDArray[np.bool_]]]:
        """The early rows of a batch by table, and which they are."""
        masks = self._early.of(rank, number)
        return ({}, {}) if number is None else (self._shard.early_rows(self._batch(rank, number), masks), masks)

    def push(self, request: DataRequest, gradients: Mapping[str, Gradients]) -> CallVerdict:
        """Accept the push of a rank; WAIT unless the policy allows an answer. ACT: others may be answered, too.

        Arrays beside the message are not read after this call.
        """
        push = None
        if request.batch is not None:
            batch = self._batch(request.rank, request.batch)
            if not request.part.number:  # all parts of the step before are answered
                self._release_before(request.rank, request.batch)
                self._pushed[request.rank] = request.batch
            if gradients:
                push = Push(batch, self._all(request, gradients), request.batch_samples, request.part)
                self._shard.check(push)
        with self._turn:
            return self._take(request, push)

    def _all(self, request: DataRequest, gradients: Mapping[str, Gradients]) -> dict[str, Gradients]:
        """The gradients of a push, of which those on a device come another way."""
        found = dict(gradients)
        for name, table in self._placed.items():
            if (push := gradients.get(name)) is not None:
                assert self._floats is not None, "rows are on a device"
                take = partial(self._floats.gradients, request.pass_number, request.step, request.rank, name)
                coming = ComingFloats((len(push.show_U), table.rows.num_weights), take)
                found[name] = PlacedGradients(push.grads_UD, push.show_U, push.click_U, coming)
        return found

    def _take(self, request: DataRequest, push: Push | None) -> CallVerdict:
        step, rank, part = request.step, request.rank, request.part.number
        same_step = (other for (_, at, _), other in self._pushes.items() if at == step)
        samples = {other.batch_samples for other in (push, *same_step) if other is not None}
        if len(samples) > 1 and self._ledger.policy.meets_in_steps:
            raise InvalidShardCall(f"ranks disagree on the samples of step {step}: {sorted(samples)}")
        verdict = self._ledger.push(request.pass_number, step, rank, part)
        if verdict is CallVerdict.REPEAT:
            return verdict
        self._pushes[part, step, rank] = push
        self._samples[part, step, rank] = request.batch_samples
        if verdict is CallVerdict.ACT:
            self._apply_due(request.pass_number, part)
        else:
            failpoint(Failpoint.PARTLY_PUSHED)
        if request.beside and (waiting := self._pushes.get((part, step, rank))) is not None:
            self._pushes[part, step, rank] = waiting.copied()
        return verdict

    def _apply_due(self, pass_number: int, part: int) -> None:
        """Apply the pushes of a part that are due."""
        order = self._ledger.order(part)
        due = order.due()
        pushes = [push for key in due if (push := self._pushes.pop((part, *key), None)) is not None]
        samples = [self._samples.pop((part, *key)) for key in due]
        together = self._ledger.policy.meets_in_steps
        self._shard.apply(pushes if together else as_one_step(pushes), pass_number)
        self._shard.count(max(samples) if together else sum(samples), part)
        if len(due) == 1:
            failpoint(Failpoint.PARTLY_PUSHED)
        order.applied()
        if not part and self._floats is None:  # else the trainer of this process counts its steps
            stepped()
        self._turn.notify_all()

    @property
    def merge_wait_s(self) -> float | None:
        return self._ledger.policy.merge_wait_s

    def is_applied(self, request: DataRequest) -> bool:
        """Whether a push is applied, and its answer waits for slower ranks."""
        return (request.part.number, request.step, request.rank) not in self._pushes

    def wait_no_longer(self) -> None:
        """A push has waited for `merge_wait_s`: apply all that are accepted."""
        with self._turn:
            for part in (0, *self._ledger.parts):
                self._ledger.order(part).wait_no_longer()
                if self._ledger.order(part).due():
                    self._apply_due(self._ledger.pass_number, part)

    def may_answer(self, request: DataRequest) -> bool:
        """Whether the policy allows an answer to a rank that pushed, or that asked for early rows."""
        if request.call is DataCall.EARLY:
            return self._early_pass > request.pass_number or self._early.may_answer(request.step)
        with self._turn:
            return self._ledger.may_answer(request.pass_number, request.step, request.rank, request.part.number)

    def missing(self, request: DataRequest) -> str:
        """The ranks that a waiting rank waits for, in words."""
        if request.call is DataCall.EARLY:
            return f"rank {names(self._early.missing())}"
        with self._turn:
            return self._ledger.missing()

    def apart(self) -> Sequence[Mapping[str, float]]:
        """From any thread."""
        with self._turn:
            return [asdict(rank) for rank in self._ledger.steps.apart()]

    def check_caller(self, generation: int, rank: int) -> None:
        """Raise for a caller of another generation, or with a rank that the job does not have."""
        config = self.config
        if generation != config.generation:
            raise StaleGeneration(
                f"shard {config.shard} is of generation {config.generation} of the job's workers, "
                f"the caller of {generation}"
            )
        if rank >= config.num_ranks:
            raise InvalidShardCall(f"rank {rank} of a job with {config.num_ranks} trainers")

    def _batch(self, rank: int, number: int) -> ResolvedBatch:
        """The batch that a rank announced under this number."""
        with self._announcing:
            if number not in self._batches[rank]:
                raise InvalidShardCall(f"rank {rank} never announced batch {number} to shard {self.config.shard}")
            return self._batches[rank][number]

    def _release_before(self, rank: int, number: int, *, pulled: bool = False) -> None:
        """Release the batches that a rank does not use any more. `pulled`: it may push earlier ones still."""
        with self._announcing:
            mine = self._batches[rank]
            # The rank may have stopped waiting for a push that is not applied yet: that batch is kept.
            pushes = [push for (_, _, other), push in list(self._pushes.items()) if other == rank and push is not None]
            for older in [other for other in mine if other < number]:
                to_push = pulled and mine[older].learn and older > self._pushed[rank]
                if not to_push and not any(mine[older] is push.batch for push in pushes):
                    self._shard.release(mine.pop(older))
