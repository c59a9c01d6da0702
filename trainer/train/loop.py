"""The life of a pass on every rank: plan, read ahead, train, close.

Every rank makes the same collective calls in the same order. Rank 0 decides: it plans and leads commits, and it
broadcasts its decisions. trainer.train.assembly builds the parts; this module only composes them.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.pserver.protocol.shards import Gradients
from headrace.seeds import derive
from headrace.timeline import Span, span, stepped
from headrace.trainer.features.micro_batches import micro_batches
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import StreamEnded
from headrace.trainer.status.step_clock import WaitsFor
from headrace.trainer.status.time_spent import LoopPart
from headrace.trainer.train.exchanges import StepInput
from headrace.trainer.train.first_pass import read_ahead
from headrace.trainer.train.infer_first import announced_ahead
from headrace.trainer.train.learn_batch import learn_batch
from headrace.trainer.train.step_facts import StepFacts
from headrace.trainer.train.step_weights import own_figures, step_weights
from headrace.trainer.train.trainer_parts import TrainerParts

IDLE_WAIT_S = 0.2
"""Longest time rank 0 waits for a plan before it tells the other ranks that there is none yet."""
AHEAD_WAIT_S = 0.02
"""Longest time all ranks wait for the plan of the next pass before they train this one; it is short for events that
are there already."""
FINISH_WAIT_S = 0.02
"""Pause between two checks of the last commit."""

log = logging.getLogger(__name__)


class NonFinite(HeadraceError):
    """A loss or gradient is not finite, and `on_nonfinite` is "fail"."""


class TrainLoop:
    """See module docstring."""

    def __init__(self, parts: TrainerParts, seed: int, reading: int | None = None) -> None:
        """`reading`: the first pass, if it is being read already."""
        self._parts, self._seed, self._reading = parts, seed, reading
        self._spent = parts.progress.spent
        self._next: PassPlan | None = None
        self._end = False
        self._draining = threading.Event()

    def drain(self) -> None:
        """Request an end after the current pass. May be called on any thread."""
        self._draining.set()

    @property
    def resizes(self) -> bool:
        """Rank 0: whether the job goes on with other numbers of workers: this generation ends, the next trains on."""
        rank0, committer = self._parts.rank0, self._parts.committer
        if rank0 is None or not rank0.operator.resizes:
            return False
        return not self._draining.is_set() or (committer is not None and committer.has_handed_over)

    @property
    def _stopping(self) -> bool:
        """Rank 0: whether the loop ends after the present pass."""
        return self._draining.is_set() or self.resizes

    def run(self) -> None:
        """Train until the stream ends, a drain is requested or the job is resized, then commit the last version.

        At the end of the stream, operations that wait for a close get a pass without events; at a drain they wait.
        """
        parts, progress = self._parts, self._parts.progress
        self._request_plan()
        while (plan := self._wait_for_plan()) is not None:
            replaying = parts.rank0 is not None and parts.rank0.chronicle.replaying
            progress.opened(plan, "replaying" if replaying else "training")
            self._request_plan()
            self._read_ahead()
            self._train(plan)
            progress.step.begin(WaitsFor.CLOSE)
            with span(Span.CLOSE):
                committed = parts.closer.close(plan, self._commit_is_due)
            progress.step.end()
            self._publish()
            if committed:
                self._commit()
            self._export()
        progress.ended(resizes=self.resizes)

    # -- plans

    def _request_plan(self) -> None:
        """Rank 0: request the pass after the last known one."""
        rank0, progress = self._parts.rank0, self._parts.progress
        if rank0 is not None and not self._end:
            rank0.chronicle.request(progress.last_planned + 1, progress.planned_positions, progress.num_planned)

    def _poll_plan(self, wait_s: float) -> dict[str, object] | None:
        """Rank 0: the message about the next pass; None while there is none."""
        rank0 = self._parts.rank0
        if rank0 is None or self._next is not None or self._end:
            return None
        answer = rank0.chronicle.take(wait_s)
        if isinstance(answer, StreamEnded):
            return {"end": True}
        return None if answer is None else {"plan": answer.message()}

    def _handle_news(self, message: Mapping[str, object]) -> None:
        """All ranks: handle a message of rank 0. Start to read the next pass, or note that there is none."""
        if "end" in message:
            self._end = True
            return
        plan = PassPlan.of_message(message["plan"])  # type: ignore[arg-type]
        self._next = plan
        self._parts.progress.planned(plan)
        if plan.number != self._reading:
            parts = self._parts
            read_ahead(plan, parts.ranks, parts.maker, parts.loader, one_reader=parts.dense.one_reader)

    def _read_ahead(self) -> None:
        """Where ranks hear no news in steps: begin to read the next pass beside this one, if it is known soon."""
        if self._parts.policy.meets_in_steps:
            return
        news = (self._poll_plan(AHEAD_WAIT_S) or {}) if self._parts.ranks.rank == 0 else None
        with span(Span.WAIT):
            told = self._parts.ranks.broadcast(news)
        if told:
            self._handle_news(told)

    def _wait_for_plan(self) -> PassPlan | None:
        """The next pass to train, or None at the end."""
        ranks = self._parts.ranks
        clock = self._parts.progress.step
        while True:
            action = self._next_action() if ranks.rank == 0 else None
            clock.begin(WaitsFor.TRAINERS)
            with span(Span.WAIT):
                message = ranks.broadcast(action)
            clock.end()
            if "over" in message:
                return None
            if self._next is None and ("plan" in message or "end" in message):
                self._handle_news(message)
            if "commit" in message:
                self._commit()
            if self._next is not None and "wait" not in message:
                plan, self._next = self._next, None
                return plan

    def _next_action(self) -> dict[str, object]:
        """Rank 0: the next action of all ranks: begin the known pass, learn of one, commit, wait, or end.

        At a drain, a pass that is known but has not begun stays in the log. It is the first pass of the next run.
        """
        parts = self._parts
        if self._stopping or (self._end and self._next is None):
            if not self._stopping and (plan := self._pass_without_events()) is not None:
                return {"plan": plan.message()}
            if self._commit_is_due(parts.progress.version, ended=True):
                return {"wait": True, "commit": True}
            if self._all_finished():
                return {"over": True}
            with self._spent.part(LoopPart.COMMIT):
                time.sleep(FINISH_WAIT_S)
            return {"wait": True}
        if self._next is not None:
            return {"go": True} if parts.policy.meets_in_steps else {"plan": self._next.message()}
        self._publish()
        if self._commit_is_due(parts.progress.version):
            return {"wait": True, "commit": True}
        self._export()
        with self._spent.part(LoopPart.EVENTS):
            known = self._poll_plan(IDLE_WAIT_S)
        if known is not None:
            return known
        parts.progress.idle(parts.rank0 is not None and parts.rank0.chronicle.paused)
        return {"wait": True}

    def _pass_without_events(self) -> PassPlan | None:
        """Rank 0: at the end of the stream, a pass without events if an operation waits for one."""
        parts, progress = self._parts, self._parts.progress
        if parts.rank0 is None or not parts.rank0.operator.wants_pass(ended=True):
            return None
        return parts.rank0.chronicle.carry(progress.last_planned + 1, parts.ranks.world, progress.learning)

    def _all_finished(self) -> bool:
        """Rank 0: whether the last version is committed and all exports that must finish have finished."""
        parts = self._parts
        if parts.committer is not None and not parts.committer.finish(parts.progress.version):
            return False
        no_more = self._stopping or parts.rank0 is None or parts.rank0.planner is None
        return parts.exporting is None or parts.exporting.finish(stopping=no_more)

    # -- between passes

    def _commit_is_due(self, version: int, *, ended: bool = False) -> bool:
        """Rank 0: whether `version` is to be committed now; at the end, whatever is not committed yet."""
        parts = self._parts
        if parts.committer is None:
            return False
        with self._spent.part(LoopPart.COMMIT):
            if parts.rank0 is not None and parts.rank0.resizing is not None:
                parts.rank0.resizing.between(version)
            return parts.committer.due(version, full=parts.closer.memory_waits, ended=ended)

    def _commit(self) -> None:
        """All ranks: bring the dense part together; rank 0 begins a commit with it."""
        parts = self._parts
        with self._spent.part(LoopPart.COMMIT), span(Span.COMMIT):
            dense = parts.dense.consolidate()
            if parts.committer is not None:
                over = self.resizes and parts.rank0 is not None and parts.rank0.hands_over
                parts.committer.begin(parts.progress.version, dense, hand_over=over)

    def _publish(self) -> None:
        """Rank 0: publish the version to subscribers. This comes first because replicas wait for it."""
        if self._parts.feed is not None:
            with self._spent.part(LoopPart.COMMIT):
                self._parts.feed.tick(self._parts.progress.version)

    def _export(self) -> None:
        """Rank 0: process the results of exports."""
        if self._parts.exporting is not None:
            with self._spent.part(LoopPart.COMMIT):
                self._parts.exporting.tick()

    # -- steps

    def _train(self, plan: PassPlan) -> None:
        """Run every step of a pass on this rank, with empty steps while other ranks have more batches."""
        parts, clock = self._parts, self._parts.progress.step
        clock.begin(WaitsFor.SHARDS)
        parts.shards.open_pass(plan.number, Deadline.after(parts.train.step_deadline))
        clock.at(WaitsFor.PIPE)
        if parts.gated is not None:
            parts.gated.opened(plan.number)
        batches = self._batches(plan)
        parts.stepper.open_pass(plan.number)
        parts.rate.open_pass(plan.number)
        torch.manual_seed(derive(self._seed, "pass", plan.number, parts.ranks.rank))
        at, step = parts.exchanges.begin(batches, learn=plan.learn), 0
        common = self._agree(at.batch)
        while common.more:
            with span(Span.STEP):
                at, common = self._learn(step, at, common) if plan.learn else self._predict(step, at, common)
            stepped()
            step += 1
        clock.at(WaitsFor.SHARDS)
        parts.exchanges.finish()
        self._settle()
        parts.dense.flush()

    def _settle(self) -> None:
        """Wait for the other ranks, as far as the mode needs it."""
        self._parts.progress.step.at(WaitsFor.TRAINERS)
        with span(Span.WAIT):
            self._parts.policy.settle(self._parts.ranks)

    def _batches(self, plan: PassPlan) -> Iterator[TrainingBatch]:
        """The batches of a pass. With `infer_first`, all are predicted before the first one is learnt."""
        parts = self._parts
        batches = self._spent.loaded(parts.loader.batches(plan.number), parts.loader.starved_s)
        if parts.infer_first is None:
            return batches
        if not plan.learn:
            return announced_ahead(parts.shards, batches, learn=False)
        learnt = parts.infer_first.first(batches, self._agree)
        self._settle()
        return learnt

    def _agree(self, batch: TrainingBatch | None, *, good: bool = True) -> StepFacts:
        """The figures of the next step. The same message carries the next plan as soon as rank 0 has it.

        `good`: whether this rank's part of the present step is finite.
        """
        parts, tasks = self._parts, self._parts.tasks
        parts.progress.step.begin(WaitsFor.TRAINERS)
        mine = replace(own_figures(batch, tasks, average=parts.average), num_bad=int(not good))
        with span(Span.WAIT):
            figures, news = parts.policy.agree(parts.ranks, mine, self._poll_plan(0.0))
        if news is not None:
            self._handle_news(news)
        weight = step_weights(figures, tasks, average=parts.average)
        return StepFacts(weight, figures.num_samples, figures.num_batches, figures.num_bad)

    def _learn(self, step: int, at: StepInput, common: StepFacts) -> tuple[StepInput, StepFacts]:
        """One step: predict, measure, learn. Returns the next one."""
        parts, clock, batch = self._parts, self._parts.progress.step, at.batch
        parts.exchanges.ask_early(step, batch)
        clock.at(WaitsFor.MODEL)
        parts.rate.step(common.num_samples)
        parts.stepper.open_step(all_have=common.num_batches == parts.ranks.world)
        parts.dense.clear()
        parts.dense.buffers.save()
        gradients: dict[str, Gradients] | None = None
        finite = True
        if batch is None:
            parts.stepper.follow(common.weight, common.num_samples)
        else:
            gradients, finite = learn_batch(parts, batch, at.rows, step, common.weight)
        clock.at(WaitsFor.TRAINERS)
        loss_scale = parts.stepper.scale.value
        share = 0.0 if batch is None else len(batch.samples) / max(1, common.num_samples)
        parts.dense.note(share, parts.stepper.take_loss())
        good = parts.dense.finite() and finite
        following = self._agree(parts.exchanges.following(), good=good)
        if not self._all_finite(step, following.num_bad):
            parts.dense.buffers.restore()
            return parts.exchanges.push(step, batch, None, common.num_samples), following
        if batch is not None or parts.dense.communicates(step):
            parts.dense.after_backward(step, loss_scale)
        if gradients is not None:
            gradients |= parts.dense.push()
        coming = parts.exchanges.push(step, batch, gradients, common.num_samples)  # beside the sums over ranks
        clock.at(WaitsFor.TRAINERS)
        parts.dense.wait()
        with self._spent.part(LoopPart.BACKWARD), span(Span.BACKWARD):
            parts.dense.step()
        return coming, following

    def _predict(self, step: int, at: StepInput, common: StepFacts) -> tuple[StepInput, StepFacts]:
        """One step of a pass that is only predicted. Returns the next one."""
        parts = self._parts
        parts.progress.step.at(WaitsFor.MODEL)
        for each in () if at.batch is None else micro_batches(at.batch):
            with span(Span.FORWARD):
                forward = parts.stepper.predict(each, at.rows, common.weight)
                parts.observer.observe(each, forward, step)
                parts.observer.infer(each, forward, step)
        coming = parts.exchanges.follow()
        return coming, self._agree(coming.batch)

    def _all_finite(self, step: int, num_bad: int) -> bool:
        """Whether the step may be applied, the same on all ranks. Raises NonFinite with `on_nonfinite = "fail"`.

        `num_bad`: ranks whose loss or gradient is not finite.
        """
        parts = self._parts
        parts.stepper.scale.settle(num_bad == 0)
        if not num_bad:
            return True
        where = f"pass {parts.progress.current}, step {step}: a loss or gradient on {num_bad} rank(s) is not finite"
        if parts.stepper.scale.on and parts.stepper.scale.value > 1:
            log.info("%s; float16 loss scale lowered to %g", where, parts.stepper.scale.value)
        elif parts.train.on_nonfinite == "fail":
            raise NonFinite(
                f'{where}; lower the learning rates, or set dense.clip_norm or train.on_nonfinite = "skip_batch"'
            )
        else:
            log.warning("%s; the step is skipped", where)
            parts.progress.skipped_steps += 1
        return False
