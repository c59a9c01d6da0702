"""Which exports of a stream may go. Pure; removing them is trainer.exports.pointing's matter."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

NAME = re.compile(r"(t\d+)/(\d{10,})-(base|delta)")


@dataclass(frozen=True, slots=True)
class Present:
    """An export that lies there."""

    path: str
    """"t1/0000000012-base"."""
    complete: bool
    """Whether it has its _DONE."""

    @property
    def order(self) -> tuple[int, int]:
        """Timeline and version: exports in order of time."""
        match = NAME.fullmatch(self.path)
        assert match is not None, self.path
        return int(match[1][1:]), int(match[2])

    @property
    def is_base(self) -> bool:
        """Whether it stands alone."""
        return self.path.endswith("-base")


def is_export(path: str) -> bool:
    """Whether this is the path of an export."""
    return NAME.fullmatch(path) is not None


def superfluous(present: Iterable[Present], keep: int, needed: Collection[str], newest: str) -> list[str]:
    """Paths of those that go, newest first, so that what stays can be replayed at any moment in between.

    What is older than the `keep` newest complete bases goes, and what is not complete and older than `newest`; never
    what is `needed`: the chains of what is pointed to and of what was exported last.
    """
    found = sorted(present, key=lambda each: each.order, reverse=True)
    bases = [each for each in found if each.is_base and each.complete]
    oldest = bases[keep - 1].order if len(bases) >= keep else (0, 0)
    last = Present(newest, True).order
    return [
        each.path
        for each in found
        if each.path not in needed and (each.order < oldest or (not each.complete and each.order < last))
    ]
