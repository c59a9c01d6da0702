"""How a process of Millrace starts and ends: signals raise a flag, exit codes mean something."""

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
from millrace.printable import say


class ExitCode(IntEnum):
    """What the end of a process tells its launcher.

    A bug is not 1, as Python has it: what would come again must be told apart from what may not.
    """

    DRAINED = 0
    """All is done."""
    FAILED = 1
    """An error told to people that would come again: a wrong stream, a damaged log. Never restarted."""
    BAD_CONFIG = 2
    """The job spec is wrong. Never restarted."""
    BUG = 70
    """An exception nobody caught (sysexits.h: EX_SOFTWARE). Restarted: it may hang on how things fell in time."""
    RETRY = 75
    """A peer or broker was away, or time ran out (EX_TEMPFAIL). Restarted."""


@contextmanager
def on_stop_signal(act: Callable[[], None]) -> Iterator[None]:
    """Each SIGINT and SIGTERM calls `act`, which only notes it down; the old handlers come back at the end.

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
    """Kill this process and its process group as soon as its standard input closes.

    The launcher holds the other end and never writes, so it closes when the launcher is gone, however it died.
    The process must lead a group of its own.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def exit_code_of(main: Callable[[], None]) -> int:
    """Run `main`; print an error made for people as such, and return the exit code it asks for.

    Any other exception is a bug: its traceback is printed.
    """
    try:
        main()
    except MillraceError as error:
        say(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:  # noqa: BLE001  # the rim of every process: nothing is swallowed, the end says what it was
        say(traceback.format_exc().rstrip(), file=sys.stderr, flush=True)
        return ExitCode.BUG
    return ExitCode.DRAINED
