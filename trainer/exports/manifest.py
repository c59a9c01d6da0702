"""Content of manifest.json, which describes an export, and of current.json beside the exports. Pure.

trainer.exports.reader opens exports by them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import headrace
from headrace import documents
from headrace.done_markers import MARKERS
from headrace.errors import HeadraceError
from headrace.trainer.exports.destination import EXPORT_PATH, FILE, NAME, TIMELINE, ExportUnusable
from headrace.trainer.exports.gates import GateResult
from headrace.trainer.exports.reader import FORMAT, MANIFEST, check_fields, checked_name, object_of

if TYPE_CHECKING:
    from headrace.trainer.exports.export_messages import ExportRequest

IDENTITY = ("job", "stream", "timeline", "kind", "version", "parent", "thresholds", "positions", "event_time", "day")
"""Fields that are equal in two exports of the same state by the same rules."""

TOLD = {"timeline": str, "name": str, "kind": str, "version": int, "tables": dict, "gates": dict, "files": dict}
"""Fields that are read from a manifest, with their types."""
POINTED = {"path": str, "chain": list}
"""Fields that are read from current.json."""


class ManifestUnusable(HeadraceError):
    """A manifest is damaged, or a newer Headrace wrote it."""


def identity(request: "ExportRequest") -> dict[str, Any]:
    """The part of the manifest that is known before anything is written."""
    section, facts = request.section, dict(request.facts)
    return {
        "format": FORMAT,
        "job": request.job,
        "timeline": request.timeline,
        "stream": request.stream,
        "kind": request.kind,
        "version": request.version,
        "name": request.name,
        "parent": None if request.parent is None else request.parent.model_dump(mode="json"),
        "positions": facts.pop("positions", {}),
        "event_time": facts.pop("event_time", None),
        "day": facts.pop("day", None),
        "metrics": facts.pop("metrics", {}),
        "thresholds": {
            "base_threshold": section.base_threshold,
            "delta_threshold": 0.0 if request.all else section.delta_threshold,
            "delta_keep_days": section.delta_keep_days,
        },
        "why": request.why,
        **facts,
    }


def build_manifest(
    request: "ExportRequest",
    tables: Mapping[str, Mapping[str, Any]],
    gates: Mapping[str, GateResult],
    files: Mapping[str, Mapping[str, Any]],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest. `more` says which parts of the model were written: "onnx", "golden"."""
    return {
        **identity(request),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "headrace": headrace.__version__,
        "tables": {name: dict(table) for name, table in tables.items()},
        "gates": {name: gate.message() for name, gate in gates.items()},
        **more,
        "files": {name: dict(file) for name, file in sorted(files.items())},
    }


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """As JSON; NaN and infinite numbers become null."""
    return json.dumps(_finite(content), indent=1, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def parse_manifest(text: bytes, what: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """A manifest, or current.json, with at least these fields, and its names those of exports and their files.

    Raises ManifestUnusable.
    """
    try:
        found = object_of(text, what)
        check_fields(found, {"format": int}, what)
        _check_format(found["format"], what)
        check_fields(found, fields, what)
        _check_names(found, what)
    except ExportUnusable as error:
        raise ManifestUnusable(f"{error}; restore it, or remove it") from error
    return found


def _check_names(content: Mapping[str, Any], what: str) -> None:
    """Raise ExportUnusable where a name leads out of the job's folder of exports."""
    parent, files = content.get("parent"), content.get("files")
    for each in (content, parent if isinstance(parent, dict) else {}):
        for key, form in (("timeline", TIMELINE), ("name", NAME)):
            if key in each:
                checked_name(each[key], form, what)
    for path in (*([content["path"]] if "path" in content else ()), *content.get("chain", ())):
        checked_name(path, EXPORT_PATH, what)
    for file in files if isinstance(files, dict) else ():
        checked_name(file, FILE, what)


def _check_format(number: int, what: str) -> None:
    if number > FORMAT:
        raise ManifestUnusable(
            f"{what} is of format {number}; this Headrace writes format {FORMAT}: continue with the newer one, or give "
            "the stream a path of its own"
        )


def difference(there: Mapping[str, Any], request: "ExportRequest") -> str | None:
    """How the existing export differs from the requested one; None where it does not."""
    asked = documents.parse_object(as_bytes(identity(request)), "the request")
    for name in IDENTITY:
        if there.get(name) != asked[name]:
            return f"its {name} is {json.dumps(there.get(name))[:200]}, not {json.dumps(asked[name])[:200]}"
    return None


@dataclass(frozen=True, slots=True, order=True)
class ExportHead:
    """The rank 0 that points current.json to an export; a later one has a higher timeline or generation."""

    timeline: int
    generation: int

    @classmethod
    def of(cls, current: Mapping[str, Any] | None) -> "ExportHead | None":
        """The head in current.json, or None: it is absent, or an older Headrace wrote it."""
        match (current or {}).get("head"):
            case {"timeline": int(timeline), "generation": int(generation)}:
                return cls(timeline, generation)
        return None


def rolled_back(current: Mapping[str, Any] | None, timeline: str) -> int:
    """The version at which current.json went back to an older export; 0: it did not, on this timeline."""
    match (current or {}).get("rollback"):
        case {"timeline": found, "version": int(version)} if found == timeline:
            return version
    return 0


def build_current(
    manifest: Mapping[str, Any],
    chain: Sequence[str],
    head: ExportHead | None,
    rollback: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """current.json for an export. `rollback`: the "timeline" and "version" at which it goes back."""
    return {
        "format": FORMAT,
        "name": manifest["name"],
        "timeline": manifest["timeline"],
        "version": manifest["version"],
        "kind": manifest["kind"],
        "path": path_of(manifest),
        "chain": list(chain),
        "passed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **({} if head is None else {"head": asdict(head)}),
        **({} if rollback is None else {"rollback": dict(rollback)}),
    }


def done_line(manifest: Mapping[str, Any], *, passed: bool) -> bytes:
    """A line of the donefile."""
    parent = manifest["parent"]
    line = {
        "path": path_of(manifest),
        **{name: manifest[name] for name in ("timeline", "version", "kind", "name", "stream", "event_time", "made_at")},
        "parent": None if parent is None else path_of(parent),
        "passed": passed,
        "rows": sum(table["rows"] for table in manifest["tables"].values()),
        "tombstones": sum(table["tombstones"] for table in manifest["tables"].values()),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
    }
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def path_of(export: Mapping[str, Any]) -> str:
    """ "t1/0000000012-base", of a manifest or a parent."""
    return f"{export['timeline']}/{export['name']}"


def files_of(manifest: Mapping[str, Any]) -> list[str]:
    """Names of all files of a complete export, its manifest and its markers included."""
    return [*manifest["files"], MANIFEST, *MARKERS]
