"""Figures of each slot over a pass, their drift from a reference, and which of them are outside their bounds. Pure.

Counts are integers that merge by addition over ranks and passes, so no figure depends on the number of trainers.
trainer.rank0.slot_guards keeps the reference.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.dataset.samples.slot_counters import SlotCounters, SlotSum, distinct_of
from headrace.trainer.guard_config import GuardBounds

NO_COUNT = 0.5
"""Added to each count for the drift, so that an empty bucket has a share."""


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Counts of one sparse slot over one pass or several."""

    samples: int
    empty: int
    """Samples without a value."""
    values: int
    dropped: int
    """Values that are the slot's padding."""
    buckets: tuple[int, ...]
    """Values by hash (dataset.samples.slot_counters)."""

    def __add__(self, other: "SlotCounts") -> "SlotCounts":
        buckets = tuple(a + b for a, b in zip(self.buckets, other.buckets, strict=True))
        return SlotCounts(
            self.samples + other.samples,
            self.empty + other.empty,
            self.values + other.values,
            self.dropped + other.dropped,
            buckets,
        )

    def plain(self) -> list[int]:
        """As JSON-able data."""
        return [self.samples, self.empty, self.values, self.dropped, *self.buckets]

    @classmethod
    def of_plain(cls, numbers: Sequence[int]) -> "SlotCounts":
        """The inverse of `plain`."""
        samples, empty, values, dropped, *buckets = numbers
        return cls(samples, empty, values, dropped, tuple(buckets))


@dataclass(frozen=True, slots=True)
class SlotPass:
    """One sparse slot in one pass."""

    counts: SlotCounts
    distinct: int
    """Distinct values, approximate."""


def slots_of(counters: SlotCounters) -> dict[str, SlotPass]:
    """Every sparse slot of the counters of a pass, over all ranks."""
    found = {}
    rows = zip(counters.figures(), counters.sums_SK, counters.registers_SR, counters.buckets_SK, strict=True)
    for figures, sums, registers, buckets in rows:
        if figures.sparse:
            columns = [SlotSum.SAMPLES, SlotSum.EMPTY, SlotSum.VALUES, SlotSum.PADDING]
            counts = SlotCounts.of_plain([*sums[columns].tolist(), *buckets.tolist()])
            found[figures.name] = SlotPass(counts, round(distinct_of(registers)) if counts.values else 0)
    return found


def drift(now: SlotCounts, reference: SlotCounts) -> float:
    """The population stability index: sum of (p - q) ln(p / q) over buckets, and over samples without a value.

    0 where shares are equal. Two samples of one distribution give about (buckets) (1/n + 1/m).
    """
    ours, theirs = (_shares((*each.buckets, each.empty)) for each in (now, reference))
    return math.fsum((p - q) * math.log(p / q) for p, q in zip(ours, theirs, strict=True))


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts) + NO_COUNT * len(counts)
    return [(count + NO_COUNT) / total for count in counts]


def figures_of(slot: SlotPass, new_rows: int | None, reference: SlotCounts | None) -> dict[str, float | None]:
    """The figures that bounds compare, and those of the reference. `new_rows`: None where the table is unknown."""
    counts = slot.counts
    return {
        **_rates(counts),
        "distinct": slot.distinct,
        "new_rows": None if new_rows is None else new_rows / max(1, counts.values),
        "drift": None if reference is None else drift(counts, reference),
        **({} if reference is None else {f"reference_{name}": value for name, value in _rates(reference).items()}),
    }


def _rates(counts: SlotCounts) -> dict[str, float]:
    samples = max(1, counts.samples)
    return {
        "coverage": 1 - counts.empty / samples,
        "null_rate": counts.dropped / max(1, counts.values + counts.dropped),
        "mean_count": counts.values / samples,
    }


CHECKS = (
    ("min_coverage", "coverage", "coverage is below"),
    ("max_null", "null_rate", "the share of dropped values is above"),
    ("min_count", "mean_count", "the mean number of values is below"),
    ("max_count", "mean_count", "the mean number of values is above"),
    ("min_distinct", "distinct", "distinct values are fewer than"),
    ("max_new_rows", "new_rows", "the share of new rows is above"),
    ("max_drift", "drift", "drift is above"),
)
"""Key of the bound, the figure, and the words if the figure is outside."""


def outside(bounds: GuardBounds, figures: Mapping[str, float | None]) -> Iterator[str]:
    """Each figure that is outside its bound, in words. A figure that is not known is inside."""
    for key, name, words in CHECKS:
        bound, value = getattr(bounds, key), figures.get(name)
        if bound is None or value is None:
            continue
        if value < bound if key.startswith("min") else value > bound:
            yield f"{words} {bound:g}"


def summed(parts: Iterable[Mapping[str, SlotCounts]]) -> dict[str, SlotCounts]:
    """The counts of several passes, by slot."""
    total: dict[str, SlotCounts] = {}
    for part in parts:
        for name, counts in part.items():
            total[name] = total[name] + counts if name in total else counts
    return total
