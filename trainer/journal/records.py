"""The content of the job's log: one class for each kind of record and of operation, and their form as JSON.

`Content` is closed: code that acts on records matches on these classes and ends with `assert_never`. Only `encode` and
`decode` know the names of kinds and keys. The bytes around the JSON are trainer.journal.log_file's. The meaning of all
records together is trainer.journal.job_history's. Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Literal, assert_never, get_args

from headrace.errors import HeadraceError
from headrace.relative_names import relative_name
from headrace.trainer.journal.partitions import KnownPartition, SkippedRange
from headrace.trainer.journal.pass_plan import PassPlan

NO_REASON = "no reason given"


class RecordKind(StrEnum):
    """The kinds of records."""

    CLAIM = "claim"
    PLAN = "plan"
    VOID = "void"
    OPERATION = "operation"
    CLOSE = "close"


class UndecodableRecord(HeadraceError):
    """The JSON is whole, but this program does not know such a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A generation of workers takes over the job, or continues in a new file: the first record of each file."""

    generation: int
    timeline: str | None = None
    """None: the timeline of the claim before."""
    base: str | None = None
    """Name of the commit that the timeline began from; None: the initial state."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For people: host, process, time, program."""
    sealed: Mapping[str, int] = field(default_factory=dict)
    """{name: bytes} of the file before; empty for the first file."""
    closed: int | None = None
    """Last closed pass of the timeline: the records of earlier passes may be pruned. None: as in the claim before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Void:
    """A plan is withdrawn."""

    number: int
    reason: str = NO_REASON


@dataclass(frozen=True, slots=True, kw_only=True)
class PassClose:
    """A pass is over."""

    number: int
    """Number of the pass; also the version that it makes."""
    day: int
    events: int
    samples: int
    rejected: Mapping[str, int]
    """Rejected samples by reason."""
    digests: Mapping[str, str]
    event_time_s: float | None = None
    """Highest event time of all passes so far, unix seconds."""
    window: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the window, by task."""
    of_pass: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the pass, by task."""
    left_out: Mapping[str, int] | None = None
    """Events outside `since` and `until` of their source or without a value, by reason; they are not among `events`.
    None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOperation:
    """The spec in force from here on."""

    op: ClassVar[str] = "spec"
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOperation:
    """A generation continues from a commit."""

    op: ClassVar[str] = "restore"
    commit: str | None
    """None: the initial state."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Damaged commits, each with its damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsOperation:
    """Partitions are new, or longer than they were."""

    op: ClassVar[str] = "partitions"
    partitions: Sequence[KnownPartition]


@dataclass(frozen=True, slots=True, kw_only=True)
class GapOperation:
    """The positions from `position` up to `go_on` are no longer retained; the job skips them."""

    op: ClassVar[str] = "gap"
    partition: str
    position: int
    go_on: int

    @property
    def skip(self) -> SkippedRange:
        """The lost range."""
        return SkippedRange(self.partition, self.position, self.go_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipOperation:
    """An operator has the job skip a range."""

    op: ClassVar[str] = "skip"
    partition: str
    begin: int
    end: int
    reason: str = NO_REASON

    @property
    def skip(self) -> SkippedRange:
        """The range."""
        return SkippedRange(self.partition, self.begin, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulOperation:
    """The kernels of matrix products, from the next close on. A job without such a record has MKL everywhere."""

    op: ClassVar[str] = "matmul"
    setting: str
    """train.matmul at the time."""
    kernels: Mapping[str, Mapping[str, str]]
    """By size of layer, "inputs x outputs", and product (trainer.models.linear.table_of)."""
    fingerprint: Mapping[str, str]
    """The environment in which they were chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOperation:
    """Values are set while the job runs (`headrace set`)."""

    op: ClassVar[str] = "set"
    id: str
    keys: Mapping[str, Any]
    """By the path of the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeOperation:
    """The job goes on with other numbers of workers (`headrace resize`). The generation in which it acts ends."""

    op: ClassVar[str] = "resize"
    id: str
    keys: Mapping[str, int]
    """By the path of the key: cluster.shards (0: the shard lives in the trainer) and cluster.trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayTickOperation:
    """The day of a job without event time advances."""

    op: ClassVar[str] = "day_tick"
    id: str
    to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkOperation:
    """Rows of a table are removed: by its own rule where both limits are None."""

    op: ClassVar[str] = "shrink"
    id: str | None
    """None: the daily shrink."""
    table: str
    delete_below: float | None
    delete_after_days: int | None
    at_once: bool
    """True if the close waits until the rows are removed."""
    rule: Mapping[str, Any] | None = None
    """The table's own rule, where the shrink follows it; old logs leave it out."""

    @property
    def by_own_rule(self) -> bool:
        """True if the table's own rule decides."""
        return self.delete_below is None and self.delete_after_days is None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOperation:
    """The daily shrink of a table waits for an operator."""

    op: ClassVar[str] = "hold"
    id: None = None
    table: str
    rows: int
    going: int
    """Rows that the shrink would remove."""
    fraction: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetOperation:
    """One row is deleted, with the histories and counters of its key; and other rows in which its value takes part."""

    op: ClassVar[str] = "forget"
    id: str
    slot: str
    table: str
    group: int
    key: int
    also: Sequence[Mapping[str, Any]] | None = None
    """{"table", "group", "keys"} of other rows to delete; old logs leave it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOperation:
    """An export is cut at the close of `version`."""

    op: ClassVar[str] = "export"
    id: str | None
    """None: it fell due by itself."""
    stream: str
    type: Literal["base", "delta"]
    name: str
    version: int
    timeline: str
    parent: Mapping[str, Any] | None
    """{"name", "version", "timeline"} of the export that a delta builds on."""
    all: bool
    """True if a delta takes all rows that changed, whatever their counts are."""
    why: str
    clears: bool
    """True if selected rows begin to count delta_score anew."""
    arithmetic: str
    """Hash of libraries and hardware."""
    at_s: float | None
    """On the stream's clock, unix seconds."""
    address: str
    tables: Sequence[str]
    dtype: str
    base_threshold: float
    delta_threshold: float
    delta_keep_days: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedOperation:
    """An export has ended: complete, or failed for good."""

    op: ClassVar[str] = "exported"
    stream: str
    name: str
    version: int
    type: Literal["base", "delta"]
    timeline: str
    outcome: str
    error: str | None
    final: bool
    """True if another try would fail as well."""
    current: bool | None
    """True if readers are pointed to it."""
    failed_gates: Sequence[str]
    command_error: str | None
    at_s: float | None
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackOperation:
    """`current.json` of a stream goes back to an older export; or, if there are no paths, exports go on as before."""

    op: ClassVar[str] = "rollback"
    stream: str
    version: int
    """The version at whose close it acts: exports up to it are not promoted any more."""
    timeline: str
    paths: Sequence[str]
    """The exports that were promoted while the metric was well, newest first: the first that exists is current."""
    level: float
    """Median of the metric before."""
    value: float
    """The metric at this close."""
    why: str


InertOperation = SpecOperation | RestoreOperation | PartitionsOperation | GapOperation | SkipOperation | MatmulOperation
"""These have taken effect by the time they are logged."""
RequestedOperation = (
    SetOperation | ResizeOperation | DayTickOperation | ShrinkOperation | ForgetOperation | ExportOperation
)
"""These may come from a client's request and then carry its id."""
ActingOperation = RequestedOperation | HoldOperation | ExportedOperation | RollbackOperation
"""These act at the next close."""
Operation = InertOperation | ActingOperation
"""Everything but training that changes the state."""
Content = Claim | PassPlan | Void | PassClose | Operation
"""The content of one record."""

_OPERATIONS: Mapping[str, type[Operation]] = {each.op: each for each in get_args(Operation)}
_OMITTED_IF_NONE = ("rule", "left_out", "also")
_FIELDS: Mapping[type, Sequence[tuple[str, bool]]] = {
    cls: [(each.name, each.default is MISSING and each.default_factory is MISSING) for each in fields(cls)]
    for cls in (Void, PassClose, *get_args(Operation))
}
"""By class: the name of each field, and whether it has no default."""


def kind_of(content: Content) -> RecordKind:
    """The kind of a record with this content."""
    match content:
        case Claim():
            return RecordKind.CLAIM
        case PassPlan():
            return RecordKind.PLAN
        case Void():
            return RecordKind.VOID
        case PassClose():
            return RecordKind.CLOSE
        case _:
            return RecordKind.OPERATION


def encode(content: Content) -> dict[str, Any]:
    """The JSON object of a record without its number and kind. The order of keys is the one on disk."""
    match content:
        case Claim():
            timeline = {} if content.timeline is None else {"timeline": content.timeline, "base": content.base}
            closed = {} if content.closed is None else {"closed": content.closed}
            seal = {"generation": content.generation, "sealed": dict(content.sealed)}
            return {**timeline, **content.facts, **seal, **closed}
        case PassPlan():
            return content.message()
        case Void() | PassClose():
            return _plain(content)
        case PartitionsOperation():
            return {"op": content.op, "partitions": [each.message() for each in content.partitions]}
        case (
            SpecOperation() | RestoreOperation() | GapOperation() | SkipOperation() | MatmulOperation()
            | SetOperation() | ResizeOperation() | DayTickOperation() | ShrinkOperation() | HoldOperation()
            | ForgetOperation() | ExportOperation() | ExportedOperation() | RollbackOperation()
        ):  # fmt: skip
            return {"op": content.op, **_plain(content)}
        case _:
            assert_never(content)


def decode(kind: str, body: Mapping[str, Any]) -> Content:
    """The inverse of `encode`. Keys that this program does not know are left out.

    Raises UndecodableRecord for an unknown kind or operation, and for a known one without one of its keys.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise UndecodableRecord(f"the kind {kind!r} is unknown; known are {', '.join(RecordKind)}")
    try:
        return decoder(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UndecodableRecord(f"the {kind} is not understood: {type(error).__name__}: {error}") from error


def _claim(body: Mapping[str, Any]) -> Claim:
    own = {"generation", "timeline", "base", "sealed", "closed"}
    facts = {name: value for name, value in body.items() if name not in own}
    return Claim(
        generation=body["generation"],
        timeline=body.get("timeline"),
        base=body.get("base"),
        facts=facts,
        sealed=body["sealed"],
        closed=body.get("closed"),
    )


def _operation(body: Mapping[str, Any]) -> Operation:
    name = body.get("op")
    if not isinstance(name, str) or name not in _OPERATIONS:
        raise UndecodableRecord(f"the operation {name!r} is unknown; known are {', '.join(_OPERATIONS)}")
    cls = _OPERATIONS[name]
    known = _known(cls, body)
    if cls is PartitionsOperation:
        known["partitions"] = [KnownPartition.of_message(each) for each in known["partitions"]]
    if cls in (ExportOperation, ExportedOperation, RollbackOperation):
        _check_export_names(known)
    return cls(**known)


def _check_export_names(known: Mapping[str, Any]) -> None:
    """Raise InvalidName where a name of an export, which becomes part of a path, is not a relative name."""
    parent = known.get("parent") or {}
    names = [each[key] for each in (known, parent) for key in ("stream", "timeline", "name") if key in each]
    for name in (*names, *known.get("paths", ())):
        relative_name(name)


def _plain(content: Any) -> dict[str, Any]:
    """The fields of a dataclass in their order, by name."""
    values = {name: getattr(content, name) for name, _ in _FIELDS[type(content)]}
    return {name: value for name, value in values.items() if value is not None or name not in _OMITTED_IF_NONE}


def _known(cls: type, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `cls` that `body` has. Raises KeyError where one without a default is absent."""
    found = {}
    for name, required in _FIELDS[cls]:
        if name in body:
            found[name] = body[name]
        elif required:
            raise KeyError(name)
    return found


_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], Content]] = {
    RecordKind.CLAIM: _claim,
    RecordKind.PLAN: PassPlan.of_message,
    RecordKind.VOID: lambda body: Void(**_known(Void, body)),
    RecordKind.OPERATION: _operation,
    RecordKind.CLOSE: lambda body: PassClose(**_known(PassClose, body)),
}
