"""A table whose rows learn on the device of the trainer that the shard lives in; see pserver.rows.placed_rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from headrace.pserver.protocol.shards import F32, Floats, Gradients
from headrace.pserver.protocol.table_stats import TableStats
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.placed_rows import GradientScale, PlacedGradients, PlacedMaker, PlacedSlab
from headrace.pserver.rows.table_rows import I32, U32
from headrace.pserver.tables.table import ShardTable


class PlacedTable(ShardTable):
    """The rows of one table on the one shard, which read and learn on a device."""

    def __init__(self, *args: Any, slab: PlacedMaker, **kwargs: Any) -> None:
        super().__init__(*args, slab=slab, **kwargs)

    @property
    def _slab(self) -> PlacedSlab:
        assert isinstance(self.rows.floats, PlacedSlab), "vectors that join later are refused"
        return self.rows.floats

    @override
    def expect(self, rows_U: I32) -> None:
        self._slab.expect(rows_U)

    def read(self, rows_U: I32) -> Floats:
        """(U, D) the rows of a batch to learn from, on the device; as `to_learn`."""
        self.deletions.purge(rows_U)
        return self._slab.read(frozen(rows_U), self.rows.columns["group"], self._steps)

    def to_host(self, floats_UD: Floats) -> F32:
        """A copy of rows in the memory of the host."""
        return self._slab.to_host(floats_UD)

    @override
    def merge(self, pushes: Sequence[tuple[I32, Gradients]]) -> tuple[I32, Gradients]:
        placed = [(rows_U, push) for rows_U, push in pushes if isinstance(push, PlacedGradients)]
        assert len(placed) == len(pushes), "gradients come from the device"
        return self._slab.merged(placed)

    @override
    def _learn(self, rows_U: I32, push: Gradients, batch_samples: int, passes_U: U32 | None) -> None:
        assert isinstance(push, PlacedGradients), "gradients come from the device"
        scale = GradientScale(self.section.grad_scale, batch_samples, self.section.clip_norm)
        self._slab.learn_placed(rows_U, push, scale, self.rows.columns["group"], passes_U)

    @override
    def open_pass(self, samples: int = 0, versions: int = 0) -> None:
        super().open_pass(samples, versions)
        self._slab.open_pass()

    @override
    def _settle(self, rows_U: I32) -> None:
        self._slab.settle(rows_U)

    @override
    def stats(self) -> TableStats:
        return replace(super().stats(), device=self._slab.figures())
