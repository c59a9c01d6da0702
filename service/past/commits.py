"""`millrace commits`: what is there, what is in one, whether it is sound; keeping some, removing others."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from service.past.leases import LOCK_S, OF_COMMANDS, clear, hold, leased, scratch
from service.past.verify import damage_of, sharing
from service.store import stopped
from trainer.commits import MANIFEST, Commit, CommitDamaged, Commits, order_of
from trainer.log import LOCK

WIDE = 240
"""Columns of a table that no terminal shows."""
PROGRESS = (("num_events", "events"), ("num_samples", "samples"), ("skipped_steps", "skipped steps"))
"""Counters of a manifest, and what they count."""
HOLDER = re.compile(r"[A-Za-z0-9_-]{1,64}")
OF_WORK = re.compile(rf"(?:export|{OF_COMMANDS})-.*")
"""Holders that are exports and commands at work: they let go by themselves, and nobody else in their name."""


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
    if as_json:
        print(json.dumps(chosen(store, name).manifest, indent=2))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for key, value in _facts(details_of(store, name)):
        table.add_row(Text(key), Text(value))
    _console().print(table)


def details_of(store: Path, text: str) -> dict[str, Any]:
    """What the manifest of the commit that `text` means says of it. Raises SpecError, CommitDamaged."""
    commit = chosen(store, text)
    manifest, progress, holders = commit.manifest, commit.state.get("progress", {}), Commits(store).holders()
    return {
        **_entry(Commits(store), commit.name, holders.get(commit.name, [])),
        "next": commit.name == begins_at(Commits(store).names(), lineage(store)),
        "job": str(manifest["job"]),
        "parent": manifest["parent"],
        "trainers": int(manifest["world"]),
        "log_from": commit.log_from,
        "progress": {key: progress[key] for key, _ in PROGRESS if key in progress},
        "rejected": {reason: n for reason, n in progress.get("rejected", {}).items() if n},
        "positions": dict(manifest["positions"]),
        "skips": [
            {"partition": name, "begin": begin, "end": end} for name, begin, end in commit.state.get("skips", ())
        ],
        "parts": [
            {
                "folder": part.folder,
                "buckets": list(part.buckets),
                "rows": {table: int(facts["rows"]) for table, facts in part.tables.items()},
            }
            for part in commit.shards
        ],
        "files": len(commit.files),
        "made_with": {key: str(value) for key, value in manifest["fingerprint"].items()},
    }


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "name", found["name"]
    yield "job", found["job"]
    yield "version", f"{found['version']} of timeline {found['timeline']}"
    yield "made", f"{found['made_at']} by generation {found['generation']}, of {found['trainers']} trainers"
    yield "parent", str(found["parent"] or "none")
    yield "held by", ", ".join(found["held_by"]) or "nobody"
    yield "replay", f"needs the log from record {found['log_from']} on"
    for key, what in PROGRESS:
        if key in found["progress"]:
            yield what, count(found["progress"][key])
    if found["rejected"]:
        yield "rejected", ", ".join(f"{reason} {count(n)}" for reason, n in found["rejected"].items())
    for partition, position in found["positions"].items():
        yield "position", f"{partition} {position}"
    for skip in found["skips"]:
        yield "gone past", f"{skip['partition']} {skip['begin']}-{skip['end']}"
    for part in found["parts"]:
        rows = ", ".join(f"{table} {count(number)}" for table, number in part["rows"].items())
        yield part["folder"], f"buckets {part['buckets'][0]}-{part['buckets'][1]}; rows: {rows}"
    yield "files", f"{count(found['files'])}, {count(found['bytes'])} bytes, {count(found['own_bytes'])} its own"
    yield "made with", ", ".join(f"{key} {value}" for key, value in found["made_with"].items())


def verify_commits(store: Path, name: str | None, *, as_json: bool) -> None:
    """Read a commit back, or all of them, and print how each is. Raises CommitDamaged where one is not sound."""
    commits = Commits(store)
    names = commits.names() if name is None else [chosen(store, name).name]
    if not names and not as_json:
        print(f"{store} holds no commit")
    verdicts: list[Verdict] = []
    for each in names:
        verdicts.append(verdict_on(store, each))
        if not as_json:
            _tell_verdict(verdicts[-1])
    if as_json:
        told = [{"name": each.name, "sound": each.sound, "damage": dict(each.damage)} for each in verdicts]
        print(json.dumps(told, indent=2))
    if damaged := [each.name for each in verdicts if not each.sound]:
        sound = begins_at([each for each in commits.names() if each not in damaged], lineage(store))
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


@dataclass(frozen=True)
class Verdict:
    """How a commit that was read back is."""

    name: str
    damage: Mapping[str, str]
    """What is wrong, by file or table."""
    shared: Mapping[str, list[str]]
    """By damaged file: the other commits that it is part of."""
    files: int
    rows: int

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damage


def verdict_on(store: Path, name: str) -> Verdict:
    """Read a commit back; it is held meanwhile."""
    commits, damage = Commits(store), verified(store, name)
    if MANIFEST in damage:
        return Verdict(name, damage, {}, 0, 0)
    commit = commits.read(name)
    others = [other for other in commits.whole() if other.name != name] if damage else []
    shared = {file: list(sharing(commit, file, others)) for file in damage}
    return Verdict(name, damage, shared, len(commit.files), commit.num_rows)


def _tell_verdict(found: Verdict) -> None:
    if found.sound:
        print(f"{found.name}: sound; {count(found.files)} files, {count(found.rows)} rows")
        return
    print(f"{found.name}: damaged")
    for file, problem in found.damage.items():
        also = found.shared.get(file)
        print(f"  {file} {problem}" + (f"; the same file is part of {', '.join(also)}" if also else ""))


def pin(store: Path, name: str, who: str) -> str:
    """Keep a commit from being pruned until it is unpinned; its name."""
    commit = chosen(store, name)
    hold(Commits(store), commit.name, check_person(_holder(who)))
    return commit.name


def unpin(store: Path, name: str, who: str) -> str:
    """Let a commit go that was pinned; its name."""
    commits = Commits(store)
    found = name if name in commits.holders() else chosen(store, name).name
    if not commits.release(found, _holder(who)):
        holders = ", ".join(commits.holders().get(found, [])) or "nobody"
        raise MillraceError(f"{found} is not kept by {who}; it is kept by {holders}")
    return found


def remove(store: Path, job: str, text: str) -> str:
    """Remove one commit of a job that is stopped; its name. Raises MillraceError where something needs it."""
    with stopped(store, job):
        commits, name = Commits(store), chosen(store, text).name
        clear(store)
        if holders := commits.holders().get(name):
            raise MillraceError(f"commit {name} is kept by {', '.join(holders)}; have them let it go first")
        if name == begins_at(commits.names(), lineage(store)):
            raise MillraceError(f"the next run begins at commit {name}; it can go once there is another")
        lock = locked(store / "log" / LOCK, Deadline.after(LOCK_S))
        commits.prune(0, lock, held=[each for each in commits.names() if each != name])
    return name


def check_person(who: str) -> str:
    """`who`, where that is no name of an export or a command at work. Raises SpecError."""
    if OF_WORK.fullmatch(who):
        told = f"{who!r} is the name of an export or a command at work, which lets go by itself; choose another"
        raise SpecError(told, "holder")
    return who


def _holder(who: str) -> str:
    if not HOLDER.fullmatch(who):
        raise SpecError(f"{who!r} may hold letters, digits, '_' and '-' only, at most 64", "--as")
    return who


def prune(store: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` commits, those held, and the one that the next run begins at; what went."""
    commits = Commits(store)
    if not commits.names():
        raise MillraceError(f"{store} holds no commit")
    clear(store)
    start = begins_at(commits.names(), lineage(store))
    lock = locked(store / "log" / LOCK, Deadline.after(LOCK_S))
    return commits.prune(keep, lock, held=[start] if start else [])


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDE, highlight=False)
