"""A whole model, read from an export and its chain or from a commit: its rows in order of keys, its dense tensors.

trainer.exports.reader reads an export; trainer.exports.row_selection decides which rows of a commit are alive.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.key_kernels import signs_of
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.pserver.rows.row_format import groups_of
from headrace.service.cluster.store import check_run
from headrace.service.history.commit_lookup import find_commit, lease, scratch
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, CommitDamaged, Commits
from headrace.trainer.config import TrainerJob
from headrace.trainer.exports.reader import DENSE, ReadableExport, chain_of, open_export, state_at
from headrace.trainer.exports.row_chunks import RowChunk
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection, weights_of
from headrace.trainer.spec.defaults import fill_defaults

READ_S = 86_400.0
"""Longest time to read one table."""
PREFIX = "model."


class ModelState(Protocol):
    """A model at one version."""

    name: str

    @property
    def tables(self) -> list[str]:
        """Names of its tables."""
        ...

    def rows(self, table: str) -> AbstractContextManager[Iterator[RowChunk]]:
        """Rows of a table in order of keys; empty if there is no such table. Open one table at a time."""
        ...

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """Dense tensors by name."""
        ...


class ExportState:
    """The state of an export and of those that it builds on. Raises ExportUnusable, ParentMissing."""

    def __init__(self, export: ReadableExport) -> None:
        self.name = export.name
        self.chain = chain_of(export)

    @property
    def tables(self) -> list[str]:
        return list(self.chain[-1].tables)

    def rows(self, table: str) -> AbstractContextManager[Iterator[RowChunk]]:
        return nullcontext(state_at(self.chain, table))

    def dense(self) -> Mapping[str, NDArray[Any]]:
        return self.chain[-1].dense()


class CommitState:
    """The state of a commit, without the rows that a shrink deleted. `scratch` is on the commit's disk."""

    def __init__(self, commit: Commit, scratch: Path) -> None:
        self.name, self._commit, self._scratch = commit.name, commit, scratch
        self._job = validate(TrainerJob, fill_defaults(commit.state["spec"]), only_known=True)
        self._schema = Schema.of(self._job.slots)

    @property
    def tables(self) -> list[str]:
        return [name for name in self._job.tables if any(name in part.tables for part in self._commit.shards)]

    def groups(self, table: str) -> dict[str, int]:
        """Slot groups of a table's slots, by slot name."""
        return {slot.name: slot.group for slot in self._schema.sparse if slot.sparse.table == table}

    def slot_names(self, table: str) -> dict[int, str]:
        """Name of the first slot of each group."""
        return {group: name for name, group in reversed(self.groups(table).items())}

    @contextmanager
    def rows(self, table: str) -> Iterator[Iterator[RowChunk]]:
        if table not in self.tables:
            yield iter(())
            return
        source = CommitTableRows(self._commit, table, self._job.tables[table], self.groups(table), self._scratch)
        with source:
            yield self._chunks(table, source)

    def _chunks(self, table: str, source: CommitTableRows) -> Iterator[RowChunk]:
        section, names = self._job.tables[table], self.slot_names(table)
        slots = tuple(names.values())
        code_G = np.zeros(1 << 16, np.int32)
        code_G[list(names)] = np.arange(len(names))
        everything = RowSelection(ExportCut(since=0), self._commit.version, is_base=True)
        for rows in source.all(everything, Deadline.after(READ_S)):
            group_U = groups_of(rows.words_UW)
            sign_U = np.empty(len(group_U), np.uint64)
            signs_of(rows.keys_U, group_U, sign_U)
            weights_UD = weights_of(rows.words_UW, section.num_weights)
            weight_U = weights_UD[:, 0] if section.first_order else None
            vector_UD = weights_UD[:, int(section.first_order) :] if section.dim else None
            yield RowChunk(slots, code_G[group_U], sign_U, rows.keys_U, weight_U, vector_UD)

    def dense(self) -> Mapping[str, NDArray[Any]]:
        try:
            found = load_file(self._commit.folder / DENSE)
        except (OSError, SafetensorError) as error:
            raise CommitDamaged(f"{self.name}: {DENSE} cannot be read: {error}") from error
        return {name.removeprefix(PREFIX): tensor for name, tensor in found.items() if name.startswith(PREFIX)}


# Open


@contextmanager
def export_folder() -> Iterator[Path]:
    """A folder for fetched exports; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-exports-") as folder:
        yield Path(folder)


@contextmanager
def open_commit(job: LoadedJob, name: str, what: str = "verify") -> Iterator[Commit]:
    """A commit by its name or version; it is not pruned meanwhile. `what`: of the lease. Raises SpecError,
    CommitDamaged."""
    check_run(job.store, job.spec.name)
    commit = find_commit(job.store, name)
    with lease(Commits(job.store), commit.name, what):
        yield commit


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Opens models by name: commits of `job`, or exports by their addresses if there is no job."""

    job: LoadedJob | None

    @contextmanager
    def states(self, *names: str) -> Iterator[list[ModelState]]:
        """The whole models of these names."""
        with ExitStack() as held:
            if self.job is None:
                folder = held.enter_context(export_folder())
                yield [ExportState(open_export(name, folder).check()) for name in names]
                return
            commits = [held.enter_context(open_commit(self.job, name)) for name in dict.fromkeys(names)]
            by_name = dict(zip(dict.fromkeys(names), commits, strict=True))
            folder = held.enter_context(scratch(self.job.store))
            yield [CommitState(by_name[name], folder / str(number)) for number, name in enumerate(names)]
