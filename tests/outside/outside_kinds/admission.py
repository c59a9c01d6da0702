"""An admission entry that counts clicks alone."""

from typing import ClassVar, Literal

from headrace.config import PositiveCount
from headrace.pserver.admission_entries import MIN_COUNTS_BYTES, AdmissionEntry, CountingRule


class Clicked(AdmissionEntry):
    """Admit a key that was clicked often enough."""

    needs_clicks: ClassVar[bool] = True
    kind: Literal["clicked"]
    """By clicks."""
    clicks: PositiveCount
    """A key is admitted at this click."""

    def counting(self, nonclk_coeff: float, click_coeff: float) -> CountingRule:
        return CountingRule(True, MIN_COUNTS_BYTES, 0, 0.0, 1.0, self.clicks)

    def said(self, value: float, about: str) -> str:
        return f"clicked {self.clicks}: it was clicked {about}{value:g} times"
