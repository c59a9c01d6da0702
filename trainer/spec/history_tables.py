"""The tables of histories on the shards, one for each slot with a history, and the checks of such slots. Pure.

A row holds the last signs of one key (pserver.rows.history_kernels). Its key is that of the sign in the slot `key`, so
that whoever forgets a user forgets the user's histories.
"""

import re
from collections.abc import Iterator

from dataset.spec.config import HistorySection, MetaSlot
from dataset.spec.schema import Schema, Slot
from millrace.errors import SpecError
from millrace.validation import nearest
from pserver.config import Initial, Sgd, TableSection
from pserver.protocol.histories import table_of
from pserver.rows.history_kernels import width_of
from trainer.config import TrainerJob

NAME = re.compile(r"[A-Za-z0-9_-]{1,56}")
"""Names of slots whose histories can have a table."""


def lengths_of(schema: Schema) -> dict[str, int]:
    """The tables of histories, with the most signs of a key."""
    return {table_of(slot.name): slot.history.last for slot in schema.histories}


def history_tables(schema: Schema) -> dict[str, TableSection]:
    """The tables of histories as shards hold them: rows whose bits no step learns."""
    return {table_of(slot.name): _section(slot.history) for slot in schema.histories}


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
        key = schema.by_name[slot.history.key]
        if key.sparse.table == table and key.group == group:
            yield table_of(slot.name)


def check_no_histories(job: TrainerJob, path: str) -> None:
    """Raise SpecError for a job with histories: what only reads a version does not follow the log that fills them."""
    if slots := [slot.name for slot in Schema.of(job.slots).histories]:
        raise SpecError(
            f"slot {slots[0]!r} is a history, which only training fills: prediction jobs with histories are not built "
            "yet. Train on the events instead, with train.learn = false to keep the model, or send the signs of this "
            "slot to a replica",
            path,
        )


def check_histories(job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError for a history of a slot that does not exist or does not fit, or with a mode that has none."""
    for slot in schema.histories:
        at = next(f"slots.{number}" for number, entry in enumerate(job.slots) if slot.name in entry.expanded())
        history, table = slot.history, table_of(slot.name)
        _emitted(schema, history.key, f"{at}.history.key")
        remembered = _emitted(schema, history.of, f"{at}.history.of").sparse.values
        if remembered != slot.sparse.values:
            raise SpecError(f"is {slot.sparse.values!r}; slot {history.of!r} has {remembered!r}", f"{at}.values")
        if history.when is not None:
            _number(schema, history.when, f"{at}.history.when")
        if NAME.fullmatch(slot.name) is None:
            raise SpecError(f"slot {slot.name!r} names a table: give it at most 56 letters, digits, '_' and '-'", at)
        if table in job.tables:
            raise SpecError(f"is the table of the histories of slot {slot.name!r}; rename it", f"tables.{table}")
        if job.train.mode != "sync":
            raise SpecError(
                f'is {job.train.mode!r}, and slot {slot.name!r} is a history: histories need mode = "sync"',
                "train.mode",
            )


def _emitted(schema: Schema, name: str, path: str) -> Slot:
    """A sparse slot that the pipe emits. Raises SpecError."""
    fitting = {slot.name: slot for slot in schema.emitted.sparse}
    if name not in fitting:
        raise SpecError(f"{name!r} is not a sparse slot that the pipe emits; {nearest(name, fitting)}", path)
    return fitting[name]


def _number(schema: Schema, name: str, path: str) -> None:
    fitting = [slot.name for slot in schema.meta if isinstance(slot.entry, MetaSlot) and slot.entry.type != "string"]
    if name not in fitting:
        raise SpecError(f"{name!r} is not a meta slot with a number; {nearest(name, fitting)}", path)
