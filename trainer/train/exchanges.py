"""The exchanges of a pass: each takes the gradients of a step to the shards, and brings the rows of a later step.

With `train.staleness` k the push of step t goes with the pull of step t + 1 + k, so that pull sees exactly the steps up
to t. With k = 0 the loop makes the calls itself. With more, one thread makes them in order, beside the forward and
backward pass of the next steps. It sends a push only when the answer to the one before is here: so a shard holds one
step, which it applies as soon as all ranks have pushed it, and the others of the at most k + 1 steps are held here.

In mode "geo" a trainer learns on a copy of its own, `train.k_steps` batches at a time. One exchange takes the sums of
the gradients of these batches to the shards, and brings the rows of the next ones. The copy learns at once, with the
optimizer of the table, which is sgd; so the sum of gradients says how far the copy has moved. Shards apply it divided
by the number of trainers: a row moves by the mean of the differences of all trainers. Shows and clicks add up, and so
do counts of admission. The copy is dropped with each exchange, so it never holds more than the rows of these batches.
With staleness 1 the thread makes the exchange of one copy while the next one learns: the rows of that one were read
before the push of the present one, so the trainer adds its own push to them as the shards do.

Shapes: M keys of these batches in one table, U keys of one batch, D weights of a row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import F32
from headrace.deadline import Deadline
from headrace.keys import unique_keys
from headrace.pserver.config import TableSection
from headrace.pserver.protocol.shards import Floats, Gradients, Keys, Prepared, Shards, StepScale, absent
from headrace.pserver.rows.arrays import frozen
from headrace.pserver.rows.kernels import clip_rows
from headrace.pserver.rows.row_settings import RowSettings
from headrace.timeline import Span, span
from headrace.trainer.collectives.ranks import Ranks
from headrace.trainer.features.training_batches import TrainingBatch, keys_of_batch
from headrace.trainer.rank0.parts import RankZero
from headrace.trainer.status.time_spent import StepClock, WaitsFor
from headrace.trainer.train.infer_first import announced_ahead

Rows = Mapping[str, Floats]
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
    """Exchanges of every step. Used by the loop's thread, which makes no other call for steps meanwhile."""

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

    def begin(self, batches: Iterator[TrainingBatch], *, learn: bool, learnt: tuple[int, int] = (0, 0)) -> StepInput:
        """Begin a pass: pull the rows of its first step, and, to learn, of as many further ones as may be stale.

        `learnt`: the job's samples and versions before the pass, for schedules of rates.
        """
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


I32 = NDArray[np.int32]


class CopiedTable:
    """The rows of some batches in one table, and what they have learnt."""

    def __init__(self, many: Sequence[Keys], settings: RowSettings) -> None:
        """`many`: the keys of each batch."""
        self.settings = settings
        """Those at which it learns."""
        keys_M = unique_keys(*(keys.keys_U for keys in many))
        self.place_U: list[I32] = [np.searchsorted(keys_M, keys.keys_U).astype(np.int32) for keys in many]
        """By batch: where its keys are."""
        group_M = np.zeros(len(keys_M), np.uint16)
        for keys, place_U in zip(many, self.place_U, strict=True):
            group_M[place_U] = keys.group_U
        self.keys = Keys(keys_M, group_M)
        shape = len(keys_M), settings.num_weights
        self._rows_MD, self._present_M = np.zeros(shape, np.float32), np.ones(len(keys_M), np.bool_)
        self._sums = Gradients(np.zeros(shape, np.float32), *np.zeros((2, len(keys_M)), np.float32))
        self._clip_norm = settings.classes.sections[0].clip_norm

    def take(self, rows_MD: Floats) -> None:
        """Begin with these rows. Those that stand for a learnt default row do not move."""
        assert isinstance(rows_MD, np.ndarray), "rows on a device learn at each step"
        self._rows_MD, self._present_M = np.array(rows_MD), ~absent(rows_MD)

    def learn_after(self, samples: int, versions: int) -> None:
        """Learn at the rates after so many samples and versions of the job."""
        self.settings = self.settings.at(self.settings.share_after(samples, versions))

    def read(self, number: int) -> F32:
        """(U, D) the present rows of a batch."""
        return self._rows_MD[self.place_U[number]]

    def learn(self, number: int, gradients: Gradients) -> None:
        """Learn from a batch, whose rows are clipped here: shards see sums of several batches."""
        place_U, sums = self.place_U[number], self._sums
        if self._clip_norm is not None:
            long_UD, clipped_UD = frozen(gradients.grads_UD), np.empty_like(gradients.grads_UD)
            clip_rows(long_UD, 0, len(long_UD), self._clip_norm, clipped_UD)
            gradients = replace(gradients, grads_UD=clipped_UD)
        sums.grads_UD[place_U] += gradients.grads_UD
        sums.show_U[place_U] += gradients.show_U
        sums.click_U[place_U] += gradients.click_U
        moves_U = self._present_M[place_U]
        rows_V, grads_VD = frozen(place_U[moves_U]), frozen(gradients.grads_UD[moves_U])
        self.settings.learn(self._rows_MD, rows_V, grads_VD, self.keys.group_U, 0, len(rows_V))

    def learnt(self, num_ranks: int) -> Gradients:
        """This trainer's part of what the rows learn."""
        return replace(self._sums, grads_UD=self._sums.grads_UD / np.float32(num_ranks))

    def follow(self, before: "CopiedTable", pushed: Gradients) -> None:
        """Move as the shards do by what an earlier copy pushed after these rows were read."""
        keys_M, before_K = self.keys.keys_U, before.keys.keys_U
        if not len(keys_M):
            return
        place_K = np.minimum(np.searchsorted(keys_M, before_K), len(keys_M) - 1).astype(np.int32)
        moves_K = (keys_M[place_K] == before_K) & self._present_M[place_K]
        rows_V, grads_VD = frozen(place_K[moves_K]), frozen(pushed.grads_UD[moves_K])
        before.settings.learn(self._rows_MD, rows_V, grads_VD, self.keys.group_U, 0, len(rows_V))


class RowCopy:
    """The rows of some batches in all tables, and how far the trainer has come in these batches."""

    def __init__(
        self, batches: Sequence[TrainingBatch], slices: Mapping[str, Keys], settings: Mapping[str, RowSettings]
    ) -> None:
        """`slices`: keys of the dense part, which every batch has."""
        self._batches, self._at, self.num_samples, self._learns = batches, 0, 0, False
        keys = [keys_of_batch(batch, slices) for batch in batches]
        self.tables = {name: CopiedTable([each[name] for each in keys], settings[name]) for name in keys[0]}
        """Its part of each table."""

    @property
    def keys(self) -> Mapping[str, Keys]:
        """All keys, by table."""
        return {name: table.keys for name, table in self.tables.items()}

    @property
    def first(self) -> TrainingBatch:
        """The first batch."""
        return self._batches[0]

    @property
    def following(self) -> TrainingBatch | None:
        """The batch after the present one; None if that is the last one."""
        return None if self._at + 1 == len(self._batches) else self._batches[self._at + 1]

    @property
    def done(self) -> bool:
        """Whether all batches are learnt."""
        return self._at == len(self._batches)

    def take(self, rows: Rows, learnt: tuple[int, int] = (0, 0)) -> None:
        """Begin with these rows, after so many samples and versions of the job."""
        for name, table in self.tables.items():
            table.take(rows[name])
            table.learn_after(*learnt)

    def step(self) -> StepInput:
        """The present batch and its rows."""
        return StepInput(self._batches[self._at], {name: each.read(self._at) for name, each in self.tables.items()})

    def learn(self, gradients: Mapping[str, Gradients] | None, num_samples: int) -> None:
        """Learn from the present batch, unless it is skipped, and go on to the next."""
        if gradients is not None:
            self._learns, self.num_samples = True, self.num_samples + num_samples
            for name, each in gradients.items():
                self.tables[name].learn(self._at, each)
        self._at += 1

    def learnt(self, num_ranks: int) -> Mapping[str, Gradients] | None:
        """The push of this trainer; None if every batch was skipped."""
        return {name: table.learnt(num_ranks) for name, table in self.tables.items()} if self._learns else None

    def follow(self, before: "RowCopy", pushed: Mapping[str, Gradients] | None) -> None:
        """Move by the push of an earlier copy, which the rows of this one do not hold."""
        for name, each in (pushed or {}).items():
            self.tables[name].follow(before.tables[name], each)


class _ComingCopy(NamedTuple):
    """The next batches, None at the end of the pass, and their rows, which may still be on their way."""

    copy: RowCopy | None
    prepared: Prepared | None
    rows: Callable[[], Rows]


class GeoExchanges(Exchanges):
    """Exchanges in mode "geo"."""

    def __init__(
        self,
        shards: Shards,
        k_steps: int,
        num_ranks: int,
        slices: Mapping[str, Keys],
        tables: Callable[[], Mapping[str, RowSettings]],
        step_s: float,
        clock: StepClock,
        *,
        staleness: int = 0,
    ) -> None:
        """`slices`: keys of the dense part. `tables`: the settings in force at the beginning of a pass; collective."""
        super().__init__(shards, staleness, step_s, clock)
        self._k_steps, self._num_ranks, self._slices, self._settings_now = k_steps, num_ranks, slices, tables
        self._settings: Mapping[str, RowSettings] = {}
        self._copy: RowCopy | None = None
        self._prepared: Prepared | None = None
        self._later: deque[_ComingCopy] = deque()
        """The copies after the present one."""
        self._ahead: tuple[RowCopy | None, Prepared | None] | None = None
        """The copy after those, once `following` has asked for it."""
        self._read: list[TrainingBatch] = []
        """Its first batches."""
        self._num_exchanges = 0
        self._learnt = 0, 0

    def begin(self, batches: Iterator[TrainingBatch], *, learn: bool, learnt: tuple[int, int] = (0, 0)) -> StepInput:
        """As if the other ranks had learnt as many samples of the pass as this one."""
        self._learnt = learnt
        if not learn:
            return super().begin(announced_ahead(self._shards, batches, learn=False), learn=False)
        self._settings = self._settings_now()
        self._batches, self._num_exchanges = batches, 0
        self._clock.pass_begins()
        for _ in range(1 + self._staleness):
            copy, prepared = self._following_copy()
            self._later.append(_ComingCopy(copy, prepared, self._pulled(prepared)))
        return self._next_copy()

    def following(self) -> TrainingBatch | None:
        """With the last batch of a copy, the first one of the next."""
        assert self._copy is not None, "a rank makes no step without a batch in this mode"
        if (batch := self._copy.following) is not None:
            return batch
        if self._later:
            ahead = self._later[0].copy
        else:
            self._ahead = self._ahead or self._following_copy()
            ahead, _ = self._ahead
        return None if ahead is None else ahead.first

    def push(
        self, step: int, batch: TrainingBatch | None, gradients: Mapping[str, Gradients] | None, num_samples: int
    ) -> StepInput:
        """After the last of its batches, the copy is exchanged for the next one."""
        copy = self._copy
        assert copy is not None, "a rank makes no step without a batch in this mode"
        copy.learn(gradients, num_samples)
        if not copy.done:
            self._read_one()
            return self._step()
        (further, prepared), self._ahead = self._ahead or self._following_copy(), None
        pushed, scale, number = copy.learnt(self._num_ranks), StepScale(copy.num_samples), self._num_exchanges
        mine = self._prepared

        def exchange() -> Rows:
            return self._shards.exchange(number, mine, pushed, prepared, scale, self._deadline()) or {}

        self._clock.at(WaitsFor.SHARDS)
        self._later.append(_ComingCopy(further, prepared, self._begun(exchange)))
        self._num_exchanges += 1
        samples, versions = self._learnt
        self._learnt = samples + copy.num_samples * self._num_ranks, versions
        return self._next_copy(copy if self._staleness else None, pushed)

    def finish(self) -> None:
        while self._later:
            self._later.popleft().rows()
        super().finish()

    def _next_copy(self, before: RowCopy | None = None, pushed: Mapping[str, Gradients] | None = None) -> StepInput:
        """Go on to the next copy, once its rows are here. They do not hold what the copy `before` has `pushed`."""
        self._copy, self._prepared, rows = self._later.popleft()
        there = rows()
        if self._copy is not None:
            self._copy.take(there, self._learnt)
            if before is not None:
                self._copy.follow(before, pushed)
        return self._step()

    def _pulled(self, prepared: Prepared | None) -> Callable[[], Rows]:
        return dict if prepared is None else self._begun(lambda: self._shards.pull(prepared, self._deadline()))

    def _following_copy(self) -> tuple[RowCopy | None, Prepared | None]:
        """A copy for the next batches, its keys announced; None at the end of the pass."""
        while len(self._read) < self._k_steps and self._read_one():
            pass
        batches, self._read = self._read, []
        if not batches:
            return None, None
        copy = RowCopy(batches, self._slices, self._settings)
        self._clock.at(WaitsFor.SHARDS)
        return copy, self._shards.prepare(copy.keys, learn=True)

    def _read_one(self) -> bool:
        """Read a batch of the copy after the last one that is announced; False if there is none."""
        if (batch := self._read_batch()) is not None:
            self._read.append(batch)
        return batch is not None

    def _step(self) -> StepInput:
        return StepInput(None, {}) if self._copy is None else self._copy.step()


def settings_in_force(ranks: Ranks, rank0: RankZero | None, groups: Mapping[str, int]) -> dict[str, RowSettings]:
    """Collective: the settings of rows by table, as operations have left them. `groups`: slot groups by slot."""
    own = {} if rank0 is None else rank0.operator.job.tables_on_shards
    tables = ranks.broadcast({name: section.model_dump(mode="json") for name, section in own.items()})
    return {name: RowSettings.of(TableSection.model_validate(each), groups) for name, each in tables.items()}
