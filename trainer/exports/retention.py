"""Retention for exports: exports at a destination, commits and prepared files in the store.

`exports_to_remove` is pure; trainer.exports.pointers removes exports.
"""

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.trainer.checkpoint.commits import Commits, order_of
from headrace.trainer.exports.destination import NAME as EXPORT_NAME
from headrace.trainer.exports.destination import STAGES, TIMELINE
from headrace.trainer.exports.stream_state import LoggedExport

NAME = re.compile(rf"({TIMELINE.pattern})/{EXPORT_NAME.pattern}", re.ASCII)
_STAGE = re.compile(r".+-\d{10,}(\.\d+\.unfinished)?")
HOLDER = "export-"
"""Prefix of a stream's name: the holder of a commit that is being exported."""


@dataclass(frozen=True, slots=True)
class StoredExport:
    """An export at a destination."""

    path: str
    """"t1/0000000012-base"."""
    complete: bool
    """Whether it has its _DONE."""

    @property
    def order(self) -> tuple[int, int]:
        """Timeline and version, which sort exports by time."""
        match = NAME.fullmatch(self.path)
        assert match is not None, self.path
        return int(match[1][1:]), int(match[2])

    @property
    def is_base(self) -> bool:
        """Whether it is a base."""
        return self.path.endswith("-base")


def is_export(path: str) -> bool:
    """Whether this is the path of an export."""
    return NAME.fullmatch(path) is not None


def exports_to_remove(present: Iterable[StoredExport], keep: int, needed: Collection[str], newest: str) -> list[str]:
    """Paths of the exports to remove, newest first, so that the rest can be replayed at any moment.

    Exports older than the `keep` newest complete bases are removed, and incomplete ones older than `newest`. `needed`
    exports stay: the chains of the current export and of the last one.
    """
    found = sorted(present, key=lambda each: each.order, reverse=True)
    bases = [each for each in found if each.is_base and each.complete]
    oldest = bases[keep - 1].order if len(bases) >= keep else (0, 0)
    last = StoredExport(newest, True).order
    return [
        each.path
        for each in found
        if each.path not in needed and (each.order < oldest or (not each.complete and each.order < last))
    ]


def held_commit(commits: Commits, stream: str, flight: LoggedExport) -> str | None:
    """The commit of an export's version: the one held for it, or else the newest; None where there is none."""
    holders = commits.holders()
    found = [
        (HOLDER + stream in holders.get(name, ()), order_of(name), name)
        for name in commits.names()
        if name.startswith(f"{flight.timeline}-") and order_of(name)[1] == flight.version
    ]
    return max(found)[2] if found else None


def release_other_commits(commits: Commits, ours: Collection[tuple[str, str]]) -> None:
    """Release commits held for exports that ended or were never made; keep those in `ours` (commit and stream)."""
    held = {(name, HOLDER + stream) for name, stream in ours}
    for name, holders in commits.holders().items():
        for who in holders:
            if who.startswith(HOLDER) and (name, who) not in held:
                commits.release(name, who)


def remove_stages(store: Path, ours: Collection[Path]) -> None:
    """Remove prepared files of all exports except those in `ours`."""
    for path in (store / STAGES).glob("*"):
        if path not in ours and _STAGE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
