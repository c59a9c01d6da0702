"""Which inputs of rows' statistics came in a pass: values of sparse slots, and shows and clicks of tables.

A row's score and its last day come from them, so trainer.shrink_guard asks whether one of them has stopped.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dataset.batch import Samples
from dataset.schema import Schema
from pserver.config import TableSection
from trainer.embedding import TableSlots, tables_of

SLOT, SHOW, CLICK = "slot", "show", "click"
"""A signal is one of these, a point, and the slot's or the table's name: "slot.user", "click.default"."""


def signal(kind: str, name: str) -> str:
    """The name of a signal."""
    return f"{kind}.{name}"


class SignalsNote:
    """Takes down which signals came, batch after batch."""

    def __init__(self, schema: Schema, tables: Mapping[str, TableSection], click: str | None) -> None:
        """`click` is the label that counts as a click where a table names none."""
        self._tables: Sequence[TableSlots] = tables_of(schema, tables, click)
        self._came: set[str] = set()

    def add(self, samples: Samples) -> None:
        """Take down a batch."""
        for table in self._tables:
            for slot in table.slots:
                self._note(signal(SLOT, slot.name), len(samples.sparse[slot.name].values_N) > 0)
            for kind, column in ((SHOW, table.show), (CLICK, table.click)):
                if column is not None:
                    self._note(signal(kind, table.name), bool(np.nan_to_num(samples.meta[column]).any()))

    def _note(self, name: str, came: bool) -> None:
        if came:
            self._came.add(name)

    def take(self) -> list[str]:
        """What came since it was taken last, sorted; forgets it."""
        came, self._came = sorted(self._came), set()
        return came
