"""Reads JSON that others may have changed: from disks, stores, mirrors, peers and pipes. The only module that does.

A document is bounded in size and in depth, and an error names it: a file's path, a peer's address. The caller checks
its content.
"""

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import HeadraceError

MAX_BYTES = 256 << 20
"""Longest document; Headrace writes a few MB at most."""
MAX_DEPTH = 100
"""Deepest nesting of lists and objects; few enough for recursive readers."""
MAX_SPEC_DEPTH = 64
"""Deepest nesting in a job spec, which is part of other documents."""

_BRACKETS = b'[{]}"'
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


class InvalidDocument(HeadraceError, ValueError):
    """A document is not JSON or not of the expected form: damaged or foreign. A ValueError, as errors of json are."""

    def __init__(self, what: object, why: str) -> None:
        hint = "; put it back as it was" if isinstance(what, Path) else ""
        super().__init__(f"{what} {why}{hint}")
        self.why = why


def parse(content: bytes | str, what: object, max_bytes: int = MAX_BYTES) -> Any:
    """The value in a document; `what` names it. Raises InvalidDocument."""
    if len(content) > max_bytes:
        raise InvalidDocument(what, f"is longer than {max_bytes:,} bytes")
    if text_nested_deeper(content, MAX_DEPTH):
        raise InvalidDocument(what, f"has lists and objects nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also for invalid UTF-8 and for numbers with too many digits
        raise InvalidDocument(what, f"is not JSON: {error}") from None


def parse_object(content: bytes | str, what: object, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a document. Raises InvalidDocument."""
    found = parse(content, what, max_bytes)
    if not isinstance(found, dict):
        raise InvalidDocument(what, "is not a JSON object")
    return found


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a file. Raises InvalidDocument, and OSError as opening it does."""
    with path.open("rb") as file:
        return parse_object(read_bounded(file, max_bytes), path, max_bytes)


def read_bounded(file: BinaryIO, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file; of a longer one only enough for `parse` to refuse it."""
    return file.read(max_bytes + 1)


def text_nested_deeper(content: bytes | str, depth: int) -> bool:
    """Whether brackets outside strings are nested deeper than `depth`; linear time."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if data.count(b"[") + data.count(b"{") <= depth:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    outside = b"".join(plain.split(b'"')[::2])
    return max(accumulate(1 if each in b"[{" else -1 for each in outside), default=0) > depth


def value_nested_deeper(value: Any, depth: int) -> bool:
    """Whether lists and mappings of a value are nested deeper than `depth`; iterative, so any depth is fine."""
    level = [value]
    for _ in range(depth + 1):
        level = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not level:
            return False
        level = [part for each in level for part in (each.values() if isinstance(each, Mapping) else each)]
    return True
