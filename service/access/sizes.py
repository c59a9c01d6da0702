"""How large a spec may be that comes from elsewhere: asked of the raw mapping, before anything is made of it.

What a key of a known section may be at most, the section says; how many jobs and streams, the service's limits.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import SpecError

MAX_BYTES = 1 << 20
"""Of a spec as JSON."""
MAX_DEPTH = 24
"""Of mappings and lists in each other."""
MAX_PARTS = 50_000
"""Values, in all."""
MAX_SLOTS = 20_000
"""Names of slots, ranges written out."""
MAX_TABLES, MAX_TASKS, MAX_STREAMS, MAX_WORKERS = 256, 64, 16, 64
MAX_SQUARES = 4_000_000
"""Of the dots in each line of TOML, in all: reading a key takes the square of its parts, and a key is on one line."""
RANGE = re.compile(r"\{(\d{1,4000})\.\.(\d{1,4000})\}")


def check_size(raw: Mapping[str, Any]) -> None:
    """Raise SpecError where a raw spec is larger than any that is meant."""
    _check_shape(raw)
    if (size := len(json.dumps(raw, default=str))) > MAX_BYTES:
        raise SpecError(f"it has {size} bytes as JSON; at most {MAX_BYTES}")
    for key, most in (("tables", MAX_TABLES), ("tasks", MAX_TASKS), ("exports", MAX_STREAMS)):
        _check_count(key, len(raw[key]) if isinstance(raw.get(key), dict | list) else 0, most)
    slots = raw.get("slots")
    _check_count("slots", sum(_num_names(entry) for entry in slots) if isinstance(slots, list) else 0, MAX_SLOTS)
    cluster = raw.get("cluster")
    workers = [cluster.get(key) for key in ("trainers", "shards")] if isinstance(cluster, dict) else []
    _check_count("cluster", sum(number for number in workers if isinstance(number, int)), MAX_WORKERS)


def check_lines(toml: str) -> None:
    """Raise SpecError where a spec as TOML could hold keys that take for ever to read."""
    squares = 0
    for number, line in enumerate(toml.split("\n"), 1):
        squares += line.count(".") ** 2
        if squares > MAX_SQUARES:
            raise SpecError(f"too many dots in line {number}, or before it; break long lines", "toml")


def _check_shape(raw: object) -> None:
    """Depth and number of values, without recursion: what is too deep would overflow whatever reads it after us."""
    level, parts = [raw], 0
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        parts += len(level)
        if parts > MAX_PARTS:
            raise SpecError(f"it has more than {MAX_PARTS} values")
        if not level:
            return
    raise SpecError(f"mappings and lists lie in each other more than {MAX_DEPTH} deep")


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_count(key: str, number: int, most: int) -> None:
    if number > most:
        raise SpecError(f"{number} are more than one job may have here; at most {most}", key)


def _num_names(entry: object) -> int:
    if not isinstance(entry, dict):
        return 1
    names = entry.get("names")
    patterns = names if isinstance(names, list) else [entry.get("name")]
    return sum(_num_expanded(pattern) for pattern in patterns)


def _num_expanded(pattern: object) -> int:
    match = RANGE.search(pattern) if isinstance(pattern, str) else None
    return 1 if match is None else max(1, int(match[2]) - int(match[1]) + 1)
