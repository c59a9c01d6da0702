"""Fencing: ends a trainer in bounded time once a newer generation has claimed its job, whatever it waits for.

A writer of the store is refused by trainer.journal.log, and ends. A trainer that waits for its peers may not notice
that they are gone, in particular after it was suspended: gloo reports no error when it writes to a dead peer, and the
wait lasts up to train.step_deadline. So a thread also checks the log.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.printable import print_printable
from headrace.trainer.journal.log import Superseded, newest_generation

CHECK_S = 5.0
"""Pause between checks of the log. A replaced trainer may use one pause to end in order; it is killed after two."""


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
