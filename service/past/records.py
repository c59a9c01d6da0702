"""`millrace log`: prints a job's log, and of a damaged one what is good."""

import json
from pathlib import Path

from millrace.errors import MillraceError
from millrace.printable import say
from millrace.secrecy import without_secrets
from service.past.wording import told
from trainer.log import LogDamaged, Place, Record, read
from trainer.log_file import listed, record_of


def good_records(folder: Path) -> tuple[list[Record], LogDamaged | None]:
    """The records of the log in `folder`; of a damaged one those before the damage, and that."""
    try:
        return read(folder), None
    except LogDamaged as error:
        return good_before(folder, error), error


def print_log(folder: Path, *, last: int | None, as_json: bool) -> None:
    """Print every record of the log in `folder`, or the `last` ones: a line each.

    Raises LogDamaged after printing the good records before the damage.
    """
    records, damage = good_records(folder)
    if not records and damage is None:
        raise MillraceError(f"{folder} holds no log: nothing was ever run in this store; `millrace run` begins one")
    begin = 0 if last is None else max(0, len(records) - last)
    if as_json:
        shown = ((each, without_secrets(each.body)) for each in records[begin:])
        lines = [json.dumps({"n": each.number, "kind": each.kind, **body}) for each, body in shown]
    else:
        lines = [str(line) for line in told(records)][begin:]
    for line in lines:
        say(line)
    if damage is not None:
        raise damage


def good_before(folder: Path, damage: LogDamaged) -> list[Record]:
    """The records of a damaged log from its oldest on, up to the damage."""
    records: list[Record] = []
    for path in listed(folder):
        content = path.read_bytes()
        end = damage.byte if path == damage.path else len(content)
        at = 0
        while at < end:
            stop = content.find(b"\n", at) + 1 or len(content)
            record = record_of(content[at:stop], Place(path, at))
            if record is None or (records and record.number != records[-1].number + 1):
                break  # behind the seal: written by a worker that woke too late
            records.append(record)
            at = stop
        if path == damage.path:
            break
    return records
