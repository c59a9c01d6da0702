"""Which inputs of row statistics occurred in a pass: values of sparse slots, and shows and clicks of tables.

The score and the last day of a row depend on them, so trainer.rank0.shrink_guard checks whether one of them has
stopped.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema
from headrace.pserver.config import TableSection
from headrace.trainer.features.deduplication import EmbeddingTable, tables_of
from headrace.trainer.rank0.shrink_guard import CLICK, SHOW, SLOT, signal


class SignalsCollector:
    """Collects the signals that occur, batch by batch."""

    def __init__(self, schema: Schema, tables: Mapping[str, TableSection], click: str | None) -> None:
        """`click`: the label that counts as a click in tables that name none."""
        self._tables: Sequence[EmbeddingTable] = tables_of(schema, tables, click)
        self._came: set[str] = set()

    def add(self, samples: Samples) -> None:
        """Add a batch."""
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
        """Return the signals since the last call, sorted, and forget them."""
        came, self._came = sorted(self._came), set()
        return came
