"""One shard's part of every table: find the rows of batches, read rows, apply pushes, close passes.

The same code runs in a trainer's process (pserver.server.embedded) and in one of its own (pserver.server.shard_server).
It does not know how many ranks there are. A consistency policy decides when a push is applied, and the callers wait.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.commit.commit_files import PartObjects
from headrace.pserver.commit.handed_rows import is_handed
from headrace.pserver.commit.shard_commits import ShardStores
from headrace.pserver.config import DENSE_SLICES, ShardProcess
from headrace.pserver.consistency.policy import MODES
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.feed.feed_server import FeedServer
from headrace.pserver.feed.publisher import ShardFeed
from headrace.pserver.protocol.histories import slot_of
from headrace.pserver.protocol.parts import WHOLE, Part
from headrace.pserver.protocol.placement import Placement
from headrace.pserver.protocol.shards import F32, Floats, Gradients, Keys, ShardCommitPart
from headrace.pserver.protocol.table_operations import (
    SetTables,
    ShrinkRows,
    ShrinkSurvey,
    TableOperation,
)
from headrace.pserver.rows.arrays import Empty, empty_floats, frozen
from headrace.pserver.rows.digest import add
from headrace.pserver.rows.gradient_merge import frozen_gradients, merge_by_key
from headrace.pserver.rows.kernels import EMPTY
from headrace.pserver.rows.placed_rows import PlacedMaker
from headrace.pserver.rows.table_rows import I32
from headrace.pserver.server.pushes import NONE_SENT, Push, ResolvedBatch
from headrace.pserver.tables.pass_clock import PassClock
from headrace.pserver.tables.pass_histories import PassHistories
from headrace.pserver.tables.pass_joins import PassJoins
from headrace.pserver.tables.placed_table import PlacedTable
from headrace.pserver.tables.sweeping import Sweeper, run
from headrace.pserver.tables.table import ShardTable
from headrace.rpc.tls_listener import TlsEndpoint
from headrace.timeline import Span, recorded

NONE_PLACED: Mapping[str, PlacedMaker] = MappingProxyType({})
"""No table's rows learn on a device."""


class Shard:
    """The tables of one shard."""

    def __init__(
        self,
        config: ShardProcess,
        pool: ThreadPoolExecutor | None = None,
        placed: Mapping[str, PlacedMaker] = NONE_PLACED,
    ) -> None:
        """`pool`: for the rows of large batches. `placed`: tables whose rows learn on a device, and their slabs."""
        buckets = Placement.even(config.num_shards).buckets_of(config.shard)
        clips = not MODES.load(config.mode).copies_rows
        self.tables = {
            name: _table(name, section, config.seed, pool, config.groups, buckets, clips=clips, placed=placed.get(name))
            for name, section in config.tables.items()
        }
        parts, joins = config.parts, config.joins
        uploads = () if parts is None else (PartObjects(parts.address, config.generation), parts.cache)
        self._stores = (
            None if config.live is None else ShardStores(config.shard, buckets, self.tables, config.live, *uploads)
        )
        self.histories = PassHistories(self.tables, config.histories)
        """The histories of the open pass."""
        self.joins = PassJoins(self.tables, joins)
        """The join of the open pass."""
        self._kept = {*joins, *(name for name, of in config.histories.items() if not isinstance(of, str))}
        self.features_digest = ""
        """Of the rows that the last closed pass changed in tables that no step learns; empty without such tables."""
        self.clock = PassClock(self.tables, joins)
        """The clock of the join in the open pass."""
        self._samples_before, self._samples = 0, Counter[int]()
        """Samples learnt before the open pass, and in its steps by part of their exchanges (protocol.parts)."""
        self._sweeper = Sweeper()
        hidden = {DENSE_SLICES, *joins}
        features = {name: table.feed for name, table in self.tables.items() if name not in hidden}
        asked = {name: of for name, of in config.histories.items() if isinstance(of, str)}
        told = {
            name: (of, config.groups[slot]) for name, of in asked.items() if (slot := slot_of(name)) in config.groups
        }
        self.feed = ShardFeed(features, config.generation, told)
        """The live feed."""
        self._feed_server: FeedServer | None = None
        for table in self.tables.values():
            table.deletions.on_swept = self.feed.swept

    def table(self, name: str) -> ShardTable:
        """A table. Raises InvalidShardCall for one that is not here."""
        if name not in self.tables:
            raise InvalidShardCall(f"no table {name!r} on this shard; it has {', '.join(sorted(self.tables))}")
        return self.tables[name]

    @recorded(Span.LOOKUP)
    def resolve(self, tables: Mapping[str, Keys], *, learn: bool) -> ResolvedBatch:
        """Find the rows of a batch's keys; with `learn`, reserve missing rows. Any thread, ahead of the step."""
        rows, again = {}, {}
        for name, keys in tables.items():
            table = self.table(name)
            if learn and not table.selective:
                rows[name] = table.rows.reserve(keys.keys_U, keys.group_U)
            else:
                find = table.rows.find_ahead if learn else table.rows.find
                rows[name], again[name] = find(keys.keys_U), keys
            if learn:
                table.expect(rows[name])
        return ResolvedBatch(learn, rows, again)

    @recorded(Span.PULL)
    def rows(
        self,
        batch: ResolvedBatch,
        empty: Empty = empty_floats,
        part: Part = WHOLE,
        without: Mapping[str, NDArray[np.bool_]] = NONE_SENT,
    ) -> dict[str, F32]:
        """(U, D) the present rows of a part of a batch, by table, in arrays made by `empty`.

        `without`: (U,) which of them are left out, by table. Those to learn on a device are not among them: `placed`.
        """
        found = {}
        for name, all_U in batch.rows.items():
            table, places = self.tables[name], part.of(name)
            if places is None or (batch.learn and isinstance(table, PlacedTable)):
                continue
            rows_U = all_U[~without[name]] if name in without else all_U[places]
            if not batch.learn:
                found[name] = table.gather_present(frozen(rows_U), batch.keys[name].keys_U, empty)
            else:
                found[name] = table.to_learn(self._present(batch, name, rows_U), empty)
        return found

    def _present(self, batch: ResolvedBatch, name: str, rows_U: I32) -> I32:
        """The rows of a batch to learn from, as they are now."""
        table = self.tables[name]
        if name not in batch.keys:
            return frozen(rows_U)
        batch.known[name] = frozen(table.read_again(rows_U, batch.keys[name].keys_U))
        batch.admitted[name] = table.num_admitted
        return batch.known[name]

    @recorded(Span.PULL)
    def placed(self, batch: ResolvedBatch) -> dict[str, Floats]:
        """(U, D) the present rows of a batch to learn from, by table whose rows are on a device."""
        tables = {name: self.tables[name] for name in batch.rows if batch.learn}
        return {
            name: table.read(self._present(batch, name, batch.rows[name]))
            for name, table in tables.items()
            if isinstance(table, PlacedTable)
        }

    def early_rows(self, batch: ResolvedBatch, masks: Mapping[str, NDArray[np.bool_]]) -> dict[str, F32]:
        """(E, D) the present rows that are marked, by table."""
        return {name: self.tables[name].to_learn(frozen(batch.rows[name][mask_U])) for name, mask_U in masks.items()}

    @recorded(Span.PUSH)
    def apply(self, pushes: Sequence[Push], version: int) -> None:
        """Merge the pushes in the given order and apply them. They must agree on the samples of the step."""
        samples = {push.batch_samples for push in pushes}
        assert len(samples) <= 1, samples
        batch_samples = max(samples, default=0)
        learnt = self._samples_before + self._samples[pushes[0].part.number] if pushes else 0
        for name, table in self.tables.items():
            mine = [push for push in pushes if name in push.gradients]
            parts = [_known(push, name) for push in mine]
            unknown = [records for push in mine if (records := _unknown(push, name)) is not None]
            if any(len(rows_U) for rows_U, _ in parts):
                rows_U, merged = table.merge(parts)
                table.learn_after(learnt, version - 1)
                table.apply(frozen(rows_U), frozen_gradients(merged), batch_samples, version)
            if unknown:
                keys, seen = merge_by_key(unknown)
                since = min(push.batch.admitted[name] for push in mine if name in push.batch.keys)
                table.admit(keys.keys_U, keys.group_U, seen, version, since)

    def count(self, samples: int, part: int = 0) -> None:
        """A step is over whose ranks had so many samples in all; in each part of its exchange."""
        self._samples[part] += samples

    def check(self, push: Push) -> None:
        """Raise InvalidShardCall for gradients that do not fit their batch, or whose batch was not pulled."""
        for name, gradients in push.gradients.items():
            if name not in push.batch.rows or not push.batch.learn:
                raise InvalidShardCall(f"gradients of table {name!r}, which the batch did not prepare to learn")
            if name in push.batch.keys and name not in push.batch.known:
                raise InvalidShardCall(f"gradients of table {name!r} for a batch that was not pulled")
            places = push.part.of(name)
            if places is None or (push.part.number and (name in push.batch.keys)):
                raise InvalidShardCall(f"gradients of table {name!r} in part {push.part.number} of an exchange")
            shape = (len(push.batch.rows[name][places]), self.tables[name].rows.num_weights)
            fits = gradients.shape == shape and gradients.show_U.shape == gradients.click_U.shape == shape[:1]
            if not fits:
                raise InvalidShardCall(f"gradients of table {name!r} have shape {gradients.shape}, not {shape}")

    def release(self, batch: ResolvedBatch) -> None:
        """The batch is not used any more: its rows need not stay in memory."""
        for name, rows_U in batch.rows.items():
            self.tables[name].rows.release(rows_U)

    def open_pass(self, samples: int = 0, versions: int = 0) -> None:
        """Begin a pass after so many learnt samples and versions."""
        self._samples_before = samples
        self._samples.clear()
        self.histories.open_pass()
        self.joins.open_pass()
        self.clock.open_pass()
        for table in self.tables.values():
            table.open_pass(samples, versions)

    @recorded(Span.CLOSE)
    def close_pass(self, day: int, version: int) -> str:
        """Make `version`: set the day of touched rows. Returns the digest, in hex, of the rows changed by pushes."""
        self.feed.seal()  # from here on, rows of the version before are deleted
        self.histories.close_pass(version)
        self.joins.close_pass(version)
        self.clock.close_pass(version)
        digests = {name: table.close_pass(day) for name, table in self.tables.items()}
        self.features_digest = f"{add(digests[name] for name in self._kept):032x}" if self._kept else ""
        self.feed.closed(version)
        return f"{add(digests.values()):032x}"

    # --- operations --------------------------------------------------------------------------------------------------

    def operate(self, operations: Sequence[TableOperation], version: int) -> None:
        """Apply operations in order at the close of `version`. Raises the error that stopped an earlier sweep."""
        self._sweeper.check()
        for operation in operations:
            if isinstance(operation, SetTables):
                self._sweeper.recount()
            for name in operation.tables_among(self.tables):
                table = self.table(name)
                table.operate(operation, version)
                if isinstance(operation, ShrinkRows) and operation.at_once:
                    run(table.deletions.sweep())
        self._sweep()

    def survey(self, shrink: ShrinkRows) -> ShrinkSurvey | None:
        """The rows that a shrink would delete; None while a thread counts."""
        table = self.table(shrink.table)
        return table.deletions.survey(shrink) if shrink.at_once else self._sweeper.survey(table, shrink)

    # --- the live feed -----------------------------------------------------------------------------------------------

    def serve_feed(self, secret: str, tls: TlsEndpoint | None) -> str:
        """Serve the feed of this shard to subscribers with `secret`, off loopback at `tls`; its address.

        The first call opens the port.
        """
        if self._feed_server is None:
            self._feed_server = FeedServer(self.feed, secret, tls)
        return self._feed_server.address

    # --- commits: the caller keeps the order of calls ----------------------------------------------------------------

    @property
    def stores(self) -> ShardStores:
        """The stores of committed rows. Raises InvalidShardCall for a shard whose rows are only in memory."""
        if self._stores is None:
            raise InvalidShardCall("this shard was started without a folder for committed rows (`live`)")
        return self._stores

    def restore(self, folder: Path, parts: Sequence[ShardCommitPart], version: int) -> None:
        """Load this shard's rows from a commit of `version`."""
        if parts or self._stores is not None:
            self.stores.restore(folder, parts, version)
        self._begin(version)

    def advance(self, folder: Path, parts: Sequence[ShardCommitPart], version: int) -> None:
        """After a restore: go on to a later commit. Sweeps begin anew, since it may have other shrinks."""
        self._sweeper.halt()
        if is_handed(parts):
            self.stores.take_handed(folder, parts)
        else:
            self.stores.advance(folder, parts, version)
        self._begin(version)

    def _begin(self, version: int) -> None:
        self.feed.begin(version)
        for table in self.tables.values():
            table.begin(version)
        self._sweep()

    def _sweep(self) -> None:
        for table in self.tables.values():
            if table.deletions.sweeping:
                self._sweeper.sweep(table)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._sweeper.stop()
        if self._feed_server is not None:
            self._feed_server.close()
        if self._stores is not None:
            self._stores.close()


def _table(*args: Any, placed: PlacedMaker | None, **kwargs: Any) -> ShardTable:
    return ShardTable(*args, **kwargs) if placed is None else PlacedTable(*args, slab=placed, **kwargs)


def _known(push: Push, name: str) -> tuple[I32, Gradients]:
    """The part of a push for existing rows."""
    gradients = push.gradients[name]
    if name not in push.batch.keys:
        return frozen(push.batch.rows[name][push.part.of(name)]), frozen_gradients(gradients)
    rows_U = push.batch.known[name]
    present_U = rows_U != EMPTY
    return frozen(rows_U[present_U]), frozen_gradients(gradients.chosen(present_U))


def _unknown(push: Push, name: str) -> tuple[Keys, Gradients] | None:
    """The part of a push for keys without a row; None in tables without admission."""
    if name not in push.batch.keys:
        return None
    keys, absent_U = push.batch.keys[name], push.batch.known[name] == EMPTY
    return Keys(keys.keys_U[absent_U], keys.group_U[absent_U]), push.gradients[name].chosen(absent_U)
