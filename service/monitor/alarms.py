"""Alarms: what is wrong with a job that still runs. Pure, from the chief's status, for every display."""

from collections.abc import Iterator
from enum import StrEnum

from headrace.service.monitor.status import Status

_UNRENEWED = (
    "the output of these workers says why. After the end of a certificate no new connection with its worker succeeds: "
    "restart the job before"
)
MAX_UNMATCHED = 0.01
_UNMATCHED = (
    f"more than {MAX_UNMATCHED:.0%} of recent clicks find no impression, so their samples are learnt as negatives: is "
    "join.window longer than the delay of clicks, do both have the same join.key, and do their sources give times "
    "(event_time.field), so that they are read side by side?"
)


class Alarm(StrEnum):
    """The kinds of alarms. Each has at most one text at a time."""

    COMMITS = "commits"
    """Commits fail: a restart would go ever further back, and the job ends after `commit.max_failing`."""
    LOG = "log"
    """The log cannot be written: training waits, and the job ends after `commit.max_failing`."""
    STALLED = "stalled"
    """A step is stalled: a process that it needs does not answer. After `train.step_deadline` all workers restart."""
    MIRROR = "mirror"
    """The mirror cannot be written, or falls behind."""
    FORKED = "forked"
    """A replayed pass gave other results, or the commit was made with other libraries or hardware."""
    SHRINK = "shrink"
    """A shrink would delete too many rows of a table, and waits for an operator."""
    DAMAGE = "damage"
    """Commits were damaged, and an older one was restored."""
    CERTIFICATES = "certificates"
    """Certificates of workers are not renewed: after their end no new connection with those workers succeeds."""

    EXPORTS = "exports"
    """Exports, or the commands after them, fail: serving has an older model than it should."""
    GATES = "gates"
    """A complete export did not pass its gates: nothing points to it."""

    CLICKS = "clicks"
    """Many clicks of a join find no impression: their samples are learnt as negatives."""

    ROLLBACK = "rollback"
    """The watched metric fell: `current.json` went back to an older export, and no newer one is promoted."""
    GUARDS = "guards"
    """Slots are outside their bounds."""

    SOURCES = "sources"
    """A pattern of a source has matched no file since the job began: it may wait for files, or be mistyped."""

    @property
    def grave(self) -> bool:
        """True if the job ends unless somebody acts."""
        return self in (Alarm.COMMITS, Alarm.LOG)


def alarms(status: Status) -> dict[Alarm, str]:
    """Every active alarm with its text. A text changes only when its cause changes."""
    return dict(_found(status))


def _found(status: Status) -> Iterator[tuple[Alarm, str]]:
    commit = status.part("commit")
    if failing := commit.text("failing"):
        yield Alarm.COMMITS, f"commits fail, version {commit.number('version') or 0} is the last one: {failing}"
    if trouble := status.text("trouble"):
        yield Alarm.LOG, trouble
    elif stalled := status.part("stalled").raw:
        yield Alarm.STALLED, _stall(status, Status(stalled))
    if trouble := commit.part("mirror").text("trouble"):
        yield Alarm.MIRROR, f"the mirror stays at version {commit.part('mirror').number('version') or 0}: {trouble}"
    if status.flag("forked"):
        yield Alarm.FORKED, "forked: results may differ from an undisturbed run, see the workers' lines at the start"
    if held := status.part("operations").part("shrinking").parts("held"):
        tables = "; ".join(held_text(table, facts) for table, facts in held.items())
        yield Alarm.SHRINK, f"a shrink waits, for it would take too much: {tables}"
    if damaged := status.texts("passed_over"):
        commits = "; ".join(f"{name}: {how}" for name, how in damaged.items())
        yield Alarm.DAMAGE, f"damaged commits were passed over: {commits}"
    if late := status.texts("unrenewed"):
        workers = ", ".join(f"{worker} (the last is of {since})" for worker, since in late.items())
        yield Alarm.CERTIFICATES, f"certificates are not renewed: {workers}; {_UNRENEWED}"
    streams = status.exports()
    if troubled := [text for stream, export in streams.items() if (text := _export_trouble(stream, export))]:
        yield Alarm.EXPORTS, "; ".join(troubled)
    gates = {stream: export.raw.get("failed_gates") for stream, export in streams.items()}
    if failed := [f"{stream}: {'; '.join(map(str, whys))}" for stream, whys in gates.items() if whys]:
        yield Alarm.GATES, f"the newest export is not pointed to, for it failed its gates: {', '.join(failed)}"

    if (status.number("clicks_unmatched") or 0) > MAX_UNMATCHED:
        yield Alarm.CLICKS, _UNMATCHED
    if backs := [text for stream, export in streams.items() if (text := _rollback(stream, export.part("rollback")))]:
        yield Alarm.ROLLBACK, "; ".join(backs)
    if outside := status.part("operations").part("guards").parts("outside"):
        slots = "; ".join(f"slot {name}: {each.text('why')}" for name, each in outside.items())
        yield Alarm.GUARDS, f"slots are outside their bounds: {slots}; `headrace doctor` says more"
    if missing := status.text("missing"):
        yield Alarm.SOURCES, f"{missing}: the job waits for such files"


def _rollback(stream: str, rollback: Status) -> str:
    """Why a stream is rolled back, and to which export."""
    if rollback.flag("stuck"):
        return f"exports of {stream}: {rollback.text('metric')} has fallen, and no export from before is promoted"
    if not (why := rollback.text("back")):
        return ""
    if trouble := rollback.text("trouble"):
        return f"exports of {stream}: {why}; current.json cannot go back: {trouble}"
    return f"exports of {stream} are held: {why}; current.json went back to {rollback.text('current', 'an older one')}"


def _stall(status: Status, stalled: Status) -> str:
    """The stalled pass, for how long at least, and what it waits for."""
    match stalled.text("waits_for"):
        case "workers" | "store":
            return stalled.text("text")
        case "pipe":
            why = "no samples come from the source or the pipe command"
        case "trainers":
            why = "another trainer does not answer: one is stopped, or waits for its samples or for a shard"
        case "shards" | "close" if shards := stalled.raw.get("shards"):
            named = ", ".join(f"shard-{shard}" for shard in shards)
            why = f"no answer from {named}: stopped, or waiting for another trainer"
        case "close":
            why = "its close takes so long: a worker is stopped, or busy"
        case "model":
            why = "the model's own arithmetic takes so long"
        case _:
            why = f"{stalled.text('worker', 'a worker')} does not answer: it is stopped, or busy"
    return f"pass {status.number('pass') or 0} stands still, for more than {stalled.number('max_s') or 0:g} s: {why}"


def held_text(table: str, held: Status) -> str:
    """A shrink that waits: its share of the rows, the reason, and the command that allows it."""
    why = held.text("why")
    of = f"table {table}, {held.number('fraction') or 0:.1%} of its rows"
    return f"{of}{why and f', since {why}'}: `{held.text('command')}` lets them go"


def _export_trouble(stream: str, export: Status) -> str:
    if failing := export.text("failing"):
        return f"exports of {stream} fail, {export.text('name') or 'none'} is the last complete one: {failing}"
    if error := export.text("command_error"):
        return f"the command after export {export.text('name')} of {stream} failed: {error}"
    return ""
