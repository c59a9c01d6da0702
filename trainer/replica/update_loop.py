"""Keeps a replica fresh: takes updates from a source and has the state serve them; logs and counts refused ones.

Whatever happens to the source, the present version is still served.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from typing import Protocol

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, Unavailable
from headrace.pserver.feed.feed_client import FeedTooSlow
from headrace.retry import Backoff
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState, RollbackInForce, ServedVersion, UpdateRefused
from headrace.trainer.replica.updates import ReplicaUpdate, ReplicaUpdates

TURN_S = 1.0
"""Longest wait for an update before a check whether the process must end."""
BACKOFF = Backoff((0.2, 0.5, 1.0, 2.0, 5.0, 10.0), endless=True)
"""Pauses between tries while the source fails; the last one repeats."""

NICENESS = 5
"""Niceness of updates: requests have priority."""

log = logging.getLogger(__name__)


class ReplicaSource(ReplicaUpdates, Protocol):
    """Updates that can be repeated."""

    def resume(self, served: ServedVersion | None) -> None:
        """Note that the last update was refused: the next one must build on `served`, or be whole."""
        ...


class UpdateLoop:
    """Moves updates from a source to a state, on one thread."""

    def __init__(self, source: ReplicaSource, state: ReplicaState, figures: ReplicaMetrics) -> None:
        self._source, self._state, self._figures = source, state, figures
        self._trouble = ""
        self._failed = 0
        self.refused = ""
        """Why the newest update was refused; empty where it is served."""

    @property
    def trouble(self) -> str:
        """Why no updates come; empty where they do."""
        return self._trouble

    def run(self, stopping: threading.Event) -> None:
        """Serve updates until `stopping` is set."""
        with suppress(OSError):  # affects this thread only, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        pending: ReplicaUpdate | None = None
        while not stopping.is_set():
            if self._state.is_held_back:
                stopping.wait(TURN_S / 5)
                continue
            try:
                pending = pending or self._source.next(Deadline.after(TURN_S))
                if pending is not None:
                    self._serve(pending)
                    pending = None
                self._well()
            except RollbackInForce:  # the update is served once the rollback ends
                continue
            except (Unavailable, DeadlineExceeded, NotYet) as error:
                if stopping.is_set():
                    break
                if isinstance(error, FeedTooSlow):
                    self._figures.dropped.inc()
                self._rest(f"no updates come: {error}", stopping)
            except HeadraceError as error:
                pending = None
                self._refuse(error)
                self._rest(str(error), stopping)
            except Exception:  # noqa: BLE001  # a bug in one update does not end the service
                pending = None
                log.exception("an update failed; the version before is still served")
                self._figures.refused.labels("bug").inc()
                self._source.resume(None)
                self._rest("a bug; see the log", stopping)

    def _serve(self, update: ReplicaUpdate) -> None:
        with self._figures.apply_seconds.time():
            self._state.apply(update)
        self._figures.served(update, time.time())
        self.refused = ""
        what = "a whole update" if update.whole else "a difference"
        log.log(
            logging.INFO if update.whole else logging.DEBUG,
            "serving version %d of timeline %s: %s", update.version, update.timeline, what,
        )  # fmt: skip

    def _refuse(self, error: HeadraceError) -> None:
        newest = self._state.versions()
        self._figures.refused.labels(error.reason if isinstance(error, UpdateRefused) else "unusable").inc()
        self._source.resume(newest[-1].version if newest else None)
        goes_on = f"version {newest[-1].version.number} is still served" if newest else "nothing is served yet"
        log.warning("refused: %s; %s", error, goes_on)
        self.refused = str(error)

    def _well(self) -> None:
        if self._trouble and not self.refused:
            log.info("updates arrive again")
        self._trouble, self._failed = "", 0
        self._figures.following.set(1)

    def _rest(self, trouble: str, stopping: threading.Event) -> None:
        if trouble != self._trouble and trouble != self.refused:
            log.warning("%s", trouble)
        self._trouble = trouble
        self._figures.following.set(0)
        self._failed += 1
        stopping.wait(BACKOFF.pause_s(self._failed))
