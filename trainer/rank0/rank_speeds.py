"""The share of each trainer in a pass, by its speed in the passes before. Pure.

It is for modes in which trainers do not wait for each other within a pass: with equal shares all of them would wait for
the slowest one at its end. The plan of a pass is logged, so a replay trains the same shares, however fast trainers are
then.
"""

from collections.abc import Sequence

NEWEST = 0.75
"""Weight of the newest pass in a speed: after one that was slow by accident a trainer keeps a quarter of its part."""
MOST = 50.0
"""Largest ratio of two shares. So the slowest trainer gets enough events to show that it is fast again."""


class RankSpeeds:
    """Written on one thread; `shares` may be read on any."""

    def __init__(self, num_ranks: int) -> None:
        self._speeds: list[float | None] = [None] * num_ranks
        self.shares: tuple[float, ...] = ()
        """By rank, with the sum 1; empty while the speed of a rank is not known: shares are equal then."""

    def trained(self, num_positions: Sequence[int], seconds: Sequence[float]) -> None:
        """A pass was trained: by rank, the number of its positions, and how long it took without waits for others."""
        for rank, (count, taken_s) in enumerate(zip(num_positions, seconds, strict=True)):
            if count and taken_s > 0:
                now, before = count / taken_s, self._speeds[rank]
                self._speeds[rank] = now if before is None else NEWEST * now + (1 - NEWEST) * before
        known = [speed for speed in self._speeds if speed is not None]
        if len(known) == len(self._speeds):
            bounded = [max(speed, max(known) / MOST) for speed in known]
            self.shares = tuple(speed / sum(bounded) for speed in bounded)
