"""Log lines of every process: one line an event on stderr, with time, level and role."""

import logging
import sys


def setup(role: str, level: str = "INFO") -> None:
    """Send log records to stderr as `12:00:01 INFO  trainer-0: text`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-5s {role}: %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
