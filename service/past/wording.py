"""A job's log as text: a line for each record, and printing them. A damaged log is read up to the damage.

The records are defined by trainer.log_file.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from millrace.errors import MillraceError
from millrace.printable import say
from millrace.secrecy import without_secrets
from service.lines import count
from trainer import respec
from trainer.defaults import in_full
from trainer.log import Kind, LogDamaged, Place, Record, read
from trainer.log_file import listed, record_of

MAX_NAMED = 12
"""Most partitions or keys named on a line; the line counts the others. `--json` has all."""
DIGEST_DIGITS = 8


# Read and print


def good_records(folder: Path) -> tuple[list[Record], LogDamaged | None]:
    """The records of the log in `folder`, and None; of a damaged log, the records before the damage, and the error."""
    try:
        return read(folder), None
    except LogDamaged as error:
        return good_before(folder, error), error


def print_log(folder: Path, *, last: int | None, as_json: bool) -> None:
    """Print all records of the log in `folder`, or the `last` ones: one line each.

    Of a damaged log, prints the records before the damage, then raises LogDamaged.
    """
    records, damage = good_records(folder)
    if not records and damage is None:
        raise MillraceError(f"{folder} contains no log: no job has run in this store; `millrace run` starts one")
    begin = 0 if last is None else max(0, len(records) - last)
    if as_json:
        shown = ((each, without_secrets(each.body)) for each in records[begin:])
        lines = [json.dumps({"n": each.number, "kind": each.kind, **body}) for each, body in shown]
    else:
        lines = [str(line) for line in log_lines(records)][begin:]
    for line in lines:
        say(line)
    if damage is not None:
        raise damage


def good_before(folder: Path, damage: LogDamaged) -> list[Record]:
    """The records of a damaged log from the oldest up to the damage."""
    records: list[Record] = []
    for path in listed(folder):
        content = path.read_bytes()
        end = damage.byte if path == damage.path else len(content)
        at = 0
        while at < end:
            stop = content.find(b"\n", at) + 1 or len(content)
            record = record_of(content[at:stop], Place(path, at))
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
    kind: Kind
    text: str

    def __str__(self) -> str:
        when = f"{self.when}  " if self.when else ""
        return f"{self.number:>7}  {when}{self.kind:<9}  {self.text}"


def log_lines(records: Iterable[Record]) -> Iterator[RecordLine]:
    """A line for each record. `records` start with the oldest, since some lines describe a change."""
    generation, timeline, spec = 0, "", None
    for record in records:
        body = record.body
        if record.kind is Kind.CLAIM:
            text = _claim(body, generation, timeline)
            generation, timeline = body["generation"], body.get("timeline", timeline)
        elif record.kind is Kind.OPERATION and body.get("op") == "spec":
            now = in_full(body["spec"])
            text, spec = _spec(spec, now), now
        else:
            text = _record(record.kind, body)
        yield RecordLine(record.number, str(body.get("at", "")), record.kind, text)


def _record(kind: Kind, body: Mapping[str, Any]) -> str:
    match kind:
        case Kind.PLAN:
            return _plan(body)
        case Kind.VOID:
            return f"pass {body['number']} is void: {body.get('reason', 'no reason given')}"
        case Kind.OPERATION:
            return _operation(body)
        case Kind.CLOSE:
            return _close(body)
        case Kind.CLAIM:
            raise AssertionError("log_lines formats claims")
        case _:
            assert_never(kind)


def _claim(body: Mapping[str, Any], generation: int, timeline: str) -> str:
    if body["generation"] == generation:
        return f"generation {generation} continues in a new file"
    parts = [f"generation {body['generation']}"]
    if "host" in body:
        parts.append(f"on {body['host']}")
    if "by" in body:
        parts.append(f"by {body['by']}")
    if body.get("timeline", timeline) != timeline:
        base = body.get("base")
        parts.append(f"begins timeline {body['timeline']} at {f'commit {base}' if base else 'the initial state'}")
    return " ".join(parts)


def _plan(body: Mapping[str, Any]) -> str:
    segments = [segment for rank in body["segments"] for segment in rank]
    ranges: dict[str, list[tuple[int, int]]] = {}
    for segment in segments:
        found = ranges.setdefault(segment["partition"], [])
        if found and found[-1][1] == segment["begin"]:
            found[-1] = (found[-1][0], segment["end"])
        else:
            found.append((segment["begin"], segment["end"]))
    where = [f"{name} {begin}-{end}" for name, parts in ranges.items() for begin, end in parts]
    num_events = sum(segment["end"] - segment["begin"] for segment in segments)
    only = "" if body.get("learn", True) else ", only predicted"
    return f"pass {body['number']}: {count(num_events)} events{only}: {_listed(where)}"


def _close(body: Mapping[str, Any]) -> str:
    rejected = {name: number for name, number in body["rejected"].items() if number}
    reasons = f" ({', '.join(f'{name} {count(number)}' for name, number in rejected.items())})" if rejected else ""
    digests = " ".join(f"{name} {value[:DIGEST_DIGITS]}" for name, value in body["digests"].items())
    return (
        f"pass {body['number']}: {count(body['events'])} events, {count(body['samples'])} samples, "
        f"{count(sum(rejected.values()))} rejected{reasons}, day {body['day']}; {digests}"
    )


def _operation(body: Mapping[str, Any]) -> str:
    match body.get("op"):
        case "gap":
            lost = body["go_on"] - body["position"]
            return (
                f"gap: {body['partition']}: {count(lost)} positions from {body['position']} on are no longer retained; "
                f"continues at {body['go_on']}"
            )
        case "skip":
            return f"skip: {body['partition']} {body['begin']}-{body['end']}: {body.get('reason', 'no reason given')}"
        case "partitions":
            return f"partitions: {_listed([_partition(each) for each in body['partitions']])}"
        case "set":
            return f"set: {_listed([f'{key} = {json.dumps(value)}' for key, value in body['keys'].items()])}"
        case "day_tick":
            return f"day tick: day {body['to']} begins"
        case "shrink":
            given = [f"{name} {body[name]}" for name in ("delete_below", "delete_after_days") if body[name] is not None]
            return f"shrink: table {body['table']}, {' and '.join(given) or 'by its own rule'}"
        case "hold":
            return (
                f"hold: a shrink of table {body['table']} waits, {count(body['going'])} of {count(body['rows'])} rows: "
                f"{body['why']}"
            )
        case "forget":
            return f"forget: slot {body['slot']}, key {body['key']}"
        case "export":
            parent = "" if body["parent"] is None else f" on {body['parent']['name']}"
            return f"export: {body['name']} of {body['stream']}{parent}: {body['why']}"
        case "exported":
            error = f": {body['error']}" if body["error"] else ""
            return f"exported: {body['name']} of {body['stream']} {body['outcome']}{error}"
        case "restore":
            over = [f"{name} is not used: {why}" for name, why in body.get("passed_over", {}).items()]
            begins = f"begins at {body['commit'] or 'the initial state'}"
            return f"restore: {'; '.join([begins, *over])}"
        case other:
            facts = {name: value for name, value in body.items() if name != "op"}
            return f"{other}: {json.dumps(facts, sort_keys=True)}"


def _partition(known: Mapping[str, Any]) -> str:
    end = "" if known.get("end") is None else f" to {known['end']}"
    return f"{known['number']} is {known['name']} from {known['start']}{end}"


def _spec(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    if before is None:
        return f"spec: of job {now.get('name', '-')}, {count(len(dict(respec.flat(now))))} keys"
    old, new = dict(respec.flat(before)), dict(respec.flat(now))
    absent = "(not given)"
    return "spec: " + _listed(
        [f"{key} {old.get(key, absent)} -> {new.get(key, absent)}" for key in respec.changed(before, now)]
    )


def _listed(parts: list[str]) -> str:
    more = [f"and {count(len(parts) - MAX_NAMED)} more"] if len(parts) > MAX_NAMED else []
    return ", ".join([*parts[:MAX_NAMED], *more]) or "nothing"
