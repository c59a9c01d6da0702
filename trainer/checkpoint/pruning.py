"""Removes what the newest commits of a store do not need: older commits, the log before them, objects."""

from headrace.trainer.checkpoint.commit_protocols import CommitMirror, UploadedCommits
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.log import Log


def prune_store(
    commits: Commits, keep: int, joblog: Log, mirror: CommitMirror | None, objects: UploadedCommits | None
) -> None:
    """Keep the newest `keep` commits, and those that are held or uploaded. Raises HeadraceError and OSError."""
    held = set() if mirror is None else mirror.holding()
    retire = () if objects is None else (None, objects.retire)
    commits.prune(keep, joblog.exclusive(), held, *retire)
    joblog.roll()
    joblog.prune(min(kept.log_from for kept in commits.whole()))
    if objects is not None:
        objects.collect()
