"""The exports of a job in their destinations: their names, manifests, chains, and the one that current.json names.

The rows of exports are trainer.control.model_states'.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.done_markers import MARKERS
from headrace.trainer.exports.destination import ExportDestination, ExportFolder, ExportUnusable, open_destination
from headrace.trainer.exports.export_settings import STAGES
from headrace.trainer.exports.manifest import ManifestUnusable
from headrace.trainer.exports.pointers import DONEFILE, read_current, read_manifest, write_current
from headrace.trainer.exports.pointers import chain_of as chain_of_manifest
from headrace.trainer.exports.reader import CURRENT, MANIFEST, Export, chain_of, open_folder
from headrace.trainer.exports.retention import HOLDER, StoredExport, is_export

__all__ = [
    "CURRENT",
    "DONEFILE",
    "HOLDER",
    "MANIFEST",
    "STAGES",
    "Export",
    "ExportDestination",
    "ExportUnusable",
    "ManifestUnusable",
    "StoredExport",
    "files_of",
    "is_export",
    "open_chain",
    "open_destination",
    "point_to",
    "read_current",
    "read_manifest",
]


def files_of(manifest: Mapping[str, Any]) -> list[str]:
    """Names of all files of a complete export, its manifest and its markers included."""
    return [*manifest["files"], MANIFEST, *MARKERS]


def open_chain(url: str, scratch: Path) -> list[Export]:
    """The complete export at `url` and those before it, from its base on. Raises ExportUnusable."""
    return chain_of(open_folder(ExportFolder(url, scratch)))


def point_to(destination: ExportDestination, manifest: Mapping[str, Any]) -> None:
    """Make current.json name an export, with its whole chain. Raises ManifestUnusable."""
    write_current(destination, manifest, chain_of_manifest(destination, manifest, ()))
