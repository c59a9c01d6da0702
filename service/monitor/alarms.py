"""Alarms: what is wrong with a job that still runs. Pure, from its status, for every display and for /metrics."""

from collections.abc import Iterator
from enum import StrEnum

from msgspec import UNSET

from headrace.printable import printable
from headrace.trainer.exposed_figures import gauge
from headrace.trainer.job_status import ExportStatus, HeldShrink, RollbackStatus, StallStatus, Status

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
    READERS = "readers"
    """Readers do not run, and the others take over: reading is slower until they are started."""

    TRAINERS = "trainers"
    """An elastic job has lost trainers, and goes on with fewer."""

    EXPORTS = "exports"
    """Exports, or the commands after them, fail: serving has an older model than it should."""
    GATES = "gates"
    """A complete export did not pass its gates: nothing points to it."""

    EVALUATOR = "evaluator"
    """The evaluator dies again and again: versions are not scored, and exports that wait for scores fail their gate."""

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


METRICS = {
    Alarm.COMMITS: gauge(
        "headrace_commit_failing",
        "1 while commits fail; the job ends after commit.max_failing",
        after="headrace_commit_uploaded_bytes",
    ),
    Alarm.LOG: gauge(
        "headrace_trouble",
        "1 while training waits for the log; the job ends after commit.max_failing",
        after="headrace_commit_failing",
    ),
    Alarm.STALLED: gauge(
        "headrace_stalled",
        "1 while a step stands still, longer than a quarter of train.step_deadline",
        after="headrace_trouble",
    ),
    Alarm.FORKED: gauge(
        "headrace_forked",
        "1 where a replay differed, or libraries or hardware did since the commit",
        after="headrace_stalled",
    ),
}
"""The alarms that /metrics has, once there are commits."""


def alarms(status: Status) -> dict[Alarm, str]:
    """Every active alarm with its text. A text changes only when its cause changes."""
    return dict(_found(status))


def _found(status: Status) -> Iterator[tuple[Alarm, str]]:
    if (commit := status.commit) is not None and commit.failing:
        yield Alarm.COMMITS, f"commits fail, version {commit.version or 0} is the last one: {commit.failing}"
    if status.trouble:
        yield Alarm.LOG, status.trouble
    elif status.stalled is not None:
        yield Alarm.STALLED, stall_text(status.pass_number, status.stalled)
    if (mirror := status.mirror) is not None and mirror.trouble:
        yield Alarm.MIRROR, f"the mirror stays at version {mirror.version or 0}: {mirror.trouble}"
    if status.forked:
        yield Alarm.FORKED, "forked: results may differ from an undisturbed run, see the workers' lines at the start"
    if held := status.operations.shrinking.held:
        tables = "; ".join(held_text(table, shrink) for table, shrink in held.items())
        yield Alarm.SHRINK, f"a shrink waits, for it would take too much: {tables}"
    if status.passed_over:
        commits = "; ".join(f"{printable(name)}: {how}" for name, how in status.passed_over.items())
        yield Alarm.DAMAGE, f"damaged commits were passed over: {commits}"
    if status.unrenewed:
        late = (f"{printable(worker)} (the last is of {since})" for worker, since in status.unrenewed.items())
        yield Alarm.CERTIFICATES, f"certificates are not renewed: {', '.join(late)}; {_UNRENEWED}"
    if status.lost:
        ended = ", ".join(f"{printable(worker)} ({how})" for worker, how in status.lost.items())
        yield Alarm.READERS, f"readers do not run: {ended}; the others take over until they are started"
    if status.elastic is not None and status.elastic.fewer:
        yield Alarm.TRAINERS, f"fewer than cluster.trainers.max = {status.elastic.max}: {status.elastic.fewer}"
    if troubled := [text for stream, export in status.exports.items() if (text := _export_trouble(stream, export))]:
        yield Alarm.EXPORTS, "; ".join(troubled)
    gates = {stream: export.failed_gates for stream, export in status.exports.items()}
    if failed := [f"{stream}: {'; '.join(whys)}" for stream, whys in gates.items() if whys]:
        yield Alarm.GATES, f"the newest export is not pointed to, for it failed its gates: {', '.join(failed)}"

    if status.evaluator is not None and status.evaluator.trouble:
        yield Alarm.EVALUATOR, f"the evaluator ends again and again, and is started again: {status.evaluator.trouble}"
    if (status.clicks_unmatched or 0) > MAX_UNMATCHED:
        yield Alarm.CLICKS, _UNMATCHED
    rollbacks = {stream: export.rollback for stream, export in status.exports.items()}
    if backs := [text for stream, each in rollbacks.items() if each is not UNSET and (text := _rollback(stream, each))]:
        yield Alarm.ROLLBACK, "; ".join(backs)
    if outside := status.operations.guards.outside:
        slots = "; ".join(f"slot {name}: {each.why}" for name, each in outside.items())
        yield Alarm.GUARDS, f"slots are outside their bounds: {slots}; `headrace doctor` says more"
    if status.missing:
        yield Alarm.SOURCES, f"{status.missing}: the job waits for such files"


def _rollback(stream: str, rollback: RollbackStatus) -> str:
    """Why a stream is rolled back, and to which export."""
    if rollback.stuck:
        return f"exports of {stream}: {rollback.metric} has fallen, and no export from before is promoted"
    if not (why := rollback.back):
        return ""
    if rollback.trouble:
        return f"exports of {stream}: {why}; current.json cannot go back: {rollback.trouble}"
    return f"exports of {stream} are held: {why}; current.json went back to {rollback.current or 'an older one'}"


def stall_text(pass_number: int | None, stalled: StallStatus) -> str:
    """The stalled pass, for how long at least, and what it waits for."""
    match stalled.waits_for:
        case "workers" | "store":
            return stalled.text
        case "pipe":
            why = "no samples come from the source or the pipe command"
        case "trainers":
            why = "another trainer does not answer: one is stopped, or waits for its samples or for a shard"
        case "shards" | "close" if stalled.shards:
            named = ", ".join(f"shard-{shard}" for shard in stalled.shards)
            why = f"no answer from {named}: stopped, or waiting for another trainer"
        case "close":
            why = "its close takes so long: a worker is stopped, or busy"
        case "model":
            why = "the model's own arithmetic takes so long"
        case _:
            why = f"{stalled.worker or 'a worker'} does not answer: it is stopped, or busy"
    return f"pass {pass_number or 0} stands still, for more than {stalled.max_s or 0:g} s: {why}"


def held_text(table: str, held: HeldShrink) -> str:
    """A shrink that waits: its share of the rows, the reason, and the command that allows it."""
    of = f"table {table}, {held.fraction or 0:.1%} of its rows"
    return f"{of}{held.why and f', since {held.why}'}: `{held.command}` lets them go"


def _export_trouble(stream: str, export: ExportStatus) -> str:
    if export.failing:
        return f"exports of {stream} fail, {export.name or 'none'} is the last complete one: {export.failing}"
    if export.command_error:
        return f"the command after export {export.name} of {stream} failed: {export.command_error}"
    return ""
