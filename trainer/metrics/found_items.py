"""Recall of the index of items, as the job learns: the item of each click is looked for before it is learnt from.

Every rank keeps the vectors of users, of a sample of its events with a positive sample (`retrieval.measure`). At the
close rank 0 searches its index (trainer.train.live_index) for them, and beside it the items that were clicked most: in
the last hour of event time, or in the last passes. All sums are integers, kept like those of trainer.metrics.meter for
the pass, the window and the life of the job. They are no part of a close's digests, as the catalogue is in no log.

Shapes: B samples of a batch, E events, P positive samples, V length of a vector, K best items, U unique items.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.trainer.metrics.meter import MeterState, Reduce
from headrace.trainer.metrics.scope import Scope
from headrace.trainer.metrics.totals import I64
from headrace.trainer.metrics.window import PastPasses, TimeCounts, median_part

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
UNIT = 1 << 24
"""Recall is kept in units of 1 / UNIT."""
EVENTS, CLICKS, MISSING, FIRST = 0, 1, 2, 3
"""Places in the totals: events, their positive samples, those of no item in the index; then for the index and for the
most clicked items, for each k, events with a hit, and recall."""
PART_S, NUM_PARTS = 300.0, 12
"""The most clicked items are those of the last hour: of so many parts of so many seconds, the newest one included."""
NUM_PASSES = 24
"""Without event time they are those of so many passes."""
MAX_ITEMS = 1 << 16
"""Most items of a part whose clicks are counted: those that were clicked most."""
NO_TIME = -(1 << 63)
"""The part of a click without a time."""
METHODS = ("index", "popular")


class Searched(Protocol):
    """The index of items at the start of a pass."""

    def best(self, user_EV: F32, most: int) -> list[U64]:
        """The signs of the best items of each user, best first."""
        ...

    def has(self, sign_U: U64) -> NDArray[np.bool_]:
        """(U,) whether each item can be found."""
        ...


@dataclass(frozen=True, slots=True)
class Clicks:
    """The positive samples of a batch, in their order."""

    event_P: I64
    user_PV: F32
    sign_P: U64
    time_s_P: NDArray[np.float64] | None
    """Event times, unix seconds; NaN if there is none. None: the job has no event time."""


class SampledEvents:
    """Events of a pass on one rank, every so-manieth of those with a positive sample, so that they stay few."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self._number = most, 1, 0
        self._kept: list[tuple[int, F32, U64]] = []

    def add(self, clicks: Clicks) -> None:
        """Add those of a batch; a batch has whole events."""
        begins = np.flatnonzero(np.diff(clicks.event_P, prepend=clicks.event_P[:1] - 1))
        for begin, end in zip(begins, [*begins[1:], len(clicks.event_P)], strict=True):
            if self._number % self._every == 0:
                self._kept.append((self._number, clicks.user_PV[begin].copy(), np.unique(clicks.sign_P[begin:end])))
            self._number += 1
            if len(self._kept) > self._most:
                self._every *= 2
                self._kept = [each for each in self._kept if each[0] % self._every == 0]

    def take(self) -> dict[str, NDArray[Any]]:
        """The columns for rank 0; then begin a new pass."""
        kept, self._kept, self._every, self._number = self._kept, [], 1, 0
        return {
            "users": np.concatenate([np.empty(0, np.float32), *(user_V for _, user_V, _ in kept)]),
            "signs": np.concatenate([np.empty(0, np.uint64), *(sign_P for _, _, sign_P in kept)]),
            "lengths": np.array([len(sign_P) for _, _, sign_P in kept], np.int64),
        }


class MostClicked:
    """Clicks by item in the last parts of the stream.

    The newest part is that of the median click of a pass, and never goes back: single wrong times move nothing.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._newest: int | None = None
        """None: no click had a time."""
        self._part_N, self._sign_N, self._count_N = np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64)
        """Clicks by part and item, in that order."""

    def best(self, most: int, has: Callable[[U64], NDArray[np.bool_]]) -> U64:
        """The signs of the items with most clicks that can be found; of equal ones the lowest sign first."""
        _, sign_U, count_U = _summed(np.zeros_like(self._part_N), self._sign_N, self._count_N)
        sign_U = sign_U[np.lexsort((sign_U, -count_U))]
        return sign_U[has(sign_U)][:most] if len(sign_U) else sign_U

    def add(self, part_U: I64, sign_U: U64, count_U: I64) -> None:
        """Add the clicks of a pass, of items by part; those without a time join the newest part.

        Clicks are kept from the last parts, and from the one that begins after the newest; others are dropped.
        """
        timed_U = part_U != NO_TIME
        parts, _, counts = _summed(part_U[timed_U], np.zeros_like(sign_U[timed_U]), count_U[timed_U])
        if (median := median_part(dict(zip(parts.tolist(), counts.tolist(), strict=True)))) is not None:
            self._newest = median if self._newest is None else max(self._newest, median)
        newest = self._newest or 0
        part_N = np.concatenate([self._part_N, np.where(timed_U, part_U, newest)])
        sign_N, count_N = np.concatenate([self._sign_N, sign_U]), np.concatenate([self._count_N, count_U])
        kept_N = (part_N > newest - self._num_parts) & (part_N <= newest + 1)
        summed = _summed(part_N[kept_N], sign_N[kept_N], count_N[kept_N])
        self._part_N, self._sign_N, self._count_N = _most_of_each(*summed)

    def state(self) -> MeterState:
        """For a commit."""
        arrays = {"part": self._part_N, "sign": self._sign_N.view(np.int64), "count": self._count_N}
        return MeterState(arrays, {"newest": self._newest})

    def load(self, state: MeterState) -> None:
        """Continue from a commit."""
        self._newest, arrays = state.facts["newest"], state.arrays
        self._part_N, self._sign_N, self._count_N = arrays["part"], arrays["sign"].view(np.uint64), arrays["count"]


def _summed(part_N: I64, sign_N: U64, count_N: I64) -> tuple[I64, U64, I64]:
    """The counts of each part and sign in sum, by part, then sign."""
    order = np.lexsort((sign_N, part_N))
    part_N, sign_N, count_N = part_N[order], sign_N[order], count_N[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (part_N[1:] != part_N[:-1]) | (sign_N[1:] != sign_N[:-1])
    at_U = np.flatnonzero(begins)
    return part_N[at_U], sign_N[at_U], np.add.reduceat(count_N, at_U)


def _most_of_each(part_U: I64, sign_U: U64, count_U: I64) -> tuple[I64, U64, I64]:
    """Of each part the MAX_ITEMS items with most clicks; the columns are as of `_summed`, and stay in their order."""
    order = np.lexsort((sign_U, -count_U, part_U))
    place_U = np.arange(len(part_U)) - np.searchsorted(part_U, part_U)
    kept = np.sort(order[place_U < MAX_ITEMS])
    return part_U[kept], sign_U[kept], count_U[kept]


class RetrievalMeter:
    """Measures how many items of clicks are found, before they are learnt from. Used by one thread."""

    def __init__(self, at: Sequence[int], most: int, window_s: float, *, timed: bool) -> None:
        """`at`: the numbers of items, ascending; `most`: events of a pass, in each rank."""
        self._at, self._timed, self._window_s = tuple(at), timed, window_s
        self._size = FIRST + 2 * len(METHODS) * len(self._at)
        self._events, self._times = SampledEvents(most), TimeCounts(window_s)
        self._clicked: dict[tuple[int, int], int] = {}
        self.index: Searched | None = None
        """Rank 0: the index at the start of the pass; None: the pass is not measured."""
        self._popular = MostClicked(NUM_PARTS if timed else NUM_PASSES)
        self._begin()

    def _begin(self) -> None:
        self._pass = self._empty()
        self._past = PastPasses(self._pass, self._times.part_s if self._timed else None)
        self._passes = 0

    def _empty(self) -> Scope:
        return Scope({"found": np.zeros((1, self._size), np.int64)}, frozenset())

    def add(self, clicks: Clicks) -> None:
        """Add the positive samples of a batch, before it is learnt from."""
        if not len(clicks.event_P):
            return
        self._events.add(clicks)
        part_P = np.zeros(len(clicks.sign_P), np.int64)
        if clicks.time_s_P is not None:
            self._times.add(clicks.time_s_P)
            known_P = np.isfinite(clicks.time_s_P)
            part_P = np.floor_divide(np.where(known_P, clicks.time_s_P, 0), PART_S).astype(np.int64)
            part_P[~known_P] = NO_TIME
        for part, sign in zip(part_P.tolist(), clicks.sign_P.tolist(), strict=True):
            self._clicked[part, sign] = self._clicked.get((part, sign), 0) + 1

    def close_pass(self, reduce: Reduce, *, again: bool = False) -> None:
        """Collective: rank 0 looks for the items of all ranks, then counts their clicks."""
        clicked, self._clicked = sorted(self._clicked.items()), {}
        if len(clicked) > MAX_ITEMS:
            clicked = sorted(clicked, key=lambda each: (-each[1], each[0]))[:MAX_ITEMS]
        times = self._times.take()
        columns = self._events.take() | {
            "part": np.array([part for (part, _), _ in clicked], np.int64),
            "sign": np.array([sign for (_, sign), _ in clicked], np.uint64),
            "count": np.array([count for _, count in clicked], np.int64),
            "times": np.array([*times], np.int64),
            "samples": np.array([*times.values()], np.int64),
        }
        heard, self._pass = reduce.gather(columns), self._empty()
        if heard is None:
            return
        if self.index is not None:
            popular_K = self._popular.best(self._at[-1], self.index.has)
            for each in heard:
                self._look(self.index, each, popular_K)
        if again:
            return
        self._passes += 1
        part_U, sign_U, count_U = (np.concatenate([each[n] for each in heard]) for n in ("part", "sign", "count"))
        self._popular.add(part_U if self._timed else np.full_like(part_U, self._passes), sign_U, count_U)
        sums: dict[int, int] = {}
        for each in heard:
            for part, count in zip(each["times"].tolist(), each["samples"].tolist(), strict=True):
                sums[part] = sums.get(part, 0) + count
        self._past.add(self._pass, sums)

    def _look(self, index: Searched, columns: Mapping[str, NDArray[Any]], popular_K: U64) -> None:
        """Look for the items of one rank."""
        length_E, sign_P, totals = columns["lengths"], columns["signs"], self._pass.totals["found"][0]
        if not len(length_E):
            return
        found = index.best(columns["users"].reshape(len(length_E), -1), self._at[-1])
        totals[MISSING] += int(np.count_nonzero(~index.has(sign_P)))
        begin = 0
        for length, best_K in zip(length_E.tolist(), found, strict=True):
            mine_P = sign_P[begin : begin + length]
            begin += length
            totals[EVENTS] += 1
            totals[CLICKS] += length
            place = FIRST
            for best in (best_K, popular_K):
                for k in self._at:
                    hits = int(np.count_nonzero(np.isin(mine_P, best[:k])))
                    totals[place] += hits > 0
                    totals[place + 1] += round(hits / length * UNIT)
                    place += 2

    def reports(self) -> dict[str, dict[str, float | int | None]]:
        """Rank 0: the measures of "pass", "window" and "life", by name."""
        scopes = {"pass": self._pass, "window": self._past.window.total(self._pass), "life": self._past.life}
        return {span: self._measures(scope.totals["found"][0]) for span, scope in scopes.items()}

    def _measures(self, totals_W: I64) -> dict[str, float | int | None]:
        events = int(totals_W[EVENTS])
        found: dict[str, float | int | None] = {"looked_for": events}
        if totals_W[MISSING]:
            found["not_in_index"] = int(totals_W[MISSING]) / int(totals_W[CLICKS])
        place = FIRST
        for method in METHODS:
            for k in self._at:
                hits, recall = int(totals_W[place]), int(totals_W[place + 1])
                found[f"{method}_recall@{k}"] = recall / UNIT / events if events else None
                found[f"{method}_hit_rate@{k}"] = hits / events if events else None
                place += 2
            found[f"{method}_recall"] = found[f"{method}_recall@{self._at[0]}"]
        return found

    def state(self) -> MeterState:
        """Rank 0, between passes: for a commit."""
        (arrays, facts), popular = self._past.state(), self._popular.state()
        arrays |= {f"popular/{name}": array for name, array in popular.arrays.items()}
        return MeterState(arrays, {**facts, "at": list(self._at), "passes": self._passes, "popular": popular.facts})

    def load_state(self, state: MeterState) -> None:
        """Continue from a commit. With other numbers of items the measures start anew."""
        self._begin()
        self._passes = int(state.facts["passes"])
        popular = {n.removeprefix("popular/"): a for n, a in state.arrays.items() if n.startswith("popular/")}
        self._popular.load(MeterState(popular, state.facts["popular"]))
        if state.facts["at"] == list(self._at):
            self._past.load(state.arrays, state.facts, {"found"})
