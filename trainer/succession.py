"""A trainer whose job a newer generation has taken over ends in stated time, whatever it waits for.

Whoever changes the store is refused there (trainer.log) and ends by itself. A trainer that waits for its peers may not
hear that they are gone, above all one that was stopped meanwhile: gloo, writing to a peer that has died, tells nobody,
and the wait goes on to train.step_deadline. So a thread looks at the log, too.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from millrace.errors import MillraceError
from millrace.printable import say
from trainer.log import Superseded, newest_generation

LOOK_S = 5.0
"""How often the log is looked at. Who was replaced has one more such time to end in order; so it is gone after two."""


def end_when_replaced(
    folder: Path, generation: int, *, look_s: float = LOOK_S, end: Callable[[int], object] = os._exit
) -> None:
    """End this process, at once and with Superseded's code, at the second look that finds a newer generation.

    `folder` is the job's log. Nothing is lost: a newer generation began from what was durable, and this one may change
    nothing any more.
    """
    pause = threading.Event()  # never set: the thread ends with its process

    def watch() -> None:
        newest, looks = 0, 0
        while looks < 2:
            pause.wait(look_s)
            newest = _newest(folder)
            looks += newest > generation
        error = Superseded(folder, generation, newest)
        try:
            with suppress(OSError):  # nobody may read it any more
                say(f"error: {error}", file=sys.stderr, flush=True)
        finally:
            end(error.exit_code)

    threading.Thread(target=watch, name="succession", daemon=True).start()


@contextmanager
def told_as_replaced(folder: Path, generation: int) -> Iterator[None]:
    """Whatever a trainer fails at once it was replaced is told as that: its successor took away what it then misses.

    Raises Superseded in place of another MillraceError.
    """
    try:
        yield
    except MillraceError as error:
        newest = _newest(folder)
        if newest > generation and not isinstance(error, Superseded):
            raise Superseded(folder, generation, newest) from error
        raise


def _newest(folder: Path) -> int:
    """The newest generation; 0 where the folder cannot be read now: the next look may tell."""
    with suppress(OSError):
        return newest_generation(folder)
    return 0
