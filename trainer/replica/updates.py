"""Updates of a replica: one version after another, each a difference to the one before, or whole.

Their sources are the live feed of a running job (trainer.replica.feed_updates) and exports
(trainer.replica.export_updates). trainer.replica.replica_state applies them.

Shapes: U unique keys of one table, D floats that inference reads of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.deadline import Deadline
from headrace.pserver.lifecycle.day_decay import DayDecay
from headrace.trainer.status.freshness import EventTimes

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]
ItemSource: TypeAlias = tuple[str, ...] | pa.Table
"""Files of a catalogue on this machine, or globs of them; or the fields of the items that came with an export."""


@dataclass(frozen=True, slots=True)
class ReplicaRows:
    """Rows of one table as inference reads them. Arrays may be read-only views."""

    keys_U: U64
    group_U: U16
    """Slot group of each key; key and group together give the sign."""
    rows_UD: F32
    """First-order weight, if the table has them, then the vector: zeros before the row has one."""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The changes of one table. A key is never both in a chunk and in `gone`."""

    rows: Sequence[ReplicaRows]
    """Chunks, none of them empty, in order. In a whole update a key may repeat; its last row counts."""
    gone: U64
    """Deleted keys; empty in a whole update. The replica may never have had some of them."""

    @classmethod
    def joined(cls, parts: Sequence["TableUpdate"]) -> "TableUpdate":
        """The union of parts with different keys."""
        none = np.empty(0, np.uint64)
        return cls(
            tuple(rows for part in parts for rows in part.rows), np.concatenate([none, *(p.gone for p in parts)])
        )


@dataclass(frozen=True, slots=True)
class ReplicaUpdate:
    """One version of a job, complete: rows, tensors and model belong together."""

    job: str
    timeline: str
    version: int
    whole: bool
    """Whether it replaces everything; otherwise it applies to the version before."""
    tables: Mapping[str, TableUpdate]
    """Every table of the job, by name; those of histories and counters as `memories` says."""
    dense: Mapping[str, NDArray[Any]]
    """Every tensor of the model by name, in every update."""
    event_time_s: float | None
    """Time of the newest event learnt, if events have times."""
    model: Mapping[str, Any] | None
    """model.json (trainer.exports.model_document), if `whole` or changed; else None."""
    onnx: bytes | None
    """The dense part with named inputs (trainer.exports.onnx_model), to be run with the weights `dense`, if `whole` or
    changed; None also where the model could not be traced."""
    golden: bytes | None = None
    """golden.parquet (trainer.exports.golden): predictions that this version must give, if its source has them."""
    exact: bool = True
    """Whether its rows are the job's bit for bit, and all of them: no type is shorter, no threshold leaves any out."""
    goes_back: bool = False
    """Whether a whole update may be older than the version before: the job went back to it."""
    memories: frozenset[str] = frozenset()
    """The tables of histories, counters and statistics of rows that are among `tables`: rows as shards hold them, or
    show, click and the day of which they are."""
    decays: Mapping[str, DayDecay] = field(default_factory=dict)
    """Of each table of statistics of rows among `memories`: the day of the version, and the rates up to it."""
    items: ItemSource | None = None
    """The catalogue of items to retrieve, where the source has one; None: that of the version before."""
    event_times: EventTimes | None = None
    """Event times since the update before; None where the source does not know them, or if `whole`."""


class ReplicaUpdates(Protocol):
    """Versions of one job, in order. One thread calls `next`; any may call `close`."""

    def next(self, deadline: Deadline) -> ReplicaUpdate | None:
        """The next version; several waiting versions come as one. None where there is none by the deadline, or by a
        bound of the source while it looks for its peer.

        The first update is whole. Within a timeline versions only increase, unless the job goes back; another
        timeline, and the way back, begin with a whole update. Raises Unavailable where the source cannot be reached now
        (call again, nothing is lost), and Refused where another call cannot help.
        """
        ...

    def close(self) -> None:
        """Close connections and end threads. A running `next` soon raises Unavailable."""
        ...
