"""The meaning of a changed job file for its job, key by key, and the rows and weights that its store would carry over.

Reads only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import SpecError
from headrace.service.cluster.store_defaults import (
    newest_spec,
    spec_with_rows,
    with_defaults_of_set,
    with_store_defaults,
)
from headrace.service.monitor.lines import count
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.checkpoint.rewind import Lineage
from headrace.trainer.importing.other_slots import WeightChange, weights_between
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.journal.log import read_history
from headrace.trainer.spec.change_classes import ChangeClass
from headrace.trainer.spec.changes import (
    SHARDS,
    TRAINERS,
    KeyChange,
    flat_values,
    key_changes,
    schema_of,
    slots_between,
)
from headrace.trainer.spec.defaults import fill_defaults

WHAT_TO_DO: Mapping[ChangeClass, str] = {
    ChangeClass.HOT: "`headrace set JOB KEY=VALUE` while it runs, or a restart with the new file",
    ChangeClass.AT_ONCE: "a restart with the new file; the result of a pass does not depend on it",
    ChangeClass.BETWEEN: "a restart with the new file; logged passes are first trained again with the old one",
    ChangeClass.CARRIED: "a restart with the new file: rows are kept, weights of the model are carried over",
    ChangeClass.NEW: "a new store.path, or --fresh; `headrace import` brings rows and weights that fit",
}
ORDER = tuple(WHAT_TO_DO)
MAX_VALUE = 60
"""Longest value that is printed whole."""


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """Rows of one table of a store, by what becomes of them."""

    kept: int
    """Rows of slots that stay."""
    left: Mapping[str, int]
    """Rows of slots that the job no longer has, by slot; they stay until ageing removes them."""
    dropped: bool
    """Whether the table goes with all of its rows, as no slot uses it."""


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """Rows and weights that a store would carry over."""

    commit: str
    version: int
    numbers: Mapping[str, int]
    """Number of each slot's rows, by slot."""
    tables: Mapping[str, CarriedRows]
    weights: Sequence[WeightChange]
    """Those that change."""

    def message(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"weights": [each._asdict() for each in self.weights]}


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[KeyChange]:
    """The changed keys of two full specs, the most far-reaching class last."""
    return sorted(key_changes(old, new), key=lambda each: (ORDER.index(each.change), each.key))


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """A setting of a job, and where it is from."""

    key: str
    file: str | None
    """Its value in the job file, as text; None: the file leaves it out."""
    now: str
    """The value in force, as text."""
    origin: str
    """"file", "default", "chosen" (by the job, as it began) or "set" (while it ran)."""


def settings_in_force(job: LoadedJob, overrides: Mapping[str, Any]) -> list[SettingInForce]:
    """All settings of a job: `overrides` were set while it ran; what its store began with is put in place of defaults.

    Raises SpecError.
    """
    file, defaults = dict(flat_values(job.raw)), dict(flat_values(with_defaults_of_set(job).full))
    store, told = dict(flat_values(with_store_defaults(job).full)), dict(flat_values(overrides))
    found = []
    for key in dict.fromkeys([*store, *told]):
        now = told.get(key, store.get(key, "nothing"))
        origin = "set" if key in told else "file" if key in file else "default"
        if origin == "default" and key in defaults and defaults[key] != now:
            origin = "chosen"
        found.append(SettingInForce(key, file.get(key), now, origin))
    return found


def not_taken_yet(job: LoadedJob) -> list[KeyChange]:
    """The keys in which the job file differs from that of the run: a restart takes them. Raises SpecError."""
    before = read_history(job.store / "log").spec or newest_spec(job.store)  # a restart logs it before it commits
    if before is None:
        return []
    numbered = with_store_defaults(job)
    return [each for each in changes_between(fill_defaults(before), numbered.full) if not _is_number(each.key)]


def _is_number(key: str) -> bool:
    """Whether a key says how many workers there are: a resize changes it, and the log has its number."""
    return key in (TRAINERS, SHARDS)


def check_carried(job: LoadedJob) -> None:
    """Raise SpecError where the slots of a job changed and its model cannot go on. Its weights are asked for, then."""
    before = spec_with_rows(job.store)
    if before is not None and "slots" in before and _carries(fill_defaults(before), job.full):
        weights_between(fill_defaults(before), job.full, job.folder)


def _carries(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    found = [each for each in key_changes(old, new) if each.key == "slots"]
    return bool(found) and found[0].change is ChangeClass.CARRIED


def carried_over(job: LoadedJob) -> CarriedOver:
    """Rows and weights that the store of `job` would carry over under its file. Raises SpecError where it refuses."""
    commit = _newest(job.store)
    before = fill_defaults(commit.state["spec"])
    for each in key_changes(before, job.full):
        each.check()
    changes = slots_between(before, job.full)
    weights = weights_between(before, job.full, job.folder) if changes.added or changes.removed or changes.moved else []
    names = {slot.group: slot.name for slot in reversed(schema_of(before).sparse)}
    now = {slot.group for slot in schema_of(job.full).sparse}
    tables = {
        table: _rows(commit, table, names, now, dropped=table not in job.full["tables"]) for table in before["tables"]
    }
    numbers = {slot.name: slot.group for slot in schema_of(job.full).sparse}
    return CarriedOver(commit.name, commit.version, numbers, tables, weights)


def _newest(store: Path) -> Commit:
    lineage = Lineage.of(read_records(store / "log"))
    commit = next((each for each in reversed(Commits(store).whole()) if lineage.holds(each.name)), None)
    if commit is None:
        raise SpecError(f"{store} holds no commit: there is nothing to carry over", "store.path")
    return commit


def _rows(commit: Commit, table: str, names: Mapping[int, str], now: set[int], *, dropped: bool) -> CarriedRows:
    kept, left = 0, dict[str, int]()
    for part in commit.shards:
        facts = part.tables.get(table)
        for group, rows in () if facts is None else facts.rows_by_group.items():
            if group in now:
                kept += rows
            else:
                name = names.get(group, f"group-{group}")
                left[name] = left.get(name, 0) + rows
    return CarriedRows(kept, left, dropped)


def format_changes(changes: Sequence[KeyChange]) -> Iterator[str]:
    """The changes as lines, with what to do for each class."""
    if not changes:
        yield "nothing changes"
    for change in ORDER:
        found = [each for each in changes if each.change is change]
        if found:
            yield f"{change}: {WHAT_TO_DO[change]}"
        for each in found:
            note = f" ({each.note})" if each.note and each.key != "slots" else ""
            values = each.note if each.key == "slots" else f"{_short(each.was)} -> {_short(each.now)}"
            yield f"  {each.key}: {values}{note}"


def _short(value: str) -> str:
    return value if len(value) <= MAX_VALUE else f"{value[:MAX_VALUE]}..."


def format_carried(found: CarriedOver) -> Iterator[str]:
    """The rows and weights that are carried over, as lines."""
    yield f"carried over from version {found.version}, commit {found.commit}; nothing was changed"
    for table, rows in found.tables.items():
        left = [f"{count(number)} of {slot} until ageing removes them" for slot, number in rows.left.items()]
        if rows.dropped:
            yield f"  table {table}: goes with {count(rows.kept + sum(rows.left.values()))} rows; no slot uses it"
        else:
            yield f"  table {table}: {'; '.join([f'{count(rows.kept)} rows are kept', *left])}"
    for each in found.weights:
        if each.old is None:
            yield f"  {each.name}: {_shape(each.new)}, at its initial value"
        elif each.new is None:
            yield f"  {each.name}: {_shape(each.old)} is dropped"
        else:
            yield f"  {each.name}: {_shape(each.old)} -> {_shape(each.new)}, {count(each.kept)} values are kept"
    if not found.weights:
        yield "  the weights of the model stay as they are"


def _shape(sizes: Sequence[int] | None) -> str:
    return " x ".join(map(str, sizes or ())) or "one value"
