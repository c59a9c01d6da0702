"""The seam of consistency: one policy object, read by the training loop and by every shard.

A policy answers three questions. When is a push applied? `steps`, on a shard. Whom does a rank wait for? `steps` on a
shard, `staleness`, `agree` and `settle` in the loop. What does a close promise? `promised`, at the close. A
policy decides only: it holds no rows and no locks; shards wait on its behalf.

The choice between policies is pserver.consistency.modes' work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

News = dict[str, Any]
"""Rank 0's message to all ranks in the middle of a pass, as JSON-able data."""


class Peers(Protocol):
    """The trainers of the job, as a policy uses them. Every rank makes the same calls in the same order."""

    def sum_floats(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over ranks, in rank order."""
        ...

    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """The message of rank 0 on all ranks; the other ranks pass None."""
        ...

    def meet(self) -> None:
        """Wait until all ranks call it, however long the slowest one takes."""
        ...


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The contribution of one rank to a step, or the sum over all ranks that it waits for."""

    weights: Sequence[float]
    """Weight of the samples, by task."""
    num_samples: int
    num_batches: int
    """0 on a rank that has run out of batches."""
    num_bad: int = 0
    """1 on a rank whose loss or gradient of the step before is not finite; if there is one, no rank pushes it."""


@dataclass(frozen=True, slots=True)
class StepsApart:
    """How far a rank was from the others in a pass, in steps. For operators."""

    mean: float = 0.0
    """Steps of other ranks that were applied between a pull of this rank and its push, over its pushes."""
    max: int = 0
    """The most of them at one push."""
    behind: int = 0
    """The most steps by which another rank was ahead."""


class StepOrder(Protocol):
    """The pushes of one open pass on one shard. Steps count from 0. Calls are made one at a time.

    A shard calls `push`, applies the pushes of `due`, calls `applied` where there were any, and answers the rank once
    `may_answer` is true.
    """

    @property
    def num_applied(self) -> int:
        """Steps of which a push is applied. While it is 0, rows are as the last close left them."""
        ...

    def push(self, step: int, rank: int) -> bool:
        """Accept the push of a rank. False: it was applied before and must not count again.

        A push that is repeated before it is applied counts once. Raises InvalidShardCall for a push out of turn.
        """
        ...

    def due(self) -> Sequence[tuple[int, int]]:
        """(step, rank) of the accepted pushes that are to be applied now, in the order in which they are merged."""
        ...

    def applied(self) -> None:
        """The pushes of `due` are applied."""
        ...

    def wait_no_longer(self) -> None:
        """An accepted push has waited for Consistency.merge_wait_s: what is accepted is due now."""
        ...

    def may_answer(self, step: int, rank: int) -> bool:
        """Whether `rank`, which pushed `step`, may read the rows that it asked for with its push."""
        ...

    def missing(self) -> Sequence[int]:
        """The ranks that waiting ranks wait for."""
        ...

    def apart(self) -> Sequence[StepsApart]:
        """By rank, up to now; empty where all ranks take each step together."""
        ...

    def close(self, rank: int) -> None:
        """`rank` pushes no more in this pass. Raises InvalidShardCall where an accepted push could no longer be
        applied."""
        ...


class Consistency(Protocol):
    """Policies have no state of their own: one object serves every pass."""

    name: str
    """As in `train.mode`."""
    repeatable: bool
    """Whether a pass that is trained again has the same weights and predictions. If not, only its counts are equal."""
    meets_in_steps: bool
    """Whether all ranks take each step together: they agree on its weight, and hear news meanwhile. If not, each weighs
    its own batches, and news reach the other ranks when a pass ends."""

    @property
    def staleness(self) -> int:
        """Loop: k, by which the rows of a step may lag behind: the push of step t goes with the pull of t + 1 + k."""
        ...

    @property
    def merge_wait_s(self) -> float | None:
        """Shard: longest time for which an accepted push waits for others; None: until all ranks have pushed."""
        ...

    def steps(self, pass_number: int, num_ranks: int) -> StepOrder:
        """Shard: the order of the pushes of a pass that opens now."""
        ...

    def agree(self, peers: Peers, mine: StepFigures, news: News | None) -> tuple[StepFigures, News | None]:
        """Loop, before a step: the figures by which the step is weighted, and news of rank 0 where there are any. The
        step before is not pushed yet: `num_bad` says whether it is.

        `news` is what rank 0 has to tell; None on the other ranks. A pass ends on a rank when `num_batches` is 0.
        """
        ...

    def settle(self, peers: Peers) -> None:
        """Loop, after the last push of this rank in a pass: return once the pushes of all ranks are applied."""
        ...

    def promised(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Close: those of the digests that are equal whenever the pass is trained again; a replay compares them."""
        ...
