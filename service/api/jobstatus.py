"""What a job says of itself, as the API gives it: pure, from its chief's status."""

from typing import Any

from pydantic import Field

from service.alarms import alarms
from service.api.answers import Described, finite
from service.status import Number, Status


class LastCommit(Described):
    """How a job's commits go."""

    version: Number | None
    """What a restart goes on from: nothing up to here can be lost."""
    age_s: Number | None
    """Since it was made, or since the start."""
    writing: bool
    """Whether the next one is being written."""
    rows: Number | None
    """Rows that the last one wrote."""
    pause_s: Number | None
    """How long training waited for it."""
    write_s: Number | None
    """How long it was written for, while training went on."""
    failing: str | None
    """Why the last try failed, until one succeeds."""
    failing_s: Number | None
    """For how long they have failed."""


class LastMirrored(Described):
    """How the copies in the store's mirror go."""

    version: Number | None
    """What an empty machine could go on from; null until one is copied by this generation."""
    behind_s: Number | None
    """How long a newer commit has waited."""
    trouble: str | None


class Figures(Described):
    """A job's figures. One that is not known yet is null."""

    state: str
    """"starting", "replaying", "training", "paused", "draining", "restarting", "done" or "failed": of its workers."""
    pass_number: Number | None = Field(serialization_alias="pass")
    """The pass in training."""
    version: Number | None
    """The last closed pass."""
    events: Number | None
    """Events trained on."""
    samples: Number | None
    """Samples trained on."""
    rejected: dict[str, Number]
    """Events that gave no sample, by reason."""
    events_per_s: Number | None
    samples_per_s: Number | None
    positions: dict[str, Number]
    """By partition: the position after the last event trained on."""
    lag: dict[str, Number]
    """By partition: events that wait."""
    metrics: dict[str, dict[str, dict[str, Number]]]
    """"window", "life" and "pass": by task, by name of the metric; taken before the samples were learnt."""
    loss: Number | None
    """Mean loss of the last steps."""
    freshness_s: Number | None
    """From an event's time to its being learnt; null where that says nothing, as in a replay of the past."""
    event_span_s: dict[str, Number]
    """How far apart event times lay: in the "last" pass, and at most in any ("max"); {} without event time."""
    late: Number | None
    """Partitions found since the start that come before one of their stream that was begun already."""
    time_s: dict[str, Number]
    """Where the time of training went, by part: "events" (waiting for some), "pipe", "loader", "forward", "backward",
    "exchange", "close", "commit", "other"."""
    advice: str | None
    """What to do where one part takes most of the time."""
    learning: bool
    """False: the job only predicts."""
    table_rows: dict[str, Number]
    """Rows by table."""
    restarts: Number
    """How often the workers were started again since the launcher was."""
    last_death: str | None
    """Why they were started again last."""
    generation: Number | None
    """How many times the workers were started in the job's life."""
    timeline: str | None
    """The branch of the job's history that the versions are of."""
    commit: LastCommit | None
    mirror: LastMirrored | None
    """Null without a mirror."""
    restored: str | None
    """The commit that these workers began from; null: from the beginning."""
    day: Number | None
    """The job's day, by which rows age."""
    overrides: dict[str, Any]
    """What was set while it ran, and stands before its spec."""
    exports: dict[str, Any]
    """By stream: how its exports go."""
    alarms: dict[str, str]
    """What is wrong although the job goes on: "commits", "log", "stalled", "mirror", "forked", "shrink", "damage",
    "exports", "gates"."""


def figures_of(status: Status) -> Figures:
    """A chief's status as the API gives it."""
    return Figures(
        state=status.text("state", "starting"),
        pass_number=status.number("pass"),
        version=status.number("version"),
        events=status.number("events"),
        samples=status.number("samples"),
        rejected=status.counts("rejected"),
        events_per_s=status.number("events_per_s"),
        samples_per_s=status.number("samples_per_s"),
        positions=status.counts("positions"),
        lag=status.counts("lag"),
        metrics={span: status.metrics(span) for span in ("window", "life", "pass")},
        loss=status.number("loss"),
        freshness_s=status.number("freshness_s"),
        event_span_s=status.counts("event_span_s"),
        late=status.number("late"),
        time_s=status.counts("time_s"),
        advice=status.text("advice") or None,
        learning=status.raw.get("learning", True) is True,
        table_rows=status.table_rows(),
        restarts=status.number("restarts") or 0,
        last_death=status.text("last_death") or None,
        generation=status.number("generation"),
        timeline=status.text("timeline") or None,
        commit=_last_commit(status.part("commit")),
        mirror=_last_mirrored(status.part("commit").part("mirror")),
        restored=status.text("restored") or None,
        day=status.number("day"),
        overrides=finite(dict(status.part("overrides").raw)),
        exports={stream: finite(dict(told.raw)) for stream, told in status.exports().items()},
        alarms={alarm.value: text for alarm, text in alarms(status).items()},
    )


def _last_commit(status: Status) -> LastCommit | None:
    if not status.raw:
        return None
    return LastCommit(
        version=status.number("version"),
        age_s=status.number("age_s"),
        writing=status.flag("writing") is True,
        rows=status.number("rows"),
        pause_s=status.number("pause_s"),
        write_s=status.number("write_s"),
        failing=status.text("failing") or None,
        failing_s=status.number("failing_s"),
    )


def _last_mirrored(status: Status) -> LastMirrored | None:
    if not status.raw:
        return None
    return LastMirrored(
        version=status.number("version"), behind_s=status.number("behind_s"), trouble=status.text("trouble") or None
    )
