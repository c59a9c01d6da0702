"""Exports where they are stored: `ExportDestination` writes those of one job, `ExportFolder` reads a folder of them.

Both use a blob store (headrace.blob): a folder of this machine or an object store. The order of writing is
decided in trainer.exports.exporter; trainer.exports.reader reads the files. Imports no torch.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from headrace.blob.blob_store import MAX_APPENDED_BYTES, BlobStore, open_blobs, whole, whole_lines
from headrace.blob.blob_writer import BlobWriter
from headrace.blob.store_address import StoreAddress, StoreKind, parse
from headrace.deadline import Deadline
from headrace.errors import BadInput
from headrace.relative_names import InvalidName, relative_name
from headrace.trainer.config import ExportSection

ROLE = "exports at"
"""Begins the errors of a destination."""
NAME = re.compile(r"(\d{10,18})-(base|delta)", re.ASCII)
"""Names of exports."""
TIMELINE = re.compile(r"t\d{1,18}", re.ASCII)
EXPORT_PATH = re.compile(rf"(?:{TIMELINE.pattern}/)?{NAME.pattern}", re.ASCII)
"""Paths of exports in a job's folder; those of the first Headrace had no timeline."""
FILE = re.compile(r"[\w.-]+")
"""Names of the files of an export."""
FETCH_S = 3600.0
"""Longest time to fetch one file."""
FOLDER_S = 86_400.0
"""Longest use of a folder of this machine: no limit in practice."""
MAX_SMALL_BYTES = 64 << 20
"""Longest manifest that is read."""

EXPORTS = "exports"
"""Folder in the store for exports of streams without a path."""
STAGES = "exports-stage"
"""Folder in the store for what rank 0 prepares for an export."""
HOLDER = "export-"
"""Prefix of a stream's name: the holder of a commit that is being exported."""


class ExportUnusable(BadInput):
    """An export is missing, incomplete, damaged, or from a newer Headrace."""


class ExportTooNew(ExportUnusable):
    """A newer Headrace wrote it."""


class ParentMissing(ExportUnusable):
    """The parent of a delta does not exist any more."""


def address_of(section: ExportSection, stream: str, store: Path, folder: Path) -> str:
    """Destination of a stream's exports; a relative path starts at the job file's `folder`."""
    return str(store / EXPORTS / stream) if section.path is None else parse(section.path, folder).text


class ExportLocation(NamedTuple):
    """The location that an address means, however it is spelled."""

    root: str
    """StoreAddress.place of an object store, or a folder without links in its path."""
    endpoint: str | None = None
    """Endpoint of an object store that is not Amazon's."""

    def __str__(self) -> str:
        return self.root


def destination_of(text: str) -> ExportLocation:
    """The destination of an address that `address_of` returned."""
    address = parse(text)
    if address.is_folder:
        return ExportLocation(str(Path(address.root).resolve()))
    return ExportLocation(address.place, address.options.get("endpoint_override"))


class ExportDestination:
    """Paths are relative to the job's folder. Raises BlobUnavailable, Unwritable."""

    def __init__(self, blobs: BlobStore, below: str, scratch: Path, deadline: Deadline) -> None:
        """`below`: the job's folder in the store. `scratch` takes what an object store gets when it is complete."""
        self._blobs, self._below, self._scratch, self._deadline = blobs, below, scratch, deadline

    def url(self, path: str) -> str:
        """The whole address of a path."""
        return self._blobs.url(self._key(path))

    def file(self, path: str) -> AbstractContextManager[BlobWriter]:
        """A new file: durable when the context ends; after an error its content is undefined."""
        return self._blobs.create(self._key(path), self._scratch, self._deadline)

    def put(self, path: str, content: bytes) -> None:
        """Make `content` that of a small file, whole or not at all, durable once this returns."""
        self._blobs.put(self._key(path), whole(content), self._deadline)

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        """A small file and its tag, for `replace`; None if there is none."""
        return self._blobs.get_tagged(self._key(path), MAX_SMALL_BYTES, self._deadline)

    def replace(self, path: str, content: bytes, tag: str | None) -> bool:
        """Make `content` that of a small file that still has `tag`; None: of a new one. False: it has changed."""
        return self._blobs.replace(self._key(path), content, tag, self._deadline)

    def append(self, path: str, line: bytes) -> None:
        """Add a line to the end of a file, made where there is none. An incomplete last line is dropped."""
        self._blobs.append(self._key(path), line, self._deadline)

    def tail(self, path: str) -> bytes:
        """The newest complete lines of such a file, at most MAX_APPENDED_BYTES."""
        content = self._blobs.tail(self._key(path), MAX_APPENDED_BYTES, self._deadline)
        return whole_lines(content, cut=len(content) >= MAX_APPENDED_BYTES)

    def get(self, path: str) -> bytes | None:
        """A small file; None if there is none."""
        return self._blobs.get(self._key(path), MAX_SMALL_BYTES, self._deadline)

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in one, sorted; none where it is not there."""
        return self._blobs.folders(self._key(folder), self._deadline)

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; none where it is not there."""
        return sorted(self._blobs.sizes(self._key(folder), self._deadline))

    def remove(self, path: str) -> None:
        """Remove a file, durably, if it is there."""
        self._blobs.remove(self._key(path), self._deadline)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with its files, if it is there; also, for a short while, when the time is up."""
        self._blobs.remove_folder(self._key(folder), self._deadline)

    def _key(self, path: str) -> str:
        return f"{self._below}/{path}".strip("/")


def open_destination(text: str, job: str, scratch: Path, deadline: Deadline) -> ExportDestination:
    """The exports of a job at an address. Raises BlobUnavailable.

    A folder is used without the deadline: the export itself checks it, between its steps, and can still clean up.
    """
    address = parse(text)
    blobs = open_blobs(address, ROLE, deadline)
    return ExportDestination(blobs, job, scratch, Deadline.after(FOLDER_S) if address.is_folder else deadline)


def folder_destination(folder: Path) -> ExportDestination:
    """Exports in a folder of this machine, without a job's folder in it."""
    deadline = Deadline.after(FOLDER_S)
    blobs = open_blobs(StoreAddress(str(folder), StoreKind.FOLDER, str(folder.absolute()), {}), ROLE, deadline)
    return ExportDestination(blobs, "", folder, deadline)


class ExportFolder:
    """A folder of exports, local or in an object store; `scratch` takes files fetched from the latter.

    Paths in it are relative names, and in a local one they are no symbolic links: so what is read stays below the
    address, and who may make links there reads no file elsewhere. Else ExportUnusable is raised. The address itself
    may be a link.
    """

    def __init__(self, address: str, scratch: Path) -> None:
        self.address, self.scratch = address.rstrip("/"), scratch
        self._blobs: BlobStore = open_blobs(_parsed(address), ROLE, Deadline.after(FETCH_S))

    def file(self, path: str) -> Path:
        """A local copy of a file. Raises FileNotFoundError."""
        return self._blobs.local(self._own(path), self.scratch, Deadline.after(FETCH_S))

    def small(self, path: str) -> bytes | None:
        """A small file; None if there is none."""
        return self._blobs.get(self._own(path), MAX_SMALL_BYTES, Deadline.after(FETCH_S))

    def names(self) -> list[str]:
        """Names of exports in a local folder, complete or not, in order; empty for an object store."""
        is_local = self._blobs.address.is_folder
        found = self._blobs.folders("", Deadline.after(FETCH_S)) if is_local else []
        return sorted((name for name in found if NAME.fullmatch(name)), key=lambda name: int(name.partition("-")[0]))

    def above(self) -> "ExportFolder":
        """The folder above this one."""
        return ExportFolder(
            _edited(self.address, lambda path: path.rstrip("/").rpartition("/")[0] or "/"), self.scratch
        )

    def below(self, path: str) -> "ExportFolder":
        """A folder in this one."""
        path = self._own(path)
        return ExportFolder(_edited(self.address, lambda whole: f"{whole.rstrip('/')}/{path}"), self.scratch)

    def _own(self, path: str) -> str:
        try:
            relative_name(path)
        except InvalidName as error:
            raise ExportUnusable(f"{self.address}: {error}") from error
        if self._blobs.address.is_folder:
            at = Path(self._blobs.address.root)
            for part in path.split("/"):
                at /= part
                if at.is_symlink():
                    raise ExportUnusable(f"{at} is a symbolic link, which an export has none of: put the file there")
        return path


def _parsed(address: str) -> StoreAddress:
    try:
        return parse(address)
    except ValueError as error:
        raise ExportUnusable(f"{address}: {error}") from None


def _edited(address: str, edit: Callable[[str], str]) -> str:
    if "://" not in address:
        return str(edit(str(Path(address).absolute())))
    parts = urlsplit(address)
    return parts._replace(path=edit(parts.path)).geturl()
