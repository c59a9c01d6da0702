"""One shard's part of a commit, as the manifest and messages list it (headrace.codec).

A part checks its names when it is made or read: none of its files is outside of its folder.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.pserver.store.row_store import StoredFile
from headrace.relative_names import SHA256, InvalidName, relative_name, shown

PART_FOLDER = re.compile(r"shard-\d{1,9}", re.ASCII)
"""Folders of the parts of shards."""


@dataclass(frozen=True, slots=True)
class AppliedShrink:
    """A shrink that has acted."""

    version: int
    day: int
    below: Mapping[int, float | None]
    """delete_below by slot group; -1 is the table."""
    after: Mapping[int, int | None]
    """delete_after_days, likewise."""


class AppliedCut(msgspec.Struct, frozen=True, array_like=True):
    """A cut that has acted: see pserver.protocol.table_operations.ExportCut."""

    version: int
    day: int
    since: int
    base_threshold: float
    delta_threshold: float
    delta_keep_days: int | None


class AgingState(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the rows of a table have aged: the state of pserver.lifecycle.aging.TableAging."""

    day: int
    rates: Sequence[tuple[int, Mapping[int, float]]]
    """Rates of all ticks by slot group; -1 is the table. Runs of ticks with the same rates, each with its length."""
    shrinks: Sequence[AppliedShrink]
    """Those whose rows are not all removed."""
    cuts: Sequence[AppliedCut]
    frozen_groups: tuple[int, ...] = ()
    """Slot groups whose rows do not learn."""
    thawed: Mapping[int, int] = {}
    """By slot group that was frozen: the version of the close at which it learnt again."""
    weight_decay: tuple[float, int] | None = None
    """The weight decay of the table, and the version of the close since which it holds; None: there is none."""


class ChangeFacts(msgspec.Struct, frozen=True):
    """One file with the keys that changed between two versions (pserver.commit.change_files)."""

    file: str
    """Its path in the commit's folder."""
    since: int = msgspec.field(name="from")
    """The version that it begins after."""
    upto: int = msgspec.field(name="to")
    """The version that it ends with. It equals `since` if rows were swept and committed without a pass in between."""
    changed: int
    gone: int
    """Number of changed and of deleted keys."""


class TableFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A table on one shard."""

    rows: int
    rows_by_group: Mapping[int, int]
    life: AgingState | None = None
    """None: no row has aged yet."""
    changes: Sequence[ChangeFacts] | None = None
    """None: changes are not recorded."""
    handed: int | None | msgspec.UnsetType = msgspec.UNSET
    """Only in a handover: the version since which its rows changed (pserver.commit.handed_rows)."""


class ShardCommitPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One shard's part of a commit, below the commit's folder. Raises InvalidName where a name leads out of it."""

    folder: str
    """"shard-0"."""
    buckets: tuple[int, int]
    """First bucket, and one past the last."""
    tables: Mapping[str, TableFacts]
    files: Mapping[str, StoredFile]
    """By path relative to the commit's folder: "shard-0/default/000012.sst"."""
    objects: Mapping[str, int] = {}
    """By SHA-256 of a file, the generation that uploaded it (pserver.commit.commit_files); empty without uploads."""

    def __post_init__(self) -> None:
        relative_name(self.folder, PART_FOLDER)
        check_files(self.files)
        if strange := [path for path in self.files if not path.startswith(f"{self.folder}/")]:
            raise InvalidName(f"{shown(strange[0])} is not in {self.folder}")
        for table, facts in self.tables.items():
            if "/" in relative_name(table):
                raise InvalidName(f"{shown(table)} is not the name of a table")
            for change in facts.changes or ():
                if change.file not in self.files:
                    raise InvalidName(f"{shown(change.file)} is no file of its part")
        check_objects(self.objects)


def check_files(files: Mapping[str, StoredFile]) -> None:
    """Raise InvalidName where a path, or the hash of a content, is not one."""
    for path, file in files.items():
        relative_name(path)
        relative_name(file.sha256, SHA256)


def check_objects(objects: Mapping[str, int]) -> None:
    """Raise InvalidName where a key is not the hash of a content, or a value not the number of a generation."""
    for sha256, generation in objects.items():
        relative_name(sha256, SHA256)
        if generation < 0:
            raise InvalidName(f"{shown(generation)} is not the number of a generation")
