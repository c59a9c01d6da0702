"""Imports: the first commit of an empty store, from the rows and dense tensors of another model."""

from headrace.trainer.importing.first_commit import ImportResult, make_first_commit
from headrace.trainer.importing.model_shapes import shapes_of
from headrace.trainer.importing.selection import ImportSelection, TensorSelection, choose_tensors, parse_slots
from headrace.trainer.importing.source import ImportSource
from headrace.trainer.importing.source_kinds import open_source

__all__ = [
    "ImportResult",
    "ImportSelection",
    "ImportSource",
    "TensorSelection",
    "choose_tensors",
    "make_first_commit",
    "open_source",
    "parse_slots",
    "shapes_of",
]
