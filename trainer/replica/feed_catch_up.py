"""The live feed, and exports for a replica that is too slow for it.

A feed disconnects a replica for which too much waits. To subscribe again at once would often end in the same way: the
job changes more than the link carries. An export holds each changed row once and waits for nobody. So the replica takes
the newest export instead, then newer ones, and tries the feed again after a while, from the version that it has.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.pserver.feed.feed_client import FeedTooSlow
from headrace.retry import Backoff
from headrace.trainer.replica.export_updates import ExportUpdates
from headrace.trainer.replica.feed_updates import FeedPosition
from headrace.trainer.replica.kept_versions import ServedVersion
from headrace.trainer.replica.updates import ReplicaUpdate, ReplicaUpdates

PAUSES = Backoff((10.0, 30.0, 60.0, 120.0, 300.0, 600.0), endless=True)
"""How long exports are followed before the feed is tried again: longer each time that it was in vain."""
ANY_GENERATION = 0
"""Generation of a committed version: the workers that follow do not make it again."""

log = logging.getLogger(__name__)


class PositionedFeed(ReplicaUpdates, Protocol):
    """A feed that knows its last version: see trainer.replica.feed_updates.FeedUpdates."""

    held: FeedPosition | None


class FeedWithExports:
    """See module docstring, and trainer.replica.update_loop.ReplicaSource."""

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
        """See ReplicaUpdates. Raises FeedTooSlow once when the feed has disconnected the replica."""
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
        """See ReplicaSource: a feed begins with a whole update."""
        if self._feed is None:
            self._exports.resume(served)
            self._held = None
            return
        self._feed.close()
        self._held = None
        self._follow_feed()

    def close(self) -> None:
        """See ReplicaUpdates."""
        with self._lock:
            self._closed, feed = True, self._feed
        self._exports.close()
        if feed is not None:
            feed.close()
