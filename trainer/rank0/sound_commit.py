"""Chooses the newest sound commit after a crash; restores damaged files from the mirror or the object store.

And names the timeline of a store that has no log.
"""

import logging
from collections.abc import Sequence

from headrace.blob.blob_errors import BlobUnavailable
from headrace.deadline import Deadline
from headrace.trainer.checkpoint.commits import (
    MANIFEST,
    CheckedFiles,
    Commit,
    CommitDamaged,
    Commits,
    NewerFormat,
    problems_of,
)
from headrace.trainer.checkpoint.mirror import Mirror
from headrace.trainer.checkpoint.object_store import complete_commit
from headrace.trainer.checkpoint.rewind import Lineage
from headrace.trainer.rank0.object_head import ObjectHead

MIRROR_S = 3600.0
"""Time limit to read from the mirror."""

log = logging.getLogger(__name__)


def newest_sound(
    commits: Commits,
    lineage: Lineage,
    uri: str | None,
    head: ObjectHead | None = None,
    checked: CheckedFiles | None = None,
) -> tuple[Commit | None, dict[str, str]]:
    """The newest sound commit that led to the present version; and the damage of newer ones, by name.

    `checked`: files that this process has found sound before.

    Raises BlobUnavailable if no commit is sound and the mirror, which may repair one, does not answer; NewerFormat.
    """
    passed_over: dict[str, str] = {}
    unreachable: BlobUnavailable | None = None
    for name in reversed(commits.names()):
        if not lineage.holds(name):
            continue
        try:
            commit = commits.read(name)
            uploaded = head is not None and bool(commit.objects)
            if head is None:
                complete_commit(commit, Deadline.after(MIRROR_S))
            problems = head.problems_of(commit) if head is not None and uploaded else problems_of(commit, checked)
            if problems and uri is not None and not uploaded:
                _mirror(uri).repair(commit, sorted(problems), Deadline.after(MIRROR_S))
                log.warning("commit %s: %d damaged files were restored from the mirror", name, len(problems))
                problems = problems_of(commit)
        except NewerFormat:
            raise
        except CommitDamaged as error:
            passed_over[name] = str(error)
            continue
        except BlobUnavailable as error:
            if head is not None:
                raise
            unreachable = error
        if not problems:
            return commit, passed_over
        passed_over[name] = "; ".join(f"{file} {problem}" for file, problem in sorted(problems.items())[:3])
    if unreachable is not None:
        raise unreachable
    return None, passed_over


def discard_commits(commits: Commits, names: Sequence[str]) -> None:
    """Take damaged commits out of use; the next pruning removes their folders."""
    for name in names:
        (commits.folder / name / MANIFEST).rename(commits.folder / name / f"{MANIFEST}.damaged")


def new_timeline(commits: Commits, uri: str | None, taken: int) -> tuple[str, str | None]:
    """The timeline of a store without a log: a new one, or one that begins at a commit from the mirror."""
    whole = commits.whole()
    last = max([taken, *(commit.order[0] for commit in whole)])
    if uri is not None:
        last = max([last, *(timeline for timeline, _, _ in _mirror(uri).catalog(Deadline.after(MIRROR_S)).orders)])
    return f"t{last + 1}", whole[-1].name if whole else None


def _mirror(uri: str) -> Mirror:
    return Mirror.open(uri, Deadline.after(MIRROR_S))
