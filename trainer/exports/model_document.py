"""model.json of an export: all that a program without Headrace needs to serve it. Pure; imports no torch.

64-bit numbers are strings of decimal digits, since many readers of JSON keep only 53 bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.dataset.spec.config import DenseSlot, SlotKind
from headrace.dataset.spec.schema import Schema, Slot
from headrace.keys import key_of_reference, sign_of_text
from headrace.pserver.config import TableSection
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.slot_files import KINDS, PAIRS
from headrace.trainer.value_types import VALUE_TYPES, Dtype

FORMAT = 1
"""Format number of model.json."""

TEXTS = ("", "a", "42", "sports", "müsli")
SIGNS = (0, 1, 42, (1 << 63) + 7, (1 << 64) - 1)
GROUPS = (0, 1, 77)

HASH = (
    "The sign of a text: FNV-1a, 64 bits, over its UTF-8 bytes. Begin with 14695981039346656037; for each byte: "
    "exclusive or with the byte, then multiply by 1099511628211, modulo 2**64."
)
KEY = (
    "The key of a sign in a slot's group, modulo 2**64: x = sign + (group + 1) * 0x9E3779B97F4A7C15; "
    "x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9; x = (x ^ (x >> 27)) * 0x94D049BB133111EB; key = x ^ (x >> 31)."
)
SIGNS_KEPT = (
    "Of a sample's signs of a slot, first those that equal its padding are dropped, with their weights; then, where it "
    'has a max_len, the first ("head") or the last ("tail") max_len are kept.'
)
ROWS = (
    "The row of a key is its weight, if the table has first_order, then its vector: the last row of the key in the "
    "base and the deltas after it, unless a tombstone came later."
)
MISSING = "A key without a row reads its table's default_row: the weight, if there is one, then the vector."
POOLING = (
    "A pooled slot is the sum over the sample's signs, in their order, of row * scale, first-order weight and vector "
    'alike. scale = the sign\'s weight (1 unless the slot is weighted), divided for "mean" by the number of signs kept '
    '(not by the sum of weights), for "sqrtn" by its root. Without signs it is zeros. A slot with pooling "none" is '
    "a sequence: row * weight at each place, zeros behind its end, and a mask that is true where there is a sign; it "
    "is always max_len places long."
)
INPUTS = (
    "dense.onnx reads one input a slot, for B samples: a pooled slot's row under its name, (B, W) with W = 1 for the "
    "first-order weight, if any, + dim; a sequence's rows, (B, max_len, W), and its mask as <slot>.mask, (B, max_len); "
    "a dense slot's values, (B, size). Its outputs are the tasks, (B) each: a probability for loss bce, a value for "
    "mse, the probability of the best class for softmax. The model next_item has two more, (B, K) each: items, the "
    "numbers of the best ones, the best first, and scores, their cosines."
)


class TaskFacts(Protocol):
    """The document's entry of a task: a part of trainer.config.TaskSection."""

    @property
    def name(self) -> str:
        """Also the name of its output."""
        ...

    @property
    def loss(self) -> str:
        """Of trainer.config.TaskSection."""
        ...


def describe(
    schema: Schema,
    tables: Mapping[str, TableSection],
    tasks: Sequence[TaskFacts],
    section: ExportSection,
    default_rows: Mapping[str, Sequence[float]] | None = None,
    features: Mapping[str, Any] | None = None,
    retrieval: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document. `default_rows`: the default row of each table that learns one; `features`: how slots come from
    events, where the job file says so (dataset.features.served_events); `retrieval`: how items are retrieved
    (trainer.retrieval_config)."""
    used = [name for name in tables if any(slot.sparse.table == name for slot in schema.sparse)]
    document: dict[str, Any] = {
        "format": FORMAT,
        "slots": [*_sparse(schema, tables), *(_dense(slot) for slot in schema.dense)],
        "tables": {
            name: {
                "dim": tables[name].dim,
                "first_order": tables[name].first_order,
                "dtype": section.dtype,
                "exported": not section.tables or name in section.tables,
                "default_row": list((default_rows or {}).get(name, ())) or "zeros",
            }
            for name in used
        },
        "tasks": [{"name": task.name, "loss": task.loss, "output": task.name} for task in tasks],
        "inputs": [
            {"name": name, "dtype": dtype, "shape": ["B", *sizes]} for name, dtype, sizes in _inputs(schema, tables)
        ],
        "hash": {
            "name": "FNV-1a",
            "rule": HASH,
            "vectors": [{"text": text, "sign": str(sign_of_text(text.encode()))} for text in TEXTS],
        },
        "key": {
            "name": "splitmix64",
            "rule": KEY,
            "vectors": [
                {"sign": str(sign), "group": group, "key": str(key_of_reference(sign, group))}
                for group in GROUPS
                for sign in SIGNS
            ],
        },
        "rules": {
            "signs": SIGNS_KEPT,
            "rows": _rows(section.dtype),
            "missing": MISSING,
            "pooling": POOLING,
            "inputs": INPUTS,
        }
        | {name: rule for kind in KINDS for name, rule in kind.rules(schema).items()}
        | ({"pairs": PAIRS} if schema.crossed else {}),
    }
    parts = {"features": features, "retrieval": retrieval}
    return document | {name: dict(part) for name, part in parts.items() if part is not None}


def _rows(dtype: Dtype) -> str:
    """Of rows, and of vectors of Headrace's types and of `dtype`."""
    kinds = [VALUE_TYPES.load(name) for name in dict.fromkeys((*VALUE_TYPES.own, dtype))]
    return " ".join([ROWS, *(kind.rule for kind in kinds if kind.rule)])


def _filled(slot: Slot) -> dict[str, Any]:
    """How the job that trains fills a slot; nothing for others."""
    pairs = slot.sparse.pairs if slot.kind is SlotKind.SPARSE else ()
    told = {"pairs": [list(pair) for pair in pairs]} if pairs else {}
    return told | {name: told for kind in KINDS for name, told in kind.described(slot).items()}


def _sparse(schema: Schema, tables: Mapping[str, TableSection]) -> list[dict[str, Any]]:
    """Sparse slots, in order. Rows of a share group have the name of its first slot: "rows_of"."""
    first: dict[int, str] = {}
    found = []
    for slot in schema.sparse:
        entry, table = slot.sparse, tables[slot.sparse.table]
        found.append(
            {
                "name": slot.name,
                "kind": "sparse",
                "values": entry.values,
                "table": entry.table,
                "group": slot.group,
                "rows_of": first.setdefault(slot.group, slot.name),
                "pooling": entry.pooling,
                "weighted": entry.weighted,
                "padding": None if entry.padding is None else str(entry.padding),
                "max_len": entry.max_len,
                "keep": entry.keep,
                "dim": table.dim,
                "first_order": table.first_order,
            }
            | _filled(slot)
        )
    return found


def _dense(slot: Slot) -> dict[str, Any]:
    assert isinstance(slot.entry, DenseSlot)
    return {"name": slot.name, "kind": "dense", "size": slot.entry.size, **_filled(slot)}


def _inputs(schema: Schema, tables: Mapping[str, TableSection]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, type and sizes after B of the inputs, in the order of trainer.train.tracing.input_names."""
    pooled: list[tuple[str, str, tuple[int, ...]]] = []
    sequences: list[tuple[str, str, tuple[int, ...]]] = []
    for slot in schema.sparse:
        table = tables[slot.sparse.table]
        width, length = table.num_weights, slot.sparse.max_len or 1
        if slot.sparse.pooling == "none":
            sequences.append((slot.name, "float32", (length, width)))
            sequences.append((f"{slot.name}.mask", "bool", (length,)))
        else:
            pooled.append((slot.name, "float32", (width,)))
    return [*pooled, *sequences, *((slot.name, "float32", (_dense(slot)["size"],)) for slot in schema.dense)]
