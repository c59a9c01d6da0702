"""The section `guards` of a job spec, and the rollback of a stream of exports: when a job holds back what it learnt.

trainer.rank0.slot_guards and trainer.exports.rollback decide by them.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from headrace.config import Count, PositiveCount, Section
from headrace.pserver.config import NotNegative, Positive
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
