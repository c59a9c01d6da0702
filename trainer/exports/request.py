"""The messages between rank 0 and its exporter process: one JSON object per line in each direction."""

from pathlib import Path
from typing import Any, Literal

from headrace.config import Count, Section, SlotGroup
from headrace.failpoints import ArmedFailpoint
from headrace.pserver.config import NotNegative, TableSection
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.slot_files import AnySlotFiles


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


class ExporterConfig(Section):
    """The first line of the exporter process's input."""

    store: Path
    """The job's store; its folder `live` takes the row stores that are open during an export."""
    generation: Count | None = None
    """Generation of rank 0: once a newer one has claimed the job, requests are refused. None: not checked."""
    faults: tuple[ArmedFailpoint, ...] = ()
    """Failpoints where the process dies, for fault tests."""
