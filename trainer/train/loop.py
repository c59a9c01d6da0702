"""The life of a pass on every rank: plan, read ahead, train, close.

Every rank makes the same collective calls in the same order. Rank 0 decides (trainer.train.duties), and it broadcasts
its decisions. trainer.train.assembly builds the parts; this module only composes them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from headrace.dataset.loader.batch_loader import Loader
from headrace.deadline import Deadline
from headrace.pserver.consistency.policy import Consistency
from headrace.pserver.protocol.shards import Gradients, Shards
from headrace.pserver.server.commands import LeavePass
from headrace.seeds import derive
from headrace.timeline import Span, span, stepped
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.config import TaskSection, TrainSection
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.features.pass_gate import GatedReader
from headrace.trainer.features.pooling import RowSums
from headrace.trainer.features.training_batches import (
    BatchMaker,
    TrainingBatch,
    micro_batches,
    own_figures,
    step_weights,
)
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import StreamEnded
from headrace.trainer.status.progress import TrainerProgress
from headrace.trainer.status.time_spent import LoopPart, WaitsFor
from headrace.trainer.train.close import PassCloser
from headrace.trainer.train.duties import Duties
from headrace.trainer.train.exchanges import Exchanges, Rows, StepInput
from headrace.trainer.train.infer_first import InferFirst, announced_ahead
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.observer import Observer
from headrace.trainer.train.rank_messages import Finish, Message, News, NextPass, Wait, broadcast, received, sent
from headrace.trainer.train.reading import read_ahead
from headrace.trainer.train.step import StepFacts, Stepper

AHEAD_WAIT_S = 0.02
"""Longest wait of all ranks for the plan of the next pass before they train this one; most plans come sooner."""


@dataclass(frozen=True)
class TrainerParts:
    """The parts of one trainer, as trainer.train.assembly builds them."""

    train: TrainSection
    tasks: tuple[TaskSection, ...]
    ranks: Ranks
    policy: Consistency
    shards: Shards
    loader: Loader[TrainingBatch]
    exchanges: Exchanges
    maker: BatchMaker
    stepper: Stepper
    dense: DenseStrategy
    observer: Observer
    closer: PassCloser
    progress: TrainerProgress
    rate: LearningRate
    duties: Duties
    infer_first: InferFirst | None
    """Only where each pass is predicted before it is learnt from."""
    average: bool
    """`dense.average`."""
    gated: GatedReader | None
    """Only where slots have histories, or samples wait for their labels."""


class TrainLoop:
    """Runs the passes of a generation."""

    def __init__(self, parts: TrainerParts, seed: int, reading: int | None = None) -> None:
        """`reading`: the first pass, if it is being read already."""
        self._parts, self._duties, self._seed, self._reading = parts, parts.duties, seed, reading
        self._spent = parts.progress.spent
        if parts.gated is not None:
            parts.progress.step.asked_s = parts.gated.asked_s
        self._next: PassPlan | None = None
        self._end = False

    def drain(self) -> None:
        """Request an end after the current pass. May be called on any thread."""
        self._duties.drain()

    @property
    def resizes(self) -> bool:
        """Rank 0: whether the job goes on with other numbers of workers: this generation ends, the next trains on."""
        return self._duties.resizes

    def run(self, last: int | None = None) -> None:
        """Train until the stream ends, or a drain or resize; then commit the last version. Or only up to pass `last`.

        At the end of the stream, operations that wait for a close get a pass without events; at a drain they wait.
        """
        progress, duties = self._parts.progress, self._duties
        duties.request_plan()
        while (plan := self._wait_for_plan()) is not None:
            progress.opened(plan, "replaying" if duties.replaying else "training")
            if not self._end:
                duties.request_plan()
            self._read_ahead()
            self._train(plan)
            progress.step.begin(WaitsFor.CLOSE)
            with span(Span.CLOSE):
                committed = self._parts.closer.close(plan, duties.commit_is_due)
            progress.step.end()
            duties.publish(self._parts.ranks, self._parts.dense)
            if committed:
                self._commit()
            duties.export()
            if plan.number == last:
                return
        progress.ended(resizes=self.resizes)

    def _poll_plan(self, wait_s: float) -> News | None:
        return self._duties.poll_plan(wait_s, known=self._next is not None or self._end)

    def _handle_news(self, message: Message | None) -> None:
        """All ranks: start to read the next pass, or note that there is none."""
        match message:
            case StreamEnded():
                self._end = True
            case NextPass(plan) if self._next is None:
                self._next, parts = plan, self._parts
                parts.progress.planned(plan)
                if plan.number != self._reading:
                    read_ahead(plan, parts.ranks, parts.maker, parts.loader, num_stages=parts.dense.num_stages)

    def _read_ahead(self) -> None:
        """Where ranks hear no news in steps: begin to read the next pass beside this one, if it is known soon."""
        if self._parts.policy.meets_in_steps:
            return
        news = self._poll_plan(AHEAD_WAIT_S)
        with span(Span.WAIT):
            message = broadcast(self._parts.ranks, news)
        self._handle_news(message)

    def _wait_for_plan(self) -> PassPlan | None:
        """The next pass to train, or None at the end."""
        ranks, clock = self._parts.ranks, self._parts.progress.step
        while True:
            action = self._duties.next_action(self._next, ended=self._end)
            clock.begin(WaitsFor.TRAINERS)
            with span(Span.WAIT):
                message = broadcast(ranks, action)
            clock.end()
            match message:
                case Finish():
                    return None
                case Wait(commit):
                    if commit:
                        self._commit()
                    self._duties.publish(ranks, self._parts.dense)
                    continue
            self._handle_news(message)
            if self._next is not None:
                plan, self._next = self._next, None
                return plan

    def _commit(self) -> None:
        """All ranks: bring the dense part together; rank 0 begins a commit with it."""
        with self._spent.part(LoopPart.COMMIT), span(Span.COMMIT):
            self._duties.commit(self._parts.dense.consolidate())

    def _train(self, plan: PassPlan) -> None:
        """Run every step of a pass on this rank, with empty steps while other ranks have more batches."""
        parts, clock = self._parts, self._parts.progress.step
        clock.begin(WaitsFor.SHARDS)
        learnt = parts.progress.num_samples, plan.number - 1
        if parts.observer.found is not None:
            parts.observer.found.index = self._duties.index_at(plan.number)
        parts.shards.open_pass(plan.number, Deadline.after(parts.train.step_deadline), learnt[0])
        clock.at(WaitsFor.PIPE)
        if parts.gated is not None:
            parts.gated.opened(plan.number)
        batches = self._batches(plan)
        parts.stepper.open_pass(plan.number)
        parts.rate.open_pass(plan.number, learnt[0])
        torch.manual_seed(derive(self._seed, "pass", plan.number, parts.ranks.rank))
        at, step = parts.exchanges.begin(batches, learn=plan.learn, learnt=learnt), 0
        common = self._agree(at.batch)
        while common.more:
            with span(Span.STEP):
                at, common = self._learn(step, at, common) if plan.learn else self._predict(step, at, common)
            stepped()
            step += 1
        clock.at(WaitsFor.SHARDS)
        parts.exchanges.finish()
        if parts.policy.says_when_it_leaves:
            parts.shards.call(LeavePass(plan.number), Deadline.after(parts.train.step_deadline))
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
        mine = own_figures(batch, tasks, average=parts.average)
        mine = replace(mine, num_bad=int(not good), sums=parts.stepper.calibration.take_sums())
        with span(Span.WAIT):
            news = self._poll_plan(0.0)
            figures, told = parts.policy.agree(parts.ranks, mine, None if news is None else sent(news))
        if told is not None:
            self._handle_news(received(told))
        weight = step_weights(figures, tasks, average=parts.average)
        return StepFacts(weight, figures.num_samples, figures.num_batches, figures.num_bad, figures.sums)

    def _learn(self, step: int, at: StepInput, common: StepFacts) -> tuple[StepInput, StepFacts]:
        """One step: predict, measure, learn. Returns the next one."""
        parts, clock, batch = self._parts, self._parts.progress.step, at.batch
        parts.exchanges.ask_early(step, batch)
        clock.at(WaitsFor.MODEL)
        parts.rate.step(common.num_samples)
        parts.stepper.open_step(all_have=common.num_batches == parts.ranks.world, num_samples=common.num_samples)
        parts.dense.clear()
        parts.dense.buffers.save()
        gradients: dict[str, Gradients] | None = None
        finite = True
        if batch is None:
            parts.stepper.follow(common.weight, common.num_samples)
        else:
            gradients, finite = self._learn_batch(batch, at.rows, step, common.weight)
        clock.at(WaitsFor.TRAINERS)
        loss_scale = parts.stepper.scale.value
        share = 0.0 if batch is None else len(batch.samples) / max(1, common.num_samples)
        parts.dense.note(share, parts.stepper.take_loss())
        good = parts.dense.finite() and finite
        following = self._agree(parts.exchanges.following(), good=good)
        if not parts.stepper.scale.applies(parts.train, parts.progress, step, following.num_bad):
            parts.dense.buffers.restore()
            return parts.exchanges.push(step, batch, None, common.num_samples), following
        parts.stepper.calibration.learn(following.sums)
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

    def _learn_batch(
        self, batch: TrainingBatch, rows: Rows, step: int, global_weight: Mapping[str, float]
    ) -> tuple[dict[str, Gradients], bool]:
        """Measure the batch and learn from it. Returns the gradients of its rows, and whether all numbers are finite.

        The dense strategy holds the gradients of the dense parameters. `global_weight`: weight of the step, by task.
        """
        parts = self._parts
        parts.dense.take(rows)
        sums = RowSums.of(batch)
        parts.stepper.precede(batch.ends, global_weight)
        forwards = []
        for number, each in enumerate(micro_batches(batch), 1):
            with span(Span.FORWARD):
                measured = parts.stepper.measured(each, rows, global_weight)
                forward = parts.stepper.forward(each, rows, global_weight)
                forwards.append((each, measured or forward))
            with self._spent.part(LoopPart.BACKWARD), span(Span.BACKWARD):
                if number == len(batch.ends):
                    parts.dense.fills(parts.stepper.scale.value)
                parts.stepper.backward(each, forward, sums)
        with self._spent.part(LoopPart.BACKWARD), span(Span.BACKWARD):
            gradients = parts.stepper.gradients(batch, sums)
            parts.dense.look(parts.stepper.copies)
            parts.stepper.send_ahead(parts.exchanges.following)
            parts.progress.step.at(WaitsFor.MODEL)
        with span(Span.FORWARD):  # the first read waits for the device, for all that is read of the step
            for each, forward in forwards:
                parts.observer.observe(each, forward, step)
                parts.stepper.calibration.note(forward.moments)
        return gradients, sums.finite

    def _predict(self, step: int, at: StepInput, common: StepFacts) -> tuple[StepInput, StepFacts]:
        """One step of a pass that is only predicted. Returns the next one."""
        parts = self._parts
        parts.progress.step.at(WaitsFor.MODEL)
        with parts.dense.predicting():
            for each in () if at.batch is None else micro_batches(at.batch):
                with span(Span.FORWARD):
                    forward = parts.stepper.predict(each, at.rows, common.weight)
                    parts.observer.observe(each, forward, step)
                    parts.observer.infer(each, forward, step)
        coming = parts.exchanges.follow()
        return coming, self._agree(coming.batch)
