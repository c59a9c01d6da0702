"""The exports of one job at one destination: blobs below the job's folder, within one deadline.

The destination is a folder of this machine or an object store (trainer.blob). What is written, and in which order, is
trainer.exports.writing's matter; reading exports is trainer.exports.places'. Imports no torch.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from millrace.deadline import Deadline
from trainer.blob.store import MAX_APPENDED_BYTES, BlobStore, open_blobs, whole, whole_lines
from trainer.blob.writer import BlobWriter
from trainer.mirror.address import Address, Kind, parse

ROLE = "exports at"
"""Begins the errors of a destination."""
MAX_SMALL_BYTES = 64 << 20
"""Longest manifest that is read."""


class Outlet:
    """See module docstring. Paths are relative to the job's folder. Raises BlobUnavailable, Unwritable."""

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


def open_outlet(text: str, job: str, scratch: Path, deadline: Deadline) -> Outlet:
    """The exports of a job at an address. Raises BlobUnavailable."""
    return Outlet(open_blobs(parse(text), ROLE, deadline), job, scratch, deadline)


def folder_outlet(folder: Path, deadline: Deadline) -> Outlet:
    """Exports in a folder of this machine, without a job's folder in it."""
    blobs = open_blobs(Address(str(folder), Kind.FOLDER, str(folder.absolute()), {}), ROLE, deadline)
    return Outlet(blobs, "", folder, deadline)
