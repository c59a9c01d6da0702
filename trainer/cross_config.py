"""The section `crosses` of a job spec: which crosses of its slots a new job chooses, and what it has chosen.

service.planning.cross_choice chooses them; service.spec.chosen_crosses puts their slot and its table into the spec.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace.config import Count, GrownSection, NotNegative, Section
from headrace.dataset.spec.config import MAX_PAIRS
from headrace.text_kinds import TextKind

CROSSES = "crosses"
"""Name of the slot of chosen crosses, and of its table."""
Share = Annotated[float, Field(ge=0, le=1)]


class ChosenPair(Section):
    """A pair of slots that pays."""

    holds: ClassVar[Mapping[str, TextKind]] = {"of": TextKind.NAME}

    of: tuple[str, str]
    """The slots."""
    gain: NotNegative
    """By how much the log loss of a linear model falls with it, beside the slots and the pairs before it."""


class CrossChoice(GrownSection):
    """A fact of a job: the pairs that it chose before its first pass, and how fast its first-order weights learn."""

    later: ClassVar[frozenset[str]] = frozenset({"first_order_rate"})
    pairs: Annotated[tuple[ChosenPair, ...], Field(max_length=MAX_PAIRS)] = ()
    """The best one first."""
    samples: Count = 0
    """Number of samples by which they were chosen."""
    auc: Share | None = None
    """AUC of a linear model of the slots over the second half of the samples, each predicted before it was learnt."""
    auc_with: Share | None = None
    """The same with the pairs."""
    first_order_rate: Annotated[float, Field(gt=0, le=16)] = 1.0
    """Multiplies the rate of first-order weights that follows from the number of slots."""


class CrossesSection(Section):
    """The crosses of slots that a new job chooses before its first pass.

    A linear model learns the first samples of the stream, alone and with each pair of sparse slots; pairs that pay
    are ids of one more slot, "crosses", whose rows are first-order weights alone (docs/features.md)."""

    choose: Literal["auto", "off"] | None = None
    """"auto": a new job chooses crosses, if its stream begins with enough events. "off": it has none. Unset: "auto"
    from set 5 of the defaults on, unless a table says how its rows learn."""
    events: int = Field(default=40_000, ge=1_000, le=1_000_000)
    """Most events, and most samples, by which they are chosen. A stream with less than a quarter of these events and
    less than 5,000 has none."""
    most: int = Field(default=16, ge=1, le=MAX_PAIRS)
    """Most pairs."""
    chosen: CrossChoice | None = None
    """The result, which the job writes into its log."""
