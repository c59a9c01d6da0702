"""Several sources as one stream: each partition has its source's name before its own.

dataset.spec.source_set knows the names; which source waits for another is decided by trainer.rank0.turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Events, Partition, Segment, Source
from headrace.deadline import Deadline


class CompositeSource:
    """The sources of a job with several; see Source. It closes them."""

    def __init__(self, names: SourceSet, sources: Mapping[str, Source]) -> None:
        """`sources`: by name, in the order of the job file."""
        self.bounded = all(source.bounded for source in sources.values())
        self._names, self._sources = names, sources
        self._numbers: dict[str, int] = {}  # of partitions, in the order they were found
        self.missing: Sequence[str] = ()
        """See Source, each with its source's name."""

    def resume(self, positions: Mapping[str, int]) -> None:
        for name, own in self._names.split(positions).items():
            self._sources[name].resume(own)

    def partitions(self, deadline: Deadline) -> Sequence[Partition]:
        """A partition tells whether its own source ends."""
        found = [
            replace(
                each,
                name=self._names.joined(name, each.name),
                stream=self._names.joined(name, each.stream_name),
                bounded=source.bounded,
            )
            for name, source in self._sources.items()
            for each in source.partitions(deadline)
        ]
        unfound = ((name, words) for name, source in self._sources.items() for words in source.missing)
        self.missing = [f"source {name}: {words}" for name, words in unfound]
        for each in found:
            self._numbers.setdefault(each.name, len(self._numbers))
        numbered = [replace(each, number=self._numbers[each.name]) for each in found]
        return sorted(numbered, key=lambda each: each.number)

    def read(self, segment: Segment, deadline: Deadline) -> Iterator[Events]:
        """Errors name the partition as the job does."""
        name, own = self._names.name_of(segment.partition), self._names.own_name(segment.partition)
        try:
            yield from self._sources[name].read(replace(segment, partition=own), deadline)
        except SourceGap as error:
            words = str(error)
            whole = self._names.joined(name, words) if words.startswith(own) else f"{segment.partition}: {words}"
            raise SourceGap(whole) from error

    def look_again(self, deadline: Deadline) -> None:
        for source in self._sources.values():
            if source.bounded:
                source.look_again(deadline)

    def positions_at(self, times_ms: Mapping[str, int], deadline: Deadline) -> Mapping[str, int] | None:
        """None if a partition is of a source without time stamps."""
        found: dict[str, int] = {}
        for name, own in self._names.split(times_ms).items():
            positions = self._sources[name].positions_at(own, deadline) if own else {}
            if positions is None:
                return None
            found |= {self._names.joined(name, each): position for each, position in positions.items()}
        return found

    def commit(self, positions: Mapping[str, int], deadline: Deadline) -> None:
        for name, own in self._names.split(positions).items():
            if own:
                self._sources[name].commit(own, deadline)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
