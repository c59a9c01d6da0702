"""A function called repeatedly on a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def periodically(act: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Call `act` every `every_s` seconds, on a thread of this name, while the context lasts. `act` must not raise."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
