"""The section `guards` of a job spec, the rollback of a stream of exports, and its gates: when a job holds back what it
learnt.

trainer.rank0.slot_guards, trainer.exports.rollback and trainer.exports.gates decide by them.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config import Count, NotNegative, Positive, PositiveCount, PositiveDuration, Section
from headrace.text_kinds import TextKind

Share = Annotated[float, Field(ge=0, le=1)]


class GuardAction(StrEnum):
    """Reaction to a slot outside its bounds."""

    ALARM = "alarm"
    HOLD = "hold"
    STOP = "stop"


class GuardBounds(Section):
    """Bounds of a sparse slot. Each is judged at the close of every pass that has samples."""

    min_coverage: Share | None = None
    """Lowest share of samples that have a value."""
    max_null: Share | None = None
    """Highest share of values that are dropped, since they are the slot's `padding`."""
    min_count: NotNegative | None = None
    """Lowest mean number of values in a sample."""
    max_count: NotNegative | None = None
    """Highest mean number of values in a sample."""
    min_distinct: Count | None = None
    """Fewest distinct values in a pass, with an error of about 2 %."""
    max_new_rows: Share | None = None
    """Highest number of rows made in a pass, as a share of the slot's values in it."""
    max_drift: Positive | None = None
    """Highest population stability index of the pass against the reference: 0.1 is little, 0.25 is much."""
    action: GuardAction | None = None
    """"alarm" (default): an alarm. "hold": also, no export is promoted meanwhile. "stop": the job ends before the pass
    is logged."""

    @model_validator(mode="after")
    def _in_order(self) -> "GuardBounds":
        if self.min_count is not None and self.max_count is not None and self.min_count > self.max_count:
            raise ValueError(f"min_count = {self.min_count:g} is above max_count = {self.max_count:g}")
        return self


class GuardsSection(Section):
    """Guards of the slots: counts of each pass, compared with bounds and with the passes before."""

    window: int = Field(default=24, ge=2, le=256)
    """Number of passes before the present one that are its reference. A lasting change is the reference after as many
    passes; drift is then small again."""
    min_samples: PositiveCount = 1000
    """A pass with fewer samples is not judged, and is not part of the reference."""
    all: GuardBounds = GuardBounds()
    """Bounds of all sparse slots."""
    slots: dict[str, GuardBounds] = {}
    """Bounds of single slots, by name. A key that is set here replaces the one in `all`."""

    def bounds_of(self, slot: str) -> GuardBounds:
        """The bounds in force for a slot."""
        own = self.slots.get(slot)
        return self.all if own is None else self.all.model_copy(update=own.model_dump(exclude_none=True))


class RollbackSection(Section):
    """When `current.json` goes back to an older export: once a metric has fallen for some closes."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "task": TextKind.NAME,
    }

    metric: Literal["auc", "gauc", "logloss"] = "auc"
    """The watched metric. "logloss" falls when it rises."""
    task: str | None = None
    """Its task. Default: the first one."""
    span: Literal["window", "pass"] = "window"
    """Whether the metric is that of the sliding window or that of each pass alone, which is quicker and has more
    noise."""
    falls: Positive
    """How far the metric is below the median of the closes before; equal does not count."""
    closes: int = Field(default=3, ge=1, le=100)
    """For how many closes in a row it is so before the rollback, and for how many it is not so before its end."""
    reference: int = Field(default=24, ge=3, le=1000)
    """Number of closes for the median; closes at which the metric had fallen are left out."""


class EvaluatorGate(Section):
    """Limits of what the evaluator measured of an exported version, for every task that has the measure."""

    auc_min: Share | None = None
    """Lowest AUC."""
    gauc_min: Share | None = None
    """Lowest mean AUC of groups."""
    logloss_max: Positive | None = None
    """Highest log loss."""
    calibration: tuple[NotNegative, NotNegative] | None = None
    """Lowest and highest mean prediction / mean label."""
    wait: PositiveDuration = 600.0
    """How long an export waits for the score of its version, beside its `deadline`. Without one it fails the gate."""

    @model_validator(mode="after")
    def _compares(self) -> "EvaluatorGate":
        if not self.limits():
            raise ValueError("compares nothing; set one of auc_min, gauc_min, logloss_max, calibration")
        if self.calibration is not None and self.calibration[0] > self.calibration[1]:
            least, greatest = self.calibration
            raise ValueError(f"calibration: {least:g} is above {greatest:g}, so no export would pass")
        return self

    def limits(self) -> dict[str, tuple[float, float]]:
        """By measure: the lowest and the highest value that pass."""
        low, high = self.calibration or (0.0, math.inf)
        all_ = {
            "auc": (self.auc_min, math.inf),
            "gauc": (self.gauc_min, math.inf),
            "logloss": (None if self.logloss_max is None else -math.inf, self.logloss_max or math.inf),
            "calibration": (None if self.calibration is None else low, high),
        }
        return {measure: (least, most) for measure, (least, most) in all_.items() if least is not None}


class GatesSection(Section):
    """Checks before `current.json` points to an export. One that fails stays on disk and raises an alarm."""

    min_recall: Share | None = None
    """Lowest recall of the index of items over the window, at the first k of `retrieval.at`."""
    beats_popular: bool = False
    """Whether that recall must be at least that of the most clicked items."""
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
    max_clicks_unmatched: Positive | None = None
    """Largest share of recent clicks that find no impression (`[join]`)."""
    golden: bool = True
    """Whether the exported model must reproduce the golden predictions: within 1e-5 in float32."""
    guards: bool = True
    """Whether an export fails while a slot is outside bounds of `guards` whose action is "hold"."""
    evaluator: EvaluatorGate | None = None
    """Limits of what the evaluator (section `evaluator`) measured of this version; the export waits for its score."""

    @field_validator("calibration")
    @classmethod
    def _in_order(cls, calibration: tuple[float, float] | None) -> tuple[float, float] | None:
        if calibration is not None and calibration[0] > calibration[1]:
            least, greatest = calibration
            raise ValueError(f"the lowest, {least:g}, is above the highest, {greatest:g}: no export would pass")
        return calibration
