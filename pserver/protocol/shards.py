"""The shards as one trainer uses them: a narrow protocol, in this process or in others.

`pserver.server.embedded.EmbeddedShards` holds a single shard itself; `pserver.client.remote.RemoteShards` routes keys
to shard processes. Both run the same kernels in the same order, so rows are equal bit for bit. Unique keys of a batch
are found in trainer.features.deduplication, rows pooled and gradients of a key summed in trainer.features.pooling.

Shapes: U unique keys of one batch in one table, D floats of a row's weights (first-order weight, then the vector).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.deadline import Deadline
from headrace.process_usage import ProcessUsage
from headrace.pserver.protocol.commit_parts import ShardCommitPart as ShardCommitPart
from headrace.pserver.protocol.histories import Answers, Questions
from headrace.pserver.protocol.joins import JoinAnswers, JoinEvents
from headrace.pserver.protocol.shard_command import ShardCommand
from headrace.traffic import Links

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]
Result = TypeVar("Result")

ABSENT_BITS = np.uint32(0x7FC0_AB5E)
"""Marks a key without a row in a table with a learnt default row: all its weights have these bits, a NaN that no
arithmetic produces (its payload is not 0) and no stored row holds. The trainer puts the default row in its place."""


def absent(rows_UD: F32) -> NDArray[np.bool_]:
    """(U,) which pulled rows belong to keys that read a learnt default row."""
    marked_U: NDArray[np.bool_] = rows_UD.view(np.uint32)[:, 0] == ABSENT_BITS
    return marked_U


class Floats(Protocol):
    """(U, E) floats of rows: an array or, where rows are on a device (pserver.rows.placed_rows), a tensor there."""

    @property
    def shape(self) -> tuple[int, ...]:
        """U, then the floats of a row."""
        ...


@dataclass(frozen=True, slots=True)
class Keys:
    """Unique keys of one batch in one table, in order of first occurrence."""

    keys_U: U64
    group_U: U16
    """Slot group of each key."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients and statistics of one rank's batch for its `Keys`, in their order."""

    grads_UD: F32
    show_U: F32
    click_U: F32

    @property
    def shape(self) -> tuple[int, ...]:
        """(U, D)."""
        return self.grads_UD.shape

    def copied(self) -> "Gradients":
        """The same in arrays of their own."""
        return Gradients(self.grads_UD.copy(), self.show_U.copy(), self.click_U.copy())

    def chosen(self, at: NDArray[Any] | slice) -> "Gradients":
        """Those of some keys, by their places or a mask."""
        return Gradients(self.grads_UD[at], self.show_U[at], self.click_U[at])


class Prepared(Protocol):
    """A batch whose keys are ready for the shards: routed, or their row numbers found."""


@dataclass(frozen=True, slots=True)
class StepScale:
    """The samples of a step over all ranks, for `grad_scale = "show"` and `"sum"`."""

    batch_samples: int


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """Traffic and waits of one shard since its process began, for operators."""

    links: Links = field(default_factory=dict)
    """By trainer. `wait_s`: seconds that pushes were held until the call of this trainer, the last one."""
    waited_s: Sequence[Sequence[float]] = ()
    """[r][q]: seconds that pushes of rank r were held until the call of rank q, the last one."""
    apart: Sequence[Mapping[str, int | float]] = ()
    """By rank: pserver.consistency.policy.StepsApart of the last pass."""
    usage: ProcessUsage = ProcessUsage()


class Shards(Protocol):
    """All shards of the job, as one rank uses them.

    Order of a pass with staleness k: `open_pass`; `pull` for the steps 0 to k; then, for every step of the pass on any
    rank, one `exchange` by each rank; then `close_pass` by every rank. `prepare` may run in another thread, ahead, in
    the order of steps, and never blocks for a step. Errors: pserver.errors.
    """

    def open_pass(self, pass_number: int, deadline: Deadline, samples: int = 0) -> None:
        """Begin pass `pass_number` (from 1), which becomes version `pass_number` at its close.

        `samples`: the job's learnt samples before it, the same from all ranks; schedules of rates count from there.
        """
        ...

    def split(self, slices: Keys, slices_each: int, *, rows_first: bool) -> None:
        """From now on exchanges carry the dense `slices` of a batch in messages of their own (pserver.protocol.parts).

        All ranks make the same call. No bit depends on it.
        """
        ...

    def await_slices(self, num_slices: int) -> None:
        """Return once so many of the dense slices that the last `exchange` returned are here, the first ones.

        They may come after all other rows where exchanges are split, rows first; the array is filled meanwhile.
        """
        ...

    def prepare(self, tables: Mapping[str, Keys], *, learn: bool) -> Prepared:
        """Make a batch's keys ready. With `learn` = False the batch is only predicted and changes nothing."""
        ...

    def pull(self, batch: Prepared, deadline: Deadline) -> Mapping[str, Floats]:
        """(U, D) rows of a batch by table.

        With `learn` and without admission, a key without a row reads its initial value; otherwise it reads zeros. If
        the table's default row is learnt, the row is marked in place of zeros: see `absent`."""
        ...

    def look(self, tables: Mapping[str, Keys], deadline: Deadline) -> dict[str, F32]:
        """Rank 0 only, between passes: (U, D) rows of any keys as inference reads them; without a row zeros, or marked.

        Batches prepared meanwhile for the next pass stay prepared.
        """
        ...

    def ask_early(self, step: int, batch: Prepared | None, following: Prepared | None, deadline: Deadline) -> None:
        """Before the `exchange` of a step, with the same batches: ask for the rows of `following` that no rank pushes
        in the step, which come beside the computation. `exchange` then returns them with the others.

        Either every rank calls it in a step or none does, and only where a batch follows the one before it. No bit
        depends on it.
        """
        ...

    def exchange(
        self,
        step: int,
        batch: Prepared | None,
        gradients: Mapping[str, Gradients] | None,
        following: Prepared | None,
        scale: StepScale,
        deadline: Deadline,
    ) -> Mapping[str, Floats] | None:
        """Push step `step` of this rank, then pull the rows of its step `step + 1 + k`, of the batch `following`.

        `batch` and `gradients` are None on a rank without further batches (it still takes part); `gradients` alone is
        None if all ranks skip the step; `following` is None where the rank has no such step. Returns the rows after
        `step` of all ranks. A repeat after a lost reply is acknowledged and not applied again.
        """
        ...

    def unanswered(self) -> Sequence[int]:
        """From any thread: the shards that the present call still waits for; none without a call."""
        ...

    def recall(self, pass_number: int, questions: Questions, deadline: Deadline) -> Answers:
        """Every rank, once in each pass that is open, from any one thread: what the samples of its part ask of the
        tables of histories, and add to them.

        Returns the histories, by table, once all ranks have asked: as of the last closed pass, and the questions of
        this pass before, by rank. A job without such tables does not call it. A repeat adds nothing.
        """
        ...

    def join(self, events: JoinEvents, deadline: Deadline) -> JoinAnswers:
        """Every rank, once in each pass that is open, on the thread of `recall` and before it: the impressions and
        clicks of its part.

        Returns what they release once all ranks have sent theirs: as of the last closed pass, and the events of this
        pass before, by rank; and this rank's part of the impressions whose window ends with the pass. A job without a
        join does not call it. A repeat adds nothing.
        """
        ...

    def close_pass(self, day: int, deadline: Deadline) -> dict[str, str]:
        """End the pass: touched rows get `day`. Returns the digest of each shard's pushes, by shard.

        Every rank calls it, with no push in flight; a shard closes once all ranks have called.
        """
        ...

    def call(self, command: ShardCommand[Any, Result], deadline: Deadline) -> Result:
        """Send a command (pserver.server.commands) to all shards, or to the one that has its key; its result."""
        ...

    def links(self) -> Links:
        """This rank's traffic with each shard: "shard-0". Empty where the shard is in this process. Any thread."""
        ...

    def close(self) -> None:
        """Close connections and threads."""
        ...
