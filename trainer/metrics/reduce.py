"""What metrics need of the other ranks. `trainer.ranks.Ranks` is one; `LocalReduce` is the twin for one rank."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Reduce(Protocol):
    """Every rank makes the same calls in the same order, with the same names, types and, in `sum`, sizes."""

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sum over ranks, given to all of them."""
        ...

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """Columns of all ranks on the chief, by rank; None elsewhere."""
        ...


class LocalReduce:
    """One rank."""

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """See Reduce."""
        return array

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """See Reduce."""
        return [dict(columns)]
