"""A whole model, of an export with its chain or of a commit: its rows in order of keys, its dense tensors.

Reading an export is trainer.exports.reading's work, which rows of a commit are there trainer.exports.rows'.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dataset.schema import Schema
from millrace.config import validate
from millrace.deadline import Deadline
from millrace.keys import signs_of
from pserver.operations import Cut
from pserver.row_words import groups_of
from trainer.commits import Commit, CommitDamaged
from trainer.config import TrainerJob
from trainer.defaults import in_full
from trainer.exports.chunks import Chunk
from trainer.exports.reading import DENSE, Export, chain_of, state_at
from trainer.exports.rows import Selection, TableRows, weights_of

READ_S = 86_400.0
"""How long reading one table may take."""
PREFIX = "model."


class State(Protocol):
    """A model at one version."""

    name: str

    @property
    def tables(self) -> list[str]:
        """Names of its tables."""
        ...

    def rows(self, table: str) -> AbstractContextManager[Iterator[Chunk]]:
        """Rows of a table in order; none where it is not there. One at a time."""
        ...

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """Dense tensors by name."""
        ...


class ExportState:
    """See State: what an export and those it builds on give. Raises ExportUnusable, ParentMissing."""

    def __init__(self, export: Export) -> None:
        self.name = export.name
        self.chain = chain_of(export)

    @property
    def tables(self) -> list[str]:
        """See State."""
        return list(self.chain[-1].tables)

    def rows(self, table: str) -> AbstractContextManager[Iterator[Chunk]]:
        """See State."""
        return nullcontext(state_at(self.chain, table))

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """See State."""
        return self.chain[-1].dense()


class CommitState:
    """See State: what is in a commit, without rows that a shrink took; `scratch` is on the commit's disk."""

    def __init__(self, commit: Commit, scratch: Path) -> None:
        self.name, self._commit, self._scratch = commit.name, commit, scratch
        self._job = validate(TrainerJob, in_full(commit.state["spec"]), only_known=True)
        self._schema = Schema.of(self._job.slots)

    @property
    def tables(self) -> list[str]:
        """See State."""
        return [name for name in self._job.tables if any(name in part.tables for part in self._commit.shards)]

    def groups(self, table: str) -> dict[str, int]:
        """Slot groups of a table's slots, by name."""
        return {slot.name: slot.group for slot in self._schema.sparse if slot.sparse.table == table}

    def slot_names(self, table: str) -> dict[int, str]:
        """By group the name of its first slot."""
        return {group: name for name, group in reversed(self.groups(table).items())}

    @contextmanager
    def rows(self, table: str) -> Iterator[Iterator[Chunk]]:
        """See State."""
        if table not in self.tables:
            yield iter(())
            return
        source = TableRows(self._commit, table, self._job.tables[table], self.groups(table), self._scratch)
        with source:
            yield self._chunks(table, source)

    def _chunks(self, table: str, source: TableRows) -> Iterator[Chunk]:
        section, names = self._job.tables[table], self.slot_names(table)
        slots = tuple(names.values())
        code_G = np.zeros(1 << 16, np.int32)
        code_G[list(names)] = np.arange(len(names))
        everything = Selection(Cut(since=0), self._commit.version, is_base=True)
        for rows in source.all(everything, Deadline.after(READ_S)):
            group_U = groups_of(rows.words_UW)
            sign_U = np.empty(len(group_U), np.uint64)
            signs_of(rows.keys_U, group_U, sign_U)
            weights_UD = weights_of(rows.words_UW, int(section.first_order) + section.dim)
            weight_U = weights_UD[:, 0] if section.first_order else None
            vector_UD = weights_UD[:, int(section.first_order) :] if section.dim else None
            yield Chunk(slots, code_G[group_U], sign_U, rows.keys_U, weight_U, vector_UD)

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """See State."""
        try:
            found = load_file(self._commit.folder / DENSE)
        except (OSError, SafetensorError) as error:
            raise CommitDamaged(f"{self.name}: {DENSE} cannot be read: {error}") from error
        return {name.removeprefix(PREFIX): tensor for name, tensor in found.items() if name.startswith(PREFIX)}
