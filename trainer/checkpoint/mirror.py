"""The mirror, a copy of commits and log in an object store: uploads commits, lists them, removes old ones.

    files/<sha256>               immutable content, stored once for all commits that name it
    commits/<commit name>.json   the manifest, as in the commit's folder; the commit exists once this does
    log/<file name>              files of the job's log, as of the last upload

headrace.blob moves the bytes; trainer.checkpoint.mirror_uploader decides when; trainer.checkpoint.mirror_fetch brings
commits back. Only one process at a time may write to a mirror; the caller ensures it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.blob.blob_errors import SourceDamaged
from headrace.blob.blob_store import UNFINISHED, BlobStore, checked_file, head_of, open_blobs, whole
from headrace.blob.signature import UNSIGNED, Signature
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, SpecError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.commit.part_objects import run_parallel
from headrace.trainer.checkpoint.commits import MANIFEST, NAME, Commit, CommitDamaged, NewerFormat, order_of
from headrace.trainer.checkpoint.mirror_catalog import (
    MirroredCommit,
    commits_to_remove,
    newest_first,
    old_logs,
    opened,
    read_manifest,
    unreferenced_contents,
)
from headrace.trainer.journal.log_file import file_numbers

FILES, COMMITS, LOG = "files", "commits", "log"
SUFFIX = ".json"
KEY = "store.mirror"
"""Key of the job file that names a mirror."""
MAX_MANIFEST_BYTES = 64 << 20


class MirrorEmpty(HeadraceError):
    """The mirror has no commit, or none that is whole."""


class MirrorSuperseded(HeadraceError):
    """An upload would harm what another machine relies on."""


class CommitPresent(HeadraceError):
    """A commit is never replaced."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: is there already")


@dataclass(frozen=True, slots=True)
class MirrorCatalog:
    """The commits of a mirror, newest first, and the errors of damaged manifests by name."""

    commits: list[MirroredCommit]
    damaged: dict[str, CommitDamaged]

    def refuse_newer(self) -> None:
        """Raise NewerFormat where a newer Headrace has written to the mirror."""
        for error in self.damaged.values():
            if isinstance(error, NewerFormat):
                raise error

    def refuse_others(self, job: str) -> None:
        """Raise SpecError where the mirror has commits of another job."""
        for other in {commit.manifest.job for commit in self.commits} - {job}:
            raise SpecError(f"this mirror holds commits of the job {other!r}; give {job!r} a prefix of its own", KEY)

    @property
    def orders(self) -> list[tuple[int, int, int]]:
        """Timeline, version and generation of each commit, damaged or not."""
        names = (*(commit.name for commit in self.commits), *self.damaged)
        return [order_of(name) for name in names if NAME.fullmatch(name)]

    def refuse_followed(self, commit: Commit) -> None:
        """Raise MirrorSuperseded where another machine continued from this mirror, on a timeline after the commit's."""
        newest = max([0, *(timeline for timeline, _, _ in self.orders)])
        if newest > commit.order[0]:
            raise MirrorSuperseded(
                f"the mirror holds commits of timeline t{newest}, this job is on {commit.timeline}: another machine "
                f"continues from it; give one of the two a prefix of its own ({KEY})"
            )


class Mirror:
    """Errors: BlobUnavailable, unless stated."""

    def __init__(self, blobs: BlobStore, signature: Signature = UNSIGNED) -> None:
        self.blobs, self._signature = blobs, signature
        self._read: dict[str, MirroredCommit] = {}  # manifests never change; bounded by what the mirror keeps

    @classmethod
    def open(cls, uri: str, deadline: Deadline, signature: Signature = UNSIGNED) -> "Mirror":
        """Connect. Raises SpecError where the URI is wrong."""
        try:
            address = parse(uri)
        except ValueError as error:
            raise SpecError(str(error), KEY) from None
        return cls(open_blobs(address, "mirror", deadline), signature)

    def upload(self, commit: Commit, log_files: Sequence[Path], deadline: Deadline) -> None:
        """Make `commit` restorable from the mirror. Until step 3 a restart uses the commit before.

        1. Files whose content is missing. 2. Files of the log, oldest first. 3. The manifest.

        Raises CommitDamaged where a local file differs from the manifest; the file is then not uploaded.
        """
        text = _text_of(commit)
        known = read_manifest(commit.name, text)
        catalog = self.catalog(deadline)
        catalog.refuse_others(known.manifest.job)
        catalog.refuse_followed(known)
        self._put_files(commit, deadline)  # 1
        failpoint(Failpoint.UPLOADED)
        self._put_log(log_files, deadline)  # 2
        key = f"{COMMITS}/{commit.name}{SUFFIX}"
        self.blobs.put(key, whole(self._signature.signed(key, text)), deadline)  # 3
        self._read[commit.name] = known

    def catalog(self, deadline: Deadline) -> MirrorCatalog:
        """The commits that have a manifest, newest first. Their files are not checked: see `missing`."""
        present = self.blobs.sizes(COMMITS, deadline)
        names = [name.removesuffix(SUFFIX) for name in present if name.endswith(SUFFIX)]
        self._read = {name: commit for name, commit in self._read.items() if name in names}
        damaged: dict[str, CommitDamaged] = {}
        for name in names:
            if name not in self._read:
                key = f"{COMMITS}/{name}{SUFFIX}"
                blob = self.blobs.get(key, MAX_MANIFEST_BYTES, deadline)
                try:
                    self._read[name] = read_manifest(name, opened(self._signature, key, name, blob or b""))
                except CommitDamaged as error:
                    damaged[name] = error
        return MirrorCatalog(newest_first(self._read.values()), damaged)

    def generations(self, deadline: Deadline) -> list[int]:
        """The generations that wrote log files."""
        found = map(file_numbers, map(Path, self.blobs.sizes(LOG, deadline)))
        return [numbers[0] for numbers in found if numbers is not None]

    def missing(self, commit: MirroredCommit, deadline: Deadline) -> list[str]:
        """Paths of the commit whose content is missing or has another size."""
        present = self.blobs.sizes(FILES, deadline)
        return [path for path, file in commit.files.items() if present.get(file.sha256) != file.num_bytes]

    def prune(self, keep: int, pinned: Collection[str], log_files: Sequence[Path], deadline: Deadline) -> list[str]:
        """Remove all but the newest `keep` commits and pinned ones -> names of the removed. `log_files` stay.

        1. Manifests, oldest first. 2. Contents that no manifest names any more. 3. Old files of the log.
        An interruption leaves whole commits, and leftovers that the next prune removes.

        Raises NewerFormat, and removes nothing, where a newer Headrace has written to the mirror.
        """
        catalog = self.catalog(deadline)
        catalog.refuse_newer()
        gone = commits_to_remove([commit.name for commit in catalog.commits], keep, pinned)
        for name in [*gone, *catalog.damaged]:  # 1
            self.blobs.remove(f"{COMMITS}/{name}{SUFFIX}", deadline)
        kept = [commit for commit in catalog.commits if commit.name not in gone]
        self._remove(FILES, unreferenced_contents(self.blobs.sizes(FILES, deadline), kept), deadline)  # 2
        logs = self.blobs.sizes(LOG, deadline)
        self._remove(
            LOG,
            [*old_logs(logs, kept, min((path.name for path in log_files), default="")), *_leftovers(logs)],
            deadline,
        )  # 3
        self._remove(COMMITS, _leftovers(self.blobs.sizes(COMMITS, deadline)), deadline)
        return gone

    def _remove(self, folder: str, names: Sequence[str], deadline: Deadline) -> None:
        run_parallel(lambda name: self.blobs.remove(f"{folder}/{name}", deadline), names)

    def _put_files(self, commit: Commit, deadline: Deadline) -> None:
        present = self.blobs.sizes(FILES, deadline)
        wanted = {file.sha256: (path, file.num_bytes) for path, file in commit.files.items()}

        def put(sha256: str) -> None:
            path, num_bytes = wanted[sha256]
            try:
                self.blobs.put(f"{FILES}/{sha256}", checked_file(commit.folder / path, sha256, num_bytes), deadline)
            except SourceDamaged as error:
                raise CommitDamaged(str(error)) from error

        run_parallel(put, [sha256 for sha256, (_, num_bytes) in wanted.items() if present.get(sha256) != num_bytes])

    def _put_log(self, log_files: Sequence[Path], deadline: Deadline) -> None:
        """Upload files that are missing or have grown, up to their present length."""
        present = self.blobs.sizes(LOG, deadline)
        for path in log_files:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue  # pruned meanwhile, so it is not needed any more
            with file:
                num_bytes = path.stat().st_size
                if present.get(path.name) != num_bytes:
                    self.blobs.put(f"{LOG}/{path.name}", head_of(file, num_bytes), deadline)


def _leftovers(names: Iterable[str]) -> list[str]:
    """Unfinished files of writers that died."""
    return [name for name in names if name.endswith(UNFINISHED)]


def _text_of(commit: Commit) -> bytes:
    try:
        return (commit.folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CommitDamaged(f"{commit.folder / MANIFEST}: cannot be read: {error.strerror}") from error


def read_catalog(uri: str, deadline: Deadline, signature: Signature = UNSIGNED) -> MirrorCatalog:
    """The catalog of the mirror at `uri`."""
    return Mirror.open(uri, deadline, signature).catalog(deadline)
