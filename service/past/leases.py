"""What a command that reads commits holds meanwhile: the commits themselves, and a folder to open tables in.

Both are named for the process; what one that was killed left is cleared by the next command on the same machine.
"""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.locks import locked
from service.store import RERUNS
from trainer.commits import Commits
from trainer.log import LOCK

LOCK_S = 60.0
"""How long a running worker may keep the store's lock."""
_HOST = re.sub(r"\W", "_", socket.gethostname())
OF_COMMANDS = r"(?:verify|rerun|(?:predict|read)\d*)"
"""What commands at work hold commits as: before a dash, their machine and their process."""
_OURS = re.compile(rf"{OF_COMMANDS}-{_HOST}-(\d+)")


def hold(commits: Commits, name: str, who: str) -> None:
    """Keep a commit from being pruned. Under the store's lock: a pruning looks who holds what under it, too."""
    with locked(commits.folder.parent / "log" / LOCK, Deadline.after(LOCK_S)):
        if name not in commits.names():
            raise MillraceError(f"commit {name} was pruned just now; `millrace commits list` shows what is left")
        commits.hold(name, who)


@contextmanager
def leased(commits: Commits, name: str, what: str) -> Iterator[None]:
    """Keep a commit from being pruned as long as the context lasts.

    `what`: "verify", "rerun", "predict<number>", "read<number>".
    """
    clear(commits.folder.parent)
    who = _name(what)
    hold(commits, name, who)
    try:
        yield
    finally:
        commits.release(name, who)


@contextmanager
def scratch(store: Path, what: str = "verify") -> Iterator[Path]:
    """A folder on the store's disk that does not exist yet; gone at the end. `what`: as in `leased`."""
    clear(store)
    path = store / RERUNS / _name(what)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def clear(store: Path) -> None:
    """Let go of what commands that are gone held, on this machine."""
    for path in (*(store / RERUNS).glob("verify-*"), *(store / RERUNS).glob("read*-*")):
        if _gone(path.name):
            shutil.rmtree(path, ignore_errors=True)
    commits = Commits(store)
    for name, holders in commits.holders().items():
        for who in filter(_gone, holders):
            commits.release(name, who)


def _name(what: str) -> str:
    return f"{what}-{_HOST}-{os.getpid()}"


def _gone(who: str) -> bool:
    ours = _OURS.fullmatch(who)
    if ours is None:
        return False
    try:
        os.kill(int(ours[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's process, which is there
        return False
    return False
