"""`headrace inspect`: what an export or a commit contains, whether it is sound, what moved. As text or JSON."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.printable import print_printable
from headrace.service.history.model_comparison import TableDifference
from headrace.service.history.model_state import CommitState, export_folder, open_commit
from headrace.service.monitor.lines import count, pending_text
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, problems_of
from headrace.trainer.exports.destination import ExportUnusable
from headrace.trainer.exports.reader import ReadableExport, chain_of, open_export, state_at
from headrace.trainer.exports.row_chunks import compare_states

FACTS = ("name", "kind", "job", "stream", "timeline", "version", "made_at", "why", "day", "positions", "metrics")
"""Keys copied from an export's manifest."""


def inspect(job: LoadedJob | None, name: str, top: int, *, as_json: bool) -> bool:
    """Print the facts of an export, or of a commit of `job`; return whether it is sound."""
    if job is None:
        with export_folder() as folder:
            found = export_facts(open_export(name, folder), top)
        lines = format_export(found)
    else:
        with open_commit(job, name) as commit:
            found = commit_facts(commit)
        lines = format_commit(found)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for line in lines:
            print_printable(line)
    return bool(found["sound"])


# Exports


def export_facts(export: ReadableExport, top: int) -> dict[str, Any]:
    """The facts of an export, as JSON-able data. Every file is read back."""
    manifest, damage = export.manifest, export.problems()
    parent = manifest["parent"]
    try:
        chain, broken = [each.name for each in chain_of(export)], None
    except ExportUnusable as error:
        chain, broken = [], str(error)
    movers = None if damage or broken or export.kind == "base" else largest_movers(export, top)
    return {
        **{name: manifest.get(name) for name in FACTS},
        "parent": None if parent is None else parent["name"],
        "event_time": _times(manifest.get("event_time")),
        "chain": chain,
        "chain_broken": broken,
        "tables": {table: dict(facts) for table, facts in export.tables.items()},
        "gates": {name: dict(gate) for name, gate in manifest.get("gates", {}).items()},
        "onnx": manifest.get("onnx"),
        "golden": manifest.get("golden"),
        "files": len(export.files),
        "bytes": sum(int(file["bytes"]) for file in export.files.values()),
        "damage": damage,
        "movers": movers,
        "sound": not damage and broken is None,
    }


def largest_movers(export: ReadableExport, top: int) -> dict[str, Any]:
    """By table: the rows of a delta, and how far those that existed before moved."""
    before = chain_of(export)[:-1]
    found = {}
    for table in export.tables:
        difference = TableDifference(table, top)
        for pairs in compare_states(state_at(before, table), export.rows(table)):
            difference.take(pairs)
        counts = {what: difference.total(what) for what in ("new", "changed", "same")}
        found[table] = counts | {"largest": [move.message() for move in difference.moves]}
    return found


def _times(seconds: Any) -> list[str] | None:
    if seconds is None:
        return None
    return [datetime.fromtimestamp(each, UTC).isoformat(timespec="seconds") for each in seconds]


def format_export(found: Mapping[str, Any]) -> Iterator[str]:
    """The facts as lines of text."""
    since = f", since {found['parent']}" if found["parent"] else ""
    yield f"{found['name']}: {found['kind']} of job {found['job']}, stream {found['stream']}{since}"
    yield f"version {found['version']} of timeline {found['timeline']}, day {found['day']}, made {found['made_at']}"
    if found["why"]:
        yield f"why: {found['why']}"
    if found["event_time"]:
        yield f"event time {found['event_time'][0]} to {found['event_time'][1]}"
    for partition, position in (found["positions"] or {}).items():
        yield f"position {partition} {position}"
    for table, facts in found["tables"].items():
        yield from _format_table(table, facts, is_base=found["kind"] == "base")
    for name, gate in found["gates"].items():
        yield f"gate {name}: {_gate(name, gate)}"
    for name in ("onnx", "golden"):
        part = found[name] or {}
        yield f"{name}: {'present' if part.get('ok') else 'none: ' + str(part.get('why') or 'no reason given')}"
    yield f"files: {count(found['files'])}, {count(found['bytes'])} bytes; complete"
    yield from _format_damage(found["damage"])
    if found["chain_broken"]:
        yield f"chain broken: {found['chain_broken']}"
    elif len(found["chain"]) > 1:
        yield f"chain: {' -> '.join(found['chain'])}"
    for table, moved in (found["movers"] or {}).items():
        yield f"table {table}: {count(moved['new'])} new rows, {count(moved['changed'])} changed" + (
            ", largest moves:" if moved["largest"] else ""
        )
        for move in moved["largest"]:
            yield f"  {move['distance']:.6g}: slot {move['slot']}, sign {move['sign']}"


def _gate(name: str, gate: Mapping[str, Any]) -> str:
    """The result of a gate as text, with its numbers if it has any."""
    if not gate.get("passed"):
        return f"FAILED: {gate.get('why') or _compared(gate)}"
    if name == "finite":
        return "passed: all exported weights are finite"
    if name == "golden":  # its value is a text, and it has no limit
        return f"passed: {gate['value']}" if gate.get("value") else "passed: the export gives its golden predictions"
    return f"passed: {_compared(gate)}"


def _compared(gate: Mapping[str, Any]) -> str:
    value = gate.get("value")
    found = "there is nothing to compare with" if value is None else _numbers(value)
    return f"{found}, limit {_numbers(gate.get('limit'))}"


def _numbers(value: Any) -> str:
    """Numbers of a gate as text: one number, two limits, or several by name."""
    match value:
        case float():
            return f"{value:.6g}"
        case [low, high]:
            return f"{_numbers(low)} to {_numbers(high)}"
        case dict():
            return ", ".join(f"{_numbers(each)} ({name})" for name, each in value.items()) or "none"
        case _:
            return f"{value:,}" if isinstance(value, int) else str(value)


def _format_table(table: str, facts: Mapping[str, Any], *, is_base: bool) -> Iterator[str]:
    deleted = "" if is_base else f"{count(facts['tombstones'])} tombstones, "
    yield (
        f"table {table}: {count(facts['rows'])} rows, {deleted}{pending_text(facts)}, "
        f"{count(facts['model_rows'])} in the model; dim {facts['dim']}, {facts['dtype']}"
    )
    for slot, counts in facts["by_slot"].items():
        deleted = f", {count(counts['tombstones'])} tombstones" if counts["tombstones"] else ""
        yield f"  slot {slot}: {count(counts['rows'])} rows{deleted}"


def _format_damage(damage: Mapping[str, str]) -> Iterator[str]:
    if not damage:
        yield "sound: every file is as written"
    for file, problem in damage.items():
        yield f"damaged: {file} {problem}"


# Commits


def commit_facts(commit: Commit) -> dict[str, Any]:
    """The facts of a commit, as JSON-able data. Every file is read back."""
    names = CommitState(commit, commit.folder)
    damage = problems_of(commit)
    parts = [
        {
            "folder": part.folder,
            "buckets": list(part.buckets),
            "files": len(part.files),
            "bytes": sum(file.num_bytes for file in part.files.values()),
            "rows": {table: facts.rows for table, facts in part.tables.items()},
        }
        for part in commit.shards
    ]
    return {
        "name": commit.name,
        "job": commit.manifest.job,
        "timeline": commit.timeline,
        "version": commit.version,
        "made_at": commit.manifest.made_at,
        "imported": commit.state.get("imported"),
        "tables": {table: _table_of(commit, table, names.slot_names(table)) for table in names.tables},
        "parts": parts,
        "files": len(commit.files),
        "bytes": commit.num_bytes,
        "damage": damage,
        "sound": not damage,
    }


def _table_of(commit: Commit, table: str, names: Mapping[int, str]) -> dict[str, Any]:
    """Rows of a table by slot, summed over the shards; and its day and pending shrinks, equal on all shards."""
    by_slot: dict[str, int] = {}
    facts = [part.tables[table] for part in commit.shards if table in part.tables]
    for part in facts:
        for group, rows in part.rows_by_group.items():
            slot = names.get(group, f"group-{group}")
            by_slot[slot] = by_slot.get(slot, 0) + rows
    life = next((part.life for part in facts if part.life is not None), None)
    shrinks = [] if life is None else [{"version": each.version, "day": each.day} for each in life.shrinks]
    rows = sum(part.rows for part in facts)
    return {"rows": rows, "by_slot": by_slot, "day": 0 if life is None else life.day, "pending_shrinks": shrinks}


def format_commit(found: Mapping[str, Any]) -> Iterator[str]:
    """The facts as lines of text."""
    yield f"{found['name']}: version {found['version']} of timeline {found['timeline']} of job {found['job']}"
    yield f"made {found['made_at']}"
    if found["imported"]:
        yield f"imported from {found['imported']['kind']} {found['imported']['path']}"
    for table, facts in found["tables"].items():
        yield f"table {table}: {count(facts['rows'])} rows, day {facts['day']}"
        for slot, rows in facts["by_slot"].items():
            yield f"  slot {slot}: {count(rows)} rows"
        for shrink in facts["pending_shrinks"]:
            yield f"  shrink of version {shrink['version']}, day {shrink['day']}: its rows are absent, to be removed"
    for part in found["parts"]:
        rows = ", ".join(f"{table} {count(number)}" for table, number in part["rows"].items())
        yield (
            f"{part['folder']}: buckets {part['buckets'][0]}-{part['buckets'][1]}; {count(part['files'])} files, "
            f"{count(part['bytes'])} bytes; rows: {rows}"
        )
    yield f"files: {count(found['files'])}, {count(found['bytes'])} bytes"
    yield from _format_damage(found["damage"])
