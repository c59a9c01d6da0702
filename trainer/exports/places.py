"""Where exports lie: a folder of this machine or of an object store, files of the latter fetched when first read."""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from millrace.deadline import Deadline
from millrace.errors import BadInput
from trainer.blob.store import BlobStore, open_blobs
from trainer.exports.outlet import MAX_SMALL_BYTES, ROLE
from trainer.mirror.address import Address, Kind, parse

NAME = re.compile(r"(\d{10,})-(base|delta)")
"""Names of exports."""
FETCH_S = 3600.0
"""How long fetching one file may take."""


class ExportUnusable(BadInput):
    """There is no export here, or it is not complete, damaged, or of a newer Millrace."""


class ExportTooNew(ExportUnusable):
    """A newer Millrace wrote it."""


class ParentMissing(ExportUnusable):
    """What a delta builds on is not there any more."""


class Place:
    """A folder of exports, local or in an object store; `scratch` takes what is fetched from the latter."""

    def __init__(self, address: str, scratch: Path) -> None:
        self.address, self.scratch = address.rstrip("/"), scratch
        self._blobs: BlobStore = open_blobs(_parsed(address), ROLE, Deadline.after(FETCH_S))

    def file(self, path: str) -> Path:
        """A local copy of a file. Raises FileNotFoundError."""
        return self._blobs.local(path, self.scratch, Deadline.after(FETCH_S))

    def small(self, path: str) -> bytes | None:
        """A small file; None if there is none."""
        return self._blobs.get(path, MAX_SMALL_BYTES, Deadline.after(FETCH_S))

    def names(self) -> list[str]:
        """Names of exports in the folder, complete or not, in order; in a local folder only."""
        is_local = self._blobs.address.kind is Kind.FOLDER
        found = self._blobs.folders("", Deadline.after(FETCH_S)) if is_local else []
        return sorted((name for name in found if NAME.fullmatch(name)), key=lambda name: int(name.partition("-")[0]))

    def above(self) -> "Place":
        """The folder that holds this one."""
        return Place(_edited(self.address, lambda path: path.rstrip("/").rpartition("/")[0] or "/"), self.scratch)

    def below(self, path: str) -> "Place":
        """A folder in this one."""
        return Place(_edited(self.address, lambda whole: f"{whole.rstrip('/')}/{path}"), self.scratch)


def _parsed(address: str) -> Address:
    try:
        return parse(address)
    except ValueError as error:
        raise ExportUnusable(f"{address}: {error}") from None


def _edited(address: str, edit: Callable[[str], str]) -> str:
    if "://" not in address:
        return str(edit(str(Path(address).absolute())))
    parts = urlsplit(address)
    return parts._replace(path=edit(parts.path)).geturl()
