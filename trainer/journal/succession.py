"""Succession: a trainer learns that a newer generation has its job, and ends in bounded time, whatever it waits for.

A writer of the store is refused by trainer.journal.log, and ends. A trainer that waits for its peers may not notice
that they are gone, in particular after it was suspended: gloo reports no error when it writes to a dead peer, and the
wait lasts up to train.step_deadline. So a thread also checks the log.

With a fence (trainer.journal.fence) the newer generation may run on another machine. A head that does not reach the
fence may have been replaced without knowing it, so it must publish nothing: its feed and its exports stand still after
a time without contact, and go on with the next contact. The time counts from the beginning of the last successful look,
by a clock that goes on while the process is frozen: a head that wakes late publishes nothing before it has looked.
Commits and the log need no such time: the fence itself refuses them.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Unavailable
from headrace.printable import print_printable
from headrace.trainer.journal.log import Superseded, newest_generation

CHECK_S = 5.0
"""Pause between checks of the log. A replaced trainer may use one pause to end in order; it is killed after two."""
LOOKS = 3
"""Looks at the fence within the time without contact."""
END_S = 5.0
"""How long a replaced head may take to end in order."""

log = logging.getLogger(__name__)


def end_when_superseded(
    folder: Path, generation: int, *, check_s: float = CHECK_S, end: Callable[[int], object] = os._exit
) -> None:
    """Start a thread that ends this process, with Superseded's exit code, at the second check with a newer generation.

    `folder` is the job's log. Nothing is lost: the newer generation began from durable state, and this one may change
    nothing any more.
    """
    pause = threading.Event()  # never set: the thread ends with its process

    def watch() -> None:
        newest, checks = 0, 0
        while checks < 2:
            pause.wait(check_s)
            newest = _newest(folder)
            checks += newest > generation
        error = Superseded(folder, generation, newest)
        try:
            with suppress(OSError):  # the reader may be gone
                print_printable(f"error: {error}", file=sys.stderr, flush=True)
        finally:
            end(error.exit_code)

    threading.Thread(target=watch, name="fencing", daemon=True).start()


@contextmanager
def raise_superseded(folder: Path, generation: int) -> Iterator[None]:
    """Raise Superseded instead of another HeadraceError of a replaced trainer: its successor caused the error."""
    try:
        yield
    except HeadraceError as error:
        newest = _newest(folder)
        if newest > generation and not isinstance(error, Superseded):
            raise Superseded(folder, generation, newest) from error
        raise


def _newest(folder: Path) -> int:
    """The newest generation; 0 if the folder cannot be read now: the next check may succeed."""
    with suppress(OSError):
        return newest_generation(folder)
    return 0


class NewestHead(Protocol):
    """Whether this head is still the newest one."""

    def check_newest(self, deadline: Deadline) -> None:
        """Raise Superseded where another head has claimed the job; and Unavailable."""
        ...


class HeadContact:
    """Whether a head still reaches the fence, and is still the newest head. Any thread may ask; one looks."""

    def __init__(self, fence: NewestHead, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The claim has just succeeded. `timeout_s`: `cluster.node_timeout`."""
        self._fence, self._timeout_s, self._clock = fence, timeout_s, clock
        self._heard_s = clock()
        self._why, self._told = "", False
        self.superseded: Superseded | None = None
        """Set when another head has the job."""

    @property
    def trouble(self) -> str:
        """Why nothing may be published, in words; empty where it may."""
        if self.superseded is not None:
            return str(self.superseded)
        silent_s = self._clock() - self._heard_s
        if silent_s <= self._timeout_s:
            return ""
        why = f" ({self._why})" if self._why else ""
        return (
            f"the object store was not reached for {silent_s:.0f} s{why}: the feed and exports stand still until it "
            "is, since another head may have the job by now"
        )

    def look(self) -> None:
        """Look whether this is the newest head, for a part of the time."""
        began_s = self._clock()
        try:
            self._fence.check_newest(Deadline.after(self._timeout_s / LOOKS))
        except Superseded as error:
            self.superseded = error
        except Unavailable as error:
            self._why = str(error)
        except HeadraceError as error:
            self._why = str(error)
            log.warning("the fence: %s", error)
        else:
            self._heard_s, self._why = began_s, ""
        self._tell()

    def _tell(self) -> None:
        trouble = self.trouble
        if trouble and not self._told:
            log.warning("%s", trouble)
        elif self._told and not trouble:
            log.info("the object store is reached again: the feed and exports go on")
        self._told = bool(trouble)


@contextmanager
def watched(contact: HeadContact, timeout_s: float, end: Callable[[int], object] = os._exit) -> Iterator[HeadContact]:
    """Look again and again while the context lasts. A replaced head is ended, if it does not end by itself."""
    over = threading.Event()

    def watch() -> None:
        contact.look()
        while contact.superseded is None and not over.wait(timeout_s / LOOKS):
            contact.look()
        if contact.superseded is not None and not over.wait(END_S):
            log.error("%s", contact.superseded)
            end(contact.superseded.exit_code)

    threading.Thread(target=watch, name="head-contact", daemon=True).start()
    try:
        yield contact
    finally:
        over.set()
