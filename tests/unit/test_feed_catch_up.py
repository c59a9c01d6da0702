"""A replica that is too slow for the live feed takes exports, and goes on with the feed from there."""

import threading

import numpy as np
import pytest

from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.pserver.feed.feed_client import FeedTooSlow
from headrace.retry import Backoff
from headrace.trainer.replica import update_loop
from headrace.trainer.replica.export_updates import ExportUpdates
from headrace.trainer.replica.feed_updates import ANY_GENERATION, FeedPosition, FeedWithExports
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState
from headrace.trainer.replica.serving_model import golden_inputs
from headrace.trainer.replica.update_loop import UpdateLoop
from tests.fakes.served import Job

NOW, SOON_S = 0.05, 20.0


class Feed:
    """Gives what it is told to: updates, errors, or nothing."""

    def __init__(self, held):
        self.began, self.held, self.script, self.closed = held, held, [], False

    def next(self, deadline):
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        if step is not None:
            self.held = FeedPosition(step.timeline, 7, step.version)
        return step

    def close(self):
        self.closed = True


class World:
    def __init__(self, folder, pause_s=0.0):
        self.job, self.feeds = Job(folder / "exports"), []
        self.exports = ExportUpdates(str(self.job.folder), folder / "scratch", poll_s=0.01)
        self.source = FeedWithExports(self._open, self.exports, Backoff((pause_s, 2 * pause_s), endless=True))
        self.state = ReplicaState(3, 1 << 30)

    def _open(self, held):
        self.feeds.append(Feed(held))
        return self.feeds[-1]

    def tell(self, *script):
        self.feeds[-1].script += script

    def drop(self):
        self.tell(FeedTooSlow("too slow"))
        with pytest.raises(FeedTooSlow):
            self.source.next(Deadline.after(NOW))
        assert self.feeds[-1].closed

    def apply(self):
        """The next update, served."""
        update = self.source.next(Deadline.after(NOW))
        if update is not None:
            self.state.apply(update)
        return update

    def is_exact(self):
        """Whether the job's own rows are served."""
        model = self.state.model()
        _, found = self.state.predict(model, golden_inputs(model, self.job.samples))
        return np.abs(found["ctr"] - self.job.predictions()).max() < 1e-5


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_the_feed_is_followed_while_it_can_be(world):
    world.job.export(1)
    world.tell(world.job.update(2, whole=True), world.job.update(3, forget=2))
    assert [world.apply().version, world.apply().version] == [2, 3] and world.apply() is None
    assert world.is_exact() and len(world.feeds) == 1


def test_a_replica_that_is_dropped_takes_the_newest_export_and_goes_on_with_the_feed_from_it(world):
    world.tell(world.job.update(2, whole=True))
    world.apply()
    world.job.export(4, base=True, forget=1)
    world.job.export(5, forget=2)
    world.drop()
    update = world.apply()
    assert (update.version, update.whole) == (5, True) and world.is_exact()
    assert world.apply() is None and world.feeds[-1].began == FeedPosition("t1", ANY_GENERATION, 5)
    world.tell(world.job.update(6, forget=3))
    assert world.apply().version == 6 and world.is_exact()


def test_an_export_of_a_version_that_it_has_is_not_fetched(world):
    world.job.export(2)
    world.tell(world.job.update(3, whole=True))
    world.apply()
    world.drop()
    assert world.apply() is None  # and the feed again
    assert world.feeds[-1].began == FeedPosition("t1", 7, 3) and len(world.feeds) == 2


def test_exports_are_followed_until_the_pause_is_over_longer_each_time(tmp_path):
    world = World(tmp_path, pause_s=300.0)
    world.tell(world.job.update(2, whole=True))
    world.apply()
    world.job.export(3)
    world.drop()
    assert world.apply().version == 3
    world.job.export(4)
    second = world.apply()
    assert (second.version, second.whole, len(world.feeds)) == (4, False, 1)
    world.source._pause = Deadline.after(0)
    assert world.apply() is None and len(world.feeds) == 2
    world.drop()
    assert 300 < world.source._pause.left_s() <= 600
    world.source._pause = Deadline.after(0)
    world.apply()
    world.tell(world.job.update(5))
    world.apply()
    world.drop()
    assert world.source._pause.left_s() <= 300  # it was not in vain


@pytest.mark.parametrize("facts", [{"dtype": "float16"}, {"thresholds": {"base_threshold": 0.5}}], ids=["short", "cut"])
def test_the_feed_begins_anew_after_an_export_that_is_not_exact(world, facts):
    world.tell(world.job.update(2, whole=True))
    world.apply()
    world.job.export(3, base=True, **facts)
    world.drop()
    assert world.apply().version == 3 and not world.source._held
    world.apply()
    assert world.feeds[-1].began is None


def test_without_any_export_the_feed_is_tried_again_after_the_pause(tmp_path):
    world = World(tmp_path, pause_s=300.0)
    world.drop()
    with pytest.raises(Unavailable, match=r"has no current\.json"):
        world.apply()
    world.source._pause = Deadline.after(0)
    assert world.apply() is None and len(world.feeds) == 2


def test_a_refused_update_of_either_source_is_followed_by_a_whole_one(world):
    world.tell(world.job.update(2, whole=True))
    world.apply()
    world.source.resume(None)
    assert [feed.began for feed in world.feeds] == [None, None] and world.feeds[0].closed
    world.job.export(3)
    world.drop()
    world.source._pause = Deadline.after(10)
    update = world.source.next(Deadline.after(NOW))
    world.source.resume(None)
    assert update.whole and not world.source._held


def test_drops_are_counted_and_the_replica_goes_on(world, monkeypatch):
    monkeypatch.setattr(update_loop, "BACKOFF", Backoff((0.01,), endless=True))
    figures, stopping = ReplicaMetrics(world.state), threading.Event()
    world.job.export(3)
    world.tell(FeedTooSlow("too slow"))
    thread = threading.Thread(target=UpdateLoop(world.source, world.state, figures).run, args=(stopping,))
    thread.start()
    try:
        until = Deadline.after(SOON_S)
        while world.state.served is None:
            until.check("an export")
            stopping.wait(0.01)
    finally:
        stopping.set()
        thread.join()
    assert world.is_exact() and b"headrace_replica_dropped_total 1.0" in figures.exposition()[0]


def test_a_closed_source_opens_nothing_that_stays_open(world):
    world.source.close()
    assert world.feeds[0].closed
    with pytest.raises(Unavailable, match="closed"):
        world.source._pause = Deadline.after(SOON_S)
        world.source._feed = None
        world.source.next(Deadline.after(NOW))
    world.source._follow_feed()
    assert world.feeds[-1].closed
