"""Admission by slot: the entries of each class of a table's slots, and their counts.

Classes with the same entries share counts, so a change of another setting of a slot keeps its counts.
pserver.admission decides by entries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.keys import NUM_BUCKETS
from headrace.pserver.admission import Admission
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import F32, U16, U64
from headrace.pserver.rows.digest import add
from headrace.pserver.rows.slot_classes import SlotClasses

ALL = "table"
"""In commits, the name of the counts of slots without settings of their own."""


class SlotAdmission:
    """The admissions of one table on the buckets of one shard."""

    def __init__(self, classes: SlotClasses, seed: int, buckets: tuple[int, int]) -> None:
        self._seed, self._buckets = seed, buckets
        self._by_class: tuple[Admission | None, ...] = ()
        """Each at the first class that has its entries."""
        self._class_G = np.zeros_like(classes.class_G)
        """The index in `_by_class` of each slot group."""
        self._lists: Sequence[object] = ()
        self._sections: Sequence[TableSection | None] = ()
        self.set(classes)

    def __bool__(self) -> bool:
        """Whether any slot has admission entries."""
        return any(self._by_class)

    def set(self, classes: SlotClasses) -> list[str]:
        """Use other settings from here on. Counts of the same kind stay; returns the slots whose counts start anew."""
        lists = [(each.admission, each.nonclk_coeff, each.click_coeff) for each in classes.sections]
        first_C = np.array([lists.index(each) for each in lists], np.uint8)
        class_G = first_C[classes.class_G]
        if list(self._lists) == lists and (self._class_G == class_G).all():
            return []
        self._lists = lists
        before = self.state() if self._by_class else {}
        self._class_G = class_G
        names = [ALL] * len(lists)
        for group in reversed(classes.groups):
            if class_G[group]:
                names[class_G[group]] = str(group)
        self._names = names
        self._sections = [
            section if first == number else None
            for number, (first, section) in enumerate(zip(first_C, classes.sections, strict=True))
        ]
        self.start_anew()
        return self.load([(self._buckets[0], before)] if before else [])

    def start_anew(self) -> None:
        """Set all counts to 0."""
        self._by_class = tuple(self._admission(section) for section in self._sections)

    def _admission(self, section: TableSection | None) -> Admission | None:
        if section is None or not section.admission:
            return None
        return Admission.of(
            section.admission,
            nonclk_coeff=section.nonclk_coeff,
            click_coeff=section.click_coeff,
            seed=self._seed,
            buckets=self._buckets,
        )

    def admit(self, keys_U: U64, group_U: U16, show_U: F32, click_U: F32, day: int) -> NDArray[np.bool_]:
        """Count one step's merged records of keys without rows. Returns (U,) whether each key may have a row now."""
        admitted_U = np.ones(len(keys_U), np.bool_)
        class_U = self._class_G[group_U]
        for number, admission in enumerate(self._by_class):
            mine_M = np.flatnonzero(class_U == number)
            if admission is not None and len(mine_M):
                admitted_U[mine_M] = admission.admit(keys_U[mine_M], show_U[mine_M], click_U[mine_M], day)
        return admitted_U

    def forget(self, keys_U: U64) -> None:
        """Remove the counts of keys, where an entry can; keys of other shards' buckets are skipped."""
        begin, end = self._buckets
        bucket_U = keys_U % np.uint64(NUM_BUCKETS)
        keys_U = keys_U[(bucket_U >= begin) & (bucket_U < end)]
        for admission in filter(None, self._by_class):
            admission.forget(keys_U)

    def explain(self, key: int, group: int, day: int) -> list[dict[str, Any]]:
        """The state of each entry for a key."""
        admission = self._by_class[self._class_G[group]]
        return [] if admission is None else admission.explain(key, day)

    def digest(self) -> int:
        """128-bit hash of the counts; hashes of disjoint buckets add up."""
        return add(admission.digest() for admission in filter(None, self._by_class))

    # --- commits -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of the counts, by "<slots>/<array>"."""
        return {
            f"{name}/{array}": values
            for name, admission in zip(self._names, self._by_class, strict=True)
            if admission is not None
            for array, values in admission.state().items()
        }

    def load(self, parts: Sequence[tuple[int, Mapping[str, NDArray[Any]]]]) -> list[str]:
        """Go on from the parts of a commit: first bucket and state of each. Returns slots whose counts start anew."""
        restarted = []
        for name, admission in zip(self._names, self._by_class, strict=True):
            if admission is None:
                continue
            for first_bucket, arrays in parts:
                own = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
                if not admission.load(own, first_bucket):
                    restarted.append(name)
        return sorted(set(restarted))
