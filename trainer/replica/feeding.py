"""A job's live feed as updates of a replica: parts of all shards and of the chief, put together by version.

A version is given once every shard and the chief have told all of it; what several versions say of a key, the newest
wins. A base is read while training goes on, and what changes meanwhile is told again: so the first version that every
part tells after its base is exact. Where the feed is, is trainer.replica.finding's to say; merging is done by
trainer.replica.merging.

Where something of it breaks, all of it is given up, and the next call begins anew with the version given last: what
changed since is told, or, where that is no longer known, everything.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from millrace.deadline import Deadline
from millrace.errors import MillraceError, Unavailable
from pserver.feed_stream import FeedStream
from pserver.feed_table import Told
from pserver.feed_wire import Part
from pserver.proto import feed_pb2 as pb
from trainer.freshness import EventTimes
from trainer.replica.finding import Find, Whereabouts
from trainer.replica.merging import merged
from trainer.replica.updates import TableUpdate, Update

CHIEF = -1
"""Stands for the chief among numbers of shards."""
POKE_S = 5.0
"""How long a chief may take to hear that its newest version is waited for."""
MAX_AHEAD = 64
"""Versions of the chief that are kept. Where one is complete and not asked for, nothing more is read, and the job lets
go of us at its bound."""

FIND_S = 10.0
"""How long asking where the feed is may take, however soon an update is wanted: a service has 5 s to ask the chief."""
LAST_S = 0.5
"""How long the rest of a version is waited for once a stream has ended."""


class Given(NamedTuple):
    """What was given last: who keeps it with the rows may go on with it later."""

    timeline: str
    generation: int
    version: int


@dataclass(slots=True)
class _Step:
    """What one shard told up to a version."""

    version: int
    tables: dict[str, list[Told]]
    exact: bool
    """Whether the base was read before: all that the shard told is that version."""


@dataclass(slots=True)
class _ShardParts:
    """What one shard has told and was not given."""

    whole: bool | None = None
    """None: it has not answered yet."""
    is_read: bool = False
    base: dict[str, list[Told]] = field(default_factory=dict)
    open: dict[str, list[Told]] = field(default_factory=dict)
    """Since the last version."""
    steps: list[_Step] = field(default_factory=list)

    def hear(self, part: Part) -> None:
        """Of its stream, in order."""
        match part.kind:
            case pb.FeedPart.BEGIN:
                self.whole = part.whole
            case pb.FeedPart.BASE | pb.FeedPart.ROWS:
                into = self.base if part.kind == pb.FeedPart.BASE else self.open
                for name, told in part.tables.items():
                    into.setdefault(name, []).append(told)
            case pb.FeedPart.READ:
                self.is_read = True
            case pb.FeedPart.VERSION:
                self.steps.append(_Step(part.version, self.open, self.is_read))
                self.open = {}

    def versions(self) -> set[int]:
        """Those that are exact."""
        return {step.version for step in self.steps if step.exact}

    def take(self, upto: int) -> list[Mapping[str, list[Told]]]:
        """All that was told up to a version, the oldest first."""
        chosen = [step.tables for step in self.steps if step.version <= upto]
        self.steps = [step for step in self.steps if step.version > upto]
        base, self.base = self.base, {}
        return [base, *chosen]


@dataclass(slots=True)
class _ChiefParts:
    """What the chief has told."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    onnx: bytes | None = None
    versions: dict[int, tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]] = field(default_factory=dict)
    """Tensors, and what is told beside them."""

    def hear(self, part: Part) -> None:
        """Of its stream, in order."""
        match part.kind:
            case pb.FeedPart.BEGIN:
                self.facts, self.onnx = part.facts, part.onnx or self.onnx
            case pb.FeedPart.VERSION:
                self.versions[part.version] = part.tensors, part.facts
                if len(self.versions) > MAX_AHEAD:  # shards still tell their bases: old ones will not be asked for
                    del self.versions[min(self.versions)]

    def take(self, version: int, given: int) -> tuple[Mapping[str, NDArray[Any]], float | None, EventTimes | None]:
        """Tensors, newest event time, event times of what was learnt after `given`; older ones are forgotten."""
        tensors, facts = self.versions[version]
        told = [facts.get("event_times") for other, (_, facts) in self.versions.items() if given < other <= version]
        times = EventTimes.joined([EventTimes.of_message(each) for each in told if each]) if any(told) else None
        self.versions = {other: told for other, told in self.versions.items() if other > version}
        return tensors, facts.get("event_time_s"), times


class _Following:
    """Streams of one generation of workers, each read by a thread, until something breaks."""

    def __init__(self, where: Whereabouts, since: int, generation: int) -> None:
        self.where = where
        self.chief = _ChiefParts()
        self.shards = [_ShardParts() for _ in where.shards]
        self.turn = threading.Condition()
        self.error: MillraceError | None = None
        self.given = 0
        """Versions up to this one are not wanted."""
        self._since, self._generation = since, generation
        addresses = {CHIEF: where.chief} | dict(enumerate(where.shards))
        self._streams = {
            number: FeedStream("the chief" if number == CHIEF else f"shard {number}", address, where.secret)
            for number, address in addresses.items()
        }
        self._threads = [threading.Thread(target=self._read, args=(CHIEF,), name="feed", daemon=True)]
        self._threads[0].start()

    def _follow_shards(self) -> None:
        """Once the chief follows: it has shards tell only while somebody follows it."""
        for number in range(len(self.shards)):
            self._threads.append(threading.Thread(target=self._read, args=(number,), name="feed", daemon=True))
            self._threads[-1].start()

    def _read(self, number: int) -> None:
        parts = self.chief if number == CHIEF else self.shards[number]
        try:
            for part in self._streams[number].parts(self._since, self._generation):
                with self.turn:
                    self.turn.wait_for(self._may_read)
                    parts.hear(part)
                    self.turn.notify_all()
                if part.kind == pb.FeedPart.READ:
                    self._heard_read(number)
        except MillraceError as error:
            with self.turn:
                self.error = self.error or error
                self.turn.notify_all()

    def _may_read(self) -> bool:
        return len(self.chief.versions) < MAX_AHEAD or self.newest() is None or self.error is not None

    def _heard_read(self, number: int) -> None:
        if number == CHIEF:
            self._follow_shards()
        elif all(shard.is_read for shard in self.shards):
            self._streams[CHIEF].poke(Deadline.after(POKE_S))

    @property
    def is_mixed(self) -> bool:
        """Whether some shards tell everything and others what changed."""
        return {shard.whole for shard in self.shards} >= {True, False}

    @property
    def is_near(self) -> bool:
        """Whether the chief has told a version that is wanted."""
        return max(self.chief.versions, default=0) > self.given and bool(self.chief.facts)

    def newest(self) -> int | None:
        """The newest version that everybody has told and that is wanted."""
        common = set(self.chief.versions)
        for shard in self.shards:
            common &= shard.versions()
        newest = max(common, default=0)
        return newest if newest > self.given and self.chief.facts else None

    def close(self) -> None:
        """End the streams; their threads end soon."""
        with self.turn:
            self.error = self.error or Unavailable("the feed is closed")
            self.turn.notify_all()
        for stream in self._streams.values():
            stream.close()


class FeedUpdates:
    """See Updates. Subscribes at the first call of `next`."""

    def __init__(self, find: Find, held: Given | None = None) -> None:
        """`held`: the version that is there already; the first update may then be what changed since."""
        self._find, self.held = find, held
        """What was given last."""
        self._following: _Following | None = None
        self._told: tuple[Mapping[str, Any] | None, bytes | None] = None, None
        """Model and onnx given last."""
        self._from_nothing = False
        self._lock = threading.Lock()
        self._closed = False

    def next(self, deadline: Deadline) -> Update | None:
        """See Updates: the newest version that is complete, everything since the one given last in it."""
        while True:
            following = self._following or self._subscribe(deadline)
            with following.turn:
                following.turn.wait_for(
                    lambda f=following: f.newest() or f.error or f.is_mixed,  # type: ignore[misc]
                    deadline.left_s(),
                )
                if following.error is not None and following.is_near:  # parts of a job's last version come one by one
                    following.turn.wait_for(following.newest, min(LAST_S, deadline.left_s()))
                if following.is_mixed:
                    self._from_nothing = True
                elif (version := following.newest()) is not None:
                    return self._given(following, version)
                elif following.error is None:
                    return None
            self._give_up(following)
            if following.error is not None:
                raise following.error

    def _subscribe(self, deadline: Deadline) -> _Following:
        where = self._find(Deadline.after(max(FIND_S, deadline.left_s())))
        since, generation = 0, where.generation
        held = self.held if self.held is not None and self.held.timeline == where.timeline else None
        if held is not None and not self._from_nothing:
            generation, since = held.generation, held.version
        following = _Following(where, since, generation)
        following.given = 0 if held is None else held.version
        self._from_nothing = False
        with self._lock:
            self._following = following
            if self._closed:
                following.close()
        return following

    def _given(self, following: _Following, version: int) -> Update:
        """Within its turn."""
        shards, chief = following.shards, following.chief
        whole = any(shard.whole for shard in shards)
        told = [shard.take(version) for shard in shards]
        tensors, event_time_s, event_times = chief.take(version, following.given)
        following.turn.notify_all()
        model, onnx = chief.facts["model"], chief.onnx
        told_model, told_onnx = (None, None) if whole else self._told
        self._told = model, onnx
        for shard in shards:
            shard.whole = False
        where = following.where
        self.held = Given(where.timeline, where.generation, version)
        following.given = version
        return Update(
            job=where.job,
            timeline=where.timeline,
            version=version,
            whole=whole,
            tables=dict(_tables(model["tables"], told, whole=whole)),
            dense=tensors,
            event_time_s=event_time_s,
            model=model if model != told_model else None,
            onnx=onnx if onnx != told_onnx else None,
            event_times=None if whole else event_times,
        )

    def _give_up(self, following: _Following) -> None:
        following.close()
        with self._lock:
            if not self._closed:
                self._following = None

    def close(self) -> None:
        """See Updates."""
        with self._lock:
            self._closed, following = True, self._following
        if following is not None:
            following.close()


def _tables(
    names: Mapping[str, Any], told: list[list[Mapping[str, list[Told]]]], *, whole: bool
) -> Iterator[tuple[str, TableUpdate]]:
    """Of every table, what its shards told."""
    for name in sorted({*names, *(table for shard in told for step in shard for table in step)}):
        parts = [merged([step.get(name, []) for step in shard], whole=whole) for shard in told]
        yield name, TableUpdate.joined(parts)
