"""Deletes a value from a job: its row, dead letters, kept samples; with `everywhere` all rows in which it takes part.

Rank 0 logs each deletion, and the shards delete at the close of a pass (trainer.rank0.operations), so restarts, reruns,
the live feed and deltas of exports follow. service.tables.traces finds the rows. What cannot be deleted is listed.
"""

import base64
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from headrace import documents
from headrace.blob.store_address import StoreAddress, parse
from headrace.dataset.loader.kept_files import drop_kept
from headrace.deadline import Deadline
from headrace.durable import REAL, check_no_link, write_whole, writing
from headrace.rpc.job_client import JobClient
from headrace.service.cluster.store import LETTERS
from headrace.service.history.commit_request import make_commit
from headrace.service.monitor.lines import count
from headrace.service.spec.job import LoadedJob
from headrace.service.tables.row import sign_of
from headrace.service.tables.traces import Traces, find_traces
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.log import store_locked
from headrace.trainer.predict.output_place import DEAD_LETTERS

MAX_KEYS = 4096
"""Most rows that one logged operation deletes: as many as rank 0 takes (trainer.rank0.operations)."""
MAX_ROUNDS = 3
"""Most searches: a job that runs may make rows with the value between a search and the deletion."""


def forget(job: LoadedJob, slot: str, value: str, deadline: Deadline, *, everywhere: bool = False) -> Iterator[str]:
    """Delete the row of `value` in `slot`, then the dead letters and the kept samples that contain it.

    Yields a line after each step; no line contains the value. 1. The row is deleted at a close. 2. A commit is made, so
    that no restart replays the passes before it and writes their dead letters again. 3. With `everywhere`, the other
    rows in which the value takes part are deleted likewise. 4. The dead letters are deleted. 5. So are the files of
    `passes.keep_in` on this machine. 6. Remaining copies are listed. Raises HeadraceError.
    """
    sign = sign_of(job.spec, slot, value)
    version = JobClient(job.store).carry_out({"op": "forget", "slot": slot, "sign": sign}, deadline)  # 1
    yield f"slot {slot}: the value has no row from version {version} on, unless it is seen again"
    make_commit(job.store, deadline)  # 2
    if everywhere:
        for line, deleted_at in _forget_traces(job, slot, sign, deadline):  # 3
            version = max(version, deleted_at)
            yield line
    with store_locked(job.store, deadline):
        there = sorted(check_no_link(job.store / LETTERS).glob("pass-*.jsonl"))
        letters = [path for path in there if not path.is_symlink()]
        dropped = sum(drop_letters(path, value) for path in letters)  # 4
    yield f"dead letters with this value, deleted: {count(dropped)}"
    if job.spec.passes.keep_in is not None:
        folder = job.folder / job.spec.passes.keep_in
        with writing(folder):
            files = drop_kept(folder, value, sign)  # 5
        yield f"files of kept samples with this value, deleted: {count(files)}"
    yield from remaining_copies(job, version, time.time())  # 6
    if everywhere and job.spec.predict is not None:
        yield from prediction_files(parse(job.spec.predict.output, job.folder), value, sign)


# Rows


def _forget_traces(job: LoadedJob, slot: str, sign: int, deadline: Deadline) -> Iterator[tuple[str, int]]:
    """Delete the other rows; a line for each step, with the version from which on it holds."""
    for number in range(MAX_ROUNDS):
        traces, version = find_traces(job, slot, sign, deadline), 0
        if not number:
            yield from ((line, 0) for line in dict.fromkeys(traces.notes))
        if not traces.num_rows:
            yield "other rows with this value: none" + (" any more" if number else ""), 0
            return
        for also in requests_of(traces):
            operation = {"op": "forget", "slot": slot, "sign": sign, "also": also}
            version = JobClient(job.store).carry_out(operation, deadline)
        tables = Counter[str]()
        for (table, _), keys_U in sorted(traces.keys.items()):
            tables[table] += len(keys_U)
        places = ", ".join(f"{count(num)} of table {table}" for table, num in tables.items())
        yield f"other rows with this value, deleted by version {version}: {places}", version
        make_commit(job.store, deadline)
    yield "events with this value keep coming: stop them at their source, then forget it again", 0


def requests_of(traces: Traces) -> Iterator[list[dict[str, Any]]]:
    """The rows as rank 0 takes them, at most MAX_KEYS for each operation."""
    asked, room = list[dict[str, Any]](), MAX_KEYS
    for (table, group), keys_U in sorted(traces.keys.items()):
        while len(keys_U):
            asked.append({"table": table, "group": group, "keys": keys_U[:room].tolist()})
            keys_U, room = keys_U[room:], room - len(keys_U[:room])
            if not room:
                yield asked
                asked, room = [], MAX_KEYS
    if asked:
        yield asked


# Files


def drop_letters(path: Path, value: str) -> int:
    """Delete the letters of a file whose event or detail contains `value`; return how many."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if not contains(line, value)]
    if len(kept) < len(lines):
        with writing(path):
            write_whole(REAL, path, b"".join(kept))
    return len(lines) - len(kept)


def contains(letter: bytes, value: str) -> bool:
    """Whether a dead letter contains the text of `value`, as it is or as JSON writes it, in its event or its detail."""
    try:
        fields = documents.parse_object(letter, "a dead letter")
    except documents.InvalidDocument:
        return True  # a damaged line may contain it
    event = base64.b64decode(fields.get("bytes") or "")
    texts = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return any(text.encode() in event or text in str(fields.get("detail") or "") for text in texts)


def prediction_files(output: StoreAddress, value: str, sign: int) -> Iterator[str]:
    """A line that names the files of a prediction which contain a value, or its sign; they are not changed."""
    if not output.is_folder:
        yield f"predictions may contain it: {output.text} is not searched; delete the prefix, or predict again"
        return
    folder = Path(output.root)
    found = [path.name for path in sorted(folder.glob("*.parquet")) if _predicts(path, value, sign)]
    for path in sorted(folder.glob(f"{DEAD_LETTERS}/*.jsonl")):
        if any(contains(line, value) for line in path.read_bytes().splitlines()):
            found.append(f"{DEAD_LETTERS}/{path.name}")
    if found:
        yield f"predictions contain it: {', '.join(found)} in {folder}; delete the folder, or predict again"


def _predicts(path: Path, value: str, sign: int) -> bool:
    with pq.ParquetFile(path) as file:
        return any(_column_has(column, value, sign) for batch in file.iter_batches() for column in batch.columns)


def _column_has(column: pa.Array, value: str, sign: int) -> bool:
    while pa.types.is_nested(column.type) and not pa.types.is_struct(column.type):
        column = column.flatten()
    if pa.types.is_uint64(column.type):
        return bool((column.drop_null().to_numpy() == np.uint64(sign)).any())
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return bool(pa.compute.any(pa.compute.equal(column, value)).as_py())
    return False


# Remaining copies


def remaining_copies(job: LoadedJob, version: int, now_s: float) -> Iterator[str]:
    """Lines that name the older commits and exports that may contain the row, and when they are pruned."""
    commits, section = Commits(job.store), job.spec.commit
    whole = commits.whole()
    if old := [commit.name for commit in whole if commit.version < version]:
        yield f"older commits contain it until they are pruned: {', '.join(old)}"
        missing = max(1, section.keep - sum(commit.version >= version for commit in whole))
        yield (
            f"commit.keep is {section.keep}: {missing} more commits prune them, by "
            f"{_date(now_s + missing * section.every)} if the job runs on"
        )
        if held := _held(commits.holders(), old):
            yield f"of these, held until they are unpinned: {', '.join(held)}"
    for name, stream in job.spec.exports.items():
        if stream.base is None:
            until = f"{stream.keep} newer bases are made; exports.{name}.base is not set, so none is due by itself"
            yield f"exports of versions before {version} contain it: stream {name}, until {until}"
        else:
            date = _date(now_s + stream.keep * stream.base)
            yield (
                f"exports of versions before {version} contain it until they are pruned: stream {name}, which keeps "
                f"{stream.keep} bases, by {date} if the job runs on"
            )


def _held(holders: Mapping[str, list[str]], names: list[str]) -> list[str]:
    return [name for name in names if holders.get(name)]


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
