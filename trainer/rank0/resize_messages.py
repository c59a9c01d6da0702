"""The messages of rank 0 and the launcher about a resize: one each way with every poll of the status.

Apart from trainer.rank0.resizing, since the launcher reads them and loads neither kernels nor stores.
"""

from typing import Any, cast

from msgspec import Struct

from headrace.codec import packed, unpacked

STANDBY = "standby"
"""The state of a generation that has not claimed the job."""


class PrepareWorkers(Struct, frozen=True, tag="prepare"):
    """Rank 0 to the launcher: start workers that stand by. Repeated until the resize is over."""

    id: str
    """Of the resize."""
    shards: int
    trainers: int


class WorkersMoved(Struct, frozen=True, tag="moved"):
    """The workers that stand by to the launcher, and the launcher to rank 0: how far the new shards are."""

    id: str
    version: int | None = None
    """The version that they hold; None: nothing yet."""
    rounds: int = 0
    """Commits that they went on to since the first one."""
    took_s: float = 0.0
    """Time that the last of these took."""
    state: str = "starting"
    """For people: "starting", "restoring", "moving"."""
    before_s: float = 0.0
    """Time that the one before the last took."""


class WorkersFailed(Struct, frozen=True, tag="failed"):
    """The launcher to rank 0: the resize has no workers any more."""

    id: str
    reason: str


ResizeMessage = PrepareWorkers | WorkersMoved | WorkersFailed


def encode_message(message: ResizeMessage | None) -> bytes:
    """A message on the wire; None is empty."""
    return b"" if message is None else packed(message)


def decode_message(data: bytes) -> ResizeMessage | None:
    """The inverse of `encode_message`. Raises NotUnderstood."""
    found = unpacked(cast(type[Any], ResizeMessage), data, "a message about a resize") if data else None
    return cast(ResizeMessage | None, found)
