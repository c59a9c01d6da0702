"""A job's figures in the API, from the status that rank 0 reports. Pure."""

from typing import Any

from pydantic import ConfigDict, Field

from headrace.codec import plain
from headrace.service.api.schemas import Number, ResponseBody, finite
from headrace.service.monitor.alarms import alarms
from headrace.trainer.job_status import Status


class _PartOfStatus(ResponseBody):
    """Base of an answer that has fields of a part of the status, by their names."""

    model_config = ConfigDict(from_attributes=True)


class LastCommit(_PartOfStatus):
    """The state of a job's commits."""

    version: Number | None
    """Version of the last commit. A restart continues from it: nothing up to it can be lost."""
    age_s: Number | None
    """Seconds since it was made, or since the start."""
    writing: bool
    """Whether the next commit is being written."""
    rows: Number | None
    """Rows that the last commit wrote."""
    pause_s: Number | None
    """How long training waited for it."""
    write_s: Number | None
    """How long it was written while training went on."""
    failing: str | None
    """Why the last attempt failed; null after a success."""
    failing_s: Number | None
    """For how long commits have failed."""


class LastMirrored(_PartOfStatus):
    """The state of the store's mirror."""

    version: Number | None
    """Version that an empty machine could continue from; null until this generation has copied a commit."""
    behind_s: Number | None
    """How long a newer commit has waited to be copied."""
    trouble: str | None


class ResizeProgress(_PartOfStatus):
    """A resize that is being prepared."""

    shards: Number | None
    """Number of shards to come; 0: the shard lives in the trainer."""
    trainers: Number | None
    """Number of trainers to come."""
    state: str
    """Of the new workers: "waiting for a close", "starting", "restoring", "moving" or "handing over"."""
    moved: Number | None
    """The version whose rows they hold; null: none yet."""
    committed: Number | None
    """The version whose rows they can take over now."""
    for_s: Number | None
    """Seconds since the request."""


class ElasticTrainers(_PartOfStatus):
    """An elastic number of trainers."""

    min: Number
    max: Number
    """The bound of the job file, or the lower one of a resize."""
    present: Number
    """Trainers that run; 0 while the job waits for workers."""
    spares: Number
    """Workers without a place, which stand by."""
    waits: str
    """The change that is to come, or what is waited for; empty while nothing is to change."""
    for_s: Number
    """For how long it has waited for that."""
    fewer: str
    """Why the job went on with fewer trainers, until it has more again."""


class TuningTrial(_PartOfStatus):
    """A setting that a new job tried on the first events of its stream."""

    name: str
    keys: dict[str, Any]
    """Values that differ from the job file, by the path of their key."""
    events: Number
    """Events that it has learnt."""
    logloss: Number | None
    """Mean loss of the last half of those, predicted before they were learnt; null: it failed."""
    auc: Number | None
    """AUC of the same samples."""


class ChosenCrossPair(_PartOfStatus):
    """A pair of slots whose crosses a new job chose."""

    of: list[str]
    """The two slots."""
    gain: Number
    """By how much the log loss of a linear model falls with it, beside the slots and the pairs before it."""


class ChosenCrosses(_PartOfStatus):
    """The crosses that a new job chose by the first samples of its stream."""

    pairs: list[ChosenCrossPair]
    """The best one first; empty: none pays."""
    samples: Number
    """Number of samples by which they were chosen."""
    auc: Number | None
    """AUC of a linear model of the slots over the second half of those, each predicted before it was learnt."""
    auc_with: Number | None
    """The same with the pairs."""
    first_order_rate: Number
    """Multiplies the rate of first-order weights that follows from the number of slots."""


class TuningProgress(_PartOfStatus):
    """The choices of a new job before its first pass: settings with train.tune = "auto", and crosses."""

    trial: Number
    """Number of the trial that runs, from 1; 0: none does."""
    of: Number
    """Trials in all; a last one may be added."""
    name: str
    """The setting that is tried, or what else is done to choose; empty once the job has chosen."""
    tried: list[TuningTrial]
    """All settings, the chosen one first; empty before the end."""
    crosses: ChosenCrosses | None
    """Null for a job that has not chosen crosses."""


class UsageOfWorker(_PartOfStatus):
    """The processor time and memory of a worker at the last close, without its pipe commands."""

    machine: str
    pid: int
    cores: Number | None
    """Cores that it used on average in recent passes."""
    cpu_s: Number | None
    """Processor time since its start."""
    memory_bytes: Number | None


class Straggler(_PartOfStatus):
    """The trainer that the others waited for longest in recent passes."""

    rank: Number | None
    share: Number | None
    """Share of the time, 0 to 1, that another trainer waited for it."""
    waits_s: dict[str, Number]
    """By rank: seconds a pass that it waited for this one."""
    part: str | None
    """The part of `time_s` that takes it longer than the others; null where none explains the wait."""
    text: str
    """All of this in a sentence."""


class JobFigures(ResponseBody):
    """A job's figures. One that is not known yet is null."""

    state: str
    """Of the workers: "starting", "tuning", "replaying", "training", "paused", "draining", "restarting", "done" or
    "failed"."""
    pass_number: Number | None = Field(serialization_alias="pass")
    """The pass in training."""
    version: Number | None
    """The last closed pass."""
    events: Number | None
    """Events trained on."""
    samples: Number | None
    """Samples trained on."""
    rejected: dict[str, Number]
    """Rejected events, by reason."""
    events_per_s: Number | None
    samples_per_s: Number | None
    positions: dict[str, Number]
    """By partition: the position after the last event trained on."""
    lag: dict[str, Number]
    """By partition: events not yet read."""
    metrics: dict[str, dict[str, dict[str, Number]]]
    """"window", "life" and "pass": by task and metric, of predictions made before training on the samples."""
    loss: Number | None
    """Mean loss of the last steps."""
    freshness_s: Number | None
    """Seconds from an event's time until it is trained on; null where this is meaningless, as in a replay."""
    event_span_s: dict[str, Number]
    """Range of event times in the "last" pass, and the greatest of any pass ("max"); {} without event time."""
    late: Number | None
    """Partitions found since the start that precede one of their stream that was already begun."""
    time_s: dict[str, Number]
    """Training time by part: "events" (waiting for events), "pipe", "loader", "forward", "backward", "exchange",
    "close", "commit", "other"."""
    pipe_wait: Number | None
    """Share of the time of recent passes, 0 to 1, that training waited for samples from the source and the pipe
    command."""
    advice: str | None
    """Advice if one part takes most of the time, or if training waits much for samples."""
    learning: bool
    """False: the job only predicts."""
    table_rows: dict[str, Number]
    """Rows by table."""
    restarts: Number
    """Restarts of the workers since the launcher started."""
    last_death: str | None
    """Reason for the last restart."""
    last_error: str
    """The error that the worker printed whose end was that reason; empty where it printed none."""
    step: str
    """While the job starts: the step it is in, as a sentence. Else empty."""
    generation: Number | None
    """Number of starts of the workers in the job's life."""
    timeline: str | None
    """The branch of the job's history that the versions belong to."""
    commit: LastCommit | None
    mirror: LastMirrored | None
    """Null without a mirror."""
    restored: str | None
    """The commit that these workers started from; null: from the beginning."""
    day: Number | None
    """The job's day, which ages rows."""
    workers: dict[str, Number]
    """Number of running "trainers" and "shards"; 0 shards: the shard lives in the trainer. {} before they train."""
    resizing: ResizeProgress | None
    """The resize that is being prepared; null without one."""
    elastic: ElasticTrainers | None
    """Null for a job with a fixed number of trainers."""
    tuning: TuningProgress | None
    """Null for a job that has chosen neither settings nor crosses."""
    links: dict[str, dict[str, dict[str, Number]]]
    """Traffic by worker and peer, such as "trainer-0" and "shard-1", since the workers started: bytes and messages sent
    and received, bytes by memory that both share, and seconds of waiting for the peer. {} in a single process."""
    usage: dict[str, UsageOfWorker]
    """By worker, such as "trainer-0" and "shard-1". {} before the first close."""
    straggler: Straggler | None
    """Null if no trainer was waited for much."""
    staleness_steps: dict[str, dict[str, Number]]
    """By trainer, in the last pass of mode "async" or "geo": steps of other trainers that were applied between a pull
    and its push ("mean" and "max"), and the most steps by which another trainer was ahead ("behind"). {} in others."""
    overrides: dict[str, Any]
    """Settings changed while it ran, which override its spec."""
    exports: dict[str, Any]
    """By stream: the state of its exports."""
    evaluator: dict[str, Any] | None
    """Its newest score: "version", "commit", "at", "samples", "tasks" (measures by task), "error"; then "scored"
    versions, "restarts" and "trouble". Null for a job without one."""
    alarms: dict[str, str]
    """Problems of a job that keeps running: "commits", "log", "stalled", "mirror", "forked", "shrink", "damage",
    "certificates", "readers", "trainers", "exports", "gates", "evaluator"."""


def figures_of(status: Status) -> JobFigures:
    """The figures of a status: the fields of the same names, but for those that are put together."""
    together = {
        "metrics": {span: status.measures(span) for span in ("window", "life", "pass")},
        "restarts": status.restarts or 0,
        "overrides": finite(status.overrides),
        "exports": finite(plain(status.exports)),
        "evaluator": None if status.evaluator is None else finite(plain(status.evaluator)),
        "alarms": {alarm.value: text for alarm, text in alarms(status).items()},
    }
    same = {name: getattr(status, name) for name in JobFigures.model_fields if name not in together}
    return JobFigures(**same, **together)
