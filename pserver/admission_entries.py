"""Admission entries: sections of the job spec, each with how it decides which keys may have a row.

An entry counts records, or it admits by a draw of the key. A record counts its shows, or its score, as a whole number
of units, so sums do not depend on their order. A score is rounded up to units: records that reach a threshold by their
true scores reach it in units, too. A score of 0 or less counts nothing.

pserver.admission has the counters and the draws, and decides by a list of entries.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from typing_extensions import override

from headrace.config import Positive, Rate, Section, Size
from headrace.registry import Registry

SCORE_BITS = 15
"""A score's threshold is between 2**14 and 2**15 units."""
LEAST_EXPONENT = -1000
"""With smaller units, scores in units would be infinite."""
MIN_COUNTS_BYTES = 1 << 20
"""Smallest `memory` of an admission entry: 256 bytes for each virtual bucket."""
Rates = tuple[float, float, int, int]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def _holds_some_counts(memory: int) -> int:
    if memory < MIN_COUNTS_BYTES:
        raise ValueError(
            f"is less than {MIN_COUNTS_BYTES >> 20}MiB, which would leave too few counts to a virtual bucket"
        )
    return memory


CountsSize = Annotated[Size, AfterValidator(_holds_some_counts)]


@dataclass(frozen=True, slots=True)
class CountingRule:
    """How an entry counts: its counters, their unit, and the threshold."""

    exact: bool
    """Whether each key has its own count; otherwise a sketch counts."""
    memory: int
    """Bytes of the counts over all shards."""
    exponent: int
    """A unit is 2**exponent shows, or of score: a power of two, so that dividing by it is exact."""
    per_nonclick: float
    """Units of a show without a click."""
    per_click: float
    """Units of a click."""
    threshold: int
    """Units at which a key is admitted."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type of counter that holds the threshold; counters saturate at its maximum."""
        return next(np.dtype(f"u{size}") for size in (1, 2, 4) if self.threshold < 1 << 8 * size)

    @property
    def most(self) -> int:
        """The value of a full counter: this count, or more."""
        return (1 << 8 * self.dtype.itemsize) - 1

    @property
    def rates(self) -> Rates:
        """For kernels: units of a show without click, of a click, most, threshold."""
        return self.per_nonclick, self.per_click, self.most, self.threshold

    def value_of(self, units: int) -> float:
        """Units as shows or as a score."""
        return math.ldexp(float(units), self.exponent)


class AdmissionEntry(Section):
    """An entry: it counts, or it admits by a key's draw."""

    needs_clicks: ClassVar[bool] = False
    """Whether clicks decide: `expected` then admits more than the entry does."""
    kind: str
    """Its name."""

    def counting(self, nonclk_coeff: float, click_coeff: float) -> CountingRule | None:
        """How it counts, with the table's weights of shows and clicks in a score; None: it does not count."""
        return None

    @property
    def admits_below(self) -> float:
        """It refuses a key for good whose draw, in [0, 1), is not below."""
        return 1.0

    def expected(self, count_U: I64) -> F64:
        """(U,) the chance that keys that were seen so often have a row, without regard to clicks; for sizes of jobs. A
        draw counts apart: all entries use the same one of a key."""
        return np.ones(len(count_U))

    def said(self, value: float, about: str) -> str:
        """The count of a key in words for people; `about`: "about ", or "" for an exact count."""
        return f"{self.kind}: it has counted {about}{value:.6g}"


class CountEntry(AdmissionEntry):
    """Admit a key that was seen often enough."""

    kind: Literal["count"]
    """By count."""
    n: int = Field(ge=1, le=1_000_000)
    """A key is admitted at its n-th show."""
    exact: bool = False
    """Whether each key has its own count; otherwise a sketch counts, which may count too many, never too few."""
    memory: CountsSize = 16 << 20
    """Memory of the counts over all shards, divided equally among 4,096 virtual buckets."""

    @override
    def counting(self, nonclk_coeff: float, click_coeff: float) -> CountingRule:
        return CountingRule(self.exact, self.memory, 0, 1.0, 1.0, self.n)

    @override
    def expected(self, count_U: I64) -> F64:
        return (count_U >= self.n).astype(np.float64)

    @override
    def said(self, value: float, about: str) -> str:
        seen = f"{value:.6g}"
        return f"{self.kind} {self.n:g}: seen {about}{seen} {'time' if seen == '1' else 'times'}"


class ProbabilityEntry(AdmissionEntry):
    """Admit a fixed random share of the keys, by their hashes."""

    kind: Literal["probability"]
    """By random draw."""
    p: Rate
    """Share of the keys that is admitted."""

    @property
    @override
    def admits_below(self) -> float:
        return self.p


class ShowClickEntry(AdmissionEntry):
    """Admit a key when the score of its shows and clicks is high enough."""

    needs_clicks: ClassVar[bool] = True
    kind: Literal["show_click"]
    """By score."""
    score: Positive
    """A key is admitted when the sum of its records' scores reaches this."""
    exact: bool = False
    """As in "count"."""
    memory: CountsSize = 16 << 20
    """As in "count"."""

    @override
    def counting(self, nonclk_coeff: float, click_coeff: float) -> CountingRule:
        """In units of a power of two in which the threshold has SCORE_BITS bits."""
        exponent = max(math.frexp(self.score)[1] - SCORE_BITS, LEAST_EXPONENT)
        unit = math.ldexp(1.0, exponent)
        threshold = math.ceil(self.score / unit)
        return CountingRule(self.exact, self.memory, exponent, nonclk_coeff / unit, click_coeff / unit, threshold)

    @override
    def said(self, value: float, about: str) -> str:
        return f"{self.kind} {self.score:g}: its score is {about}{value:.6g}"


ADMISSION_ENTRIES = Registry(
    kind="admission entry",
    group="headrace.admission_entries",
    base=AdmissionEntry,
    own={
        "count": "pserver.admission_entries:CountEntry",
        "probability": "pserver.admission_entries:ProbabilityEntry",
        "show_click": "pserver.admission_entries:ShowClickEntry",
    },
)

if TYPE_CHECKING:
    AnyAdmissionEntry = AdmissionEntry
else:
    AnyAdmissionEntry = ADMISSION_ENTRIES.union()
