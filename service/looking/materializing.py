"""`millrace materialize`: a base of a base and the deltas after it. The work is trainer.exports.materializing's."""

from datetime import UTC, datetime
from pathlib import Path

from millrace.errors import SpecError
from millrace.printable import say
from service.lines import count
from service.looking.places import exports
from trainer.exports.materializing import at_time, at_version, materialize
from trainer.exports.reading import open_export


def write_base(address: str, out: Path, to: int | None, at: str | None) -> None:
    """Write the state after an export, or after the newest one up to a version or an event time, and say what it is."""
    if to is not None and at is not None:
        raise SpecError("give --to or --at, not both")
    with exports() as folder:
        export = open_export(address, folder)
        if to is not None:
            export = at_version(export, to)
        elif at is not None:
            export = at_time(export, seconds_of(at))
        told = materialize(export, out.absolute())
    rows = sum(int(table["rows"]) for table in told["tables"].values())
    say(f"{out}: {told['name']}, {count(rows)} rows, {told['why']}")


def seconds_of(text: str) -> float:
    """Unix seconds of a time in ISO 8601; UTC unless it says otherwise. Raises SpecError."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise SpecError(f"{text!r} is no time; write it as 2024-05-01T12:00:00", "--at") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
