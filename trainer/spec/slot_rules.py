"""Checks of the rules for rows, by table and slot: of a job file, and of overrides while the job runs. Pure."""

from collections.abc import Mapping

from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.config import SlotLife, TableSection
from headrace.validation import nearest


def check_slot_rules(tables: Mapping[str, TableSection], schema: Schema) -> None:
    """Check the sections of all tables.

    Raises SpecError for a slot of `tables.<t>.slots` that does not use the table, or that differs from a slot with the
    same rows; for `extend_at` without a vector or a first-order weight; and for a default row that cannot be learnt.
    """
    for name, table in tables.items():
        path = f"tables.{name}"
        slots = {slot.name: slot.group for slot in schema.sparse if slot.sparse.table == name}
        for slot in table.slots:
            if slot not in slots:
                raise SpecError(f"no slot {slot!r} uses this table; {nearest(slot, slots)}", f"{path}.slots.{slot}")
        lives: dict[int, tuple[str, SlotLife]] = {}
        for slot, group in slots.items():
            life = table.slots.get(slot, SlotLife())
            first, shared = lives.setdefault(group, (slot, life))
            if life != shared:
                raise SpecError(
                    f"slots {first!r} and {slot!r} share rows, so what is set for one must be set alike for the other",
                    f"{path}.slots.{slot if slot in table.slots else first}",
                )
        _check_extension(table, path)
        _check_default_row(table, path)


def _check_default_row(table: TableSection, path: str) -> None:
    """Raise SpecError for a learnt default row without weights, or one that no key would ever train."""
    if not table.learns_default_row:
        return
    if table.dim == 0 and not table.first_order:
        raise SpecError(
            "a row without weights (dim = 0, first_order = false) has nothing to learn", f"{path}.default_row"
        )
    if not table.admission and not any(life.admission for life in table.slots.values()):
        raise SpecError(
            'is "learnt" from keys that are not admitted, and this table admits all; give it admission, or use "zeros"',
            f"{path}.default_row",
        )


def _check_extension(table: TableSection, path: str) -> None:
    ways = {"extend_at": table.extend_at} | {f"slots.{name}.extend_at": s.extend_at for name, s in table.slots.items()}
    for key, score in ways.items():
        if score is not None and (table.dim == 0 or not table.first_order):
            what = "has no vector (dim = 0)" if table.dim == 0 else "has no weight before it (first_order = false)"
            raise SpecError(f"a row that waits for its vector {what}", f"{path}.{key}")
