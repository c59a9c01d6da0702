"""The messages of rank 0 to all ranks between passes and steps, one class each.

They travel as JSON in the collective calls that all ranks make in the same order (trainer.collectives.ranks), and stay
within one generation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.codec import plain, typed
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import StreamEnded


class NextPass(msgspec.Struct, frozen=True, tag="plan"):
    """The pass after the last known one: read it ahead; between passes, begin it."""

    plan: PassPlan


class BeginPass(msgspec.Struct, frozen=True, tag="begin"):
    """Begin the pass that all ranks know."""


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Nothing to train yet."""

    commit: bool = False
    """Bring the dense part together for a commit first."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Training ends."""


News = NextPass | StreamEnded
"""About the passes to come."""
Message = News | BeginPass | Wait | Finish


@dataclass(frozen=True, slots=True)
class _Envelope:
    message: Message | None = None


def sent(message: Message | None) -> dict[str, Any]:
    """A message as JSON-able data; None: there is none."""
    data: dict[str, Any] = plain(_Envelope(message))
    return data


def received(data: Mapping[str, Any]) -> Message | None:
    """The inverse of `sent`."""
    return typed(_Envelope, data, "the message of rank 0").message


def broadcast(ranks: Ranks, message: Message | None) -> Message | None:
    """The message of rank 0 on all ranks; that of the others is not sent."""
    return received(ranks.broadcast(sent(message)))
