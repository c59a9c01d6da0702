"""The collectives that metrics need. `trainer.collectives.ranks.Ranks` has them; `LocalReduce` is the version for one
rank."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Reduce(Protocol):
    """Every rank makes the same calls in the same order, with the same names, types and, in `sum`, sizes."""

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sum over ranks, on all of them."""
        ...

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        """On rank 0 the columns of all ranks, by rank; None elsewhere."""
        ...


class LocalReduce:
    """One rank."""

    def sum(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        return array

    def gather(self, columns: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]] | None:
        return [dict(columns)]
