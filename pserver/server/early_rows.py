"""The rows of each rank's next batch that no rank pushes in the present step: a shard may send them before its end.

A rank names its batch of a step, and the one whose rows it wants next, before it pushes the step. Once all ranks have
done so the shard knows which rows the step may change. All others are final until the step after it, for which this
rank has yet to push; so they have the same bits whenever they are read until then.

Tables with admission have no early rows, since a step may make rows for keys that have none, and neither have the dense
slices, which every step changes. Pure: no lock, no wait, no rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.config import DENSE_SLICES
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.rows.table_rows import I32
from headrace.pserver.server.pushes import ResolvedBatch

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Wish:
    """The batches of a rank in a step."""

    learnt: ResolvedBatch | None
    wanted: ResolvedBatch | None
    number: int | None
    """Of the wanted batch."""


class EarlyRows:
    """Of one pass."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._step = num_ranks, -1
        self._wishes: dict[int, _Wish] = {}
        self._early: dict[int, tuple[int, dict[str, Mask]]] = {}

    def ask(
        self, step: int, rank: int, learnt: ResolvedBatch | None, wanted: ResolvedBatch | None, number: int | None
    ) -> None:
        """A rank asks. A repeat changes nothing. Raises InvalidShardCall for a step out of turn."""
        if step < self._step or (step > self._step and self._step >= 0 and not self.may_answer(self._step)):
            raise InvalidShardCall(f"early rows of step {step}, while ranks ask for those of step {self._step}")
        if step > self._step:
            self._step = step
            self._wishes.clear()
        if rank in self._wishes:
            return
        self._wishes[rank] = _Wish(learnt, wanted, number)
        if self.may_answer(step):
            self._decide()

    def may_answer(self, step: int) -> bool:
        """Whether all ranks have asked in a step."""
        return step < self._step or (step == self._step and len(self._wishes) == self._num_ranks)

    def of(self, rank: int, number: int | None) -> dict[str, Mask]:
        """(U,) by table: which rows of a rank's batch are early; none in tables that are not there."""
        known, masks = self._early.get(rank, (None, {}))
        return masks if number is not None and number == known else {}

    def missing(self) -> list[int]:
        """The ranks that have not asked in the present step."""
        return [rank for rank in range(self._num_ranks) if rank not in self._wishes]

    def _decide(self) -> None:
        learnt = [wish.learnt for wish in self._wishes.values() if wish.learnt is not None]
        names = {name for batch in learnt for name in batch.rows}
        used = {
            name: np.unique(np.concatenate([batch.rows[name] for batch in learnt if name in batch.rows]))
            for name in sorted(names - {DENSE_SLICES})
        }
        for rank, wish in self._wishes.items():
            if wish.wanted is not None and wish.number is not None:
                self._early[rank] = wish.number, _unused(wish.wanted, used)


def _unused(batch: ResolvedBatch, used: Mapping[str, I32]) -> dict[str, Mask]:
    if not batch.learn:
        return {}
    return {
        name: ~np.isin(rows_U, used[name]) if name in used else np.ones(len(rows_U), np.bool_)
        for name, rows_U in batch.rows.items()
        if name != DENSE_SLICES and name not in batch.keys
    }
