"""The duties of a rank beside the passes: everything is on rank 0, nothing on the others.

Every rank makes the same collective calls in the same order (trainer.train.loop). Rank 0 plans, commits, publishes and
exports between them, and tells the others by the messages that these calls carry.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from headrace.trainer.checkpoint.committer import Committer
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.exports.coordinator import ExportCoordinator
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.metrics.found_items import Searched
from headrace.trainer.rank0.closes import CloseDuties
from headrace.trainer.rank0.parts import RankZero
from headrace.trainer.status.time_spent import LoopPart
from headrace.trainer.train.live_index import LiveIndex
from headrace.trainer.train.model_feed import ModelFeed
from headrace.trainer.train.rank_messages import BeginPass, Finish, Message, News, NextPass, Wait
from headrace.trainer.train.trainer_setup import Setup

IDLE_WAIT_S = 0.2
"""Longest time rank 0 waits for a plan before it tells the other ranks that there is none yet."""
FINISH_WAIT_S = 0.02
"""Pause between two checks of the last commit."""


class Duties:
    """Those of a rank other than 0: none."""

    @property
    def replaying(self) -> bool:
        """Whether the passes are those of the log, made again."""
        return False

    @property
    def resizes(self) -> bool:
        """Whether the job goes on with other numbers of workers: this generation ends, the next trains on."""
        return False

    def drain(self) -> None:
        """Request an end after the current pass. May be called on any thread."""

    def request_plan(self) -> None:
        """Request the pass after the last known one."""

    def poll_plan(self, wait_s: float, *, known: bool) -> News | None:
        """The message about the next pass; None while there is none, or where it is `known` already."""
        return None

    def next_action(self, plan: PassPlan | None, *, ended: bool) -> Message | None:
        """The next action of all ranks: begin the known pass, learn of one, commit, wait, or end.

        `plan`: the next pass, if it is known; `ended`: whether the stream has no more. At a drain, a pass that is known
        but has not begun stays in the log. It is the first pass of the next run.
        """
        return None

    def commit_is_due(self, version: int, *, ended: bool = False) -> bool:
        """Whether `version` is to be committed now; at the end, whatever is not committed yet."""
        return False

    def commit(self, dense: Mapping[str, Tensor]) -> None:
        """Begin a commit with the dense part, which all ranks have brought together."""

    def publish(self, ranks: Ranks, dense: DenseStrategy) -> None:
        """Publish the version to subscribers. This comes first because replicas wait for it.

        Collective where rank 0 lacks parts of the model: all ranks bring them if subscribers wait for it.
        """
        if dense.gathers and ranks.broadcast(None)["due"]:
            dense.gather()

    def export(self) -> None:
        """Process the results of exports."""

    def index_at(self, number: int) -> Searched | None:
        """The index of items before pass `number`, which is searched for its clicks; None where there is none."""
        return None


@dataclass(frozen=True)
class Written:
    """The parts of rank 0 that write outside the log; none of them in a rerun."""

    committer: Committer | None = None
    exporting: ExportCoordinator | None = None
    feed: ModelFeed | None = None


class RankZeroDuties(Duties):
    """Those of rank 0."""

    def __init__(
        self, setup: Setup, rank0: RankZero, closes: CloseDuties, written: Written, live: LiveIndex | None
    ) -> None:
        """`live`: makes the index of items of each pass, where its recall is measured."""
        self._live = live
        self._rank0, self._progress, self._policy, self._closes = rank0, setup.progress, setup.policy, closes
        self._world, self._spent = setup.ranks.world, setup.progress.spent
        self._committer, self._exporting, self._feed = written.committer, written.exporting, written.feed
        self._draining = threading.Event()

    def index_at(self, number: int) -> Searched | None:
        return None if self._live is None else self._live.at(number)

    @property
    def replaying(self) -> bool:
        return self._rank0.replay_log.replaying

    @property
    def resizes(self) -> bool:
        if not self._rank0.operator.resizes:
            return False
        return not self._draining.is_set() or (self._committer is not None and self._committer.has_handed_over)

    @property
    def _stopping(self) -> bool:
        """Whether the loop ends after the present pass."""
        return self._draining.is_set() or self.resizes

    def drain(self) -> None:
        self._draining.set()

    # -- plans

    def request_plan(self) -> None:
        progress = self._progress
        self._rank0.replay_log.request(progress.last_planned + 1, progress.planned_positions, progress.num_planned)

    def poll_plan(self, wait_s: float, *, known: bool) -> News | None:
        answer = None if known else self._rank0.replay_log.take(wait_s)
        return NextPass(answer) if isinstance(answer, PassPlan) else answer

    def next_action(self, plan: PassPlan | None, *, ended: bool) -> Message:
        if self._stopping or (ended and plan is None):
            return self._last_action()
        if plan is not None:
            return BeginPass() if self._policy.meets_in_steps else NextPass(plan)
        self._publish()
        if self.commit_is_due(self._progress.version):
            return Wait(commit=True)
        self.export()
        with self._spent.part(LoopPart.EVENTS):
            news = self.poll_plan(IDLE_WAIT_S, known=False)
        if news is not None:
            return news
        self._progress.idle(self._rank0.replay_log.paused)
        return Wait()

    def _last_action(self) -> Message:
        """The next action at the end: a pass that operations wait for, the last commit and exports, or the end."""
        if not self._stopping and self._rank0.operator.wants_pass(ended=True):
            progress = self._progress
            carried = self._rank0.replay_log.carry(progress.last_planned + 1, self._world, progress.learning)
            if carried is not None:
                return NextPass(carried)
        if self.commit_is_due(self._progress.version, ended=True):
            return Wait(commit=True)
        if self._all_finished():
            return Finish()
        with self._spent.part(LoopPart.COMMIT):
            time.sleep(FINISH_WAIT_S)
        return Wait()

    def _all_finished(self) -> bool:
        """Whether the last version is committed and all exports that must finish have finished."""
        if self._committer is not None and not self._committer.finish(self._progress.version):
            return False
        no_more = self._stopping or self._rank0.planner is None
        return self._exporting is None or self._exporting.finish(stopping=no_more)

    # -- between passes

    def commit_is_due(self, version: int, *, ended: bool = False) -> bool:
        if self._committer is None:
            return False
        with self._spent.part(LoopPart.COMMIT):
            if self._rank0.resizing is not None:
                self._rank0.resizing.between(version)
            return self._committer.due(version, full=self._closes.memory_waits, ended=ended)

    def commit(self, dense: Mapping[str, Tensor]) -> None:
        if self._committer is not None:
            over = self.resizes and self._rank0.hands_over
            self._committer.begin(self._progress.version, dense, hand_over=over)

    def publish(self, ranks: Ranks, dense: DenseStrategy) -> None:
        due = self._feed is not None and self._feed.due(self._progress.version)
        if dense.gathers and ranks.broadcast({"due": due})["due"]:
            dense.gather()
        self._publish()

    def _publish(self) -> None:
        """If the whole model is there."""
        if self._feed is not None:
            with self._spent.part(LoopPart.COMMIT):
                self._feed.tick(self._progress.version)

    def export(self) -> None:
        if self._exporting is not None:
            with self._spent.part(LoopPart.COMMIT):
                self._exporting.tick()
