"""The last result of `headrace freshness`, kept as a small file in the job's store, for its report, page and API.

service.history.version_ages has the result itself. A fresh run removes the file, as all that belongs to a run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headrace import documents
from headrace.durable import REAL, check_no_link, write_whole, writing
from headrace.service.cluster.store import FRESHNESS
from headrace.service.history.version_ages import METRICS, AgeCost, band_text, format_costs

FORMAT = 1
"""Number of the file's layout."""
MAX_COSTS = 1_000
"""Most lines of the table that are kept, in its order: 27 tasks with all metrics and ages. The rest is counted."""
MAX_BYTES = 1 << 20
"""Longest file that is read."""


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
