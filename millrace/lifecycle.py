"""The start and end of a process of Millrace: signals raise a flag, exit codes have a meaning."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

from millrace.errors import MillraceError
from millrace.printable import print_printable


class ExitCode(IntEnum):
    """The exit code of a process, which decides whether it is restarted.

    A bug is not 1, as in Python: errors that would come again differ from those that may not.
    """

    DRAINED = 0
    """All work is done."""
    FAILED = 1
    """An error with a message for people, which would come again: a wrong stream, a damaged log. Never restarted."""
    BAD_CONFIG = 2
    """The job spec is wrong. Never restarted."""
    BUG = 70
    """An exception nobody caught (sysexits.h: EX_SOFTWARE). Restarted: it may depend on timing."""
    RETRY = 75
    """A peer or broker was unavailable, or a deadline passed (EX_TEMPFAIL). Restarted."""


@contextmanager
def on_stop_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on each SIGINT and SIGTERM; the old handlers come back at the end. `act` only sets a flag.

    Main thread only.
    """

    def handle(_signal: int, _frame: FrameType | None) -> None:
        act()

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def stop_flag() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; the old handlers come back at the end. Main thread only."""
    stopping = threading.Event()
    with on_stop_signal(stopping.set):
        yield stopping


def end_with_parent() -> None:
    """Kill this process and its group as soon as its standard input closes.

    The launcher holds the other end and never writes: it closes when the launcher is gone, however that ended.
    The process must lead its group.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def exit_code_of(main: Callable[[], None]) -> int:
    """Run `main` and return the exit code. A MillraceError is printed as a message for people.

    Any other exception is a bug: its traceback is printed.
    """
    try:
        main()
    except MillraceError as error:
        print_printable(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:  # noqa: BLE001  # the outermost frame of a process: printed, and reported by the exit code
        print_printable(traceback.format_exc().rstrip(), file=sys.stderr, flush=True)
        return ExitCode.BUG
    return ExitCode.DRAINED
