"""Paths of resources in the REST API."""

from urllib.parse import quote

from headrace.errors import SpecError


def path_of(*parts: str) -> str:
    """The path of a resource; a part cannot lead to another resource. Raises SpecError."""
    for part in parts:
        if part in ("", ".", ".."):
            raise SpecError(f"{part!r} is not a name")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
