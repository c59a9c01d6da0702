"""Counts of tables, as rank 0 reads them at a close."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from headrace.pserver.protocol.table_operations import sum_by_group


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of one table on the device of a trainer (pserver.rows.placed_rows)."""

    num_rows: int
    """Rows that have a place on the device."""
    num_bytes: int
    """Memory of the device for them, with room for more."""
    num_read: int
    """Rows that the steps of the open or last pass read, each once a step."""
    num_apart: int
    """Those of them without a place, which travelled for their step alone."""

    @classmethod
    def total(cls, shards: Sequence["DeviceRows | None"]) -> "DeviceRows | None":
        """The counts of all shards; None where rows are not on devices."""
        found = [each for each in shards if each is not None]
        if not found:
            return None
        sums = (sum(getattr(each, field.name) for each in found) for field in fields(cls))
        return cls(*sums)


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
    """Rows changed since the last commit, on the fullest shard."""
    max_dirty_rows: int | None = None
    """Most dirty rows of one shard before its memory is full; None: memory is not bounded."""
    sweeping: bool = False
    """Whether rows that a shrink deleted are still being removed."""
    unadmitted: int = 0
    """Records of keys without admission, in the open or last pass."""
    new_by_group: Mapping[int, int] = field(default_factory=dict)
    """Rows made in the open or last pass, by slot group: a function of the log, also while rows are removed."""
    frozen_groups: tuple[int, ...] = ()
    """Slot groups whose rows do not learn; the same on all shards."""
    device: DeviceRows | None = None
    """None: its rows learn on the shard."""

    @classmethod
    def total(cls, shards: Sequence["TableStats"]) -> "TableStats":
        """The counts of all shards."""
        fullest = max(shards, key=lambda each: each.dirty_rows)
        return cls(
            sum(each.num_rows for each in shards),
            sum(each.num_bytes for each in shards),
            sum(each.new_rows for each in shards),
            sum_by_group(each.rows_by_group for each in shards),
            fullest.dirty_rows,
            fullest.max_dirty_rows,
            any(each.sweeping for each in shards),
            sum(each.unadmitted for each in shards),
            sum_by_group(each.new_by_group for each in shards),
            shards[0].frozen_groups,
            DeviceRows.total([each.device for each in shards]),
        )
