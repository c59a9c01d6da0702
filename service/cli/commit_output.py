"""Prints a job's commits: the list, one commit, the results of verifying."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.service.history import commit_list
from headrace.service.history.commit_lookup import continue_from, find_commit, lineage
from headrace.service.history.verification import CommitCheck, check_commit
from headrace.service.monitor.lines import count
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits, manifest_fields

WIDE = 240
"""Columns of a table that is not printed to a terminal."""


def list_commits(store: Path, *, as_json: bool) -> None:
    """Print the commits in order of time, one row each."""
    entries = commit_list.entries_of(store)
    if as_json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print(f"{store} has no commit")
    else:
        _console().print(_table(entries))


def _table(entries: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("name", "version", "timeline", "made at"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rows", "bytes", "own bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("held by", "sound", ""):
        table.add_column(heading)
    for entry in entries:
        sizes = [count(entry[key]) for key in ("rows", "bytes", "own_bytes")]
        sound = Text("no", style="red") if entry["damaged"] else Text("not verified", style="dim")
        begins = Text("the next run begins here") if entry["next"] else Text()
        first = [Text(str(entry[key] or "-")) for key in ("name", "version", "timeline", "made_at")]
        table.add_row(*first, *sizes, Text(", ".join(entry["held_by"])), sound, begins)
    return table


def show_commit(store: Path, name: str, *, as_json: bool) -> None:
    """Print the facts in a commit's manifest; as JSON, the whole manifest."""
    if as_json:
        print(json.dumps(manifest_fields(find_commit(store, name)), indent=2))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for key, value in _facts(commit_list.details_of(store, name)):
        table.add_row(Text(key), Text(value))
    _console().print(table)


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "name", found["name"]
    yield "job", found["job"]
    yield "version", f"{found['version']} of timeline {found['timeline']}"
    yield "made", f"{found['made_at']} by generation {found['generation']}, of {found['trainers']} trainers"
    yield "parent", str(found["parent"] or "none")
    yield "held by", ", ".join(found["held_by"]) or "nobody"
    yield "replay", f"needs the log from record {found['log_from']} on"
    for key, label in commit_list.PROGRESS:
        if key in found["progress"]:
            yield label, count(found["progress"][key])
    if found["rejected"]:
        yield "rejected", ", ".join(f"{reason} {count(n)}" for reason, n in found["rejected"].items())
    for partition, position in found["positions"].items():
        yield "position", f"{partition} {position}"
    for skip in found["skips"]:
        yield "skipped", f"{skip['partition']} {skip['begin']}-{skip['end']}"
    for part in found["parts"]:
        rows = ", ".join(f"{table} {count(number)}" for table, number in part["rows"].items())
        yield part["folder"], f"buckets {part['buckets'][0]}-{part['buckets'][1]}; rows: {rows}"
    yield "files", f"{count(found['files'])}, {count(found['bytes'])} bytes, {count(found['own_bytes'])} its own"
    yield "made with", ", ".join(f"{key} {value}" for key, value in found["made_with"].items())


def verify_commits(store: Path, name: str | None, *, as_json: bool) -> None:
    """Read one commit back, or all, and print the results. Raises CommitDamaged if one is not sound."""
    names = Commits(store).names() if name is None else [find_commit(store, name).name]
    if not names and not as_json:
        print(f"{store} has no commit")
    checks: list[CommitCheck] = []
    for each in names:
        checks.append(check_commit(store, each))
        if not as_json:
            _print_check(checks[-1])
    if as_json:
        found = [{"name": each.name, "sound": each.sound, "damage": dict(each.damage)} for each in checks]
        print(json.dumps(found, indent=2))
    if damaged := [each.name for each in checks if not each.sound]:
        sound = continue_from([each for each in Commits(store).names() if each not in damaged], lineage(store))
        begin = f"the next run begins at {sound}" if sound else "no other commit is left"
        raise CommitDamaged(f"{len(damaged)} of {len(names)} commits are damaged; {begin}")


def _print_check(found: CommitCheck) -> None:
    if found.sound:
        print(f"{found.name}: sound; {count(found.files)} files, {count(found.rows)} rows")
        return
    print(f"{found.name}: damaged")
    for file, problem in found.damage.items():
        also = found.shared.get(file)
        print(f"  {file} {problem}" + (f"; it shares this file with {', '.join(also)}" if also else ""))


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDE, highlight=False)
