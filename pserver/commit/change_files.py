"""The keys that changed and that were deleted between commits, so that a delta export reads only those rows.

An *increment* is one immutable file of a table on one shard. It holds the keys whose rows changed, and the deleted keys
with their slot groups, after one version up to another; usually the versions of two commits. A commit holds links to
the increments since the oldest parent that an export builds on. The present rows are in the commit's stores;
trainer.exports decides what is exported.

    <live>/<table>.changes/                          the increments of the newest commit
    <commit's folder>/shard-<k>/<table>.changes/     links to them

Shapes: U unique changed keys, G unique deleted keys, N keys with repeats.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from headrace.durable import REAL, write_whole
from headrace.keys import NUM_BUCKETS, unique_keys
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.protocol.commit_parts import ChangeFacts
from headrace.pserver.protocol.shards import U16, U64, ShardCommitPart
from headrace.pserver.store.rocks_store import store_error_of
from headrace.pserver.store.row_store import StoredFile, keys_in_order, sort_order_of

FOLDER = "{}.changes"
"""Folder of a table's increments."""
MAX_INCREMENTS = 64
"""Most increments of a table and shard in one commit. Beyond it the two smallest neighbours are merged, and for a
parent between them all their keys count as changed."""


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """Keys of one table, sorted by their places in a store (`sort_order_of`)."""

    changed_U: U64
    """Keys of rows that changed or were made; some may be deleted now."""
    gone_G: U64
    """Deleted keys; some may have rows again, and are in `changed_U` then."""
    gone_group_G: U16
    """Slot groups of `gone_G`."""

    @classmethod
    def of(cls, changed_N: U64, gone_N: U64, gone_group_N: U16) -> "ChangedKeys":
        """From keys in any order, with repeats."""
        gone_G, first_G = np.unique(sort_order_of(gone_N), return_index=True)
        return cls(keys_in_order(unique_keys(sort_order_of(changed_N))), keys_in_order(gone_G), gone_group_N[first_G])

    @classmethod
    def joined(cls, many: Sequence["ChangedKeys"]) -> "ChangedKeys":
        """The union of all."""
        none = np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.uint16)
        columns = zip(none, *((each.changed_U, each.gone_G, each.gone_group_G) for each in many), strict=True)
        return cls.of(*(np.concatenate(column) for column in columns))

    def of_buckets(self, begin: int, end: int) -> "ChangedKeys":
        """The keys of a range of buckets."""
        changed_U, gone_G = (_inside(keys_N, begin, end) for keys_N in (self.changed_U, self.gone_G))
        return ChangedKeys(self.changed_U[changed_U], self.gone_G[gone_G], self.gone_group_G[gone_G])

    def __len__(self) -> int:
        """Number of keys, changed and deleted."""
        return len(self.changed_U) + len(self.gone_G)


def _inside(keys_N: U64, begin: int, end: int) -> NDArray[np.bool_]:
    bucket_N = keys_N % np.uint64(NUM_BUCKETS)
    inside_N: NDArray[np.bool_] = (begin <= bucket_N) & (bucket_N < end)
    return inside_N


@dataclass(frozen=True, slots=True)
class ChangeIncrement:
    """One file."""

    facts: ChangeFacts
    stored: StoredFile

    @property
    def name(self) -> str:
        """Its name."""
        return self.facts.file.rpartition("/")[2]

    @property
    def size(self) -> int:
        """Number of keys, changed and deleted."""
        return self.facts.changed + self.facts.gone

    def below(self, folder: str) -> ChangeFacts:
        """The facts for a commit that has the file in `folder`."""
        return msgspec.structs.replace(self.facts, file=f"{folder}/{self.name}")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_changes(
    folder: Path, parts: Sequence[ShardCommitPart], table: str, since: int, upto: int
) -> ChangedKeys | None:
    """The changes after version `since` up to `upto`, over all shards of the commit in `folder`.

    If an increment begins before `since`, older changes are included; a row's changed_version says which. None if the
    increments of the commit do not cover the range. Raises StoreDamaged.
    """
    found: list[ChangedKeys] = []
    for part in parts:
        increments = _increments_of(part, table)
        if increments is None or not _covers(increments.values(), since, upto):
            return None
        found += [
            read_increment(folder / path, each) for path, each in increments.items() if since < each.facts.upto <= upto
        ]
    return ChangedKeys.joined(found)


def read_increment(path: Path, expected: ChangeIncrement) -> ChangedKeys:
    """Read one file. Raises StoreDamaged if it is not the committed one, StoreFailed if the disk fails."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise store_error_of(f"{path}: {error}") from error
    if hashlib.sha256(data).hexdigest() != expected.stored.sha256:
        raise StoreDamaged(f"{path}: not what was committed")
    arrays = load(data)
    return ChangedKeys(arrays["changed"], arrays["gone"], arrays["gone_groups"])


def _increments_of(part: ShardCommitPart, table: str) -> dict[str, ChangeIncrement] | None:
    """Increments by path in the commit, in order of versions; None if the part has no changes."""
    found = part.tables.get(table)
    if found is None or found.changes is None:
        return None
    return {facts.file: ChangeIncrement(facts, part.files[facts.file]) for facts in found.changes}


def _covers(increments: Iterable[ChangeIncrement], since: int, upto: int) -> bool:
    """Whether increments, in order, cover `since` to `upto` without a gap."""
    reached = since
    for each in (increment.facts for increment in increments):
        if each.since <= reached < each.upto:
            reached = each.upto
    return reached >= upto


# --- writing ----------------------------------------------------------------------------------------------------------


class ChangeFiles:
    """The increments of one table on one shard. Used by one thread at a time."""

    def __init__(self, live: Path, version: int | None) -> None:
        """Start without increments. `version` is the rows' last commit; if unknown, the first commit only sets it."""
        self._live, self._version = live, version
        self._kept: list[ChangeIncrement] = []
        self._next: tuple[int, list[ChangeIncrement]] | None = None
        """Version and increments of the commit that is being made."""

    @property
    def version(self) -> int | None:
        """The version of the rows' last commit; None if unknown."""
        return self._version

    def write(self, version: int, changes: ChangedKeys, since: int | None, folder: Path) -> list[ChangeIncrement]:
        """Write the increments after `since` for the commit of `version` into `folder`, which is created and synced.

        `changes` are those since the last commit. With `since` None there are no increments and no folder. May be
        called again, for another try, until `settle`. Raises StoreFailed.
        """
        increments = [each for each in self._kept if since is not None and each.facts.upto > since]
        if since is not None and self._version is not None:
            if since < version and (self._version < version or len(changes)):
                increments.append(self._written(changes, self._version, version, increments))
            while len(increments) > MAX_INCREMENTS:
                self._merge_two(increments)
        self._next = version, increments
        if increments:
            with _translated(folder):
                folder.mkdir()
                for each in increments:
                    os.link(self._live / each.name, folder / each.name)
                REAL.sync_folder(folder)
        return increments

    def settle(self, committed: bool) -> None:
        """The commit is over: keep its increments, or those of the one before unless `committed`."""
        if committed and self._next is not None:
            self._version, self._kept = self._next
        self._next = None
        names = {each.name for each in self._kept}
        for path in self._live.iterdir() if self._live.exists() else ():
            if path.name not in names:
                with suppress(OSError):  # it takes space until the next commit
                    path.unlink()

    def restore(self, folder: Path, parts: Sequence[ShardCommitPart], table: str, buckets: tuple[int, int]) -> None:
        """Start with the increments of a commit in `folder`, for some buckets. Raises StoreDamaged and StoreFailed.

        1. If one part has exactly these buckets, link its increments. 2. Otherwise filter and join the increments of
        all parts, between versions that all of them have.
        """
        theirs = [part for part in parts if part.buckets[0] < buckets[1] and buckets[0] < part.buckets[1]]
        found = [(part, _increments_of(part, table)) for part in theirs]
        known = [(part, increments) for part, increments in found if increments]
        if not known or len(known) < len(found):
            return
        if len(known) == 1 and known[0][0].buckets == buckets:
            with _translated(self._live):  # 1
                self._live.mkdir(parents=True)
                for path, each in known[0][1].items():
                    os.link(folder / path, self._live / each.name)
            self._kept = list(known[0][1].values())
        else:
            self._kept = self._cut(folder, [increments for _, increments in known], buckets)  # 2
        upto = self._kept[-1].facts.upto if self._kept else self._version
        if self._version not in (None, upto):
            raise StoreDamaged(f"{folder}: has the changes of {table!r} up to version {upto}, not {self._version}")
        self._version = upto

    def _cut(
        self, folder: Path, parts: Sequence[Mapping[str, ChangeIncrement]], buckets: tuple[int, int]
    ) -> list[ChangeIncrement]:
        ends = [
            {each.facts.upto for each in part.values()} | {min(e.facts.since for e in part.values())} for part in parts
        ]
        made: list[ChangeIncrement] = []
        for since, upto in pairwise(sorted(set.intersection(*ends))):
            found = [
                read_increment(folder / path, each).of_buckets(*buckets)
                for part in parts
                for path, each in part.items()
                if since <= each.facts.since and since < each.facts.upto <= upto
            ]
            made.append(self._written(ChangedKeys.joined(found), since, upto, made))
        return made

    def _merge_two(self, increments: list[ChangeIncrement]) -> None:
        """Merge the two neighbours that are smallest together."""
        at = min(range(len(increments) - 1), key=lambda i: increments[i].size + increments[i + 1].size)
        two = increments[at : at + 2]
        joined = ChangedKeys.joined([read_increment(self._live / each.name, each) for each in two])
        increments[at : at + 2] = [self._written(joined, two[0].facts.since, two[1].facts.upto, increments)]

    def _written(
        self, changes: ChangedKeys, since: int, upto: int, beside: Sequence[ChangeIncrement]
    ) -> ChangeIncrement:
        """Write a new file in the live folder."""
        arrays: dict[str, NDArray[Any]] = {
            "changed": changes.changed_U,
            "gone": changes.gone_G,
            "gone_groups": changes.gone_group_G,
        }
        data = save(arrays)
        taken = {each.name for each in (*self._kept, *beside)}
        number, name = 0, f"{since}-{upto}.safetensors"
        while name in taken:
            number += 1
            name = f"{since}-{upto}.{number}.safetensors"
        with _translated(self._live):
            self._live.mkdir(parents=True, exist_ok=True)
            write_whole(REAL, self._live / name, data)
        stored = StoredFile(hashlib.sha256(data).hexdigest(), len(data))
        return ChangeIncrement(ChangeFacts(name, since, upto, len(changes.changed_U), len(changes.gone_G)), stored)


@contextmanager
def _translated(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise store_error_of(f"{where}: {error}") from error
