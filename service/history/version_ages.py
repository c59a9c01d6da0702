"""The price of a served version's age: older versions against the job itself, over the same events.

The job predicts each sample with a model that has learnt all before it; a frozen version predicts the same passes. The
difference of their metrics, by the age of the version at that time, is the price of age. service.history.frozen_runs
makes the frozen runs. The last result of `headrace freshness` is kept as a small file in the job's store, for its
report, page and API; a fresh run removes the file, as all that belongs to a run.

Shapes: N parts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from headrace import documents
from headrace.durable import REAL, check_no_link, write_whole, writing
from headrace.service.cluster.store import FRESHNESS
from headrace.service.history.paired_test import MIN_PARTS, ClosedPart, closed_places, common_parts, paired
from headrace.trainer.journal.job_history import JobHistory

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
AGES_S = (
    0.0, 10 * MINUTE_S, 30 * MINUTE_S, HOUR_S, 2 * HOUR_S, 4 * HOUR_S, 8 * HOUR_S, 16 * HOUR_S, DAY_S, 2 * DAY_S,
    4 * DAY_S, 8 * DAY_S,
)  # fmt: skip
"""Bounds of the bands of ages; older parts are one more band."""
METRICS = ("auc", "gauc", "logloss")
FORMAT = 1
"""Number of the layout of the file that keeps the last result."""
MAX_COSTS = 1_000
"""Most lines of the table that are kept, in its order: 27 tasks with all metrics and ages. The rest is counted."""
MAX_BYTES = 1 << 20
"""Longest file that is read."""


@dataclass(frozen=True, slots=True)
class AgedPart:
    """Some passes that the job and a frozen version predicted."""

    version: int
    """The frozen one."""
    age_s: float
    """From the newest event that the version has learnt to the middle of the part."""
    job: ClosedPart
    frozen: ClosedPart


@dataclass(frozen=True, slots=True)
class AgeCost:
    """One metric of one task in one band of ages."""

    task: str
    metric: str
    from_s: float
    to_s: float | None
    """None: no bound."""
    parts: int
    versions: int
    samples: int
    job: float
    """Mean over parts, weighted by samples."""
    frozen: float
    difference: float
    """Of the frozen version from the job."""
    error: float | None
    p: float | None
    """As in service.history.paired_test; None for fewer than 6 parts."""


def aged_parts(
    version: int, time_s: float, begin: Mapping[str, int], job: JobHistory, frozen: JobHistory
) -> list[AgedPart]:
    """The parts that both closed after `version`, which ends at the positions `begin` and the event time `time_s`."""
    ours, theirs = (list(closed_places(each, version, begin)) for each in (job, frozen))
    common = {place for place, _ in ours} & {place for place, _ in theirs}
    found, before_s = [], time_s
    for one, other in zip(common_parts(ours, common), common_parts(theirs, common), strict=True):
        end_s = before_s if one.end_s is None else one.end_s
        if one.events == other.events and one.figures.keys() & other.figures.keys():
            found.append(AgedPart(version, (before_s + end_s) / 2 - time_s, one, other))
        before_s = end_s
    return found


def costs_of(parts: Sequence[AgedPart]) -> list[AgeCost]:
    """By task, metric and band of ages, the youngest first; a band without parts is left out."""
    names = sorted({name for part in parts for name in part.job.figures}, key=lambda name: (name[0], _rank(name[1])))
    found = []
    for name in (name for name in names if name[1] in METRICS):
        known = [part for part in parts if name in part.job.figures and name in part.frozen.figures]
        for number, from_s in enumerate(AGES_S):
            to_s = AGES_S[number + 1] if number + 1 < len(AGES_S) else None
            band = [part for part in known if part.age_s >= from_s and (to_s is None or part.age_s < to_s)]
            if band:
                found.append(_cost(name, from_s, to_s, band))
    return found


def _cost(name: tuple[str, str], from_s: float, to_s: float | None, band: Sequence[AgedPart]) -> AgeCost:
    weight_N = np.array([part.job.samples for part in band], np.float64)
    job_N, frozen_N = (np.array([side.figures[name] for side in sides]) for sides in _sides(band))
    error, p = None, None
    if len(band) >= MIN_PARTS:
        _, error, p = paired(frozen_N - job_N, weight_N)
    job, frozen = (float(np.average(each_N, weights=weight_N)) for each_N in (job_N, frozen_N))
    versions = len({part.version for part in band})
    samples = sum(part.job.samples for part in band)
    return AgeCost(*name, from_s, to_s, len(band), versions, samples, job, frozen, frozen - job, error, p)


def _sides(band: Sequence[AgedPart]) -> tuple[list[ClosedPart], list[ClosedPart]]:
    return [part.job for part in band], [part.frozen for part in band]


def _rank(metric: str) -> int:
    return METRICS.index(metric) if metric in METRICS else len(METRICS)


def spread(versions: Sequence[int], most: int) -> list[int]:
    """At most `most` of the versions, evenly spread, the first and the last among them."""
    if len(versions) <= most:
        return list(versions)
    if most == 1:
        return [versions[0]]
    return [versions[round(number * (len(versions) - 1) / (most - 1))] for number in range(most)]


def format_costs(versions: Sequence[int], costs: Sequence[AgeCost]) -> Iterator[str]:
    """A table for people."""
    yield f"versions {', '.join(map(str, versions))}, frozen; the job itself learns each pass after it has predicted it"
    head = f"{'task':<12} {'metric':<8} {'age':<15} {'passes':>6} {'job':>9} {'frozen':>9} {'difference':>11}"
    yield f"{head} {'error':>9} {'p':>7}"
    for cost in costs:
        numbers = f"{cost.parts:>6} {cost.job:>9.5f} {cost.frozen:>9.5f} {cost.difference:>+11.5f}"
        sure = f"{'-':>9} {'-':>7}" if cost.p is None else f"{cost.error:>9.5f} {cost.p:>7.4f}"
        yield f"{cost.task:<12} {cost.metric:<8} {band_text(cost.from_s, cost.to_s):<15} {numbers} {sure}"
    yield "passes: of one version each; several count as one where the job closed fewer; metrics are means over them"
    yield f"error: standard error of the difference; p: as in `headrace compare`; both need {MIN_PARTS} passes"
    yield "passes of one version are taken as independent"


def band_text(from_s: float, to_s: float | None) -> str:
    """A band of ages, in words."""
    return f"{_length(from_s)} +" if to_s is None else f"{_length(from_s)} - {_length(to_s)}"


def _length(seconds: float) -> str:
    for unit, length_s in (("d", DAY_S), ("h", HOUR_S), ("min", MINUTE_S)):
        if seconds >= length_s and seconds % length_s == 0:
            return f"{seconds / length_s:g} {unit}"
    return f"{seconds:g}"


@dataclass(frozen=True, slots=True)
class MeasuredAges:
    """The price of a served version's age, when it was measured last."""

    measured_at: datetime
    """In UTC."""
    passes: int
    """The newest pass that the job had closed then."""
    versions: tuple[int, ...]
    """The old ones that were run again."""
    ages: tuple[AgeCost, ...]
    left_out: int = 0
    """Lines beyond MAX_COSTS."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self) | {"measured_at": self.measured_at.isoformat(timespec="seconds")}


_MEASURED = TypeAdapter(MeasuredAges)


def keep_ages(store: Path, passes: int, versions: Sequence[int], costs: Sequence[AgeCost]) -> MeasuredAges:
    """Keep a result of now in `store`, in place of the last one. Raises Unwritable."""
    now = datetime.now(UTC).replace(microsecond=0)
    left_out = max(0, len(costs) - MAX_COSTS)
    found = MeasuredAges(now, passes, tuple(versions), tuple(costs[:MAX_COSTS]), left_out)
    path = check_no_link(store / FRESHNESS)
    with writing(path):
        write_whole(REAL, path, json.dumps({"format": FORMAT, **found.message()}).encode())
    return found


def read_ages(store: Path) -> MeasuredAges | None:
    """The result kept in `store`; None where there is none, or one of a newer layout. Raises InvalidDocument."""
    path = check_no_link(store / FRESHNESS)
    if not path.exists():
        return None
    content = documents.read_object(path, MAX_BYTES)
    number = content.get("format")
    return None if type(number) is int and number > FORMAT else of_message(content, path)


def of_message(content: Mapping[str, Any], what: object = "the answer") -> MeasuredAges | None:
    """A result from its message, also that of the API; None for one that was never made. Raises InvalidDocument."""
    if "measured_at" in content and content["measured_at"] is None:
        return None
    try:
        return _MEASURED.validate_python(content)
    except ValidationError:
        raise documents.InvalidDocument(what, "is no result of `headrace freshness`") from None


def format_measured(found: MeasuredAges) -> Iterator[str]:
    """The result as a table for people, with when it was measured."""
    yield f"measured {found.measured_at:%Y-%m-%d %H:%M:%S} UTC, when the job had closed pass {found.passes:,}"
    yield from format_costs(found.versions, found.ages)
    if found.left_out:
        yield f"and {found.left_out:,} more lines, which are not kept"


def brief_lines(found: MeasuredAges) -> Iterator[str]:
    """A line for each task, for the report of a run: the differences of the AUC, else of the first metric, by age."""
    for task in dict.fromkeys(cost.task for cost in found.ages):
        known = {cost.metric for cost in found.ages if cost.task == task}
        metric = next((each for each in METRICS if each in known), min(known))
        costs = [cost for cost in found.ages if (cost.task, cost.metric) == (task, metric)]
        parts = ", ".join(f"{band_text(cost.from_s, cost.to_s)} {cost.difference:+.4f}" for cost in costs)
        yield f"age price {metric.upper() if metric != 'logloss' else metric} {task}: {parts}"
    if found.ages:
        when = f"{found.measured_at:%Y-%m-%d %H:%M:%S} UTC at pass {found.passes:,}"
        yield f"          of a served version, measured {when}"
