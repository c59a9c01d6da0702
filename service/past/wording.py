"""The records of a job's log in words, one line each. Pure; what the records are is trainer.log_file's."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, assert_never

from service.lines import count
from trainer import respec
from trainer.defaults import in_full
from trainer.log import Kind, Record

MAX_NAMED = 12
"""Partitions or keys named on a line; of the others it says how many. `--json` has them all."""
DIGEST_DIGITS = 8


class Line(NamedTuple):
    """One record, told."""

    number: int
    when: str
    """Where the record says it; else empty."""
    kind: Kind
    words: str

    def __str__(self) -> str:
        when = f"{self.when}  " if self.when else ""
        return f"{self.number:>7}  {when}{self.kind:<9}  {self.words}"


def told(records: Iterable[Record]) -> Iterator[Line]:
    """Each record as a line. They are given from the oldest one on: some are told by what they change."""
    generation, timeline, spec = 0, "", None
    for record in records:
        body = record.body
        if record.kind is Kind.CLAIM:
            words = _claim(body, generation, timeline)
            generation, timeline = body["generation"], body.get("timeline", timeline)
        elif record.kind is Kind.OPERATION and body.get("op") == "spec":
            now = in_full(body["spec"])
            words, spec = _spec(spec, now), now
        else:
            words = _words(record.kind, body)
        yield Line(record.number, str(body.get("at", "")), record.kind, words)


def _words(kind: Kind, body: Mapping[str, Any]) -> str:
    match kind:
        case Kind.PLAN:
            return _plan(body)
        case Kind.VOID:
            return f"pass {body['number']} is withdrawn: {body.get('reason', 'no reason given')}"
        case Kind.OPERATION:
            return _operation(body)
        case Kind.CLOSE:
            return _close(body)
        case Kind.CLAIM:
            raise AssertionError("told where the claim before it is known")
        case _:
            assert_never(kind)


def _claim(body: Mapping[str, Any], generation: int, timeline: str) -> str:
    if body["generation"] == generation:
        return f"generation {generation} goes on in a new file"
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
                f"goes on at {body['go_on']}"
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
            over = [f"{name} is passed over: {why}" for name, why in body.get("passed_over", {}).items()]
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
