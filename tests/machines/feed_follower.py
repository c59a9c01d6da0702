"""A process of a test machine that follows the live feed of a job, and tells what it holds of each version.

It finds the feed by the URL of a service and a token, or by the address of a launcher and a file with the join token.

It prints a line of JSON for each update, and one for each kind of trouble. It ends with its process.
"""

import json
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.retry import Backoff
from headrace.trainer.replica import update_loop
from headrace.trainer.replica.feed_address import Find, at_launcher, at_url
from headrace.trainer.replica.feed_updates import FeedUpdates
from headrace.trainer.replica.updates import ReplicaUpdate


def digest_of(rows: dict[int, bytes], tensors: dict[str, bytes]) -> str:
    """Of everything that is held of one table and of the dense part."""
    content = (
        [(key, rows[key].hex()) for key in sorted(rows)],
        [(name, tensors[name].hex()) for name in sorted(tensors)],
    )
    return sha256(json.dumps(content).encode()).hexdigest()


def apply(rows: dict[int, bytes], update: ReplicaUpdate) -> None:
    """Hold what an update says of the default table."""
    if update.whole:
        rows.clear()
    for chunk in update.tables["default"].rows:
        rows.update(zip(chunk.keys_U.tolist(), (row.tobytes() for row in chunk.rows_UD), strict=True))
    for key in update.tables["default"].gone.tolist():
        rows.pop(key, None)


def follow(find: Find, backoff: Backoff = update_loop.BACKOFF) -> None:
    """Follow without end, with the pauses of a replica."""
    feed, rows, failures = FeedUpdates(find), dict[int, bytes](), 0
    while True:
        try:
            update = feed.next(Deadline.after(1))
        except Unavailable as error:
            failures += 1
            _say(trouble=str(error))
            time.sleep(backoff.pause_s(failures))
            continue
        failures = 0
        if update is not None:
            apply(rows, update)
            tensors = {name: value.tobytes() for name, value in update.dense.items()}
            _say(version=update.version, whole=update.whole, digest=digest_of(rows, tensors))


def _say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    where, token = sys.argv[1:]
    follow(at_url(where, token) if "://" in where else at_launcher(where, Path(token)))
