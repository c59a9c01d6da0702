"""Turns a job's live feed into updates of a replica: assembles the parts of all shards and of rank 0 by version.

A version is returned once every shard and rank 0 have sent all of it. Of several versions of a key the newest counts. A
base is read while training goes on, and changes during that time are sent again; so the first version that every part
sends after its base is exact. trainer.replica.feed_address finds the feed.

When a part of the feed breaks, all of it is closed. The next call subscribes again from the version returned last: the
job then sends what changed since, or everything where it does not know that any more.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Unavailable
from headrace.keys import are_among, unique_keys
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.feed.feed_client import FeedStream, FeedTooSlow
from headrace.pserver.feed.feed_messages import FeedMessage
from headrace.pserver.feed.table_changes import PresentRows, TableDelta
from headrace.pserver.lifecycle.day_decay import DayDecay
from headrace.pserver.proto import feed_pb2 as pb
from headrace.retry import Backoff
from headrace.trainer.replica.export_updates import ExportUpdates
from headrace.trainer.replica.feed_address import FeedAddress, Find
from headrace.trainer.replica.replica_state import ServedVersion
from headrace.trainer.replica.updates import U64, ReplicaRows, ReplicaUpdate, ReplicaUpdates, TableUpdate
from headrace.trainer.status.freshness import EventTimes

# Merges the changes of several versions of one table: of each key the newest counts.
#
# Pure. Different shards have different keys, so the changes of each shard are merged separately.
#
# Shapes: U keys of a part, S keys seen in newer parts.

NONE = np.empty(0, np.uint64)


def merge_steps(steps: Sequence[Sequence[TableDelta]], *, whole: bool) -> TableUpdate:
    """Merge one shard's steps, oldest first, each in parts. Within a step a row overrides a deletion of its key.

    The last part of a step that has a key counts. `whole`: the replica has no earlier rows, so no deletions are needed.
    """
    rows: list[list[ReplicaRows]] = []
    gone: list[U64] = [NONE]
    seen_S = NONE
    for number, step in reversed(list(enumerate(steps))):
        rows.append([_without(part.rows, seen_S) for part in step])
        if whole and not number:
            break  # the base, which is large: nothing is older
        keys_U = unique_keys(seen_S, *(part.rows.keys_P for part in step))
        gone_U = unique_keys(NONE, *(part.gone_U for part in step))
        gone.append(gone_U[~are_among(gone_U, keys_U)])
        seen_S = unique_keys(keys_U, gone_U)
    kept = tuple(each for step in reversed(rows) for each in step if len(each.keys_U))
    return TableUpdate(kept, NONE if whole else np.concatenate(gone))


def _without(present: PresentRows, seen_S: U64) -> ReplicaRows:
    """Rows of keys that are not among `seen_S`."""
    if not len(seen_S):
        return ReplicaRows(present.keys_P, present.group_P, present.rows_PD)
    fresh_U = ~are_among(present.keys_P, seen_S)
    return ReplicaRows(present.keys_P[fresh_U], present.group_P[fresh_U], present.rows_PD[fresh_U])


RANK0 = -1
"""Number of rank 0 among the numbers of shards."""
POKE_S = 5.0
"""Longest time to tell rank 0 that its newest version is waited for."""
MAX_AHEAD = 64
"""Most versions of rank 0 that are kept. While complete versions are not fetched, reading stops at this number, and the
job drops us at its own bound."""

FIND_S = 10.0
"""Least time to find the feed, however short the deadline: a service waits up to 5 s for rank 0."""
LAST_S = 0.5
"""Longest wait for the rest of a version after a stream has ended."""


class FeedPosition(NamedTuple):
    """The version returned last. A caller that keeps its rows may resume from it."""

    timeline: str
    generation: int
    version: int


@dataclass(slots=True)
class _Step:
    """The messages of one shard up to a version."""

    version: int
    tables: dict[str, list[TableDelta]]
    exact: bool
    """Whether the base was read before, so that the rows are exactly of that version."""
    decays: Mapping[str, Any]
    """By table of statistics of rows: the day of the version, and the rates up to it."""


@dataclass(slots=True)
class _ShardParts:
    """Messages of one shard that were not returned yet."""

    whole: bool | None = None
    """None: the shard has not answered yet."""
    is_read: bool = False
    base: dict[str, list[TableDelta]] = field(default_factory=dict)
    open: dict[str, list[TableDelta]] = field(default_factory=dict)
    """Since the last version."""
    steps: list[_Step] = field(default_factory=list)

    def hear(self, part: FeedMessage) -> None:
        """Take a part of the shard's stream, in order."""
        match part.kind:
            case pb.FeedPart.BEGIN:
                self.whole = part.whole
            case pb.FeedPart.BASE | pb.FeedPart.ROWS:
                into = self.base if part.kind == pb.FeedPart.BASE else self.open
                for name, sent in part.tables.items():
                    into.setdefault(name, []).append(sent)
            case pb.FeedPart.READ:
                self.is_read = True
            case pb.FeedPart.VERSION:
                self.steps.append(_Step(part.version, self.open, self.is_read, part.facts.get("decays", {})))
                self.open = {}

    def versions(self) -> set[int]:
        """The versions that are exact."""
        return {step.version for step in self.steps if step.exact}

    def decays_at(self, version: int) -> dict[str, DayDecay]:
        """The decays of a version, by table. Raises InvalidShardCall."""
        found = next(step.decays for step in self.steps if step.version == version)
        try:
            return {name: DayDecay.told(told) for name, told in found.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidShardCall(f"statistics of rows at version {version}: {error}") from error

    def take(self, upto: int) -> list[Mapping[str, list[TableDelta]]]:
        """Take all that was sent up to a version, oldest first."""
        chosen = [step.tables for step in self.steps if step.version <= upto]
        self.steps = [step for step in self.steps if step.version > upto]
        base, self.base = self.base, {}
        return [base, *chosen]


@dataclass(slots=True)
class _Rank0Parts:
    """Messages of rank 0 that were not returned yet."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    onnx: bytes | None = None
    versions: dict[int, tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]] = field(default_factory=dict)
    """By version: tensors and facts."""

    def hear(self, part: FeedMessage) -> None:
        """Take a part of rank 0's stream, in order."""
        match part.kind:
            case pb.FeedPart.BEGIN:
                self.facts, self.onnx = part.facts, part.onnx or self.onnx
            case pb.FeedPart.VERSION:
                self.versions[part.version] = part.tensors, part.facts
                if len(self.versions) > MAX_AHEAD:  # shards still send their bases: old versions are not needed
                    del self.versions[min(self.versions)]

    def take(self, version: int, given: int) -> tuple[Mapping[str, NDArray[Any]], float | None, EventTimes | None]:
        """Take the tensors, the newest event time, and event times since the version `given`; drop older versions."""
        tensors, facts = self.versions[version]
        sent = [facts.get("event_times") for other, (_, facts) in self.versions.items() if given < other <= version]
        times = EventTimes.joined([EventTimes.of_message(each) for each in sent if each]) if any(sent) else None
        self.versions = {other: sent for other, sent in self.versions.items() if other > version}
        return tensors, facts.get("event_time_s"), times


class _Following:
    """The streams of one generation of workers, each read by a thread, until one fails."""

    def __init__(self, where: FeedAddress, since: int, generation: int) -> None:
        self.where = where
        self.rank0 = _Rank0Parts()
        self.shards = [_ShardParts() for _ in where.shards]
        self.turn = threading.Condition()
        self.error: HeadraceError | None = None
        self.given = 0
        """Versions up to this one are not returned any more."""
        self._since, self._generation = since, generation
        addresses = {RANK0: where.rank0} | dict(enumerate(where.shards))
        self._streams = {
            number: FeedStream("rank 0", address, where.secret, where.peer(None))
            if number == RANK0
            else FeedStream(f"shard {number}", address, where.secret, where.peer(number))
            for number, address in addresses.items()
        }
        self._threads = [threading.Thread(target=self._read, args=(RANK0,), name="feed", daemon=True)]
        self._threads[0].start()

    def _follow_shards(self) -> None:
        """Subscribe to the shards. Called after rank 0 accepted us: shards send only while rank 0 has a subscriber."""
        for number in range(len(self.shards)):
            self._threads.append(threading.Thread(target=self._read, args=(number,), name="feed", daemon=True))
            self._threads[-1].start()

    def _read(self, number: int) -> None:
        parts = self.rank0 if number == RANK0 else self.shards[number]
        try:
            for part in self._streams[number].parts(self._since, self._generation):
                with self.turn:
                    self.turn.wait_for(self._may_read)
                    parts.hear(part)
                    self.turn.notify_all()
                if part.kind == pb.FeedPart.READ:
                    self._heard_read(number)
        except HeadraceError as error:
            with self.turn:
                self.error = self.error or error
                self.turn.notify_all()

    def _may_read(self) -> bool:
        return len(self.rank0.versions) < MAX_AHEAD or self.newest() is None or self.error is not None

    def _heard_read(self, number: int) -> None:
        if number == RANK0:
            self._follow_shards()
        elif all(shard.is_read for shard in self.shards):
            self._streams[RANK0].poke(Deadline.after(POKE_S))

    @property
    def is_mixed(self) -> bool:
        """Whether some shards send everything and others only what changed."""
        return {shard.whole for shard in self.shards} >= {True, False}

    @property
    def is_near(self) -> bool:
        """Whether rank 0 has sent a newer version."""
        return max(self.rank0.versions, default=0) > self.given and bool(self.rank0.facts)

    def newest(self) -> int | None:
        """The newest version that rank 0 and all shards have sent; None where none is new."""
        common = set(self.rank0.versions)
        for shard in self.shards:
            common &= shard.versions()
        newest = max(common, default=0)
        return newest if newest > self.given and self.rank0.facts else None

    def close(self) -> None:
        """End the streams. Their threads end soon after."""
        with self.turn:
            self.error = self.error or Unavailable("the feed is closed")
            self.turn.notify_all()
        for stream in self._streams.values():
            stream.close()


class FeedUpdates:
    """Subscribes at the first call of `next`."""

    def __init__(self, find: Find, held: FeedPosition | None = None) -> None:
        """`held`: the version that the caller has; the first update may then be what changed since."""
        self._find, self.held = find, held
        """The version returned last."""
        self._following: _Following | None = None
        self._told: tuple[Mapping[str, Any] | None, bytes | None] = None, None
        """Model and ONNX returned last."""
        self._from_nothing = False
        self._lock = threading.Lock()
        self._closed = False

    def next(self, deadline: Deadline) -> ReplicaUpdate | None:
        """Returns the newest complete version, with all changes since the one returned last."""
        while True:
            following = self._following or self._subscribe(deadline)
            with following.turn:
                following.turn.wait_for(
                    lambda f=following: f.newest() or f.error or f.is_mixed,  # type: ignore[misc]
                    deadline.left_s(),
                )
                if (
                    following.error is not None and following.is_near
                ):  # the parts of a job's last version arrive one by one
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

    def _given(self, following: _Following, version: int) -> ReplicaUpdate:
        """Call with `following.turn` held."""
        shards, rank0 = following.shards, following.rank0
        whole = any(shard.whole for shard in shards)
        decays = shards[0].decays_at(version)  # all shards have the same days and rates
        sent = [shard.take(version) for shard in shards]
        tensors, event_time_s, event_times = rank0.take(version, following.given)
        following.turn.notify_all()
        model, onnx = rank0.facts["model"], rank0.onnx
        told_model, told_onnx = (None, None) if whole else self._told
        self._told = model, onnx
        for shard in shards:
            shard.whole = False
        where = following.where
        self.held = FeedPosition(where.timeline, where.generation, version)
        following.given = version
        return ReplicaUpdate(
            job=where.job,
            timeline=where.timeline,
            version=version,
            whole=whole,
            tables=dict(_tables(model["tables"], sent, whole=whole)),
            dense=tensors,
            event_time_s=event_time_s,
            memories=frozenset(rank0.facts.get("memories", ())),
            items=tuple(map(str, rank0.facts.get("catalogue", ()))) or None,
            decays=decays,
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
        with self._lock:
            self._closed, following = True, self._following
        if following is not None:
            following.close()


def _tables(
    names: Mapping[str, Any], sent: list[list[Mapping[str, list[TableDelta]]]], *, whole: bool
) -> Iterator[tuple[str, TableUpdate]]:
    """The updates of every table, merged over its shards."""
    for name in sorted({*names, *(table for shard in sent for step in shard for table in step)}):
        parts = [merge_steps([step.get(name, []) for step in shard], whole=whole) for shard in sent]
        yield name, TableUpdate.joined(parts)


PAUSES = Backoff((10.0, 30.0, 60.0, 120.0, 300.0, 600.0), endless=True)
"""How long exports are followed before the feed is tried again: longer each time that it was in vain."""
ANY_GENERATION = 0
"""Generation of a committed version: the workers that follow do not make it again."""

log = logging.getLogger(__name__)


class PositionedFeed(ReplicaUpdates, Protocol):
    """A feed that knows its last version: see FeedUpdates."""

    held: FeedPosition | None


class FeedWithExports:
    """The live feed, and exports for a replica that is too slow for it: a ReplicaSource.

    A feed disconnects a replica for which too much waits. To subscribe again at once would often end in the same way:
    the job changes more than the link carries. An export holds each changed row once and waits for nobody. So the
    replica takes the newest export instead, then newer ones, and tries the feed again after a while, from the version
    that it has.
    """

    def __init__(
        self,
        open_feed: Callable[[FeedPosition | None], PositionedFeed],
        exports: ExportUpdates,
        pauses: Backoff = PAUSES,
    ) -> None:
        """`open_feed` follows the feed from a version on; None: from nothing."""
        self._open_feed, self._exports, self._pauses = open_feed, exports, pauses
        self._lock, self._closed = threading.Lock(), False
        self._held: FeedPosition | None = None
        """The version returned last, where the feed can go on from it."""
        self._newest: ServedVersion | None = None
        """The version returned last."""
        self._num_drops = 0
        """How often in a row the feed was tried in vain."""
        self._pause = Deadline.after(0)
        self._feed: PositionedFeed | None = open_feed(None)
        """None: exports are followed."""

    def next(self, deadline: Deadline) -> ReplicaUpdate | None:
        """Raises FeedTooSlow once when the feed has disconnected the replica."""
        if self._feed is None:
            if (update := self._from_exports(deadline)) is not None or not self._pause.passed():
                return update
            self._follow_feed()
        return self._from_feed(deadline)

    def _from_feed(self, deadline: Deadline) -> ReplicaUpdate | None:
        feed = self._feed
        assert feed is not None, "followed"
        try:
            update = feed.next(deadline)
        except FeedTooSlow:
            self._follow_exports()
            raise
        if update is not None:
            self._num_drops, self._held = 0, feed.held
            self._newest = ServedVersion(update.job, update.timeline, update.version)
        return update

    def _from_exports(self, deadline: Deadline) -> ReplicaUpdate | None:
        """The newest export, if it is newer than the version returned last."""
        try:
            update = self._exports.next(Deadline.after(min(deadline.left_s(), self._pause.left_s())))
        except Unavailable:
            if self._pause.passed():
                return None
            raise
        if update is not None:
            self._newest = ServedVersion(update.job, update.timeline, update.version)
            self._held = FeedPosition(update.timeline, ANY_GENERATION, update.version) if update.exact else None
        return update

    def _follow_exports(self) -> None:
        """The changes since the last export are not known any more, so the next one is read with its whole chain."""
        self._num_drops += 1
        pause_s = self._pauses.pause_s(self._num_drops)
        self._pause = Deadline.after(pause_s)
        log.warning("too slow for the live feed: following the exports, and the feed again in %.0f s", pause_s)
        self._exports.resume(None)
        self._exports.newer_than = self._newest
        with self._lock:
            feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def _follow_feed(self) -> None:
        log.info("following the live feed again")
        with self._lock:
            self._feed = self._open_feed(self._held)
            if self._closed:
                self._feed.close()

    def resume(self, served: ServedVersion | None) -> None:
        """A feed begins with a whole update."""
        if self._feed is None:
            self._exports.resume(served)
            self._held = None
            return
        self._feed.close()
        self._held = None
        self._follow_feed()

    def close(self) -> None:
        with self._lock:
            self._closed, feed = True, self._feed
        self._exports.close()
        if feed is not None:
            feed.close()
