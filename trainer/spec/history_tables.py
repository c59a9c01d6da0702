"""The tables of histories and counters on the shards, one for each slot that the job fills, and their checks. Pure.

Statistics of rows have no table of their own: shards answer questions about them from the rows' table.

A row holds the last signs of one key (pserver.rows.history_kernels), or its counts (pserver.rows.counter_kernels). Its
key is that of the sign in the slot `key`, so that whoever forgets a user forgets the user's histories and counters.
"""

import re
from collections.abc import Iterator

from headrace.dataset.spec.config import MetaSlot
from headrace.dataset.spec.schema import Schema, Slot
from headrace.errors import SpecError
from headrace.pserver.config import Initial, TableSection
from headrace.pserver.protocol.histories import Remembered, counters_table_of, statistics_of, table_of
from headrace.pserver.row_optimizers import Sgd
from headrace.trainer.config import TrainerJob
from headrace.validation import nearest

NAME = re.compile(r"[A-Za-z0-9_-]{1,56}")
"""Names of slots whose histories or counters can have a table."""

NUM_STATISTICS = 2
"""Show and click."""


def remembered_of(schema: Schema) -> dict[str, Remembered]:
    """The tables of histories, with the most signs of a key, and of counters, with their windows; and the questions
    about statistics of rows, with the rows' table."""
    asked = (schema.by_name[name] for slot in schema.statistics for name in slot.statistics.slots)
    return {
        **{table_of(slot.name): slot.history.last for slot in schema.histories},
        **{counters_table_of(slot.name): slot.counters.windows_s for slot in schema.counters},
        **{statistics_of(slot.name): slot.sparse.table for slot in asked},
    }


def history_tables(schema: Schema) -> dict[str, TableSection]:
    """The tables of histories and counters as shards hold them: rows whose bits no step learns."""
    if not (schema.histories or schema.counters):
        return {}
    from headrace.pserver.rows import counter_kernels, history_kernels  # late: Numba loads slowly, and few jobs need it

    histories = {
        table_of(slot.name): _section(history_kernels.width_of(slot.history.last), slot.history.delete_after_days)
        for slot in schema.histories
    }
    return histories | {
        counters_table_of(slot.name): _section(
            counter_kernels.width_of(slot.counters.windows_s), slot.counters.delete_after_days
        )
        for slot in schema.counters
    }


def statistics_section() -> TableSection:
    """The table of the shows and clicks of one slot's rows, where they come without the rows: from an export."""
    return _section(NUM_STATISTICS, None)


def _section(dim: int, delete_after_days: int | None) -> TableSection:
    return TableSection(
        dim=dim,
        first_order=False,
        init=Initial.ZEROS,
        optimizer=Sgd(kind="sgd"),
        decay=1.0,
        delete_after_days=delete_after_days,
    )


def keyed_like(schema: Schema, table: str, group: int) -> Iterator[str]:
    """The tables of histories and counters whose keys are those of a slot group of `table`, of no other slot too."""
    keys = [
        *((table_of(slot.name), slot.history.key) for slot in schema.histories),
        *((counters_table_of(s.name), s.counters.keys[0]) for s in schema.counters if len(s.counters.keys) == 1),
    ]
    for name, key in keys:
        slot = schema.by_name[key]
        if slot.sparse.table == table and slot.group == group:
            yield name


def check_histories(job: TrainerJob, schema: Schema) -> None:
    """Raise SpecError for a history, counters, crosses or statistics of a slot that does not exist or does not fit."""
    for slot in schema.histories:
        at, history = _place(job, slot), slot.history
        _emitted(schema, history.key, f"{at}.history.key")
        remembered = _emitted(schema, history.of, f"{at}.history.of").sparse.values
        if remembered != slot.sparse.values:
            raise SpecError(
                f"is {slot.sparse.values!r}; slot {history.of!r} has {remembered!r}: set the same here",
                f"{at}.values",
            )
        if history.when is not None:
            _number(schema, history.when, f"{at}.history.when")
        _check_filled(job, slot, at, table_of(slot.name), "a history")
    for slot in schema.counters:
        at, counters = _place(job, slot), slot.counters
        for key in counters.keys:
            _emitted(schema, key, f"{at}.counters.key")
        if counters.click is not None:
            _number(schema, counters.click, f"{at}.counters.click")
        if any(counters.windows_s) and (source := _timeless(job)):
            raise SpecError(
                f'source {source!r} has no event_time, which windows need; set it, or windows = ["all"]',
                f"{at}.counters.windows",
            )
        _check_filled(job, slot, at, counters_table_of(slot.name), "counters")
    for slot in schema.crossed:
        for name in (name for pair in slot.sparse.pairs for name in pair):
            _emitted(schema, name, f"{_place(job, slot)}.pairs")
    for slot in schema.statistics:
        at = _place(job, slot)
        for name in slot.statistics.slots:
            _emitted(schema, name, f"{at}.statistics.of")
            if NAME.fullmatch(name) is None:
                raise SpecError(
                    f"{name!r} is asked by name: at most 56 letters, digits, '_' and '-'", f"{at}.statistics.of"
                )
            if (table := statistics_of(name)) in job.tables:
                raise SpecError(f"is the name of the statistics of slot {name!r}; rename it", f"tables.{table}")


def _place(job: TrainerJob, slot: Slot) -> str:
    return next(f"slots.{number}" for number, entry in enumerate(job.slots) if slot.name in entry.expanded())


def _check_filled(job: TrainerJob, slot: Slot, at: str, table: str, what: str) -> None:
    if NAME.fullmatch(slot.name) is None:
        raise SpecError(f"slot {slot.name!r} names a table: give it at most 56 letters, digits, '_' and '-'", at)
    if table in job.tables:
        raise SpecError(f"is the table of the slot {slot.name!r}, which is {what}; rename it", f"tables.{table}")


def _timeless(job: TrainerJob) -> str:
    """A source without event time; empty if all have one."""
    return next((name for name, source in job.sources.items() if source.event_time.kind == "none"), "")


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
