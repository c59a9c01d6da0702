"""Commits in an object store, as rank 0 makes, retires and removes them; trainer.checkpoint.committer has the order.

A commit counts once a record of the fence names its manifest. The files of shards are uploaded by the shards.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.deadline import Deadline
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.commit.part_objects import FOLDER as PARTS
from headrace.pserver.commit.part_objects import PartObjects, key_of, run_parallel
from headrace.pserver.store.row_store import StoredFile
from headrace.trainer.checkpoint.commits import (
    Commit,
    CommitDamaged,
    CommitManifest,
    manifest_text,
    order_of,
    parse_manifest,
)
from headrace.trainer.checkpoint.object_store import MANIFESTS, ObjectStore, manifest_key
from headrace.trainer.checkpoint.part_garbage import PartKey, RetiredCommit, due, removable
from headrace.trainer.fence.fence_records import FenceRetirement
from headrace.trainer.fence.fence_sequence import FenceSequence
from headrace.trainer.job_status import ObjectStatus

RETIRE_S = 20.0
"""Longest wait for the record of a retirement, which holds the store's lock."""
COLLECT_S = 600.0
"""Longest time of one removal of garbage; the next commit goes on with it."""
NAMED = re.compile(rf"{MANIFESTS}/(t\d+-\d{{10}}-g\d+)-[0-9a-f]{{16}}\.json")

log = logging.getLogger(__name__)


class ObjectCommits:
    """The thread of the committer calls; `status` is for any thread."""

    def __init__(self, store: ObjectStore, sequence: FenceSequence, parent: Commit | None, gc_grace_s: float) -> None:
        """`sequence`: the fence, claimed by this process. `parent`: the commit that was restored."""
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

    @property
    def address(self) -> str:
        """Of the store, for manifests."""
        return self._store.address

    def publish(self, name: str, manifest: CommitManifest, log_files: Sequence[str], deadline: Deadline) -> None:
        """Make a commit count. `log_files`: the names of the files of the log that are there.

        1. The manifest. 2. The record of the fence: the commit exists from here on.

        Raises Superseded; Unavailable, and then the commit may exist later.
        """
        sha256 = self._store.put_manifest(name, manifest_text(manifest), deadline)  # 1
        failpoint(Failpoint.UPLOADED)
        self._sequence.append_commit(name, sha256, log_files, deadline)  # 2
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
        """Remove what no commit needs: see trainer.checkpoint.part_garbage. Returns keys.

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
