"""Contents of log records for tests: with plain values for every field that a test does not give."""

from collections.abc import Mapping
from typing import Any

from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import (
    Content,
    ExportedOperation,
    ExportOperation,
    PassClose,
    RecordKind,
    ShrinkOperation,
    Void,
    decode,
)

PLAIN: Mapping[str, Mapping[str, Any]] = {
    ShrinkOperation.op: {
        "id": None, "table": "default", "delete_below": None, "delete_after_days": None, "at_once": False,
    },
    ExportOperation.op: {
        "id": None, "stream": "s", "type": "base", "name": "x", "version": 1, "timeline": "t1", "parent": None,
        "all": False, "why": "", "clears": False, "arithmetic": "a", "at_s": None, "address": "a", "tables": [],
        "dtype": "float32", "base_threshold": 0.0, "delta_threshold": 0.0, "delta_keep_days": None,
    },
    ExportedOperation.op: {
        "stream": "s", "name": "x", "version": 1, "type": "base", "timeline": "t1", "outcome": "complete",
        "error": None, "final": False, "current": True, "failed_gates": [], "command_error": None, "at_s": None,
    },
}  # fmt: skip


def close(number: int, **facts: Any) -> PassClose:
    """The close of a pass; `facts` are its fields."""
    return PassClose(**{"day": 0, "events": 0, "samples": 0, "rejected": {}, "digests": {}, "number": number, **facts})


def operation(body: Mapping[str, Any]) -> Any:
    """The operation with this JSON form."""
    return decode("operation", {**PLAIN.get(body["op"], {}), **body})


def of_pass(kind: RecordKind, number: int) -> Content:
    """A plan, a close or a void of this pass."""
    return {
        RecordKind.PLAN: PassPlan(number, ()),
        RecordKind.CLOSE: close(number),
        RecordKind.VOID: Void(number=number),
    }[kind]
