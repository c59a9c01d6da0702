"""Identity of the environment that this process runs in: which interpreter, and which code of Headrace.

Two builds of one name and one version can differ: the service was started from another environment, or its packages
were installed anew. Other packages are not compared.
"""

import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import headrace

PACKAGES = (".", "dataset", "pserver", "service", "trainer")
"""The folders of `headrace`. In a checkout all but the first are links, which a search from above does not enter."""
SUFFIXES = frozenset({".css", ".json", ".proto", ".py"})
"""Files that decide what the packages do. Compiled ones follow from them."""


@cache
def environment() -> str:
    """The identity of this process's environment, hashed at the first call; empty where its files cannot be read."""
    try:
        return identity_of(sys.prefix, Path(headrace.__file__).parent)
    except OSError:  # perhaps it is being replaced: an unknown identity equals no other
        return ""


def identity_of(prefix: str, root: Path) -> str:
    """The identity of the interpreter at `prefix` with the package `headrace` in `root`. Raises OSError."""
    whole = hashlib.sha256(f"{prefix}\0{sys.version}\0".encode())
    for path in _sources(root):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted(path for path in (root / package).rglob("*") if path.suffix in SUFFIXES and path.is_file())
