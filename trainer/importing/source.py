"""What can be imported, as one narrow protocol: rows by slot and sign, some at a time, and dense tensors.

Kinds: trainer.importing.exported, .paddle, .columns. Which rows a job takes is trainer.importing.choice's decision.

Shapes: R rows of a batch, D length of the vector.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Brought:
    """Some rows of a source."""

    slots: tuple[str, ...]
    """The source's names of slots, that `slot_R` counts."""
    slot_R: NDArray[np.int32]
    sign_R: U64 | None
    """None where there are keys instead."""
    key_R: U64 | None
    """Keys as this job makes them, where the source has no signs."""
    weight_R: F32 | None
    """First-order weights; None: the source has none."""
    vector_RD: F32 | None
    """None: the source has none."""
    whole_R: NDArray[np.bool_] | None
    """Which rows have a vector; None: all, if the source has any."""
    statistics: Mapping[str, F32]
    """(R,) each, of "show", "click" and "delta_score": those the source has."""
    where: Callable[[int], str]
    """Where the row of a number is, for people: "part-000-00001, line 12"."""

    def __len__(self) -> int:
        return len(self.slot_R)

    def select(self, rows: Any) -> "Brought":
        """The rows that an index chooses."""

        def chosen(array: Any) -> Any:
            return None if array is None else array[rows]

        numbers = np.arange(len(self))[rows]
        statistics = {name: values[rows] for name, values in self.statistics.items()}
        return Brought(
            self.slots,
            self.slot_R[rows],
            chosen(self.sign_R),
            chosen(self.key_R),
            chosen(self.weight_R),
            chosen(self.vector_RD),
            chosen(self.whole_R),
            statistics,
            lambda row: self.where(int(numbers[row])),
        )


class Source(Protocol):
    """Something to import. Its rows may be read more than once, and come in the same order."""

    def batches(self) -> Iterator[Brought]:
        """All rows. Raises BadInput, saying where."""
        ...

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """Dense tensors by name, without "model."; empty where there are none."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What it is, for the commit: "kind", "path" and what else names it."""
        ...
