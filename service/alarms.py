"""What is wrong with a job although it goes on: pure, from its chief's status, for every way in which it is shown."""

from collections.abc import Iterator
from enum import StrEnum

from service.status import Status


class Alarm(StrEnum):
    """What an alarm is about; one text at a time for each."""

    COMMITS = "commits"
    """Commits fail: a restart would go ever further back, and the job ends after `commit.max_failing`."""
    LOG = "log"
    """The log cannot be written: training waits, and the job ends after `commit.max_failing`."""
    STALLED = "stalled"
    """A step stands still: a process that it needs does not answer, and after `train.step_deadline` all start anew."""
    MIRROR = "mirror"
    """The mirror is not written to, or falls behind."""
    FORKED = "forked"
    """A pass trained again came out otherwise, or libraries or hardware are others than the commit was made with."""
    SHRINK = "shrink"
    """A shrink would take too many rows of a table, and waits for an operator."""
    DAMAGE = "damage"
    """Commits were damaged, and an older one was restored."""

    EXPORTS = "exports"
    """Exports fail, or the command after one: serving has an older model than it should."""
    GATES = "gates"
    """An export is complete and did not pass its gates: nothing points to it."""

    @property
    def grave(self) -> bool:
        """Whether the job ends if nobody does something."""
        return self in (Alarm.COMMITS, Alarm.LOG)


def alarms(status: Status) -> dict[Alarm, str]:
    """Every alarm that is on. A text changes only where what is wrong does."""
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
        told = "; ".join(f"{name}: {how}" for name, how in damaged.items())
        yield Alarm.DAMAGE, f"damaged commits were passed over: {told}"
    streams = status.exports()
    if troubled := [text for stream, told in streams.items() if (text := _export_trouble(stream, told))]:
        yield Alarm.EXPORTS, "; ".join(troubled)
    gates = {stream: told.raw.get("failed_gates") for stream, told in streams.items()}
    if failed := [f"{stream}: {'; '.join(map(str, whys))}" for stream, whys in gates.items() if whys]:
        yield Alarm.GATES, f"the newest export is not pointed to, for it failed its gates: {', '.join(failed)}"


def _stall(status: Status, stalled: Status) -> str:
    """Which pass stands still, since when at least, and what for."""
    match stalled.text("waits_for"):
        case "pipe":
            why = "no samples come from the source or the pipe command"
        case "trainers":
            why = "another trainer does not answer: one is stopped, or waits for its samples or for a shard"
        case "shards" | "close" if shards := stalled.raw.get("shards"):
            why = f"no answer from {', '.join(f'shard-{shard}' for shard in shards)}"
        case "close":
            why = "its close takes so long"
        case "model":
            why = "the model's own arithmetic takes so long"
        case _:
            why = f"{stalled.text('worker', 'a worker')} does not answer: it is stopped, or busy"
    return f"pass {status.number('pass') or 0} stands still, for more than {stalled.number('max_s') or 0:g} s: {why}"


def held_text(table: str, held: Status) -> str:
    """A shrink that waits: what it would take, why it waits, and what lets it go on."""
    why = held.text("why")
    of = f"table {table}, {held.number('fraction') or 0:.1%} of its rows"
    return f"{of}{why and f', since {why}'}: `{held.text('command')}` lets them go"


def _export_trouble(stream: str, told: Status) -> str:
    if failing := told.text("failing"):
        return f"exports of {stream} fail, {told.text('name') or 'none'} is the last complete one: {failing}"
    if error := told.text("command_error"):
        return f"the command after export {told.text('name')} of {stream} failed: {error}"
    return ""
