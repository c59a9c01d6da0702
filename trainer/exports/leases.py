"""Which commits are held for exports, and what else of exports lies in a store until they end."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from trainer.commits import Commits, order_of
from trainer.exports.chain import Link
from trainer.exports.ordering import STAGES

_STAGE = re.compile(r".+-\d{10,}(\.\d+\.unfinished)?")
HOLDER = "export-"
"""Before a stream's name: who holds a commit that is exported."""


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
