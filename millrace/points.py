"""Named points at which a fault run ends a process by SIGKILL, to show that nothing is lost there.

Unarmed, as always outside fault runs, `reach` does nothing. A process arms itself from its own configuration only, and
says where it dies before it does.
"""

import os
import signal
from enum import StrEnum

from millrace.config import PositiveCount, Section


class Point(StrEnum):
    """Where a process can be told to die. The role that reaches a point is the first word of its docstring."""

    PLAN_LOGGED = "plan-logged"
    """Chief: a plan is in the log, nobody was told of it."""
    LOG_WRITTEN = "log-written"
    """Chief: a record is written to the log and not synced."""
    LOG_SYNCED = "log-synced"
    """Chief: a record is synced."""
    PARTLY_PUSHED = "partly-pushed"
    """Shard, or trainer with an embedded one: some pushes of a step are in, or applied, and the step is not over."""
    BEFORE_CLOSE = "before-close"
    """Trainer: every step of a pass is done, nobody closed it."""
    CLOSED = "closed"
    """Chief: a close is logged, nobody was told of it."""
    OPERATION_LOGGED = "operation-logged"
    """Chief: an operation is logged, the close at which it acts is not."""
    OPERATED = "operated"
    """Chief: operations of a close have acted on the tables, nobody was told."""
    SNAPSHOT_TAKEN = "snapshot-taken"
    """Shard, or trainer with an embedded one: between steps 2 and 3 of a commit."""
    ROWS_WRITTEN = "rows-written"
    """Shard, or trainer with an embedded one: the snapshot is in the store, no checkpoint is made."""
    CHECKPOINT_MADE = "checkpoint-made"
    """Shard, or trainer with an embedded one: the checkpoint is made and synced, the chief was not told."""
    DENSE_WRITTEN = "dense-written"
    """Chief: its own part of a commit is written."""
    PARTS_WRITTEN = "parts-written"
    """Chief: between steps 3 and 4 of a commit."""
    MANIFEST_WRITTEN = "manifest-written"
    """Chief: in step 4 of a commit, before the rename."""
    COMMITTED = "committed"
    """Chief: between steps 4 and 5 of a commit."""
    PRUNE_BEGUN = "prune-begun"
    """Chief: a manifest is removed, its parts are not."""
    UPLOADED = "uploaded"
    """Chief: a file is in the mirror, the manifest is not."""
    CLAIMED = "claimed"
    """Chief: the generation is claimed, nothing is restored."""
    RESTORE_LINKED = "restore-linked"
    """Shard, or trainer with an embedded one: a live folder is made, not opened."""
    RESTORED = "restored"
    """Chief: everything is restored, nothing is replayed."""
    REPLAYED = "replayed"
    """Chief: a logged pass is trained again and compared."""
    EXPORT_CUT = "export-cut"
    """Chief: the commit of an export is there, the exporter was not asked."""
    EXPORT_BEGUN = "export-begun"
    """Exporter: the folder of an export is there, with nothing in it."""
    EXPORT_ROWS = "export-rows"
    """Exporter: a file of an export is written."""
    EXPORT_MANIFEST = "export-manifest"
    """Exporter: the manifest of an export is there, _DONE is not."""
    EXPORT_DONE = "export-done"
    """Exporter: _DONE is there, nothing points to the export yet."""


class Fault(Section):
    """An order to die."""

    point: Point
    """Where."""
    hit: PositiveCount = 1
    """At which time of coming there, from 1."""


LAST_WORDS = "fault run: killed at "
"""The line that a process prints before it dies ends with the point, after these words."""

_armed: dict[Point, int] = {}


def arm(faults: tuple[Fault, ...]) -> None:
    """Have this process killed where `faults` say."""
    _armed.update({fault.point: fault.hit for fault in faults})


def reach(point: Point) -> None:
    """Come to a point."""
    if _armed and point in _armed:
        _armed[point] -= 1
        if _armed[point] == 0:
            os.write(1, f"{LAST_WORDS}{point}\n".encode())  # by hand: a print may wait for a lock, or be held back
            os.kill(os.getpid(), signal.SIGKILL)
