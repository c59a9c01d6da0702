"""Restores the state of every rank, and the rows of the shards, from the commit that rank 0 chose."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.commit.part_objects import PartObjects
from headrace.pserver.protocol.shards import Shards
from headrace.relative_names import InvalidName, path_below
from headrace.trainer.checkpoint.commits import NAME, Commit, CommitDamaged, read_commit
from headrace.trainer.collectives.ranks import Ranks, on_rank_0
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.rank0.standby import Standby
from headrace.trainer.train.saved_state import StateHolders

RESTORE_S = 3600.0
"""Longest time to restore the rows of a commit."""


def restore(
    ranks: Ranks,
    beginning: RestartPoint | None,
    shards: Shards,
    holders: StateHolders,
    cache: Path | None,
    standby: Standby | None = None,
) -> None:
    """Restore the state of every rank and the rows of the shards from the commit that rank 0 chose.

    `cache`: the folder of this rank for files of a commit that were uploaded. After `standby` the shards have it,
    or soon will.
    """

    def rows() -> None:
        assert beginning is not None, "rank 0"
        commit = beginning.commit
        if standby is not None:
            standby.finish(shards, commit)
        elif commit is None:
            shards.restore(Path(), [], 0, Deadline.after(RESTORE_S))
        else:
            shards.restore(commit.folder, commit.shards, commit.version, Deadline.after(RESTORE_S))
        failpoint(Failpoint.RESTORED)

    on_rank_0(ranks, rows)
    commit = None if beginning is None else beginning.commit
    message = ranks.broadcast(_restored_message(beginning) if ranks.rank == 0 else None)
    if message["commit"] is not None:
        commit = commit or _commit_in(message, cache)
        holders.load(commit.folder, commit.state)
    if beginning is not None:
        holders.progress.used(beginning.last_number)


def _restored_message(beginning: RestartPoint | None) -> dict[str, Any]:
    """The commit, for the other ranks: its folder, or all that its files can be fetched by."""
    assert beginning is not None, "rank 0"
    if (commit := beginning.commit) is None or beginning.head is None:
        return {"commit": None if commit is None else str(commit.folder)}
    manifest = {key: commit.manifest[key] for key in ("files", "shards", "objects", "objects_at", "state")}
    return {"commit": commit.name, "manifest": manifest}


def _commit_in(message: Mapping[str, Any], cache: Path | None) -> Commit:
    """On a rank other than 0: the commit in a message, its dense part in a folder that this rank can read."""
    if "manifest" not in message:
        return read_commit(Path(message["commit"]))
    assert cache is not None, "the launcher names a folder"
    shutil.rmtree(cache, ignore_errors=True)  # of the commit before
    try:
        commit = Commit(path_below(cache, message["commit"], NAME), message["manifest"])
        own, uploaded = commit.own_files, commit.objects
    except InvalidName as error:
        raise CommitDamaged(f"the commit that rank 0 names: {error}") from error
    objects = PartObjects(commit.manifest["objects_at"], 0)
    objects.complete(commit.folder, own, uploaded, Deadline.after(RESTORE_S))
    return commit
