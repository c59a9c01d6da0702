"""The object store of a job with `store.parts = "object"`: what it holds, and how a disk is completed from it.

    fence/<number>                        the sequence that says which commits count (trainer.fence)
    manifests/<commit name>-<hash>.json   the manifests of commits; one counts if a record of the fence names its hash
    parts/<generation>/<sha256>           the files of commits (pserver.commit.part_objects)

The store on this disk is a cache: `prepare` makes its log and its manifests those of the object store. New commits are
trainer.checkpoint.object_commits'. Imports no torch: the launcher prepares a store, too.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.blob.blob_store import BlobStore, open_blobs, whole
from headrace.blob.signature import UNSIGNED, Signature
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole
from headrace.errors import SpecError
from headrace.pserver.commit.part_objects import FOLDER as PARTS
from headrace.pserver.commit.part_objects import PartObjects
from headrace.pserver.errors import StoreDamaged
from headrace.trainer.checkpoint.commits import MANIFEST, Commit, CommitDamaged, Commits, parse_manifest
from headrace.trainer.checkpoint.mirror_catalog import opened
from headrace.trainer.fence.fence_records import FenceHistory
from headrace.trainer.fence.fence_sequence import BlobFence, FenceSequence, check_conditional_puts
from headrace.trainer.fence.fenced_log import is_ours, prepare

MANIFESTS = "manifests"
MAX_MANIFEST_BYTES = 64 << 20
ADDRESS = "objects_at"
"""File in a store on this disk with the address of its object store, as the job file gave it last."""
KEY = "store.parts"


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
    def open(cls, address: str, deadline: Deadline, signature: Signature = UNSIGNED) -> "ObjectStore":
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

        1. The log: see trainer.fence.fenced_log.prepare. 2. Commits that do not count are removed from this disk: all
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


def complete_commit(commit: Commit, deadline: Deadline) -> None:
    """Fetch the files of a commit that this disk lacks, for readers of all files.

    They come from the object store of the job file, and not from where the manifest says, which came from a store, too;
    only a store that was prepared by an older Headrace has no note of it. Raises CommitDamaged, and PartsUnavailable.
    """
    if (address := commit.manifest.objects_at) is None:
        return
    noted = commit.folder.parent.parent / ADDRESS
    try:
        PartObjects(noted.read_text() if noted.exists() else address, 0).complete(
            commit.folder, commit.files, commit.objects, deadline
        )
    except StoreDamaged as error:
        raise CommitDamaged(f"{commit.name}: {error}") from error


def _was_uploaded(name: str, text: bytes) -> bool:
    """Whether a manifest on this disk is one of uploaded files; a damaged one may be."""
    try:
        return bool(parse_manifest(name, text).uploads)
    except CommitDamaged:
        return True
