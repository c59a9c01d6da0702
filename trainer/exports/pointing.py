"""The steps after a complete export: current.json points to it, the donefile names it, old exports are removed.

Every step can be repeated after a crash; it then does what is still to do.
"""

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace import documents
from millrace.deadline import Deadline
from millrace.errors import MillraceError
from trainer.exports import manifest as manifests
from trainer.exports.config import ExportSection
from trainer.exports.manifest import ManifestUnusable
from trainer.exports.ordering import address_of
from trainer.exports.outlet import Outlet, open_outlet
from trainer.exports.reading import CURRENT, MANIFEST
from trainer.exports.retention import Present, is_export, superfluous
from trainer.markers import MARKERS, has_done

DONEFILE = "donefile.txt"
MAX_CHAIN = 100_000
"""Most deltas after a base; a longer chain is a circle."""
LOOK_S = 30.0
"""Longest wait for the timelines that a destination holds."""

log = logging.getLogger(__name__)


def read_manifest(outlet: Outlet, path: str) -> dict[str, Any] | None:
    """The manifest of the complete export at `path`; None where there is none. Raises ManifestUnusable."""
    if not has_done(outlet.names(path)):
        return None
    text = outlet.get(f"{path}/{MANIFEST}")
    return None if text is None else manifests.parsed(text, outlet.url(f"{path}/{MANIFEST}"), manifests.TOLD)


def read_current(outlet: Outlet) -> dict[str, Any] | None:
    """The content of current.json; None where there is none. Raises ManifestUnusable."""
    text = outlet.get(CURRENT)
    return None if text is None else manifests.parsed(text, outlet.url(CURRENT), manifests.POINTED)


def chain_of(outlet: Outlet, manifest: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    """Paths from the base of an export to itself. `known`: a chain that need not be read. Raises ManifestUnusable."""
    newer: list[str] = []
    at: Mapping[str, Any] = manifest
    while len(newer) < MAX_CHAIN:
        path = manifests.path_of(at)
        if path in known:
            return [*known[: known.index(path) + 1], *reversed(newer)]
        newer.append(path)
        if at["kind"] == "base":
            return newer[::-1]
        parent = manifests.path_of(at["parent"])
        found = read_manifest(outlet, parent)
        if found is None:
            raise ManifestUnusable(f"{outlet.url(path)} builds on {parent}, which does not exist: a base is needed")
        at = found
    raise ManifestUnusable(f"{outlet.url(manifests.path_of(manifest))}: its chain has no end")


def point(outlet: Outlet, manifest: Mapping[str, Any], chain: Sequence[str]) -> None:
    """Make current.json name an export."""
    outlet.put(CURRENT, manifests.as_bytes(manifests.current(manifest, chain)))


def tell(outlet: Outlet, manifest: Mapping[str, Any], *, passed: bool) -> None:
    """Add an export to the donefile, once."""
    path = manifests.path_of(manifest)
    if not any(_path_in(line) == path for line in reversed(outlet.tail(DONEFILE).splitlines())):
        outlet.append(DONEFILE, manifests.done_line(manifest, passed=passed))


def _path_in(line: bytes) -> object:
    try:
        content = documents.parse(line, DONEFILE)
    except documents.NotReadable:
        return None
    return content.get("path") if isinstance(content, dict) else None


def prune(outlet: Outlet, keep: int, needed: Sequence[str], newest: str, stream: str) -> list[str]:
    """Remove old exports of a stream -> their paths. Exports of other streams stay and do not count."""
    present = [each for each in _present(outlet) if not (each.is_base and _is_anothers(outlet, each.path, stream))]
    found = superfluous(present, keep, set(needed), newest)
    gone = [path for path in found if not _is_anothers(outlet, path, stream)]
    for path in gone:
        discard(outlet, path)
    if gone:
        what = "1 old export" if len(gone) == 1 else f"{len(gone):,} old exports"
        log.info("removed %s, the newest %s", what, gone[0])
    return gone


def discard(outlet: Outlet, path: str) -> None:
    """Remove an export, complete or not. _DONE goes first, so that nobody reads the rest as an export."""
    for marker in MARKERS:
        outlet.remove(f"{path}/{marker}")
    outlet.remove_folder(path)


def _present(outlet: Outlet) -> list[Present]:
    paths = [f"{timeline}/{name}" for timeline in outlet.folders("") for name in outlet.folders(timeline)]
    return [Present(path, has_done(outlet.names(path))) for path in paths if is_export(path)]


def _is_anothers(outlet: Outlet, path: str, stream: str) -> bool:
    """Whether the manifest names another stream; False where it is damaged or missing."""
    try:
        content = documents.parse(outlet.get(f"{path}/{MANIFEST}") or b"{}", path)
    except documents.NotReadable:
        return False
    return isinstance(content, dict) and content.get("stream", stream) != stream


def newest_timeline(job: str, streams: Mapping[str, ExportSection], store: Path, folder: Path) -> int:
    """The highest number of a timeline that has exports, so that a new store takes none of them again; 0: none.

    A destination that does not answer is skipped: an export never overwrites another one at its address.
    """
    newest = 0
    for stream, section in streams.items():
        address = address_of(section, stream, store, folder)
        try:
            with tempfile.TemporaryDirectory(prefix="millrace-exports-") as scratch:
                names = open_outlet(address, job, Path(scratch), Deadline.after(LOOK_S)).folders("")
        except MillraceError as error:
            log.warning("the timelines of the exports of %s are not known: %s", stream, error)
            continue
        newest = max([newest, *(int(name[1:]) for name in names if re.fullmatch(r"t\d+", name))])
    return newest
