"""The settings of a row: those of its table, overridden by those of its slot.

Slots with the same overrides are one class; class 0 has the settings of the table. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SpecError
from headrace.pserver.config import SlotLife, TableSection

NUM_GROUPS = 1 << 16
MAX_CLASSES = 256
"""Classes are uint8."""


@dataclass(frozen=True, slots=True)
class SlotClasses:
    """The classes of one table."""

    class_G: NDArray[np.uint8]
    """(65536,) class of each slot group."""
    sections: tuple[TableSection, ...]
    """By class: the table's section with the overrides of these slots."""
    groups: tuple[int, ...]
    """Slot groups with settings of their own, ascending."""

    def section_of(self, group: int) -> TableSection:
        """The section for a slot group."""
        return self.sections[int(self.class_G[group])]


def classes_of(section: TableSection, groups: Mapping[str, int]) -> SlotClasses:
    """The classes of a table; `groups` are the slot groups of its slots, by name. Raises SpecError."""
    class_G = np.zeros(NUM_GROUPS, np.uint8)
    lives: list[SlotLife] = []
    own: list[int] = []
    for slot, life in section.slots.items():
        if slot not in groups:
            raise SpecError(f"there is no slot {slot!r}", f"slots.{slot}")
        if life == SlotLife():
            continue
        if life not in lives:
            if len(lives) + 1 == MAX_CLASSES:
                raise SpecError(f"more than {MAX_CLASSES - 1} different settings of slots", "slots")
            lives.append(life)
        class_G[groups[slot]] = lives.index(life) + 1
        own.append(groups[slot])
    plain = section.model_copy(update={"slots": {}})
    return SlotClasses(class_G, (plain, *(_with(plain, life) for life in lives)), tuple(sorted(set(own))))


def _with(section: TableSection, life: SlotLife) -> TableSection:
    """`section` with the overrides of a slot."""
    overrides = life.model_dump(exclude_none=True, include=set(SlotLife.model_fields) - {"lr", "first_order_lr"})
    changes = {name: getattr(life, name) for name in overrides}
    optimizer = section.optimizer
    if life.lr is not None:
        optimizer = changes["optimizer"] = optimizer.model_copy(update={"lr": life.lr})
    if life.first_order_lr is not None:
        first_order = section.first_order_optimizer or optimizer
        changes["first_order_optimizer"] = first_order.model_copy(update={"lr": life.first_order_lr})
    return section.model_copy(update=changes)
