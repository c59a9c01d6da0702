"""Paths of the REST API. Apart from its client, which needs httpx: every command imports this module."""

from urllib.parse import quote

from headrace.errors import SpecError


def path_of(*parts: str) -> str:
    """The path of a resource; a part cannot lead to another resource. Raises SpecError."""
    return "/v1/" + "/".join(map(quoted, parts))


def quoted(part: str) -> str:
    """A part of a path. Raises SpecError."""
    if part in ("", ".", ".."):
        raise SpecError(f"{part!r} is not a name")
    return quote(part, safe="")
