"""Rows of a job: explain what the job knows of a sign (a feature id of a slot), and rank the rows of a table.

Rank 0 and the shards answer (pserver.tables.table). For a job that does not run, its newest commit explains
(service.tables.committed_tables). service.exports.key_search finds the exports that contain the key.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.dataset.features.feature_kernels import crossed_reference, hashed_reference
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.keys import sign_of_text
from headrace.rpc.job_client import JobClient
from headrace.service.cluster.store import in_use
from headrace.service.exports import key_search
from headrace.service.spec.job import JobFile, LoadedJob
from headrace.service.tables import committed_tables
from headrace.validation import no_such


def sign_of(spec: JobFile, slot: str, value: str) -> int:
    """The sign of `value` in a sparse slot: its number, or the hash of its text. Raises SpecError.

    Of a cross, `value` is its sign, or the values of all its parts with commas between. `hash` of a slot is applied.
    """
    sparse = {each.name: each.sparse for each in Schema.of(spec.slots).sparse}
    if slot not in sparse:
        raise SpecError(no_such("sparse slot", slot, sparse))
    entry = sparse[slot]
    if not entry.cross:
        sign = _plain_sign(slot, entry.values == "string", value)
    elif "," not in value:
        return _plain_sign(slot, False, value)
    else:
        parts = value.split(",")
        if len(parts) != len(entry.cross):
            raise SpecError(f"{value!r:.100} has {len(parts)} values; {slot!r} crosses {', '.join(entry.cross)}")
        pairs = zip(entry.cross, parts, strict=True)
        texts = entry.values == "string"
        sign = crossed_reference(
            [sign_of(spec, part, each) if part in sparse else _plain_sign(part, texts, each) for part, each in pairs]
        )
    return sign if entry.hash is None else hashed_reference(sign, entry.hash)


def _plain_sign(slot: str, texts: bool, value: str) -> int:
    if texts:
        return sign_of_text(value.encode())
    if re.fullmatch(r"[0-9]{1,20}", value) is None or int(value) >= 1 << 64:
        raise SpecError(
            f'{value!r:.100} is not a sign of slot {slot!r}; its values are "uint64": decimal numbers of 64 bits'
        )
    return int(value)


# Explain


def explain(job: LoadedJob, slot: str, value: str, deadline: Deadline) -> dict[str, Any]:
    """All that the job knows of a sign, as JSON-able data."""
    sign = sign_of(job.spec, slot, value)
    if in_use(job.store):
        known = JobClient(job.store).answer({"do": "explain", "slot": slot, "sign": sign}, deadline)
    else:
        with committed_tables.open_table(job, Schema.of(job.spec.slots).by_name[slot].sparse.table, deadline) as rows:
            known = rows.explain(slot, sign, deadline)
    known["exports"] = key_search.exports_with_key(job, known["table"], known["key"], deadline)
    return known


def ranking(job: LoadedJob, table: str, deadline: Deadline) -> dict[str, Any]:
    """The rows of a table with most shows, and how long ago rows were seen, as JSON-able data."""
    if in_use(job.store):
        return JobClient(job.store).answer({"do": "rank", "table": table}, deadline)
    with committed_tables.open_table(job, table, deadline) as rows:
        return rows.ranking(table, deadline)


GONE = "a slot that is gone"
RANKED = ("slot", "sign", "shows", "clicks", "days unseen")


def ranking_words(found: Mapping[str, Any]) -> str:
    """Which rows were looked at."""
    some = "" if found["scanned"] >= found["total"] else f"{found['scanned']:,} of "
    commit = "" if found.get("commit") is None else f", in the commit {found['commit']}"
    return f"{some}{found['total']:,} rows were looked at{commit}"


def names_of_days(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each part of the rows by the days since they were seen, as in 7–13."""
    begins = [each["from_days"] for each in parts]
    return [
        f"{begin}+" if after is None else str(begin) if after == begin + 1 else f"{begin}–{after - 1}"
        for begin, after in zip(begins, [*begins[1:], None], strict=False)
    ]


def format_ranking(found: Mapping[str, Any]) -> Iterator[str]:
    """A ranking as lines of text."""
    yield ranking_words(found)
    figures = ("show", "click", "unseen_days")
    rows = [(each["slot"] or GONE, each["sign"], *(f"{each[key]:,.0f}" for key in figures)) for each in found["rows"]]
    slot, *others = (max(map(len, column)) for column in zip(RANKED, *rows, strict=True))
    for first, *more in (RANKED, *rows) if rows else ():
        numbers = (text.rjust(width) for text, width in zip(more, others, strict=True))
        yield "  ".join((first.ljust(slot), *numbers))
    days = zip(names_of_days(found["unseen"]), found["unseen"], strict=True)
    yield "rows by days unseen: " + ", ".join(f"{name}: {part['rows']:,}" for name, part in days)


def format_explanation(known: Mapping[str, Any]) -> Iterator[str]:
    """An explanation as lines of text."""
    yield f"slot {known['slot']}, sign {known['sign']}: table {known['table']}, group {known['group']}"
    shard = f", shard {known['shard']}" if "shard" in known else ""
    yield f"key {known['key']}, bucket {known['bucket']}{shard}"
    if "commit" in known:
        yield f"the job does not run; this is the state of its newest commit, {known['commit']}"
    yield from _admission(known.get("admission", ()), has_row=known["row"])
    yield from _row(known)
    yield from _remembered(known.get("remembers", {}))
    yield from key_search.format_exports(known.get("exports", ()))


def _row(known: Mapping[str, Any]) -> Iterator[str]:
    if not known["row"]:
        yield "it has no row" + ("" if known.get("admission") else ": it was never pushed, or its row was deleted")
        return
    yield f"score {known['score']:.6g}: shows {known['show']:.6g}, clicks {known['click']:.6g}"
    yield f"delta_score {known['delta_score']:.6g}; changed in version {known['changed_version']}"
    yield f"last seen on day {known['last_seen_day']}, {_days(known['unseen_days'])} ago"
    yield _leaves(known["leaves_after_days"])
    frozen = "; its slot is frozen, so they stay as they are" if known.get("frozen") else ""
    yield f"weights {' '.join(f'{weight:.6g}' for weight in known['weights'])}{frozen}"


def _remembered(remembers: Mapping[str, Any]) -> Iterator[str]:
    for slot, what in remembers.items():
        if "history" in what:
            yield f"slot {slot} remembers of it, newest last: {' '.join(map(str, what['history']))}"
            continue
        windows = [
            f"{window} {shows:.6g} shows, {clicks:.6g} clicks" for window, (shows, clicks) in what["counters"].items()
        ]
        yield f"slot {slot} counts of it, up to its newest sample: {'; '.join(windows)}"


def _days(days: int) -> str:
    return "1 day" if days == 1 else f"{days} days"


def _leaves(days: int | None) -> str:
    if days is None:
        return "it stays: no rule deletes it within ten years, even if it is never seen again"
    return f"if it is never seen again, a shrink deletes it in {_days(days)}" if days else "the next shrink deletes it"


def _admission(entries: Sequence[Mapping[str, Any]], *, has_row: bool) -> Iterator[str]:
    """A sentence for each entry; for a key with a row, they say what would happen if the row were deleted."""
    if entries and has_row:
        yield "admission: admitted; it must be admitted again if its row is deleted"
    for entry in entries:
        yield f"admission: {entry['text']}"
