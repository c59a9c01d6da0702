"""The sources of a job together: which one a partition belongs to, and which waits for which. Pure.

Where a job has one source, its partitions have their own names. Where it has several, the source's name and a colon
come first: "history:2024/05.jsonl", "live:clicks/0".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from headrace.dataset.spec.config import (
    MAX_SOURCES,
    EventTime,
    MetaSlot,
    SourceSection,
)
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.validation import nearest

SEPARATOR = ":"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
WHOLE = ("int64", "uint64")


@dataclass(frozen=True)
class SourceSet:
    """The sections of a job's sources by name."""

    sections: Mapping[str, SourceSection]

    @classmethod
    def of(cls, sections: "SourceSection | SourceSet") -> "SourceSet":
        """A single section as a set of one."""
        return sections if isinstance(sections, SourceSet) else cls({"": sections})

    @property
    def several(self) -> bool:
        """Whether names of partitions begin with their source's."""
        return len(self.sections) > 1

    def name_of(self, partition: str) -> str:
        """The source of a partition. Raises SpecError for a partition of a source that the job does not have."""
        if not self.several:
            return next(iter(self.sections))
        name, separator, _ = partition.partition(SEPARATOR)
        if not separator or name not in self.sections:
            raise SpecError(f"{partition!r} is of none of the job's sources, {', '.join(self.sections)}", "sources")
        return name

    def section_of(self, partition: str) -> SourceSection:
        """The section of a partition's source."""
        return self.sections[self.name_of(partition)]

    def joined(self, source: str, own: str) -> str:
        """The name of a partition of `source`, which is called `own` there; the same for streams."""
        return f"{source}{SEPARATOR}{own}" if self.several else own

    def own_name(self, partition: str) -> str:
        """The inverse of `joined`."""
        return partition.partition(SEPARATOR)[2] if self.several else partition

    def stream_of(self, partition: str) -> str:
        """The name of what is read in one order: a partition, or the files of a source without parallel partitions."""
        name = self.name_of(partition)
        return self.joined(name, self.sections[name].stream(self.own_name(partition)))

    def split(self, by_partition: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Values by partition, as values by source and by the source's own name of the partition."""
        found: dict[str, dict[str, int]] = {name: {} for name in self.sections}
        for partition, value in by_partition.items():
            found[self.name_of(partition)][self.own_name(partition)] = value
        return found

    def clock_of(self, stream: str, *, merged: bool = False) -> str:
        """Streams of one clock advance together in event time: "" where there is one source.

        Sources whose events have times have one, and so have files whose patterns have the same fields: these advance
        by period, unless the streams are `merged`.
        """
        return self._clocks[merged].get(self.name_of(stream), "")

    @cached_property
    def _clocks(self) -> tuple[dict[str, str], dict[str, str]]:
        """By source: its clock, and the one where streams are merged."""
        alone, together = (
            {name: each.clock(merged=merged) or f"{SEPARATOR}{name}" for name, each in self.sections.items()}
            for merged in (False, True)
        )
        return (alone, together) if self.several else ({}, {})

    def predecessors(self, name: str) -> list[str]:
        """The sources that must have ended before `name` begins."""
        found: list[str] = []
        after = self.sections[name].after
        while after is not None and after in self.sections and after not in found:
            found.append(after)
            after = self.sections[after].after
        return found


def check_sources(sources: Mapping[str, SourceSection]) -> None:
    """Raise SpecError where the sources of a job do not work together."""
    if len(sources) > MAX_SOURCES:
        raise SpecError(f"{len(sources)} sources are given; a job has at most {MAX_SOURCES}", "sources")
    timed = {name: each.event_time.kind != "none" for name, each in sources.items()}
    for name, source in sources.items():
        if len(sources) > 1 and NAME.fullmatch(name) is None:
            raise SpecError("a name of several sources has letters, digits, '_' and '-', at most 64", f"sources.{name}")
        if timed[name] != next(iter(timed.values())):
            raise SpecError("either all sources of a job have an event time, or none", f"sources.{name}.event_time")
        if source.after is not None:
            _check_after(name, source.after, sources)
    for name in (name for name, source in sources.items() if source.epochs > 1):
        _check_epochs(name, sources)


def _check_epochs(name: str, sources: Mapping[str, SourceSection]) -> None:
    path = f"sources.{name}.epochs"
    if not sources[name].ends:
        raise SpecError(
            "a source is read again when it has ended, and this one never ends: files end with follow = false, Kafka "
            'with end = "latest" or a time',
            path,
        )
    for other, source in sources.items():
        if not source.ends and name not in SourceSet(sources).predecessors(other):
            raise SpecError(
                f"source {other!r} never ends, so the second epoch would never begin; give it after = {name!r}", path
            )


def _check_after(name: str, after: str, sources: Mapping[str, SourceSection]) -> None:
    path = f"sources.{name}.after"
    if after == name or after not in sources:
        others = [each for each in sources if each != name]
        raise SpecError(f"{after!r} is not another source of the job; {nearest(after, others)}", path)
    if name in SourceSet(sources).predecessors(name):
        raise SpecError("the sources wait for each other in a circle", path)
    if not sources[after].ends:
        raise SpecError(
            f"{after!r} never ends, so {name!r} would never begin; files end with follow = false, Kafka with "
            'end = "latest" or a time',
            path,
        )


def check_event_time(config: EventTime, traced: bool, schema: Schema, path: str) -> None:
    """Raise SpecError if the event time cannot come from where `config`, at `path` of the spec, says.

    `traced`: whether the pipe's samples can be traced to their events.
    """
    if config.slot is not None:
        slot = schema.by_name.get(config.slot)
        if slot is None or not isinstance(slot.entry, MetaSlot) or slot.entry.type not in WHOLE:
            problem = (
                f"{config.slot!r} is not a meta slot of whole numbers, and floats hold a unix time to 128 s only; "
            )
            raise SpecError(problem + 'use a slot with kind = "meta", type = "int64"', f"{path}.slot")
    elif not traced and config.kind != "none":
        raise SpecError(
            'samples of protocol = "multislot" cannot be traced to their events; '
            'name a meta slot with the time, or use protocol = "arrow"',
            path,
        )
