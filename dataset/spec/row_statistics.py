"""The key `statistics` of a dense slot: what rows of embedding tables know about the ids of a sample. Pure."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from headrace.config import Section
from headrace.text_kinds import TextKind

MAX_OF = 256
"""Most sparse slots whose rows one dense slot tells of."""
NUM_VALUES = 2
"""Floats of the dense slot for each of them."""


class StatisticsSection(Section):
    """A dense slot that the job fills itself: shows and clicks of the rows of a sample's ids, decayed by ageing, as
    they were before the sample (Paddle's CVM).

    The pipe does not emit such a slot. It has two floats for each slot in `of`: log(1 + shows), and
    log(1 + clicks) - log(1 + shows), of the sums over the ids of the slot. The columns that count as shows and clicks
    are those of the table: `tables.<t>.show` and `click`."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "of": TextKind.NAME,
    }

    of: str | Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_OF)]
    """Sparse slot whose rows are asked, for example "article"; or several."""

    @field_validator("of")
    @classmethod
    def _different(cls, of: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(of, str) and len(set(of)) < len(of):
            raise ValueError("a slot is there twice")
        return of

    @property
    def slots(self) -> tuple[str, ...]:
        """The sparse slots, in the order of the floats."""
        return (self.of,) if isinstance(self.of, str) else self.of

    @property
    def size(self) -> int:
        """Number of floats of the slot."""
        return NUM_VALUES * len(self.slots)
