"""Measures what slots and possible features of a stream are worth: AUC of a linear model, progressive, on a sample.

Every sample is predicted before it is learnt, and the second half counts. A feature is proposed only where its gain is
more than chance, by a paired test over parts of that half. No clock and no order of sets decides: the same sample gives
the same proposals.

Shapes: B samples, E events, P parts of the second half, H samples of it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, count, islice, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.exact_auc import exact_auc
from headrace.service.history.paired_test import paired
from headrace.service.planning.feature_columns import F64, I64, IdColumn, of_counters, of_cross, of_history
from headrace.service.planning.progressive_learner import learn

RATES = (0.03, 0.1, 0.3)
"""Steps of the learner that are tried; the best one on the slots as they are is kept."""
NUM_PARTS = 20
MAX_P = 0.002
"""Greatest p-value of a gain: some 25 features are compared at a time."""
MIN_GAIN = 0.0005
"""Least AUC that a feature must add."""
MIN_SAMPLES = 1_000
MAX_PARTS = 24
"""Slots that are combined: those that say most alone."""
MAX_CROSSES, MAX_COUNTERS, MAX_HISTORIES = 12, 8, 4
"""Features of each kind that are looked at more closely."""
MAX_FOUND = 6
"""Features that are added."""
MAX_DROPPED = 4
MIN_DROP = 0.002
"""Least AUC that is gained without a slot that is to be dropped: on a longer stream it may learn more."""
MAX_CROSSED_LEN = 16.0
"""Ids of a cross a sample, in the mean."""
HISTORY = 20
"""Ids that a history remembers."""
MAX_PAIRS = 24
"""Pairs of a key and what its history remembers."""
MIN_IDS, MAX_REMEMBERED = 50, 2.0
"""Fewest ids of a key and of what its history remembers; most ids of these a sample, in the mean."""
MIN_OLD = 0.2
"""Least share of samples whose key has a history."""
THRESHOLDS = (2, 3, 5, 10)
"""Thresholds of admission that are tried."""
HOUR_S, DAY_S = 3_600, 86_400


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Labels, events and times of the samples."""

    label_B: F64
    end_E: I64
    time_s_B: F64

    @property
    def click_B(self) -> NDArray[np.bool_]:
        """Whether the label is that of a click."""
        return self.label_B > 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """Predictions of all samples, each before it was learnt."""

    logit_B: F64
    loss_B: F64
    auc: float
    """Of the second half, as are gains."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The worth of a change."""

    auc: float
    """AUC with it, minus AUC without."""
    loss: float
    """The same of the log loss: below 0 is better."""
    p: float
    """Of the difference in log loss: how likely chance alone is."""

    @property
    def pays(self) -> bool:
        """Whether it is better, and that is more than chance."""
        return self.auc >= MIN_GAIN and self.loss < 0 and self.p <= MAX_P


@dataclass(frozen=True, slots=True)
class Feature:
    """A slot that might be added."""

    kind: str
    """"cross", "counters", "history"; or "ids": in place of the slots that it is made of."""
    of: tuple[str, ...]
    """The slots that it is made of."""
    keys: Mapping[str, Any]
    """Its keys in the job file, without a name."""
    column: IdColumn = field(repr=False)


@dataclass(frozen=True, slots=True)
class FeatureWorth:
    """The results of a measurement."""

    samples: int
    auc: float
    """Of the slots as they are."""
    rate: float
    """The learner's."""
    slots: Mapping[str, tuple[Gain, int]]
    """By slot: what it is worth, as the gain of leaving it out, and its rows."""
    dropped: tuple[str, ...]
    """Slots without which the others predict better, by MIN_DROP and more than chance."""
    replaced: tuple[tuple[Feature, Gain], ...]
    """Ids in place of numbers, as far as they pay."""
    features: tuple[tuple[Feature, Gain], ...]
    """Features that pay, each on top of those before it."""
    others: tuple[tuple[Feature, Gain], ...]
    """The best of the rest, each alone on top of the slots: what they say is in the others, too."""
    session: Feature | None
    """The best history, whether it pays or not: of a stream whose keys come again."""
    admission: Mapping[int, tuple[Gain, int]]
    """By threshold, for all slots with these features: the change, and the rows that are left."""
    num_rows: int
    """Of all slots with these features."""


class FeatureBench:
    """Measures sets of columns on one sample of a stream."""

    def __init__(self, facts: SampleFacts) -> None:
        """Raises BadInput for a sample that is too short, or has labels of one kind alone."""
        self.facts = facts
        num = len(facts.label_B)
        self._second = slice(num // 2, num)
        positive_B = facts.click_B[self._second]
        if num < MIN_SAMPLES or positive_B.all() or not positive_B.any():
            raise BadInput(f"{num:,} samples, or labels of one kind alone, measure nothing; {MIN_SAMPLES:,} are needed")
        self.rate = RATES[0]

    def measure(self, columns: Sequence[IdColumn], *, offset_B: F64 | None = None, admit: int = 1) -> Progress:
        """Learn the columns together. `offset_B`: logits that are not learnt again; `admit`: see `learn`."""
        num = len(self.facts.label_B)
        start_CB1 = np.zeros((len(columns), num + 1), np.int64)
        num_values = num_ids = 0
        ids, shares = [np.empty(0, np.int64)], [np.empty(0)]
        for c, column in enumerate(columns):
            start_CB1[c] = column.start_B1 + num_values
            ids.append(column.id_N + num_ids)
            shares.append(column.share_N())
            num_values, num_ids = num_values + len(column.id_N), num_ids + column.num_ids
        logit_B = np.zeros(num) if offset_B is None else offset_B.copy()
        room = np.empty(num_ids), np.empty(num_ids), np.empty(num_ids, np.int64)
        columns_CN = start_CB1, np.concatenate(ids), np.concatenate(shares)
        learn(*columns_CN, self.facts.label_B, self.facts.end_E, admit, self.rate, *room, logit_B)
        loss_B = np.logaddexp(0.0, logit_B) - self.facts.label_B * logit_B
        label_H = self.facts.label_B[self._second]
        auc = exact_auc(logit_B[self._second], label_H, np.ones(len(label_H)))
        assert auc is not None, "both labels are in the second half"
        return Progress(logit_B, loss_B, auc)

    def gain(self, before: Progress, after: Progress) -> Gain:
        """Of a change."""
        parts = np.array_split((after.loss_B - before.loss_B)[self._second], NUM_PARTS)
        mean, _, p = paired(np.array([each.mean() for each in parts]), np.array([len(each) for each in parts], float))
        return Gain(after.auc - before.auc, mean, p)

    def loss(self, progress: Progress) -> float:
        """Mean log loss of the second half."""
        return float(progress.loss_B[self._second].mean())

    def choose_rate(self, columns: Sequence[IdColumn]) -> Progress:
        """Keep the rate by which the columns learn best."""
        found = []
        for rate in RATES:
            self.rate = rate
            progress = self.measure(columns)
            found.append((self.loss(progress), rate, progress))
        _, self.rate, best = min(found, key=lambda each: each[:2])
        return best


def find_features(
    facts: SampleFacts,
    base: Mapping[str, IdColumn],
    click: str,
    *,
    ids: Sequence[Feature] = (),
    doubted: Collection[str] = (),
    crosses: Collection[str] = (),
) -> FeatureWorth:
    """Measure the slots `base`, and features that can be made of them. Raises BadInput for a sample without worth.

    `click`: the label, a meta slot. `ids`: columns that may replace numbers. `doubted`: slots that are dropped unless
    they are worth something. `crosses`: slots that are crosses, of which no other feature is made.
    """
    bench = FeatureBench(facts)
    before = bench.choose_rate(list(base.values()))
    kept, start, replaced = _with_ids(bench, base, before, ids)
    slots = {}
    for name, column in kept.items():
        rest = bench.measure([each for other, each in kept.items() if other != name])
        slots[name] = bench.gain(start, rest), column.num_rows
    kept, start, dropped = _without_worst(bench, kept, start, slots, doubted)
    plain = {name: each for name, each in kept.items() if name not in crosses}
    candidates = _shortlist(bench, start, plain, click)
    columns, at, features = list(kept.values()), start, list[tuple[Feature, Gain]]()
    for feature in _forward(bench, start, candidates):
        with_it = bench.measure([*columns, feature.column])
        gain = bench.gain(at, with_it)
        if gain.pays:
            features.append((feature, gain))
            columns, at = [*columns, feature.column], with_it
    untaken = [each for each in candidates if not any(each is feature for feature, _ in features)]
    alone = [(each, bench.gain(start, bench.measure([each.column], offset_B=start.logit_B))) for each in untaken]
    others = sorted((each for each in alone if each[1].pays), key=lambda each: each[1].loss)
    admission = {}
    for threshold in THRESHOLDS:
        gain = bench.gain(at, bench.measure(columns, admit=threshold))
        admission[threshold] = gain, sum(_rows_seen(each, threshold) for each in columns)
    num_rows = sum(each.num_rows for each in columns)
    return FeatureWorth(
        samples=len(facts.label_B),
        auc=before.auc,
        rate=bench.rate,
        slots=slots,
        dropped=dropped,
        replaced=tuple(replaced),
        features=tuple(features),
        others=tuple(others[:MAX_FOUND]),
        session=next((each for each in candidates if each.kind == "history" and _is_of_items(each, kept)), None),
        admission=admission,
        num_rows=num_rows,
    )


def _with_ids(
    bench: FeatureBench, base: Mapping[str, IdColumn], before: Progress, ids: Sequence[Feature]
) -> tuple[dict[str, IdColumn], Progress, list[tuple[Feature, Gain]]]:
    """Put ids in the place of numbers, one after another, where that pays."""
    kept, replaced = dict(base), list[tuple[Feature, Gain]]()
    for feature in ids:
        rest = {name: each for name, each in kept.items() if name not in feature.of}
        changed = {**rest, str(feature.keys["name"]): feature.column}
        after = bench.measure(list(changed.values()))
        gain = bench.gain(before, after)
        if gain.pays:
            kept, before = changed, after
            replaced.append((feature, gain))
    return kept, before, replaced


def _is_of_items(history: Feature, slots: Mapping[str, IdColumn]) -> bool:
    """Whether there are more ids to remember than keys, as of items and users."""
    key, of = history.of
    return slots[of].num_ids >= slots[key].num_ids


def _rows_seen(column: IdColumn, times: int) -> int:
    """Rows of the ids that are seen so often; all those of features that have no ids."""
    if not column.num_rows or column.num_ids != column.num_rows:
        return column.num_rows
    return int(np.count_nonzero(np.bincount(column.id_N, minlength=1) >= times))


def _without_worst(
    bench: FeatureBench,
    kept: dict[str, IdColumn],
    before: Progress,
    slots: Mapping[str, tuple[Gain, int]],
    doubted: Collection[str],
) -> tuple[dict[str, IdColumn], Progress, tuple[str, ...]]:
    """Leave out slots as long as the others are then better."""

    def is_worse(gain: Gain, name: str) -> bool:
        return gain.loss < 0 if name in doubted else gain.pays and gain.auc >= MIN_DROP

    dropped: list[str] = []
    worst = sorted((gain.loss, name) for name, (gain, _) in slots.items() if is_worse(gain, name))
    for _, name in worst[:MAX_DROPPED]:
        rest = {other: each for other, each in kept.items() if other != name}
        after = bench.measure(list(rest.values()))
        gain = bench.gain(before, after)
        if rest and is_worse(gain, name):
            kept, before = rest, after
            dropped.append(name)
    return kept, before, tuple(dropped)


def _forward(bench: FeatureBench, start: Progress, candidates: Sequence[Feature]) -> list[Feature]:
    """The features that pay together, the best first: each is learnt on top of the predictions of the slots."""
    chosen: list[Feature] = []
    at, rest = start, list(candidates)
    while rest and len(chosen) < MAX_FOUND:
        found = []
        for each in rest:
            after = bench.measure([*(one.column for one in chosen), each.column], offset_B=start.logit_B)
            found.append((bench.gain(at, after), after, each))
        best = min(range(len(found)), key=lambda n: found[n][0].loss)
        gain, at_best, feature = found[best]
        if not gain.pays:
            break
        chosen.append(feature)
        at = at_best
        rest = [each for worth, _, each in found if each is not feature and worth.loss < 0]
    return chosen


def _shortlist(bench: FeatureBench, start: Progress, base: Mapping[str, IdColumn], click: str) -> list[Feature]:
    """The most promising features of each kind, by what each adds alone to the predictions of the slots."""

    def best(features: Iterator[Feature], most: int) -> list[Feature]:
        found = []
        for number, each in enumerate(features):
            loss = bench.loss(bench.measure([each.column], offset_B=start.logit_B))
            found.append((loss, number, each))
        found.sort(key=lambda one: one[:2])
        return [each for loss, _, each in found[:most] if loss < bench.loss(start)]

    ids = {name: each for name, each in base.items() if each.num_ids == each.num_rows > 1}
    alone = sorted((-bench.measure([each]).auc, name) for name, each in ids.items())
    parts = {name: ids[name] for _, name in alone[:MAX_PARTS]}
    found = best(_crosses(parts), MAX_CROSSES)
    found += best(_counters(bench.facts, parts, found[:4], click), MAX_COUNTERS)
    return found + best(islice(_histories(bench.facts, parts, click), MAX_PAIRS), MAX_HISTORIES)


def _crosses(parts: Mapping[str, IdColumn]) -> Iterator[Feature]:
    for first, second in combinations(parts, 2):
        if parts[first].mean_len * parts[second].mean_len > MAX_CROSSED_LEN:
            continue
        column = of_cross(parts[first], parts[second])
        if max(parts[first].num_ids, parts[second].num_ids) < column.num_ids < 0.9 * len(column.id_N):
            yield Feature("cross", (first, second), {"cross": [first, second]}, column)


def _counters(
    facts: SampleFacts, parts: Mapping[str, IdColumn], crosses: Sequence[Feature], click: str
) -> Iterator[Feature]:
    timed_B = facts.time_s_B[np.isfinite(facts.time_s_B)]
    span_s = float(timed_B.max() - timed_B.min()) if len(timed_B) else 0.0
    windows = {name: length for name, length in (("1h", HOUR_S), ("1d", DAY_S)) if length * 2 < span_s} | {"all": 0}
    prior = round(min(0.99, max(0.01, float(facts.click_B.mean()))), 2)
    for of in [*((name,) for name in parts), *(each.of for each in crosses)]:
        columns = [parts[name] for name in of]
        if any(not each.is_single for each in columns):
            continue
        key = of[0] if len(of) == 1 else list(of)
        counters = {"key": key, "windows": list(windows), "click": click, "prior": prior}
        length_W = np.array(list(windows.values()), np.int64)
        column = of_counters(columns, facts.click_B, facts.end_E, facts.time_s_B, length_W)
        yield Feature("counters", of, {"kind": "dense", "counters": counters}, column)


def _histories(facts: SampleFacts, parts: Mapping[str, IdColumn], click: str) -> Iterator[Feature]:
    many = {name: each for name, each in parts.items() if each.num_ids >= MIN_IDS}
    for key, of in permutations(many, 2):
        if not many[key].is_single or many[of].mean_len > MAX_REMEMBERED:
            continue
        column = of_history(many[key], many[of], facts.click_B, facts.end_E, HISTORY)
        if np.count_nonzero(np.diff(column.start_B1)) >= MIN_OLD * len(facts.label_B):
            history = {"key": key, "of": of, "last": HISTORY, "when": click}
            yield Feature("history", (key, of), {"pooling": "mean", "history": history}, column)


def entry_of(feature: Feature, names: Collection[str], texts: Collection[str]) -> dict[str, Any]:
    """The keys of a feature's slot, with a name that none of `names` is. `texts`: slots whose values are texts."""
    base = "_".join(feature.of) + {"counters": "_counts", "history": "_history"}.get(feature.kind, "")
    name = next(each for each in chain([base], (f"{base}_{n}" for n in count(2))) if each not in names)
    keys = {"name": name, **feature.keys}
    if feature.kind == "history":
        keys |= {"share": name} | ({"values": "string"} if feature.of[1] in texts else {})
    return keys
