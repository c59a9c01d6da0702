"""A sparse table in the text format of Paddle's parameter server, as a source of an import.

The layout is that of `MemorySparseTable::Save` with `CtrCommonAccessor::ParseToString` and an Adagrad rule
(paddle/fluid/distributed/ps/table/{memory_sparse_table,ctr_accessor}.cc). A folder of files `part-<shard>-<n>`, a row
a line, separated by blanks:

    key slot unseen_days delta_score show click embed_w embed_g2sum [embedx_w x dim, then their g2sum]

The last part exists if the row's score had reached `embedx_threshold`: one g2sum (SparseAdaGradSGDRule,
SparseAdagradV2SGDRule) or one for each number (StdAdaGradSGDRule). So a line has 8, 9 + dim or 8 + 2 dim words; lines
with another number (other rules: naive, adam; other accessors) are refused. `embed_w` is the first-order weight,
`embedx_w` the vector; g2sums and unseen_days are ignored. `key` is the sign, `slot` the number of its slot, which
names a slot of the job ("101"). Files in gzip (`compress_in_save`) are supported.

Shapes: R rows of a batch, D length of the vector.
"""

import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.trainer.importing.source import SourceRows

PART = re.compile(r"part-\d+(-\d+)?(\.gz)?")
BATCH_LINES = 65_536
HEAD = 8
"""Words of a line without a vector."""
SLOT, DELTA_SCORE, SHOW, CLICK, WEIGHT = 0, 2, 3, 4, 5
"""Indexes among the numbers after the key."""
VECTOR = HEAD - 1
"""Index of the vector's first number, likewise."""


def is_paddle(path: Path) -> bool:
    """True if this is a part file, or a folder of part files."""
    return bool(parts_of(path))


def parts_of(path: Path) -> list[Path]:
    """The part files of a table's folder in order, or the single file."""
    if path.is_file():
        return [path] if PART.fullmatch(path.name) else []
    if not path.is_dir():
        return []
    return sorted(found for found in path.iterdir() if found.is_file() and PART.fullmatch(found.name))


class PaddleSource:
    """See trainer.importing.source.ImportSource."""

    def __init__(self, path: Path, dim: int) -> None:
        """`dim`: of the table that receives the rows."""
        self._path, self._parts, self._dim = path, parts_of(path), dim

    def batches(self) -> Iterator[SourceRows]:
        """See Source."""
        for part in self._parts:
            try:
                with closing(_opened(part)) as lines:
                    first = 1
                    while batch := list(islice(lines, BATCH_LINES)):
                        yield _brought(part.name, first, batch, self._dim)
                        first += len(batch)
            except (OSError, EOFError) as error:
                raise BadInput(f"{part}: cannot be read: {error}") from error

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """See Source: none, because names of Paddle's dense parameters match no model of a job."""
        return {}

    def facts(self) -> Mapping[str, Any]:
        """See Source."""
        return {"kind": "paddle", "path": str(self._path)}


def _opened(part: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(part, "rb")) if part.suffix == ".gz" else part.open("rb")


def _brought(part: str, first: int, lines: Sequence[bytes], dim: int) -> SourceRows:
    key_R = np.empty(len(lines), np.uint64)
    head_RH = np.empty((len(lines), VECTOR), np.float32)
    vector_RD = np.zeros((len(lines), dim), np.float32)
    whole_R = np.zeros(len(lines), np.bool_)
    for row, line in enumerate(lines):
        words = line.split()
        try:
            _check_words(words, dim)
            key_R[row] = _uint64(words[0])
            head_RH[row] = words[1:HEAD]
            if len(words) > HEAD:
                whole_R[row] = True
                vector_RD[row] = words[HEAD : HEAD + dim]
            _check_slot(head_RH[row, SLOT])
        except ValueError as error:
            raise BadInput(f"{part}, line {first + row}: {error}") from None
    numbers, slot_R = np.unique(head_RH[:, SLOT].astype(np.int64), return_inverse=True)
    return SourceRows(
        slots=tuple(str(number) for number in numbers.tolist()),
        slot_R=slot_R.astype(np.int32),
        sign_R=key_R,
        key_R=None,
        weight_R=head_RH[:, WEIGHT].copy(),
        vector_RD=vector_RD if dim else None,
        whole_R=whole_R if dim else None,
        statistics={
            name: head_RH[:, place].copy()
            for name, place in (("show", SHOW), ("click", CLICK), ("delta_score", DELTA_SCORE))
        },
        where=lambda row: f"{part}, line {first + row}",
    )


def _check_words(words: Sequence[bytes], dim: int) -> None:
    allowed = {HEAD, HEAD + dim + 1, HEAD + 2 * dim} if dim else {HEAD}
    if len(words) in allowed:
        return
    known = ", ".join(str(number) for number in sorted(allowed))
    other = len(words) - HEAD
    hint = f"; this is a line of dim {other - 1} or {other / 2:g}" if other > 1 else ""
    raise ValueError(
        f"has {len(words)} words; the job's table has dim {dim}, for which a row of CtrCommonAccessor with an Adagrad "
        f"rule has {known}{hint}"
    )


def _uint64(word: bytes) -> int:
    if not word.isdigit() or int(word) >> 64:
        raise ValueError(f"{word.decode(errors='replace')!r} is not a key: a whole number below 2^64")
    return int(word)


def _check_slot(number: np.float32) -> None:
    if not np.isfinite(number) or number != np.floor(number):
        raise ValueError(
            f"{number} is not a slot number; the layout is: key slot unseen_days delta_score show click ..."
        )
