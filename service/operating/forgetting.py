"""`millrace forget`: one value's row goes, and dead letters that hold the value; what holds it still is said."""

import base64
from collections.abc import Iterator
from pathlib import Path

from millrace import documents
from millrace.deadline import Deadline
from millrace.durable import REAL, check_no_link, write_whole, writing
from millrace.job_client import JobClient
from millrace.locks import locked
from service.lines import count
from service.operating.signs import sign_of
from service.past.asking import make_commit
from service.spec import LoadedJob
from service.store import LETTERS
from trainer.commits import Commits
from trainer.log import LOCK


def forget(job: LoadedJob, slot: str, value: str, deadline: Deadline) -> Iterator[str]:
    """Delete the row of `value` in `slot`, then letters that hold its text; a line as each is done, without the value.

    1. The row goes at a close. 2. A commit is made: no restart reads the passes before it again, and makes their
    letters anew. 3. Letters go. Raises MillraceError.
    """
    sign = sign_of(job.spec, slot, value)
    version = JobClient(job.store).carry_out({"op": "forget", "slot": slot, "sign": sign}, deadline)  # 1
    yield f"slot {slot}: the value has no row from version {version} on, unless it is seen again"
    make_commit(job.store, deadline)  # 2
    with locked(job.store / "log" / LOCK, deadline):
        there = sorted(check_no_link(job.store / LETTERS).glob("pass-*.jsonl"))
        letters = [path for path in there if not path.is_symlink()]
        dropped = sum(drop(path, value) for path in letters)  # 3
    yield f"dead letters with this value, dropped: {count(dropped)}"
    yield from still_held(job, version)


def drop(path: Path, value: str) -> int:
    """Rewrite a file of letters without those whose event or detail holds `value`; how many those were."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if not holds(line, value)]
    if len(kept) < len(lines):
        with writing(path):
            write_whole(REAL, path, b"".join(kept))
    return len(lines) - len(kept)


def holds(letter: bytes, value: str) -> bool:
    """Whether the text of `value` is anywhere in a letter's event, or in what is said of it."""
    try:
        said = documents.parse_object(letter, "a dead letter")
    except documents.NotReadable:
        return True  # what a damaged line holds, nobody can tell
    event = base64.b64decode(said.get("bytes") or "")
    return value.encode() in event or value in str(said.get("detail") or "")


def still_held(job: LoadedJob, version: int) -> list[str]:
    """Which commits, and which exports, were made before and may hold the row until they are pruned."""
    commits = [commit.name for commit in Commits(job.store).whole() if commit.version < version]
    lines = [f"commits made before hold it until they are pruned: {', '.join(commits)}"] if commits else []
    if job.spec.exports:
        streams = ", ".join(job.spec.exports)
        lines.append(f"exports of versions before {version} hold it until they are pruned: streams {streams}")
    return lines
