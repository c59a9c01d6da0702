"""Schedules of learning rates, of rows and of the dense part: sections of the job spec, each with the share of the rate
at a count, a pure function.

A schedule counts samples that were learnt, or versions: the passes before. Only + - * / and square root are used, so
bits agree between machines. Imports no torch.
"""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from headrace.config import Count, NotNegative, PositiveCount, Rate, Section
from headrace.registry import Registry


class RateSchedule(Section):
    """The shares of a learning rate."""

    def share(self, count: int) -> float:
        """The factor of the rate after `count` samples or versions."""
        raise NotImplementedError

    def share_after(self, samples: int, versions: int) -> float:
        """The factor of the rate after so many samples and versions: 1 for a schedule without a count."""
        return 1.0


class Constant(RateSchedule):
    """Always the rate itself."""

    kind: Literal["constant"] = "constant"
    """Constant."""

    @override
    def share(self, count: int) -> float:
        return 1.0


class CountedSchedule(RateSchedule):
    """A schedule that depends on a count."""

    counts: Literal["samples", "versions"] = "samples"
    """Unit of the schedule's numbers: samples learnt by all trainers, or versions."""

    @override
    def share_after(self, samples: int, versions: int) -> float:
        return self.share(samples if self.counts == "samples" else versions)


class DecaySchedule(CountedSchedule):
    """A schedule that rises to the rate, then falls to a share of it."""

    warmup: Count = 0
    """The share of the rate rises from 0 to 1 over this count."""
    total: PositiveCount
    """From this count on the share is `final`."""
    final: Annotated[NotNegative, Field(le=1)] = 0.0
    """Share of the rate at the end."""

    @model_validator(mode="after")
    def _falls(self) -> "DecaySchedule":
        if self.total <= self.warmup:
            raise ValueError(f"total = {self.total} is not above warmup = {self.warmup}: no count is left to fall")
        return self

    @override
    def share(self, count: int) -> float:
        if count < self.warmup:
            return count / self.warmup
        done = min(1.0, (count - self.warmup) / (self.total - self.warmup))
        return self.final + (1.0 - self.final) * self.left(done)

    def left(self, done: float) -> float:
        """The part of the fall that is still to come, 1 to 0, when `done` of its counts, 0 to 1, have passed."""
        raise NotImplementedError


class WarmupLinear(DecaySchedule):
    """Rises, then falls along a line."""

    kind: Literal["warmup_linear"]
    """Linear."""

    @override
    def left(self, done: float) -> float:
        return 1.0 - done


class WarmupCosine(DecaySchedule):
    """Rises along a line, then falls along half a cosine (Loshchilov, Hutter 2017)."""

    kind: Literal["warmup_cosine"]
    """Cosine."""

    @override
    def left(self, done: float) -> float:
        return half_cosine(done)


class Exponential(CountedSchedule):
    """A factor again and again."""

    kind: Literal["exponential"]
    """Exponential."""
    factor: Rate
    """Factor of the rate,"""
    every: PositiveCount
    """after each such count."""

    @override
    def share(self, count: int) -> float:
        return power(self.factor, count // self.every)


class Piecewise(CountedSchedule):
    """Constant between given counts."""

    kind: Literal["piecewise"]
    """Piecewise constant."""
    at: Annotated[tuple[PositiveCount, ...], Field(min_length=1, max_length=1000)]
    """Counts at which the next share begins, ascending."""
    shares: tuple[NotNegative, ...]
    """Shares of the rate: before the first count, and from each on."""

    @model_validator(mode="after")
    def _in_order(self) -> "Piecewise":
        if any(later <= before for before, later in zip(self.at, self.at[1:], strict=False)):
            raise ValueError(f"at = {list(self.at)} is not ascending")
        if len(self.shares) != len(self.at) + 1:
            raise ValueError(f"there are {len(self.shares)} shares; {len(self.at)} counts need {len(self.at) + 1}")
        return self

    @override
    def share(self, count: int) -> float:
        return self.shares[sum(count >= at for at in self.at)]


class InverseSqrt(CountedSchedule):
    """Rises, then falls with the square root of the count (Vaswani et al. 2017)."""

    kind: Literal["inverse_sqrt"]
    """Inverse square root."""
    warmup: PositiveCount
    """The share rises from 0 to 1 over this count, and is half of that at four times the count."""

    @override
    def share(self, count: int) -> float:
        return count / self.warmup if count < self.warmup else math.sqrt(self.warmup / count)


def half_cosine(x: float) -> float:
    """(1 + cos(pi x)) / 2 for x in [0, 1], by Taylor's series of the sine around x = 1/2."""
    angle = math.pi * (x - 0.5)
    term = total = angle
    for n in range(3, 25, 2):
        term *= -angle * angle / (n * (n - 1))
        total += term
    return min(1.0, max(0.0, 0.5 - 0.5 * total))


def power(base: float, exponent: int) -> float:
    """`base` to a power, by products; 0 where that is too small for a float."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


SCHEDULES = Registry(
    kind="schedule",
    group="headrace.schedules",
    base=RateSchedule,
    own={
        "constant": "pserver.rate_schedules:Constant",
        "warmup_linear": "pserver.rate_schedules:WarmupLinear",
        "warmup_cosine": "pserver.rate_schedules:WarmupCosine",
        "exponential": "pserver.rate_schedules:Exponential",
        "piecewise": "pserver.rate_schedules:Piecewise",
        "inverse_sqrt": "pserver.rate_schedules:InverseSqrt",
    },
)

if TYPE_CHECKING:
    Schedule = RateSchedule
else:
    Schedule = SCHEDULES.union()
