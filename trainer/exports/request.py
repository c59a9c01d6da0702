"""What the chief asks its exporter process for, and what that answers: one JSON object a line each way."""

from pathlib import Path
from typing import Any, Literal

from millrace.config import Count, Section, SlotGroup
from millrace.points import Fault
from pserver.config import NotNegative, TableSection
from trainer.exports.config import ExportSection


class Parent(Section):
    """The export before, on which a delta builds."""

    name: str
    """"0000000012-base"."""
    version: Count
    """Rows changed after it are in the delta."""
    timeline: str
    """Where it lies."""


class ExportRequest(Section):
    """One export of one commit; may be asked for again after it failed or was cut off."""

    job: str
    """Name of the job."""
    stream: str
    """Name of the stream."""
    section: ExportSection
    """Its settings."""
    kind: Literal["base", "delta"]
    """What."""
    timeline: str
    """Of the version."""
    version: Count
    """The state exported."""
    parent: Parent | None
    """Of a delta."""
    all: bool = False
    """Whether delta_threshold is passed over, after an export that failed."""
    why: str = ""
    """For the manifest: why it is of this kind."""
    commit: Path
    """Folder of the commit of this version, leased."""
    address: str
    """Destination of the stream, as trainer.mirror.address gives it: exports lie in <address>/<job>/<timeline>/."""
    stage: Path
    """Folder with what the chief prepared: model.json, golden.parquet and onnx-template.onnx, each if it could."""
    tables: dict[str, TableSection]
    """Sections in force at this version, of the tables to export."""
    slots: dict[str, dict[SlotGroup, str]]
    """By table: slot group to the name of its slot."""
    groups: dict[str, SlotGroup] = {}
    """Slot group of every sparse slot by name; as `slots` has it unless given."""
    folder: Path = Path()
    """The spec's: where the command after an export runs."""
    facts: dict[str, Any] = {}
    """Straight into the manifest: positions, event_time, day, metrics, fingerprint."""

    @property
    def name(self) -> str:
        """Name of the export's folder."""
        return f"{self.version:010d}-{self.kind}"


class ExportAnswer(Section):
    """How it ended."""

    name: str
    """Of the export."""
    outcome: Literal["complete", "failed"]
    """"complete": _DONE is there."""
    error: str | None = None
    """What failed, where, what to do."""
    final: bool = False
    """Of a failure: whether trying again cannot help."""
    path: str = ""
    """Address of the export's folder."""
    current: bool = False
    """Whether it passed its gates and is pointed to."""
    failed_gates: tuple[str, ...] = ()
    """In words."""
    command_error: str | None = None
    """How the command after it failed, if it did."""
    rows: Count = 0
    """Exported, of all tables."""
    tombstones: Count = 0
    """Of all tables."""
    pending: Count = 0
    """Changed rows that the thresholds kept back."""
    num_bytes: Count = 0
    """Of all files."""
    seconds: NotNegative = 0.0
    """From request to _DONE."""
    removed: tuple[str, ...] = ()
    """Exports that are not kept any more and were removed: "t1/0000000012-base"."""


class ExporterConfig(Section):
    """The first line of the exporter process's input."""

    store: Path
    """The job's store: what is open while an export is made lies in its folder `live`."""
    generation: Count | None = None
    """The chief's: once a newer one has claimed the job, nothing is made for it any more. None: not looked at."""
    faults: tuple[Fault, ...] = ()
    """Where the process is to die, in runs that show what that costs."""
