"""The rows of a job that does not run, read from its newest commit: the answers that its rank 0 would give.

The commit does not change. A shrink is only logged; it acts at the first close of the next run.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, NotYet
from headrace.pserver.config import MIN_TABLE_BYTES, ShardProcess, TableSection
from headrace.pserver.server.commands import RestoreCommit
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.rpc.job_client import RETRY_S, NotRunning
from headrace.service.cluster.store import check_run, stopped
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.history.commit_lookup import continue_from, lease, lineage, reader, scratch
from headrace.service.predict.versions import check_fits
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import Commit, Commits
from headrace.trainer.checkpoint.rewind import log_operation
from headrace.trainer.config import TrainerJob
from headrace.trainer.journal import records as log_records
from headrace.trainer.rank0.logged_specs import overrides_of
from headrace.trainer.rank0.parts import describe_key, describe_ranking
from headrace.trainer.rank0.shrinks import SMALL_ROWS, Shrinks
from headrace.trainer.spec.changes import with_overrides
from headrace.trainer.spec.history_tables import history_tables

TABLE_BYTES = 8 * MIN_TABLE_BYTES
"""Memory for the rows of a table while a commit is read; the other rows stay on the disk."""


class NothingCommitted(NotRunning):
    """The job does not run and has no commit to read."""

    def __init__(self, store: Path) -> None:
        HeadraceError.__init__(self, f"no run is active in {store}, and it has no commit; `headrace run` makes one")


def newest(job: LoadedJob) -> Commit:
    """The commit where the next run begins. Raises NothingCommitted, and SpecError for another job's store."""
    commits = Commits(job.store)
    if not (names := commits.names()):
        raise NothingCommitted(job.store)
    check_run(job.store, job.spec.name)
    name = continue_from(names, lineage(job.store))
    if name is None:
        raise NothingCommitted(job.store)
    return commits.read(name)


def tables_in_force(job: LoadedJob, commit: Commit) -> Mapping[str, TableSection]:
    """The tables' sections for the next run: the job file's, with the settings changed while the job ran."""
    spec = with_store_defaults(job).full
    return with_overrides(validate(TrainerJob, spec, only_known=True), overrides_of(commit, spec)).tables


@dataclass(frozen=True)
class CommittedTable:
    """One table of a commit, open."""

    job: LoadedJob
    commit: Commit
    schema: Schema
    shards: EmbeddedShards
    shrinking: Shrinks

    def explain(self, slot: str, sign: int, deadline: Deadline) -> dict[str, Any]:
        """The answer of rank 0 to "explain", with the name of this commit as "commit"."""
        known = describe_key(self.shards, self.schema, self.schema.by_name[slot], sign, deadline)
        return known | {"commit": self.commit.name, "version": self.commit.version}

    def ranking(self, table: str, deadline: Deadline) -> dict[str, Any]:
        """The answer of rank 0 to "rank", with the name of this commit as "commit"."""
        return describe_ranking(self.shards, self.schema, table, deadline) | {"commit": self.commit.name}

    def dry_run(self, request: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The answer of rank 0 to "dry_run", with the name of this commit as "commit"."""
        while True:
            try:
                return self.shrinking.dry_run(request) | {"commit": self.commit.name}
            except NotYet:
                deadline.check(f"counting rows of commit {self.commit.name}")
                time.sleep(RETRY_S)

    def shrink_record(self, request: Mapping[str, Any], rows: int, deadline: Deadline) -> log_records.ShrinkOperation:
        """The operation that logs a shrink. Raises ShrinkTooLarge, SpecError."""
        while True:
            try:
                shrink = self.shrinking.asked({**request, "op": log_records.ShrinkOperation.op, "id": uuid.uuid4().hex})
            except NotYet:
                deadline.check(f"counting rows of commit {self.commit.name}")
                time.sleep(RETRY_S)
            else:
                assert shrink is not None, "the shrink decider handles this request"
                return msgspec.structs.replace(shrink, at_once=rows < SMALL_ROWS)


@contextmanager
def open_table(job: LoadedJob, table: str, deadline: Deadline) -> Iterator[CommittedTable]:
    """A table of the newest commit; the commit is not pruned meanwhile.

    Raises NothingCommitted; SpecError if the commit has other slots or tables; StoreDamaged.
    """
    commit, what, job = newest(job), reader(), with_store_defaults(job)
    check_fits(commit, job)
    tables, schema = tables_in_force(job, commit), Schema.of(job.spec.slots)
    groups = {slot.name: slot.group for slot in schema.sparse}
    opened = {table: tables[table], **history_tables(schema)}
    bounded = {name: section.model_copy(update={"memory": TABLE_BYTES}) for name, section in opened.items()}
    with lease(Commits(job.store), commit.name, what), scratch(job.store, what) as live:
        shards = EmbeddedShards(ShardProcess.alone(bounded, job.spec.seed, live=live, groups=groups))
        try:
            shards.call(RestoreCommit(commit.folder, commit.shards, commit.version), deadline)
            shrinking = Shrinks(lambda: tables, schema, shards, learn=job.spec.train.learn)
            yield CommittedTable(job, commit, schema, shards, shrinking)
        finally:
            shards.close()


def log_shrink(job: LoadedJob, table: str, rule: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
    """Log a shrink, which acts in the next run; return what `Committed.dry_run` finds now.

    Raises ShrinkTooLarge if it would delete too many rows and `rule` does not allow it, SpecError if the job runs by
    now.
    """
    with stopped(job.store, job.spec.name), open_table(job, table, deadline) as rows:
        found = rows.dry_run({"table": table, **rule}, deadline)
        log_operation(
            job.store, rows.shrink_record({"table": table, **rule}, int(found["rows"]), deadline), "headrace shrink"
        )
        return found
