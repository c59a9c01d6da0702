"""The tables that shards hold: those of the job file, histories, a join, and slices of the dense parameters.

With `dense.strategy = "shards"` each slice of the flat buffer of parameters is a row. A row holds the difference to the
initial weights, so a row that was never pushed has its right value, 0. Shards keep, merge, commit and move these rows
as all others (trainer.dense.shard_slices).
"""

from collections.abc import Mapping, Sequence

from headrace.config import MAX_FLOAT32
from headrace.dataset.spec.config import AnySlot
from headrace.dataset.spec.join_section import JoinSection
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import DENSE_SLICES, SLICE_FLOATS, Bounds, TableSection
from headrace.pserver.rate_schedules import Constant
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.spec.history_tables import history_tables
from headrace.trainer.spec.join_tables import join_tables


def tables_on_shards(
    tables: Mapping[str, TableSection],
    dense: DenseSection,
    slots: Sequence[AnySlot] = (),
    join: JoinSection | None = None,
) -> dict[str, TableSection]:
    """The tables that the shards hold: those of the job file, the slices of the dense parameters if they do,
    histories of `slots`, and what waits for `join`."""
    slices = {DENSE_SLICES: _slices(dense)} if dense.kind.on_shards else {}
    return {**tables, **slices, **history_tables(Schema.of(slots)), **join_tables(join)}


def _slices(dense: DenseSection) -> TableSection:
    of_rows = dense.optimizer.of_rows()
    assert not isinstance(of_rows, str), "the section refuses it on shards"
    return TableSection(
        dim=SLICE_FLOATS,
        first_order=False,
        init_range=0.0,
        optimizer=of_rows,
        schedule=None if isinstance(dense.schedule, Constant) else dense.schedule,
        bounds=Bounds(low=-MAX_FLOAT32, high=MAX_FLOAT32),
        decay=1.0,
    )
