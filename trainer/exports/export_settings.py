"""The messages about an export: its operations in the log, and the request to the exporter process.

Pure, except for the functions in `ExportSettings`. trainer.exports.schedule decides what is due.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.blob.store_address import StoreKind as AddressKind
from headrace.blob.store_address import parse
from headrace.dataset.spec.schema import Schema
from headrace.done_markers import is_done
from headrace.errors import SpecError
from headrace.pserver.config import TableSection
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.destination import STAGES, address_of
from headrace.trainer.exports.request import ExportAnswer, ExportRequest, ParentExport
from headrace.trainer.exports.rollback import RollbackDecision, RollbackState
from headrace.trainer.exports.schedule import DueExport
from headrace.trainer.exports.slot_files import slot_files_of
from headrace.trainer.exports.stream_state import SHARED, Body, ExportStreamState, Kind, arithmetic_of
from headrace.trainer.journal.records import ExportedOperation, ExportOperation, ParentOfExport, RollbackOperation
from headrace.trainer.spec.history_tables import history_tables

if TYPE_CHECKING:
    from headrace.trainer.rank0.operations import ClosingPass


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

    def shared(self, stream: str) -> dict[str, Any]:
        """The values of SHARED under the present settings."""
        section = self.streams[stream]
        tables = section.tables or tuple(self.tables())
        plain = {name: getattr(section, name) for name in SHARED if name not in ("address", "tables")}
        return {"address": self.address(stream), "tables": sorted(tables), **plain}

    def is_gone(self, stream: str, path: str) -> bool:
        """Whether a folder of this machine lacks a complete export; False for an object store, which is not asked."""
        address = parse(self.address(stream))
        return address.kind is AddressKind.FOLDER and not is_done(Path(address.root) / self.job / path)


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
        **setting.shared(stream),
    )


def exported_operation(cut: Body, answer: ExportAnswer, now_s: float) -> ExportedOperation:
    """The operation that ends the export which was logged as `cut`."""
    return ExportedOperation(
        **{name: cut[name] for name in ("stream", "name", "version", "type", "timeline")},
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
    body: Body,
    chain: ExportStreamState,
    close: "ClosingPass",
    day: int,
    low_s: float | None,
    rollback: str = "",
) -> dict[str, Any]:
    """Facts that are known only while a version is the present one.

    `low_s`: lowest event time of all passes. `rollback`: why the stream is rolled back; "" where it is not.
    """
    high_s = close.event_time_s
    since_s = low_s if body["type"] == "base" else chain.low_s
    sections = setting.tables()
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
    return {"manifest": manifest, "tables": {name: sections[name].model_dump(mode="json") for name in body["tables"]}}


def request_of(setting: ExportSettings, body: Body, facts: Mapping[str, Any]) -> ExportRequest:
    """The request to the exporter, by the logged operation, not by the present spec. The commit is not set yet."""
    stream = body["stream"]
    shared = {name: body[name] for name in SHARED if name != "address"} | {"tables": tuple(body["tables"])}
    tables = {name: TableSection.model_validate(section) for name, section in facts["tables"].items()}
    return ExportRequest(
        job=setting.job,
        stream=stream,
        section=setting.streams[stream].model_copy(update=shared),
        kind=body["type"],
        timeline=body["timeline"],
        version=body["version"],
        parent=None if body["parent"] is None else ParentExport(**body["parent"]),
        all=body["all"],
        why=body["why"],
        commit=Path(),
        address=body["address"],
        stage=setting.store / STAGES / f"{stream}-{body['version']:010d}",
        tables=tables,
        slots={name: setting.slots.get(name, {}) for name in body["tables"]},
        groups={slot.name: slot.group for slot in setting.schema.sparse},
        slot_files=slot_files_of(setting.schema, tables),
        slot_tables=history_tables(setting.schema),
        whole=set(body["tables"]) == set(setting.tables()),
        folder=setting.folder,
        facts=dict(facts["manifest"]),
    )


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
