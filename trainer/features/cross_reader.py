"""Fills the slots with `pairs`, behind all other readers: a cross is a function of one sample alone."""

from collections.abc import Iterator, Sequence

from headrace.dataset.features.pair_columns import pair_column
from headrace.dataset.loader.batch_loader import PassReader, PassTally
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.trainer.features.history_reader import with_filled


class CrossReader:
    """A PassReader whose samples have their crosses."""

    def __init__(self, reader: PassReader, schema: Schema) -> None:
        """`reader` gives the slots of `schema.uncrossed`, and is closed with this one."""
        self.reader = reader
        self._schema = schema

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        counters = SlotCounters(self._schema)
        for block in self.reader.read(pass_number, segments, tally):
            samples = with_crosses(block, self._schema)
            for slot in self._schema.crossed:
                counters.observe_filled(slot.name, len(samples), samples.sparse[slot.name])
            yield samples
        if tally.slots is not None:
            tally.slots = tally.slots.widened(self._schema)
            tally.slots.merge(counters)

    def close(self) -> None:
        self.reader.close()


def with_crosses(samples: Samples, schema: Schema) -> Samples:
    """The samples with every slot of `schema.crossed`."""
    columns = {slot.name: pair_column(samples.sparse, slot) for slot in schema.crossed}
    return with_filled(samples, schema, columns, {})
