"""A source with an end, read several times: each partition once for each epoch, under a name of its own.

dataset.spec.epochs makes the names. trainer.rank0.turns lets an epoch begin when the one before is in passes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from headrace.dataset.spec.epochs import MARK, in_epoch, split_epoch
from headrace.dataset.stream.source import Events, Partition, Segment, Source
from headrace.deadline import Deadline
from headrace.errors import SpecError


class RepeatedSource:
    """`source`, which ends, `epochs` times; see Source. It closes the source."""

    missing: Sequence[str] = ()
    """See Source: a source that ends has all it names."""

    def __init__(self, source: Source, epochs: int) -> None:
        assert source.bounded, "checked by dataset.spec.source_set"
        self.bounded = True
        self._source, self._epochs = source, epochs
        self._numbers: dict[str, int] = {}  # of partitions, in the order they were found

    def resume(self, positions: Mapping[str, int]) -> None:
        own: dict[str, int] = {}
        for name, position in positions.items():
            base = split_epoch(name)[0]
            own[base] = max(position, own.get(base, 0))
        self._source.resume(own)

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        """Those of the first epoch come first. Raises SpecError for a name that looks like an epoch's."""
        found = self._source.partitions(deadline)
        for each in found:
            if split_epoch(each.name)[1] != 1 or MARK in each.name:
                raise SpecError(f"{each.name}: a source with epochs takes no name with {MARK!r}; rename it", "sources")
        repeated = [
            replace(each, name=in_epoch(each.name, epoch), stream=in_epoch(each.stream_name, epoch))
            for epoch in range(1, self._epochs + 1)
            for each in found
        ]
        for each in repeated:
            self._numbers.setdefault(each.name, len(self._numbers))
        return sorted(
            (replace(each, number=self._numbers[each.name]) for each in repeated), key=lambda each: each.number
        )

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        return self._source.read(replace(segment, partition=split_epoch(segment.partition)[0]), deadline)

    def look_again(self, deadline: Deadline) -> None:
        self._source.look_again(deadline)

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> Mapping[str, int] | None:
        found: dict[str, int] = {}
        for epoch in range(1, self._epochs + 1):
            own = {base: ms for name, ms in times_ms.items() for base, its in [split_epoch(name)] if its == epoch}
            if not own and (times_ms or epoch > 1):
                continue
            positions = self._source.positions_at(own, deadline)
            if positions is None:
                return None
            found |= {in_epoch(name, epoch): position for name, position in positions.items()}
        return found

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        """Lag tools see the newest epoch."""
        by_epoch = sorted((split_epoch(name)[1], split_epoch(name)[0], at) for name, at in positions.items())
        self._source.commit({base: at for _, base, at in by_epoch}, deadline)

    def close(self) -> None:
        self._source.close()
