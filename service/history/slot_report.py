"""The report of `headrace doctor`: what is known of each slot at the newest commit, and what looks wrong.

Figures of passes and their drift come from the job's guards (trainer.rank0.slot_guards), rows and bytes from the
commit, the value of a slot from `headrace evaluate --worth`, or else from its first-order weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as described

from headrace import documents
from headrace.errors import SpecError
from headrace.service.history.commit_lookup import scratch
from headrace.service.history.model_state import CommitState, open_commit
from headrace.service.monitor.lines import count
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, Commits

MAX_WEIGHED_ROWS = 2_000_000
"""A commit with more rows is not read; slots then have no mean weight."""
MUCH_DRIFT, LITTLE_COVERAGE, MUCH_LOST, MANY_NEW, MANY_ROWS = 0.25, 0.05, 0.1, 0.5, 0.2
"""Limits of what looks wrong where no bound is set."""
GUARDS = "guards"
DRIFTS = "drift"
"""Begins the words of a bound of drift (trainer.rank0.slot_guards)."""


class SlotOrder(StrEnum):
    """Slots are ranked by it."""

    SHIFT = "shift"
    VALUE = "value"
    COST = "cost"


@described(frozen=True, slots=True, config=ConfigDict(use_attribute_docstrings=True))
class SlotDiagnosis:
    """A sparse slot; null: not known. Figures of the last pass need a section `guards` in the spec."""

    slot: str
    drift: float | None
    """How far its values are from those of the passes before."""
    coverage: float | None
    """Part of the samples that have a value."""
    reference_coverage: float | None
    """The same, of the passes before."""
    null_rate: float | None
    """Part of its values that are padding."""
    mean_count: float | None
    """Mean number of values in a sample."""
    distinct: int | None
    new_rows: float | None
    """Rows made in the last pass for each of its values."""
    rows: int
    """Rows in the commit. Slots that share rows have the same ones."""
    rows_share: float
    """Its part of the rows of all tables."""
    num_bytes: int
    """Its part of the table's files in the commit, by rows."""
    weight: float | None
    """Mean size of the first-order weights; null in a commit of more than 200,000 rows."""
    worth: float | None
    """Null here: only `headrace doctor --worth` has it."""
    signs: list[str]
    """Signs of trouble, each with what to do."""
    drifted: str | None
    """In words, if its values are others than before, which is no trouble where no bound of drift is set."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """All slots at one commit."""

    commit: str
    guarded: bool
    """Whether the job has guards, so that there are figures of passes."""
    slots: Sequence[SlotDiagnosis]


def report_of(
    job: LoadedJob,
    order: SlotOrder,
    worth: Mapping[str, float],
    *,
    max_weighed: int = MAX_WEIGHED_ROWS,
    what: str = "verify",
) -> JobReport:
    """The report of the newest commit; one of more rows than `max_weighed` has no weights. Raises SpecError where there
    is no commit. `what`: of the lease and the folder (service.history.commit_lookup), one for each thread that asks."""
    names = Commits(job.store).names()
    if not names:
        raise SpecError(f"{job.store} has no commit yet; the first one comes after commit.every", "store.path")
    with open_commit(job, names[-1], what) as commit, scratch(job.store, what) as folder:
        state = CommitState(commit, folder)
        guards = commit.state.get("operations", {}).get("deciders", {}).get(GUARDS, {})
        rows = _rows_of(commit, state)
        weights = _weights_of(state) if sum(table.rows for table in rows.values()) <= max_weighed else {}
        found = [_slot_of(slot, each, guards, weights.get(slot), worth.get(slot)) for slot, each in rows.items()]
    return JobReport(names[-1], bool(guards), ranked(found, order))


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of a slot in a commit."""

    rows: int
    share: float
    """Of all rows of the commit."""
    num_bytes: int


def _rows_of(commit: Commit, state: CommitState) -> dict[str, SlotRows]:
    """By slot, in the order of tables."""
    total = max(1, sum(part.tables[table].rows for part in commit.shards for table in part.tables))
    found = {}
    for table in state.tables:
        parts = [part for part in commit.shards if table in part.tables]
        files = [file for part in parts for path, file in part.files.items() if f"/{table}/" in path]
        size, in_table = sum(file.num_bytes for file in files), sum(part.tables[table].rows for part in parts)
        for slot, group in state.groups(table).items():
            rows = sum(part.tables[table].rows_by_group.get(group, 0) for part in parts)
            found[slot] = SlotRows(rows, rows / total, size * rows // max(1, in_table))
    return found


def _weights_of(state: CommitState) -> dict[str, float]:
    """The mean size of the first-order weights of each slot that has any."""
    sums: dict[str, tuple[float, int]] = {}
    for table in state.tables:
        with state.rows(table) as chunks:
            for chunk in chunks:
                if chunk.weight_R is None:
                    break
                for code in np.unique(chunk.slot_R).tolist():
                    size_R = np.abs(chunk.weight_R[chunk.slot_R == code].astype(np.float64))
                    before, rows = sums.get(chunk.slots[code], (0.0, 0))
                    sums[chunk.slots[code]] = before + float(size_R.sum()), rows + len(size_R)
    return {slot: size / rows for slot, (size, rows) in sums.items()}


def _slot_of(
    slot: str, rows: SlotRows, guards: Mapping[str, Any], weight: float | None, worth: float | None
) -> SlotDiagnosis:
    figures = guards.get("figures", {}).get(slot, {})
    outside = guards.get("outside", {}).get(slot)
    distinct = figures.get("distinct")
    return SlotDiagnosis(
        slot=slot,
        **{name: figures.get(name) for name in FIGURES},
        distinct=None if distinct is None else int(distinct),
        rows=rows.rows,
        rows_share=rows.share,
        num_bytes=rows.num_bytes,
        weight=weight,
        worth=worth,
        signs=list(signs_of(figures, outside, rows, worth)),
        drifted=drift_of(figures) if outside is None or DRIFTS not in outside["why"] else None,
    )


FIGURES = ("drift", "coverage", "reference_coverage", "null_rate", "mean_count", "new_rows")


def signs_of(
    figures: Mapping[str, Any], outside: Mapping[str, Any] | None, rows: SlotRows, worth: float | None
) -> Iterator[str]:
    """Signs of trouble with a slot, each with what to do, in words."""
    since = "" if outside is None else f", since version {outside['since']}; its action is {outside['action']}"
    parts = [] if outside is None else outside["why"].split("; ")
    if broken := [part for part in parts if not part.startswith(DRIFTS)]:
        yield "; ".join(broken) + since
    coverage, before = figures.get("coverage"), figures.get("reference_coverage")
    if coverage is not None and before is not None and coverage < before - MUCH_LOST:
        yield (
            f"{1 - coverage:.0%} of the samples have no value, and {1 - before:.0%} had none before: look for a field "
            "that is renamed or no longer sent"
        )
    elif coverage is not None and coverage < LITTLE_COVERAGE:
        yield f"only {coverage:.1%} of the samples have a value: repair its field, or leave the slot out"
    elif len(broken) < len(parts):
        drift = figures.get("drift") or 0.0
        yield (
            f"its values are others than before, drift {drift:.2f}{since}: usual for ids of new things and for parts "
            "of the time; else look for another hash, unit or format upstream"
        )
    if rows.rows == 1:
        yield "it has one value only, which tells the model nothing: leave it out"
    if (figures.get("null_rate") or 0.0) > MANY_NEW:
        yield f"{figures['null_rate']:.0%} of its values are padding, and dropped: is `padding` right?"
    if (figures.get("new_rows") or 0.0) > MANY_NEW:
        yield (
            f"{figures['new_rows']:.0%} of its values make a new row, so hardly any comes again: take a coarser value, "
            "or let ids earn their rows with `admission`"
        )
    if worth is not None and worth <= 0 and rows.share > MANY_ROWS:
        yield f"it costs {rows.share:.0%} of all rows and is worth nothing: train a job without it, and compare"


def drift_of(figures: Mapping[str, Any]) -> str | None:
    """Words for values that are others than in the passes before; None for values that are not."""
    drift = figures.get("drift") or 0.0
    if drift <= MUCH_DRIFT:
        return None
    return f"drift {drift:.2f}: its last pass has other values than those before"


def ranked(slots: Sequence[SlotDiagnosis], order: SlotOrder) -> list[SlotDiagnosis]:
    """The slots, the greatest shift, value or cost first; of equals, in their own order."""
    match order:
        case SlotOrder.SHIFT:
            return sorted(slots, key=lambda each: -(each.drift or 0.0))
        case SlotOrder.VALUE:
            return sorted(slots, key=lambda each: (-_or_least(each.worth), -_or_least(each.weight)))
        case SlotOrder.COST:
            return sorted(slots, key=lambda each: -each.num_bytes)


def _or_least(value: float | None) -> float:
    return -np.inf if value is None else value


def read_worth(path: Path) -> dict[str, float]:
    """Losses of AUC of the first task by slot, from the output of `headrace evaluate --worth --json`.

    Raises SpecError.
    """
    try:
        lines = documents.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}", "--worth") from None
    except documents.InvalidDocument as error:
        raise SpecError(str(error), "--worth") from None
    if not isinstance(lines, list) or not all(isinstance(line, dict) and "slot" in line for line in lines):
        raise SpecError(f"{path} is not what `headrace evaluate --worth --json` prints", "--worth")
    first = next((line.get("task") for line in lines), None)
    return {line["slot"]: float(line["auc"]) for line in lines if line.get("task") == first and "auc" in line}


def format_report(found: JobReport) -> Iterator[str]:
    """Lines for people: a table, then what looks wrong."""
    width = max((len(each.slot) for each in found.slots), default=4)
    heads = ("drift", "coverage", "count", "distinct", "new rows", "rows", "bytes", "weight", "worth")
    yield f"{'slot':<{width}}" + "".join(f"{head:>13}" for head in heads)
    for each in found.slots:
        cells = (
            _number(each.drift, ".3f"), _number(each.coverage, ".1%"), _number(each.mean_count, ".2f"),
            _number(each.distinct, ",d"), _number(each.new_rows, ".1%"), count(each.rows), count(each.num_bytes),
            _number(each.weight, ".4f"), _number(each.worth, "+.5f"),
        )  # fmt: skip
        yield f"{each.slot:<{width}}" + "".join(f"{cell:>13}" for cell in cells)
    if not found.guarded:
        yield "no figures of passes: add a section [guards] to the job file (docs/guards.md)"
    signs = [(each.slot, sign) for each in found.slots for sign in each.signs]
    num = "1 sign" if len(signs) == 1 else f"{len(signs)} signs"
    yield f"{num} of trouble at commit {found.commit}" + (":" if signs else "")
    for slot, sign in signs:
        yield f"  {slot}: {sign}"
    if drifted := [each for each in found.slots if each.drifted]:
        yield (
            "drift, usual for ids of new things and for parts of the time; if it is not, look for another hash, unit "
            "or format upstream, and bound it in [guards]:"
        )
        yield from (f"  {each.slot}: {each.drifted}" for each in drifted)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
