"""The seam of consistency: one policy object, read by the training loop and by every shard.

A policy answers three questions. When is a push applied? `steps`, on a shard. Whom does a rank wait for? `steps` on a
shard, `staleness`, `agree` and `settle` in the loop. What does a close promise? `promised`, at the close. A
policy decides only: it holds no rows and no locks; shards wait on its behalf.

A policy also says which keys of `train` are its own, and what it refuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.pserver.config import MergeSection, TableSection
from headrace.pserver.row_optimizers import RowOptimizer
from headrace.registry import Registry

FEATURES = "features"
"""Name of the digest of histories, counters and what waits for a join: they depend on the log alone."""
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
    sums: Sequence[float] = ()
    """Of the samples of the step before, for what follows them on all ranks: of one length on all."""


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

    def leave(self, rank: int) -> None:
        """`rank` pushes no more in this pass: no other one waits for it."""
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


class ModeKeys(Protocol):
    """The keys of `train` that modes check."""

    @property
    def staleness(self) -> int:
        """Steps by which rows lag behind."""
        ...

    @property
    def early_rows(self) -> bool:
        """Whether shards send rows before the step ends."""
        ...

    @property
    def k_steps(self) -> int | None:
        """Batches between two exchanges."""
        ...


class Consistency:
    """A mode of consistency. A policy has no state of its own: one object serves every pass."""

    name: ClassVar[str]
    """As in `train.mode`."""
    repeatable: ClassVar[bool]
    """Whether a pass that is trained again has the same weights and predictions. If not, only its counts are equal."""
    meets_in_steps: ClassVar[bool]
    """Whether all ranks take each step together: they agree on its weight, and hear news meanwhile. If not, each weighs
    its own batches, and news reach the other ranks when a pass ends."""
    copies_rows: ClassVar[bool] = False
    """Whether a rank learns several batches on a copy of their rows, and pushes the sum."""
    own: ClassVar[Mapping[str, str]] = {}
    """Keys of `train` for this mode alone, with the message about one that is set beside another mode."""

    def __init__(self, staleness: int = 0, merge: MergeSection | None = None, max_ahead: int | None = None) -> None:
        """`train.staleness`, `train.merge` and `train.max_ahead`, for the modes that have them."""
        self._staleness, self._merge, self._max_ahead = staleness, merge or MergeSection(), max_ahead

    @classmethod
    def check(cls, train: ModeKeys) -> None:
        """Raise ValueError for a key of its own that is missing or wrong."""

    @classmethod
    def check_optimizers(cls, dense: RowOptimizer | str, tables: Mapping[str, TableSection]) -> None:
        """Raise SpecError for a table that does not work with it; `dense`: the dense optimizer as one of rows, or words
        about what rows do not have."""

    @property
    def staleness(self) -> int:
        """Loop: k, by which the rows of a step may lag behind: the push of step t goes with the pull of t + 1 + k."""
        return 0

    @property
    def merge_wait_s(self) -> float | None:
        """Shard: longest time for which an accepted push waits for others; None: until all ranks have pushed."""
        return None

    @property
    def says_when_it_leaves(self) -> bool:
        """Loop: whether a rank tells the shards that it pushes no more in a pass, as others may wait for its pushes."""
        return self._max_ahead is not None

    def steps(self, pass_number: int, num_ranks: int) -> StepOrder:
        """Shard: the order of the pushes of a pass that opens now."""
        raise NotImplementedError

    def agree(self, peers: Peers, mine: StepFigures, news: News | None) -> tuple[StepFigures, News | None]:
        """Loop, before a step: the figures by which the step is weighted, and news of rank 0 where there are any. The
        step before is not pushed yet: `num_bad` says whether it is.

        `news` is what rank 0 has to tell; None on the other ranks. A pass ends on a rank when `num_batches` is 0.
        """
        raise NotImplementedError

    def settle(self, peers: Peers) -> None:
        """Loop, after the last push of this rank in a pass: return once the pushes of all ranks are applied."""
        raise NotImplementedError

    def promised(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Close: those of the digests that are equal whenever the pass is trained again; a replay compares them."""
        if self.repeatable:
            return dict(digests)
        return {name: digest for name, digest in digests.items() if name == FEATURES}


MODES = Registry(
    kind="mode",
    group="headrace.modes",
    base=Consistency,
    own={
        "sync": "pserver.consistency.sync:Sync",
        "async": "pserver.consistency.asynchronous:Async",
        "geo": "pserver.consistency.asynchronous:Geo",
    },
)


def policy_of(
    mode: str, staleness: int = 0, merge: MergeSection | None = None, max_ahead: int | None = None
) -> Consistency:
    """The policy of `train.mode`, with `train.staleness`, `train.merge` and `train.max_ahead`. Raises SpecError for an
    unknown mode."""
    return MODES.load(mode)(staleness, merge, max_ahead)
