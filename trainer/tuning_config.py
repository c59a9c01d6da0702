"""The section `tuning` of a job spec: how a new job tries settings, and what it has chosen.

service.cluster.tuning tries them; service.spec.tuned_settings names them, and puts the chosen ones into the spec.
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from headrace.config import Count, NotNegative, Positive, Section
from headrace.text_kinds import TextKind

TUNABLE = re.compile(
    r"train\.batch_size|dense\.optimizer\.(kind|lr)"
    r"|tables\.[A-Za-z0-9_-]{1,64}\.(dim|init_range|grad_scale|in_batch|(first_order_)?optimizer\.(kind|lr|initial))"
)
"""Keys that tuning may set."""
MAX_TRIED = 65
"""Most settings of one tuning."""
KIND = re.compile(r"[a-z][a-z0-9_.:]{0,63}", re.IGNORECASE)
"""The texts among their values: the kind of an optimizer, and `grad_scale`."""


Share = Annotated[float, Field(ge=0, le=1)]


class TriedSetting(Section):
    """One setting and how it fared."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "name": TextKind.NAME,
        "keys": TextKind.VALUE,
    }

    name: str
    """For people."""
    keys: Annotated[dict[str, bool | Count | Positive | str], Field(max_length=1 << 14)] = {}
    """Values that differ from the job file, by the path of their key."""
    events: Count = 0
    """Number of events that it has learnt."""
    logloss: NotNegative | None = None
    """Mean loss of the last half of those, each sample predicted before it was learnt: log loss, or squared error.
    None: it failed, as where a weight is no longer finite."""
    auc: Share | None = None
    """AUC of the same samples, of the first task that has one."""

    @field_validator("keys")
    @classmethod
    def _tunable(cls, keys: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
        for key, value in keys.items():
            if TUNABLE.fullmatch(key) is None:
                raise ValueError(f"holds {key!r}, which tuning does not choose")
            if isinstance(value, str) and KIND.fullmatch(value) is None:
                raise ValueError(f"holds {value!r} for {key}, which is no name")
        return keys


class TuningChoice(Section):
    """A fact of a job: the settings that it tried before its first pass, and the best of them."""

    tried: Annotated[tuple[TriedSetting, ...], Field(min_length=1, max_length=MAX_TRIED)]
    """All settings, the chosen one first."""

    @property
    def keys(self) -> Mapping[str, bool | int | float | str]:
        """The chosen values, by the path of their key."""
        return self.tried[0].keys


class TuningSection(Section):
    """How a new job tries settings before its first pass."""

    events: int = Field(default=10_000, ge=64, le=10_000_000)
    """Number of events at the beginning of the stream on which settings are tried. A stream with fewer is not tuned."""
    settings: int = Field(default=8, ge=2, le=MAX_TRIED - 1)
    """Most settings that are tried: all learn the first quarter of the events, the better half of them the second one,
    and two all events, as far as they are ahead of the job as it is; a combination of the best ones is tried last."""
    chosen: TuningChoice | None = None
    """The result, which the job writes into its log. The chosen values are defaults of this job: a key that the file
    sets has the file's value."""
