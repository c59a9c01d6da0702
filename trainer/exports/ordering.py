"""An export in the making, in words: the operation that the log has of it, and what the exporter is asked for.

Pure but for what `Setting` is given. When one is due is trainer.exports.schedule's decision.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dataset.schema import Schema
from millrace.errors import SpecError
from pserver.config import TableSection
from trainer.exports.chain import SHARED, Body, Chain, Kind, arithmetic_of
from trainer.exports.config import ExportSection
from trainer.exports.request import ExportAnswer, ExportRequest, Parent
from trainer.exports.schedule import Due
from trainer.markers import is_done
from trainer.mirror.address import Kind as AddressKind
from trainer.mirror.address import parse
from trainer.operations import Closing
from trainer.records import ExportedOperation, ExportOperation

EXPORTS = "exports"
"""Folder in the store for the exports of streams without a path."""
STAGES = "exports-stage"
"""Folder in the store for what the chief prepares of an export."""


@dataclass(frozen=True)
class Setting:
    """What exports of a job need to know of it."""

    job: str
    store: Path
    folder: Path
    """The spec's: relative destinations start there."""
    timeline: str
    fingerprint: Mapping[str, str]
    """Libraries and hardware."""
    timed: bool
    """Whether events have times."""
    streams: Mapping[str, ExportSection]
    schema: Schema
    tables: Callable[[], Mapping[str, TableSection]]
    """Sections in force."""
    forks: Callable[[], int]
    """How many passes that were trained again came out otherwise, so far."""
    stage: Callable[[ExportRequest, Path], None]
    """Writes what only the chief knows of the version that is closed into an empty folder, as far as it can."""
    exclusive: Callable[[], AbstractContextManager[None]] = nullcontext
    """Holds the store against other chiefs. Raises Superseded where this one was replaced: nothing is its own then."""

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
        """By table: slot group to the name of its first slot."""
        found: dict[str, dict[int, str]] = {}
        for slot in self.schema.sparse:
            found.setdefault(slot.sparse.table, {}).setdefault(slot.group, slot.name)
        return found

    def by_event(self, stream: str) -> bool:
        """Whether the stream's clock is that of events."""
        return (self.streams[stream].clock or ("event" if self.timed else "wall")) == "event"

    def address(self, stream: str) -> str:
        """Where its exports go."""
        return address_of(self.streams[stream], stream, self.store, self.folder)

    def shared(self, stream: str) -> dict[str, Any]:
        """What a delta has in common with its parent, under the present settings: see SHARED."""
        section = self.streams[stream]
        tables = section.tables or tuple(self.tables())
        plain = {name: getattr(section, name) for name in SHARED if name not in ("address", "tables")}
        return {"address": self.address(stream), "tables": sorted(tables), **plain}

    def is_gone(self, stream: str, path: str) -> bool:
        """Whether a folder on this machine has no such complete export; other places are not looked into."""
        address = parse(self.address(stream))
        return address.kind is AddressKind.FOLDER and not is_done(Path(address.root) / self.job / path)


def address_of(section: ExportSection, stream: str, store: Path, folder: Path) -> str:
    """Where a stream's exports go; a relative place is taken from the spec's `folder`."""
    return str(store / EXPORTS / stream) if section.path is None else parse(section.path, folder).text


class Destination(NamedTuple):
    """What an address leads to, however it is spelled."""

    root: str
    """"s3://bucket/prefix", or a folder without links in its path."""
    endpoint: str | None = None
    """Of an object store that is not Amazon's."""

    def __str__(self) -> str:
        return self.root


def destination_of(text: str) -> Destination:
    """The place of an address as `address_of` gives it."""
    address = parse(text)
    match address.kind:
        case AddressKind.FOLDER:
            return Destination(str(Path(address.root).resolve()))
        case AddressKind.S3:
            return Destination(f"s3://{address.root}", address.options.get("endpoint_override"))


def export_operation(
    setting: Setting, stream: str, due: Due, close: Closing, time_s: float | None, id_: str | None
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
        else {"name": parent.name, "version": parent.version, "timeline": parent.timeline},
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
    setting: Setting, body: Body, chain: Chain, close: Closing, day: int, low_s: float | None
) -> dict[str, Any]:
    """What is known of the version only while it is the present one. `low_s`: lowest event time of all passes."""
    high_s = close.event_time_s
    since_s = low_s if body["type"] == "base" else chain.low_s
    sections = setting.tables()
    manifest = {
        "positions": dict(close.positions),
        "event_time": None if high_s is None else [high_s if since_s is None else since_s, high_s],
        "day": day,
        "metrics": _finite(close.metrics.get("window", {})),
        "fingerprint": dict(setting.fingerprint),
    }
    return {"manifest": manifest, "tables": {name: sections[name].model_dump(mode="json") for name in body["tables"]}}


def request_of(setting: Setting, body: Body, facts: Mapping[str, Any]) -> ExportRequest:
    """What the exporter is asked for, but for the commit, which is none yet: as it was logged, whatever the spec is."""
    stream = body["stream"]
    shared = {name: body[name] for name in SHARED if name != "address"} | {"tables": tuple(body["tables"])}
    return ExportRequest(
        job=setting.job,
        stream=stream,
        section=setting.streams[stream].model_copy(update=shared),
        kind=body["type"],
        timeline=body["timeline"],
        version=body["version"],
        parent=None if body["parent"] is None else Parent(**body["parent"]),
        all=body["all"],
        why=body["why"],
        commit=Path(),
        address=body["address"],
        stage=setting.store / STAGES / f"{stream}-{body['version']:010d}",
        tables={name: TableSection.model_validate(section) for name, section in facts["tables"].items()},
        slots={name: setting.slots.get(name, {}) for name in body["tables"]},
        groups={slot.name: slot.group for slot in setting.schema.sparse},
        folder=setting.folder,
        facts=dict(facts["manifest"]),
    )


def name_of(version: int, kind: Kind) -> str:
    """Of an export's folder."""
    return f"{version:010d}-{kind}"


def _finite(value: Any) -> Any:
    """For JSON: numbers that are none become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
