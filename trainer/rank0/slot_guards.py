"""Guards of slots: figures of each slot over a pass, their drift, bounds for them, and the decider that compares.

Counts are integers that merge by addition over ranks and passes, so no figure depends on the number of trainers. The
decider logs no operation: what it holds is a pure function of the closes, so a replay holds the same. Its state has the
counts of the reference: some forty numbers for each slot and block of passes.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.codec import plain, typed
from headrace.dataset.samples.slot_counters import SlotCounters, SlotSum, distinct_of
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput
from headrace.pserver.protocol.table_stats import TableStats
from headrace.trainer.guard_config import GuardAction, GuardBounds, GuardsSection
from headrace.trainer.job_status import GuardsStatus, SlotOutsideBounds
from headrace.trainer.journal.records import ActingOperation
from headrace.trainer.rank0.operations import ClosingPass, Decider

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


MAX_BLOCKS = 8
"""Blocks of passes in the reference; when one is full, the oldest may leave. So the reference has up to an eighth more
passes than `window`."""

log = logging.getLogger(__name__)


class SlotOutside(BadInput):
    """A slot whose action is "stop" is outside its bounds."""

    def __init__(self, version: int, why: str) -> None:
        super().__init__(
            f'pass {version} is not learnt for good: {why}; its action is "stop". Repair the stream, or skip the range '
            "with `headrace skip`; or, if the data are right, widen the bounds in `guards`, and start the job again"
        )


@dataclass(frozen=True, slots=True)
class GuardsState:
    """The state of the guards, as a commit holds it."""

    blocks: Sequence[Mapping[str, Sequence[int]]] = ()
    """Oldest first, by slot: the numbers of SlotCounts."""
    filled: int = 0
    """Passes in the last block."""
    figures: Mapping[str, Mapping[str, int | float | None]] = field(default_factory=dict)
    outside: Mapping[str, SlotOutsideBounds] = field(default_factory=dict)


class SlotGuards(Decider):
    """Holds a job whose slots leave their bounds."""

    name: ClassVar[str] = "guards"

    def __init__(self, section: GuardsSection, schema: Schema) -> None:
        self._section = section
        self._slots = {slot.name: (slot.sparse.table, slot.group) for slot in schema.sparse}
        self._blocks: list[dict[str, SlotCounts]] = []
        """Oldest first; the last one may have room."""
        self._filled = 0
        """Passes in the last block."""
        self._figures: Mapping[str, Mapping[str, float | None]] = {}
        self._outside: Mapping[str, SlotOutsideBounds] = {}
        """By slot. Replaced, never changed."""

    @property
    def _block_passes(self) -> int:
        return -(-self._section.window // MAX_BLOCKS)

    @property
    def held(self) -> tuple[str, ...]:
        """The slots because of which no export is promoted, in words."""
        holding = ((name, each) for name, each in self._outside.items() if each.action != GuardAction.ALARM)
        return tuple(f"slot {name}: {each.why}" for name, each in holding)

    # -- see Decider

    def saw(self, close: ClosingPass) -> None:
        if close.num_samples < self._section.min_samples or close.slots is None:
            return
        slots, reference, figures, found = slots_of(close.slots), summed(self._blocks), {}, {}
        for name, slot in slots.items():
            figures[name] = figures_of(slot, self._new_rows(name, close.stats), reference.get(name))
            bounds = self._section.bounds_of(name)
            if why := "; ".join(outside(bounds, figures[name])):
                since = self._outside[name].since if name in self._outside else close.version
                action = (bounds.action or GuardAction.ALARM).value
                found[name] = SlotOutsideBounds(why=why, action=action, since=since)
        for name in sorted(found.keys() - self._outside.keys()):
            log.warning("slot %s: %s, in pass %d", name, found[name].why, close.version)
        self._figures, self._outside = figures, found
        self._remember({name: slot.counts for name, slot in slots.items()})

    def due(self, close: ClosingPass, ordered: Sequence[ActingOperation]) -> tuple[()]:
        """Raises SlotOutside, never in a replay."""
        stops = [f"slot {name}: {each.why}" for name, each in self._outside.items() if each.action == "stop"]
        if stops and close.num_samples >= self._section.min_samples:
            raise SlotOutside(close.version, ", ".join(stops))
        return ()

    def state(self) -> dict[str, Any]:
        blocks = [{name: counts.plain() for name, counts in block.items()} for block in self._blocks]
        state: dict[str, Any] = plain(GuardsState(blocks, self._filled, self._figures, self._outside))
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """A slot that the job no longer has is left out."""
        found, slots = typed(GuardsState, state, "its state of guards"), self._slots
        self._blocks = [
            {name: SlotCounts.of_plain(numbers) for name, numbers in block.items() if name in slots}
            for block in found.blocks
        ]
        self._filled = found.filled
        self._figures = {name: each for name, each in found.figures.items() if name in slots}
        self._outside = {name: each for name, each in found.outside.items() if name in slots}

    def status(self) -> GuardsStatus:
        """Figures by slot, and the slots outside their bounds."""
        figures = {name: dict(each) for name, each in self._figures.items()}
        return GuardsStatus(slots=figures, outside=dict(self._outside))

    def _remember(self, counts: dict[str, SlotCounts]) -> None:
        """Add a pass to the reference; blocks leave once the others have `window` passes."""
        if self._blocks and self._filled < self._block_passes:
            self._blocks[-1] = summed((self._blocks[-1], counts))
            self._filled += 1
            return
        self._blocks.append(counts)
        self._filled = 1
        most = -(-self._section.window // self._block_passes) + 1
        del self._blocks[: max(0, len(self._blocks) - most)]

    def _new_rows(self, slot: str, stats: Mapping[str, TableStats]) -> int | None:
        """Rows of a slot that the pass made; None where its table is unknown."""
        table, group = self._slots[slot]
        return stats[table].new_by_group.get(group, 0) if table in stats else None
