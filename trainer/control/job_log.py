"""A job's log: its files, its records and their meaning, and the lock under which the store changes.

Reads only. `log_records` has the class of each kind of record. Records of a job that does not run are appended by
trainer.control.commit_store and .stored_tables.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from headrace.deadline import Deadline
from headrace.file_lock import locked
from headrace.trainer.journal import records as log_records
from headrace.trainer.journal.job_history import JobHistory, LoggedPass
from headrace.trainer.journal.log import LOCK
from headrace.trainer.journal.log import read as read_records
from headrace.trainer.journal.log_file import (
    AnyRecord,
    LogDamaged,
    LogTooNew,
    RecordPlace,
    file_name,
    file_numbers,
    listed,
    newest_generation,
    record_of,
)
from headrace.trainer.journal.partitions import KnownPartition, SkippedRange
from headrace.trainer.journal.pass_plan import PassPlan

__all__ = [
    "AnyRecord",
    "JobHistory",
    "KnownPartition",
    "LogDamaged",
    "LogTooNew",
    "LoggedPass",
    "PassPlan",
    "RecordPlace",
    "SkippedRange",
    "file_name",
    "file_numbers",
    "listed",
    "log_records",
    "newest_generation",
    "read_history",
    "read_records",
    "record_of",
    "store_locked",
]


def read_history(folder: Path) -> JobHistory:
    """The meaning of the log in `folder`. Raises LogDamaged and LogTooNew."""
    return JobHistory.of(read_records(folder))


def store_locked(store: Path, deadline: Deadline) -> AbstractContextManager[int]:
    """Hold the lock under which the content of `store` changes. Raises DeadlineExceeded, Unwritable."""
    return locked(store / "log" / LOCK, deadline)
