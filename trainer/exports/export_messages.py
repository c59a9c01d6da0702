"""The messages about an export: its operations in the log, request and answer of the exporter process.

Each is beside the function that makes it. Pure, except for the functions in `ExportSettings`.
trainer.exports.stream_state decides what is due.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.blob.store_address import parse
from headrace.config import Count, NotNegative, Section, SlotGroup
from headrace.dataset.spec.schema import Schema
from headrace.done_markers import is_done
from headrace.errors import SpecError
from headrace.pserver.config import TableSection
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.destination import STAGES, ExportLocation, address_of, destination_of
from headrace.trainer.exports.rollback import RollbackDecision, RollbackState
from headrace.trainer.exports.slot_files import AnySlotFiles, slot_files_of
from headrace.trainer.exports.stream_state import (
    ChainSettings,
    DueExport,
    ExportFacts,
    ExportStreamState,
    Kind,
    RunningStream,
    ScheduleInput,
    arithmetic_of,
    decide,
)
from headrace.trainer.journal.records import ExportedOperation, ExportOperation, ParentOfExport, RollbackOperation
from headrace.trainer.spec.history_tables import history_tables

if TYPE_CHECKING:
    from headrace.trainer.rank0.operations import ClosingPass


class ParentExport(Section):
    """The export that a delta builds on."""

    name: str
    """"0000000012-base"."""
    version: Count
    """Rows changed after it are in the delta."""
    timeline: str
    """Of the parent."""


class ExportRequest(Section):
    """One export of one commit. May be sent again after the export failed or was interrupted."""

    job: str
    """Name of the job."""
    stream: str
    """Name of the stream."""
    section: ExportSection
    """Settings of the stream."""
    kind: Literal["base", "delta"]
    """A whole model, or what changed since `parent`."""
    timeline: str
    """Of the version."""
    version: Count
    """Version to export."""
    parent: ParentExport | None
    """Parent of a delta; None for a base."""
    all: bool = False
    """Whether to ignore delta_threshold, after an export that failed."""
    why: str = ""
    """For the manifest: why the export is of this kind."""
    commit: Path
    """Folder of the commit of this version, leased."""
    address: str
    """Destination of the stream, as headrace.blob.store_address has it; exports are in <address>/<job>/<timeline>/."""
    stage: Path
    """Folder of what rank 0 prepared: model.json, golden.parquet and onnx-template.onnx, as far as it could."""
    tables: dict[str, TableSection]
    """Sections in force at this version, of the tables to export."""
    slots: dict[str, dict[SlotGroup, str]]
    """By table: slot group to the name of its slot."""
    groups: dict[str, SlotGroup] = {}
    """Slot group of every sparse slot by name. Default: as in `slots`."""
    slot_files: tuple[AnySlotFiles, ...] = ()
    """Exports of all tables have them; others, and deltas of such, have none, and say so."""
    slot_tables: dict[str, TableSection] = {}
    """Sections of the tables of histories and counters."""
    whole: bool = True
    """Whether all tables of the job are exported."""
    folder: Path = Path()
    """Folder of the job file: the command after an export runs there."""
    catalogue: tuple[str, ...] = ()
    """Files of the catalogue of items whose vectors the export holds, or globs."""
    facts: dict[str, Any] = {}
    """Copied into the manifest: positions, event_time, day, metrics, fingerprint, and what holds the export back."""
    point: tuple[str, ...] = ()
    """For a rollback, nothing is exported: current.json names the first of these paths that exists."""

    @property
    def name(self) -> str:
        """Name of the export's folder; for a rollback, of the request."""
        if self.point:
            return f"rollback-{self.version}"
        return f"{self.version:010d}-{self.kind}"


class ExportAnswer(Section):
    """How an export ended."""

    name: str
    """Name of the export."""
    outcome: Literal["complete", "failed"]
    """"complete": _DONE is there."""
    error: str | None = None
    """The failure, its place, and what to do."""
    final: bool = False
    """Whether another try cannot succeed either."""
    path: str = ""
    """Address of the export's folder."""
    current: bool = False
    """Whether it passed its gates, so that current.json points to it."""
    failed_gates: tuple[str, ...] = ()
    """Descriptions of the gates that failed."""
    command_error: str | None = None
    """How the command after the export failed, if it did."""
    rows: Count = 0
    """Exported rows of all tables."""
    tombstones: Count = 0
    """Exported tombstones of all tables."""
    pending: Count = 0
    """Changed rows that thresholds excluded."""
    num_bytes: Count = 0
    """Size of all files."""
    seconds: NotNegative = 0.0
    """From request to _DONE."""
    removed: tuple[str, ...] = ()
    """Old exports that were removed: "t1/0000000012-base"."""


@dataclass(frozen=True)
class ExportSettings:
    """The facts about their job that exports need."""

    job: str
    store: Path
    folder: Path
    """Folder of the job file: relative destinations start there."""
    timeline: str
    fingerprint: Mapping[str, str]
    """Versions of libraries and hardware."""
    timed: bool
    """Whether events have times."""
    streams: Mapping[str, ExportSection]
    schema: Schema
    tables: Callable[[], Mapping[str, TableSection]]
    """The sections in force."""
    forks: Callable[[], int]
    """How many passes gave another result when they were trained again, so far."""
    stage: Callable[[ExportRequest, Path], None]
    """Writes what only rank 0 knows of the closed version into an empty folder, as far as it can."""
    exclusive: Callable[[], AbstractContextManager[None]] = nullcontext
    """Locks the store against another rank 0. Raises Superseded where that one has replaced us."""
    trouble: Callable[[], str] = lambda: ""
    """Why no export may begin now; empty where one may."""
    clicks_unmatched: Callable[[], float | None] = lambda: None
    """The share of a join's recent clicks without an impression; None where there are few."""
    held: Callable[[], Sequence[str]] = lambda: ()
    """The slots because of which no export is promoted now, in words."""
    other_slots: bool = False
    """Whether the restored commit was made with other slots."""
    catalogue: tuple[str, ...] = ()
    """Files of the catalogue of items to retrieve, or globs."""

    def __post_init__(self) -> None:
        """Raises SpecError."""
        for stream, section in self.streams.items():
            if section.clock == "event" and not self.timed:
                raise SpecError('is "event", but the source has no event_time', f"exports.{stream}.clock")

    @cached_property
    def arithmetic(self) -> str:
        """A short hash of libraries and hardware."""
        return arithmetic_of(self.fingerprint)

    @cached_property
    def slots(self) -> dict[str, dict[int, str]]:
        """By table: name of the first slot of each slot group."""
        found: dict[str, dict[int, str]] = {}
        for slot in self.schema.sparse:
            found.setdefault(slot.sparse.table, {}).setdefault(slot.group, slot.name)
        return found

    def by_event(self, stream: str) -> bool:
        """Whether the stream's clock is event time."""
        return (self.streams[stream].clock or ("event" if self.timed else "wall")) == "event"

    def address(self, stream: str) -> str:
        """Destination of a stream's exports."""
        return address_of(self.streams[stream], stream, self.store, self.folder)

    def shared(self, stream: str) -> ChainSettings:
        """The settings of a chain, as they are now."""
        section = self.streams[stream]
        tables = sorted(section.tables or self.tables())
        return ChainSettings.of(section, address=self.address(stream), tables=tables)

    def is_gone(self, stream: str, path: str) -> bool:
        """Whether a folder of this machine lacks a complete export; False for an object store, which is not asked."""
        address = parse(self.address(stream))
        return address.is_folder and not is_done(Path(address.root) / self.job / path)

    def hindrance(self, request: ExportRequest, *, has_commit: bool) -> str:
        """The reason why an export that was cut before a restart is not made; "" where it is."""
        if not has_commit:
            return "its commit does not exist any more"
        if self.other_slots:
            return "the slots of the job changed before it was made"
        return self.elsewhere(request)

    def elsewhere(self, request: ExportRequest) -> str:
        """The reason why an export is not made: by the log, which a store may have, it goes where the job file does
        not say; "" where it may be made."""
        ours = self.address(request.stream)
        if request.address == ours or _location(request.address) == _location(ours):
            return ""
        return (
            f"it was begun for {request.address!r:.300}, and the job file has {ours}: nothing is written to another "
            "place than that of the job file; the next export is made there"
        )


def export_operation(
    setting: ExportSettings, stream: str, due: DueExport, close: "ClosingPass", time_s: float | None, id_: str | None
) -> ExportOperation:
    """The operation that cuts an export."""
    parent = due.parent
    return ExportOperation(
        id=id_,
        stream=stream,
        type=due.kind,
        name=name_of(close.version, due.kind),
        version=close.version,
        timeline=setting.timeline,
        parent=None
        if parent is None
        else ParentOfExport(name=parent.name, version=parent.version, timeline=parent.timeline),
        all=due.all,
        why=due.why,
        clears=setting.streams[stream].delta_threshold > 0,
        arithmetic=setting.arithmetic,
        at_s=time_s,
        **setting.shared(stream).message(),
    )


def exported_operation(cut: ExportOperation, answer: ExportAnswer, now_s: float) -> ExportedOperation:
    """The operation that ends the export which was logged as `cut`."""
    return ExportedOperation(
        stream=cut.stream,
        name=cut.name,
        version=cut.version,
        type=cut.type,
        timeline=cut.timeline,
        outcome=answer.outcome,
        error=answer.error,
        final=answer.final,
        current=answer.current,
        failed_gates=list(answer.failed_gates),
        command_error=answer.command_error,
        at_s=now_s,
    )


def facts_of(
    setting: ExportSettings,
    cut: ExportOperation,
    stream: RunningStream,
    close: "ClosingPass",
    day: int,
    low_s: float | None,
) -> ExportFacts:
    """Facts that are known only while a version is the present one. `low_s`: lowest event time of all passes."""
    high_s = close.event_time_s
    since_s = low_s if cut.type == "base" else stream.chain.low_s
    sections, rollback = setting.tables(), stream.rollback.active
    manifest = {
        "positions": dict(close.positions),
        "event_time": None if high_s is None else [high_s if since_s is None else since_s, high_s],
        "day": day,
        "metrics": _finite(close.metrics.get("window", {})),
        "fingerprint": dict(setting.fingerprint),
        **({"clicks_unmatched": lost} if (lost := setting.clicks_unmatched()) is not None else {}),
        **({"guards": list(held)} if (held := setting.held()) else {}),
        **({"rollback": rollback} if rollback else {}),
    }
    return ExportFacts(manifest, {name: sections[name].model_dump(mode="json") for name in cut.tables})


def request_of(setting: ExportSettings, chain: ExportStreamState) -> ExportRequest:
    """The request for the export in flight, by the logged operation, not by the present spec. It has no commit yet."""
    cut, facts = chain.operation, chain.facts
    assert facts is not None, "in flight"
    tables = {name: TableSection.model_validate(section) for name, section in facts.tables.items()}
    shared = ChainSettings.of(cut, tables=tuple(cut.tables)).message()
    del shared["address"]
    parent = cut.parent
    return ExportRequest(
        job=setting.job,
        stream=cut.stream,
        section=setting.streams[cut.stream].model_copy(update=shared),
        kind=cut.type,
        timeline=cut.timeline,
        version=cut.version,
        parent=None if parent is None else ParentExport.model_validate(parent, from_attributes=True),
        all=cut.all,
        why=cut.why,
        commit=Path(),
        address=cut.address,
        stage=setting.store / STAGES / f"{cut.stream}-{cut.version:010d}",
        tables=tables,
        slots={name: setting.slots.get(name, {}) for name in cut.tables},
        groups={slot.name: slot.group for slot in setting.schema.sparse},
        slot_files=slot_files_of(setting.schema),
        slot_tables=history_tables(setting.schema),
        whole=set(cut.tables) == set(setting.tables()),
        folder=setting.folder,
        catalogue=setting.catalogue,
        facts=dict(facts.manifest),
    )


def _location(address: str) -> ExportLocation | None:
    """None for text that is no address."""
    try:
        return destination_of(address)
    except (ValueError, SpecError):
        return None


def due_export(
    setting: ExportSettings,
    name: str,
    stream: RunningStream,
    *,
    time_s: float | None,
    ended: bool,
    sweeping: Collection[str],
    idle: bool = False,
) -> DueExport | None:
    """The export of a stream that is due at `time_s`; with `idle`, the one that would be if none were in progress."""
    view = stream.view()
    if idle:
        view.drop()
    now = ScheduleInput(
        time_s=time_s,
        timeline=setting.timeline,
        arithmetic=setting.arithmetic,
        shared=setting.shared(name),
        ended=ended,
        requested=None if stream.requested is None else stream.requested[0],
        sweeping=sweeping,
    )
    due = decide(stream.section, view, now)
    if due is not None and due.parent is not None and setting.is_gone(name, due.parent.path):
        return decide(stream.section, view, replace(now, parent_gone=True))
    return due


def rollback_operation(
    setting: ExportSettings, stream: str, version: int, decision: RollbackDecision
) -> RollbackOperation:
    """The operation for a decision at the close of `version`."""
    return RollbackOperation(
        stream=stream,
        version=version,
        timeline=setting.timeline,
        paths=list(decision.paths),
        level=decision.level,
        value=decision.value,
        why=decision.why,
    )


def rollback_request(setting: ExportSettings, stream: str, state: RollbackState) -> ExportRequest:
    """The request to have current.json name an older export."""
    return ExportRequest(
        job=setting.job,
        stream=stream,
        section=setting.streams[stream],
        kind="base",
        timeline=setting.timeline,
        version=state.since,
        parent=None,
        why=state.active,
        commit=Path(),
        address=setting.address(stream),
        stage=Path(),
        tables={},
        slots={},
        point=state.to_point,
    )


def name_of(version: int, kind: Kind) -> str:
    """Name of an export's folder."""
    return f"{version:010d}-{kind}"


def _finite(value: Any) -> Any:
    """For JSON: NaN and infinite numbers become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
