"""What keeps a replica fresh: one version after another, each as the difference to the one before, or whole.

`trainer.replica.feeding.FeedUpdates` has them from the live feed of a running job; exports are another source of the
same. How rows and tensors are held, and who is answered with them, is not known here.

Shapes: U unique keys of one table, D floats that inference reads of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from millrace.deadline import Deadline
from trainer.freshness import EventTimes

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table as inference reads them. Arrays may be read-only views."""

    keys_U: U64
    group_U: U16
    """Slot group of each key: with it, the key gives back its sign."""
    rows_UD: F32
    """First-order weight, if the table has them, then the vector: zeros where it has not joined yet."""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """What became of one table. A key is never both in a chunk and in `gone`."""

    rows: Sequence[Rows]
    """Chunks, none of them empty, to be applied in order: of a whole update a key may come twice, and counts as it
    comes last."""
    gone: U64
    """Keys that have no row any more; of a whole update there are none. Some may never have had one here."""

    @classmethod
    def joined(cls, parts: Sequence["TableUpdate"]) -> "TableUpdate":
        """Of parts with different keys."""
        none = np.empty(0, np.uint64)
        return cls(
            tuple(rows for part in parts for rows in part.rows), np.concatenate([none, *(p.gone for p in parts)])
        )


@dataclass(frozen=True, slots=True)
class Update:
    """One version of a job, complete: rows, tensors and model belong together."""

    job: str
    timeline: str
    version: int
    whole: bool
    """Whether it is all there is, in place of what was held; otherwise it is to be applied to the update before."""
    tables: Mapping[str, TableUpdate]
    """Every table of the job, by name."""
    dense: Mapping[str, NDArray[Any]]
    """Every tensor of the model by name, whole in every update."""
    event_time_s: float | None
    """Time of the newest event learnt, if events have times."""
    model: Mapping[str, Any] | None
    """model.json (trainer.exports.describe): where `whole`, or where it changed; else None."""
    onnx: bytes | None
    """The dense part with a named input a slot (trainer.exports.onnx), whose weights are those of `dense` once filled
    in; where `whole` or where it changed, and only if the model could be traced."""
    golden: bytes | None = None
    """golden.parquet (trainer.exports.golden): what this version must answer, where its source tells."""
    event_times: EventTimes | None = None
    """Of what was learnt since the update before; None where the source does not tell, or it is `whole`."""


class Updates(Protocol):
    """Versions of one job, in order. One thread asks; any may close."""

    def next(self, deadline: Deadline) -> Update | None:
        """The next version, several that wait at once as one; None where there is no newer one by the deadline, or by
        a bound of the source's own where it must first find out where to ask.

        The first is whole. Within a timeline the version never goes back; another timeline begins with a whole
        update. Raises Unavailable where the source cannot be reached now: ask again, nothing is lost; Refused
        where asking again will not help.
        """
        ...

    def close(self) -> None:
        """Let go of connections and threads; a `next` under way ends soon with Unavailable."""
        ...
