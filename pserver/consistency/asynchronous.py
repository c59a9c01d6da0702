"""Asynchronous training, and training on copies of rows: a push is applied when it comes.

No rank waits for another within a pass.

Half-async, with `train.merge`: a push waits for those of other ranks, at most so many and so long, and they are applied
as one step over all their samples. So with one push it is async, and with all ranks in time it is sync.

With `train.max_ahead`, bounded staleness: the answer to a push waits while its rank is more than so many steps ahead of
the slowest one. A rank that pushes no more in the pass says so, and nobody waits for it.

A pull sees the pushes that are there, and always the rank's own earlier ones: a rank pulls its next rows with each
push. So the weight of a step is the rank's own, and a rank judges by itself whether its gradients are finite. Ranks
meet at the end of a pass, which bounds how far they are apart. Which of two pushes comes first differs from run to run;
every event counts once in all of them.
"""

from collections.abc import Mapping, Sequence

from headrace.errors import SpecError
from headrace.pserver.config import TableSection, extends
from headrace.pserver.consistency.policy import Consistency, ModeKeys, News, Peers, StepFigures, StepsApart
from headrace.pserver.consistency.sync import STALENESS, names
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.row_optimizers import RowOptimizer

MAX_STEPS = 1 << 62
"""More steps than a pass has."""


class ArrivalOrder:
    """The order of pushes of one pass: as they arrive. See StepOrder."""

    def __init__(self, pass_number: int, num_ranks: int, num_merged: int = 1, max_ahead: int | None = None) -> None:
        """`num_merged`: number of pushes that are applied together; a rank waits for its answer, so has one at most.
        `max_ahead`: most steps that a rank is ahead of another one; None: any number."""
        self._pass_number, self._num_applied = pass_number, 0
        self._num_merged, self._overdue = min(num_merged, num_ranks), False
        self._last_step, self._max_ahead = [-1] * num_ranks, max_ahead
        self._left: set[int] = set()
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
        enough = self._overdue or len(self._accepted) >= self._num_merged or self._no_more_come()
        return sorted(self._accepted) if enough else ()

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
        if self._last_step[rank] < step or (step, rank) in self._accepted:
            return False
        return self._max_ahead is None or step - self._slowest() <= self._max_ahead

    def leave(self, rank: int) -> None:
        self._left.add(rank)

    def _applied(self) -> dict[int, int]:
        """The last applied step of each rank that may push again; a push that waits to be merged is in no row yet."""
        waiting = {rank for _, rank in self._accepted}
        return {rank: last - (rank in waiting) for rank, last in enumerate(self._last_step) if rank not in self._left}

    def _no_more_come(self) -> bool:
        """Whether all ranks without an accepted push have left, or wait for the slowest one: there is none to merge."""
        if self._max_ahead is None:
            return False
        slowest, waiting = self._slowest(), {rank for _, rank in self._accepted}
        return all(rank in waiting or last - slowest > self._max_ahead for rank, last in self._applied().items())

    def _slowest(self) -> int:
        """The last applied step of the slowest rank that may push again."""
        return min(self._applied().values(), default=MAX_STEPS)

    def missing(self) -> Sequence[int]:
        """The slowest ones, where others wait for them; of pushes to merge, it is not known which come in time."""
        if self._max_ahead is None:
            return ()
        slowest = self._slowest()
        return [rank for rank, last in self._applied().items() if last == slowest]

    def close(self, rank: int) -> None:
        if self._accepted:
            waiting = names({other for _, other in self._accepted})
            raise InvalidShardCall(f"pass {self._pass_number} cannot close: a push of rank {waiting} is not applied")
        self._closed.add(rank)


class Async(Consistency):
    """Asynchronous training: a push is applied when it comes."""

    name = "async"
    repeatable = False
    meets_in_steps = False
    own = {
        "merge.pushes": 'merge.pushes = {value} is for mode = "async"; in mode = "{chosen}" no push waits for so many '
        "others: remove it",
        "max_ahead": 'max_ahead = {value} is for mode = "async"; mode = "{chosen}" has no such bound: remove one',
    }

    @property
    def merge_wait_s(self) -> float:
        return self._merge.wait

    def steps(self, pass_number: int, num_ranks: int) -> ArrivalOrder:
        return ArrivalOrder(pass_number, num_ranks, self._merge.pushes, self._max_ahead)

    def agree(self, peers: Peers, mine: StepFigures, news: News | None) -> tuple[StepFigures, News | None]:
        """A rank's own figures. Only rank 0 hears its news at once."""
        return mine, news

    def settle(self, peers: Peers) -> None:
        """The faster ranks wait."""
        peers.meet()


class Geo(Async):
    """Training on copies of rows: asynchronous, with one push for several batches of a rank.

    A rank learns on a copy of its own and pushes what it has learnt every `train.k_steps` batches, and with the last
    batch of a pass (trainer.train.exchanges). To a shard such a push is like any other: it is applied when it comes.
    `train.staleness` counts these exchanges.
    """

    name = "geo"
    copies_rows = True
    own = {
        "k_steps": 'k_steps is for mode = "geo"; mode = "{chosen}" exchanges in every step: remove one',
        "staleness": STALENESS,
    }

    @property
    def staleness(self) -> int:
        return self._staleness

    @classmethod
    def check(cls, train: ModeKeys) -> None:
        if train.k_steps is None:
            raise ValueError('mode = "geo" needs k_steps, the number of batches between two exchanges')
        if train.staleness > 1:
            raise ValueError(
                f'staleness is {train.staleness}; in mode = "geo" one exchange at a time goes on beside training: set 1'
            )

    @classmethod
    def check_optimizers(cls, dense: RowOptimizer | str, tables: Mapping[str, TableSection]) -> None:
        """A trainer's copy of a row moves by the sum of its gradients, times the learning rate."""
        optimizers = {f"tables.{name}": each.optimizer for name, each in tables.items()}
        if isinstance(dense, RowOptimizer):  # another one does not work on shards
            optimizers = {"dense": dense, **optimizers}
        for path, each in optimizers.items():
            if not each.adds_up and path == "dense" and each.kind == "momentum":
                raise SpecError(
                    'does not work with train.mode = "geo": with momentum differences do not add up; remove it',
                    "dense.optimizer.momentum",
                )
            if not each.adds_up:
                text = f'is "{each.kind}"; train.mode = "geo" needs "sgd", whose differences add up'
                raise SpecError(text, f"{path}.optimizer.kind")
        for name, table in tables.items():
            path = f"tables.{name}"
            if table.grad_scale != "mean":
                raise SpecError(
                    f'is "{table.grad_scale}"; train.mode = "geo" needs "mean", as its trainers know neither all shows '
                    "nor the size of a step",
                    f"{path}.grad_scale",
                )
            if table.l2:
                raise SpecError(
                    'does not work with train.mode = "geo", whose trainers push sums of several batches; set '
                    "weight_decay instead",
                    f"{path}.l2",
                )
            if extends(table):
                raise SpecError(
                    'does not work with train.mode = "geo", whose trainers do not know which rows have a vector',
                    f"{path}.extend_at",
                )
