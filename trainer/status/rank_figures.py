"""Rank 0: traffic of all processes, how long ranks wait for each other, and how far they are apart.

The rank that the others wait for longest is named with the likely reason. These figures are for operators and decide
nothing.

Waits come from collectives (trainer.collectives.ranks) and from pushes that shards hold until the last rank
has pushed (pserver.server.data_server). A rank waits at all shards at once, so of their figures the largest counts.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.process_usage import ProcessUsage
from headrace.pserver.protocol.shards import ShardFigures
from headrace.traffic import Links
from headrace.trainer.job_status import RankWaits, Status, StragglerStatus, WorkerUsage
from headrace.trainer.status.time_spent import LoopPart

LEAST_SHARE = 0.05
"""A rank is named if another one waits for it for at least this share of the time."""
REASONS = {
    LoopPart.PIPE: "its pipe is slow",
    LoopPart.LOADER: "it makes batches slowly",
    LoopPart.FORWARD: "its forward pass is slow",
    LoopPart.BACKWARD: "its backward pass is slow",
}
"""By the part of its work that takes longer than that of the others."""
NO_REASON = "no part of its work stands out: is its machine busy, or its link slow?"
EXPLAINS = 0.5
"""A part is the reason if it explains this share of the wait."""


class WaitTotals(NamedTuple):
    """Totals since the start, at a close."""

    at_s: float
    waited_s: NDArray[np.float64]
    """(W, W) [r, q]: rank r waited for rank q."""
    spent_s: Sequence[Mapping[str, float]]
    """By rank: seconds by part."""
    cpu_s: Mapping[str, float] = {}
    """By worker: processor time since the start of its process."""


def straggler(first: WaitTotals, now: WaitTotals, num_passes: int) -> StragglerStatus | None:
    """The rank that is waited for longest between two closes; None if no rank is waited for much."""
    waited_s, length_s = now.waited_s - first.waited_s, now.at_s - first.at_s
    longest_s = waited_s.max(axis=0)
    rank = int(longest_s.argmax())
    if length_s <= 0 or longest_s[rank] < LEAST_SHARE * length_s:
        return None
    part = _reason(first, now, rank, float(longest_s[rank]))
    by_rank = {str(r): float(seconds) / num_passes for r, seconds in enumerate(waited_s[:, rank]) if r != rank}
    share = float(longest_s[rank] / length_s)
    waits = ", ".join(f"rank {r} waits {seconds:.2g} s a pass" for r, seconds in by_rank.items())
    why = NO_REASON if part is None else REASONS[part]
    return StragglerStatus(
        rank=rank,
        share=round(share, 4),
        waits_s={r: round(seconds, 6) for r, seconds in by_rank.items()},
        part=None if part is None else part.value,
        text=f"rank {rank} is waited for {share:.0%} of the time ({waits}): {why}",
    )


def _reason(first: WaitTotals, now: WaitTotals, rank: int, waited_s: float) -> LoopPart | None:
    """The part of its work on which a rank spends longer than the mean of the others, if that explains the wait."""

    def extra_s(part: LoopPart) -> float:
        pairs = zip(first.spent_s, now.spent_s, strict=True)
        spent_s = [late.get(part, 0.0) - early.get(part, 0.0) for early, late in pairs]
        others_s = [seconds for other, seconds in enumerate(spent_s) if other != rank]
        return spent_s[rank] - sum(others_s) / len(others_s)

    part = max(REASONS, key=extra_s)
    return part if extra_s(part) >= EXPLAINS * waited_s else None


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
        usage: Sequence[ProcessUsage] = (),
    ) -> Status:
        """The status with these figures after a close. `links`, `spent_s` and `usage`: of each rank."""
        found = {f"trainer-{rank}": _with_waits(each, in_collectives_s[rank]) for rank, each in enumerate(links)}
        found |= {f"shard-{number}": dict(each.links) for number, each in enumerate(shards)}
        at_shards_s = [np.array(each.waited_s) for each in shards if len(each.waited_s)]
        waited_s = in_collectives_s + (np.max(at_shards_s, axis=0) if at_shards_s else 0.0)
        used = {f"trainer-{rank}": each for rank, each in enumerate(usage)}
        used |= {f"shard-{number}": each.usage for number, each in enumerate(shards)}
        used = {worker: each for worker, each in used.items() if each.machine}
        now = WaitTotals(self._clock(), waited_s, spent_s, {worker: each.cpu_s for worker, each in used.items()})
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
            usage={worker: _usage(worker, each, first, now) for worker, each in used.items()},
            staleness_steps=_apart([each.apart for each in shards if each.apart]),
        )


def _with_waits(links: Links, waited_s: NDArray[np.float64]) -> dict[str, Any]:
    """The traffic of a trainer by peer; `waited_s` for each other trainer, which its own counters do not know."""
    waits = {f"trainer-{rank}": round(float(seconds), 6) for rank, seconds in enumerate(waited_s) if seconds}
    return {**links, **{peer: {**links.get(peer, {}), "wait_s": seconds} for peer, seconds in waits.items()}}


def _usage(worker: str, used: ProcessUsage, first: WaitTotals, now: WaitTotals) -> WorkerUsage:
    """The usage of a worker, with the cores that it used on average in recent passes."""
    length_s, before_s = now.at_s - first.at_s, first.cpu_s.get(worker)
    cores = None if before_s is None or length_s <= 0 else round(max(0.0, used.cpu_s - before_s) / length_s, 3)
    return WorkerUsage(
        machine=used.machine, pid=used.pid, cores=cores, cpu_s=used.cpu_s, memory_bytes=used.memory_bytes
    )


def _apart(shards: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """How far each trainer was from the others in the last pass, in steps, at the shard where that was most."""
    return {
        f"trainer-{rank}": {name: round(max(each[name] for each in at_shards), 3) for name in at_shards[0]}
        for rank, at_shards in enumerate(zip(*shards, strict=True))
    }


def _rounded(waited_s: F64) -> list[list[float]]:
    return [[round(float(seconds), 6) for seconds in row] for row in waited_s]
