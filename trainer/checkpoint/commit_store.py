"""The place where commits of rank 0 count: its own disk. The other two ways extend this one.

    CommitStore       this disk alone
    MirrorUploader    this disk, and a copy that follows in the background (trainer.checkpoint.mirror)
    ObjectCommits     an object store is the truth, and this disk a cache (trainer.checkpoint.object_store)

trainer.checkpoint.committer has the order of a commit's steps.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.deadline import Deadline
from headrace.durable import NO_ROOM, REAL, Disk
from headrace.errors import HeadraceError
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import MANIFEST, Commit, CommitManifest, Commits, write_manifest
from headrace.trainer.job_status import CommitStatus
from headrace.trainer.journal.log import Log


class ManifestFailed(HeadraceError):
    """A write of a manifest failed. It is unknown whether it is durable, so this process must end."""

    exit_code = 75

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(
            f"{folder / MANIFEST}: {error.strerror}: this process cannot continue with the store; the next generation "
            "continues from an older commit. Check this disk if it happens again"
        )


class CommitStore:
    """The thread of the committer calls; `with_status` is for any thread."""

    address: str | None = None
    """Address of the object store that has the files, for manifests."""

    def __init__(self, store: Path, disk: Disk = REAL) -> None:
        self.commits, self._disk = Commits(store), disk

    def begin(self, name: str) -> Path:
        """Step 3: the folder of a new commit."""
        folder = self.commits.folder / name
        self._disk.make_folder(self.commits.folder)
        self._disk.sync_folder(self.commits.folder.parent)
        folder.mkdir()
        return folder

    def upload(self, folder: Path, files: Mapping[str, StoredFile], deadline: Deadline) -> Mapping[str, int] | None:
        """Step 3: upload the files of rank 0 -> the generation of each, by SHA-256; None where they stay on this disk.

        Raises PserverError.
        """
        return None

    def hold(self, name: str, holders: Iterable[str]) -> None:
        """Hold a commit, which need not exist yet."""
        for who in holders:
            self.commits.hold(name, who)

    def release(self, name: str, holders: Iterable[str]) -> None:
        """The inverse of `hold`, for a commit that failed."""
        for who in holders:
            with suppress(OSError):  # a hold of a commit that does not exist has no effect
                self.commits.release(name, who)

    def publish(self, manifest: CommitManifest, log_files: Sequence[str], deadline: Deadline) -> None:
        """Step 4, where commits do not count on this disk: make the commit count.

        `log_files`: names of the files of the log. Raises Superseded; Unavailable, and then the commit may exist later.
        """

    def write_manifest(self, folder: Path, manifest: CommitManifest) -> None:
        """Step 4 on this disk. Without room the commit fails as in any other step (OSError).

        After any other error the result is unknown: ManifestFailed. The rest of a failed manifest is removed, so call
        it with the store's lock: the next generation does not begin from it.
        """
        try:
            write_manifest(folder, manifest, self._disk)
        except OSError as error:
            with suppress(OSError):
                (folder / MANIFEST).unlink()
            if error.errno in NO_ROOM:
                raise
            raise ManifestFailed(folder, error) from error

    def offer(self, commit: Commit) -> None:
        """Step 5: copy this commit next; returns at once."""

    def prune(self, keep: int, joblog: Log) -> None:
        """Step 5: keep the newest `keep` commits, and those that are held or copied; remove the log before them.

        The beginning of the log counts as the first commit, since a job can be run again from there, too. Raises
        HeadraceError and OSError.
        """
        self.commits.prune(keep, joblog.exclusive(), self.holding(), self.retire)
        joblog.roll()
        kept = self.commits.whole()
        if len(kept) >= keep:
            joblog.prune(min(each.log_from for each in kept))
        self.collect()

    def holding(self) -> Collection[str]:
        """Names of commits that are being copied and must not be pruned."""
        return ()

    def retire(self, names: Sequence[str]) -> None:
        """Record that these commits count no more, before they are removed from this disk."""

    def collect(self) -> list[str]:
        """Remove the objects that no commit needs; returns their keys."""
        return []

    def with_status(self, status: CommitStatus) -> CommitStatus:
        """The status of commits, with that of the mirror or of the object store."""
        return status

    def stop(self, deadline: Deadline) -> bool:
        """End what goes on in the background -> whether everything offered is copied."""
        return True
