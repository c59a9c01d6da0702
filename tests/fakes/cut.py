"""Operations of exports as the log has them, for tests of what follows them."""

from typing import Any

from headrace.trainer.exports.stream_state import ChainSettings
from headrace.trainer.journal.records import ExportedOperation, ExportOperation

SHARED = ChainSettings("/exports", ["default"], "float32", base_threshold=0, delta_threshold=0, delta_keep_days=None)


def export(version: int, kind: str = "base", at_s: float | None = 0.0, **more: Any) -> ExportOperation:
    """An "export" operation of the stream "main"."""
    plain = {
        "id": None, "stream": "main", "type": kind, "name": f"{version:010d}-{kind}", "version": version,
        "timeline": "t1", "parent": None, "all": False, "why": "", "clears": False, "arithmetic": "a", "at_s": at_s,
    }  # fmt: skip
    return ExportOperation(**plain | SHARED.message() | more)


def exported(cut: ExportOperation, outcome: str = "complete", **more: Any) -> ExportedOperation:
    """The "exported" operation for one of `export`."""
    same = {name: getattr(cut, name) for name in ("stream", "name", "version", "type", "timeline")}
    plain = {"error": None, "final": False, "current": None, "failed_gates": [], "command_error": None, "at_s": 1.0}
    return ExportedOperation(**same, outcome=outcome, **plain | more)
