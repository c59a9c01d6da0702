"""The content of the job's log: one class for each kind of record and of operation.

The fields of a class, in their order, are the keys on disk (headrace.codec). A field with a default may be absent in
logs of older programs. The text (`str`) of a record is its line in the log page; that of a Claim or a SpecOperation
depends on the records before (service.history.log_text). The bytes around the JSON are trainer.journal.log_file's. The
meaning of all records together is trainer.journal.job_history's. Imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Literal, get_args

import msgspec

from headrace.codec import plain, typed, written
from headrace.errors import HeadraceError
from headrace.pserver.protocol.table_operations import AnySlotChange
from headrace.relative_names import relative_name
from headrace.trainer.journal.partitions import KnownPartition, SkippedRange, enumerated
from headrace.trainer.journal.pass_plan import PassPlan

NO_REASON = "no reason given"
DIGEST_DIGITS = 8
"""Digits of a digest in the log page."""


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

    def __str__(self) -> str:
        return f"pass {self.number} is void: {self.reason}"


class PassClose(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pass is over."""

    number: int
    """Number of the pass; also the version that it makes."""
    day: int
    events: int
    samples: int
    rejected: Mapping[str, int]
    """Rejected samples by reason."""
    digests: Mapping[str, str]
    event_time_s: float | None = written(None)
    """Highest event time of all passes so far, unix seconds."""
    window: Mapping[str, Any] = written({})
    """Metrics of the window, by task."""
    of_pass: Mapping[str, Any] = written({})
    """Metrics of the pass, by task."""
    left_out: Mapping[str, int] | None = None
    """Events outside `since` and `until` of their source or without a value, by reason; they are not among `events`.
    None: there are none."""

    def __str__(self) -> str:
        rejected = {name: number for name, number in self.rejected.items() if number}
        reasons = f" ({', '.join(f'{name} {number:,}' for name, number in rejected.items())})" if rejected else ""
        digests = " ".join(f"{name} {value[:DIGEST_DIGITS]}" for name, value in self.digests.items())
        outside = "".join(f", {number:,} left out ({reason})" for reason, number in (self.left_out or {}).items())
        return (
            f"pass {self.number}: {self.events:,} events, {self.samples:,} samples, {sum(rejected.values()):,} "
            f"rejected{reasons}{outside}, day {self.day}; {digests}"
        )


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

    def __str__(self) -> str:
        over = [f"{name} is not used: {why}" for name, why in self.passed_over.items()]
        begins = f"begins at {self.commit or 'the initial state'}"
        return f"restore: {'; '.join([begins, *over])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsOperation:
    """Partitions are new, or longer than they were."""

    op: ClassVar[str] = "partitions"
    partitions: Sequence[KnownPartition]

    def __str__(self) -> str:
        return f"partitions: {enumerated([str(each) for each in self.partitions])}"


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

    def __str__(self) -> str:
        lost = f"{self.go_on - self.position:,} positions from {self.position} on"
        return f"gap: {self.partition}: {lost} are no longer retained; continues at {self.go_on}"


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

    def __str__(self) -> str:
        return f"skip: {self.partition} {self.begin}-{self.end}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulOperation:
    """The kernels of matrix products, from the first pass that closes after this record. A job without such a record
    has MKL everywhere."""

    op: ClassVar[str] = "matmul"
    setting: str
    """train.matmul at the time."""
    kernels: Mapping[str, Mapping[str, str]]
    """By size of layer, "inputs x outputs", and product (trainer.models.linear.table_of)."""
    fingerprint: Mapping[str, str]
    """The environment in which they were chosen."""

    def __str__(self) -> str:
        sizes = [f"{size} {'/'.join(products.values())}" for size, products in self.kernels.items()]
        return f"matmul: {self.setting}: {enumerated(sizes or ['mkl for all products'])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOperation:
    """Values are set while the job runs (`headrace set`)."""

    op: ClassVar[str] = "set"
    id: str
    keys: Mapping[str, Any]
    """By the path of the key."""

    def __str__(self) -> str:
        return f"{self.op}: {enumerated([f'{key} = {json.dumps(value)}' for key, value in self.keys.items()])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeOperation:
    """The job goes on with other numbers of workers (`headrace resize`). The generation in which it acts ends."""

    op: ClassVar[str] = "resize"
    id: str
    keys: Mapping[str, int]
    """By the path of the key: cluster.shards (0: the shard lives in the trainer) and cluster.trainers."""

    def __str__(self) -> str:
        return f"{self.op}: {enumerated([f'{key} = {json.dumps(value)}' for key, value in self.keys.items()])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DayTickOperation:
    """The day of a job without event time advances."""

    op: ClassVar[str] = "day_tick"
    id: str
    to: int

    def __str__(self) -> str:
        return f"day tick: day {self.to} begins"


class ShrinkOperation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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

    def __str__(self) -> str:
        limits = {"delete_below": self.delete_below, "delete_after_days": self.delete_after_days}
        given = [f"{name} {limit}" for name, limit in limits.items() if limit is not None]
        return f"shrink: table {self.table}, {' and '.join(given) or 'by its own rule'}"


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

    def __str__(self) -> str:
        return f"hold: a shrink of table {self.table} waits, {self.going:,} of {self.rows:,} rows: {self.why}"


class ForgetOperation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row is deleted, with the histories and counters of its key; and other rows in which its value takes part."""

    op: ClassVar[str] = "forget"
    id: str
    slot: str
    table: str
    group: int
    key: int
    also: Sequence[Mapping[str, Any]] | None = None
    """{"table", "group", "keys"} of other rows to delete; old logs leave it out."""

    def __str__(self) -> str:
        others = sum(len(each["keys"]) for each in self.also or ())
        more = f", and {others:,} other rows" if others else ""
        return f"forget: slot {self.slot}, key {self.key}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOperation:
    """All rows of a slot change."""

    op: ClassVar[str] = "slot"
    id: str
    change: AnySlotChange

    @property
    def swept(self) -> frozenset[str]:
        """The tables whose rows are removed after it."""
        return frozenset([self.change.table] if self.change.deletes else ())

    def __str__(self) -> str:
        return f"{self.change.name}: {self.change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentOfExport:
    """The export that a delta builds on."""

    name: str
    version: int
    timeline: str

    def __post_init__(self) -> None:
        _check_names(self.name, self.timeline)


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
    parent: ParentOfExport | None
    """None: a base."""
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

    def __post_init__(self) -> None:
        _check_names(self.stream, self.name, self.timeline)

    def __str__(self) -> str:
        parent = "" if self.parent is None else f" on {self.parent.name}"
        return f"export: {self.name} of {self.stream}{parent}: {self.why}"


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

    def __post_init__(self) -> None:
        _check_names(self.stream, self.name, self.timeline)

    def __str__(self) -> str:
        error = f": {self.error}" if self.error else ""
        return f"exported: {self.name} of {self.stream} {self.outcome}{error}"


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

    def __post_init__(self) -> None:
        _check_names(self.stream, self.timeline, *self.paths)

    def __str__(self) -> str:
        what = f"current.json goes back to {self.paths[0]}" if self.paths else "exports are promoted again"
        return f"rollback: {self.stream}: {what}: {self.why}"


InertOperation = SpecOperation | RestoreOperation | PartitionsOperation | GapOperation | SkipOperation | MatmulOperation
"""These have taken effect by the time they are logged."""
RequestedOperation = (
    SetOperation
    | ResizeOperation
    | DayTickOperation
    | ShrinkOperation
    | ForgetOperation
    | SlotOperation
    | ExportOperation
)
"""These may come from a client's request and then carry its id."""
ActingOperation = RequestedOperation | HoldOperation | ExportedOperation | RollbackOperation
"""These act at the next close."""
Operation = InertOperation | ActingOperation
"""Everything but training that changes the state."""
Content = Claim | PassPlan | Void | PassClose | Operation
"""The content of one record."""

_OPERATIONS: Mapping[str, type[Operation]] = {each.op: each for each in get_args(Operation)}
_OTHERS: Mapping[type, RecordKind] = {
    Claim: RecordKind.CLAIM,
    PassPlan: RecordKind.PLAN,
    Void: RecordKind.VOID,
    PassClose: RecordKind.CLOSE,
}
"""The kind of each content that is no operation."""


def kind_of(content: Content) -> RecordKind:
    """The kind of a record with this content."""
    return _OTHERS.get(type(content), RecordKind.OPERATION)


def encode(content: Content) -> dict[str, Any]:
    """The JSON object of a record without its number and kind. The order of keys is the one on disk."""
    if isinstance(content, Claim):
        timeline = {} if content.timeline is None else {"timeline": content.timeline, "base": content.base}
        closed = {} if content.closed is None else {"closed": content.closed}
        return {**timeline, **content.facts, "generation": content.generation, "sealed": dict(content.sealed), **closed}
    op = {} if isinstance(content, PassPlan | Void | PassClose) else {"op": content.op}
    return {**op, **plain(content)}


def decode(kind: str, body: Mapping[str, Any]) -> Content:
    """The inverse of `encode`. Keys that this program does not know are left out.

    Raises UndecodableRecord for an unknown kind or operation, and for a known one whose keys are not its class's.
    """
    not_understood = f"the {kind} is not understood"
    if kind == RecordKind.OPERATION:
        op = body.get("op")
        if not isinstance(op, str) or op not in _OPERATIONS:
            raise UndecodableRecord(f"the operation {op!r} is unknown; known are {', '.join(_OPERATIONS)}")
        return typed(_OPERATIONS[op], body, not_understood, UndecodableRecord)
    cls = next((cls for cls, own in _OTHERS.items() if own == kind), None)
    if cls is None:
        raise UndecodableRecord(f"the kind {kind!r} is unknown; known are {', '.join(RecordKind)}")
    if cls is Claim:  # its facts are keys of the record
        names = {each.name for each in fields(Claim)} - {"facts"}
        facts = {name: value for name, value in body.items() if name not in names}
        body = {name: value for name, value in body.items() if name in names} | {"facts": facts}
    found: Content = typed(cls, body, not_understood, UndecodableRecord)
    return found


def _check_names(*names: str) -> None:
    """Raise InvalidName where a name of an export, which becomes part of a path, is not a relative name."""
    for name in names:
        relative_name(name)
