"""Bounds the size of a spec that arrives over the API: checks the raw mapping before it is parsed into sections.

The sections bound the values of their keys; the limits of the service bound the number of jobs and streams.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import SpecError

MAX_BYTES = 1 << 20
"""Of a spec as JSON."""
MAX_DEPTH = 24
"""Levels of nested mappings and lists."""
MAX_PARTS = 50_000
"""Values in total."""
MAX_SLOTS = 20_000
"""Names of slots, with ranges expanded."""
MAX_TABLES, MAX_TASKS, MAX_STREAMS, MAX_WORKERS = 256, 64, 16, 64
MAX_SQUARES = 4_000_000
"""Sum over all lines of TOML of the squared number of dots: parsing a key takes time with the square of its parts."""
RANGE = re.compile(r"\{(\d{1,4000})\.\.(\d{1,4000})\}")


def check_size(raw: Mapping[str, Any]) -> None:
    """Raise SpecError where a raw spec is larger than the bounds."""
    _check_shape(raw)
    if (size := len(json.dumps(raw, default=str))) > MAX_BYTES:
        raise SpecError(f"it has {size} bytes as JSON; at most {MAX_BYTES}")
    for key, most in (("tables", MAX_TABLES), ("tasks", MAX_TASKS), ("exports", MAX_STREAMS)):
        _check_count(key, len(raw[key]) if isinstance(raw.get(key), dict | list) else 0, most)
    slots = raw.get("slots")
    _check_count("slots", sum(_num_names(entry) for entry in slots) if isinstance(slots, list) else 0, MAX_SLOTS)
    cluster = raw.get("cluster")
    workers = [cluster.get(key) for key in ("trainers", "shards", "readers")] if isinstance(cluster, dict) else []
    workers = [number.get("max") if isinstance(number, dict) else number for number in workers]  # of a range
    _check_count("cluster", sum(number for number in workers if isinstance(number, int)), MAX_WORKERS)


def check_lines(toml: str) -> None:
    """Raise SpecError where TOML could hold keys that take too long to parse."""
    squares = 0
    for number, line in enumerate(toml.split("\n"), 1):
        squares += line.count(".") ** 2
        if squares > MAX_SQUARES:
            raise SpecError(f"too many dots up to line {number}; break long lines", "toml")


def _check_shape(raw: object) -> None:
    """Check depth and number of values, without recursion: a deep mapping would overflow the next reader."""
    level, parts = [raw], 0
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        parts += len(level)
        if parts > MAX_PARTS:
            raise SpecError(f"it has more than {MAX_PARTS} values")
        if not level:
            return
    raise SpecError(f"mappings and lists are nested more than {MAX_DEPTH} deep")


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_count(key: str, number: int, most: int) -> None:
    if number > most:
        raise SpecError(f"{number} are more than one job may have; at most {most}", key)


def _num_names(entry: object) -> int:
    if not isinstance(entry, dict):
        return 1
    names = entry.get("names")
    patterns = names if isinstance(names, list) else [entry.get("name")]
    return sum(_num_expanded(pattern) for pattern in patterns)


def _num_expanded(pattern: object) -> int:
    match = RANGE.search(pattern) if isinstance(pattern, str) else None
    return 1 if match is None else max(1, int(match[2]) - int(match[1]) + 1)
