"""Steers a stopped job: begins a new timeline, skips a range, or logs an operation for the next run.

Each of these claims a generation of its own and writes only to the log; the next run acts on it
(trainer.rank0.recovery). The caller makes sure that no launcher runs. Imports no torch: the control plane calls this.
"""

import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace import documents
from headrace.codec import typed
from headrace.deadline import Deadline
from headrace.durable import REAL, locked
from headrace.errors import HeadraceError, SpecError
from headrace.trainer.checkpoint.commits import Commit, order_of
from headrace.trainer.journal.fenced_log import LOG_ID, log_id_in
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import LOCK, AnyRecord, Log, RecordPlace, newest_generation, read
from headrace.trainer.journal.log_file import file_name, listed, record_of
from headrace.trainer.journal.partitions import KnownPartition, SkippedRange
from headrace.trainer.journal.records import Claim, MatmulOperation, Operation, PartitionsOperation, SkipOperation, Void

CLAIM_S = 60.0
"""Longest wait for the log's lock."""


class NotPossible(HeadraceError):
    """The request does not fit the job's history; nothing was changed."""


@dataclass(frozen=True)
class Lineage:
    """The timelines that led to the present one, each up to the version where the next one begins."""

    timeline: str
    """The present one; "" for a log without one."""
    bases: Mapping[str, str | None]
    """By timeline, the commit that it began from; as far back as the log goes."""

    @classmethod
    def of(cls, records: Sequence[AnyRecord]) -> "Lineage":
        """The lineage by the claims among `records`."""
        claims = [record.content for record in records if isinstance(record.content, Claim)]
        begun = [(claim.timeline, claim.base) for claim in claims if claim.timeline]
        return cls(begun[-1][0] if begun else "", dict(begun))

    def holds(self, name: str) -> bool:
        """True if the commit `name` led to the present version."""
        number, version, _ = order_of(name)
        timeline, end = self.timeline, None
        while timeline != f"t{number}":
            base = self.bases.get(timeline)
            if base is None:
                return not self.timeline
            base_number, end, _ = order_of(base)
            timeline = f"t{base_number}"
        return end is None or version <= end

    def next_timeline(self, names: Sequence[str]) -> str:
        """A new name: no timeline of the log or of these commits has it."""
        numbers = [int(re.sub(r"\D", "", name) or 0) for name in self.bases]
        return f"t{max([0, *numbers, *(order_of(name)[0] for name in names)]) + 1}"


def claims(folder: Path) -> list[AnyRecord]:
    """The claims in the log, even if the rest is damaged: each is the first record of a file."""
    found = (record_of(_first_line(path), RecordPlace(path, 0)) for path in listed(folder))
    return [record for record in found if record is not None]


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline(documents.MAX_BYTES)


def rewind(store: Path, commit: Commit, timeline: str) -> int:
    """Make the next run continue from `commit`, on the new timeline `timeline`. Returns the claimed generation.

    Raises as `Log.claim` does.
    """
    folder = store / "log"
    generation = newest_generation(folder) + 1
    _claim(folder, generation, timeline, commit.name, "headrace rewind").close()
    return generation


def rewind_anew(store: Path, commit: Commit, timeline: str) -> Path:
    """Like `rewind`, for a damaged log: begin a new log. Returns the folder of the old one.

    1. Write the new log elsewhere. 2. Set aside all old files but the newest, the oldest first. 3. Move the new file
    into place. 4. Set aside the last old file. Before step 4 the log is still damaged, and this may be repeated. At
    all times the newest generation in the folder refuses the older ones.
    """
    folder, begun = store / "log", store / "log.begun"
    generation = newest_generation(folder) + 1
    aside = folder / f"damaged-before-g{generation}"
    with locked(folder / LOCK, Deadline.after(CLAIM_S)):
        shutil.rmtree(begun, ignore_errors=True)
        _claim(begun, generation, timeline, commit.name, "headrace rewind", log_id_in(folder)).close()  # 1
        aside.mkdir(exist_ok=True)
        *older, newest = listed(folder)
        for path in older:
            path.rename(aside / path.name)  # 2
            REAL.sync_folder(folder)
        (begun / file_name(generation, 1)).rename(folder / file_name(generation, 1))  # 3
        REAL.sync_folder(folder)
        newest.rename(aside / newest.name)  # 4
        REAL.sync_folder(folder)
        shutil.rmtree(begun)
    return aside


def skip(store: Path, newest: Commit | None, wanted: SkippedRange, reason: str) -> list[int]:
    """Make the job skip the positions `wanted`, which it has not trained. Returns the withdrawn passes.

    `newest` is the last commit; it has partitions whose records may be pruned from the log.
    1. The claim. 2. Withdraw open plans from the first one that touches the range, the newest first, so that a crash
    leaves no hole. 3. Log the operation: later plans skip the range.

    Raises as `check_skip` does, before anything is claimed.
    """
    history = JobHistory.of(read(store / "log"))
    check_skip(history, newest, wanted)
    generation = newest_generation(store / "log") + 1
    log = _claim(store / "log", generation, history.timeline, history.base, "headrace skip")  # 1
    withdrawn = plans_touching(history, wanted)
    for number in reversed(withdrawn):
        log.append(Void(number=number, reason=f"touches what is skipped: {reason}"))  # 2
    log.append(SkipOperation(**wanted._asdict(), reason=reason))  # 3
    log.close()
    return withdrawn


def log_operation(store: Path, operation: Operation, by: str) -> None:
    """Log an operation of a stopped job: it acts at the first close of the next run. Raises as `Log.claim`."""
    history = JobHistory.of(read(store / "log"))
    log = _claim(store / "log", newest_generation(store / "log") + 1, history.timeline, history.base, by)
    log.append(operation)
    log.close()


def plans_touching(history: JobHistory, wanted: SkippedRange) -> list[int]:
    """Numbers of the open plans, from the first one that reads some of `wanted`."""
    plans = [record.content for record in history.unclosed()]
    for index, plan in enumerate(plans):
        for segment in (segment for rank in plan.segments for segment in rank):
            if segment.partition == wanted.partition and segment.begin < wanted.end and wanted.begin < segment.end:
                return [each.number for each in plans[index:]]
    return []


def check_skip(history: JobHistory, newest: Commit | None, wanted: SkippedRange) -> None:
    """Raises NotPossible or SpecError if `wanted` cannot be skipped."""
    known = known_partitions(history, newest)
    name, begin, end = wanted
    if name not in known:
        raise SpecError(f"the job knows no partition {name!r}; it knows {', '.join(sorted(known)) or 'none yet'}")
    if not 0 <= begin < end:
        raise SpecError(f"{begin} to {end} is not a range: begin is its first position, end the one after its last")
    if (last := known[name].end) is not None and end > last:
        raise NotPossible(f"{name} ends at position {last}; {end} is beyond it")
    position = max(positions(history, newest).get(name, 0), known[name].start)
    if begin < position:
        raise NotPossible(
            f"{name}: the job is at position {position}, so {begin} to {min(end, position)} is already trained or "
            "skipped; first `headrace rewind` to a version before that, or begin the range there"
        )


def known_partitions(history: JobHistory, newest: Commit | None) -> dict[str, KnownPartition]:
    """The known partitions, by name."""
    known = [] if newest is None else typed(list[KnownPartition], newest.state.get("partitions", []), newest.name)
    for operation in history.operations:
        if isinstance(operation.content, PartitionsOperation):
            known += operation.content.partitions
    return {each.name: each for each in known}


def matmuls_after(history: JobHistory, commit: Commit | None) -> list[tuple[int, MatmulOperation]]:
    """The tables of kernels since `commit`: first the one in it, then the logged ones of later passes."""
    logged = history.matmuls()
    if commit is None or (kept := commit.state.get("matmul")) is None:
        return logged
    later = [(number, operation) for number, operation in logged if number > commit.version]
    return [(0, typed(MatmulOperation, kept, commit.name)), *later]


def positions(history: JobHistory, newest: Commit | None) -> dict[str, int]:
    """The position after the last closed pass, in each partition that the job has read from."""
    found: dict[str, int] = dict(newest.manifest.positions) if newest is not None else {}
    for number in sorted(history.closes):
        if number in history.plans:
            for name, end in history.plans[number].content.positions().items():
                found[name] = max(end, found.get(name, 0))
    return found


def _claim(folder: Path, generation: int, timeline: str, base: str | None, by: str, log_id: str = "") -> Log:
    """`log_id`: of the log that this one replaces, where an object store knows it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "at": now, "by": by}
    facts |= {LOG_ID: log_id} if log_id else {}
    return Log.claim(folder, generation, Deadline.after(CLAIM_S), timeline=timeline, base=base, facts=facts)
