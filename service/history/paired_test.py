"""Compares how well two jobs predicted the same events: a paired test over the parts of the stream that both closed.

Both logs hold the metrics of each pass, of predictions made before training on it. A part is what lies between two
places that both jobs closed at: one pass, where both cut the stream alike. Reads logs only.

Shapes: N parts, R draws.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from headrace.dataset.samples.batch import F64
from headrace.errors import SpecError
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read_history

MIN_PARTS = 6
"""Fewer parts have no p-value below 0.03, whatever they hold."""
NUM_FLIPS = 10_000
"""Draws of random signs that a p-value is counted from."""
MAX_SIGNS = 1_000_000
"""Most signs in memory at a time."""


@dataclass(frozen=True, slots=True)
class PairedResult:
    """One metric of one task in both jobs, over the same events."""

    task: str
    metric: str
    parts: int
    first: float
    """Mean over parts, weighted by samples."""
    second: float
    difference: float
    """Of the second from the first."""
    error: float
    """Standard error of the difference, for parts that are independent."""
    p: float
    """Share of random signs of the differences that give at least such a mean: how likely chance alone is."""


@dataclass(frozen=True, slots=True)
class JobComparison:
    """The result of `compare_jobs`."""

    parts: int
    events: int
    only_first: int
    """Closed passes of the first job that have no counterpart."""
    only_second: int
    results: Sequence[PairedResult]


@dataclass(frozen=True, slots=True)
class ClosedPart:
    """The passes between two places of the stream, as one job measured them."""

    events: int
    samples: int
    figures: Mapping[tuple[str, str], float]
    """By task and metric."""
    end_s: float | None = None
    """Highest event time up to its end."""


def compare_jobs(first: Path, second: Path, after: int = 0) -> JobComparison:
    """Compare the logs in two folders, leaving out the first `after` common parts.

    Raises SpecError if the jobs have too few parts in common.
    """
    ours, theirs = (list(closed_places(read_history(folder))) for folder in (first, second))
    common = {place for place, _ in ours} & {place for place, _ in theirs}
    pairs = list(zip(common_parts(ours, common), common_parts(theirs, common), strict=True))[after:]
    pairs = [(a, b) for a, b in pairs if a.events == b.events and a.figures.keys() & b.figures.keys()]
    if len(pairs) < MIN_PARTS:
        raise SpecError(
            f"the jobs have {len(pairs)} parts of the stream in common that both have measured; at least {MIN_PARTS} "
            "are needed. Let both read the same source with the same passes.max_events, and compare them before their "
            "logs are pruned"
        )
    names = sorted(set.intersection(*(set(part.figures) for pair in pairs for part in pair)))
    return JobComparison(
        parts=len(pairs),
        events=sum(a.events for a, _ in pairs),
        only_first=sum(place not in common for place, _ in ours),
        only_second=sum(place not in common for place, _ in theirs),
        results=[_result(task, metric, pairs) for task, metric in names],
    )


def _result(task: str, metric: str, pairs: Sequence[tuple[ClosedPart, ClosedPart]]) -> PairedResult:
    name, weight_N = (task, metric), np.array([a.samples for a, _ in pairs], np.float64)
    first_N, second_N = (np.array([pair[side].figures[name] for pair in pairs]) for side in (0, 1))
    mean, error, p = paired(second_N - first_N, weight_N)
    first, second = (float(np.average(each_N, weights=weight_N)) for each_N in (first_N, second_N))
    return PairedResult(task, metric, len(pairs), first, second, mean, error, p)


def paired(difference_N: F64, weight_N: F64) -> tuple[float, float, float]:
    """(N,), (N,) -> weighted mean, its standard error, and the p-value of a test by random signs (two-sided).

    The same at every call. With equal numbers in both jobs p is 1.
    """
    share_N = weight_N / weight_N.sum()
    mean, num = float(share_N @ difference_N), len(difference_N)
    error = float(np.sqrt(np.sum((share_N * (difference_N - mean)) ** 2) * num / (num - 1)))
    scaled_N = share_N * difference_N
    bound, random, as_far = abs(mean) * (1 - 1e-12), np.random.default_rng(0), 1  # the signs found are one draw
    rows = max(1, MAX_SIGNS // num)
    for begin in range(0, NUM_FLIPS, rows):
        sign_RN = 1 - 2 * random.integers(0, 2, (min(rows, NUM_FLIPS - begin), num))
        as_far += int(np.count_nonzero(np.abs(sign_RN @ scaled_N) >= bound))
    return mean, error, as_far / (NUM_FLIPS + 1)


Place = tuple[tuple[str, int], ...]
"""The position reached in each partition."""


def closed_places(
    history: JobHistory, after: int = 0, begin: Mapping[str, int] = MappingProxyType({})
) -> Iterator[tuple[Place, ClosedPart]]:
    """After each closed pass with events, in order: the positions that the job has reached, and the pass.

    Only passes after version `after`, where the job had reached `begin`.
    """
    reached = dict(begin)
    for number in sorted(history.closes.keys() & history.plans.keys()):
        plan, close = history.plans[number].content, history.closes[number].content
        if not plan.num_positions or plan.epoch > 1 or number <= after:  # later epochs predict what was learnt already
            continue
        reached |= plan.positions()
        figures = {(task, name): value for task, found in close.of_pass.items() for name, value in found.items()}
        yield tuple(sorted(reached.items())), ClosedPart(close.events, close.samples, figures, close.event_time_s)


def common_parts(places: Sequence[tuple[Place, ClosedPart]], common: set[Place]) -> Iterator[ClosedPart]:
    """The passes up to each common place, as one part. A pass without samples has no figures."""
    waiting: list[ClosedPart] = []
    for place, part in places:
        waiting.append(part)
        if place in common:
            yield _merged([each for each in waiting if each.samples] or waiting)
            waiting = []


def _merged(parts: Sequence[ClosedPart]) -> ClosedPart:
    names = set.intersection(*(set(part.figures) for part in parts))
    samples = sum(part.samples for part in parts)
    figures = {name: sum(part.figures[name] * part.samples for part in parts) / samples for name in sorted(names)}
    return ClosedPart(sum(part.events for part in parts), samples, figures, parts[-1].end_s)


def format_comparison(found: JobComparison) -> Iterator[str]:
    """Lines for people."""
    yield f"{found.events:,} events in {found.parts} parts that both jobs closed"
    for whose, left in (("first", found.only_first), ("second", found.only_second)):
        if left:
            yield f"{left} passes of the {whose} job end where the other has no close; they count with the next one"
    yield f"{'task':<12} {'metric':<12} {'first':>10} {'second':>10} {'difference':>11} {'error':>9} {'p':>7}"
    for each in found.results:
        numbers = (
            f"{each.first:>10.5f} {each.second:>10.5f} {each.difference:>+11.5f} {each.error:>9.5f} {each.p:>7.4f}"
        )
        yield f"{each.task:<12} {each.metric:<12} {numbers}"
    yield "a part is one pass, where both jobs cut the stream alike; error: standard error of the difference"
    yield "p: how often random signs of the differences give such a mean; parts are taken as independent"
