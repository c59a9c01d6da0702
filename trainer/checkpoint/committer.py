"""Commits of rank 0: `CommitSteps` makes one, in numbered steps; `Committer` says when, and what follows a failure.

The loop calls `due` and `begin` between passes; a thread writes to a CommitStore what `CommitHooks.capture` copied.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.failpoints import Failpoint, failpoint
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.protocol.shards import ShardCommitPart, Shards
from headrace.pserver.server.commands import HandOver, SettleSnapshot, TakeSnapshot, WriteSnapshot
from headrace.timeline import Span, recorded
from headrace.trainer.checkpoint.commit_store import CommitStore, ManifestFailed
from headrace.trainer.checkpoint.commits import (
    FORMAT,
    FORMAT_OF_FILES,
    CapturedState,
    Commit,
    CommitManifest,
    ManifestFacts,
    hash_of,
    name_of,
    read_commit,
    sync_tree,
)
from headrace.trainer.checkpoint.handover import hand_over, remove_handover
from headrace.trainer.config import CommitSection
from headrace.trainer.job_status import CommitStatus
from headrace.trainer.journal.log import Log, Superseded

RETRY_S = 5.0
"""Pause after a failed commit, at most `commit.every`."""
STEP_S = 60.0
"""Time limit of the shards for a snapshot, and for the result of a commit."""

log = logging.getLogger(__name__)


class CommitFailed(HeadraceError):
    """A commit failed. Nothing of it is left; its rows wait for the next one, which may succeed."""


class CommitsFail(HeadraceError):
    """No commit succeeded for longer than `commit.max_failing`."""


@dataclass(frozen=True, slots=True)
class CommitHooks:
    """The calls of the committer to the rest of rank 0."""

    capture: Callable[[Mapping[str, Any]], CapturedState]
    """Copies the state of rank 0, given the tensors that the dense strategy consolidated."""
    show_positions: Callable[[Mapping[str, int]], None]
    """Shows committed positions to lag tools."""
    changes_since: Callable[[], int | None] = lambda: None
    """The version since which changes will be read; see TakeSnapshot."""
    keeps_all: Callable[[], bool] = lambda: False
    """Whether no commit may be removed now."""


@dataclass(slots=True)
class CommitSteps:
    """Makes a version restorable. Until step 4 a restart uses the previous commit.

    1. The pass is closed.
    2. `copy`, on the loop's thread: snapshot and state are copies in memory.
    3. The shards write their parts, rank 0 its own. The commit is held for its readers.
    4. The manifest: the commit exists from its rename on, or, where files are objects, from the record of the fence
       before that. The shards are notified.
    5. Commit the positions for lag tools; prune older commits and the log; notify the mirror.
    """

    store: CommitStore
    section: CommitSection
    origin: ManifestFacts
    joblog: Log
    shards: Shards
    hooks: CommitHooks
    parent: Commit | None
    """The last commit: first the one that was restored."""

    def copy(self, version: int, dense: Mapping[str, Any]) -> tuple[int, CapturedState]:
        """Step 2 -> the number of rows that changed, and the state of rank 0."""
        snapshot = TakeSnapshot(version, self.hooks.changes_since())
        return self.shards.call(snapshot, Deadline.after(STEP_S)), self.hooks.capture(dense)

    @recorded(Span.COMMIT)
    def make(self, saved: CapturedState, holders: Sequence[str]) -> Commit:
        """Steps 3 to 5. Raises CommitFailed, with nothing left of the commit; and errors that end this process."""
        name = name_of(self.origin.timeline, saved.version, self.origin.generation)
        folder = self.store.commits.folder / name
        try:
            manifest = self._write_parts(name, saved)  # 3
            with self.joblog.exclusive():
                self.store.hold(name, holders)
            log_files = [file.path.name for file in self.joblog.files()]
            self.store.publish(manifest, log_files, Deadline.after(self.section.deadline))  # 4
            with self.joblog.exclusive():
                self.store.write_manifest(folder, manifest)
        except (HeadraceError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            self.store.release(name, holders)
            self.shards.call(SettleSnapshot(False), Deadline.after(STEP_S))
            if isinstance(error, Superseded | ManifestFailed | StoreDamaged):
                raise
            nameless = isinstance(error, OSError) and error.filename is None
            raise CommitFailed(f"{folder}: {error}" if nameless else str(error)) from error
        failpoint(Failpoint.COMMITTED)
        self.shards.call(SettleSnapshot(True), Deadline.after(STEP_S))
        self.parent = read_commit(folder)
        self._clean_up(self.parent)  # 5
        return self.parent

    def _write_parts(self, name: str, saved: CapturedState) -> CommitManifest:
        """Step 3: write and sync all files but the manifest; returns the manifest."""
        folder = self.store.begin(name)
        parts = self.shards.call(WriteSnapshot(folder), Deadline.after(self.section.deadline))
        own = saved.write(folder)
        failpoint(Failpoint.DENSE_WRITTEN)
        sync_tree(folder)
        failpoint(Failpoint.PARTS_WRITTEN)
        return self._manifest(folder, saved, parts, own)

    def _clean_up(self, commit: Commit) -> None:
        """Step 5. The commit exists whatever fails here; a failure is logged, and the next commit tries again."""
        self.hooks.show_positions(commit.manifest.positions)
        try:
            with self.joblog.exclusive():
                remove_handover(self.store.commits.folder.parent)
            if not self.hooks.keeps_all():
                self.store.prune(self.section.keep, self.joblog)
        except Superseded:
            raise
        except (HeadraceError, OSError) as error:
            log.warning("older commits cannot be removed now: %s", error)
        self.store.offer(commit)

    def hand_over(self, saved: CapturedState) -> None:
        """In place of steps 3 to 5, hand the version over to the next generation: rows, the state of rank 0, manifest.

        If it fails, a commit follows, as after a failed one.
        """

        def write(folder: Path) -> CommitManifest:
            parts = self.shards.call(HandOver(folder), Deadline.after(self.section.deadline))
            return self._manifest(folder, saved, parts, saved.write(folder, sync=False))

        name = name_of(self.origin.timeline, saved.version, self.origin.generation)
        try:
            hand_over(self.store.commits.folder.parent, name, write, self.joblog.exclusive)
            failpoint(Failpoint.HANDED_OVER)
        except (HeadraceError, OSError) as error:
            if isinstance(error, Superseded | StoreDamaged):
                raise
            raise CommitFailed(f"it could not be handed over: {error}") from error
        finally:
            self.shards.call(SettleSnapshot(False), Deadline.after(STEP_S))

    def _manifest(
        self, folder: Path, saved: CapturedState, parts: Sequence[ShardCommitPart], own: Sequence[str]
    ) -> CommitManifest:
        """The manifest of `saved`, whose files are written; rank 0's `own` are uploaded if commits are in a store."""
        origin, mine = self.origin, {file: hash_of(folder / file) for file in own}
        files = {file: stored for part in parts for file, stored in part.files.items()} | mine
        uploaded = self.store.upload(folder, mine, Deadline.after(self.section.deadline))
        return CommitManifest(
            format=FORMAT_OF_FILES if uploaded is None else FORMAT,
            job=origin.job,
            timeline=origin.timeline,
            version=saved.version,
            name=folder.name,
            parent=None if self.parent is None else self.parent.name,
            generation=origin.generation,
            world=origin.world,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            fingerprint=origin.fingerprint,
            positions=saved.positions,
            log_from=saved.log_from,
            files=dict(sorted(files.items())),
            shards=parts,
            state=saved.state,
            objects=uploaded,
            objects_at=self.store.address,
        )


@dataclass(frozen=True, slots=True)
class _ExactRequest:
    """A request for a commit of exactly this version."""

    version: int
    who: str | None
    notify: Callable[[Commit | None, str], None]

    def refuse(self, why: str) -> None:
        """There is no such commit."""
        self.notify(None, f"no commit of version {self.version} could be made: {why}")


class Committer:
    """Decides when a commit is made; a thread makes it.

    Call `due`, `begin`, `exactly` and `finish` from the loop's thread, `ask` and `status` from any.
    """

    def __init__(self, steps: CommitSteps) -> None:
        self._steps, self._section = steps, steps.section
        self.version = 0 if steps.parent is None else steps.parent.version
        """Last version committed."""
        self._handed: int | None = None
        """The version that was handed over to the next generation, which commits it: this one ends."""
        self._not_asked: int | None = None
        """A version that only time or the end of the job makes due: see `begins_after`."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._flight: Future[Commit | None] | None = None
        """The commit that is being made, or the handover (then without a result)."""
        self._flying = 0
        self._wanted: list[_ExactRequest] = []
        self._flown_for: tuple[_ExactRequest, ...] = ()
        """The requests that the commit in flight serves."""
        self._begun_s = self._done_s = time.monotonic()
        self._failing: tuple[float, str] | None = None
        self._not_before_s = 0.0
        self._asked = threading.Event()
        self._pause_s, self._write_s, self._num_rows = 0.0, 0.0, 0

    @property
    def has_handed_over(self) -> bool:
        """Whether the state belongs to the next generation, as of the last `due` or `finish`."""
        return self._handed is not None

    @property
    def idle(self) -> bool:
        """Whether no commit is being made, as of the last `due`."""
        return self._flight is None

    def ask(self) -> None:
        """Request a commit at the next close."""
        self._asked.set()

    def begins_after(self, version: int, *, at_once: bool) -> None:
        """This generation begins with `version`, which was handed over to it: commit it `at_once`, or the first close.

        A commit at once delays the first pass. Without events `version` is due by time, and at the end of the job.
        """
        self._not_asked = None if at_once else version
        self._asked.set()

    def exactly(self, version: int, who: str | None, told: Callable[[Commit | None, str], None]) -> None:
        """Request a commit of `version`, which is being closed, at the next `due`, even if another one is in flight.

        It is held as `who` (trainer.checkpoint.commits: holds) before it exists. `told` is called on the loop's thread:
        with the commit once it exists, or with the reason why there is none.
        """
        self._wanted.append(_ExactRequest(version, who, told))

    def due(self, version: int, *, full: bool = False, ended: bool = False) -> bool:
        """Between passes: process a finished commit; whether `version` is to be committed now. If so, call `begin`.

        `full`: memory needs a commit. `ended`: nothing follows, so every version that is not committed is due.
        After a failed commit the next is due after a pause. Raises CommitsFail; and errors that end this process at
        once: Superseded, ManifestFailed, StoreDamaged, and those of shards that cannot receive a commit's result.
        """
        self._reap()
        asked, self._wanted = self._wanted, []
        for each in asked:
            if each.version == version > self.version:
                self._wanted.append(each)
            else:
                each.refuse("a later one was closed")
        if self._wanted:
            return True
        now_s = time.monotonic()
        over = version <= self.version or version == self._handed
        if self._flight is not None or over or now_s < self._not_before_s:
            return False
        passes = self._section.every_passes
        by_count = passes is not None and version - self.version >= passes
        by_time = now_s - self._begun_s >= self._section.every
        if ended or full or by_time or self._failing is not None:
            return True
        return version != self._not_asked and (by_count or self._asked.is_set())

    def begin(self, version: int, dense: Mapping[str, Any], *, hand_over: bool = False) -> None:
        """Begin the commit of `version`, for which `due` was true. `dense`: what all ranks consolidated, on rank 0.

        `hand_over`: nothing follows in this generation, and the next one stands by. So this version is handed over to
        it, which is quicker, unless exactly this commit was requested, or the attempt before failed.
        An exact request waits here for the commit in flight, up to `commit.deadline`; `due` returns at once, so that
        the version is published before. Raises as `due`.
        """
        wanted, self._wanted = tuple(self._wanted), []
        if not wanted:
            self._asked.clear()
        elif self._flight is not None:
            wait([self._flight], timeout=self._section.deadline)
            self._reap()
        if self._flight is None:
            self._begin(version, dense, wanted, hand_over=hand_over and not wanted and self._failing is None)
        else:
            for each in wanted:
                each.refuse("the commit before it was still being written")

    def finish(self, version: int) -> bool:
        """At an orderly end: whether `version` is committed, or handed over. Call it again until it is."""
        self._reap()
        return self._flight is None and (version <= self.version or version == self._handed)

    def status(self) -> CommitStatus:
        """For people."""
        failing = self._failing
        status = CommitStatus(
            version=self.version,
            age_s=time.monotonic() - self._done_s,
            writing=self._flight is not None,
            rows=self._num_rows,
            pause_s=self._pause_s,
            write_s=self._write_s,
            failing=None if failing is None else failing[1],
            failing_s=0.0 if failing is None else time.monotonic() - failing[0],
        )
        return self._steps.store.with_status(status)

    def close(self) -> None:
        """Wait for the thread, and for the commit that it is writing."""
        self._thread.shutdown()

    def _begin(
        self, version: int, dense: Mapping[str, Any], held_for: tuple[_ExactRequest, ...], *, hand_over: bool
    ) -> None:
        assert version > self.version, f"version {version} is committed, and its folder would count as one that failed"
        self._begun_s = time.monotonic()
        self._num_rows, saved = self._steps.copy(version, dense)
        self._flying, self._flown_for = version, held_for
        self._pause_s = time.monotonic() - self._begun_s
        if hand_over:
            self._flight = self._thread.submit(self._steps.hand_over, saved)
        else:
            holders = [each.who for each in held_for if each.who is not None]
            self._flight = self._thread.submit(self._steps.make, saved, holders)

    def _reap(self) -> None:
        """Process the commit in flight, if it has ended."""
        flight = self._flight
        if flight is None or not flight.done():
            self._check_failing()
            return
        self._flight, held_for, self._flown_for = None, self._flown_for, ()
        try:
            made = flight.result()
        except CommitFailed as error:
            for each in held_for:
                each.notify(None, f"its commit failed: {error}")
            now_s = time.monotonic()
            self._not_before_s = now_s + min(RETRY_S, self._section.every)
            since_s, before = self._failing or (now_s, "")
            self._failing = (since_s, str(error))
            if str(error) != before:
                log.error("commit of version %d failed and was removed: %s", self._flying, error)
            self._check_failing()
            return
        if made is None:
            self._handed = self._flying
            return
        if self._failing is not None:
            log.warning("commits succeed again, at version %d", self._flying)
        self.version, self._failing, self._done_s = self._flying, None, time.monotonic()
        self._write_s = self._done_s - self._begun_s - self._pause_s
        for each in held_for:
            each.notify(made, "")

    def _check_failing(self) -> None:
        if self._failing is not None and time.monotonic() - self._failing[0] > self._section.max_failing:
            raise CommitsFail(
                f"no commit succeeded for {self._section.max_failing:g} s (commit.max_failing); version {self.version} "
                f"is the last one: {self._failing[1]}"
            )
