"""The state of one version, which the workers of a generation hand to those that stand by when a job is resized.

It looks like a commit, with the rows changed since the newest commit in place of stores (pserver.commit.handed_rows).
It is not synced and is no commit: a generation that did not stand by begins at the newest commit, and trains the passes
after it again.

    <store>/handover/<name of such a commit>/
"""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from headrace.durable import check_no_link, unfinished_name
from headrace.errors import HeadraceError
from headrace.trainer.checkpoint.commits import (
    MANIFEST,
    Commit,
    CommitDamaged,
    CommitManifest,
    manifest_text,
    read_commit,
)
from headrace.trainer.journal.job_history import JobHistory

FOLDER = "handover"


class HandoverVoid(HeadraceError):
    """The state that was handed over is not the newest one."""


def hand_over(
    store: Path,
    name: str,
    write: Callable[[Path], CommitManifest],
    exclusive: Callable[[], AbstractContextManager[None]],
) -> None:
    """Replace what was handed over before. `write` writes into a folder and returns the manifest.

    `exclusive`: see Log.exclusive; a generation that was replaced changes nothing. Raises OSError, and as `exclusive`.
    """
    with exclusive():
        remove_handover(store)
        folder = check_no_link(store / FOLDER) / name
        folder.mkdir(parents=True)
    unfinished = unfinished_name(folder / MANIFEST)
    unfinished.write_bytes(manifest_text(write(folder)))
    with exclusive():
        os.replace(unfinished, folder / MANIFEST)


def handed_over(store: Path, resize: str) -> Commit | None:
    """The state that was handed over to the workers of a resize; None: there is none. Raises CommitDamaged."""
    for path in check_no_link(store / FOLDER).glob(f"*/{MANIFEST}"):
        try:
            handed = read_commit(path.parent)
        except CommitDamaged:
            if path.exists():
                raise
            continue  # removed meanwhile
        if acted_in(handed, resize):
            return handed
    return None


def acted_in(commit: Commit, resize: str) -> bool:
    """Whether a resize acted at or before the close of a commit: its generation ends with it."""
    acted = commit.state.get("operations", {}).get("acted", ())
    return any(each.get("id") == resize for each in acted)


def check_newest(history: JobHistory, handed: Commit) -> Commit:
    """The state that was handed over, if it is that after the last close in the log. Raises HandoverVoid."""
    if (handed.timeline, handed.version) != (history.timeline, history.closed):
        raise HandoverVoid(
            f"{handed.folder}: is of version {handed.version}, and the log of {history.closed}; the next generation "
            "begins at the newest commit"
        )
    return handed


def remove_handover(store: Path) -> None:
    """Remove what was handed over: it has been taken over, or never will be."""
    shutil.rmtree(check_no_link(store / FOLDER), ignore_errors=True)
