"""The objects of a job's store that no commit needs any more. Pure: what is there, and what counts, is given.

Safety does not rest on the grace, but on three rules. The newest generation alone removes, and not while a commit is
being made. A commit skips an upload only for what its parent names, and the parent counts until then. So an object that
no counting commit names is never named again: later generations upload under a number of their own.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

PartKey = tuple[int, str]
"""Generation and SHA-256 of an object."""


@dataclass(frozen=True, slots=True)
class RetiredCommit:
    """A commit that counts no more, and whose files may still be there."""

    at_s: float
    """When it was retired, in unix seconds."""
    parts: Set[PartKey]


def due(retired: Mapping[str, RetiredCommit], now_s: float, grace_s: float) -> list[str]:
    """The names of the retired commits whose grace is over."""
    return sorted(name for name, commit in retired.items() if commit.at_s + grace_s <= now_s)


def removable(
    present: Set[PartKey],
    live: Set[PartKey],
    retired: Mapping[str, RetiredCommit],
    generation: int,
    now_s: float,
    grace_s: float,
) -> list[PartKey]:
    """The objects to remove, in order.

    Of those that no live commit names: those of retired commits after the grace, and those that no commit names at all
    if an older generation uploaded them, for it can make no commit any more.
    """
    over = set(due(retired, now_s, grace_s))
    waiting = {key for name, commit in retired.items() if name not in over for key in commit.parts}
    ended = {key for name in over for key in retired[name].parts}
    unneeded = present - live - waiting
    return sorted(key for key in unneeded if key in ended or key[0] < generation)
