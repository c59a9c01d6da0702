"""The exchanges of a pass: each takes the gradients of a step to the shards, and brings the rows of a later step.

With `train.staleness` k the push of step t goes with the pull of step t + 1 + k, so that pull sees exactly the steps up
to t. With k = 0 the loop makes the calls itself. With more, one thread makes them in order, beside the forward and
backward pass of the next steps. It sends a push only when the answer to the one before is here: so a shard holds one
step, which it applies as soon as all ranks have pushed it, and the others of the at most k + 1 steps are held here.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from headrace.dataset.samples.batch import F32
from headrace.deadline import Deadline
from headrace.pserver.protocol.shards import Gradients, Shards, StepScale
from headrace.timeline import Span, span
from headrace.trainer.features.training_batches import TrainingBatch
from headrace.trainer.status.step_clock import StepClock, WaitsFor

Rows = Mapping[str, F32]
CLOSE_S = 2.0
"""How long a call that still runs may take when a trainer fails; the end of the shards' client then ends it."""


class StepInput(NamedTuple):
    """The batch of a step, None on a rank that has run out of them, and its rows by table."""

    batch: TrainingBatch | None
    rows: Rows


class _Coming(NamedTuple):
    """A later step, whose rows may still be on their way."""

    batch: TrainingBatch | None
    rows: Callable[[], Rows]
    """Waits for the rows. Raises the error of their call."""


class Exchanges:
    """See module docstring. Used by the loop's thread, which makes no other call for steps meanwhile."""

    def __init__(
        self, shards: Shards, staleness: int, step_s: float, clock: StepClock, *, early_rows: bool = False
    ) -> None:
        """`step_s`: longest time of a call. `early_rows`: as in `train.early_rows`."""
        self._early_rows, self._asked = early_rows, deque[TrainingBatch | None]()
        self._shards, self._staleness, self._step_s, self._clock = shards, staleness, step_s, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange") if staleness else None
        self._batches: Iterator[TrainingBatch] = iter(())
        self._coming: deque[_Coming] = deque()
        self._running: list[Future[Rows]] = []

    def begin(self, batches: Iterator[TrainingBatch], *, learn: bool) -> StepInput:
        """Begin a pass: pull the rows of its first step, and, to learn, of as many further ones as may be stale."""
        self._batches = batches
        self._asked.clear()
        self._clock.pass_begins()
        for _ in range(1 + (self._staleness if learn else 0)):
            self._pull()
        return self._next()

    def follow(self) -> StepInput:
        """The next step of a pass that is only predicted."""
        self._pull()
        return self._next()

    def ask_early(self, step: int, batch: TrainingBatch | None) -> None:
        """Before a step is computed: ask for rows of the next one that this one does not change."""
        if self._early_rows:
            following = self._read_batch()
            learnt, wanted = (None if each is None else each.prepared for each in (batch, following))
            self._clock.at(WaitsFor.SHARDS)
            self._shards.ask_early(step, learnt, wanted, self._deadline())
            self._asked.append(following)

    def following(self) -> TrainingBatch | None:
        """The batch of the next step, which is known before this one is pushed; the same at each call until then."""
        if self._coming:
            return self._coming[0].batch
        if not self._asked:
            self._asked.append(self._read_batch())
        return self._asked[0]

    def push(
        self, step: int, batch: TrainingBatch | None, gradients: Mapping[str, Gradients] | None, num_samples: int
    ) -> StepInput:
        """Push a step of this rank, and return the next one. Every rank calls it in every step, after `following`.

        `gradients` is None if all ranks skip the step, or where there is no batch; `num_samples`: of all ranks.
        """
        following = self._asked.popleft() if self._asked else self._read_batch()
        learnt, wanted = (None if each is None else each.prepared for each in (batch, following))
        scale = StepScale(num_samples)

        def exchange() -> Rows:
            return self._shards.exchange(step, learnt, gradients, wanted, scale, self._deadline()) or {}

        self._clock.at(WaitsFor.SHARDS)
        self._coming.append(_Coming(following, self._begun(exchange)))
        return self._next()

    def finish(self) -> None:
        """End a pass: wait until the last push is applied."""
        while self._coming:
            self._next()
        self._clock.pass_ends()

    def close(self) -> None:
        """Start no further call. One that runs has CLOSE_S to end."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            wait([each for each in self._running if not each.cancelled()], CLOSE_S)

    def _pull(self) -> None:
        """Pull the rows of the next batch."""
        batch = self._read_batch()
        self._clock.at(WaitsFor.SHARDS)
        rows: Callable[[], Rows] = dict
        if batch is not None:
            prepared = batch.prepared
            rows = self._begun(lambda: self._shards.pull(prepared, self._deadline()))
        self._coming.append(_Coming(batch, rows))

    def _read_batch(self) -> TrainingBatch | None:
        self._clock.at(WaitsFor.PIPE)
        with span(Span.WAIT):
            return next(self._batches, None)

    def _begun(self, call: Callable[[], Rows]) -> Callable[[], Rows]:
        """Make a call, or have the thread make it after those before it; returns how its result is awaited."""
        if self._thread is None:
            rows = call()
            return lambda: rows
        future = self._thread.submit(call)
        self._running = [*(each for each in self._running if not each.done()), future]
        return lambda: _awaited(future)

    def _next(self) -> StepInput:
        batch, rows = self._coming.popleft()
        return StepInput(batch, rows())

    def _deadline(self) -> Deadline:
        return Deadline.after(self._step_s)


def _awaited(future: Future[Rows]) -> Rows:
    with span(Span.WAIT):
        return future.result()
