"""Sources of an import, as one narrow protocol: rows by slot and sign, in batches, and dense tensors.

Implementations: trainer.importing.export_source, .paddle, .columns. The rows to import are chosen by
trainer.importing.selection.

Shapes: R rows of a batch, D length of the vector, K floats of the optimizer's state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """A batch of rows of a source."""

    slots: tuple[str, ...]
    """The source's slot names; `slot_R` has indexes into it."""
    slot_R: NDArray[np.int32]
    sign_R: U64 | None
    """None: `key_R` has keys instead."""
    key_R: U64 | None
    """Keys as this job computes them, for a source without signs."""
    weight_R: F32 | None
    """First-order weights; None: the source has none."""
    vector_RD: F32 | None
    """None: the source has none."""
    whole_R: NDArray[np.bool_] | None
    """True if a row has a vector; None: all have, if the source has vectors."""
    statistics: Mapping[str, F32]
    """(R,) each: those of "show", "click" and "delta_score" that the source has."""
    where: Callable[[int], str]
    """The place of row number i, for people: "part-000-00001, line 12"."""
    state_RK: F32 | None = None
    """State of the optimizer as the job's table keeps it; None: it begins anew. That of a vector counts with it."""

    def __len__(self) -> int:
        return len(self.slot_R)

    def select(self, rows: Any) -> "SourceRows":
        """The rows that an index selects."""

        def chosen(array: Any) -> Any:
            return None if array is None else array[rows]

        numbers = np.arange(len(self))[rows]
        statistics = {name: values[rows] for name, values in self.statistics.items()}
        return SourceRows(
            self.slots,
            self.slot_R[rows],
            chosen(self.sign_R),
            chosen(self.key_R),
            chosen(self.weight_R),
            chosen(self.vector_RD),
            chosen(self.whole_R),
            statistics,
            lambda row: self.where(int(numbers[row])),
            chosen(self.state_RK),
        )


class ImportSource(Protocol):
    """A source of an import. Its rows may be read more than once, always in the same order."""

    def batches(self) -> Iterator[SourceRows]:
        """All rows. Raises BadInput, which names the place."""
        ...

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """Dense tensors by name, without the prefix "model."; empty if there are none."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """A description for the commit: "kind", "path" and more."""
        ...
