"""Rows and dense weights of one version, from a commit or from a chain of exports, to inspect and to compare."""

from trainer.exports.reader import DENSE, Export, chain_of, open_export, state_at
from trainer.exports.row_chunks import ComparedChunk, RowChunk, compare_states
from trainer.exports.row_selection import CommitTableRows, RowSelection, weights_of

__all__ = [
    "DENSE",
    "CommitTableRows",
    "ComparedChunk",
    "Export",
    "RowChunk",
    "RowSelection",
    "chain_of",
    "compare_states",
    "open_export",
    "state_at",
    "weights_of",
]
