"""Compares two models: new, deleted and changed rows by slot, the largest changes, dense tensors. Formats the result.

Shapes: P rows that are in both models, W weights of a row.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.service.history.model_state import ModelState
from headrace.service.monitor.lines import count
from headrace.trainer.exports.row_chunks import ComparedChunk, RowChunk, compare_states


@dataclass(frozen=True, slots=True, order=True)
class RowMove:
    """How far a row moved."""

    distance: float
    """Euclidean distance of the weights and the vector."""
    slot: str
    sign: int
    table: str = ""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {"table": self.table, "slot": self.slot, "sign": self.sign, "distance": self.distance}


@dataclass(slots=True)
class RowCounts:
    """Numbers of rows of one slot of one table."""

    new: int = 0
    gone: int = 0
    changed: int = 0
    same: int = 0


@dataclass
class TableDifference:
    """The differences in one table."""

    table: str
    top: int
    by_slot: dict[str, RowCounts] = field(default_factory=dict)
    _moves: list[RowMove] = field(default_factory=list)

    def take(self, pairs: ComparedChunk) -> None:
        """Count a range of keys of both models."""
        moved_P, distance_P = distances(pairs.old, pairs.new)
        self._count(pairs.made, "new")
        self._count(pairs.gone, "gone")
        self._count(pairs.new.take(moved_P), "changed")
        self._count(pairs.new.take(~moved_P), "same")
        largest = np.argsort(-distance_P, kind="stable")[: self.top]
        for row in largest[moved_P[largest]].tolist():
            slot = pairs.new.slots[int(pairs.new.slot_R[row])]
            move = RowMove(float(distance_P[row]), slot, int(pairs.new.sign_R[row]), self.table)
            if len(self._moves) < self.top:
                heapq.heappush(self._moves, move)
            else:
                heapq.heappushpop(self._moves, move)

    def _count(self, chunk: RowChunk, what: str) -> None:
        for code, rows in zip(*np.unique(chunk.slot_R, return_counts=True), strict=True):
            counts = self.by_slot.setdefault(chunk.slots[int(code)], RowCounts())
            setattr(counts, what, getattr(counts, what) + int(rows))

    @property
    def moves(self) -> list[RowMove]:
        """The rows that moved farthest, farthest first."""
        return sorted(self._moves, reverse=True)

    def total(self, what: str) -> int:
        """Rows of all slots: "new", "gone", "changed" or "same"."""
        return sum(int(getattr(counts, what)) for counts in self.by_slot.values())

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return any(self.total(what) for what in ("new", "gone", "changed"))


def distances(old: RowChunk, new: RowChunk) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """(P,) whether a row's bits differ, and (P,) the distance; infinite for rows of different lengths."""
    a, b = old.values, new.values
    if a.shape != b.shape:
        return np.ones(len(new), np.bool_), np.full(len(new), np.inf)
    moved_P = (a.view(np.uint32) != b.view(np.uint32)).any(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        distance_P = np.sqrt(np.square(b.astype(np.float64) - a).sum(axis=1))
    return moved_P, np.where(np.isnan(distance_P), np.inf, distance_P)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One dense tensor that differs."""

    name: str
    old: float | None
    """Euclidean norm; None if the tensor is absent."""
    new: float | None
    distance: float | None
    """Norm of the difference; None if shapes differ."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {"name": self.name, "old_norm": self.old, "new_norm": self.new, "distance": self.distance}


def compare_tensors(old: Mapping[str, NDArray[Any]], new: Mapping[str, NDArray[Any]]) -> list[TensorDifference]:
    """The tensors that differ, by name."""
    found = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if a is not None and b is not None and a.dtype == b.dtype and a.shape == b.shape:
            if a.tobytes() == b.tobytes():
                continue
            found.append(TensorDifference(name, _norm(a), _norm(b), _norm(b.astype(np.float64) - a)))
        else:
            found.append(TensorDifference(name, None if a is None else _norm(a), None if b is None else _norm(b), None))
    return found


def _norm(tensor: NDArray[Any]) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64).reshape(-1)))


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """The differences between two models."""

    old: str
    new: str
    tables: Mapping[str, TableDifference]
    tensors: list[TensorDifference]

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.tensors) or any(table.differs for table in self.tables.values())

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {
            "old": self.old,
            "new": self.new,
            "same": not self.differs,
            "tables": {
                name: {
                    **{what: table.total(what) for what in ("new", "gone", "changed", "same")},
                    "by_slot": {
                        slot: {what: getattr(counts, what) for what in ("new", "gone", "changed", "same")}
                        for slot, counts in sorted(table.by_slot.items())
                    },
                    "largest": [_finite(move.message()) for move in table.moves],
                }
                for name, table in self.tables.items()
            },
            "dense": [each.message() for each in self.tensors],
        }


def _finite(message: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value == np.inf else value for key, value in message.items()}


def compare(old: ModelState, new: ModelState, top: int) -> ModelDifference:
    """Read both models side by side and compare them. `top`: number of largest moves to name."""
    tables = {name: TableDifference(name, top) for name in dict.fromkeys([*old.tables, *new.tables])}
    for name, table in tables.items():
        with old.rows(name) as before, new.rows(name) as after:
            _compare_table(table, compare_states(before, after))
    return ModelDifference(old.name, new.name, tables, compare_tensors(old.dense(), new.dense()))


def _compare_table(table: TableDifference, pairs: Iterable[ComparedChunk]) -> None:
    for pair in pairs:
        table.take(pair)


# Format


def format_difference(found: ModelDifference) -> Iterator[str]:
    """A difference as lines of text."""
    if not found.differs:
        rows = sum(table.total("same") for table in found.tables.values())
        yield f"{found.old} and {found.new} are the same: {count(rows)} rows"
        return
    yield f"{found.old} -> {found.new}"
    for name, table in found.tables.items():
        total = RowCounts(*(table.total(what) for what in ("new", "gone", "changed", "same")))
        yield f"table {name}: {_counts(total)}"
        for slot, counts in sorted(table.by_slot.items()):
            yield f"  slot {slot}: {_counts(counts)}"
        for move in table.moves:
            yield f"  moved {move.distance:.6g}: slot {move.slot}, sign {move.sign}"
    for tensor in found.tensors:
        yield f"dense {_tensor(tensor)}"


def _counts(counts: RowCounts) -> str:
    return (
        f"{count(counts.new)} new, {count(counts.gone)} deleted, {count(counts.changed)} changed, "
        f"{count(counts.same)} the same"
    )


def _tensor(tensor: TensorDifference) -> str:
    if tensor.old is None:
        return f"{tensor.name}: new, norm {tensor.new:.6g}"
    if tensor.new is None:
        return f"{tensor.name}: deleted, norm was {tensor.old:.6g}"
    change = "another shape" if tensor.distance is None else f"moved {tensor.distance:.6g}"
    return f"{tensor.name}: {change}; norm {tensor.old:.6g} -> {tensor.new:.6g}"
