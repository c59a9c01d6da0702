"""The export sections of a job file."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from millrace.config import Count, PositiveDuration, Section
from pserver.config import Days, NotNegative, Positive


class GatesSection(Section):
    """Checks before `current.json` points to an export. One that fails stays on disk and raises an alarm."""

    min_auc: float | None = Field(default=None, ge=0, le=1)
    """Lowest AUC of the window, for every task that has one."""
    calibration: tuple[NotNegative, NotNegative] | None = None
    """Lowest and highest mean prediction / mean label of the window, for every task that has one."""
    min_rows: Count | None = None
    """Fewest rows of the model at this version."""
    max_row_change: Positive | None = None
    """Largest change of the number of rows against the current export, as a fraction of its rows."""
    max_norm: Positive | None = None
    """Largest root mean square of the exported weights, per table."""
    golden: bool = True
    """Whether the exported model must reproduce the golden predictions: within 1e-5 in float32."""

    @field_validator("calibration")
    @classmethod
    def _in_order(cls, calibration: tuple[float, float] | None) -> tuple[float, float] | None:
        if calibration is not None and calibration[0] > calibration[1]:
            least, greatest = calibration
            raise ValueError(f"the lowest, {least:g}, is above the highest, {greatest:g}: no export would pass")
        return calibration


class ExportSection(Section):
    """One stream of exports: bases, and deltas between them."""

    path: str | None = None
    """Destination: a folder (relative to the job file's), "file:///folder" or "s3://bucket/prefix" as in store.mirror.
    Default: exports/<stream> in the store."""
    base: PositiveDuration | None = None
    """Interval of whole models. Default: only the first export is whole, and those that have to be."""
    delta: PositiveDuration | None = None
    """Interval of deltas, which hold what changed. Default: there are only bases."""
    clock: Literal["event", "wall"] | None = None
    """Clock of the intervals: event time (default where events have one) or wall time."""
    at_end: bool = True
    """Whether the end of a bounded stream makes one more export."""
    on_late: Literal["later", "wait"] = "later"
    """What happens to an export that is due while the one before is being made. "later": it is cut at a later close.
    "wait": training waits, so that the exported versions depend on the events alone."""
    tables: tuple[str, ...] = ()
    """Tables to export. Default: all."""
    dtype: Literal["float32", "float16", "int8"] = "float32"
    """Type of weights and vectors; "int8" has a scale per row."""
    base_threshold: NotNegative = 0.0
    """Rows with a lower score are not exported."""
    delta_threshold: NotNegative = 0.0
    """Rows whose score since their last export is lower are not in a delta. Only one stream may set it above 0."""
    delta_keep_days: Days | None = None
    """Rows that were not seen for more days are not in a delta."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """How many of the newest bases are kept, with the deltas that follow them."""
    tries: int = Field(default=3, ge=1, le=100)
    """Tries of one export before it is given up. The next one then includes what it lacks."""
    deadline: PositiveDuration = 600.0
    """Longest time of one try."""
    golden: int = Field(default=32, ge=0, le=4096)
    """Number of samples with golden predictions."""
    gates: GatesSection = GatesSection()
    """Checks before `current.json` points to an export."""
    command: tuple[str, ...] = ()
    """Program that runs after each complete export, without a shell; its last argument is the export's address."""
    command_deadline: PositiveDuration = 60.0
    """Longest time of the command."""

    @model_validator(mode="after")
    def _has_a_schedule(self) -> "ExportSection":
        if self.base is not None and self.delta is not None and self.delta > self.base:
            raise ValueError("delta is longer than base, so there would be no delta")
        return self
