"""One shard's part of every table: batches made ready, rows read, steps applied, passes closed.

The same code runs in a trainer's process (pserver.embedded) and behind gRPC (pserver.server). It does not know how
many ranks there are or who waits for whom: that is pserver.ledger's decision and the callers' waiting.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pserver.client import F32, Gradients, Keys, ShardPart, TableStats
from pserver.commit import Stores
from pserver.config import TableSection
from pserver.digest import add
from pserver.errors import BadRequest
from pserver.merge import merge
from pserver.placement import Placement
from pserver.rows import I32, frozen
from pserver.table import Table


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch whose keys have row numbers here: what a shard remembers of it until its push."""

    learn: bool
    rows: Mapping[str, I32]
    """(U,) row numbers by table; of a batch that is only predicted, EMPTY for a key without one."""
    keys: Mapping[str, Keys]
    """Of a batch that is only predicted: a row may still be made by an earlier step of another rank."""


@dataclass(frozen=True, slots=True)
class Push:
    """What one rank learnt in a step."""

    batch: Batch
    gradients: Mapping[str, Gradients]
    batch_samples: int
    """Samples of all ranks in the step."""


class Shard:
    """The tables of shard `number` under a placement."""

    def __init__(
        self,
        tables: Mapping[str, TableSection],
        seed: int,
        *,
        number: int = 0,
        placement: Placement | None = None,
        pool: ThreadPoolExecutor | None = None,
        live: Path | None = None,
    ) -> None:
        """`live` is where committed rows are kept; without it there are no commits, and rows are in memory only."""
        self.tables = {name: Table(name, section, seed, pool) for name, section in tables.items()}
        buckets = (placement or Placement.even(1)).buckets_of(number)
        self._stores = None if live is None else Stores(number, buckets, self.tables, live)

    def resolve(self, tables: Mapping[str, Keys], *, learn: bool) -> Batch:
        """Find the rows of a batch's keys; for `learn`, reserve those missing. Any thread, ahead of its step."""
        for name in tables:
            if name not in self.tables:
                raise BadRequest(f"no table {name!r} on this shard; it has {', '.join(sorted(self.tables))}")
        if learn:
            rows = {name: self.tables[name].reserve(keys.keys_U, keys.group_U) for name, keys in tables.items()}
            return Batch(True, {name: frozen(rows_U) for name, rows_U in rows.items()}, {})
        return Batch(
            False, {name: frozen(self.tables[name].find(keys.keys_U)) for name, keys in tables.items()}, tables
        )

    def rows(self, batch: Batch) -> dict[str, F32]:
        """(U, D) rows of a batch as they are now."""
        if batch.learn:
            return {name: self.tables[name].gather(rows_U) for name, rows_U in batch.rows.items()}
        return {
            name: self.tables[name].gather_present(rows_U, batch.keys[name].keys_U)
            for name, rows_U in batch.rows.items()
        }

    def apply(self, pushes: Sequence[Push], version: int) -> None:
        """Learn from the pushes of one step, given in rank order; they agree on its samples."""
        samples = {push.batch_samples for push in pushes}
        assert len(samples) <= 1, samples
        batch_samples = max(samples, default=0)
        for name, table in self.tables.items():
            parts = [(push.batch.rows[name], push.gradients[name]) for push in pushes if name in push.gradients]
            if parts:
                rows_U, merged = merge([(rows_U, _frozen(gradients)) for rows_U, gradients in parts])
                table.apply(frozen(rows_U), _frozen(merged), batch_samples, version)

    def check(self, push: Push) -> None:
        """Raise BadRequest for gradients that do not fit their batch."""
        for name, gradients in push.gradients.items():
            if name not in push.batch.rows or not push.batch.learn:
                raise BadRequest(f"gradients of table {name!r}, which the batch did not prepare to learn")
            shape = (len(push.batch.rows[name]), self.tables[name].num_weights)
            fits = gradients.grads_UD.shape == shape and gradients.show_U.shape == gradients.click_U.shape == shape[:1]
            if not fits:
                raise BadRequest(f"gradients of table {name!r} have shape {gradients.grads_UD.shape}, not {shape}")

    def release(self, batch: Batch) -> None:
        """Nobody comes back to a batch: its rows need not stay in memory."""
        for name, rows_U in batch.rows.items():
            self.tables[name].release(rows_U)

    def open_pass(self) -> None:
        """Begin a pass."""
        for table in self.tables.values():
            table.open_pass()

    def close_pass(self, day: int) -> str:
        """Give rows touched their day; the digest, in hex, of the rows that the pass's pushes changed."""
        return f"{add(table.close_pass(day) for table in self.tables.values()):032x}"

    def digest(self) -> dict[str, int]:
        """Hash over all rows, by table."""
        return {name: table.digest() for name, table in self.tables.items()}

    def stats(self) -> dict[str, TableStats]:
        """Counts by table."""
        return {name: table.stats() for name, table in self.tables.items()}

    # --- commits: what may be called when is the caller's matter -----------------------------------------------------

    @property
    def stores(self) -> Stores:
        """Raises BadRequest for a shard that keeps its rows in memory only."""
        if self._stores is None:
            raise BadRequest("this shard was started without a folder for committed rows (`live`)")
        return self._stores

    def restore(self, folder: Path, parts: Sequence[ShardPart]) -> None:
        """Begin with this shard's rows of a commit."""
        if parts or self._stores is not None:
            self.stores.restore(folder, parts)

    def close(self) -> None:
        """Let go of files."""
        if self._stores is not None:
            self._stores.close()


def _frozen(gradients: Gradients) -> Gradients:
    return Gradients(frozen(gradients.grads_UD), frozen(gradients.show_U), frozen(gradients.click_U))
