"""Turns of sources: the partitions that the next pass may read, where sources wait for others. Pure.

A source with `after` begins when the other one has ended: all its partitions are final and all their positions are in
plans. Positions and ends alone decide, so a job that was killed decides as before.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dataset.spec.source_set import SourceSet
from dataset.stream.source import Partition
from trainer.journal.partitions import SkippedRange
from trainer.journal.pass_plan import backlog


class Turn(NamedTuple):
    """The partitions of the next pass."""

    partitions: Sequence[Partition]
    holds: bool
    """Whether other sources wait for these to end."""

    @property
    def is_final(self) -> bool:
        """Whether nothing will be added to these partitions."""
        return all(partition.final for partition in self.partitions)


def next_turn(
    partitions: Sequence[Partition],
    positions: Mapping[str, int],
    sources: SourceSet,
    skips: Collection[SkippedRange] = (),
) -> Turn:
    """The partitions of all sources that wait for no other."""
    if not any(section.after for section in sources.sections.values()):
        return Turn(partitions, False)
    waiting = backlog(partitions, positions, skips)
    unread = {
        sources.name_of(each.name) for each, left in zip(partitions, waiting, strict=True) if left or not each.final
    }
    held = [name for name in sources.sections if any(before in unread for before in sources.predecessors(name))]
    return Turn([each for each in partitions if sources.name_of(each.name) not in held], bool(held))
