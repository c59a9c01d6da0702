"""One row of a job: explain what the job knows of a sign (a feature id of a slot), and delete the row of a sign.

Rank 0 and the shards explain and delete (pserver.tables.table). For a job that does not run, its newest commit explains
(service.tables.committed_tables). service.exports.key_search finds the exports that contain the key.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.dataset.features.feature_kernels import crossed_reference, hashed_reference
from headrace.dataset.loader.kept_files import drop_kept
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.durable import REAL, check_no_link, write_whole, writing
from headrace.errors import SpecError
from headrace.keys import sign_of_text
from headrace.rpc.job_client import JobClient
from headrace.service.cluster.store import LETTERS, in_use
from headrace.service.exports import key_search
from headrace.service.history.commit_request import make_commit
from headrace.service.monitor.lines import count
from headrace.service.spec.job import Job, LoadedJob
from headrace.service.tables import committed_tables
from headrace.trainer.control.commit_store import Commits
from headrace.trainer.control.job_log import store_locked
from headrace.validation import nearest


def sign_of(spec: Job, slot: str, value: str) -> int:
    """The sign of `value` in a sparse slot: its number, or the hash of its text. Raises SpecError.

    Of a cross, `value` is its sign, or the values of all its parts with commas between. `hash` of a slot is applied.
    """
    sparse = {each.name: each.sparse for each in Schema.of(spec.slots).sparse}
    if slot not in sparse:
        raise SpecError(f"there is no sparse slot {slot!r}; {nearest(slot, sparse)}")
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
    yield f"weights {' '.join(f'{weight:.6g}' for weight in known['weights'])}"


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
        yield f"admission: {_entry(entry)}"


def _entry(entry: Mapping[str, Any]) -> str:
    if "lot" in entry:
        effect = "which admits it" if entry["agrees"] else "which does not admit it"
        return f"{entry['kind']} {entry['p']:g}: its random draw is {entry['lot']:.3g}, {effect}"
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


# Forget


def forget(job: LoadedJob, slot: str, value: str, deadline: Deadline) -> Iterator[str]:
    """Delete the row of `value` in `slot`, then the dead letters and the kept samples that contain it.

    Yields a line after each step; no line contains the value. 1. The row is deleted at a close. 2. A commit is made, so
    that no restart replays the passes before it and writes their dead letters again. 3. The dead letters are deleted.
    4. So are the files of `passes.keep_in` on this machine. Raises HeadraceError.
    """
    sign = sign_of(job.spec, slot, value)
    version = JobClient(job.store).carry_out({"op": "forget", "slot": slot, "sign": sign}, deadline)  # 1
    yield f"slot {slot}: the value has no row from version {version} on, unless it is seen again"
    make_commit(job.store, deadline)  # 2
    with store_locked(job.store, deadline):
        there = sorted(check_no_link(job.store / LETTERS).glob("pass-*.jsonl"))
        letters = [path for path in there if not path.is_symlink()]
        dropped = sum(drop_letters(path, value) for path in letters)  # 3
    yield f"dead letters with this value, deleted: {count(dropped)}"
    if job.spec.passes.keep_in is not None:
        folder = job.folder / job.spec.passes.keep_in
        with writing(folder):
            files = drop_kept(folder, value, sign)  # 4
        yield f"files of kept samples with this value, deleted: {count(files)}"
    yield from remaining_copies(job, version)


def drop_letters(path: Path, value: str) -> int:
    """Delete the letters of a file whose event or detail contains `value`; return how many."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if not contains(line, value)]
    if len(kept) < len(lines):
        with writing(path):
            write_whole(REAL, path, b"".join(kept))
    return len(lines) - len(kept)


def contains(letter: bytes, value: str) -> bool:
    """Whether a dead letter contains the text of `value`, in its event or in its detail."""
    try:
        fields = documents.parse_object(letter, "a dead letter")
    except documents.InvalidDocument:
        return True  # a damaged line may contain it
    event = base64.b64decode(fields.get("bytes") or "")
    return value.encode() in event or value in str(fields.get("detail") or "")


def remaining_copies(job: LoadedJob, version: int) -> list[str]:
    """Lines that name the older commits and exports that may contain the row until they are pruned."""
    commits = [commit.name for commit in Commits(job.store).whole() if commit.version < version]
    lines = [f"older commits contain it until they are pruned: {', '.join(commits)}"] if commits else []
    if job.spec.exports:
        streams = ", ".join(job.spec.exports)
        lines.append(f"exports of versions before {version} contain it until they are pruned: streams {streams}")
    return lines
