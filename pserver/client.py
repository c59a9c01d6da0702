"""The shards as one trainer sees them: one narrow protocol, whether they are in this process or behind gRPC.

`pserver.embedded.EmbeddedShards` holds the one shard itself; `pserver.remote.RemoteShards` routes keys to shard
processes. Same kernels in the same order: both end with the same rows, bit for bit. Finding a batch's unique keys,
pooling, and summing a key's gradients within the batch are trainer.embedding's work.

Shapes: U unique keys of one batch in one table, D floats of a row's weights (first-order weight, then the vector).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.deadline import Deadline
from pserver.operations import Shrink, Survey, TableOperation
from pserver.store.base import StoredFile

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]

ABSENT_BITS = np.uint32(0x7FC0_AB5E)
"""Bits of every weight that is read of a key without a row in a table whose default row is learnt: a NaN that no
arithmetic gives (its payload is not 0) and no stored row holds. Who pulls puts the default row in its place."""


def absent(rows_UD: F32) -> NDArray[np.bool_]:
    """(U,) which rows, as they were pulled, are of keys that read a learnt default row."""
    marked_U: NDArray[np.bool_] = rows_UD.view(np.uint32)[:, 0] == ABSENT_BITS
    return marked_U


@dataclass(frozen=True, slots=True)
class Keys:
    """Unique keys of one batch in one table, in order of first occurrence."""

    keys_U: U64
    group_U: U16
    """Slot group of each key."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one rank's batch says about its `Keys`, in their order."""

    grads_UD: F32
    show_U: F32
    click_U: F32


class Prepared(Protocol):
    """A batch's keys made ready for the shards (routed, or their row numbers found)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What `grad_scale = "show"` needs of a step: samples of all ranks."""

    batch_samples: int


@dataclass(frozen=True, slots=True)
class TableStats:
    """Counts of one table over all shards."""

    num_rows: int
    num_bytes: int
    """Memory of rows and index."""
    new_rows: int
    """Rows made in the open or last pass."""
    rows_by_group: Mapping[int, int]
    dirty_rows: int = 0
    """Rows changed since the last commit, of the fullest shard."""
    max_dirty_rows: int | None = None
    """Rows that may wait for a commit on one shard before its memory is full; None: memory is not bounded."""
    sweeping: bool = False
    """Whether rows that a shrink took are still to be removed."""
    unadmitted: int = 0
    """Records of keys that were not admitted, in the open or last pass."""


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One shard's part of a commit, below the commit's folder."""

    folder: str
    """"shard-0"."""
    buckets: tuple[int, int]
    """First bucket, and the one after the last."""
    tables: Mapping[str, Mapping[str, Any]]
    """By table: "rows", "rows_by_group" (text of the group's number to rows), "life" (pserver.aging: day, rates of
    ticks, shrinks that are not swept, cuts), "changes" (pserver.changes: files of keys by version)."""
    files: Mapping[str, StoredFile]
    """By path relative to the commit's folder: "shard-0/default/000012.sst"."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        files = {name: {"sha256": file.sha256, "bytes": file.num_bytes} for name, file in self.files.items()}
        tables = {name: dict(facts) for name, facts in self.tables.items()}
        return {"folder": self.folder, "buckets": list(self.buckets), "tables": tables, "files": files}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "ShardPart":
        """The inverse of `message`."""
        files = {name: StoredFile(file["sha256"], file["bytes"]) for name, file in message["files"].items()}
        begin, end = message["buckets"]
        return cls(message["folder"], (begin, end), message["tables"], files)


class Shards(Protocol):
    """Every shard of the job, as one rank uses them.

    Order of a pass: `open_pass`; `pull` for step 0; then, for every step of the pass on any rank, one `exchange` by
    each rank; then `close_pass` by every rank. `prepare` may run in another thread, ahead, in the order of steps,
    and never blocks for a step. Errors: pserver.errors.
    """

    def open_pass(self, pass_number: int, deadline: Deadline) -> None:
        """Begin pass `pass_number` (from 1), which becomes version `pass_number` at its close."""
        ...

    def prepare(self, tables: Mapping[str, Keys], *, learn: bool) -> Prepared:
        """Make a batch's keys ready. `learn` = False: the batch is only predicted, nothing may come of it."""
        ...

    def pull(self, batch: Prepared, deadline: Deadline) -> dict[str, F32]:
        """(U, D) rows of a batch by table. For `learn`, a key without a row reads its initial value, but, where
        keys have to be admitted, zeros; else zeros. Where a table's default row is learnt, what would be zeros is
        marked instead: see `absent`."""
        ...

    def look(self, tables: Mapping[str, Keys], deadline: Deadline) -> dict[str, F32]:
        """By the chief alone, between passes: (U, D) rows of any keys as inference sees them, zeros, or marked, without
        a row.

        Batches that were made ready meanwhile for the next pass stay so.
        """
        ...

    def exchange(
        self,
        step: int,
        batch: Prepared | None,
        gradients: Mapping[str, Gradients] | None,
        following: Prepared | None,
        scale: Scale,
        deadline: Deadline,
    ) -> dict[str, F32] | None:
        """Push step `step` of this rank, then pull the next batch's rows.

        `batch` and `gradients` are None on a rank that has run out of batches (it still takes part), gradients alone
        where the step is skipped on all ranks; `following` is None at its last. The rows returned are those after
        `step` of all ranks. A repeat after a lost answer is acknowledged, not applied twice.
        """
        ...

    def unanswered(self) -> Sequence[int]:
        """From any thread: the shards that the call in progress still waits for; none without a call."""
        ...

    def close_pass(self, day: int, deadline: Deadline) -> dict[str, str]:
        """No push in flight on any rank from here: rows touched get `day`. Digest of each shard's pushes, by shard.

        Called by every rank; the shards close once all have.
        """
        ...

    def operate(self, version: int, operations: Sequence[TableOperation], deadline: Deadline) -> None:
        """By the chief alone, between passes: operations act, in order, at the close of `version`, the last closed one.

        A repeat for the same version changes nothing.
        """
        ...

    def survey(self, shrink: Shrink, deadline: Deadline) -> Survey | None:
        """By the chief alone, from any thread: what `shrink` would take if it acted now.

        Counted by a thread of each shard while training goes on, so rows that change meanwhile may count either way;
        None while it counts: ask again. With `at_once`, between passes only: counted in this call, exactly.
        """
        ...

    def explain(self, table: str, key: int, group: int, deadline: Deadline) -> dict[str, Any]:
        """From any thread: all that is known of a key, as JSON-able data; see pserver.table.Table.explain."""
        ...

    def feed(self, secret: str, deadline: Deadline) -> list[str]:
        """By the chief alone, from any thread: serve the live feed to who shows `secret`; its address on each shard.

        Another secret than the first call's is ignored."""
        ...

    def publish(self, version: int, deadline: Deadline) -> None:
        """By the chief alone, between passes: tell subscribers of `version`, the last one closed, whose operations have
        acted. Returns once what changed is copied; as often as one likes."""
        ...

    def digest(self, deadline: Deadline) -> dict[str, int]:
        """By table, a 128-bit sum over all rows: independent of order and of the number of shards."""
        ...

    def stats(self, deadline: Deadline) -> dict[str, TableStats]:
        """Counts by table."""
        ...

    def snapshot(self, version: int, deadline: Deadline, changes_since: int | None = None) -> int:
        """Step 2 of a commit, by the chief alone, between passes: copy the rows changed since the last; how many.

        The commit also tells which rows changed or went since version `changes_since`, as far as commits since a
        base export told it (pserver.changes); None: nobody will ask.

        `version` is the pass closed last; others may have opened the next one, of which no step is applied. From here
        on training may go on. One snapshot is in flight at a time, until `settle`; a repeat for the same version
        changes nothing.
        """
        ...

    def write_snapshot(self, folder: Path, deadline: Deadline) -> list[ShardPart]:
        """Step 3, from any thread: every shard writes its snapshot, and its whole state to a folder of its own in
        `folder` (which exists), synced. The parts, by shard.

        Raises StoreFailed where a disk is full or fails; once that is settled, nothing of it is left in `folder`.
        """
        ...

    def settle(self, committed: bool, deadline: Deadline) -> None:
        """After step 4, from any thread: the snapshot's rows are clean; or, after a failure, wait to be committed.

        Waits for a `write_snapshot` that still runs. Harmless where no snapshot is in flight.
        """
        ...

    def restore(self, folder: Path, parts: Sequence[ShardPart], version: int, deadline: Deadline) -> None:
        """By the chief alone, before the first pass: every row of a commit in `folder`, made with any number of shards,
        into empty tables; the last closed pass is then `version`. Without parts the tables stay empty."""
        ...

    def close(self) -> None:
        """Let go of connections and threads."""
        ...
