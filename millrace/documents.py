"""JSON that others may have changed: of disks, stores, mirrors, peers and pipes. Read here, and nowhere else.

A document is bounded in size and in depth, and an error names it: a file's path, a peer's address. What is in it is its
reader's business.
"""

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from millrace.errors import MillraceError

MAX_BYTES = 256 << 20
"""The longest document; one of ours has some MB at most."""
MAX_DEPTH = 100
"""Lists and objects inside each other, at most: few enough for every reader that calls itself for each."""
MAX_SPEC_DEPTH = 64
"""Likewise in a job spec, which other documents hold."""

_BRACKETS = b'[{]}"'
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


class NotReadable(MillraceError, ValueError):
    """A document is no JSON, or not what was to be there: damaged, or another's. A ValueError, as json's own errors."""

    def __init__(self, what: object, why: str) -> None:
        hint = "; put it back as it was" if isinstance(what, Path) else ""
        super().__init__(f"{what} {why}{hint}")
        self.why = why


def parse(content: bytes | str, what: object, max_bytes: int = MAX_BYTES) -> Any:
    """The value that a document holds; `what` names it. Raises NotReadable."""
    if len(content) > max_bytes:
        raise NotReadable(what, f"is longer than {max_bytes:,} bytes")
    if exceeds(content, MAX_DEPTH):
        raise NotReadable(what, f"has lists and objects nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also what is no UTF-8, and a number with too many digits
        raise NotReadable(what, f"is no JSON: {error}") from None


def parse_object(content: bytes | str, what: object, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object that a document holds. Raises NotReadable."""
    found = parse(content, what, max_bytes)
    if not isinstance(found, dict):
        raise NotReadable(what, "is no JSON object")
    return found


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object that a file holds. Raises NotReadable, and OSError as opening it does."""
    with path.open("rb") as file:
        return parse_object(read_bounded(file, max_bytes), path, max_bytes)


def read_bounded(file: BinaryIO, max_bytes: int = MAX_BYTES) -> bytes:
    """A file's content; of a longer one only so much that `parse` refuses it."""
    return file.read(max_bytes + 1)


def exceeds(content: bytes | str, depth: int) -> bool:
    """Whether brackets outside of strings are nested deeper, in time linear in the length."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if data.count(b"[") + data.count(b"{") <= depth:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    outside = b"".join(plain.split(b'"')[::2])
    return max(accumulate(1 if each in b"[{" else -1 for each in outside), default=0) > depth


def nested_deeper(value: Any, depth: int) -> bool:
    """Whether lists and mappings of a value are nested deeper; level by level, so that no depth is too much."""
    level = [value]
    for _ in range(depth + 1):
        level = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not level:
            return False
        level = [part for each in level for part in (each.values() if isinstance(each, Mapping) else each)]
    return True
