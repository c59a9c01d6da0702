"""Ranks that are threads of one process, and the collectives that each of them made."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

MEET_S = 60.0
"""A rank that waits so long for the others fails: they make other collectives, or fewer."""


class Meeting:
    """Where the ranks of a job meet for their collectives."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world)
        self._brought: list[Any] = [None] * world

    def meet(self, rank: int, kind: str, value: Any) -> list[Any]:
        """What all ranks bring, by rank. They must make the same call."""
        self._brought[rank] = (kind, value)
        self._barrier.wait(MEET_S)
        brought = list(self._brought)
        self._barrier.wait(MEET_S)  # all have read it
        kinds = {kind for kind, _ in brought}
        assert len(kinds) == 1, f"the ranks make different collectives: {sorted(kinds)}"
        return [value for _, value in brought]

    def abort(self) -> None:
        """Have every rank fail that waits."""
        self._barrier.abort()


class ThreadRanks:
    """See trainer.collectives.ranks.Ranks; sums are in rank order. `made` lists the collectives of this rank."""

    def __init__(self, rank: int, world: int, meeting: Meeting) -> None:
        self.rank, self.world, self._meeting = rank, world, meeting
        self.made: list[str] = []

    def _meet(self, kind: str, value: Any) -> list[Any]:
        self.made.append(kind)
        return self._meeting.meet(self.rank, kind, value)

    def sum(self, array):
        return np.add.reduce(self._meet(f"sum {array.shape}", array.copy()))

    def sum_floats(self, array):
        total, *others = self._meet(f"sum_floats {array.shape}", array.copy())
        for other in others:
            total = total + other
        return total

    def all_reduce(self, flat):
        total, *others = self._meet(f"all_reduce {tuple(flat.shape)}", flat.detach().clone())
        for other in others:
            total = total + other
        flat.copy_(total)
        return lambda: None

    def reduce_scatter(self, flat, size):
        brought = self._meet(f"reduce_scatter {tuple(flat.shape)} {size}", flat.detach().clone())
        groups = [sum(brought[first + 1 : first + size], brought[first]) for first in range(0, self.world, size)]
        flat.fill_(float("nan"))
        self._own(flat, size).copy_(self._own(sum(groups[1:], groups[0]), size))
        return lambda: None

    def all_gather(self, flat, size):
        brought = self._meet(f"all_gather {tuple(flat.shape)} {size}", self._own(flat, size).clone())
        first = self.rank - self.rank % size
        flat.copy_(torch.cat(brought[first : first + size]))

    def all_gather_of_ranks(self, flat):
        self.all_gather(flat, self.world)
        return lambda: None

    def _own(self, flat, size):
        return flat.view(size, -1)[self.rank % size]

    def all_to_all(self, parts, sizes):
        brought = self._meet("all_to_all", [part.clone() for part in parts])
        found = [brought[rank][self.rank] for rank in range(self.world)]
        assert [len(each) for each in found] == list(sizes), "a rank expects other floats than there are"
        return found

    def copy_from_rank_0(self, flat):
        flat.copy_(self._meet(f"copy {tuple(flat.shape)}", flat.detach().clone())[0])

    def gather(self, columns: Mapping[str, Any]):
        parts = self._meet(f"gather {sorted(columns)}", {name: column.copy() for name, column in columns.items()})
        return parts if self.rank == 0 else None

    def broadcast(self, message):
        return dict(self._meet("broadcast", message)[0])

    def meet(self):
        self._meet("meet", None)

    def links(self):
        return {}

    def waited_s(self):
        return np.zeros((self.world, self.world))

    def close(self) -> None:
        pass


def on_ranks(world: int, act: Callable[[ThreadRanks], Any]) -> tuple[list[Any], Sequence[ThreadRanks]]:
    """What `act` gives on each rank, and the ranks; the first error is raised."""
    meeting = Meeting(world)
    ranks = [ThreadRanks(rank, world, meeting) for rank in range(world)]
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(ranks[rank])
        except BaseException as error:  # noqa: BLE001  # raised again below, in the test's thread
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return results, ranks
