"""The rank that the others wait for longest, with the likely reason. Pure; nothing is decided by it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.job_status import StragglerStatus
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
