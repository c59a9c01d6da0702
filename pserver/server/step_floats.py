"""Rows and gradients of steps that stay on devices: between a shard and the trainer in whose process it is.

Where rows are on the devices of several trainers, each of them has a shard in its process. Keys, shows, clicks and
commands come to a shard as always. Floats of steps do not: trainers exchange them (trainer.train.row_exchange), and
leave gradients here before their own push, so they are here when the shard has the pushes of all ranks. The shard
leaves the rows of every rank here when it answers.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.deadline import Deadline
from headrace.pserver.errors import StepTimedOut
from headrace.pserver.protocol.shards import Floats
from headrace.pserver.rows.placed_rows import PlacedMaker


@dataclass(frozen=True, slots=True)
class ComingFloats:
    """Floats that are here when the step is applied."""

    shape: tuple[int, ...]
    take: Callable[[], Floats]
    """Returns them, once the trainer of this process has pushed the step."""


class _Step(NamedTuple):
    """A step of a pass."""

    pass_number: int
    step: int


FloatsByTable = Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """The part of a trainer in the shard of its process, whose rows learn on its device."""

    makers: Mapping[str, PlacedMaker]
    """By table: its slab."""
    floats: "StepFloats"


class StepFloats:
    """The floats of the step in progress, by rank. One thread of the shard leaves rows, the trainer's takes them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._changed = num_ranks, threading.Condition()
        self._counts: dict[int, tuple[int, Mapping[str, int]]] = {}
        """By rank: the pass, and by table the rows of the batch that it has pulled and not pushed."""
        self._gradients: tuple[_Step | None, Sequence[FloatsByTable]] = None, ()
        self._rows: dict[_Step, dict[int, FloatsByTable]] = {}

    # --- the shard

    def pulled(self, pass_number: int, rank: int, counts: Mapping[str, int]) -> None:
        """A rank has pulled the first batch of a pass, with so many rows by table."""
        with self._changed:
            self._counts[rank] = pass_number, counts

    def gradients(self, pass_number: int, step: int, rank: int, table: str) -> Floats:
        """The gradients of a rank, which the trainer has brought."""
        with self._changed:
            brought, by_rank = self._gradients
        assert brought == _Step(pass_number, step), "a trainer brings all gradients before it pushes"
        return by_rank[rank][table]

    def leave_rows(self, pass_number: int, step: int, rank: int, rows: FloatsByTable) -> None:
        """Leave the rows of a rank's next batch, none if it has no more batches."""
        with self._changed:
            self._rows.setdefault(_Step(pass_number, step), {})[rank] = rows
            self._counts[rank] = pass_number, {name: each.shape[0] for name, each in rows.items()}
            self._changed.notify_all()

    # --- the trainer

    def counts(self, pass_number: int) -> list[Mapping[str, int]]:
        """By rank: how many gradients it has for this shard in the next step, by table."""
        with self._changed:
            found = [self._counts.get(rank, (0, {})) for rank in range(self._num_ranks)]
        return [counts if of == pass_number else {} for of, counts in found]

    def bring(self, pass_number: int, step: int, by_rank: Sequence[FloatsByTable]) -> None:
        """Bring the gradients of a step for this shard, before the trainer's own push."""
        with self._changed:
            self._gradients = _Step(pass_number, step), by_rank

    def rows(self, pass_number: int, step: int, deadline: Deadline) -> list[FloatsByTable]:
        """By rank: the rows that the shard leaves after a step. Waits for all ranks. Raises StepTimedOut."""
        asked = _Step(pass_number, step)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._rows.get(asked, ())) == self._num_ranks, deadline.left_s()):
                late = [rank for rank in range(self._num_ranks) if rank not in self._rows.get(asked, ())]
                raise StepTimedOut(f"the shard of this trainer has no answer for rank {late} in step {step}")
            found = self._rows[asked]
            self._rows = {each: rows for each, rows in self._rows.items() if each > asked}
        return [found[rank] for rank in range(self._num_ranks)]
