"""Where exports lie: a folder of this machine or of an object store, files of the latter fetched when first read."""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from millrace.deadline import Deadline
from millrace.errors import BadInput
from trainer.mirror.address import Address, Kind, parse
from trainer.mirror.objects import Objects

NAME = re.compile(r"(\d{10,})-(base|delta)")
"""Names of exports."""
SMALL_BYTES = 64 << 20
"""The longest manifest that is read."""
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

    def __init__(self, address: str, scratch: Path, objects: Objects | None = None) -> None:
        self.address, self.scratch = address.rstrip("/"), scratch
        self._parsed = _parsed(address)
        self._objects = objects
        if objects is None and self._parsed.kind is Kind.S3:
            self._objects = Objects.open(address, Deadline.after(FETCH_S))

    def file(self, path: str) -> Path:
        """A local copy of a file. Raises FileNotFoundError."""
        if self._objects is None:
            found = Path(self._parsed.root) / path
            if not found.is_file():
                raise FileNotFoundError(path)
            return found
        copy = self.scratch / re.sub(r"[^\w.-]", "_", f"{self._parsed.root}/{path}")
        if not copy.exists():
            self.scratch.mkdir(parents=True, exist_ok=True)
            part = copy.with_name(copy.name + ".part")
            self._objects.download(path, part, Deadline.after(FETCH_S))
            part.rename(copy)
        return copy

    def small(self, path: str) -> bytes | None:
        """A small file; None if there is none."""
        if self._objects is not None:
            return self._objects.get(path, SMALL_BYTES, Deadline.after(FETCH_S))
        try:
            return self.file(path).read_bytes()
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Names of exports in the folder, complete or not, in order; in a local folder only."""
        root = Path(self._parsed.root)
        found = [path.name for path in root.iterdir()] if self._objects is None and root.is_dir() else []
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
