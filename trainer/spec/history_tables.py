"""The tables of histories on the shards, one for each slot with a history, and the checks of such slots. Pure.

A row holds the last signs of one key (pserver.rows.history_kernels). Its key is that of the sign in the slot `key`, so
that whoever forgets a user forgets the user's histories.
"""

from collections.abc import Iterator, Mapping, Sequence

from dataset.spec.config import AnySlot, HistorySection, MetaSlot, SlotKind
from dataset.spec.schema import Schema, Slot
from millrace.errors import SpecError
from millrace.validation import nearest
from pserver.config import Initial, Sgd, TableSection
from pserver.rows.history_kernels import width_of
from trainer.config import TrainerJob

PREFIX = "history-"


def table_of(slot: Slot) -> str:
    """The table of a slot's histories."""
    return f"{PREFIX}{slot.name}"


def history_of(slot: Slot) -> HistorySection:
    """The setting of a slot with a history."""
    assert slot.sparse.history is not None, "one of Schema.histories"
    return slot.sparse.history


def lengths_of(schema: Schema) -> dict[str, int]:
    """The tables of histories, with the most signs of a key."""
    return {table_of(slot): history_of(slot).last for slot in schema.histories}


def history_tables(slots: Sequence[AnySlot]) -> dict[str, TableSection]:
    """The tables of histories as shards hold them: rows whose bits no step learns."""
    return {table_of(slot): _section(history_of(slot)) for slot in Schema.of(slots).histories}


def _section(history: HistorySection) -> TableSection:
    return TableSection(
        dim=width_of(history.last),
        first_order=False,
        init=Initial.ZEROS,
        optimizer=Sgd(kind="sgd"),
        decay=1.0,
        delete_after_days=history.delete_after_days,
    )


def keyed_like(schema: Schema, table: str, group: int) -> Iterator[str]:
    """The tables of histories whose keys are those of a slot group of `table`."""
    for slot in schema.histories:
        key = schema.by_name[history_of(slot).key]
        if key.sparse.table == table and key.group == group:
            yield table_of(slot)


def check_histories(job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError for a history of a slot that does not exist or does not fit, or with a mode that has none."""
    for slot in schema.histories:
        at = next(f"slots.{n}" for n, entry in enumerate(job.slots) if slot.name in entry.expanded())
        history = history_of(slot)
        _emitted(schema, history.key, f"{at}.history.key")
        remembered = _emitted(schema, history.of, f"{at}.history.of")
        if remembered.sparse.values != slot.sparse.values:
            raise SpecError(
                f"is {slot.sparse.values!r}; slot {history.of!r} has {remembered.sparse.values!r}", f"{at}.values"
            )
        if history.when is not None:
            _number(schema, history.when, f"{at}.history.when")
        if not slot.name.isascii() or "." in slot.name or len(table_of(slot)) > MAX_NAME:
            raise SpecError(
                f"slot {slot.name!r} names a table: use at most {MAX_NAME - len(PREFIX)} ASCII letters, digits, '_' and '-'",
                at,
            )
        if table_of(slot) in job.tables:
            raise SpecError(
                f"is the table of the histories of slot {slot.name!r}; rename it", f"tables.{table_of(slot)}"
            )
        if job.train.mode != "sync":
            raise SpecError(f'slot {slot.name!r} is a history, which is built for mode = "sync" only', "train.mode")


MAX_NAME = 64
"""Longest name of a table."""


def _emitted(schema: Schema, name: str, path: str) -> Slot:
    """A sparse slot that the pipe emits. Raises SpecError."""
    slot, fitting = schema.by_name.get(name), [each.name for each in schema.emitted.sparse]
    if slot is None or slot.name not in fitting:
        raise SpecError(f"{name!r} is not a sparse slot that the pipe emits; {nearest(name, fitting)}", path)
    return slot


def _number(schema: Schema, name: str, path: str) -> None:
    slot = schema.by_name.get(name)
    fitting = [each.name for each in schema.meta if isinstance(each.entry, MetaSlot) and each.entry.type != "string"]
    if slot is None or slot.kind is not SlotKind.META or name not in fitting:
        raise SpecError(f"{name!r} is not a meta slot with a number; {nearest(name, fitting)}", path)
