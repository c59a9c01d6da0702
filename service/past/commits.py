"""`millrace commits`: what is there, what is in one, whether it is sound; keeping some, removing others."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from millrace.deadline import Deadline
from millrace.errors import MillraceError, SpecError
from millrace.locks import locked
from service.lines import count
from service.past.choosing import begins_at, chosen, lineage
from service.past.leases import LOCK_S, clear, hold, leased, scratch
from service.past.verify import damage_of, sharing
from trainer.commits import MANIFEST, Commit, CommitDamaged, Commits, order_of
from trainer.log import LOCK

WIDE = 240
"""Columns of a table that no terminal shows."""
HOLDER = re.compile(r"[A-Za-z0-9_-]{1,64}")


def list_commits(store: Path, *, as_json: bool) -> None:
    """Print the commits in order of time, a row each."""
    entries = entries_of(store)
    if as_json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print(f"{store} holds no commit")
    else:
        _console().print(_table(entries))


def entries_of(store: Path) -> list[dict[str, Any]]:
    """What a list says of each commit, in order of time; "bytes" are all, "own_bytes" what its removal would free.

    "damaged" says how its manifest is; its files are not read.
    """
    commits = Commits(store)
    holders, start = commits.holders(), begins_at(commits.names(), lineage(store))
    return [_entry(commits, name, holders.get(name, [])) | {"next": name == start} for name in commits.names()]


def _entry(commits: Commits, name: str, held_by: list[str]) -> dict[str, Any]:
    timeline, version, generation = order_of(name)
    entry: dict[str, Any] = {"name": name, "version": version, "timeline": f"t{timeline}", "generation": generation}
    entry |= {"made_at": None, "rows": None, "bytes": None, "own_bytes": None, "held_by": held_by, "damaged": None}
    try:
        commit = commits.read(name)
    except CommitDamaged as error:
        return entry | {"damaged": str(error)}
    facts = {"rows": commit.num_rows, "bytes": commit.num_bytes, "own_bytes": _own_bytes(commit)}
    return entry | facts | {"made_at": commit.manifest["made_at"]}


def _own_bytes(commit: Commit) -> int:
    """Bytes of files that nothing else links to."""
    found = (os.stat(path) for file in commit.files if (path := commit.folder / file).exists())
    return sum(each.st_size for each in found if each.st_nlink == 1)


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
    """Print what a commit's manifest says of it."""
    commit = chosen(store, name)
    if as_json:
        print(json.dumps(commit.manifest, indent=2))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for key, value in _facts(commit, Commits(store).holders().get(commit.name, [])):
        table.add_row(Text(key), Text(value))
    _console().print(table)


def _facts(commit: Commit, held_by: list[str]) -> Iterator[tuple[str, str]]:
    manifest, progress = commit.manifest, commit.state.get("progress", {})
    yield "name", commit.name
    yield "job", str(manifest["job"])
    yield "version", f"{commit.version} of timeline {commit.timeline}"
    yield "made", f"{manifest['made_at']} by generation {manifest['generation']}, of {manifest['world']} trainers"
    yield "parent", str(manifest["parent"] or "none")
    yield "held by", ", ".join(held_by) or "nobody"
    yield "replay", f"needs the log from record {commit.log_from} on"
    for key, what in (("num_events", "events"), ("num_samples", "samples"), ("skipped_steps", "skipped steps")):
        if key in progress:
            yield what, count(progress[key])
    if any(progress.get("rejected", {}).values()):
        yield "rejected", ", ".join(f"{reason} {count(n)}" for reason, n in progress["rejected"].items() if n)
    for partition, position in manifest["positions"].items():
        yield "position", f"{partition} {position}"
    for partition, begin, end in commit.state.get("skips", ()):
        yield "gone past", f"{partition} {begin}-{end}"
    for part in commit.shards:
        rows = ", ".join(f"{table} {count(facts['rows'])}" for table, facts in part.tables.items())
        yield part.folder, f"buckets {part.buckets[0]}-{part.buckets[1]}; rows: {rows}"
    yield "files", f"{count(len(commit.files))}, {count(commit.num_bytes)} bytes, {count(_own_bytes(commit))} its own"
    yield "made with", ", ".join(f"{key} {value}" for key, value in manifest["fingerprint"].items())


def verify_commits(store: Path, name: str | None, *, as_json: bool) -> None:
    """Read a commit back, or all of them, and print how each is. Raises CommitDamaged where one is not sound."""
    commits = Commits(store)
    names = commits.names() if name is None else [chosen(store, name).name]
    if not names and not as_json:
        print(f"{store} holds no commit")
    found: dict[str, dict[str, str]] = {}
    for each in names:
        found[each] = verified(store, each)
        if not as_json:
            _tell_verified(commits, each, found[each])
    if as_json:
        print(json.dumps([{"name": each, "sound": not found[each], "damage": found[each]} for each in names], indent=2))
    if damaged := [each for each in names if found[each]]:
        sound = begins_at([each for each in commits.names() if not found.get(each)], lineage(store))
        begin = f"the next run begins at {sound}" if sound else "no other one is left to begin at"
        raise CommitDamaged(f"{len(damaged)} of {len(names)} commits are damaged; {begin}")


def verified(store: Path, name: str) -> dict[str, str]:
    """What is wrong with a commit, by file or table; it is held meanwhile."""
    commits = Commits(store)
    with leased(commits, name, "verify"), scratch(store) as folder:
        try:
            return damage_of(commits.read(name), folder)
        except CommitDamaged as error:
            return {MANIFEST: str(error)}


def _tell_verified(commits: Commits, name: str, damage: dict[str, str]) -> None:
    if not damage:
        commit = commits.read(name)
        print(f"{name}: sound; {count(len(commit.files))} files, {count(commit.num_rows)} rows")
        return
    print(f"{name}: damaged")
    others = [other for other in commits.whole() if other.name != name]
    for file, problem in damage.items():
        also = [] if file == MANIFEST else list(sharing(commits.read(name), file, others))
        print(f"  {file} {problem}" + (f"; the same file is part of {', '.join(also)}" if also else ""))


def pin(store: Path, name: str, who: str) -> None:
    """Keep a commit from being pruned until it is unpinned."""
    commit = chosen(store, name)
    hold(Commits(store), commit.name, _holder(who))
    print(f"{commit.name} is kept by {who}")


def unpin(store: Path, name: str, who: str) -> None:
    """Let a commit go that was pinned."""
    commits = Commits(store)
    found = name if name in commits.holders() else chosen(store, name).name
    if not commits.release(found, _holder(who)):
        holders = ", ".join(commits.holders().get(found, [])) or "nobody"
        raise MillraceError(f"{found} is not kept by {who}; it is kept by {holders}")
    print(f"{found} is no longer kept by {who}")


def _holder(who: str) -> str:
    if not HOLDER.fullmatch(who):
        raise SpecError(f"{who!r} may hold letters, digits, '_' and '-' only, at most 64", "--as")
    return who


def prune(store: Path, keep: int) -> None:
    """Remove all but the newest `keep` commits, those held, and the one that the next run begins at."""
    commits = Commits(store)
    if not commits.names():
        raise MillraceError(f"{store} holds no commit")
    clear(store)
    start = begins_at(commits.names(), lineage(store))
    lock = locked(store / "log" / LOCK, Deadline.after(LOCK_S))
    gone = commits.prune(keep, lock, held=[start] if start else [])
    for name in gone:
        print(f"{name} is removed")
    print(f"{len(gone)} commits removed, {len(commits.names())} left")


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDE, highlight=False)
