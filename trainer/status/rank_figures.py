"""Rank 0: traffic of all processes, how long ranks wait for each other, and how far they are apart.

These figures are for operators and decide nothing.

Waits come from collectives (trainer.collectives.ranks) and from pushes that shards hold until the last rank
has pushed (pserver.server.data_server). A rank waits at all shards at once, so of their figures the largest counts.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.pserver.protocol.shards import ShardFigures
from headrace.traffic import Links
from headrace.trainer.job_status import RankWaits, Status
from headrace.trainer.status.straggler import WaitTotals, straggler

F64 = NDArray[np.float64]

RECENT_PASSES = 20
"""Passes of the recent figures."""


class RankFigures:
    """The loop writes, any thread reads the results."""

    def __init__(self, world: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments = deque([WaitTotals(clock(), np.zeros((world, world)), [{}] * world)], RECENT_PASSES)

    def closed(
        self,
        status: Status,
        links: Sequence[Links],
        spent_s: Sequence[Mapping[str, float]],
        in_collectives_s: F64,
        shards: Sequence[ShardFigures],
    ) -> Status:
        """The status with these figures after a close. `links` and `spent_s`: of each rank."""
        found = {f"trainer-{rank}": _with_waits(each, in_collectives_s[rank]) for rank, each in enumerate(links)}
        found |= {f"shard-{number}": dict(each.links) for number, each in enumerate(shards)}
        at_shards_s = [np.array(each.waited_s) for each in shards if len(each.waited_s)]
        waited_s = in_collectives_s + (np.max(at_shards_s, axis=0) if at_shards_s else 0.0)
        now = WaitTotals(self._clock(), waited_s, spent_s)
        before, first, recent = self._moments[-1], self._moments[0], len(self._moments)
        self._moments.append(now)
        return replace(
            status,
            links={worker: peers for worker, peers in found.items() if peers},
            waits=RankWaits(
                last=_rounded(waited_s - before.waited_s),
                recent=_rounded(waited_s - first.waited_s),
                recent_passes=recent,
                recent_s=round(now.at_s - first.at_s, 3),
            ),
            straggler=straggler(first, now, recent),
            staleness_steps=_apart([each.apart for each in shards if each.apart]),
        )


def _with_waits(links: Links, waited_s: NDArray[np.float64]) -> dict[str, Any]:
    """The traffic of a trainer by peer; `waited_s` for each other trainer, which its own counters do not know."""
    waits = {f"trainer-{rank}": round(float(seconds), 6) for rank, seconds in enumerate(waited_s) if seconds}
    return {**links, **{peer: {**links.get(peer, {}), "wait_s": seconds} for peer, seconds in waits.items()}}


def _apart(shards: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """How far each trainer was from the others in the last pass, in steps, at the shard where that was most."""
    return {
        f"trainer-{rank}": {name: round(max(each[name] for each in at_shards), 3) for name in at_shards[0]}
        for rank, at_shards in enumerate(zip(*shards, strict=True))
    }


def _rounded(waited_s: F64) -> list[list[float]]:
    return [[round(float(seconds), 6) for seconds in row] for row in waited_s]
