"""`millrace explain`: what a running job knows of one sign, in words. What is known, the shards say (pserver.table)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.deadline import Deadline
from service.operating.signs import sign_of
from service.operating.wishes import answered
from service.spec import LoadedJob


def explain(job: LoadedJob, slot: str, value: str, deadline: Deadline, *, as_json: bool) -> None:
    """Print all that is known of a sign."""
    sign = sign_of(job.spec, slot, value)
    known = answered(job.store, {"do": "explain", "slot": slot, "sign": sign}, deadline)
    print(json.dumps(known) if as_json else "\n".join(told(known)))


def told(known: Mapping[str, Any]) -> Iterator[str]:
    """In words, a line for each matter."""
    yield f"slot {known['slot']}, sign {known['sign']}: table {known['table']}, group {known['group']}"
    shard = f", shard {known['shard']}" if "shard" in known else ""
    yield f"key {known['key']}, bucket {known['bucket']}{shard}"
    for entry in known.get("admission", ()):
        yield f"admission: {_facts(entry)}"
    if not known["row"]:
        yield "it has no row" + ("" if known.get("admission") else ": it was never pushed, or it went")
        return
    yield f"score {known['score']:.6g}: shows {known['show']:.6g}, clicks {known['click']:.6g}"
    yield f"delta_score {known['delta_score']:.6g}; changed in version {known['changed_version']}"
    yield f"last seen on day {known['last_seen_day']}, {known['unseen_days']} days ago"
    yield _leaves(known["leaves_after_days"])
    yield f"weights {' '.join(f'{weight:.6g}' for weight in known['weights'])}"


def _leaves(days: int | None) -> str:
    if days is None:
        return "it stays: no rule would take it within ten years, if it is never seen again"
    return f"if it is never seen again, a shrink takes it in {days} days" if days else "the next shrink takes it"


def _facts(entry: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.items()) if isinstance(entry, Mapping) else str(entry)
