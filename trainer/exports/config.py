"""What a user writes about exports."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from millrace.config import Count, PositiveDuration, Section
from pserver.config import Days, NotNegative, Positive


class GatesSection(Section):
    """What an export must pass before `current.json` points to it; one that fails stays on disk, and alarms."""

    min_auc: float | None = Field(default=None, ge=0, le=1)
    """Least AUC of the window, of every task with one."""
    calibration: tuple[NotNegative, NotNegative] | None = None
    """Least and greatest mean prediction / mean label of the window, of every task with one."""
    min_rows: Count | None = None
    """Least rows of the model at this version."""
    max_row_change: Positive | None = None
    """Greatest change of the number of rows against the export that is current, as a share of it."""
    max_norm: Positive | None = None
    """Greatest root mean square of the exported weights, by table."""
    golden: bool = True
    """Whether the exported model must give the golden predictions: within 1e-5 in float32."""

    @field_validator("calibration")
    @classmethod
    def _in_order(cls, calibration: tuple[float, float] | None) -> tuple[float, float] | None:
        if calibration is not None and calibration[0] > calibration[1]:
            least, greatest = calibration
            raise ValueError(f"the least, {least:g}, is above the greatest, {greatest:g}: none would pass")
        return calibration


class ExportSection(Section):
    """One stream of exports: bases, and deltas between them."""

    path: str | None = None
    """Where: a folder, relative to the spec's, "file:///folder" or "s3://bucket/prefix" as in store.mirror; unless set,
    exports/<stream> in the store."""
    base: PositiveDuration | None = None
    """A whole model each so often; unless set, only the first export is one, and those that must be."""
    delta: PositiveDuration | None = None
    """What changed, each so often; unless set, there are only bases."""
    clock: Literal["event", "wall"] | None = None
    """Whose time: of the events (default where they have one), or the wall's."""
    at_end: bool = True
    """Whether there is one more at the end of a bounded stream."""
    on_late: Literal["later", "wait"] = "later"
    """What becomes of one that falls due while the one before it is made: it is cut "later", at a close after that; or
    training must "wait", so that the versions exported follow from the events alone."""
    tables: tuple[str, ...] = ()
    """Tables exported; all unless set."""
    dtype: Literal["float32", "float16", "int8"] = "float32"
    """Type of weights and vectors; "int8": each row with its own scale."""
    base_threshold: NotNegative = 0.0
    """Rows with a lower score are not exported."""
    delta_threshold: NotNegative = 0.0
    """Rows whose score since they were exported last is lower are not in a delta; in one stream only above 0."""
    delta_keep_days: Days | None = None
    """Rows unseen for more days are not in a delta."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Newest bases kept, with the deltas that follow them."""
    tries: int = Field(default=3, ge=1, le=100)
    """How often one is tried before it is given up; the next one then takes what it lacks."""
    deadline: PositiveDuration = 600.0
    """How long one may take, each time."""
    golden: int = Field(default=32, ge=0, le=4096)
    """Samples of the golden predictions."""
    gates: GatesSection = GatesSection()
    """What must hold before it is pointed to."""
    command: tuple[str, ...] = ()
    """Program run after each complete export, with the export's address as its last argument; never through a shell."""
    command_deadline: PositiveDuration = 60.0
    """How long it may take."""

    @model_validator(mode="after")
    def _has_a_schedule(self) -> "ExportSection":
        if self.base is not None and self.delta is not None and self.delta > self.base:
            raise ValueError("delta is longer than base: there would be no delta")
        return self
