"""Commits on disk: their content, checks of their files, holds, pruning.

A commit is a folder `commits/<name>` of immutable files; it exists once its manifest.json does. Commits are made by
trainer.checkpoint.committer, and chosen after a crash by trainer.rank0.recovery. Imports no torch: the control plane
reads commits.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace import documents
from headrace.codec import NotUnderstood, plain, typed
from headrace.durable import REAL, Disk, check_no_link, write_whole
from headrace.errors import HeadraceError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.protocol.commit_parts import ShardCommitPart, check_files, check_objects
from headrace.pserver.store.row_store import StoredFile
from headrace.relative_names import InvalidName
from headrace.trainer.journal.fence import COMMIT_NAME

FORMAT = 3
"""Newest readable layout of a manifest; a newer one is refused. Since 3, files may be objects of a store."""
FORMAT_OF_FILES = 2
"""Layout of a commit whose files are in its folder alone. Since 2, partitions have stream and period."""
FOLDER = "commits"
MANIFEST = "manifest.json"
NAME = COMMIT_NAME
VERSION = re.compile(r"\d{1,18}", re.ASCII)
"""A version as text; bounded, because Python refuses to convert thousands of digits."""
HASH_CHUNK_BYTES = 1 << 20
HASH_THREADS = 4


class CommitDamaged(HeadraceError):
    """A commit differs from what was written: a file is missing, shorter, or has other bytes."""


class NewerFormat(CommitDamaged):
    """A manifest of a newer Headrace: this one neither reads nor removes it."""


class CommitManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All facts of a commit, or of a handover, in the order of its manifest.json. Raises InvalidName for names of files
    that are none."""

    format: int
    job: str
    timeline: str
    """The branch of the job's history."""
    version: int
    """Last closed pass."""
    name: str
    """That of the commit's folder."""
    parent: str | None
    """The commit that the generation made or restored before."""
    generation: int
    world: int
    """Number of trainers."""
    made_at: str
    """UTC."""
    fingerprint: Mapping[str, str]
    """The arithmetic that it was trained with."""
    positions: Mapping[str, int]
    """The position of each partition."""
    log_from: int
    """First log record that a replay from this commit needs."""
    files: Mapping[str, StoredFile]
    """Every file, by its path in the folder."""
    shards: Sequence[ShardCommitPart]
    state: Mapping[str, Any]
    """The state of rank 0 (trainer.train.commit_state)."""
    objects: Mapping[str, int] | None = None
    """By SHA-256 of a file of rank 0 in the object store, the generation that uploaded it. None: there is no store."""
    objects_at: str | None = None
    """Address of the object store."""

    def __post_init__(self) -> None:
        check_files(self.files)
        check_objects(self.objects or {})

    @property
    def uploads(self) -> list[tuple[str, int]]:
        """Every object: SHA-256 and the generation that uploaded it. Two shards may have uploaded one content in two
        generations."""
        return [
            each for found in (self.objects or {}, *(part.objects for part in self.shards)) for each in found.items()
        ]


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


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """Facts about the job in every manifest."""

    job: str
    timeline: str
    generation: int
    world: int
    fingerprint: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit with its manifest."""

    folder: Path
    manifest: CommitManifest

    @property
    def name(self) -> str:
        """Name of its folder: timeline, version, generation."""
        return self.folder.name

    @property
    def order(self) -> tuple[int, int, int]:
        """Timeline, version, generation as numbers: the order of commits in time."""
        return order_of(self.name)

    @property
    def version(self) -> int:
        """Last closed pass."""
        return self.manifest.version

    @property
    def timeline(self) -> str:
        """The branch of the job's history."""
        return self.manifest.timeline

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of rank 0."""
        return self.manifest.state

    @property
    def log_from(self) -> int:
        """First log record that a replay from this commit needs."""
        return self.manifest.log_from

    @property
    def shards(self) -> Sequence[ShardCommitPart]:
        """The shards' parts."""
        return self.manifest.shards

    @property
    def files(self) -> Mapping[str, StoredFile]:
        """Every file by its path in the folder."""
        return self.manifest.files

    @property
    def objects(self) -> dict[str, int]:
        """By SHA-256 of a file in the object store, the generation that uploaded it; empty for files alone."""
        return dict(self.manifest.uploads)

    @property
    def own_files(self) -> dict[str, StoredFile]:
        """The files of rank 0, by path: those that are in no part of a shard."""
        of_shards = {path for part in self.shards for path in part.files}
        return {path: file for path, file in self.files.items() if path not in of_shards}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files; those shared with other commits count in each."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for part in self.shards for table in part.tables.values())


def name_of(timeline: str, version: int, generation: int) -> str:
    """The name of a commit's folder."""
    return f"{timeline}-{version:010d}-g{generation}"


def order_of(name: str) -> tuple[int, int, int]:
    """Timeline, version and generation of a commit's name."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a commit")
    return int(match[1]), int(match[2]), int(match[3])


def canonical(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest that its hash covers."""
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def manifest_text(manifest: CommitManifest | Mapping[str, Any]) -> bytes:
    """The bytes of a manifest's file. Fields of a newer Headrace stay if it is given as it was read, as a mapping."""
    fields = plain(manifest)
    text = {"sha256": hashlib.sha256(canonical(fields)).hexdigest(), "manifest": fields}
    return json.dumps(text, indent=1).encode()


def write_manifest(folder: Path, manifest: CommitManifest | Mapping[str, Any], disk: Disk = REAL) -> None:
    """Step 4 of a commit: it exists from the rename on."""
    reached = partial(failpoint, Failpoint.MANIFEST_WRITTEN)
    write_whole(disk, folder / MANIFEST, manifest_text(manifest), reached)


def parse_manifest(name: str, text: bytes) -> CommitManifest:
    """The manifest of the commit `name`, checked. Raises CommitDamaged, and NewerFormat."""
    try:
        whole = documents.parse_object(text, MANIFEST)
        manifest, sha256 = whole["manifest"], whole["sha256"]
        if int(manifest["format"]) > FORMAT:
            raise NewerFormat(
                f"{name}: is of format {manifest['format']}; this Headrace reads format {FORMAT}; run the newer one"
            )
        if hashlib.sha256(canonical(manifest)).hexdigest() != sha256:
            raise CommitDamaged(f"{name}: its manifest does not match the hash in it")
        if manifest["name"] != name or NAME.fullmatch(name) is None:
            raise CommitDamaged(f"{name}: its manifest is that of {manifest['name']!r}")
        return typed(CommitManifest, manifest, "manifest")
    except NotUnderstood as error:
        why = error.__cause__ and error.__cause__.__cause__
        has = f"has a wrong name: {why}" if isinstance(why, InvalidName) else f"cannot be read: {error}"
        raise CommitDamaged(f"{name}: its manifest {has}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommitDamaged(f"{name}: its manifest cannot be read: {error!r}") from error


def manifest_fields(commit: Commit) -> dict[str, Any]:
    """The manifest of a commit as it is on disk, with the fields of a newer Headrace."""
    fields: dict[str, Any] = documents.read_object(commit.folder / MANIFEST)["manifest"]
    return fields


def read_commit(folder: Path) -> Commit:
    """The commit in `folder`, its manifest checked, its files not. Raises CommitDamaged, and NewerFormat."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            text = documents.read_bounded(file)
    except OSError as error:
        raise CommitDamaged(f"{folder.name}: its manifest cannot be read: {error.strerror}") from error
    return Commit(folder, parse_manifest(folder.name, text))


def hash_of(path: Path) -> StoredFile:
    """Hash and size of a file. Raises OSError."""
    total, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            total.update(chunk)
            num_bytes += len(chunk)
    return StoredFile(total.hexdigest(), num_bytes)


CheckedFiles = set[tuple[int, str]]
"""Inode and SHA-256 of files. Commits share the files that did not change in between."""


def problems_of(commit: Commit, checked: CheckedFiles | None = None) -> dict[str, str]:
    """Reads every file: its damage, by file; empty for a sound commit.

    Files in `checked` are not read again; those that are found sound join it.
    """
    checked = set() if checked is None else checked

    def problem(entry: tuple[str, StoredFile]) -> str | None:
        name, wanted = entry
        path = commit.folder / name
        try:
            if (known := (path.stat().st_ino, wanted.sha256)) in checked:
                return None
            found = hash_of(path)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if found == wanted:
            checked.add(known)
            return None
        if found.num_bytes != wanted.num_bytes:
            return f"has {found.num_bytes:,} bytes, not {wanted.num_bytes:,}"
        return "has other bytes than were written"

    files = commit.files
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as pool:
        found = dict(zip(files, pool.map(problem, files.items()), strict=True))
    return {name: text for name, text in found.items() if text is not None}


class Commits:
    """The commits of one store."""

    def __init__(self, store: Path) -> None:
        self.folder = store / FOLDER
        self._holds = store / "holds"

    def names(self) -> list[str]:
        """Names of folders with a manifest, readable or not, in order of time. Raises SymbolicLinkFound."""
        paths = check_no_link(self.folder).glob(f"*/{MANIFEST}")
        found = (path.parent.name for path in paths if not path.parent.is_symlink())
        return sorted((name for name in found if NAME.fullmatch(name)), key=order_of)

    def read(self, name: str) -> Commit:
        """The commit `name`. Raises CommitDamaged."""
        return read_commit(self.folder / name)

    def whole(self) -> list[Commit]:
        """The commits with a readable manifest, in order of time."""
        return list(self._whole())

    def _whole(self) -> Iterator[Commit]:
        for name in self.names():
            try:
                yield self.read(name)
            except CommitDamaged:
                continue

    # -- holds: pins by people, leases by exports and reruns

    def hold(self, name: str, who: str) -> None:
        """Protect a commit from pruning, until `release`."""
        self._holds.mkdir(exist_ok=True)
        write_whole(REAL, self._holds / f"{name}.{who}", b"")

    def release(self, name: str, who: str) -> bool:
        """End a hold; returns whether there was one."""
        path = self._holds / f"{name}.{who}"
        held = path.exists()
        path.unlink(missing_ok=True)
        return held

    def holders(self) -> dict[str, list[str]]:
        """Holders by commit."""
        found: dict[str, list[str]] = {}
        for path in sorted(self._holds.glob("*")):
            name, _, who = path.name.partition(".")
            found.setdefault(name, []).append(who)
        return found

    # -- pruning

    def prune(
        self,
        keep: int,
        exclusive: AbstractContextManager[object],
        held: Collection[str] = (),
        retire: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> list[str]:
        """Remove all but the newest `keep` and held commits; then folders without a manifest.

        `exclusive` holds the store's lock while manifests are removed; their folders follow. `retire` gets the names
        first. Returns removed names.
        """
        names = self.names()
        with exclusive:
            gone = to_prune(names, keep, {*held, *self.holders()})
            retire(gone)
            for name in gone:
                (self.folder / name / MANIFEST).unlink()
            if gone:
                REAL.sync_folder(self.folder)
        if gone:
            failpoint(Failpoint.PRUNE_BEGUN)
        kept = {*names} - {*gone}
        for path in self.folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path)
        return gone


def to_prune(names: Sequence[str], keep: int, held: Collection[str]) -> list[str]:
    """The names, given in order of time, that are neither among the newest `keep` nor held."""
    return [name for name in names[: max(0, len(names) - keep)] if name not in held]


def sync_tree(folder: Path) -> None:
    """Sync the entries of a folder and of its parent."""
    for path in (folder, folder.parent):
        REAL.sync_folder(path)
