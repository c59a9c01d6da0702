"""Turns of sources: the partitions that the next pass may read, where sources wait for others, and by epoch. Pure.

A source with `after` begins when the other one has ended: all its partitions are final and all their positions are in
plans. An epoch begins when the one before has ended so. Positions and ends alone decide, so a job that was killed
decides as before.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from headrace.dataset.spec.epochs import split_epoch
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Partition
from headrace.trainer.journal.partitions import SkippedRange
from headrace.trainer.journal.pass_plan import backlog


class Turn(NamedTuple):
    """The partitions of the next pass."""

    partitions: Sequence[Partition]
    holds: bool
    """Whether other sources, or a later epoch, wait for these to end."""
    epoch: int = 1
    """The epoch of these partitions."""

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
    """The partitions of all sources that wait for no other, in the first epoch that is not read to its end."""
    sections = sources.sections.values()
    repeats = any(section.epochs > 1 for section in sections)
    if not repeats and not any(section.after for section in sections):
        return Turn(partitions, False)
    waiting = backlog(partitions, positions, skips)
    open_ = [each for each, left in zip(partitions, waiting, strict=True) if left or not each.final]
    unread = {sources.name_of(each.name) for each in open_}
    held = [name for name in sources.sections if any(before in unread for before in sources.predecessors(name))]
    turn = Turn([each for each in partitions if sources.name_of(each.name) not in held], bool(held))
    return _in_epoch(turn, open_, sources) if repeats else turn


def _in_epoch(turn: Turn, unread: Collection[Partition], sources: SourceSet) -> Turn:
    """The partitions of a turn in the first epoch with one that is not read to its end."""

    def epoch_of(partition: Partition) -> int:
        return split_epoch(partition.name)[1] if sources.section_of(partition.name).epochs > 1 else 1

    names = {each.name for each in unread}
    epochs = {each.name: epoch_of(each) for each in turn.partitions}
    epoch = min((epochs[each.name] for each in turn.partitions if each.name in names), default=1)
    theirs = [each for each in turn.partitions if epochs[each.name] == epoch]
    return Turn(theirs, turn.holds or max(epochs.values(), default=1) > epoch, epoch)
