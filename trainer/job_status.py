"""The status of a job: made by rank 0, completed by the launcher, shown by the service.

A figure is described here alone: its name and type, which program makes it, and its metric of /metrics (`counter`,
`gauge`, `histogram`), which service.api.exposition reads from here. Alarms are service.monitor.alarms', the documented
answer of the REST API is service.api.job_figures'.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Annotated, Any, TypeVar, get_type_hints

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import fields

from headrace.codec import NotUnderstood, typed
from headrace.printable import printable
from headrace.trainer.exposed_figures import Entries, Exposed, Number, counter, gauge, histogram, is_number, numbers
from headrace.trainer.tuning_status import TuningStatus

Counts = dict[str, int]
Seconds = dict[str, float]
Measures = dict[str, dict[str, Any]]
"""Of each task: its measures by name, null where they are undefined, and "slices" by slot and value."""
AnyStruct = TypeVar("AnyStruct", bound=Struct)


def _entry(name: str, default: Number | None, entries: Mapping[str, Any]) -> Number | None:
    value = entries.get(name, default)
    return value if is_number(value) else default


def _link(name: str, text: str, key: str, **labels: str) -> Exposed:
    return counter(name, text, "worker", "peer", labels=labels, value=partial(_entry, key, 0))


def _carried(key: str, direction: str, path: str) -> Exposed:
    text = "Bytes between two workers; path: wire or shared_memory"
    return _link("headrace_link_bytes", text, key, direction=direction, path=path)


def _measure(span: str, key: str, text: str) -> Exposed:
    return gauge(f"headrace_{span}_{key}", text, "task", value=partial(_entry, key, None))


class LearningDelay(Struct, frozen=True, kw_only=True):
    """A histogram of the seconds from events' times to their being learnt, as in Prometheus."""

    buckets: list[tuple[str, int]]
    """Upper bound, and count up to it."""
    sum_s: float


class TableStatus(Struct, frozen=True, kw_only=True):
    """A table of rows, at the last close."""

    rows: Annotated[int | None, gauge("headrace_table_rows", "Rows of a table", after="headrace_learning")] = None
    bytes: Annotated[int | None, gauge("headrace_table_bytes", "Memory of a table's rows and index")] = None
    new_rows: int | None = None
    unadmitted: int | None = None
    dirty_rows: int | None = None
    device_rows: Annotated[int | None, gauge("headrace_device_rows", "Rows that learn on the trainer's device")] = None
    device_bytes: Annotated[int | None, gauge("headrace_device_row_bytes", "Memory of the device for them")] = None
    device_apart: Annotated[
        float | None, gauge("headrace_device_rows_apart", "Share of the rows read in a pass that had no room there")
    ] = None
    rows_by_slot: Annotated[
        Counts, gauge("headrace_slot_rows", "Rows of a slot; slots that share rows have the same ones", "slot")
    ] = {}
    bytes_by_slot: Annotated[
        Counts, gauge("headrace_slot_bytes", "A slot's share of its table's memory, by rows", "slot")
    ] = {}
    frozen: list[str] = []
    """Slots whose rows do not learn."""


class MirrorStatus(Struct, frozen=True, kw_only=True):
    """The store's mirror."""

    version: Annotated[int | None, gauge("headrace_mirror_version", "The last closed pass in the mirror")] = None
    behind_s: Annotated[
        float | None, gauge("headrace_mirror_behind_seconds", "How long a commit has waited to be in the mirror")
    ] = None
    trouble: str | None = None


class ObjectStatus(Struct, frozen=True, kw_only=True):
    """The object store of a job with `store.parts = "object"`."""

    fence: Annotated[
        int | None,
        gauge("headrace_fence_number", "Records of the fence in the object store, with store.parts = object"),
    ] = None
    uploads: Annotated[
        int | None, gauge("headrace_commit_uploads_waiting", "Files of rank 0 that wait for the object store")
    ] = None
    bytes: Annotated[
        int | None,
        gauge(
            "headrace_commit_uploaded_bytes",
            "Uploaded for commits since the workers were started, by all of them",
        ),
    ] = None


class CommitStatus(Struct, frozen=True, kw_only=True):
    """Commits."""

    version: Annotated[
        int | None, gauge("headrace_committed_version", "The last closed pass that cannot be lost any more")
    ] = None
    age_s: Annotated[
        float | None, gauge("headrace_commit_age_seconds", "Since the last commit was made, or since the start")
    ] = None
    writing: bool = False
    rows: int | None = None
    """Rows that the last commit wrote."""
    pause_s: Annotated[
        float | None, gauge("headrace_commit_pause_seconds", "How long training waited for the last commit")
    ] = None
    write_s: Annotated[
        float | None,
        gauge("headrace_commit_seconds", "How long the last commit was written for, while training went on"),
    ] = None
    failing: str | None = None
    failing_s: float | None = None
    mirror: MirrorStatus | None = None
    objects: ObjectStatus | None = None


class HeldShrink(Struct, frozen=True, kw_only=True):
    """A shrink that would delete too many rows of a table, and waits for an operator."""

    rows: int | None = None
    going: int | None = None
    """Rows that it would delete."""
    fraction: float | None = None
    why: str = ""
    since: int | None = None
    """The version since which it is due."""
    command: str = ""
    """The command that allows it."""


class ShrinkingStatus(Struct, frozen=True, kw_only=True):
    """Shrinks by the tables' own rules."""

    held: dict[str, HeldShrink] = {}
    counting: list[str] = []
    """Tables whose rows are counted for a shrink."""


class SlotOutsideBounds(Struct, frozen=True, kw_only=True):
    """A slot that is outside its bounds."""

    why: str = ""
    action: str = ""
    since: int | None = None


class GuardsStatus(Struct, frozen=True, kw_only=True):
    """Slots, compared with their bounds."""

    slots: dict[str, dict[str, float | None]] = {}
    """Figures of the newest pass, by slot."""
    outside: dict[str, SlotOutsideBounds] = {}


class RollbackStatus(Struct, frozen=True, kw_only=True):
    """The metric that a stream of exports watches."""

    metric: str = ""
    level: float | None = None
    bound: float | None = None
    value: float | None = None
    fallen_closes: int = 0
    stuck: bool = False
    """It has fallen, and there is no export to go back to."""
    back: str | None = None
    """Why the stream is rolled back; None: it is not."""
    since: int | None = None
    current: str | None = None
    trouble: str | None = None


class LastExport(Struct, frozen=True, kw_only=True):
    """How the last export of a stream ended."""

    id: str | None = None
    name: str | None = None
    outcome: str | None = None
    error: str | None = None
    current: bool | None = None


class ExportStatus(Struct, frozen=True, kw_only=True):
    """A stream of exports."""

    version: Annotated[
        int | None, gauge("headrace_export_version", "The version of a stream's newest complete export")
    ] = None
    name: str | None = None
    kind: str | None = None
    age_s: Annotated[
        float | None, gauge("headrace_export_age_seconds", "Since a stream's newest complete export was complete")
    ] = None
    making: str | None = None
    """The name of the one in progress."""
    failing: Annotated[str | None, gauge("headrace_export_failing", "1 while a stream's exports fail", value=bool)] = (
        None
    )
    failing_s: float | None = None
    failed_gates: Annotated[
        list[str], gauge("headrace_export_failed_gates", "Gates the last export failed", value=len)
    ] = []
    command_error: str | None = None
    last: LastExport | None = None
    rollback: RollbackStatus | UnsetType = UNSET
    """Unset for a stream that watches no metric."""


class EvaluatorStatus(Struct, frozen=True, kw_only=True):
    """The evaluator: its newest score, and how it fares; of the launcher."""

    version: Annotated[int | None, gauge("headrace_evaluator_version", "The newest version that was scored")] = None
    commit: str = ""
    at: str = ""
    """When it was scored, in UTC."""
    samples: int | None = None
    tasks: Annotated[
        Measures,
        _measure("evaluator", "auc", "AUC of the newest scored version, on the evaluator's events"),
        _measure("evaluator", "gauc", "Mean AUC of groups of the newest scored version, on the evaluator's events"),
        _measure("evaluator", "logloss", "Log loss of the newest scored version, on the evaluator's events"),
        _measure("evaluator", "calibration", "Mean prediction divided by mean label of the newest scored version"),
    ] = {}
    error: str = ""
    """Why that version cannot be scored."""
    scored: int = 0
    """Versions that have a line."""
    restarts: Annotated[
        int, counter("headrace_evaluator_restarts", "Restarts of the evaluator since the launcher was started")
    ] = 0
    trouble: str = ""
    """Why it ends again and again; "" where it does not."""


class OperationsStatus(Struct, frozen=True, kw_only=True):
    """Operations, and what decides on them."""

    logged: list[dict[str, Any]] = []
    """Those that wait for the next close."""
    acted: list[dict[str, Any]] = []
    """The last ones."""
    shrinking: ShrinkingStatus = ShrinkingStatus()
    guards: GuardsStatus = GuardsStatus()
    exporting: Annotated[dict[str, ExportStatus], Entries(("stream",))] = {}


class MetricsStatus(Struct, frozen=True, kw_only=True):
    """Metrics of predictions made before training on the samples."""

    last_pass: Measures = field(name="pass", default_factory=dict)
    window: Annotated[
        Measures,
        _measure("window", "auc", "AUC over the sliding window"),
        _measure("window", "gauc", "Mean AUC of groups over the sliding window"),
        _measure("window", "logloss", "Log loss over the sliding window"),
        _measure("window", "calibration", "Mean prediction divided by mean label over the sliding window"),
        _measure("window", "index_recall", "Recall of the index of items over the sliding window"),
        _measure("window", "popular_recall", "Recall of the most clicked items over the sliding window"),
    ] = {}
    life: Annotated[
        Measures,
        _measure("life", "auc", "AUC over the job's life"),
        _measure("life", "gauc", "Mean AUC of groups over the job's life"),
        _measure("life", "logloss", "Log loss over the job's life"),
        _measure("life", "calibration", "Mean prediction divided by mean label over the job's life"),
        _measure("life", "index_recall", "Recall of the index of items over the job's life"),
        _measure("life", "popular_recall", "Recall of the most clicked items over the job's life"),
    ] = {}
    tensors: dict[str, Any] = {}
    """"pass", "window" and "life": mean and more of each tensor that the model returns."""
    infer_first: dict[str, Any] | UnsetType = UNSET
    """"pass", "window" and "life", as above, if a whole pass is predicted before training on it."""


class RankWaits(Struct, frozen=True, kw_only=True):
    """How long ranks waited for each other: seconds by rank, and by the rank that it waited for."""

    last: list[list[float]]
    """In the last pass."""
    recent: list[list[float]]
    """In `recent_passes`, which took `recent_s`."""
    recent_passes: int
    recent_s: float


class WorkerUsage(Struct, frozen=True, kw_only=True):
    """The processor time and memory of a worker, without its pipe commands."""

    machine: str = ""
    pid: int = 0
    cores: Annotated[float | None, gauge("headrace_worker_cores", "Cores that a worker used in recent passes")] = None
    cpu_s: Annotated[float | None, counter("headrace_worker_cpu_seconds", "Processor time since its start")] = None
    memory_bytes: Annotated[int | None, gauge("headrace_worker_memory_bytes", "Memory that a worker holds")] = None


class StragglerStatus(Struct, frozen=True, kw_only=True):
    """The rank that the others waited for longest in recent passes."""

    rank: int | None = None
    share: float | None = None
    waits_s: Seconds = {}
    part: str | None = None
    text: str = ""


class StallStatus(Struct, frozen=True, kw_only=True):
    """A step that is stalled, or workers that cannot start."""

    waits_for: str = ""
    """As time_spent.WaitsFor; or "workers", "store": the launcher's words are `text`; or "worker": it is silent."""
    for_s: float | None = None
    max_s: float | None = None
    shards: list[int] = []
    """Those that have not answered."""
    worker: str = ""
    text: str = ""


class ResizeStatus(Struct, frozen=True, kw_only=True):
    """A resize that is being prepared."""

    shards: int = 0
    trainers: int = 0
    for_s: float | None = None
    state: str = ""
    moved: int | None = None
    committed: int | None = None


class ElasticStatus(Struct, frozen=True, kw_only=True):
    """An elastic number of trainers."""

    min: int = 1
    max: Annotated[int, gauge("headrace_elastic_max_trainers", "Most trainers, where their number is elastic")] = 1
    """The bound of the job file, or the lower one of a resize."""
    present: Annotated[int, gauge("headrace_elastic_trainers", "Trainers that run, where their number is elastic")] = 0
    """0 while the job waits for workers."""
    spares: Annotated[int, gauge("headrace_elastic_spares", "Workers without a place, which stand by")] = 0
    waits: str = ""
    """The change that is to come, or what is waited for; empty while nothing is to change."""
    for_s: float = 0.0
    """For how long it has waited for that."""
    fewer: str = ""
    """Why the job went on with fewer trainers, until it has more again."""


class Status(Struct, frozen=True, kw_only=True):
    """The status of a job. A figure that is not known, or that an older program does not make, has its default."""

    job: str = ""
    phase: str = ""
    """As the service names it; of the service."""

    # Counts of the job's life; of rank 0, but for the restarts

    events: Annotated[int | None, counter("headrace_events", "Events trained on")] = None
    samples: Annotated[int | None, counter("headrace_samples", "Samples trained on")] = None
    restarts: Annotated[
        int | None, counter("headrace_restarts", "Restarts of the workers since the launcher was started")
    ] = None
    """Of the launcher."""
    last_death: str | None = None
    """The reason for the last restart; of the launcher."""
    last_error: str = ""
    """The error that the worker printed whose end was that reason; empty where it printed none. Of the launcher."""
    step: str = ""
    """The step of the start, while no rank 0 reports; of the launcher."""
    rejected: Annotated[Counts, counter("headrace_rejected", "Events that gave no sample", "reason")] = {}
    left_out: Counts = {}
    """Events that were left out, by reason."""
    clicks_unmatched: float | None = None
    """Share of a join's recent clicks that found no impression; None where there are few."""
    skipped_steps: Annotated[
        int | None,
        counter("headrace_skipped_steps", "Steps that changed nothing, because a loss or gradient was not finite"),
    ] = None
    refused: Annotated[
        Counts, counter("headrace_refused", "Connections and calls that a job's processes refused", "reason")
    ] = {}
    time_s: Annotated[Seconds, counter("headrace_time_seconds", "Where the time of training went", "part")] = {}
    advice: str | None = None
    """On the part that takes most of the time."""
    wall_s: float | None = None
    """Since rank 0 started."""

    # The present

    state: Annotated[str, gauge("headrace_state", "1 for the state a job is in", "state")] = "starting"
    predicting: str = ""
    """The progress of the prediction after training; of the launcher."""
    learning: Annotated[bool, gauge("headrace_learning", "1 while a job learns, 0 where it only predicts")] = True
    pass_number: Annotated[int | None, gauge("headrace_pass", "The pass in training")] = field(
        name="pass", default=None
    )
    version: Annotated[int | None, gauge("headrace_version", "The last closed pass")] = None
    events_per_s: Annotated[float | None, gauge("headrace_events_per_second", "Events trained on per second")] = None
    samples_per_s: Annotated[float | None, gauge("headrace_samples_per_second", "Samples trained on per second")] = None
    idle_s: float | None = None
    """Since there was a pass to train; None during one."""
    stalled: StallStatus | None = None
    loss: Annotated[float | None, gauge("headrace_loss", "Mean loss of the last steps")] = None
    dense_lr: float | None = None
    pipe_wait: Annotated[
        float | None,
        gauge("headrace_pipe_wait_ratio", "Share of recent passes' time that training waited for samples"),
    ] = None
    freshness_s: Annotated[
        float | None, gauge("headrace_freshness_seconds", "From an event's time to its being learnt")
    ] = None
    event_span_s: Seconds = {}
    """Range of event times in the "last" pass, and the greatest of any pass ("max"); {} without event time."""
    day: int | None = None
    generation: Annotated[
        int | None, gauge("headrace_generation", "How many times the workers were started in the job's life")
    ] = None
    timeline: str | None = None
    restored: str | None = None
    """The commit that these workers started from; None: from the beginning."""

    # The stream, by partition

    lag: Annotated[Counts, gauge("headrace_lag", "Events that wait", "partition")] = {}
    positions: Annotated[
        Counts, gauge("headrace_position", "Position after the last event trained on", "partition")
    ] = {}
    jumped: Counts = {}
    """Positions that were lost since the start: they were no longer retained."""
    late: int | None = None
    """Partitions found since the start that precede one of their stream that was already begun."""

    # Workers and tables

    workers: Counts = {}
    """Running "trainers" and "shards", and "readers" where there are any."""
    resizing: ResizeStatus | None = None
    tuning: TuningStatus | None = None
    """Of the launcher; None: the job has chosen neither settings nor crosses."""
    elastic: ElasticStatus | None = None
    unrenewed: dict[str, str] = {}
    """By worker, since when its certificate should have been renewed; of the launcher."""
    lost: dict[str, str] = {}
    """By reader, how it ended, where the job goes on without it; of the launcher."""
    links: Annotated[
        dict[str, dict[str, dict[str, Number]]],
        _carried("sent_bytes", "sent", "wire"),
        _carried("shared_sent_bytes", "sent", "shared_memory"),
        _link("headrace_link_messages", "Messages between two workers", "sent_messages", direction="sent"),
        _carried("received_bytes", "received", "wire"),
        _carried("shared_received_bytes", "received", "shared_memory"),
        _link("headrace_link_messages", "Messages between two workers", "received_messages", direction="received"),
        _link("headrace_link_wait_seconds", "How long a worker waited for a peer", "wait_s"),
    ] = {}
    """By worker and peer: see LinkTraffic."""
    usage: Annotated[dict[str, WorkerUsage], Entries(("worker",))] = {}
    """By worker: processor time and memory, at the last close."""
    waits: RankWaits | None = None
    straggler: StragglerStatus | None = None
    staleness_steps: Annotated[
        dict[str, dict[str, Number]],
        gauge(
            "headrace_staleness_steps",
            "Steps between trainers that do not wait for each other, in the last pass",
            *("worker", "figure"),
        ),
    ] = {}
    interface: str | None = None
    """The network interface of the workers, if it is not loopback."""

    tables: Annotated[dict[str, TableStatus], Entries(("table",))] = {}
    slots: dict[str, dict[str, Any]] = {}
    """Statistics of the sparse slots over the job's life: see SlotFigures."""
    learning_delay: Annotated[
        LearningDelay | None,
        histogram("headrace_learning_delay_seconds", "From events' times to their being learnt"),
    ] = None

    # Commits, the log and operations

    commit: CommitStatus | None = None
    passed_over: dict[str, str] = {}
    """By commit, how it was found to be damaged."""
    forked: bool = False
    trouble: str = ""
    """Why the log cannot be written, or a request waits; empty: nothing is wrong."""
    missing: str = ""
    """Patterns of sources that match no file."""
    overrides: dict[str, Any] = {}
    """Settings changed while it ran."""
    evaluator: EvaluatorStatus | None = None
    """None: the job has none."""
    operations: OperationsStatus = OperationsStatus()

    metrics: MetricsStatus = MetricsStatus()

    @property
    def exports(self) -> dict[str, ExportStatus]:
        """Streams of exports."""
        return self.operations.exporting

    @property
    def mirror(self) -> MirrorStatus | None:
        """None without a mirror, or before the first word of rank 0."""
        return None if self.commit is None else self.commit.mirror

    @property
    def table_rows(self) -> Counts:
        """Rows by table."""
        return {name: table.rows for name, table in self.tables.items() if table.rows is not None}

    def measures(self, span: str) -> dict[str, dict[str, Number]]:
        """Metrics of "window", "life" or "pass": numbers by task and name."""
        spans = {"window": self.metrics.window, "life": self.metrics.life, "pass": self.metrics.last_pass}
        return {task: numbers(found) for task, found in spans[span].items()}


def read(cls: type[AnyStruct], data: Mapping[str, Any]) -> AnyStruct:
    """A status, or another record of figures, that another program has written. Its texts are safe to show.

    A field that is missing, or has another form, has its default: a program of another version may have written it.
    """
    known: dict[str, Any] = {}
    for name, key, hint in _form(cls):
        if key in data:
            try:
                known[name] = typed(hint, _shown(data[key]), key)
            except NotUnderstood:
                continue
    return cls(**known)


@cache
def _form(cls: type[Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Of each field: name, key and type."""
    hints = get_type_hints(cls)
    return tuple((each.name, each.encode_name, hints[each.name]) for each in fields(cls))


def _shown(value: Any) -> Any:
    """JSON-able data with all texts made harmless for a terminal. Keys stay."""
    match value:
        case str():
            return printable(value)
        case Mapping():
            return {key: _shown(each) for key, each in value.items()}
        case list() | tuple():
            return [_shown(each) for each in value]
        case _:
            return value
