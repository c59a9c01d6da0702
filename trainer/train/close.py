"""The close of a pass on all ranks: they agree on what was read, metrics are reduced, dense state is compared.

Rank 0 decides (trainer.rank0.closes).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from headrace.codec import plain, typed
from headrace.dataset.loader.batch_loader import Loader, PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.deadline import Deadline
from headrace.failpoints import Failpoint, failpoint
from headrace.process_usage import process_usage
from headrace.pserver.rows.digest import add
from headrace.trainer.collectives.ranks import gather_messages, on_rank_0
from headrace.trainer.dense.strategy import DenseStrategy
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.job_status import MetricsStatus, Status
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.closes import AgreedPass, ClosedPass, CloseDuties
from headrace.trainer.rank0.operations import RankUpdate
from headrace.trainer.rank0.parts import CLOSE_S
from headrace.trainer.status.progress import RankTally
from headrace.trainer.train.learning_rate import LearningRate
from headrace.trainer.train.observer import Observer
from headrace.trainer.train.trainer_setup import Setup


class PassCloser:
    """Closes passes: every rank calls `close` at the end of each pass."""

    def __init__(
        self,
        setup: Setup,
        loader: Loader[TrainingBatch],
        dense: DenseStrategy,
        rate: LearningRate,
        observer: Observer,
        duties: CloseDuties,
        dead_letters: DeadLetters,
        forget: Callable[[Mapping[str, Sequence[int]]], None] | None = None,
    ) -> None:
        """`forget`: that of the model, if it remembers signs."""
        self._ranks, self._shards, self._progress = setup.ranks, setup.shards, setup.progress
        self._loader, self._dense, self._rate, self._observer = loader, dense, rate, observer
        self._schema, self._dead_letters, self._duties = setup.schema, dead_letters, duties
        self._forget = forget
        self._readers_links = dict if setup.readers is None else setup.readers.links
        self._shown = Status()
        """The status, with the figures of the last close."""

    def close(self, plan: PassPlan, commit_is_due: Callable[[int], bool]) -> bool:
        """Make version `plan.number`; returns, on every rank, whether it is to be committed now.

        `commit_is_due` says so of a version. It is called on rank 0 alone, after step 4.

        1. Publish dead letters, so that they can be read if step 2 finds too many.
        2. Rank 0's buffers replace those of the other ranks. Ranks send rank 0 their counts and the hash of their dense
           state. Rank 0 compares the hashes, checks the limit of rejected samples, and sends the day, which does not
           advance in a pass without learning.
        3. Shards close: no push is in flight, the day advances. Reduce metrics, and gather the counters of slots.
        4. Log and sync the close; in a replay, compare it with the logged one. Operations act. Rank 0 sends their
           changes to all ranks.
        5. Publish the status. Nothing of the pass is published before.
        """
        failpoint(Failpoint.BEFORE_CLOSE)
        deadline = Deadline.after(CLOSE_S)
        tally = self._loader.tally(plan.number)
        self._dead_letters.publish(plan.number)  # 1
        self._dense.buffers.broadcast()  # 2
        mine = self._tally(tally)
        agreed = self._agree(plan, mine)
        pushes = add(int(digest, 16) for digest in self._shards.close_pass(agreed.day, deadline).values())  # 3
        metrics = self._observer.close_pass(self._ranks, again=plan.epoch > 1) if plan.num_positions else {}
        slots = self._count_slots(tally)

        def log_close() -> RankUpdate:
            measured = self._observer.fingerprints() if plan.num_positions else {"metrics": ""}
            digests = {"dense": mine.dense, "pushes": f"{pushes:032x}", **measured}
            return self._duties.log(ClosedPass(plan=plan, agreed=agreed, digests=digests, metrics=metrics, slots=slots))

        update = on_rank_0(self._ranks, log_close)  # 4; may wait for a full disk
        committed = self._apply(update, commit=update is not None and commit_is_due(plan.number))
        shown = replace(self._shown, day=agreed.day, dense_lr=self._rate.value)  # 5
        if plan.num_positions:
            has_loss = bool(metrics) and agreed.reading.num_samples > 0
            loss = metrics["tensors"]["pass"]["loss"]["mean"] if has_loss else None
            shown = replace(shown, metrics=typed(MetricsStatus, metrics, "the metrics of a pass"), loss=loss)
        self._shown = self._duties.status(shown, plan, agreed, self._ranks.waited_s())
        self._progress.closed(plan, agreed.reading, self._shown)
        return committed

    def begin(self, update: RankUpdate | None) -> None:
        """On every rank, before the first pass: apply overrides; `update` is rank 0's."""
        self._apply(update, commit=False)

    @property
    def day(self) -> int:
        """Rank 0: the job's day."""
        return self._duties.day

    def _tally(self, tally: PassTally) -> RankTally:
        """The message of this rank to rank 0."""
        return RankTally(
            num_events=tally.num_events,
            num_samples=tally.num_samples,
            num_judged=tally.num_judged,
            num_clicks=tally.num_clicks,
            rejected=tally.rejected,
            left_out=tally.left_out,
            first_of=tally.first_of if self._dead_letters.keeps_bytes else {},
            days=self._observer.take_days(),
            signals=self._observer.take_signals(),
            dense=self._rate.digest(self._dense.digest()),
            times_s=self._observer.take_times_s(),
            times=self._observer.take_times().message(),
            links={**self._ranks.links(), **self._shards.links(), **self._readers_links()},
            spent_s=self._progress.spent.seconds(),
            pass_s=self._progress.step.pass_s,
            usage=process_usage(),
        )

    def _agree(self, plan: PassPlan, mine: RankTally) -> AgreedPass:
        """Rank 0 compares the messages of all ranks; the result is the same on all ranks."""
        gathered = gather_messages(self._ranks, plain(mine))
        agreed = None
        if gathered is not None:
            tallies = [typed(RankTally, each, "a trainer's message") for each in gathered]
            agreed = plain(self._duties.agree(plan, tallies))
        return typed(AgreedPass, self._ranks.broadcast(agreed), "the message of rank 0")

    def _count_slots(self, tally: PassTally) -> SlotCounters | None:
        """On rank 0: the counters by slot of the pass over all ranks; else None."""
        counters = tally.slots or SlotCounters(self._schema)
        gathered = self._ranks.gather(
            {
                "sums": counters.sums_SK.reshape(-1),
                "registers": counters.registers_SR.reshape(-1),
                "buckets": counters.buckets_SK.reshape(-1),
            }
        )
        return None if gathered is None else self._duties.count_slots(gathered)

    def _apply(self, update: RankUpdate | None, *, commit: bool) -> bool:
        """Apply changes by operations on every rank; `update` is rank 0's. Returns `commit` of rank 0."""
        mine = None if update is None else plain(dataclasses.replace(update, commit=commit))
        changes = typed(RankUpdate, self._ranks.broadcast(mine), "the message of rank 0")
        self._rate.set(changes.dense_lr, changes.schedule)
        if changes.forgotten and self._forget is not None:
            self._forget(changes.forgotten)
        self._duties.acted()
        return changes.commit
