"""The job's log under the fence: claims are in the store before they act, with `sync` every record is.

The files of the log on disk are a cache then: `prepare` completes them from the fence. With `async` the log is on the
disk of rank 0 alone. `log_id` says whether the log on a disk is still the job's: another head may have continued
without it, or the disk may be empty.
"""

import uuid
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole
from headrace.errors import Unavailable
from headrace.failpoints import Failpoint, failpoint
from headrace.relative_names import path_below
from headrace.retry import Retrier
from headrace.trainer.journal.fence import FenceClaim, FenceContent, FenceHistory, FenceLine, FenceSequence, LogMode
from headrace.trainer.journal.log_file import NAME as LOG_NAME
from headrace.trainer.journal.log_file import RecordPlace, file_numbers, listed, record_of
from headrace.trainer.journal.records import Claim

APPEND_S = 600.0
"""Longest time until a record is in the store; then this process ends, and the next generation tries again."""
STORE_WAITS = "training waits, for the object store does not take the log"
LOG_ID = "log"
"""Key of the claims' facts with the id of the log."""
ASIDE = "superseded-before-g{}"
"""Folder in the log's with the files of a log that is not the job's any more."""


class FencedLog:
    def __init__(self, sequence: FenceSequence, mode: LogMode) -> None:
        self._sequence, self._mode = sequence, mode
        self._retrier = Retrier(Unavailable, STORE_WAITS, APPEND_S, at_end="the workers start again")

    @property
    def takes_lines(self) -> bool:
        return self._mode is LogMode.SYNC

    @property
    def max_wait_s(self) -> float:
        return APPEND_S if self.takes_lines else 0.0

    @property
    def trouble(self) -> str:
        return self._retrier.trouble

    def claimed(self, folder: Path, file: str, line: bytes, claim: Claim) -> None:
        """The claim brings all lines of the log that the fence lacks. Raises FenceMoved."""
        log = {}
        if self.takes_lines:
            known = self._sequence.history.files
            log = {path.name: _sealed_text(path, claim) for path in listed(folder) if path.name not in known}
            log[file] = line.decode("ascii")
        assert claim.timeline is not None, "the claim of a generation names the timeline"
        self._put(FenceClaim(log_id=claim.facts[LOG_ID], timeline=claim.timeline, mode=self._mode, log=log))
        failpoint(Failpoint.FENCED)

    def logged(self, file: str, line: bytes) -> None:
        self._put(FenceLine(file=file, line=line.decode("ascii")))
        failpoint(Failpoint.FENCED)

    def _put(self, content: FenceContent) -> None:
        """Append a record, however often the store fails within APPEND_S.

        Between two tries the sequence is free for other threads.
        """
        deadline, proposed = Deadline.after(APPEND_S), False

        def put() -> None:
            nonlocal proposed
            if not proposed:
                self._sequence.propose(content, deadline)
                proposed = True
            self._sequence.settle(deadline)

        self._retrier.call(put)


def _sealed_text(path: Path, claim: Claim) -> str:
    """A file's lines, without what is behind the seal."""
    content = path.read_bytes()
    return content[: claim.sealed.get(path.name, len(content))].decode("ascii")


def is_ours(folder: Path, history: FenceHistory) -> bool:
    """Whether the log in `folder` is the one that the newest claim in the fence writes to."""
    return not history.generation or log_id_in(folder) == history.log_id


def prepare(folder: Path, history: FenceHistory) -> bool:
    """Make the log in `folder` the job's, as far as the fence has it -> whether all of it is there.

    1. With `sync` the files are written from the fence, and those of a log that is not the job's are set aside.
    2. With `async` a log that is not the job's is set aside: then there is none, and a new timeline begins.
    """
    ours = is_ours(folder, history)
    if history.mode is LogMode.SYNC:
        REAL.make_folder(folder)
        for path in listed(folder):
            numbers = file_numbers(path)
            foreign = path.name not in history.files and (not ours or (numbers or (0, 0))[0] <= history.generation)
            if foreign and path.name > min(history.files, default=""):
                _set_aside(folder, path, history.generation)
        for name, file in history.files.items():
            content, path = file.content(), path_below(folder, name, LOG_NAME)
            if not path.exists() or path.read_bytes() != content:
                write_whole(REAL, path, content)
        return True
    if not ours:
        for path in listed(folder):
            _set_aside(folder, path, history.generation)
    return ours


def log_id_in(folder: Path) -> str:
    """The id of the log on this disk; empty where there is none."""
    for path in reversed(listed(folder)):
        with path.open("rb") as file:
            record = record_of(file.readline(), RecordPlace(path, 0))
        if record is not None and isinstance(record.content, Claim) and LOG_ID in record.content.facts:
            return str(record.content.facts[LOG_ID])
    return ""


def facts_with_id(facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The facts of a claim with the id of the log: the present one, or a new one."""
    return {**facts, LOG_ID: log_id_in(folder) or uuid.uuid4().hex}


def _set_aside(folder: Path, path: Path, generation: int) -> None:
    aside = folder / ASIDE.format(generation + 1)
    aside.mkdir(exist_ok=True)
    REAL.rename(path, aside / path.name)
    REAL.sync_folder(folder)
