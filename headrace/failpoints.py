"""Failpoints: named places in the code where a fault run kills a process with SIGKILL, to show that nothing is lost.

Outside fault runs no failpoint is armed, and `failpoint` does nothing. A process arms failpoints from its own
configuration only. It prints the failpoint before it dies.
"""

import os
import signal
from enum import StrEnum

from headrace.config import PositiveCount, Section
from headrace.process import end_at_once


class Failpoint(StrEnum):
    """A place where a process can die. Its docstring begins with the role that reaches it."""

    PLAN_LOGGED = "plan-logged"
    """Rank 0: a plan is logged and not yet announced."""
    LOG_WRITTEN = "log-written"
    """Rank 0: a record is written to the log and not yet synced."""
    LOG_SYNCED = "log-synced"
    """Rank 0: a record is synced."""
    PARTLY_PUSHED = "partly-pushed"
    """Shard, or trainer with an embedded one: some pushes of a step arrived; the step is not complete."""
    BEFORE_CLOSE = "before-close"
    """Trainer: every step of a pass is done; the pass is not closed."""
    CLOSED = "closed"
    """Rank 0: a close is logged and not yet announced."""
    OPERATION_LOGGED = "operation-logged"
    """Rank 0: an operation is logged; the close at which it acts is not."""
    OPERATED = "operated"
    """Rank 0: the operations of a close have acted on the tables; this is not yet announced."""
    SNAPSHOT_TAKEN = "snapshot-taken"
    """Shard, or trainer with an embedded one: between steps 2 and 3 of a commit."""
    ROWS_WRITTEN = "rows-written"
    """Shard, or trainer with an embedded one: the snapshot is in the store; no checkpoint exists."""
    CHECKPOINT_MADE = "checkpoint-made"
    """Shard, or trainer with an embedded one: the checkpoint is synced; rank 0 does not know yet."""
    DENSE_WRITTEN = "dense-written"
    """Rank 0: its own part of a commit is written."""
    PARTS_WRITTEN = "parts-written"
    """Rank 0: between steps 3 and 4 of a commit."""
    MANIFEST_WRITTEN = "manifest-written"
    """Rank 0: in step 4 of a commit, before the rename."""
    COMMITTED = "committed"
    """Rank 0: between steps 4 and 5 of a commit."""
    PRUNE_BEGUN = "prune-begun"
    """Rank 0: a manifest is removed; its parts are not."""
    UPLOADED = "uploaded"
    """Rank 0: a file is in the mirror; the manifest is not."""
    FENCED = "fenced"
    """Rank 0: a claim, a commit or a record of the log is in the fence; this disk does not know yet."""
    PART_UPLOADED = "part-uploaded"
    """Shard, or trainer with an embedded one: its part of a commit is in the object store; rank 0 does not know."""
    ROWS_HANDED = "rows-handed"
    """Shard, or trainer with an embedded one: its rows are handed over at a resize; rank 0 does not know."""
    HANDED_OVER = "handed-over"
    """Rank 0: everything is handed over to the workers that stand by; none of it is committed."""
    CLAIMED = "claimed"
    """Rank 0: the generation is claimed; nothing is restored."""
    RESTORE_LINKED = "restore-linked"
    """Shard, or trainer with an embedded one: a live folder is made and not yet opened."""
    RESTORED = "restored"
    """Rank 0: everything is restored; nothing is replayed."""
    REPLAYED = "replayed"
    """Rank 0: a logged pass is trained again and compared."""
    EXPORT_CUT = "export-cut"
    """Rank 0: the commit of an export exists; the exporter has no request yet."""
    EXPORT_BEGUN = "export-begun"
    """Exporter: the folder of an export exists and is empty."""
    EXPORT_ROWS = "export-rows"
    """Exporter: a file of an export is written."""
    EXPORT_MANIFEST = "export-manifest"
    """Exporter: the manifest of an export exists; _DONE does not."""
    EXPORT_DONE = "export-done"
    """Exporter: _DONE exists; nothing points to the export yet."""


class ArmedFailpoint(Section):
    """One death of a fault run."""

    point: Failpoint
    """The failpoint."""
    hit: PositiveCount = 1
    """The process dies when it reaches the failpoint for this time, counted from 1."""


LAST_WORDS = "fault run: killed at "
"""Begins the line that a process prints before it dies; the name of the failpoint follows."""

_armed: dict[Failpoint, int] = {}


def arm(faults: tuple[ArmedFailpoint, ...]) -> None:
    """Arm the failpoints of `faults` in this process."""
    _armed.update({fault.point: fault.hit for fault in faults})


def failpoint(point: Failpoint) -> None:
    """Die here if `point` is armed and this is the time for it."""
    if _armed and point in _armed:
        _armed[point] -= 1
        if _armed[point] == 0:
            os.write(1, f"{LAST_WORDS}{point}\n".encode())  # not by print, which may wait for a lock or buffer the line
            end_at_once(os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)
