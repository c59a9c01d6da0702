"""A job's log as text: a line for each record, and printing them. A damaged log is read up to the damage.

trainer.journal.records has the records and their text.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import HeadraceError, SpecError
from headrace.printable import print_printable
from headrace.secrets import without_secrets
from headrace.service.monitor.lines import count
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.journal.log_file import AnyRecord, LogDamaged, RecordPlace, listed, record_of
from headrace.trainer.journal.partitions import enumerated
from headrace.trainer.journal.records import Claim, RecordKind, SpecOperation
from headrace.trainer.spec.changes import changed_keys, flat_values, slots_between
from headrace.trainer.spec.defaults import fill_defaults

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
    kind: RecordKind
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
            case Claim() as claim:
                text, at = _claim(claim, self.generation, self.timeline), str(claim.facts.get("at", ""))
                self.generation = claim.generation
                self.timeline = self.timeline if claim.timeline is None else claim.timeline
            case SpecOperation():
                now = fill_defaults(record.content.spec)
                text, self.spec = _spec(self.spec, now), now
            case content:
                text = str(content)
        return RecordLine(record.number, at, record.kind, text)


def log_lines(records: Iterable[AnyRecord]) -> Iterator[RecordLine]:
    """A line for each record. `records` start with the oldest."""
    return map(LogWording().line, records)


def _claim(claim: Claim, generation: int, timeline: str) -> str:
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


def _spec(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    if before is None:
        return f"spec: of job {now.get('name', '-')}, {count(len(dict(flat_values(now))))} keys"
    old, new = dict(flat_values(before)), dict(flat_values(now))
    absent = "(not given)"
    words = [
        _slots(before, now) if key == "slots" else f"{key} {old.get(key, absent)} -> {new.get(key, absent)}"
        for key in changed_keys(before, now)
    ]
    return f"spec: {enumerated(words)}"


def _slots(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    try:
        return f"slots {slots_between(before, now).words()}"
    except SpecError:  # of another version of Headrace
        return "slots are others"
