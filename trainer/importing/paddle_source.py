"""A sparse table in the text format of Paddle's parameter server, as a source of an import.

The layout is that of `MemorySparseTable::Save` with `CtrCommonAccessor::ParseToString`
(paddle/fluid/distributed/ps/table/{memory_sparse_table,ctr_accessor}.cc). A folder of files `part-<shard>-<n>`, a row
a line, separated by blanks:

    key slot unseen_days delta_score show click embed_w [its state] [embedx_w x dim] [their state]

The vector and its state are there if the row's score had reached `embedx_threshold`. The states depend on the table's
rule (trainer.importing.paddle_source); a table of the job takes lines of the rules that fit its optimizer. `embed_w` is
the first-order weight, `embedx_w` the vector; unseen_days are ignored. `key` is the sign, `slot` the number of its
slot, which names a slot of the job ("101"). Files in gzip (`compress_in_save`) are supported.

Shapes: R rows of a batch, D length of the vector, E and X words of the states of weight and vector.
"""

import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadInput
from headrace.pserver.config import TableSection
from headrace.pserver.row_optimizers import PaddleAdagrad, PaddleAdam, RowOptimizer, Sgd
from headrace.trainer.importing.source import SourceRows

# Rules of Paddle's sparse tables: the words that each adds to a row in text, and the state of a job's row from them.
#
# The rules are those of paddle/fluid/distributed/ps/table/sparse_sgd_rule.h: naive, adagrad (and adagrad_v2, of the
# same layout), std_adagrad, adam. A row has a rule for its first-order weight (`embed`) and one for its vector
# (`embedx`); a table's text has the same rule for both.
#
# Shapes: R rows of a batch, E and X words of the states of `embed` and `embedx`, K floats of the state in a job's row.

F32 = NDArray[np.float32]

RULES: Mapping[str, RowOptimizer] = {
    "naive": Sgd(kind="sgd"),
    "adagrad": PaddleAdagrad(kind="paddle_adagrad"),
    "std_adagrad": PaddleAdagrad(kind="paddle_adagrad", per="element"),
    "adam": PaddleAdam(kind="paddle_adam"),
}
"""The rules, each with an optimizer of a job with which its rows go on as they were. A text has a part's state in the
order of `RowOptimizer.state`: g2sums; of adam gsums, g2sums, and the powers of both betas."""


def state_words(rule: str, num_weights: int) -> int:
    """Words of a rule's state of so many weights."""
    return sum(map(len, RULES[rule].state(num_weights)))


def rules_for(optimizer: RowOptimizer) -> tuple[str, ...]:
    """The rules whose rows a table with this optimizer takes."""
    rule = optimizer.paddle_rule
    if rule is not None and state_words(rule, 1):
        return (rule,)
    return (*([] if rule is None else [rule]), "adagrad", "std_adagrad")


def goes_on(optimizer: RowOptimizer) -> bool:
    """Whether rows go on as they were; otherwise the state of their optimizer begins anew."""
    return optimizer.paddle_rule is not None


def state_of(section: TableSection, embed_RE: F32, embedx_RX: F32) -> F32 | None:
    """(R, K) the state of rows, as pserver.rows.row_settings keeps it; None: there is none, or it begins anew."""
    optimizer = section.optimizer
    if optimizer.paddle_rule is None or not state_words(optimizer.paddle_rule, 1):
        return None
    firsts = optimizer.state(int(section.first_order))  # of a text the first-order weight is there in any case
    embeds, embedxs = _groups(optimizer, 1, embed_RE), _groups(optimizer, section.dim, embedx_RX)
    pairs = zip(firsts, embeds, embedxs, strict=True)
    return np.concatenate([part for first, one, other in pairs for part in (one[:, : len(first)], other)], axis=1)


def _groups(optimizer: RowOptimizer, num_weights: int, state_RN: F32) -> list[F32]:
    """The groups of an optimizer's state of so many weights."""
    ends = np.cumsum([len(group) for group in optimizer.state(num_weights)])
    return np.split(state_RN, ends[:-1], axis=1)


def check_state(optimizer: RowOptimizer, embed_RE: F32, embedx_RX: F32) -> None:
    """Raise ValueError for a state of a row that no rule can have; R is 1, and X is 0 without a vector."""
    for state_K in (embed_RE[0], embedx_RX[0]):
        dim = (len(state_K) - 2) // 2
        sums_K, powers_K = state_K, state_K[:0]
        if optimizer.paddle_rule == "adam":
            sums_K, powers_K = state_K[dim : 2 * dim], state_K[2 * dim :]
        if (sums_K < 0).any():
            raise ValueError(f"{sums_K.min():g} is a sum of squares in the state of its optimizer, and below 0")
        if ((powers_K < 0) | (powers_K >= 1)).any():
            raise ValueError(f"{powers_K.tolist()} are powers of betas in the state of its optimizer, and not below 1")


PART = re.compile(r"part-\d+(-\d+)?(\.gz)?")
BATCH_LINES = 65_536
HEAD = 7
"""Words of a line up to its first-order weight."""
SLOT, DELTA_SCORE, SHOW, CLICK, WEIGHT = 0, 2, 3, 4, 5
"""Indexes among the numbers after the key."""


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
    """A sparse table in Paddle's text format."""

    def __init__(self, path: Path, section: TableSection) -> None:
        """`section`: the table that receives the rows."""
        self._path, self._parts = path, parts_of(path)
        self._layout = LineLayout.of(section)

    def batches(self) -> Iterator[SourceRows]:
        for part in self._parts:
            try:
                with closing(_opened(part)) as lines:
                    first = 1
                    while batch := list(islice(lines, BATCH_LINES)):
                        yield _brought(part.name, first, batch, self._layout)
                        first += len(batch)
            except (OSError, EOFError) as error:
                raise BadInput(f"{part}: cannot be read: {error}") from error

    def dense(self) -> Mapping[str, NDArray[Any]]:
        """None, because names of Paddle's dense parameters match no model of a job."""
        return {}

    def facts(self) -> Mapping[str, Any]:
        anew = {} if goes_on(self._layout.section.optimizer) else {"optimizer": "begins anew"}
        return {"kind": "paddle", "path": str(self._path), **anew}


@dataclass(frozen=True, slots=True)
class LineLayout:
    """The lines that a table takes."""

    section: TableSection
    of_words: Mapping[int, tuple[tuple[str, bool], ...]]
    """The rules that a line of so many words may be of, and whether it then has a vector."""

    @classmethod
    def of(cls, section: TableSection) -> "LineLayout":
        """The layout for a table."""
        found: dict[int, set[tuple[str, bool]]] = {}
        for rule in rules_for(section.optimizer):
            for num_words, whole in _numbers_of_words(rule, section.dim):
                found.setdefault(num_words, set()).add((rule, whole))
        return cls(section, {num_words: tuple(sorted(each)) for num_words, each in found.items()})

    def rule_of(self, words: Sequence[bytes]) -> tuple[str, bool]:
        """The rule of a line, and whether it has a vector. Raises ValueError for a line that does not fit."""
        found, dim = self.of_words.get(len(words), ()), self.section.dim
        if len({whole for _, whole in found}) == 1:
            return found[0]
        if found:
            each = " or ".join(f"{rule} {'with' if whole else 'without'} a vector" for rule, whole in found)
            raise ValueError(f"has {len(words)} words, which with dim {dim} is {each}: export the table in another way")
        rules = " or ".join(rules_for(self.section.optimizer))
        known = ", ".join(map(str, sorted(self.of_words)))
        raise ValueError(
            f"has {len(words)} words; the job's table has dim {dim}, for which a row of CtrCommonAccessor with the "
            f"rule {rules} has {known}{_hint(len(words), dim)}"
        )


def _numbers_of_words(rule: str, dim: int) -> list[tuple[int, bool]]:
    """The numbers of words of a rule's lines, and whether they have a vector."""
    bare = HEAD + state_words(rule, 1)
    return [(bare, False), (bare + dim + state_words(rule, dim), True)] if dim else [(bare, False)]


def _hint(num_words: int, dim: int) -> str:
    """Other rules that a line may be of, or else other lengths of its vector."""
    others = [rule for rule in RULES if num_words in [found for found, _ in _numbers_of_words(rule, dim)]]
    if others:
        each = ", or ".join(f"of the rule {rule}: optimizer.kind = {_kind_of(rule)}" for rule in others)
        return f"; this is a line {each}"
    dims = {rule: _dim_of(num_words, rule) for rule in RULES}
    found = [f"{dim:g} ({rule})" for rule, dim in dims.items() if dim >= 1 and dim.is_integer()]
    return f"; this is a line of dim {' or '.join(found)}" if found else ""


def _kind_of(rule: str) -> str:
    optimizer = RULES[rule]
    return f'"{optimizer.kind}"' + (' with per = "element"' if getattr(optimizer, "per", "") == "element" else "")


def _dim_of(num_words: int, rule: str) -> float:
    """The dim with which a line of a rule has so many words."""
    weight, nothing = state_words(rule, 1), state_words(rule, 0)
    base, step = HEAD + weight + nothing, 1 + weight - nothing
    return (num_words - base) / step


def _opened(part: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(part, "rb")) if part.suffix == ".gz" else part.open("rb")


def _brought(part: str, first: int, lines: Sequence[bytes], layout: LineLayout) -> SourceRows:
    section, num_rows = layout.section, len(lines)
    dim, kept = section.dim, rules_for(section.optimizer)[0]
    key_R = np.empty(num_rows, np.uint64)
    head_RH = np.empty((num_rows, HEAD - 1), np.float32)
    vector_RD = np.zeros((num_rows, dim), np.float32)
    embed_RE, embedx_RX = (np.zeros((num_rows, state_words(kept, width)), np.float32) for width in (1, dim))
    whole_R = np.zeros(num_rows, np.bool_)
    keeps = state_of(section, embed_RE, embedx_RX) is not None
    for row, line in enumerate(lines):
        words = line.split()
        try:
            rule, whole_R[row] = layout.rule_of(words)
            key_R[row] = _uint64(words[0])
            head_RH[row] = words[1:HEAD]
            vector = HEAD + state_words(rule, 1)
            if whole_R[row]:
                vector_RD[row] = words[vector : vector + dim]
            if keeps:
                embed_RE[row] = words[HEAD:vector]
                if whole_R[row]:
                    embedx_RX[row] = words[vector + dim :]
                check_state(section.optimizer, embed_RE[row : row + 1], embedx_RX[row : row + 1])
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
        state_RK=state_of(section, embed_RE, embedx_RX),
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
