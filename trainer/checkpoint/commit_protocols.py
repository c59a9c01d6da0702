"""The parts of a commit beside the shards' rows, as protocols: rank 0's state, uploads, the mirror, facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.deadline import Deadline
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import Commit, CommitManifest
from headrace.trainer.job_status import MirrorStatus, ObjectStatus


class CapturedState(Protocol):
    """Rank 0's state of one version: see trainer.train.commit_state.SavedState."""

    @property
    def version(self) -> int:
        """The version that it is of."""
        ...

    @property
    def log_from(self) -> int:
        """First log record that a replay from this version needs."""
        ...

    @property
    def positions(self) -> Mapping[str, int]:
        """The position of each partition."""
        ...

    @property
    def state(self) -> Mapping[str, Any]:
        """The JSON-able part, for the manifest."""
        ...

    def write(self, folder: Path, *, sync: bool = True) -> list[str]:
        """Write and `sync` the other parts; returns names of files. Raises HeadraceError and OSError."""
        ...


class UploadedCommits(Protocol):
    """Commits whose files are objects: see trainer.checkpoint.object_commits.ObjectCommits."""

    def upload(self, folder: Path, files: Mapping[str, StoredFile], deadline: Deadline) -> dict[str, int]:
        """Upload the files of rank 0."""
        ...

    @property
    def address(self) -> str:
        """Of the store, for manifests."""
        ...

    def publish(self, name: str, manifest: CommitManifest, log_files: Sequence[str], deadline: Deadline) -> None:
        """Make a commit count."""
        ...

    def retire(self, names: Sequence[str]) -> None:
        """Make commits count no more."""
        ...

    def collect(self) -> list[str]:
        """Remove what no commit needs."""
        ...

    def status(self) -> ObjectStatus:
        """For people."""
        ...


class CommitMirror(Protocol):
    """Copies finished commits, in the background."""

    def offer(self, commit: Commit) -> None:
        """Copy this commit next; returns at once."""
        ...

    def holding(self) -> set[str]:
        """Names of commits that are being copied and must not be pruned."""
        ...

    def status(self) -> MirrorStatus:
        """For people."""
        ...


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """Facts about the job in every manifest."""

    job: str
    timeline: str
    generation: int
    world: int
    fingerprint: Mapping[str, str]
