"""The decider that compares the slots of each pass with bounds and with the passes before.

It logs no operation: what it holds is a pure function of the closes, so a replay holds the same. Its state has the
counts of the reference: some forty numbers for each slot and block of passes. trainer.rank0.slot_bounds compares.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.codec import plain, typed
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput
from headrace.pserver.protocol.shards import TableStats
from headrace.trainer.guard_config import GuardAction, GuardsSection
from headrace.trainer.job_status import GuardsStatus, SlotOutsideBounds
from headrace.trainer.journal.records import ActingOperation
from headrace.trainer.rank0.operations import ClosingPass, Decider
from headrace.trainer.rank0.slot_bounds import SlotCounts, figures_of, outside, slots_of, summed

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
