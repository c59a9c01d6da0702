"""Schedules of a learning rate: sections of the job spec, and the share of the rate at a count. Pure functions.

A schedule counts samples that were learnt, or versions: the passes before. Only + - * / and square root are used, so
bits agree between machines. Imports no torch.
"""

import math
from typing import Annotated, Literal, assert_never

from pydantic import Field, model_validator

from headrace.config import Count, PositiveCount, Section
from headrace.pserver.config import NotNegative, Rate


class Constant(Section):
    """Always the rate itself."""

    kind: Literal["constant"] = "constant"
    """Constant."""


class CountedSchedule(Section):
    """A schedule that depends on a count."""

    counts: Literal["samples", "versions"] = "samples"
    """Unit of the schedule's numbers: samples learnt by all trainers, or versions."""


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


class WarmupLinear(DecaySchedule):
    """Rises, then falls along a line."""

    kind: Literal["warmup_linear"]
    """Linear."""


class WarmupCosine(DecaySchedule):
    """Rises along a line, then falls along half a cosine (Loshchilov, Hutter 2017)."""

    kind: Literal["warmup_cosine"]
    """Cosine."""


class Exponential(CountedSchedule):
    """A factor again and again."""

    kind: Literal["exponential"]
    """Exponential."""
    factor: Rate
    """Factor of the rate,"""
    every: PositiveCount
    """after each such count."""


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


class InverseSqrt(CountedSchedule):
    """Rises, then falls with the square root of the count (Vaswani et al. 2017)."""

    kind: Literal["inverse_sqrt"]
    """Inverse square root."""
    warmup: PositiveCount
    """The share rises from 0 to 1 over this count, and is half of that at four times the count."""


Schedule = Annotated[
    Constant | WarmupLinear | WarmupCosine | Exponential | Piecewise | InverseSqrt, Field(discriminator="kind")
]


def share_at(schedule: Schedule, count: int) -> float:
    """The factor of the learning rate after `count` samples or versions."""
    match schedule:
        case Constant():
            return 1.0
        case WarmupLinear() | WarmupCosine():
            if count < schedule.warmup:
                return count / schedule.warmup
            done = min(1.0, (count - schedule.warmup) / (schedule.total - schedule.warmup))
            left = 1.0 - done if isinstance(schedule, WarmupLinear) else half_cosine(done)
            return schedule.final + (1.0 - schedule.final) * left
        case Exponential():
            return power(schedule.factor, count // schedule.every)
        case Piecewise():
            return schedule.shares[sum(count >= at for at in schedule.at)]
        case InverseSqrt():
            return count / schedule.warmup if count < schedule.warmup else math.sqrt(schedule.warmup / count)
        case _:
            assert_never(schedule)


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
