"""Bodies of exports as the log has them, for tests of what follows them."""

from typing import Any

SHARED = {
    "address": "/exports",
    "tables": ["default"],
    "dtype": "float32",
    "base_threshold": 0.0,
    "delta_threshold": 0.0,
    "delta_keep_days": None,
}


def export(version: int, kind: str = "base", at_s: float | None = 0.0, **more: Any) -> dict[str, Any]:
    """An "export" operation of the stream "main"."""
    plain = {
        "op": "export", "id": None, "stream": "main", "type": kind, "name": f"{version:010d}-{kind}",
        "version": version, "timeline": "t1", "parent": None, "all": False, "why": "", "clears": False,
        "arithmetic": "a", "at_s": at_s,
    }  # fmt: skip
    return plain | SHARED | more


def exported(body: dict[str, Any], outcome: str = "complete", **more: Any) -> dict[str, Any]:
    """The "exported" operation for one of `export`."""
    same = {name: body[name] for name in ("stream", "name", "version", "type", "timeline")}
    return {"op": "exported", **same, "outcome": outcome, "error": None, "at_s": 1.0} | more
