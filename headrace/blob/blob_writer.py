"""A local file that is written piece by piece and hashed on the way: what Parquet and safetensors write into."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from headrace.durable import REAL, writing
from headrace.errors import Unwritable


class BlobWriter:
    """An open file, as Parquet expects one."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file, self._hash = path, file, hashlib.sha256()
        self._failed = False
        self.num_bytes = 0
        self.closed = False
        self.rows: int | None = None
        """How many rows the file holds; set by the caller, for a manifest."""

    @property
    def sha256(self) -> str:
        """Of all that was written."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> int:
        """Append `data`. Raises Unwritable at the first failure; later calls do nothing, so that a close succeeds."""
        view = memoryview(data).cast("B")
        if self._failed:
            return len(view)
        try:
            REAL.append(self._file, view)  # type: ignore[arg-type]  # any bytes will do
        except OSError as error:
            self._failed = True
            raise Unwritable(self._path, error) from error
        self._hash.update(view)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes so far."""
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing: no byte is held back."""

    def close(self) -> None:
        """Do nothing: `open_writer` closes the file."""

    def readable(self) -> bool:
        """No."""
        return False

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """No."""
        return False


@contextmanager
def open_writer(path: Path) -> Iterator[BlobWriter]:
    """A new file at `path`, synced when the context ends without an error. Raises Unwritable."""
    with writing(path):
        file = REAL.create(path)
    with file:
        writer = BlobWriter(path, file)
        yield writer
        with writing(path):
            REAL.sync(file)
