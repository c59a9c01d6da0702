"""`millrace explain`: what a job knows of one sign, in words. What is known, the shards say (pserver.table).

Of a job that does not run, its newest commit says it (service.operating.committed).

Which exports it is in, is looked up where they lie (service.operating.holding).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataset.schema import Schema
from millrace.deadline import Deadline
from millrace.job_client import JobClient
from service.lines import count
from service.operating import committed, holding
from service.operating.signs import sign_of
from service.spec import LoadedJob
from service.store import in_use


def explained(job: LoadedJob, slot: str, value: str, deadline: Deadline) -> dict[str, Any]:
    """All that is known of a sign."""
    sign = sign_of(job.spec, slot, value)
    if in_use(job.store):
        known = JobClient(job.store).answer({"do": "explain", "slot": slot, "sign": sign}, deadline)
    else:
        with committed.opened(job, Schema.of(job.spec.slots).by_name[slot].sparse.table, deadline) as rows:
            known = rows.explain(slot, sign, deadline)
    known["exports"] = holding.held_by(job, known["table"], known["key"], deadline)
    return known


def told(known: Mapping[str, Any]) -> Iterator[str]:
    """In words, a line for each matter."""
    yield f"slot {known['slot']}, sign {known['sign']}: table {known['table']}, group {known['group']}"
    shard = f", shard {known['shard']}" if "shard" in known else ""
    yield f"key {known['key']}, bucket {known['bucket']}{shard}"
    if "commit" in known:
        yield f"the job does not run: this is as of its newest commit, {known['commit']}"
    yield from _admission(known.get("admission", ()), has_row=known["row"])
    yield from _row(known)
    yield from holding.told(known.get("exports", ()))


def _row(known: Mapping[str, Any]) -> Iterator[str]:
    if not known["row"]:
        yield "it has no row" + ("" if known.get("admission") else ": it was never pushed, or it went")
        return
    yield f"score {known['score']:.6g}: shows {known['show']:.6g}, clicks {known['click']:.6g}"
    yield f"delta_score {known['delta_score']:.6g}; changed in version {known['changed_version']}"
    yield f"last seen on day {known['last_seen_day']}, {_days(known['unseen_days'])} ago"
    yield _leaves(known["leaves_after_days"])
    yield f"weights {' '.join(f'{weight:.6g}' for weight in known['weights'])}"


def _days(days: int) -> str:
    return "1 day" if days == 1 else f"{days} days"


def _leaves(days: int | None) -> str:
    if days is None:
        return "it stays: no rule would take it within ten years, if it is never seen again"
    return f"if it is never seen again, a shrink takes it in {_days(days)}" if days else "the next shrink takes it"


def _admission(entries: Sequence[Mapping[str, Any]], *, has_row: bool) -> Iterator[str]:
    """A sentence for each entry; for a key with a row they only tell what would be, if that went."""
    if entries and has_row:
        yield "admission: admitted; would have to be again if its row went"
    for entry in entries:
        yield f"admission: {_entry(entry)}"


def _entry(entry: Mapping[str, Any]) -> str:
    if "lot" in entry:
        drawn = "which admits it" if entry["agrees"] else "which does not admit it"
        return f"{entry['kind']} {entry['p']:g}: its lot is {entry['lot']:.3g}, {drawn}"
    about = "" if entry["exact"] else "about "
    if "n" in entry:
        seen = f"{entry['estimate']:.6g}"
        text = f"{entry['kind']} {entry['n']:g}: seen {about}{seen} {'time' if seen == '1' else 'times'}"
    else:
        text = f"{entry['kind']} {entry['score']:g}: its score is {about}{entry['estimate']:.6g}"
    return f"{text} ({_quality(entry)})"


def _quality(entry: Mapping[str, Any]) -> str:
    if not entry["exact"]:
        return f"sketch, at most +{entry['too_high_by_at_most']:.3g} too high"
    dropped = entry.get("bucket_dropped_keys", 0)
    return f"exact; its bucket was full, {count(dropped)} keys were dropped from it" if dropped else "exact"
