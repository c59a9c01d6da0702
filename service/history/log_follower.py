"""Follows a job's log while the job writes it: each record is read once.

trainer.journal.log reads and checks the log as a whole. A follower leaves out what it cannot read, and says so.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.documents import MAX_BYTES
from headrace.trainer.journal import records as log_records
from headrace.trainer.journal.log_file import AnyRecord, LogTooNew, RecordPlace, file_numbers, listed, record_of


@dataclass(slots=True)
class _Reading:
    """How far a file of the log is read."""

    path: Path
    head: bytes
    """Its first record, which differs from that of every other log."""
    byte: int = 0
    last: bytes = b""
    """The last line read."""

    @property
    def numbers(self) -> tuple[int, int]:
        """Generation and part of the file."""
        return file_numbers(self.path) or (0, 0)


class LogFollower:
    """Reads the log in `folder`. Not safe for threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: Sequence[Path] = ()
        """The log's files at the last read."""
        self.is_sound = True
        """False if bytes that should be a record are none: only a whole read knows whether the log is damaged."""
        self._at: _Reading | None = None
        self._number: int | None = None
        """Number of the last record; None: the next one may have any number."""
        self._skipped = False

    def new_records(self) -> Iterator[AnyRecord | None]:
        """The records since the last call. None: earlier records no longer count; all records of the log follow.

        Records stop counting if the log begins anew, or if a worker's last append fails and is taken back.
        """
        self.paths = listed(self.folder)
        if self._at is not None and self._is_outdated(self._at):
            self._at, self._number, self._skipped = None, None, False
            yield None
        self.is_sound = not self._skipped
        if self._at is None and self.paths:
            self._at = _Reading(self.paths[0], _head(self.paths[0]))
        while self._at is not None:
            after = self._after(self._at)
            if not (yield from self._take(self._at, after)) or after is None:
                return
            self._at = _Reading(after, _head(after))

    def _is_outdated(self, at: _Reading) -> bool:
        """Whether what was read of a file is no longer its content. Pruning leaves newer files of the same log."""
        later = [path for path in self.paths if (file_numbers(path) or ()) >= at.numbers]
        if not later:
            return True
        if later[0] != at.path:  # the file is pruned
            return False
        after = self._after(at)
        sealed = None if after is None else _sealed_length(at.path, after)
        if sealed is not None and sealed < at.byte:
            return True
        try:
            with at.path.open("rb") as file:
                if file.readline(MAX_BYTES) != at.head:
                    return True
                file.seek(at.byte - len(at.last))
                return file.read(len(at.last)) != at.last
        except OSError:  # pruned since it was listed, or not readable now
            return False

    def _after(self, at: _Reading) -> Path | None:
        return next((path for path in self.paths if (file_numbers(path) or ()) > at.numbers), None)

    def _take(self, at: _Reading, after: Path | None) -> Generator[AnyRecord, None, bool]:
        """Read on in a file. Returns whether it is read as far as it will ever be.

        `after`: the next file, whose claim says how long this one is; see trainer.journal.log_file.
        """
        end = None if after is None else _sealed_length(at.path, after)
        try:
            with at.path.open("rb") as file:
                file.seek(at.byte)
                while (end is None or at.byte < end) and (line := file.readline(MAX_BYTES)):
                    record = record_of(line, RecordPlace(at.path, at.byte))
                    if record is None or not self._fits(record, at):
                        return self._stopped(after, is_torn=not line.endswith(b"\n"))
                    at.byte, at.last, self._number = at.byte + len(line), line, record.number
                    yield record
        except FileNotFoundError:  # pruned
            self._number = None
            return True
        except (OSError, LogTooNew):
            self.is_sound = False
            return False
        return self._stopped(after, is_torn=True) if after is not None and at.byte != end else True

    def _fits(self, record: AnyRecord, at: _Reading) -> bool:
        if at.byte == 0 and not (
            isinstance(record.content, log_records.Claim) and record.content.generation == at.numbers[0]
        ):
            return False
        return self._number is None or record.number == self._number + 1

    def _stopped(self, after: Path | None, *, is_torn: bool) -> bool:
        """Return whether to go on with the next file. The end of the newest file may be torn: it is being written."""
        if after is None:
            self.is_sound &= is_torn
            return False
        self.is_sound, self._skipped, self._number = False, True, None
        return True


def _head(path: Path) -> bytes:
    """The first record of a file; empty if the file is gone. It is complete as soon as the file has its name."""
    try:
        with path.open("rb") as file:
            return file.readline(MAX_BYTES)
    except OSError:
        return b""


def _sealed_length(path: Path, after: Path) -> int | None:
    """The valid length of a file, from the claim at the start of the file after it; None if the claim has none."""
    try:
        record = record_of(_head(after), RecordPlace(after, 0))
    except LogTooNew:
        return None
    if record is None or not isinstance(record.content, log_records.Claim):
        return None
    return record.content.sealed.get(path.name)
