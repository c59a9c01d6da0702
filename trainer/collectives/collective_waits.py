"""How long ranks waited for each other in collectives, without a common clock.

All ranks leave a collective at about the same time, so the rank that waits least is the last to come, and the others
wait longer by what it is late. Each rank brings its waits to the next sum of floats; so all ranks know all waits, for a
few bytes a step. These are figures for operators; nothing is decided by them.
"""

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

ALL_REDUCE = "all_reduce"
KINDS = ("sum_floats", ALL_REDUCE, "sum")
"""Collectives of a step, by their names in trainer.collectives.ranks; at most one call of each in a step."""


class CollectiveWaits:
    """The waits of all ranks since the start. One thread counts, any thread reads `waited_s`."""

    def __init__(self, world: int) -> None:
        self._mine = dict.fromkeys(KINDS, 0.0)
        self.waited_s = np.zeros((world, world))
        """[r, q]: seconds that rank r waited for rank q, the last one."""

    def add(self, kind: str, seconds: float) -> None:
        """This rank was in a collective for so long."""
        if kind in self._mine:
            self._mine[kind] += seconds

    def bring(self) -> F64:
        """(kinds,) the waits since the last call."""
        brought = np.array(list(self._mine.values()))
        self._mine = dict.fromkeys(KINDS, 0.0)
        return brought

    def heard(self, waits_RK: F64) -> None:
        """The waits of all ranks, by kind."""
        for kind in range(len(KINDS)):
            last = int(np.argmin(waits_RK[:, kind]))
            self.waited_s[:, last] += waits_RK[:, kind] - waits_RK[last, kind]
