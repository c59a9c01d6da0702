"""The manifest of a commit or of a handover, made from its parts."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.codec import plain
from headrace.deadline import Deadline
from headrace.pserver.protocol.shards import ShardCommitPart
from headrace.trainer.checkpoint.commit_protocols import CapturedState, ManifestFacts, UploadedCommits
from headrace.trainer.checkpoint.commits import FORMAT, FORMAT_OF_FILES, Commit, hash_of


def manifest_of(
    folder: Path,
    saved: CapturedState,
    parts: Sequence[ShardCommitPart],
    own: Sequence[str],
    origin: ManifestFacts,
    parent: Commit | None,
    objects: UploadedCommits | None,
    deadline: Deadline,
) -> dict[str, Any]:
    """The manifest of `saved`, whose files are written: those of the shards' `parts`, and rank 0's `own`.

    `objects`: where the own files are uploaded to before the `deadline`, if commits are there. Raises OSError, and as
    UploadedCommits.upload.
    """
    files = {file: stored for part in parts for file, stored in part.files.items()}
    mine = {file: hash_of(folder / file) for file in own}
    files |= mine
    uploaded: Mapping[str, Any] = {}
    if objects is not None:
        uploaded = objects.facts(objects.upload(folder, mine, deadline))
    return {
        "format": FORMAT if uploaded else FORMAT_OF_FILES,
        "job": origin.job,
        "timeline": origin.timeline,
        "version": saved.version,
        "name": folder.name,
        "parent": None if parent is None else parent.name,
        "generation": origin.generation,
        "world": origin.world,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": dict(origin.fingerprint),
        "positions": dict(saved.positions),
        "log_from": saved.log_from,
        "files": plain(dict(sorted(files.items()))),
        "shards": plain(parts),
        "state": dict(saved.state),
        **uploaded,
    }
