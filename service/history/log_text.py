"""A job's log as text: a line for each record, and printing them. A damaged log is read up to the damage.

The records are defined by trainer.journal.records.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from headrace.errors import HeadraceError, SpecError
from headrace.printable import print_printable
from headrace.secrets import without_secrets
from headrace.service.monitor.lines import count
from headrace.trainer.journal import records as log_records
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.journal.log_file import AnyRecord, LogDamaged, RecordPlace, listed, record_of
from headrace.trainer.journal.partitions import KnownPartition
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.spec.changes import changed_keys, flat_values, slots_between
from headrace.trainer.spec.defaults import fill_defaults

MAX_NAMED = 12
"""Most partitions or keys named on a line; the line counts the others. `--json` has all."""
DIGEST_DIGITS = 8


# Read and print


def good_records(folder: Path) -> tuple[list[AnyRecord], LogDamaged | None]:
    """The records of the log in `folder`, and None; of a damaged log, the records before the damage, and the error."""
    try:
        return read_records(folder), None
    except LogDamaged as error:
        return records_before(folder, error), error


def print_log(folder: Path, *, last: int | None, as_json: bool) -> None:
    """Print all records of the log in `folder`, or the `last` ones: one line each.

    Of a damaged log, prints the records before the damage, then raises LogDamaged.
    """
    records, damage = good_records(folder)
    if not records and damage is None:
        raise HeadraceError(f"{folder} contains no log: no job has run in this store; `headrace run` starts one")
    begin = 0 if last is None else max(0, len(records) - last)
    if as_json:
        shown = ((each, without_secrets(each.body)) for each in records[begin:])
        lines = [json.dumps({"n": each.number, "kind": each.kind, **body}) for each, body in shown]
    else:
        lines = [str(line) for line in log_lines(records)][begin:]
    for line in lines:
        print_printable(line)
    if damage is not None:
        raise damage


def records_before(folder: Path, damage: LogDamaged) -> list[AnyRecord]:
    """The records of a damaged log from the oldest up to the damage."""
    records: list[AnyRecord] = []
    for path in listed(folder):
        content = path.read_bytes()
        end = damage.byte if path == damage.path else len(content)
        at = 0
        while at < end:
            stop = content.find(b"\n", at) + 1 or len(content)
            record = record_of(content[at:stop], RecordPlace(path, at))
            if record is None or (records and record.number != records[-1].number + 1):
                break  # written after the seal, by a worker of an older generation
            records.append(record)
            at = stop
        if path == damage.path:
            break
    return records


# Format


class RecordLine(NamedTuple):
    """One record as text."""

    number: int
    when: str
    """The time in the record; else empty."""
    kind: log_records.RecordKind
    text: str

    def __str__(self) -> str:
        when = f"{self.when}  " if self.when else ""
        return f"{self.number:>7}  {when}{self.kind:<9}  {self.text}"


@dataclass(slots=True)
class LogWording:
    """Formats records as lines, one after another from the oldest on, since some lines describe a change."""

    generation: int = 0
    timeline: str = ""
    spec: Mapping[str, Any] | None = None
    """With all defaults."""

    def line(self, record: AnyRecord) -> RecordLine:
        """The line of the next record."""
        at = ""
        match record.content:
            case log_records.Claim() as claim:
                text, at = _claim(claim, self.generation, self.timeline), str(claim.facts.get("at", ""))
                self.generation = claim.generation
                self.timeline = self.timeline if claim.timeline is None else claim.timeline
            case log_records.SpecOperation():
                now = fill_defaults(record.content.spec)
                text, self.spec = _spec(self.spec, now), now
            case _:
                text = _content(record.content)
        return RecordLine(record.number, at, record.kind, text)


def log_lines(records: Iterable[AnyRecord]) -> Iterator[RecordLine]:
    """A line for each record. `records` start with the oldest."""
    return map(LogWording().line, records)


def _content(content: log_records.Content) -> str:
    match content:
        case PassPlan():
            return _plan(content)
        case log_records.Void():
            return f"pass {content.number} is void: {content.reason}"
        case log_records.PassClose():
            return _close(content)
        case log_records.Claim() | log_records.SpecOperation():
            raise AssertionError("LogWording formats these: their lines need the records before")
        case _:
            return _operation(content)


def _claim(claim: log_records.Claim, generation: int, timeline: str) -> str:
    if claim.generation == generation:
        return f"generation {generation} continues in a new file"
    parts = [f"generation {claim.generation}"]
    if "host" in claim.facts:
        parts.append(f"on {claim.facts['host']}")
    if "by" in claim.facts:
        parts.append(f"by {claim.facts['by']}")
    if claim.timeline is not None and claim.timeline != timeline:
        base = f"commit {claim.base}" if claim.base else "the initial state"
        parts.append(f"begins timeline {claim.timeline} at {base}")
    return " ".join(parts)


def _plan(plan: PassPlan) -> str:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for segment in (segment for rank in plan.segments for segment in rank):
        found = ranges.setdefault(segment.partition, [])
        if found and found[-1][1] == segment.begin:
            found[-1] = (found[-1][0], segment.end)
        else:
            found.append((segment.begin, segment.end))
    where = [f"{name} {begin}-{end}" for name, parts in ranges.items() for begin, end in parts]
    only = ("" if plan.learn else ", only predicted") + (f", epoch {plan.epoch}" if plan.epoch > 1 else "")
    return f"pass {plan.number}: {count(plan.num_positions)} events{only}: {_listed(where)}"


def _close(close: log_records.PassClose) -> str:
    rejected = {name: number for name, number in close.rejected.items() if number}
    reasons = f" ({', '.join(f'{name} {count(number)}' for name, number in rejected.items())})" if rejected else ""
    digests = " ".join(f"{name} {value[:DIGEST_DIGITS]}" for name, value in close.digests.items())
    outside = "".join(f", {count(number)} left out ({reason})" for reason, number in (close.left_out or {}).items())
    return (
        f"pass {close.number}: {count(close.events)} events, {count(close.samples)} samples, "
        f"{count(sum(rejected.values()))} rejected{reasons}{outside}, day {close.day}; {digests}"
    )


def _operation(
    operation: log_records.ActingOperation
    | log_records.GapOperation
    | log_records.SkipOperation
    | log_records.PartitionsOperation
    | log_records.RestoreOperation
    | log_records.MatmulOperation,
) -> str:
    match operation:
        case log_records.GapOperation(position=position, go_on=go_on):
            return (
                f"gap: {operation.partition}: {count(go_on - position)} positions from {position} on are no longer "
                f"retained; continues at {go_on}"
            )
        case log_records.SkipOperation():
            return f"skip: {operation.partition} {operation.begin}-{operation.end}: {operation.reason}"
        case log_records.PartitionsOperation():
            return f"partitions: {_listed([_partition(each) for each in operation.partitions])}"
        case log_records.SetOperation() | log_records.ResizeOperation():
            return (
                f"{operation.op}: {_listed([f'{key} = {json.dumps(value)}' for key, value in operation.keys.items()])}"
            )
        case log_records.DayTickOperation():
            return f"day tick: day {operation.to} begins"
        case log_records.ShrinkOperation(delete_below=below, delete_after_days=days):
            limits = {"delete_below": below, "delete_after_days": days}
            given = [f"{name} {limit}" for name, limit in limits.items() if limit is not None]
            return f"shrink: table {operation.table}, {' and '.join(given) or 'by its own rule'}"
        case log_records.HoldOperation(going=going, rows=rows):
            return (
                f"hold: a shrink of table {operation.table} waits, {count(going)} of {count(rows)} rows: "
                f"{operation.why}"
            )
        case log_records.ForgetOperation():
            others = sum(len(each["keys"]) for each in operation.also or ())
            more = f", and {count(others)} other rows" if others else ""
            return f"forget: slot {operation.slot}, key {operation.key}{more}"
        case log_records.ExportOperation():
            parent = "" if operation.parent is None else f" on {operation.parent.name}"
            return f"export: {operation.name} of {operation.stream}{parent}: {operation.why}"
        case log_records.ExportedOperation():
            error = f": {operation.error}" if operation.error else ""
            return f"exported: {operation.name} of {operation.stream} {operation.outcome}{error}"
        case log_records.RollbackOperation(paths=paths):
            what = f"current.json goes back to {paths[0]}" if paths else "exports are promoted again"
            return f"rollback: {operation.stream}: {what}: {operation.why}"
        case log_records.MatmulOperation():
            return f"matmul: {operation.setting}: {_listed(_kernels(operation.kernels))}"
        case log_records.RestoreOperation():
            over = [f"{name} is not used: {why}" for name, why in operation.passed_over.items()]
            begins = f"begins at {operation.commit or 'the initial state'}"
            return f"restore: {'; '.join([begins, *over])}"
        case _:
            assert_never(operation)


def _kernels(kernels: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The kernels of each size of layer; MKL everywhere if there are none."""
    sizes = [f"{size} {'/'.join(products.values())}" for size, products in kernels.items()]
    return sizes or ["mkl for all products"]


def _partition(known: KnownPartition) -> str:
    end = "" if known.end is None else f" to {known.end}"
    return f"{known.number} is {known.name} from {known.start}{end}"


def _spec(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    if before is None:
        return f"spec: of job {now.get('name', '-')}, {count(len(dict(flat_values(now))))} keys"
    old, new = dict(flat_values(before)), dict(flat_values(now))
    absent = "(not given)"
    words = [
        _slots(before, now) if key == "slots" else f"{key} {old.get(key, absent)} -> {new.get(key, absent)}"
        for key in changed_keys(before, now)
    ]
    return f"spec: {_listed(words)}"


def _slots(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    try:
        return f"slots {slots_between(before, now).words()}"
    except SpecError:  # of another version of Headrace
        return "slots are others"


def _listed(parts: list[str]) -> str:
    more = [f"and {count(len(parts) - MAX_NAMED)} more"] if len(parts) > MAX_NAMED else []
    return ", ".join([*parts[:MAX_NAMED], *more]) or "nothing"
