"""The start and end of a process of Headrace: signals raise a flag, exit codes have a meaning."""

import atexit
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

from headrace.errors import HeadraceError
from headrace.printable import print_printable


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
    NO_SAMPLES = 3
    """The stream is drained, and no sample came of its events: each was rejected. Only runs end so. Never restarted."""
    BUG = 70
    """An exception nobody caught (sysexits.h: EX_SOFTWARE). Restarted: it may depend on timing."""
    RETRY = 75
    """A peer or broker was unavailable, or a deadline passed (EX_TEMPFAIL). Restarted."""


LOST_OUTPUT = 120
"""Exit code of a process that did its work and could not write the last of its output; Python has the same."""
ERROR = "error: "
"""Begins the message for people of a process that ends on an error."""
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM


@contextmanager
def on_stop_signal(act: Callable[[], None], *more: signal.Signals) -> Iterator[None]:
    """Call `act` on each SIGINT, SIGTERM and signal of `more`; the old handlers come back at the end. Main thread only.

    It is called on a thread of its own. A handler would run on the main thread between any two instructions, and wait
    for ever for a lock that this thread holds, such as that of an Event whose `wait` has just begun.
    """
    numbers = (*STOP_SIGNALS, *more)
    woken, wake = socket.socketpair()

    def watch() -> None:
        while number := woken.recv(1):
            if number[0] in numbers:
                act()

    watching = threading.Thread(target=watch, name="stop-signals", daemon=True)
    watching.start()
    wake.setblocking(False)
    before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        wake.close()
        watching.join()
        woken.close()


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
    """Run `main` and return the exit code. A HeadraceError is printed as a message for people.

    Any other exception is a bug: its traceback is printed.
    """
    try:
        main()
    except HeadraceError as error:
        print_printable(f"{ERROR}{error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:  # noqa: BLE001  # the outermost frame of a process: printed, and reported by the exit code
        print_printable(traceback.format_exc().rstrip(), file=sys.stderr, flush=True)
        return ExitCode.BUG
    return ExitCode.DRAINED


def error_in(last_lines: Sequence[str]) -> str:
    """The message of `exit_code_of` in the last lines of a process, up to their end; "" where there is none."""
    begins = max((place for place, line in enumerate(last_lines) if line.startswith(ERROR)), default=None)
    return "" if begins is None else "\n".join(last_lines[begins:]).removeprefix(ERROR)


def cause_in(last_lines: Sequence[str]) -> str:
    """Why a process ended, from its last lines: its error message, or the exception of a traceback; "" without one."""
    if message := error_in(last_lines):
        return message
    begins = max((at for at, line in enumerate(last_lines) if line.startswith("Traceback ")), default=None)
    if begins is None:
        return ""
    raised = [line for line in last_lines[begins + 1 :] if line.strip() and not line.startswith(" ")]
    return raised[0] if raised else ""


def run_to_end(main: Callable[[], None]) -> NoReturn:
    """Run `main` as the whole work of this process, which ends with its exit code; see exit_code_of and end_process."""
    try:
        code = exit_code_of(main)
    except SystemExit as asked:
        if not isinstance(asked.code, int | None):
            raise  # a message, which Python prints
        code = asked.code or 0
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process with an exit code, as `sys.exit` on the main thread does, but leave its objects to the system.

    Python frees each of them: that takes 0.3 s after the imports of a command, a second after those of a trainer, and a
    forked process copies the pages that it shares to do so. Whatever must be closed is closed by now.

    1. Wait for the threads that are no daemons. 2. Call what is registered with `atexit`. 3. Write what is buffered.
    4. End.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # 1: Python's own end begins with it, too
    atexit._run_exitfuncs()  # noqa: SLF001  # 2
    for stream in (sys.stdout, sys.stderr):  # 3
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:  # its reader is gone, or its disk is full
            code = code or LOST_OUTPUT
    os._exit(code)  # 4
