"""Keeps a replica fresh: takes updates from where they come and has them served; what is refused is told, and counted.

Whatever happens to the source, what is served goes on being served.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from typing import Protocol

from millrace.deadline import Deadline
from millrace.errors import DeadlineExceeded, MillraceError, NotYet, Unavailable
from millrace.retry import Backoff
from trainer.replica.figures import Figures
from trainer.replica.history import Version
from trainer.replica.state import HeldBack, State, UpdateRefused
from trainer.replica.updates import Update, Updates

TURN_S = 1.0
"""How long one wait for an update lasts; then it is looked whether the process is to end."""
BACKOFF = Backoff((0.2, 0.5, 1.0, 2.0, 5.0, 10.0), endless=True)
"""Between attempts while the source cannot be used."""

NICENESS = 5
"""How far requests go before updates, where both want one core."""

log = logging.getLogger(__name__)


class Source(Updates, Protocol):
    """Updates that can be had again."""

    def resume(self, served: Version | None) -> None:
        """The update given last was refused: the next one is to follow on `served`, or is whole."""
        ...


class Keeper:
    """One thread between a source and a state."""

    def __init__(self, source: Source, state: State, figures: Figures) -> None:
        self._source, self._state, self._figures = source, state, figures
        self._trouble = ""
        self._failed = 0
        self.refused = ""
        """Why the newest update is not served; empty where it is."""

    @property
    def trouble(self) -> str:
        """Why nothing comes, in words; empty where all is well."""
        return self._trouble

    def run(self, stopping: threading.Event) -> None:
        """Keep fresh until `stopping`."""
        with suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        pending: Update | None = None
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
            except HeldBack:  # it is served when they go on
                continue
            except (Unavailable, DeadlineExceeded, NotYet) as error:
                if stopping.is_set():
                    break
                self._rest(f"no updates come: {error}", stopping)
            except MillraceError as error:
                pending = None
                self._refuse(error)
                self._rest(str(error), stopping)
            except Exception:  # noqa: BLE001  # a bug in one update is not the end of what is served
                pending = None
                log.exception("an update failed; the version before goes on being served")
                self._figures.refused.labels("bug").inc()
                self._source.resume(None)
                self._rest("a bug; see the log", stopping)

    def _serve(self, update: Update) -> None:
        with self._figures.apply_seconds.time():
            self._state.apply(update)
        self._figures.served(update, time.time())
        self.refused = ""
        what = "everything" if update.whole else "what changed"
        log.log(
            logging.INFO if update.whole else logging.DEBUG,
            "serving version %d of timeline %s: %s", update.version, update.timeline, what,
        )  # fmt: skip

    def _refuse(self, error: MillraceError) -> None:
        newest = self._state.versions()
        self._figures.refused.labels(error.reason if isinstance(error, UpdateRefused) else "unusable").inc()
        self._source.resume(newest[-1].version if newest else None)
        goes_on = f"version {newest[-1].version.number} goes on being served" if newest else "nothing is served yet"
        log.warning("refused: %s; %s", error, goes_on)
        self.refused = str(error)

    def _well(self) -> None:
        if self._trouble and not self.refused:
            log.info("updates come again")
        self._trouble, self._failed = "", 0
        self._figures.following.set(1)

    def _rest(self, trouble: str, stopping: threading.Event) -> None:
        if trouble != self._trouble and trouble != self.refused:
            log.warning("%s", trouble)
        self._trouble = trouble
        self._figures.following.set(0)
        self._failed += 1
        stopping.wait(BACKOFF.pause_s(self._failed))
