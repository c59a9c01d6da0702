"""Shows and clicks of rows as of a commit, for slots with statistics of rows in samples that are only predicted.

They are read from the stores of the commit, since the calls of a step carry weights alone. A commit that was made of an
export has them in tables of their own (trainer.predict.export_commit).
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.histories import statistics_of
from headrace.pserver.protocol.shards import F32, U64
from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.exports.row_selection import CommitTableRows
from headrace.trainer.exports.slot_files import Statistics
from headrace.trainer.spec.history_tables import statistics_section


class CommitStatistics:
    """A context: stores stay open, once read, until it ends. One thread at a time."""

    def __init__(self, commit: Commit, schema: Schema, tables: Mapping[str, TableSection], scratch: Path) -> None:
        """`scratch`: a folder for the open stores, of this object alone."""
        self._held, self._scratch = ExitStack(), scratch
        self._rows: dict[str, CommitTableRows] = {}
        self._own: dict[str, bool] = {}
        opened: dict[str, CommitTableRows] = {}
        for slot in (schema.by_name[each.slot] for each in Statistics.of_schema(schema)):
            name = statistics_of(slot.name)
            self._own[name] = any(name in part.tables for part in commit.shards)
            table = name if self._own[name] else slot.sparse.table
            if table not in opened:
                section = statistics_section() if self._own[name] else tables[table]
                groups = {each.name: each.group for each in schema.sparse if each.sparse.table == table}
                opened[table] = CommitTableRows(commit, table, section, groups, scratch)
            self._rows[name] = opened[table]
        for rows in opened.values():
            self._held.enter_context(rows)

    def __enter__(self) -> "CommitStatistics":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def __contains__(self, name: str) -> bool:
        """Whether `of` knows the name."""
        return name in self._rows

    def of(self, name: str, keys_U: U64) -> F32:
        """(U, 2) shows and clicks on the day of the commit; 0 without a row. `name`: `statistics_of` a slot."""
        rows = self._rows[name]
        return rows.weights(keys_U) if self._own[name] else rows.statistics_of(keys_U)
