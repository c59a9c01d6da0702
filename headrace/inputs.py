"""Digests of the files that a job reads: whether two machines have the same ones."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

HEAD_BYTES = 64 << 10
"""A file is known by its first bytes; it may grow behind them."""
ABSENT = "absent"
"""In place of the digest of a file that is not there, or cannot be read."""


def head_sizes(paths: Iterable[str], folder: Path) -> dict[str, int]:
    """How many bytes of each file are compared, by its path relative to `folder`. A missing file is left out."""
    return {path: min(HEAD_BYTES, (folder / path).stat().st_size) for path in paths if (folder / path).is_file()}


def digests(sizes: Mapping[str, int], folder: Path) -> dict[str, str]:
    """SHA-256 of the first bytes of each file, by its path. A file that is shorter has the digest of what it has."""
    return {path: _digest(folder / path, size) for path, size in sizes.items()}


def _digest(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(size)).hexdigest()
    except OSError:
        return ABSENT
