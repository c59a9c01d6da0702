# Made by docs/generate.py out of the OpenAPI document: `make reference`.

from collections.abc import Callable
from typing import Any, Literal, NotRequired, TypedDict

class AgeCostEntry(TypedDict):
    """One metric of one task, of versions of one age, against the job itself over the same events."""

    task: str
    metric: str
    """auc, gauc or logloss."""
    from_s: float
    """Least age, in seconds of event time."""
    to_s: float | None
    """Greatest age; null: no bound."""
    parts: int
    """Passes that were compared, of one version each."""
    versions: int
    samples: int
    job: float | None
    """The metric of the job, which learns each pass after it has predicted it."""
    frozen: float | None
    """The metric of versions of that age."""
    difference: float | None
    """Of the frozen versions from the job."""
    error: float | None
    """Standard error of the difference; null for fewer than six parts."""
    p: float | None
    """Of a paired test; null for fewer than six parts."""

class AgesOfVersions(TypedDict):
    """The price of a served version's age, as `headrace freshness` measured it last."""

    measured_at: str | None
    """Null if it was never measured."""
    passes: int
    """The newest pass that the job had closed then."""
    versions: list[int]
    """The old versions that were run again."""
    ages: list[AgeCostEntry]
    """By task, metric and age."""
    left_out: int
    """Further entries, which are not kept."""

class AuditEntry(TypedDict):
    """A request that changed something, or tried to."""

    id: int
    at: str
    who: str
    role: str | None
    method: str
    """The HTTP method, or a word for an action without a request."""
    path: str
    job: str | None
    status: int | None
    """The status of the answer."""
    detail: dict[str, Any]

class Builds(TypedDict):
    """The builds that jobs may move to."""

    builds: list[str]
    """Their names."""

class ChosenCrossPair(TypedDict):
    """A pair of slots whose crosses a new job chose."""

    of: list[str]
    """The two slots."""
    gain: float
    """By how much the log loss of a linear model falls with it, beside the slots and the pairs before it."""

class ChosenCrosses(TypedDict):
    """The crosses that a new job chose by the first samples of its stream."""

    pairs: list[ChosenCrossPair]
    """The best one first; empty: none pays."""
    samples: float
    """Number of samples by which they were chosen."""
    auc: float | None
    """AUC of a linear model of the slots over the second half of those, each predicted before it was learnt."""
    auc_with: float | None
    """The same with the pairs."""
    first_order_rate: float
    """Multiplies the rate of first-order weights that follows from the number of slots."""

class CloseEntry(TypedDict):
    """A closed pass."""

    version: int
    timeline: str
    event_time: str | None
    """Time of the newest event trained on; null without event time."""
    day: int
    """The job's day."""
    events: int
    samples: int
    rejected: dict[str, int]
    """Rejected events, by reason."""
    window: dict[str, dict[str, float]]
    """Window metrics at the close: auc, gauc, logloss, calibration, rmse, index_recall, popular_recall. Empty if
    nothing was predicted."""

class CommitDetails(TypedDict):
    """The content of a commit."""

    name: str
    version: int
    """The last closed pass that it contains."""
    timeline: str
    generation: int
    made_at: str | None
    events: int | None
    """Events trained on since the start of the job."""
    rows: int | None
    bytes: int | None
    """Size of all its files."""
    own_bytes: int | None
    """Size of the files that no other commit shares: removing the commit frees as much."""
    held_by: list[str]
    """Holders that keep it from being pruned."""
    damaged: str | None
    """The damage of its manifest; null if none. Other files are not read for this."""
    next: bool
    """Whether a restart begins with this commit, if it is sound."""
    job: str
    parent: str | None
    trainers: int
    """Number of trainers that wrote it."""
    log_from: int
    """The first log record that a restart from it needs."""
    progress: dict[str, int]
    """"num_events", "num_samples", "skipped_steps"."""
    rejected: dict[str, int]
    """Rejected events, by reason."""
    positions: dict[str, int]
    """By partition: the position after the last event trained on."""
    skips: list[Skipped]
    parts: list[CommitShard]
    files: int
    made_with: dict[str, str]
    """Versions of libraries, and the hardware, that it was made with."""

class CommitEntry(TypedDict):
    """One commit of a job."""

    name: str
    version: int
    """The last closed pass that it contains."""
    timeline: str
    generation: int
    made_at: str | None
    events: int | None
    """Events trained on since the start of the job."""
    rows: int | None
    bytes: int | None
    """Size of all its files."""
    own_bytes: int | None
    """Size of the files that no other commit shares: removing the commit frees as much."""
    held_by: list[str]
    """Holders that keep it from being pruned."""
    damaged: str | None
    """The damage of its manifest; null if none. Other files are not read for this."""
    next: bool
    """Whether a restart begins with this commit, if it is sound."""

class CommitHolders(TypedDict):
    """The present holders of a commit."""

    name: str
    held_by: list[str]

class CommitShard(TypedDict):
    """The part of a commit that one shard wrote."""

    folder: str
    buckets: list[int]
    """The first bucket, and the one after the last."""
    rows: dict[str, int]
    """Rows by table."""

Desired = Literal["running", "paused", "drained", "stopped"]

class ElasticTrainers(TypedDict):
    """An elastic number of trainers."""

    min: float
    max: float
    """The bound of the job file, or the lower one of a resize."""
    present: float
    """Trainers that run; 0 while the job waits for workers."""
    spares: float
    """Workers without a place, which stand by."""
    waits: str
    """The change that is to come, or what is waited for; empty while nothing is to change."""
    for_s: float
    """For how long it has waited for that."""
    fewer: str
    """Why the job went on with fewer trainers, until it has more again."""

class ExampleJob(TypedDict):
    """An example that comes with Headrace."""

    name: str
    title: str
    toml: str
    """Its job file, without the store."""
    base: str
    """The folder where its relative paths start. The service must allow it, and its commands."""

class ExampleJobs(TypedDict):
    """The examples that come with Headrace."""

    items: list[ExampleJob]

class Explanation(TypedDict):
    """Everything that a job knows of one feature id; by its newest commit if the job does not run."""

    lines: list[str]
    """The explanation as text."""
    known: dict[str, Any]
    """The data: key, bucket, shard, admission, statistics, weights, time of deletion, exports that contain it."""

class ExportDetails(TypedDict):
    """The content of an export."""

    path: str
    """"t1/0000000012-base"."""
    url: str
    """Its address."""
    current: bool
    manifest: dict[str, Any]
    """Its manifest: tables, gates, files with their hashes, its parent."""

class ExportEntry(TypedDict):
    """One export."""

    stream: str
    name: str
    timeline: str
    version: int
    """Version of the exported state."""
    kind: Literal["base", "delta"]
    complete: bool
    current: bool
    """Whether `current.json` names it."""
    damaged: str | None
    """The damage of its manifest; null if none. Other files are not read for this."""
    made_at: str | None
    rows: int | None
    tombstones: int | None
    pending: int | None
    """Rows that have no vector yet."""
    bytes: int | None
    why: str | None
    """Reason for the export, and for a base."""
    failed_gates: list[str]

class Feed(TypedDict):
    """Addresses of a job's live feed. The secret gives access to the feed only, and ends with these workers."""

    timeline: str
    generation: int
    secret: str
    chief: str
    """Address of rank 0, which sends dense weights and versions."""
    shards: list[Any]
    """Addresses of the shards, which send rows."""
    authority: NotRequired[str | None]
    """Certificate of the job's authority, PEM, where the job listens for other machines: the feed has mutual
    TLS."""
    certificate: NotRequired[str | None]
    """The replica's certificate, PEM, for this generation."""

class Health(TypedDict):
    """The process answers."""

    status: NotRequired[str]
    version: str
    """Headrace's version."""

class InferredSpec(TypedDict):
    """A proposed job file. It is a guess, for a person to check."""

    toml: str
    """With comments that say why."""
    events: int
    """Events of the sample."""
    bad_lines: list[str]
    """The first lines that are no event."""
    missing: list[str]
    """Parts that a person must fill in; empty: the file loads as it is."""

class InputSection(TypedDict):
    """The events to predict: files in the job's own format, or ranges of a Kafka topic."""

    paths: NotRequired[list[str] | None]
    """Globs or templates as in sources.*.paths, relative to the job's folder. If all end with .parquet, rows of
    Parquet files are events."""
    root: NotRequired[str | None]
    """Where `paths` begin, if the files are in an object store, as in sources.*.root."""
    kafka: NotRequired[KafkaInput | None]
    """Records of a Kafka topic."""

class JobCause(TypedDict):
    """Why a job failed, is broken, restarts or waits."""

    kind: str
    """"failed", "broken", "restarting" or "waiting"."""
    text: str
    """The sentence that explains it, as the worker that fell first printed it."""
    advice: str
    """The advice: what to do about it."""

class JobDiagnosis(TypedDict):
    """A job's slots at its newest commit, or at that of a minute ago."""

    commit: str | None
    """Its name; null if there is none yet."""
    guarded: bool
    """Whether the job has guards, so that there are figures of passes."""
    slots: list[SlotDiagnosis]

class JobEntry(TypedDict):
    """A job, its desired state and its phase."""

    name: str
    phase: Phase
    """Its present phase."""
    desired: Desired
    """Its desired state, until another one is requested."""
    trouble: str
    """Why it is broken, or what it waits for; else empty."""
    revision: int
    """Number of changes by users; the ETag."""
    created: str
    created_by: str
    changed: str
    outcome: OutcomeEntry | None
    """How it ended; null if it has not."""
    build: str
    """The build that it runs in, a name of the service's configuration; empty: the service's own environment."""
    headrace_version: str
    """The version of Headrace that its launcher runs, or ran last; empty if that is not known."""

class JobMetrics(TypedDict):
    """Metrics of predictions made before training on their samples, by task and name, as far as known."""

    version: float | None
    """The last closed pass."""
    life: dict[str, dict[str, float]]
    """Since the start of the job."""
    window: dict[str, dict[str, float]]
    """Over `metrics.window`."""
    last_pass: dict[str, dict[str, float]]
    """Of the last pass."""
    slices: dict[str, Any]
    """"life" and "window": by task, slot and value; see `metrics.slices`."""
    reliability: dict[str, Any]
    """"life" and "window": by task with loss "bce", for tenths of the samples by their predictions: the mean
    "prediction", the mean "label", the "weight"."""
    tensors: dict[str, Any]
    """"pass", "window" and "life": mean and more of each tensor that the model returns."""
    infer_first: dict[str, dict[str, dict[str, float]]]
    """"life", "window" and "pass", if `metrics.infer_first` is set: a whole pass is predicted before training on
    it."""

class JobSetting(TypedDict):
    """A setting of a job."""

    key: str
    file: str | None
    """Its value in the job file, as JSON; null: the file leaves it out."""
    now: str
    """The value in force, as JSON."""
    origin: str
    """"file", "default", "chosen" (by the job, as it began) or "set" (while it ran)."""

class JobSettings(TypedDict):
    """The settings of a job that are in force, and changes of its file that are not."""

    settings: list[JobSetting]
    waiting: list[WaitingChange]
    """Changes of the job file since its run began."""

class JobSpec(TypedDict):
    """A job's spec."""

    spec: dict[str, Any]
    """The spec as its user wrote it, with "***" in place of passwords."""
    base: str
    """The folder where its relative paths start."""
    store: str
    """The folder of the store."""

JobStatus = TypedDict(
    "JobStatus",
    {
        "state": str,
        "pass": float | None,
        "version": float | None,
        "events": float | None,
        "samples": float | None,
        "rejected": dict[str, float],
        "events_per_s": float | None,
        "samples_per_s": float | None,
        "positions": dict[str, float],
        "lag": dict[str, float],
        "metrics": dict[str, dict[str, dict[str, float]]],
        "loss": float | None,
        "freshness_s": float | None,
        "event_span_s": dict[str, float],
        "late": float | None,
        "time_s": dict[str, float],
        "pipe_wait": float | None,
        "advice": str | None,
        "learning": bool,
        "table_rows": dict[str, float],
        "restarts": float,
        "last_death": str | None,
        "last_error": str,
        "step": str,
        "generation": float | None,
        "timeline": str | None,
        "commit": LastCommit | None,
        "mirror": LastMirrored | None,
        "restored": str | None,
        "day": float | None,
        "workers": dict[str, float],
        "resizing": ResizeProgress | None,
        "elastic": ElasticTrainers | None,
        "tuning": TuningProgress | None,
        "links": dict[str, dict[str, dict[str, float]]],
        "usage": dict[str, UsageOfWorker],
        "straggler": Straggler | None,
        "staleness_steps": dict[str, dict[str, float]],
        "overrides": dict[str, Any],
        "exports": dict[str, Any],
        "evaluator": dict[str, Any] | None,
        "alarms": dict[str, str],
        "name": str,
        "phase": Phase,
        "desired": Desired,
        "trouble": str,
        "revision": int,
        "created": str,
        "created_by": str,
        "changed": str,
        "outcome": OutcomeEntry | None,
        "build": str,
        "headrace_version": str,
        "cause": JobCause | None,
    },
)
"""A job with all its figures. A figure that is not known yet is null."""

JsonValue = Any

class KafkaInput(TypedDict):
    """Ranges of a Kafka topic."""

    topic: str
    """The topic."""
    ranges: NotRequired[dict[str, Any] | None]
    """By number of partition: first offset, and the one after the last. Default: all that is retained now."""
    options: NotRequired[dict[str, Any]]
    """Options of kafka-python's consumer; they override those of the job's own Kafka source. Where they change
    brokers or any security option, none of the job's credentials are used."""

class LastCommit(TypedDict):
    """The state of a job's commits."""

    version: float | None
    """Version of the last commit. A restart continues from it: nothing up to it can be lost."""
    age_s: float | None
    """Seconds since it was made, or since the start."""
    writing: bool
    """Whether the next commit is being written."""
    rows: float | None
    """Rows that the last commit wrote."""
    pause_s: float | None
    """How long training waited for it."""
    write_s: float | None
    """How long it was written while training went on."""
    failing: str | None
    """Why the last attempt failed; null after a success."""
    failing_s: float | None
    """For how long commits have failed."""

class LastMirrored(TypedDict):
    """The state of the store's mirror."""

    version: float | None
    """Version that an empty machine could continue from; null until this generation has copied a commit."""
    behind_s: float | None
    """How long a newer commit has waited to be copied."""
    trouble: str | None

class LettersFile(TypedDict):
    """Rejected events of one pass and one process, a JSON line each."""

    name: str
    pass_number: int
    rank: int
    bytes: int
    written: str

LineLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

class LogLine(TypedDict):
    """One record of a job's log."""

    number: int
    when: str
    """Time of the record, if it has one; else empty."""
    kind: str
    """"claim", "plan", "operation", "close" or "void"; "damage" at the end of a damaged log."""
    words: str

class NewToken(TypedDict):
    """A token that was just created."""

    id: str
    name: str
    role: Literal["viewer", "operator", "admin"]
    created: str
    expires: str | None
    last_used: str | None
    revoked: str | None
    token: str
    """The text that authenticates. It is shown only here, and not stored."""

class OperationEntry(TypedDict):
    """A long action that a caller requested."""

    id: str
    kind: str
    """The action: "commit", "export", "set" and so on."""
    job: str | None
    """The job that it acts on."""
    who: str
    """The caller that requested it."""
    state: OperationState
    """"waiting" or "running"; finally "done", "failed", "cancelled" or "interrupted" (the service ended
    meanwhile)."""
    progress: float | None
    """From 0 to 1, if known."""
    said: str
    """Its present step, as text."""
    result: Any
    """Its result, once it is done."""
    problem: dict[str, Any] | None
    """Why it failed, as a problem."""
    created: str
    ended: str | None

OperationState = Literal["waiting", "running", "done", "failed", "cancelled", "interrupted"]

class OutcomeEntry(TypedDict):
    """How a job ended."""

    code: int
    """0: success; 1: a permanent error; 2: the spec is wrong; 70: a bug; 75: something was unavailable."""
    reason: str
    lines: list[str]
    """The last lines of output of the worker that failed."""
    at: str

class OutputLine(TypedDict):
    """A line that a process of a job printed."""

    at: str
    """ISO 8601, UTC; empty where it is not known."""
    worker: str
    text: str

Phase = Literal[
    "starting", "training", "replaying", "paused", "draining", "restarting", "ended", "stopped", "failed", "broken"
]

class PublishedExport(TypedDict):
    """The export that is current now."""

    path: str
    url: str
    failed_gates: list[str]
    """Gates that it did not pass."""

class RankedRowEntry(TypedDict):
    """A row by its shows."""

    slot: str | None
    """The first slot that has such rows; null for rows of a slot that is gone."""
    sign: str
    """Its feature id."""
    show: float
    """Shows now: they decay."""
    click: float
    unseen_days: int
    """Days since it was seen."""

class Ready(TypedDict):
    """The service is ready."""

    status: NotRequired[str]

class RejectedEvent(TypedDict):
    """A rejected event."""

    pass_number: int
    rank: int
    partition: str
    position: int
    line: int | None
    """Its line among those that the pipe command printed for the segment; null where there is none."""
    reason: str
    detail: str
    """Its fault in words; empty where pipe.dead_letters.keep_bytes is false."""
    text: str | None
    """The event as text, its first 4,096 characters; null where its bytes are not kept."""
    bytes: int | None
    """Its whole size."""

class RejectedEvents(TypedDict):
    """The newest rejected events."""

    items: list[RejectedEvent]
    """The newest first."""

class ResizeProgress(TypedDict):
    """A resize that is being prepared."""

    shards: float | None
    """Number of shards to come; 0: the shard lives in the trainer."""
    trainers: float | None
    """Number of trainers to come."""
    state: str
    """Of the new workers: "waiting for a close", "starting", "restoring", "moving" or "handing over"."""
    moved: float | None
    """The version whose rows they hold; null: none yet."""
    committed: float | None
    """The version whose rows they can take over now."""
    for_s: float | None
    """Seconds since the request."""

class RowRanking(TypedDict):
    """The rows of a table with most shows, and how long ago its rows were seen."""

    rows: list[RankedRowEntry]
    """Most shows first."""
    unseen: list[UnseenRows]
    scanned: int
    """Rows that were looked at: of very many, those in memory first."""
    total: int
    """All rows of the table."""
    commit: NotRequired[str | None]
    """The commit that was read, if the job does not run."""

class Skipped(TypedDict):
    """Positions that the job skipped."""

    partition: str
    begin: int
    end: int

class SlotDiagnosis(TypedDict):
    """A sparse slot; null: not known. Figures of the last pass need a section `guards` in the spec."""

    slot: str
    drift: float | None
    """How far its values are from those of the passes before."""
    coverage: float | None
    """Part of the samples that have a value."""
    reference_coverage: float | None
    """The same, of the passes before."""
    null_rate: float | None
    """Part of its values that are padding."""
    mean_count: float | None
    """Mean number of values in a sample."""
    distinct: int | None
    new_rows: float | None
    """Rows made in the last pass for each of its values."""
    rows: int
    """Rows in the commit. Slots that share rows have the same ones."""
    rows_share: float
    """Its part of the rows of all tables."""
    num_bytes: int
    """Its part of the table's files in the commit, by rows."""
    weight: float | None
    """Mean size of the first-order weights; null in a commit of more than 200,000 rows."""
    worth: float | None
    """Null here: only `headrace doctor --worth` has it."""
    signs: list[str]
    """Signs of trouble, each with what to do."""
    drifted: str | None
    """In words, if its values are others than before, which is no trouble where no bound of drift is set."""

SlotOrder = Literal["shift", "value", "cost"]

class Straggler(TypedDict):
    """The trainer that the others waited for longest in recent passes."""

    rank: float | None
    share: float | None
    """Share of the time, 0 to 1, that another trainer waited for it."""
    waits_s: dict[str, float]
    """By rank: seconds a pass that it waited for this one."""
    part: str | None
    """The part of `time_s` that takes it longer than the others; null where none explains the wait."""
    text: str
    """All of this in a sentence."""

class TableEntry(TypedDict):
    """A table of rows."""

    name: str
    rows: float | None
    bytes: float | None
    """Memory on all shards."""
    new_rows: float | None
    """Rows created in the newest pass."""
    unadmitted: float | None
    """Records of keys that were not admitted, in the newest pass."""
    dirty_rows: float | None
    """Rows changed since the newest commit, on the shard with most of them: they cannot be evicted from memory."""
    dim: int
    """Length of a row's vector."""
    frozen: list[str]
    """Slots whose rows do not learn, until they are unfrozen."""
    slots: dict[str, dict[str, Any]]
    """By slot: its `rows`, which slots of one `share` have in common; `bytes`, its share of the table's memory by
    rows; and statistics of its values over the job's life. With `guards`, also the `drift` of the newest pass."""
    held: dict[str, Any] | None
    """A shrink that would delete too many rows and waits for an operator, or null."""

class TokenEntry(TypedDict):
    """A token, without its secret."""

    id: str
    name: str
    role: Literal["viewer", "operator", "admin"]
    created: str
    expires: str | None
    last_used: str | None
    revoked: str | None

class TriedEvents(TypedDict):
    """Predictions of pasted events by one version."""

    version: int
    commit: str
    samples: list[TriedSample]
    left_out: int
    """Samples beyond those that are shown."""
    rejected: list[TriedRejection]
    example: str | None
    """If one was asked for: a recent event of the job's stream. Null where that is no line of text, or cannot be
    read within five seconds."""

class TriedRejection(TypedDict):
    """Events that give no sample."""

    reason: str
    events: int
    first: str
    """The first of them, in words."""

class TriedSample(TypedDict):
    """One sample of the events."""

    event: int
    """The number of its event, from 0."""
    time: float | None
    """Time of the event in unix seconds, or null."""
    predictions: dict[str, float | None]
    """By task."""
    slots: list[TriedSlot]

class TriedSlot(TypedDict):
    """The values of one slot in a sample."""

    name: str
    kind: str
    """"sparse", "dense" or "meta"."""
    values: list[str]
    """The first of them. An id that is the hash of a text of the event is shown as this text."""
    missing: list[str]
    """Those without a row: the job has not learnt them, and predicts with the default row."""
    more: int
    """Values that are not shown."""

class TuningProgress(TypedDict):
    """The choices of a new job before its first pass: settings with train.tune = "auto", and crosses."""

    trial: float
    """Number of the trial that runs, from 1; 0: none does."""
    of: float
    """Trials in all; a last one may be added."""
    name: str
    """The setting that is tried, or what else is done to choose; empty once the job has chosen."""
    tried: list[TuningTrial]
    """All settings, the chosen one first; empty before the end."""
    crosses: ChosenCrosses | None
    """Null for a job that has not chosen crosses."""

class TuningTrial(TypedDict):
    """A setting that a new job tried on the first events of its stream."""

    name: str
    keys: dict[str, Any]
    """Values that differ from the job file, by the path of their key."""
    events: float
    """Events that it has learnt."""
    logloss: float | None
    """Mean loss of the last half of those, predicted before they were learnt; null: it failed."""
    auc: float | None
    """AUC of the same samples."""

class UnseenRows(TypedDict):
    """Rows by the days since they were seen."""

    from_days: int
    """The least days; the next entry begins with more."""
    rows: int

class UsageOfWorker(TypedDict):
    """The processor time and memory of a worker at the last close, without its pipe commands."""

    machine: str
    pid: int
    cores: float | None
    """Cores that it used on average in recent passes."""
    cpu_s: float | None
    """Processor time since its start."""
    memory_bytes: float | None

class WaitingChange(TypedDict):
    """A key of the job file that the present run has not taken."""

    key: str
    was: str
    """The value of the run, as JSON; "nothing" where it lacks the key."""
    now: str
    """The value of the job file."""
    note: str
    change: str
    """The kind of the change, which says what takes it."""
    to_do: str
    """How to have it taken."""

Wire = Literal["float32", "bfloat16", "int8"]

class ServiceActions:
    """A service's actions."""

    def get_health(self) -> Health:
        """Whether this process answers. It checks nothing else."""
        ...

    def get_ready(self) -> Ready:
        """Whether the database of the service can be read; 503 if not."""
        ...

    def get_exposition(self) -> bytes:
        """Figures of all jobs, in the text format of Prometheus."""
        ...

    def list_jobs(self) -> list[JobEntry]:
        """All jobs by name, with their phases."""
        ...

    def create_job(
        self,
        *,
        spec: dict[str, JsonValue] | None = ...,
        toml: str | None = ...,
        name: str | None = ...,
        base: str | None = ...,
        start: bool | None = ...,
    ) -> JobEntry:
        """Create a job from a spec, and start it unless `start` is false. A spec that names a command, a model or a
        path that this service does not allow is refused."""
        ...

    def get_job(self, job: str) -> JobStatus:
        """A job's phase and all its figures."""
        ...

    def delete_job(self, job: str, *, keep_store: bool | None = ...) -> None:
        """Delete a stopped job and its folder, and its store unless `keep_store` is true."""
        ...

    def set_keys(
        self,
        job: str,
        *,
        keys: dict[str, JsonValue],
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Change learning rates, schedules, decays and thresholds. They act from the next close; the operation
        awaits it. They override the spec, also after a restart. Invalid settings are refused at once."""
        ...

    def resize_job(
        self,
        job: str,
        *,
        shards: int | None = ...,
        trainers: int | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Have a running job go on with other numbers of shards and trainers. The operation ends once these train.
        The numbers override the spec, also after a restart. The result has the `version` after which they train."""
        ...

    def pause_job(self, job: str) -> JobEntry:
        """Train no new pass; the workers stay. The phase changes later."""
        ...

    def resume_job(self, job: str) -> JobEntry:
        """Train again. A job that has ended continues where it was."""
        ...

    def drain_job(self, job: str) -> JobEntry:
        """Finish the pass, commit, complete the exports and end."""
        ...

    def stop_job(self, job: str) -> JobEntry:
        """As drain, but kill the job if that takes too long. It can continue from its log later."""
        ...

    def restart_job(self, job: str) -> JobEntry:
        """Stop the job, then start it again where it was."""
        ...

    def get_spec(self, job: str) -> JobSpec:
        """The spec of the job, without its passwords."""
        ...

    def get_settings(self, job: str) -> JobSettings:
        """Every setting in force, with its value in the job file; and changes of the file that the run has not
        taken."""
        ...

    def list_examples(self) -> ExampleJobs:
        """The jobs that come with Headrace, to create one like them."""
        ...

    def infer_spec(self, *, events: str, paths: str | None = ...) -> InferredSpec:
        """Propose slots, label, time and source for a sample of events, as `headrace spec infer` does; it measures
        none."""
        ...

    def list_builds(self) -> Builds:
        """The names of the builds of the service's configuration. The service's own environment is always one
        more."""
        ...

    def upgrade_job(
        self,
        job: str,
        *,
        build: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Have a job end at a close, and go on in the environment of another build. The operation ends once it
        trains. A build that cannot read the job's spec or store is refused, and the job stays as it is."""
        ...

    def upgrade_all_jobs(
        self,
        *,
        build: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Move all jobs by name, one after another. The first that fails ends the operation; those before it stay
        moved."""
        ...

    def list_commits(self, job: str) -> list[CommitEntry]:
        """A job's commits, oldest first."""
        ...

    def make_commit(
        self, job: str, *, wait: bool = True, timeout_s: float = ..., notify: Callable[[str], None] | None = None
    ) -> OperationEntry:
        """Have a running job commit its present state. The result has the `name` of the commit."""
        ...

    def get_commit(self, job: str, name: str) -> CommitDetails:
        """A commit, as described by its manifest."""
        ...

    def delete_commit(self, job: str, name: str) -> None:
        """Remove a commit of a stopped job, unless it has holders, or the next run begins with it."""
        ...

    def verify_commit(
        self,
        job: str,
        name: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Read every file, open every table, count its rows. The result has `sound`, and the damage by file."""
        ...

    def pin_commit(self, job: str, name: str, *, holder: str | None = ...) -> CommitHolders:
        """Keep a commit from being pruned until the same holder unpins it."""
        ...

    def unpin_commit(self, job: str, name: str, *, holder: str | None = ...) -> CommitHolders:
        """Release a commit: it may be pruned again once it has no other holder."""
        ...

    def rewind_job(
        self,
        job: str,
        name: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Let a stopped job continue from a commit, on a new timeline. It trains again on everything after the
        commit. The commit is verified first. The result has the new `timeline`, and in `left` the state to return
        to."""
        ...

    def list_exports(self, job: str, *, stream: str | None = ...) -> list[ExportEntry]:
        """A job's exports by stream, oldest first, also incomplete ones."""
        ...

    def make_export(
        self,
        job: str,
        *,
        stream: str,
        kind: Literal["base", "delta"] | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Have a running job export its state at the next close. The result has its `name`, and whether it is
        `current`."""
        ...

    def get_export(self, job: str, stream: str, timeline: str, name: str) -> ExportDetails:
        """A complete export and its manifest."""
        ...

    def get_export_file(self, job: str, stream: str, timeline: str, name: str, file: str) -> bytes:
        """One file of a complete export in a folder. Files in an object store must be fetched from there."""
        ...

    def point_to_export(self, job: str, stream: str, *, name: str) -> PublishedExport:
        """Write an export to `current.json`, also if it failed its gates, until the job writes its next one."""
        ...

    def get_metrics(self, job: str) -> JobMetrics:
        """Metrics of the job's life, the window and the last pass, and by slice."""
        ...

    def get_metrics_history(
        self, job: str, *, since: int | None = ..., timeline: str | None = ..., last: int | None = ...
    ) -> list[CloseEntry]:
        """The closes in the job's log, oldest first."""
        ...

    def get_doctor(self, job: str, *, by: SlotOrder | None = ...) -> JobDiagnosis:
        """Figures of each slot at the newest commit, and signs of trouble in words, as `headrace doctor` prints
        them."""
        ...

    def get_freshness(self, job: str) -> AgesOfVersions:
        """The last result of `headrace freshness`: metrics of old versions against the job itself, by their age."""
        ...

    def list_tables(self, job: str) -> list[TableEntry]:
        """A job's tables, with their rows by slot."""
        ...

    def get_table(self, job: str, table: str) -> TableEntry:
        """A table, with its rows by slot."""
        ...

    def shrink_table(
        self,
        job: str,
        table: str,
        *,
        delete_below: float | None = ...,
        delete_after_days: int | None = ...,
        dry_run: bool | None = ...,
        allow: bool | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Delete the rows that meet a rule, or with `dry_run` only count them. Refused if they are too many."""
        ...

    def explain_sign(self, job: str, table: str, *, slot: str, sign: str) -> Explanation:
        """Where its row is, why it has one or none, its values, when it is deleted, which exports contain it."""
        ...

    def rank_rows(self, job: str, table: str) -> RowRanking:
        """The rows with most shows, and how long ago rows were seen; by its newest commit if the job does not
        run."""
        ...

    def forget_value(
        self,
        job: str,
        *,
        slot: str,
        value: str,
        everywhere: bool | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Delete one value's row, and after a commit its dead letters. The result lists what still contains the
        value."""
        ...

    def tick_day(
        self,
        job: str,
        *,
        to: int | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Begin the next day of a running job whose events have no time."""
        ...

    def clear_slot(
        self,
        job: str,
        slot: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Delete all rows of a slot. Use it if wrong values came in the slot. Its values, and those of slots that
        share its rows, start anew from initial rows. Only a rewind brings deleted rows back."""
        ...

    def freeze_slot(
        self,
        job: str,
        slot: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Keep the weights of a slot's rows as they are. Steps no longer change them, nor those of slots that share
        the rows; new values keep their initial rows, and no row gets its vector. Shows, clicks and ages go on, so
        rows leave and are exported as before. Use unfreeze to go on learning."""
        ...

    def unfreeze_slot(
        self,
        job: str,
        slot: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Let the rows of a frozen slot learn again. It goes on from the weights and the optimizer state that the
        rows had when they were frozen."""
        ...

    def get_log(self, job: str, *, last: int | None = ...) -> list[LogLine]:
        """Every claim, plan, operation and close in the job's log as text, oldest first. A damaged log is read up
        to the damage, which is the last entry."""
        ...

    def get_output(
        self,
        job: str,
        *,
        worker: str | None = ...,
        text: str | None = ...,
        level: LineLevel | None = ...,
        last: bool | None = ...,
    ) -> list[OutputLine]:
        """Lines that a job's processes printed. The newest `limits.max_output` bytes are kept. Continue with
        `next`."""
        ...

    def list_dead_letters(self, job: str) -> list[LettersFile]:
        """Files of rejected events, by pass. They contain the data of the events."""
        ...

    def list_rejected(self, job: str, *, reason: str | None = ..., last: int | None = ...) -> RejectedEvents:
        """The newest rejected events with their reasons, the newest first. They contain the data of the events.
        They come from the files of dead letters: the newest of each file, so of a pass with very many not all."""
        ...

    def get_dead_letters(self, job: str, file: str) -> bytes:
        """One file, with a JSON line for each event: its partition, position, reason and bytes."""
        ...

    def list_predictions(self, job: str) -> list[OperationEntry]:
        """The requested predictions of a job as operations, newest first."""
        ...

    def predict_by_job(
        self,
        job: str,
        *,
        input: InputSection,
        output: str,
        version: str | None = ...,
        columns: list[str] | None = ...,
        outputs: list[str] | None = ...,
        metrics: bool | None = ...,
        shuffle: list[str] | None = ...,
        worth: bool | None = ...,
        trainers: int | None = ...,
        shards: int | None = ...,
        on: Literal["here", "cluster"] | None = ...,
        segment_events: int | None = ...,
        batch_size: int | None = ...,
        share: float | None = ...,
        wire: Wire | None = ...,
        spec: dict[str, Any] | None = ...,
        base: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Predict many events with a version of the job's model, while it trains; write Parquet to `output`. The
        result is the manifest. A repeated request continues an interrupted one."""
        ...

    def predict_by_export(
        self,
        *,
        input: InputSection,
        output: str,
        version: str | None = ...,
        columns: list[str] | None = ...,
        outputs: list[str] | None = ...,
        metrics: bool | None = ...,
        shuffle: list[str] | None = ...,
        worth: bool | None = ...,
        trainers: int | None = ...,
        shards: int | None = ...,
        on: Literal["here", "cluster"] | None = ...,
        segment_events: int | None = ...,
        batch_size: int | None = ...,
        share: float | None = ...,
        wire: Wire | None = ...,
        spec: dict[str, Any] | None = ...,
        base: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Predict many events with an export of any job. `version` is its address; `spec` defines how events are
        read."""
        ...

    def suggest_features(
        self,
        job: str,
        *,
        events: int | None = ...,
        newest: bool | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Measure on a job's stream which crosses, counters and histories pay, which slots do not, and admission. A
        process on the service's machine reads the events beside the job, at low priority; the job may run, and
        nothing is changed. The result has what each costs or saves in rows, as `headrace suggest --json` prints
        it."""
        ...

    def try_events(self, job: str, *, events: str | None = ..., example: bool | None = ...) -> TriedEvents:
        """Predict events with the job's newest commit: their samples, features and predictions, and rows that are
        missing. They go through the job's pipe. The job need not run; nothing is learnt or stored. The first answer
        takes some seconds, until a process is ready; that process stays for a few minutes."""
        ...

    def record_trace(
        self,
        job: str,
        *,
        steps: int | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry:
        """Record the next steps of every trainer and shard. The trace replaces an earlier one; download it once it
        is done. Training goes on. The operation ends once all workers have recorded so many steps, or after five
        minutes, with the parts that there are. It fails while another one records the same job."""
        ...

    def get_trace(self, job: str) -> str:
        """The newest timeline, in the trace format of Chrome; open it in ui.perfetto.dev."""
        ...

    def list_operations(self, *, job: str | None = ...) -> list[OperationEntry]:
        """Operations, newest first. They are removed 7 days after their end."""
        ...

    def get_operation(self, id: str) -> OperationEntry:
        """The state of an operation, and its result."""
        ...

    def cancel_operation(self, id: str) -> OperationEntry:
        """Cancel an operation: if it waits, it never starts; if it runs, it ends soon; if it is over, nothing
        changes. A request that it has already sent to a job is still carried out."""
        ...

    def get_feed(self, job: str, *, signing_request: str | None = ...) -> Feed:
        """Addresses and secret by which a replica follows a running job. Get them again after its workers restart.
        Where the job listens for other machines, a replica also gets a certificate for its signing request."""
        ...

    def list_audit(self, *, job: str | None = ..., who: str | None = ...) -> list[AuditEntry]:
        """Every request that changed something or tried to, newest first. Entries are kept for 400 days."""
        ...

    def list_tokens(self) -> list[TokenEntry]:
        """All tokens in order of creation, also revoked ones."""
        ...

    def create_token(
        self, *, name: str, role: Literal["viewer", "operator", "admin"], days: float | None = ...
    ) -> NewToken:
        """Create a token. Its text is shown once, so repeating the request creates another token, or is refused."""
        ...

    def revoke_token(self, token: str) -> TokenEntry:
        """Revoke a token, by its id or name."""
        ...

class AsyncServiceActions:
    """A service's actions, each awaited."""

    async def get_health(self) -> Health: ...
    async def get_ready(self) -> Ready: ...
    async def get_exposition(self) -> bytes: ...
    async def list_jobs(self) -> list[JobEntry]: ...
    async def create_job(
        self,
        *,
        spec: dict[str, JsonValue] | None = ...,
        toml: str | None = ...,
        name: str | None = ...,
        base: str | None = ...,
        start: bool | None = ...,
    ) -> JobEntry: ...
    async def get_job(self, job: str) -> JobStatus: ...
    async def delete_job(self, job: str, *, keep_store: bool | None = ...) -> None: ...
    async def set_keys(
        self,
        job: str,
        *,
        keys: dict[str, JsonValue],
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def resize_job(
        self,
        job: str,
        *,
        shards: int | None = ...,
        trainers: int | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def pause_job(self, job: str) -> JobEntry: ...
    async def resume_job(self, job: str) -> JobEntry: ...
    async def drain_job(self, job: str) -> JobEntry: ...
    async def stop_job(self, job: str) -> JobEntry: ...
    async def restart_job(self, job: str) -> JobEntry: ...
    async def get_spec(self, job: str) -> JobSpec: ...
    async def get_settings(self, job: str) -> JobSettings: ...
    async def list_examples(self) -> ExampleJobs: ...
    async def infer_spec(self, *, events: str, paths: str | None = ...) -> InferredSpec: ...
    async def list_builds(self) -> Builds: ...
    async def upgrade_job(
        self,
        job: str,
        *,
        build: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def upgrade_all_jobs(
        self,
        *,
        build: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def list_commits(self, job: str) -> list[CommitEntry]: ...
    async def make_commit(
        self, job: str, *, wait: bool = True, timeout_s: float = ..., notify: Callable[[str], None] | None = None
    ) -> OperationEntry: ...
    async def get_commit(self, job: str, name: str) -> CommitDetails: ...
    async def delete_commit(self, job: str, name: str) -> None: ...
    async def verify_commit(
        self,
        job: str,
        name: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def pin_commit(self, job: str, name: str, *, holder: str | None = ...) -> CommitHolders: ...
    async def unpin_commit(self, job: str, name: str, *, holder: str | None = ...) -> CommitHolders: ...
    async def rewind_job(
        self,
        job: str,
        name: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def list_exports(self, job: str, *, stream: str | None = ...) -> list[ExportEntry]: ...
    async def make_export(
        self,
        job: str,
        *,
        stream: str,
        kind: Literal["base", "delta"] | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def get_export(self, job: str, stream: str, timeline: str, name: str) -> ExportDetails: ...
    async def get_export_file(self, job: str, stream: str, timeline: str, name: str, file: str) -> bytes: ...
    async def point_to_export(self, job: str, stream: str, *, name: str) -> PublishedExport: ...
    async def get_metrics(self, job: str) -> JobMetrics: ...
    async def get_metrics_history(
        self, job: str, *, since: int | None = ..., timeline: str | None = ..., last: int | None = ...
    ) -> list[CloseEntry]: ...
    async def get_doctor(self, job: str, *, by: SlotOrder | None = ...) -> JobDiagnosis: ...
    async def get_freshness(self, job: str) -> AgesOfVersions: ...
    async def list_tables(self, job: str) -> list[TableEntry]: ...
    async def get_table(self, job: str, table: str) -> TableEntry: ...
    async def shrink_table(
        self,
        job: str,
        table: str,
        *,
        delete_below: float | None = ...,
        delete_after_days: int | None = ...,
        dry_run: bool | None = ...,
        allow: bool | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def explain_sign(self, job: str, table: str, *, slot: str, sign: str) -> Explanation: ...
    async def rank_rows(self, job: str, table: str) -> RowRanking: ...
    async def forget_value(
        self,
        job: str,
        *,
        slot: str,
        value: str,
        everywhere: bool | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def tick_day(
        self,
        job: str,
        *,
        to: int | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def clear_slot(
        self,
        job: str,
        slot: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def freeze_slot(
        self,
        job: str,
        slot: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def unfreeze_slot(
        self,
        job: str,
        slot: str,
        *,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def get_log(self, job: str, *, last: int | None = ...) -> list[LogLine]: ...
    async def get_output(
        self,
        job: str,
        *,
        worker: str | None = ...,
        text: str | None = ...,
        level: LineLevel | None = ...,
        last: bool | None = ...,
    ) -> list[OutputLine]: ...
    async def list_dead_letters(self, job: str) -> list[LettersFile]: ...
    async def list_rejected(self, job: str, *, reason: str | None = ..., last: int | None = ...) -> RejectedEvents: ...
    async def get_dead_letters(self, job: str, file: str) -> bytes: ...
    async def list_predictions(self, job: str) -> list[OperationEntry]: ...
    async def predict_by_job(
        self,
        job: str,
        *,
        input: InputSection,
        output: str,
        version: str | None = ...,
        columns: list[str] | None = ...,
        outputs: list[str] | None = ...,
        metrics: bool | None = ...,
        shuffle: list[str] | None = ...,
        worth: bool | None = ...,
        trainers: int | None = ...,
        shards: int | None = ...,
        on: Literal["here", "cluster"] | None = ...,
        segment_events: int | None = ...,
        batch_size: int | None = ...,
        share: float | None = ...,
        wire: Wire | None = ...,
        spec: dict[str, Any] | None = ...,
        base: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def predict_by_export(
        self,
        *,
        input: InputSection,
        output: str,
        version: str | None = ...,
        columns: list[str] | None = ...,
        outputs: list[str] | None = ...,
        metrics: bool | None = ...,
        shuffle: list[str] | None = ...,
        worth: bool | None = ...,
        trainers: int | None = ...,
        shards: int | None = ...,
        on: Literal["here", "cluster"] | None = ...,
        segment_events: int | None = ...,
        batch_size: int | None = ...,
        share: float | None = ...,
        wire: Wire | None = ...,
        spec: dict[str, Any] | None = ...,
        base: str | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def suggest_features(
        self,
        job: str,
        *,
        events: int | None = ...,
        newest: bool | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def try_events(self, job: str, *, events: str | None = ..., example: bool | None = ...) -> TriedEvents: ...
    async def record_trace(
        self,
        job: str,
        *,
        steps: int | None = ...,
        wait: bool = True,
        timeout_s: float = ...,
        notify: Callable[[str], None] | None = None,
    ) -> OperationEntry: ...
    async def get_trace(self, job: str) -> str: ...
    async def list_operations(self, *, job: str | None = ...) -> list[OperationEntry]: ...
    async def get_operation(self, id: str) -> OperationEntry: ...
    async def cancel_operation(self, id: str) -> OperationEntry: ...
    async def get_feed(self, job: str, *, signing_request: str | None = ...) -> Feed: ...
    async def list_audit(self, *, job: str | None = ..., who: str | None = ...) -> list[AuditEntry]: ...
    async def list_tokens(self) -> list[TokenEntry]: ...
    async def create_token(
        self, *, name: str, role: Literal["viewer", "operator", "admin"], days: float | None = ...
    ) -> NewToken: ...
    async def revoke_token(self, token: str) -> TokenEntry: ...
