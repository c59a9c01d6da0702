"""Synchronous training: every rank takes part in every step, and steps are applied in their order.

With staleness k a pull for step t sees exactly the first max(0, t - k) steps of the pass; with k = 0 that is all before
it. The pushes of a step are merged in rank order, so the same pass gives the same bits at every replay.

A shard needs no k for that, only the order of each rank's calls (trainer.train.exchanges). The pulls of steps 0 to k
come before the first push. The push of step s - 1 comes with the pull of step s + k, which sees s steps, and its answer
comes before the push of step s. So when all pushes of step s are here, every pull up to s + k is answered, and step s
may be applied. A rank without batches pushes and pulls nothing, in the same order.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from headrace.pserver.consistency.policy import Consistency, ModeKeys, News, Peers, StepFigures, StepsApart
from headrace.pserver.errors import InvalidShardCall

STALENESS = (
    'staleness counts steps of mode = "sync", and exchanges of mode = "geo"; mode = "{chosen}" has none: remove one'
)
EARLY = (
    'early_rows is for mode = "sync" with staleness = 0; other steps do not wait for the rows of the step before: '
    "remove it"
)


class StepBarrier:
    """The order of pushes of one pass: a step is applied when the push of every rank is in. See StepOrder."""

    def __init__(self, pass_number: int, num_ranks: int) -> None:
        self._pass_number, self._num_ranks = pass_number, num_ranks
        self._next_step = 0
        self._arrived: set[int] = set()
        self._closed: set[int] = set()

    @property
    def num_applied(self) -> int:
        return self._next_step

    def push(self, step: int, rank: int) -> bool:
        if step == self._next_step - 1:
            return False
        if step != self._next_step:
            raise InvalidShardCall(
                f"push of step {step} of pass {self._pass_number}: the next step of this shard is {self._next_step}"
            )
        if self._closed:
            raise InvalidShardCall(
                f"push of step {step} of pass {self._pass_number} after ranks {names(self._closed)} closed it"
            )
        self._arrived.add(rank)
        return True

    def due(self) -> Sequence[tuple[int, int]]:
        if len(self._arrived) < self._num_ranks:
            return ()
        return [(self._next_step, rank) for rank in range(self._num_ranks)]

    def applied(self) -> None:
        self._next_step += 1
        self._arrived.clear()

    def wait_no_longer(self) -> None:
        """Every push waits for those of all ranks."""

    def may_answer(self, step: int, rank: int) -> bool:
        return self._next_step > step

    def leave(self, rank: int) -> None:
        """A rank without batches takes part in every step."""

    def missing(self) -> Sequence[int]:
        return [rank for rank in range(self._num_ranks) if rank not in self._arrived]

    def apart(self) -> Sequence[StepsApart]:
        """They never are."""
        return ()

    def close(self, rank: int) -> None:
        if self._arrived:
            raise InvalidShardCall(
                f"pass {self._pass_number} cannot close: step {self._next_step} lacks rank {names(self.missing())}"
            )
        self._closed.add(rank)


class Sync(Consistency):
    """Synchronous training: steps are applied in their order."""

    name = "sync"
    repeatable = True
    meets_in_steps = True
    own = {
        "staleness": STALENESS,
        "early_rows": EARLY,
    }

    @classmethod
    def check(cls, train: ModeKeys) -> None:
        if train.staleness and train.early_rows:
            raise ValueError(EARLY)

    @property
    def staleness(self) -> int:
        return self._staleness

    def steps(self, pass_number: int, num_ranks: int) -> StepBarrier:
        return StepBarrier(pass_number, num_ranks)

    def agree(self, peers: Peers, mine: StepFigures, news: News | None) -> tuple[StepFigures, News | None]:
        """Sums over all ranks. News travel in a message of their own, which a flag announces."""
        counts = mine.num_samples, mine.num_batches, mine.num_bad, news is not None
        figures = np.array([*mine.sums, *mine.weights, *counts], np.float64)
        total = peers.sum_floats(figures)
        heard = peers.broadcast(news) if total[-1] else None
        num_samples, num_batches, num_bad = (int(count) for count in total[-4:-1])
        floats, begin = [float(each) for each in total[:-4]], len(mine.sums)
        return StepFigures(floats[begin:], num_samples, num_batches, num_bad, tuple(floats[:begin])), heard

    def settle(self, peers: Peers) -> None:
        """The answer to the last push came after the pushes of all ranks."""


def names(ranks: Iterable[int]) -> str:
    """Ranks as a message lists them."""
    return ", ".join(str(rank) for rank in sorted(ranks))
