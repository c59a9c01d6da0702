"""The mirror, a copy of commits and log in an object store: uploads, lists, removes and fetches commits.

    files/<sha256>               immutable content, stored once for all commits that name it
    commits/<commit name>.json   the manifest, as in the commit's folder; the commit exists once this does
    log/<file name>              files of the job's log, as of the last upload

`Mirror` is what is there; `MirrorUploader` is the thread of rank 0 that keeps it up to date. Only one process at a time
may write to a mirror. Imports no torch: the launcher fetches commits, too.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from headrace.blob.blob_errors import SourceDamaged
from headrace.blob.blob_store import UNFINISHED, BlobStore, head_of, open_blobs, whole
from headrace.blob.signature import UNSIGNED, Signature, WrongSignature
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.durable import REAL, locked, write_whole, writing
from headrace.errors import HeadraceError, SpecError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.commit.commit_files import ContentLost, fetch_files, run_parallel, upload_files
from headrace.relative_names import InvalidName
from headrace.trainer.checkpoint.commit_store import CommitStore
from headrace.trainer.checkpoint.commits import (
    FOLDER,
    MANIFEST,
    NAME,
    Commit,
    CommitDamaged,
    NewerFormat,
    order_of,
    parse_manifest,
    to_prune,
)
from headrace.trainer.job_status import CommitStatus, MirrorStatus
from headrace.trainer.journal.log_file import file_numbers

FILES, COMMITS, LOG = "files", "commits", "log"
SUFFIX = ".json"
KEY = "store.mirror"
"""Key of the job file that names a mirror."""
MAX_MANIFEST_BYTES = 64 << 20
RETRY_S = 5.0
"""Pause after a failed upload."""
UPLOAD_S = 3600.0
"""Longest time of one upload; then it starts again and skips what is uploaded."""
MAX_BEHIND_S = 900.0
"""A mirror that is behind for longer is trouble in the status, even if nothing fails."""
LOCK_S = 5.0
"""Longest wait of one try for another writer to the mirror; then the status shows it."""
GIVE_UP_S = 45.0
"""Longest wait at the end for a call that is given up: one request must end first (headrace.blob.bucket)."""
LOCK = "mirror.lock"
"""Lock file in the store, held while writing to the mirror. It protects the files of a new generation from a rank 0 of
an older one that is still alive: either the old one holds the lock and the new one waits, or the old one sees that it
was replaced."""

log = logging.getLogger(__name__)


class MirrorEmpty(HeadraceError):
    """The mirror has no commit, or none that is whole."""


class MirrorSuperseded(HeadraceError):
    """An upload would harm what another machine relies on."""


class CommitPresent(HeadraceError):
    """A commit is never replaced."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: is there already")


@dataclass(frozen=True, slots=True)
class MirroredCommit(Commit):
    """One commit of a mirror; its folder is only its name."""

    text: bytes
    """Content of its manifest.json."""


@dataclass(frozen=True, slots=True)
class FetchedCommit:
    """A commit that was fetched."""

    name: str
    passed_over: tuple[str, ...]
    """Errors of newer commits that are damaged in the mirror, for people."""


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
    """The content of a mirror. Errors: BlobUnavailable, unless stated."""

    def __init__(self, blobs: BlobStore, signature: Signature = UNSIGNED) -> None:
        self.blobs, self._signature = blobs, signature
        self._read: dict[str, MirroredCommit] = {}  # manifests never change; bounded by what the mirror keeps

    @classmethod
    def open(cls, uri: str, deadline: Deadline, signature: Signature = UNSIGNED) -> Self:
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
        """The commits that have a manifest, newest first. Their files are not checked: see `_missing`."""
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

    def newest_generation(self, deadline: Deadline) -> int:
        """The highest generation of workers, also in damaged commits and the log: a new one must be above it."""
        logs = map(file_numbers, map(Path, self.blobs.sizes(LOG, deadline)))
        logged = (numbers[0] for numbers in logs if numbers is not None)
        return max([0, *logged, *(order[2] for order in self.catalog(deadline).orders)])

    def fetch(self, store: Path, job: str, deadline: Deadline) -> FetchedCommit:
        """Fetch the newest commit of `job` whose files are complete and right, to `store`/commits/<name>.

        Raises MirrorEmpty where there is none, SpecError where the mirror is another job's, NewerFormat, CommitPresent,
        Unwritable; then nothing of the commit is left.
        """
        catalog = self.catalog(deadline)
        catalog.refuse_newer()
        catalog.refuse_others(job)
        passed_over = [str(error) for error in catalog.damaged.values()]
        for commit in catalog.commits:
            try:
                self._fetch(commit, store / FOLDER, deadline)
            except CommitDamaged as error:
                passed_over.append(str(error))
            else:
                return FetchedCommit(commit.name, tuple(passed_over))
        uri = self.blobs.address.text
        if passed_over:
            raise MirrorEmpty(f"mirror {uri}: no commit in it is whole: {'; '.join(passed_over)}")
        raise MirrorEmpty(f"mirror {uri}: there is no commit in it; check store.mirror, or start without it")

    def _fetch(self, commit: MirroredCommit, commits: Path, deadline: Deadline) -> None:
        """Fetch one commit, whole or not at all.

        1. Its files, under an unfinished name. 2. Sync their folders. 3. The manifest. 4. The commit gets its name.
        """
        if missing := self._missing(commit, deadline):
            raise CommitDamaged(
                f"{commit.name}: {len(missing)} of its files are not in the mirror, {missing[0]} for one"
            )
        folder = commits / f"{commit.name}{UNFINISHED}"
        if (commits / commit.name).exists():
            raise CommitPresent(commits / commit.name)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            with _damage():
                fetch_files(self.blobs, folder, commit.files, key_of_file, deadline)  # 1
            with writing(folder):
                for parent in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
                    REAL.sync_folder(parent)  # 2
                write_whole(REAL, folder / MANIFEST, commit.text)  # 3
                REAL.rename(folder, commits / commit.name)  # 4
                REAL.sync_folder(commits)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def repair(self, commit: Commit, bad: Sequence[str], deadline: Deadline) -> None:
        """Replace the files `bad` of a commit by the mirror's contents with their hashes.

        Other commits that share a damaged file by a hard link keep it: repair them, too. Raises CommitDamaged where the
        mirror lacks the right content; Unwritable.
        """
        with _damage():
            fetch_files(self.blobs, commit.folder, {path: commit.files[path] for path in bad}, key_of_file, deadline)

    def _missing(self, commit: MirroredCommit, deadline: Deadline) -> list[str]:
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
        wanted = {path: file for path, file in commit.files.items() if present.get(file.sha256) != file.num_bytes}
        with _damage():
            upload_files(self.blobs, commit.folder, wanted, key_of_file, deadline)

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


class MirrorUploader(CommitStore):
    """The thread of rank 0 that keeps the mirror up to date. Training never waits for it. Any thread may call.

    One commit at a time waits for its upload; a newer commit replaces it, since every commit is whole. After a restart
    the restored commit must be offered again: its upload may not have ended.
    """

    def __init__(
        self,
        uri: str,
        store: Path,
        keep: int,
        pinned: Callable[[], Collection[str]],
        check_rank0: Callable[[], None],
        signature: Signature = UNSIGNED,
        retry_s: float = RETRY_S,
        max_behind_s: float = MAX_BEHIND_S,
    ) -> None:
        """`pinned` names commits to keep beside the newest `keep`; `check_rank0` raises where we were replaced."""
        super().__init__(store)
        self._uri, self._store, self._keep, self._signature = uri, store, keep, signature
        self._pinned, self._check_rank0 = pinned, check_rank0
        self._retry_s, self._max_behind_s = retry_s, max_behind_s
        self._changed = threading.Condition()
        self._waiting: Commit | None = None
        self._in_flight: Commit | None = None
        self._stopping: Deadline | None = None
        self._mirror: Mirror | None = None
        self._version: int | None = None
        self._offered_s = 0.0
        self._behind_since_s: float | None = None
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def offer(self, commit: Commit) -> None:
        """Upload this commit next; returns at once."""
        with self._changed:
            self._waiting, self._offered_s = commit, time.monotonic()
            if self._behind_since_s is None:
                self._behind_since_s = self._offered_s
            self._changed.notify()

    def holding(self) -> set[str]:
        """Names of commits that are or will be uploaded and must not be pruned."""
        with self._changed:
            return {commit.name for commit in (self._waiting, self._in_flight) if commit is not None}

    def status(self) -> MirrorStatus:
        """For the status: last mirrored version, how long a newer one has waited, what is wrong."""
        with self._changed:
            behind_s = 0.0 if self._behind_since_s is None else time.monotonic() - self._behind_since_s
            trouble = self._trouble
            if trouble is None and behind_s > self._max_behind_s:
                trouble = f"behind for more than {self._max_behind_s:g} s: uploads are slower than commits"
            if not self._thread.is_alive() and self._stopping is None:
                trouble = "the upload thread has ended because of a bug; see the log"
            return MirrorStatus(version=self._version, behind_s=behind_s, trouble=trouble)

    def with_status(self, status: CommitStatus) -> CommitStatus:
        return msgspec.structs.replace(status, mirror=self.status())

    def stop(self, deadline: Deadline) -> bool:
        """Upload the waiting commit within `deadline`, then end -> whether everything offered is in the mirror."""
        with self._changed:
            self._stopping = deadline
            self._changed.notify()
        self._thread.join(deadline.left_s())
        if self._thread.is_alive() and self._mirror is not None:
            self._mirror.blobs.give_up()
            self._thread.join(GIVE_UP_S)
        with self._changed:
            is_whole = self._behind_since_s is None
        if not is_whole:
            trouble = self.status().trouble
            log.warning("the mirror lacks the last commit: the next run uploads it first; %s", trouble)
        return is_whole

    def _run(self) -> None:
        while (commit := self._next()) is not None:
            try:
                self._upload(commit)
            except (HeadraceError, OSError) as error:
                self._failed(commit, error)

    def _next(self) -> Commit | None:
        """Wait for a commit; None when none will come or no time is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._stopping is not None)
            if self._stopping is not None and self._stopping.passed():
                return None
            self._in_flight, self._waiting = self._waiting, None
            return self._in_flight

    def _upload(self, commit: Commit) -> None:
        deadline = self._stopping or Deadline.after(UPLOAD_S)
        if self._mirror is None:
            self._mirror = Mirror.open(self._uri, deadline, self._signature)
        with locked(self._store / LOCK, Deadline.after(LOCK_S)):
            self._check_rank0()
            log_files = sorted((self._store / "log").glob("*.log"))
            self._mirror.upload(commit, log_files, deadline)
            self._mirrored(commit)
            self._mirror.prune(self._keep, {commit.name, *self._pinned()}, log_files, deadline)
        with self._changed:
            if self._trouble is not None:
                log.info("the mirror is up to date again, at version %d", commit.version)
            self._trouble = None

    def _mirrored(self, commit: Commit) -> None:
        with self._changed:
            self._version, self._in_flight = commit.version, None
            self._behind_since_s = None if self._waiting is None else self._offered_s

    def _failed(self, commit: Commit, error: Exception) -> None:
        """Keep the commit for another try, unless there is a newer one; then pause, if time is left."""
        log.warning("mirror, at version %d: %s", commit.version, error)
        with self._changed:
            self._in_flight, self._trouble = None, str(error)
            if self._waiting is None:
                self._waiting = commit
            if self._stopping is None:
                self._changed.wait_for(lambda: self._stopping is not None, self._retry_s)
            else:
                self._changed.wait_for(lambda: False, min(self._retry_s, self._stopping.left_s()))


def key_of_file(sha256: str) -> str:
    """The key of a content."""
    return f"{FILES}/{sha256}"


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (SourceDamaged, InvalidName) as error:
        raise CommitDamaged(str(error)) from error
    except ContentLost as error:
        sha256 = error.key.rpartition("/")[2]
        why = (
            f"the mirror has other bytes under {sha256}"
            if error.replaced
            else f"its content {sha256} is not in the mirror"
        )
        raise CommitDamaged(f"{error.path}: {why}") from None


def read_manifest(name: str, text: bytes) -> MirroredCommit:
    """The commit `name` whose manifest is `text`. Raises CommitDamaged, and NewerFormat."""
    return MirroredCommit(Path(name), parse_manifest(name, text), text)


def opened(signature: Signature, key: str, name: str, blob: bytes) -> bytes:
    """The text of the manifest of the commit `name` in the blob at `key`. Raises CommitDamaged."""
    try:
        return signature.opened(key, blob)
    except WrongSignature as error:
        raise CommitDamaged(f"{name}: {error}") from error


def newest_first(commits: Iterable[MirroredCommit]) -> list[MirroredCommit]:
    """Commits by timeline, version and generation, newest first."""
    return sorted(commits, key=lambda commit: order_of(commit.name), reverse=True)


def commits_to_remove(names: Iterable[str], keep: int, pinned: Collection[str]) -> list[str]:
    """Names of commits that are neither among the newest `keep` nor pinned, oldest first."""
    return to_prune(sorted(names, key=order_of), keep, pinned)


def unreferenced_contents(contents: Iterable[str], commits: Iterable[MirroredCommit]) -> list[str]:
    """Hashes of contents that no commit names."""
    named = {file.sha256 for commit in commits for file in commit.files.values()}
    return sorted(set(contents) - named)


def old_logs(names: Iterable[str], commits: Sequence[MirroredCommit], oldest_here: str) -> list[str]:
    """Files of the log, `<generation>-<part>.log`, that no commit needs.

    They are older than the oldest file in the store (`oldest_here`), and not of a generation after the oldest commit's.
    """
    oldest = min((order_of(commit.name)[2] for commit in commits), default=0)
    generations = {name: name.partition("-")[0] for name in names if name < oldest_here}
    return sorted(name for name, number in generations.items() if number.isdigit() and int(number) <= oldest)


def _leftovers(names: Iterable[str]) -> list[str]:
    """Unfinished files of writers that died."""
    return [name for name in names if name.endswith(UNFINISHED)]


def _text_of(commit: Commit) -> bytes:
    try:
        return (commit.folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CommitDamaged(f"{commit.folder / MANIFEST}: cannot be read: {error.strerror}") from error
