"""The object store of a job with `store.parts = "object"`: commits count there, and a disk is completed from it.

    fence/<number>                        the sequence that says which commits count (trainer.journal.fence)
    manifests/<commit name>-<hash>.json   the manifests of commits; one counts if a record of the fence names its hash
    parts/<generation>/<sha256>           the files of commits (pserver.commit.commit_files)

The store on this disk is a cache: `ObjectStore.prepare` makes its log and its manifests those of the object store.
`ObjectCommits` are commits as rank 0 makes, retires and removes them; trainer.checkpoint.committer has the order.
Imports no torch: the launcher prepares a store, too.
"""

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from headrace.blob.blob_store import BlobStore, open_blobs, whole
from headrace.blob.signature import UNSIGNED, Signature
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole
from headrace.errors import SpecError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.commit.commit_files import FOLDER as PARTS
from headrace.pserver.commit.commit_files import PartObjects, key_of, run_parallel
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commit_store import CommitStore
from headrace.trainer.checkpoint.commits import (
    MANIFEST,
    Commit,
    CommitDamaged,
    CommitManifest,
    Commits,
    manifest_text,
    order_of,
    parse_manifest,
)
from headrace.trainer.checkpoint.mirror import opened
from headrace.trainer.job_status import CommitStatus, ObjectStatus
from headrace.trainer.journal.fence import (
    BlobFence,
    FenceHistory,
    FenceRetirement,
    FenceSequence,
    check_conditional_puts,
)
from headrace.trainer.journal.fenced_log import is_ours, prepare

MANIFESTS = "manifests"
MAX_MANIFEST_BYTES = 64 << 20
ADDRESS = "objects_at"
"""File in a store on this disk with the address of its object store, as the job file gave it last."""
KEY = "store.parts"
RETIRE_S = 20.0
"""Longest wait for the record of a retirement, which holds the store's lock."""
COLLECT_S = 600.0
"""Longest time of one removal of garbage; the next commit goes on with it."""
NAMED = re.compile(rf"{MANIFESTS}/(t\d+-\d{{10}}-g\d+)-[0-9a-f]{{16}}\.json")

log = logging.getLogger(__name__)

PartKey = tuple[int, str]
"""Generation and SHA-256 of an object."""


@dataclass(frozen=True, slots=True)
class PreparedStore:
    """A store on this disk, completed from the object store."""

    history: FenceHistory
    log_lost: bool
    """The log was on another disk alone: the job goes on from the newest commit, on a new timeline."""
    newest: str | None
    """The newest commit that counts."""


class ObjectStore:
    """Errors: BlobUnavailable, unless stated."""

    def __init__(self, address: str, blobs: BlobStore, signature: Signature = UNSIGNED) -> None:
        self.address, self.blobs, self.signature = address, blobs, signature

    @classmethod
    def open(cls, address: str, deadline: Deadline, signature: Signature = UNSIGNED) -> Self:
        """Connect. Raises SpecError where the store does not know conditional puts."""
        blobs = open_blobs(parse(address), "store", deadline)
        check_conditional_puts(blobs, KEY, deadline)
        return cls(address, blobs, signature)

    def sequence(self, generation: int = 0) -> FenceSequence:
        """The fence, for a head of a generation; 0 for a reader."""
        return FenceSequence(BlobFence(self.blobs, self.signature), generation)

    def put_manifest(self, name: str, text: bytes, deadline: Deadline) -> str:
        """Upload a manifest -> its SHA-256. It does not count yet."""
        sha256 = hashlib.sha256(text).hexdigest()
        key = manifest_key(name, sha256)
        self.blobs.put(key, whole(self.signature.signed(key, text)), deadline)
        return sha256

    def manifest(self, name: str, sha256: str, deadline: Deadline) -> bytes:
        """The text of a manifest. Raises CommitDamaged."""
        text = self.text_at(manifest_key(name, sha256), name, deadline)
        if text is None or hashlib.sha256(text).hexdigest() != sha256:
            raise CommitDamaged(f"{name}: its manifest in {self.blobs.url(MANIFESTS)} is not the one that counts")
        return text

    def text_at(self, key: str, name: str, deadline: Deadline) -> bytes | None:
        """The text of a manifest of the commit `name`; None if there is none. Raises CommitDamaged."""
        blob = self.blobs.get(key, MAX_MANIFEST_BYTES, deadline)
        return None if blob is None else opened(self.signature, key, name, blob)

    def prepare(self, store: Path, job: str, history: FenceHistory, deadline: Deadline) -> PreparedStore:
        """Make log and manifests in `store` those that `history` names. Files of commits follow when they are needed.

        1. The log: see trainer.journal.fenced_log.prepare. 2. Commits that do not count are removed from this disk: all
        that were uploaded, and after a change of heads those of before uploads, too. 3. The manifests that count. First
        the address of this store is noted, where readers of commits fetch files.

        Raises SpecError where the store is another job's.
        """
        store.mkdir(parents=True, exist_ok=True)
        write_whole(REAL, store / ADDRESS, self.address.encode())
        log, commits = store / "log", Commits(store)
        ours = is_ours(log, history)
        whole_log = prepare(log, history)  # 1
        for name in commits.names():  # 2
            text = (commits.folder / name / MANIFEST).read_bytes()
            counts = history.commits.get(name) == hashlib.sha256(text).hexdigest()
            if not counts and (not ours or _was_uploaded(name, text)):
                shutil.rmtree(commits.folder / name)
        for name, sha256 in history.commits.items():  # 3
            if not (commits.folder / name / MANIFEST).exists():
                self._fetch_manifest(commits, job, name, sha256, deadline)
        newest = max(history.commits, key=lambda name: commits.read(name).order, default=None)
        return PreparedStore(history, not whole_log, newest)

    def _fetch_manifest(self, commits: Commits, job: str, name: str, sha256: str, deadline: Deadline) -> None:
        text = self.manifest(name, sha256, deadline)
        found = parse_manifest(name, text)
        if found.job != job:
            raise SpecError(f"holds commits of the job {found.job!r}; give {job!r} a prefix of its own", "store.mirror")
        (commits.folder / name).mkdir(parents=True, exist_ok=True)
        write_whole(REAL, commits.folder / name / MANIFEST, text)

    def problems_of(self, commit: Commit, deadline: Deadline) -> dict[str, str]:
        """Complete the files of rank 0, and look for the objects of the shards: the damage, by file.

        Shards read what they fetch themselves.
        """
        try:
            PartObjects(self.address, 0).complete(commit.folder, commit.own_files, commit.objects, deadline)
        except StoreDamaged as error:
            return {"rank 0": str(error)}
        objects = commit.objects
        present = {
            generation: self.blobs.sizes(f"{PARTS}/{generation}", deadline) for generation in set(objects.values())
        }
        return {
            path: f"is not in {self.blobs.url(PARTS)}"
            for path, file in commit.files.items()
            if file.sha256 in objects and present[objects[file.sha256]].get(file.sha256) != file.num_bytes
        }

    def adopt(self, commit: Commit, generation: int, deadline: Deadline) -> Commit:
        """Upload a commit whose files are on this disk alone, so that every process can restore it.

        Raises PserverError. The commit on disk stays as it is; the next one names the uploaded files.
        """
        objects = PartObjects(self.address, generation).upload(commit.folder, commit.files, {}, deadline)
        shards = [
            msgspec.structs.replace(part, objects={f.sha256: objects[f.sha256] for f in part.files.values()})
            for part in commit.shards
        ]
        own = {file.sha256: objects[file.sha256] for file in commit.own_files.values()}
        uploaded = msgspec.structs.replace(commit.manifest, objects=own, objects_at=self.address, shards=shards)
        return Commit(commit.folder, uploaded)


def manifest_key(name: str, sha256: str) -> str:
    """The key of a manifest: another text of the same commit has another one."""
    return f"{MANIFESTS}/{name}-{sha256[:16]}.json"


def complete_commit(commit: Commit, deadline: Deadline, *, rows: bool = True) -> None:
    """Fetch the files of a commit that this disk lacks, for readers of all files; without `rows`, those of rank 0 only.

    They come from the object store of the job file, and not from where the manifest says, which came from a store, too;
    only a store that was prepared by an older Headrace has no note of it. Raises CommitDamaged, and PartsUnavailable.
    """
    if (address := commit.manifest.objects_at) is None:
        return
    noted = commit.folder.parent.parent / ADDRESS
    try:
        PartObjects(noted.read_text() if noted.exists() else address, 0).complete(
            commit.folder, commit.files if rows else commit.own_files, commit.objects, deadline
        )
    except StoreDamaged as error:
        raise CommitDamaged(f"{commit.name}: {error}") from error


def _was_uploaded(name: str, text: bytes) -> bool:
    """Whether a manifest on this disk is one of uploaded files; a damaged one may be."""
    try:
        return bool(parse_manifest(name, text).uploads)
    except CommitDamaged:
        return True


class ObjectCommits(CommitStore):
    """Commits as rank 0 makes, retires and removes them; one counts once a record of the fence names its manifest.

    The files of shards are uploaded by the shards. `status` is for any thread.
    """

    def __init__(
        self, disk: Path, store: ObjectStore, sequence: FenceSequence, parent: Commit | None, gc_grace_s: float
    ) -> None:
        """`disk`: the cache. `sequence`: the fence, claimed by this process. `parent`: the commit that was restored."""
        super().__init__(disk)
        self.address = store.address
        self._store, self._sequence, self._gc_grace_s = store, sequence, gc_grace_s
        self._parts = PartObjects(store.address, sequence.generation)
        self._known: Mapping[str, int] = {} if parent is None else parent.objects
        """The objects that the parent names."""
        self._uploading = 0
        self._bytes = 0
        self._objects: dict[str, frozenset[PartKey]] = {}
        """Objects of commits by the hash of the manifest, which never changes."""
        self._orphans_left = True

    def upload(self, folder: Path, files: Mapping[str, StoredFile], deadline: Deadline) -> dict[str, int]:
        """Upload the files of rank 0 -> the generation of each, by SHA-256. Raises PserverError."""
        self._uploading = len(files)
        try:
            return self._parts.upload(folder, files, self._known, deadline)
        finally:
            self._uploading = 0

    def publish(self, manifest: CommitManifest, log_files: Sequence[str], deadline: Deadline) -> None:
        """1. The manifest. 2. The record of the fence: the commit exists from here on."""
        sha256 = self._store.put_manifest(manifest.name, manifest_text(manifest), deadline)  # 1
        failpoint(Failpoint.UPLOADED)
        self._sequence.append_commit(manifest.name, sha256, log_files, deadline)  # 2
        failpoint(Failpoint.FENCED)
        objects = dict(manifest.uploads)
        sizes = {file.sha256: file.num_bytes for file in manifest.files.values()}
        self._bytes += sum(sizes[each] for each in objects if each not in self._known)
        self._known = objects
        self._objects[sha256] = _keys(manifest)

    def retire(self, names: Sequence[str]) -> None:
        """Record that these commits count no more. Raises Superseded and Unavailable."""
        live = self._sequence.history.commits
        retired = {name: time.time() for name in names if name in live}
        if retired:
            self._sequence.append(FenceRetirement(retired=retired), Deadline.after(RETIRE_S))

    def collect(self) -> list[str]:
        """Remove what no commit needs: see `removable`. Returns keys.

        Call it while no commit is being made, in the thread that makes them. 1. List. 2. Check that no other head has
        the job. 3. Delete parts, then manifests. Raises Superseded, BlobUnavailable and CommitDamaged.
        """
        history, now_s, deadline = self._sequence.history, time.time(), Deadline.after(COLLECT_S)
        over = [name for name, at_s in history.retired.items() if at_s + self._gc_grace_s <= now_s]
        if self._sequence.undecided or not (over or self._orphans_left):
            return []
        keys = self._listed(now_s, deadline)  # 1
        self._sequence.check_newest(deadline)  # 2
        run_parallel(lambda key: self._store.blobs.remove(key, deadline), keys)  # 3
        self._sequence.drop_retired(over)
        self._orphans_left = False
        if keys:
            log.info("%d objects of removed commits were removed from the store", len(keys))
        return keys

    def with_status(self, status: CommitStatus) -> CommitStatus:
        return msgspec.structs.replace(status, objects=self.status())

    def status(self) -> ObjectStatus:
        """For people: the last number of the fence, rank 0's uploads that wait, and all bytes uploaded."""
        return ObjectStatus(fence=self._sequence.number, uploads=self._uploading, bytes=self._bytes)

    def _listed(self, now_s: float, deadline: Deadline) -> list[str]:
        """The keys of objects to remove: parts first, then the manifests of retired commits."""
        history, blobs = self._sequence.history, self._store.blobs
        manifests = self._dead_manifests(deadline)
        retired = {
            name: RetiredCommit(at_s, frozenset().union(*(parts for of, parts in manifests.values() if of == name)))
            for name, at_s in history.retired.items()
        }
        live = frozenset().union(*(self._parts_of(name, sha, deadline) for name, sha in history.commits.items()))
        generations = [int(name) for name in blobs.folders(PARTS, deadline) if name.isdigit()]
        present = {(each, sha256) for each in generations for sha256 in blobs.sizes(f"{PARTS}/{each}", deadline)}
        gone = removable(present, live, retired, self._sequence.generation, now_s, self._gc_grace_s)
        over = due(retired, now_s, self._gc_grace_s)
        failed = [name for name, _ in manifests.values() if order_of(name)[2] < self._sequence.generation]
        ended = {*over, *(name for name in failed if name not in retired)}
        return [*(key_of(*key) for key in gone), *(key for key, (name, _) in manifests.items() if name in ended)]

    def _dead_manifests(self, deadline: Deadline) -> dict[str, tuple[str, frozenset[PartKey]]]:
        """The manifests that do not count, by key: their commit and its objects."""
        live = {manifest_key(name, sha256) for name, sha256 in self._sequence.history.commits.items()}
        keys = [f"{MANIFESTS}/{name}" for name in self._store.blobs.sizes(MANIFESTS, deadline)]
        found = {}
        for key in keys:
            match = NAMED.fullmatch(key)
            if match is not None and key not in live:
                found[key] = match[1], self._parts_named(key, match[1], deadline)
        return found

    def _parts_of(self, name: str, sha256: str, deadline: Deadline) -> frozenset[PartKey]:
        if sha256 not in self._objects:
            text = self._store.manifest(name, sha256, deadline)
            self._objects[sha256] = _keys(parse_manifest(name, text))
        return self._objects[sha256]

    def _parts_named(self, key: str, name: str, deadline: Deadline) -> frozenset[PartKey]:
        """The objects that a manifest names; none for a damaged one, which never counted."""
        try:
            return _keys(parse_manifest(name, self._store.text_at(key, name, deadline) or b""))
        except CommitDamaged:
            return frozenset()


def _keys(manifest: CommitManifest) -> frozenset[PartKey]:
    return frozenset((generation, sha256) for sha256, generation in manifest.uploads)


# Which objects no commit needs any more. Safety does not rest on the grace, but on three rules. The newest generation
# alone removes, and not while a commit is being made. A commit skips an upload only for what its parent names, and the
# parent counts until then. So an object that no counting commit names is never named again: later generations upload
# under a number of their own.


@dataclass(frozen=True, slots=True)
class RetiredCommit:
    """A commit that counts no more, and whose files may still be there."""

    at_s: float
    """When it was retired, in unix seconds."""
    parts: Set[PartKey]


def due(retired: Mapping[str, RetiredCommit], now_s: float, grace_s: float) -> list[str]:
    """The names of the retired commits whose grace is over."""
    return sorted(name for name, commit in retired.items() if commit.at_s + grace_s <= now_s)


def removable(
    present: Set[PartKey],
    live: Set[PartKey],
    retired: Mapping[str, RetiredCommit],
    generation: int,
    now_s: float,
    grace_s: float,
) -> list[PartKey]:
    """The objects to remove, in order.

    Of those that no live commit names: those of retired commits after the grace, and those that no commit names at all
    if an older generation uploaded them, for it can make no commit any more.
    """
    over = set(due(retired, now_s, grace_s))
    waiting = {key for name, commit in retired.items() if name not in over for key in commit.parts}
    ended = {key for name in over for key in retired[name].parts}
    unneeded = present - live - waiting
    return sorted(key for key in unneeded if key in ended or key[0] < generation)
