"""Rows and dense weights of one version, from a commit or from a chain of exports, to inspect, compare, write out."""

from headrace.trainer.exports.materialize import at_time, at_version, materialize
from headrace.trainer.exports.reader import DENSE, Export, chain_of, open_export, state_at
from headrace.trainer.exports.row_chunks import ComparedChunk, RowChunk, compare_states
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection, weights_of
from headrace.trainer.predict.export_commit import as_commit

__all__ = [
    "DENSE",
    "CommitTableRows",
    "ComparedChunk",
    "Export",
    "RowChunk",
    "RowSelection",
    "as_commit",
    "at_time",
    "at_version",
    "chain_of",
    "compare_states",
    "materialize",
    "open_export",
    "state_at",
    "weights_of",
]
