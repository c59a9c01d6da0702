"""Asynchronous training: a push is applied when it comes, and no rank waits for another within a pass.

Half-async, with `train.merge`: a push waits for those of other ranks, at most so many and so long, and they are applied
as one step over all their samples. So with one push it is async, and with all ranks in time it is sync.

A pull sees the pushes that are there, and always the rank's own earlier ones: a rank pulls its next rows with each
push. So the weight of a step is the rank's own, and a rank judges by itself whether its gradients are finite. Ranks
meet at the end of a pass, which bounds how far they are apart. Which of two pushes comes first differs from run to run;
every event counts once in all of them.
"""

from collections.abc import Mapping, Sequence

from headrace.pserver.config import MergeSection
from headrace.pserver.consistency.policy import News, Peers, StepFigures, StepsApart
from headrace.pserver.consistency.sync import names
from headrace.pserver.errors import InvalidShardCall


class ArrivalOrder:
    """The order of pushes of one pass: as they arrive. See StepOrder."""

    def __init__(self, pass_number: int, num_ranks: int, num_merged: int = 1) -> None:
        """`num_merged`: number of pushes that are applied together; a rank waits for its answer, so has one at most."""
        self._pass_number, self._num_applied = pass_number, 0
        self._num_merged, self._overdue = min(num_merged, num_ranks), False
        self._last_step = [-1] * num_ranks
        self._accepted: list[tuple[int, int]] = []
        self._closed: set[int] = set()
        self._num_pushes = 0
        self._others_read, self._missed, self._most_missed, self._behind = ([0] * num_ranks for _ in range(4))

    @property
    def num_applied(self) -> int:
        return self._num_applied

    def push(self, step: int, rank: int) -> bool:
        last = self._last_step[rank]
        if step == last:
            return (step, rank) in self._accepted
        if rank in self._closed:
            raise InvalidShardCall(f"push of step {step} of pass {self._pass_number} after rank {rank} closed it")
        if step != last + 1:
            raise InvalidShardCall(
                f"push of step {step} of pass {self._pass_number}: the next step of rank {rank} is {last + 1}"
            )
        self._last_step[rank] = step
        self._accepted.append((step, rank))
        self._measure(step, rank)
        return True

    def _measure(self, step: int, rank: int) -> None:
        """Note how far the others went since this rank read its rows, all of its own earlier steps being applied."""
        missed = self._num_pushes - step - self._others_read[rank]
        self._missed[rank] += missed
        self._most_missed[rank] = max(self._most_missed[rank], missed)
        self._behind[rank] = max(self._behind[rank], max(self._last_step) - step)

    def apart(self) -> Sequence[StepsApart]:
        """The first pull counts as if it were at the beginning of the pass."""
        ranks = zip(self._missed, self._last_step, self._most_missed, self._behind, strict=True)
        return [StepsApart(missed / max(1, last + 1), most, behind) for missed, last, most, behind in ranks]

    def due(self) -> Sequence[tuple[int, int]]:
        return sorted(self._accepted) if self._overdue or len(self._accepted) >= self._num_merged else ()

    def applied(self) -> None:
        self._num_pushes += len(self._accepted)
        for step, rank in self._accepted:
            self._others_read[rank] = self._num_pushes - step - 1
        self._accepted.clear()
        self._overdue = False
        self._num_applied += 1

    def wait_no_longer(self) -> None:
        self._overdue = bool(self._accepted)

    def may_answer(self, step: int, rank: int) -> bool:
        return self._last_step[rank] >= step and (step, rank) not in self._accepted

    def missing(self) -> Sequence[int]:
        """Which ones come in time is not known."""
        return ()

    def close(self, rank: int) -> None:
        if self._accepted:
            waiting = names({other for _, other in self._accepted})
            raise InvalidShardCall(f"pass {self._pass_number} cannot close: a push of rank {waiting} is not applied")
        self._closed.add(rank)


class Async:
    """Asynchronous training: a push is applied when it comes."""

    name = "async"
    repeatable = False
    meets_in_steps = False
    staleness = 0

    def __init__(self, merge: MergeSection) -> None:
        self._merge = merge

    @property
    def merge_wait_s(self) -> float:
        return self._merge.wait

    def steps(self, pass_number: int, num_ranks: int) -> ArrivalOrder:
        return ArrivalOrder(pass_number, num_ranks, self._merge.pushes)

    def agree(self, peers: Peers, mine: StepFigures, news: News | None) -> tuple[StepFigures, News | None]:
        """A rank's own figures. Only rank 0 hears its news at once."""
        return mine, news

    def settle(self, peers: Peers) -> None:
        """The faster ranks wait."""
        peers.meet()

    def promised(self, digests: Mapping[str, str]) -> dict[str, str]:
        """None, since weights depend on the order of arrival."""
        return {}
