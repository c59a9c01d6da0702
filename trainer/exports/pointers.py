"""The steps after a complete export: current.json points to it, the donefile names it, old exports are removed.

Also retention in the store: commits that are held for exports, and prepared files.

Every step can be repeated after a crash; it then does what is still to do. current.json names the head that wrote it,
and is replaced only as it was read: so a head that was replaced, and wakes late, cannot turn it back.
"""

import logging
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import documents
from headrace.blob.blob_store import UNFINISHED
from headrace.deadline import Deadline
from headrace.done_markers import MARKERS, has_done
from headrace.errors import HeadraceError, Unavailable
from headrace.trainer.checkpoint.commits import Commits, order_of
from headrace.trainer.config import ExportSection
from headrace.trainer.exports import manifest as manifests
from headrace.trainer.exports.destination import (
    HOLDER,
    NAME,
    STAGES,
    TIMELINE,
    ExportDestination,
    address_of,
    open_destination,
)
from headrace.trainer.exports.manifest import ExportHead, ManifestUnusable
from headrace.trainer.exports.reader import CURRENT, MANIFEST

if TYPE_CHECKING:
    from headrace.trainer.exports.stream_state import LoggedExport

DONEFILE = "donefile.txt"
MAX_CHAIN = 100_000
"""Most deltas after a base; a longer chain is a circle."""
MAX_ROUNDS = 16
"""Times that current.json is read again because it changed before it was replaced."""
LOOK_S = 30.0
"""Longest wait for the timelines that a destination holds."""

_PATH = re.compile(rf"({TIMELINE.pattern})/{NAME.pattern}", re.ASCII)
_STAGE = re.compile(r".+-\d{10,}(\.\d+\.unfinished)?")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredExport:
    """An export at a destination."""

    path: str
    """"t1/0000000012-base"."""
    complete: bool
    """Whether it has its _DONE."""

    @property
    def order(self) -> tuple[int, int]:
        """Timeline and version, which sort exports by time."""
        match = _PATH.fullmatch(self.path)
        assert match is not None, self.path
        return int(match[1][1:]), int(match[2])

    @property
    def is_base(self) -> bool:
        """Whether it is a base."""
        return self.path.endswith("-base")


def is_export(path: str) -> bool:
    """Whether this is the path of an export."""
    return _PATH.fullmatch(path) is not None


def read_manifest(outlet: ExportDestination, path: str) -> dict[str, Any] | None:
    """The manifest of the complete export at `path`; None where there is none. Raises ManifestUnusable."""
    if not has_done(outlet.names(path)):
        return None
    text = outlet.get(f"{path}/{MANIFEST}")
    return None if text is None else manifests.parse_manifest(text, outlet.url(f"{path}/{MANIFEST}"), manifests.TOLD)


def read_current(outlet: ExportDestination) -> dict[str, Any] | None:
    """The content of current.json; None where there is none. Raises ManifestUnusable."""
    text = outlet.get(CURRENT)
    return None if text is None else _current_of(outlet, text)


def _current_of(outlet: ExportDestination, text: bytes) -> dict[str, Any]:
    return manifests.parse_manifest(text, outlet.url(CURRENT), manifests.POINTED)


class HeadIsReplaced(HeadraceError):
    """A later head has exported to the destination: this one must not change anything there."""

    def __init__(self, url: str, ours: ExportHead, theirs: ExportHead) -> None:
        super().__init__(
            f"{url} is of generation {theirs.generation} on timeline t{theirs.timeline}, and this exporter of "
            f"generation {ours.generation} on t{ours.timeline}: another head has the job, and this one leaves its "
            "exports alone"
        )


def check_head(outlet: ExportDestination, head: ExportHead | None) -> None:
    """Raise HeadIsReplaced where a later head wrote current.json."""
    _check_newest(outlet, read_current(outlet), head)


def _check_newest(outlet: ExportDestination, current: Mapping[str, Any] | None, head: ExportHead | None) -> None:
    theirs = ExportHead.of(current)
    if head is not None and theirs is not None and theirs > head:
        raise HeadIsReplaced(outlet.url(CURRENT), head, theirs)


def chain_of(outlet: ExportDestination, manifest: Mapping[str, Any], known: Sequence[str]) -> list[str]:
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


def write_current(
    outlet: ExportDestination,
    manifest: Mapping[str, Any],
    chain: Sequence[str],
    head: ExportHead | None = None,
    rollback: Mapping[str, Any] | None = None,
) -> None:
    """Make current.json name an export, for `head`; None: for a person, and the head and rollback in it stay.

    Raises HeadIsReplaced, and Unavailable where others write it without end.
    """
    for _ in range(MAX_ROUNDS):
        found = outlet.get_tagged(CURRENT)
        text, tag = found or (None, None)
        current = None if text is None else _replaceable(outlet, text, head)
        _check_newest(outlet, current, head)
        back = (current or {}).get("rollback") if head is None and rollback is None else rollback
        content = manifests.as_bytes(manifests.build_current(manifest, chain, head or ExportHead.of(current), back))
        if outlet.replace(CURRENT, content, tag) or outlet.get(CURRENT) == content:  # the reply may have been lost
            return
    raise Unavailable(f"{outlet.url(CURRENT)} was changed by others {MAX_ROUNDS} times while it was written")


def _replaceable(outlet: ExportDestination, text: bytes, head: ExportHead | None) -> dict[str, Any] | None:
    """The content of current.json; None for a damaged one, which a person may replace."""
    try:
        return _current_of(outlet, text)
    except ManifestUnusable:
        if head is not None:
            raise
        return None


def add_to_donefile(outlet: ExportDestination, manifest: Mapping[str, Any], *, passed: bool) -> None:
    """Add an export to the donefile, once."""
    path = manifests.path_of(manifest)
    if not any(_path_in(line) == path for line in reversed(outlet.tail(DONEFILE).splitlines())):
        outlet.append(DONEFILE, manifests.done_line(manifest, passed=passed))


def _path_in(line: bytes) -> object:
    try:
        content = documents.parse(line, DONEFILE)
    except documents.InvalidDocument:
        return None
    return content.get("path") if isinstance(content, dict) else None


def remove_old_exports(
    outlet: ExportDestination, keep: int, needed: Sequence[str], newest: str, stream: str
) -> list[str]:
    """Remove old exports of a stream -> their paths. Exports of other streams stay and do not count."""
    present = [each for each in _present(outlet) if not (each.is_base and _is_anothers(outlet, each.path, stream))]
    found = exports_to_remove(present, keep, set(needed), newest)
    gone = [path for path in found if not _is_anothers(outlet, path, stream)]
    for path in gone:
        remove_export(outlet, path)
    _remove_unfinished(outlet)
    if gone:
        what = "1 old export" if len(gone) == 1 else f"{len(gone):,} old exports"
        log.info("removed %s, the newest %s", what, gone[0])
    return gone


def remove_export(outlet: ExportDestination, path: str) -> None:
    """Remove an export, complete or not. _DONE goes first, so that nobody reads the rest as an export."""
    for marker in MARKERS:
        outlet.remove(f"{path}/{marker}")
    outlet.remove_folder(path)


def _remove_unfinished(outlet: ExportDestination) -> None:
    """Remove what a killed process left of a current.json. Each such file has a name of its own."""
    for name in outlet.names(""):
        if name.startswith(f"{CURRENT}.") and name.endswith(UNFINISHED):
            outlet.remove(name)


def _present(outlet: ExportDestination) -> list[StoredExport]:
    paths = [f"{timeline}/{name}" for timeline in outlet.folders("") for name in outlet.folders(timeline)]
    return [StoredExport(path, has_done(outlet.names(path))) for path in paths if is_export(path)]


def _is_anothers(outlet: ExportDestination, path: str, stream: str) -> bool:
    """Whether the manifest names another stream; False where it is damaged or missing."""
    try:
        content = documents.parse(outlet.get(f"{path}/{MANIFEST}") or b"{}", path)
    except documents.InvalidDocument:
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
            with tempfile.TemporaryDirectory(prefix="headrace-exports-") as scratch:
                names = open_destination(address, job, Path(scratch), Deadline.after(LOOK_S)).folders("")
        except HeadraceError as error:
            log.warning("the timelines of the exports of %s are not known: %s", stream, error)
            continue
        newest = max([newest, *(int(name[1:]) for name in names if re.fullmatch(r"t\d+", name))])
    return newest


def point_to(destination: ExportDestination, manifest: Mapping[str, Any]) -> None:
    """Make current.json name an export, with its whole chain. Raises ManifestUnusable."""
    write_current(destination, manifest, chain_of(destination, manifest, ()))


# What is kept


def exports_to_remove(present: Iterable[StoredExport], keep: int, needed: Collection[str], newest: str) -> list[str]:
    """Paths of the exports to remove, newest first, so that the rest can be replayed at any moment.

    Exports older than the `keep` newest complete bases are removed, and incomplete ones older than `newest`. `needed`
    exports stay: the chains of the current export and of the last one.
    """
    found = sorted(present, key=lambda each: each.order, reverse=True)
    bases = [each for each in found if each.is_base and each.complete]
    oldest = bases[keep - 1].order if len(bases) >= keep else (0, 0)
    last = StoredExport(newest, True).order
    return [
        each.path
        for each in found
        if each.path not in needed and (each.order < oldest or (not each.complete and each.order < last))
    ]


def held_commit(commits: Commits, stream: str, flight: "LoggedExport") -> str | None:
    """The commit of an export's version: the one held for it, or else the newest; None where there is none."""
    holders = commits.holders()
    found = [
        (HOLDER + stream in holders.get(name, ()), order_of(name), name)
        for name in commits.names()
        if name.startswith(f"{flight.timeline}-") and order_of(name)[1] == flight.version
    ]
    return max(found)[2] if found else None


def release_other_commits(commits: Commits, ours: Collection[tuple[str, str]]) -> None:
    """Release commits held for exports that ended or were never made; keep those in `ours` (commit and stream)."""
    held = {(name, HOLDER + stream) for name, stream in ours}
    for name, holders in commits.holders().items():
        for who in holders:
            if who.startswith(HOLDER) and (name, who) not in held:
                commits.release(name, who)


def remove_stages(store: Path, ours: Collection[Path]) -> None:
    """Remove prepared files of all exports except those in `ours`."""
    for path in (store / STAGES).glob("*"):
        if path not in ours and _STAGE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
