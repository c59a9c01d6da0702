"""What is kept for exports, and what may go: exports at a destination; commits and prepared files in the store.

`superfluous` is pure; removing exports is trainer.exports.pointing's matter.
"""

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.commits import Commits, order_of
from trainer.exports.chain import Link
from trainer.exports.ordering import STAGES

NAME = re.compile(r"(t\d+)/(\d{10,})-(base|delta)")
_STAGE = re.compile(r".+-\d{10,}(\.\d+\.unfinished)?")
HOLDER = "export-"
"""Before a stream's name: who holds a commit that is exported."""


@dataclass(frozen=True, slots=True)
class Present:
    """An export that lies there."""

    path: str
    """"t1/0000000012-base"."""
    complete: bool
    """Whether it has its _DONE."""

    @property
    def order(self) -> tuple[int, int]:
        """Timeline and version: exports in order of time."""
        match = NAME.fullmatch(self.path)
        assert match is not None, self.path
        return int(match[1][1:]), int(match[2])

    @property
    def is_base(self) -> bool:
        """Whether it stands alone."""
        return self.path.endswith("-base")


def is_export(path: str) -> bool:
    """Whether this is the path of an export."""
    return NAME.fullmatch(path) is not None


def superfluous(present: Iterable[Present], keep: int, needed: Collection[str], newest: str) -> list[str]:
    """Paths of those that go, newest first, so that what stays can be replayed at any moment in between.

    What is older than the `keep` newest complete bases goes, and what is not complete and older than `newest`; never
    what is `needed`: the chains of what is pointed to and of what was exported last.
    """
    found = sorted(present, key=lambda each: each.order, reverse=True)
    bases = [each for each in found if each.is_base and each.complete]
    oldest = bases[keep - 1].order if len(bases) >= keep else (0, 0)
    last = Present(newest, True).order
    return [
        each.path
        for each in found
        if each.path not in needed and (each.order < oldest or (not each.complete and each.order < last))
    ]


def commit_of(commits: Commits, stream: str, flight: Link) -> str | None:
    """The commit of an export's version: the one that is held for it, or else the newest."""
    holders = commits.holders()
    found = [
        (HOLDER + stream in holders.get(name, ()), order_of(name), name)
        for name in commits.names()
        if name.startswith(f"{flight.timeline}-") and order_of(name)[1] == flight.version
    ]
    return max(found)[2] if found else None


def release_others(commits: Commits, ours: Collection[tuple[str, str]]) -> None:
    """Let go of commits held for exports that ended or never came to be; `ours` are commit and stream of the others."""
    held = {(name, HOLDER + stream) for name, stream in ours}
    for name, holders in commits.holders().items():
        for who in holders:
            if who.startswith(HOLDER) and (name, who) not in held:
                commits.release(name, who)


def remove_stages(store: Path, ours: Collection[Path]) -> None:
    """Remove what was prepared for other exports than those of `ours`."""
    for path in (store / STAGES).glob("*"):
        if path not in ours and _STAGE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
