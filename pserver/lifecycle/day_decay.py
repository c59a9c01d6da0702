"""Shows and clicks of rows as of a day of their own, brought to the day of a version, where there is no table.

Exports and the live feed carry a row's show and click as of some day, and with each version the rates of all days up to
its own. So a row that nothing touched need not be sent again when a day ends. pserver.lifecycle.aging multiplies, as it
does for the rows of a table: the bits are the same.

Shapes: U rows, T ticks; 3: show, click, day; 2: show, click.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from headrace.config import Section
from headrace.pserver.lifecycle.aging import F32, DayRates, RowStatistics, TableAging, present

MAX_DAY = (1 << 15) - 1
"""Days of rows have 16 bits."""
Day = Annotated[int, Field(ge=0, le=MAX_DAY)]


class DayDecay(Section):
    """The day of a version, and the rates that led to it, of one slot group."""

    day: Day = 0
    decay: tuple[tuple[Day, float], ...] = ()
    """Runs of days with one rate, from day 0 on: their number, and the rate of each."""

    @model_validator(mode="after")
    def _has_every_day(self) -> Self:
        if sum(count for count, _ in self.decay) != self.day:
            raise ValueError(f"has not one rate for each of its {self.day} days")
        return self

    @classmethod
    def of(cls, life: TableAging, group: int) -> "DayDecay":
        """That of a slot group of a table, now."""
        rates = life.rates_of(group)
        return cls(day=len(rates), decay=tuple((len(list(run)), rate) for rate, run in groupby(rates)))

    def message(self) -> dict[str, Any]:
        """For documents of JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def told(cls, facts: Mapping[str, Any]) -> "DayDecay":
        """The inverse of `message`, from a document with other keys, too. An old one has none. Raises ValueError."""
        return cls.model_validate({name: facts[name] for name in cls.model_fields if name in facts})

    def present(self, row_U3: F32) -> F32:
        """(U, 2) shows and clicks on the day of the version."""
        rates = [rate for count, rate in self.decay for _ in range(count)]
        days = DayRates(np.zeros(1, np.uint16), np.array(rates, np.float32).reshape(-1, 1))
        show_U, click_U, day_U = row_U3.T.copy()
        none_U = np.zeros(len(row_U3), np.float32)
        rows = (show_U, click_U, none_U, day_U.astype(np.int16), none_U.astype(np.uint32), none_U.astype(np.uint16))
        value_U2 = np.empty((len(row_U3), 2), np.float32)
        present(RowStatistics(*rows), self.day, days, value_U2)
        return value_U2


def dated(statistics: RowStatistics) -> F32:
    """(U, 3) show, click and the day of which they are."""
    columns = statistics.show, statistics.click, statistics.last_seen_day.astype(np.float32)
    return np.stack(columns, axis=1)
