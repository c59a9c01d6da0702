"""Steering a stopped job, as claims of generations of their own: a new timeline, a range that is gone past, an
operation that waits for the next run.

All only write the log; the next chief does what it says (trainer.recovery). The caller sees to it that no launcher
runs. Imports no torch: the control plane calls this.
"""

import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from millrace.deadline import Deadline
from millrace.durable import REAL
from millrace.errors import MillraceError, SpecError
from millrace.locks import locked
from trainer.commits import Commit, order_of
from trainer.history import History
from trainer.log import LOCK, AnyRecord, Log, Place, newest_generation, read
from trainer.log_file import file_name, listed, record_of
from trainer.partitions import Known, Skip
from trainer.records import Claim, Operation, PartitionsOperation, SkipOperation, Void

CLAIM_S = 60.0
"""How long another process may keep the log's lock."""


class NotPossible(MillraceError):
    """What was asked for does not fit the job's past; nothing was changed."""


@dataclass(frozen=True)
class Lineage:
    """Which versions led to the present one: a timeline, up to where the next one begins."""

    timeline: str
    """The present one; "" where the log has none yet."""
    bases: Mapping[str, str | None]
    """By timeline the commit that it began from, as far back as the log goes."""

    @classmethod
    def of(cls, records: Sequence[AnyRecord]) -> "Lineage":
        """The lineage by the claims among `records`."""
        claims = [record.content for record in records if isinstance(record.content, Claim)]
        begun = [(claim.timeline, claim.base) for claim in claims if claim.timeline]
        return cls(begun[-1][0] if begun else "", dict(begun))

    def holds(self, name: str) -> bool:
        """Whether the commit `name` is of a version that led to the present one."""
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
        """A name that no timeline has had, of the log and of these commits."""
        numbers = [int(re.sub(r"\D", "", name) or 0) for name in self.bases]
        return f"t{max([0, *numbers, *(order_of(name)[0] for name in names)]) + 1}"


def claims(folder: Path) -> list[AnyRecord]:
    """The claims in the log, wherever else it is damaged: each is the first record of a file."""
    found = (record_of(path.read_bytes().partition(b"\n")[0] + b"\n", Place(path, 0)) for path in listed(folder))
    return [record for record in found if record is not None]


def rewind(store: Path, commit: Commit, timeline: str) -> int:
    """Have the next run go on from `commit`, on the new timeline `timeline`; the generation claimed for this.

    Raises as `Log.claim` does.
    """
    folder = store / "log"
    generation = newest_generation(folder) + 1
    _claim(folder, generation, timeline, commit.name, "millrace rewind").close()
    return generation


def rewind_anew(store: Path, commit: Commit, timeline: str) -> Path:
    """As `rewind` where the log is damaged: begin another log, for nothing of the old one is needed; where that is now.

    1. The new log, elsewhere. 2. All but the newest of the old files are set aside, the oldest first. 3. The new file
    is linked into place. 4. The last old file is set aside. Before 4 the log is still damaged, and this may be done
    again; at no time are older generations without one that is newer.
    """
    folder, begun = store / "log", store / "log.begun"
    generation = newest_generation(folder) + 1
    aside = folder / f"damaged-before-g{generation}"
    with locked(folder / LOCK, Deadline.after(CLAIM_S)):
        shutil.rmtree(begun, ignore_errors=True)
        _claim(begun, generation, timeline, commit.name, "millrace rewind").close()  # 1
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


def skip(store: Path, newest: Commit | None, wanted: Skip, reason: str) -> list[int]:
    """Have the job go past the positions `wanted`, which it has not trained; the passes withdrawn for this.

    `newest` is the last commit, which knows of partitions what the log may have lost.
    1. The claim. 2. Plans that were never closed are void from the first one on that touches the range; the newest goes
    first, so that what is left after a crash has no hole. 3. The operation: what is planned from here on goes past.

    Raises what `check_skip` does; then nothing is claimed.
    """
    history = History.of(read(store / "log"))
    check_skip(history, newest, wanted)
    generation = newest_generation(store / "log") + 1
    log = _claim(store / "log", generation, history.timeline, history.base, "millrace skip")  # 1
    withdrawn = touching(history, wanted)
    for number in reversed(withdrawn):
        log.append(Void(number=number, reason=f"touches what is skipped: {reason}"))  # 2
    log.append(SkipOperation(**wanted._asdict(), reason=reason))  # 3
    log.close()
    return withdrawn


def note(store: Path, operation: Operation, by: str) -> None:
    """Log an operation of a stopped job: it acts at the first close of the next run. Raises as `Log.claim`."""
    history = History.of(read(store / "log"))
    log = _claim(store / "log", newest_generation(store / "log") + 1, history.timeline, history.base, by)
    log.append(operation)
    log.close()


def touching(history: History, wanted: Skip) -> list[int]:
    """Numbers of the plans never closed, from the first one on that reads some of `wanted`."""
    plans = [record.content for record in history.unclosed()]
    for index, plan in enumerate(plans):
        for segment in (segment for rank in plan.segments for segment in rank):
            if segment.partition == wanted.partition and segment.begin < wanted.end and wanted.begin < segment.end:
                return [each.number for each in plans[index:]]
    return []


def check_skip(history: History, newest: Commit | None, wanted: Skip) -> None:
    """Raises NotPossible or SpecError where `wanted` cannot be gone past."""
    known = known_partitions(history, newest)
    name, begin, end = wanted
    if name not in known:
        raise SpecError(f"the job knows no partition {name!r}; it knows {', '.join(sorted(known)) or 'none yet'}")
    if not 0 <= begin < end:
        raise SpecError(
            f"{begin} to {end} is no range: its begin is its first position, its end the one after the last"
        )
    if (last := known[name].end) is not None and end > last:
        raise NotPossible(f"{name} ends at position {last}; {end} is beyond it")
    position = max(positions(history, newest).get(name, 0), known[name].start)
    if begin < position:
        raise NotPossible(
            f"{name}: the job stands at position {position}, so {begin} to {min(end, position)} is behind it, trained "
            "or gone past; `millrace rewind` to a version before that first, or begin the range there"
        )


def known_partitions(history: History, newest: Commit | None) -> dict[str, Known]:
    """The partitions that the job has met, by name."""
    messages = newest.state.get("partitions", ()) if newest is not None else ()
    known = [Known.of_message(message) for message in messages]
    for operation in history.operations:
        if isinstance(operation.content, PartitionsOperation):
            known += operation.content.partitions
    return {each.name: each for each in known}


def positions(history: History, newest: Commit | None) -> dict[str, int]:
    """Where the job stands by its last closed pass, in each partition that it has read of."""
    found: dict[str, int] = dict(newest.manifest["positions"]) if newest is not None else {}
    for number in sorted(history.closes):
        if number in history.plans:
            for name, end in history.plans[number].content.positions().items():
                found[name] = max(end, found.get(name, 0))
    return found


def _claim(folder: Path, generation: int, timeline: str, base: str | None, by: str) -> Log:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "at": now, "by": by}
    return Log.claim(folder, generation, Deadline.after(CLAIM_S), timeline=timeline, base=base, facts=facts)
