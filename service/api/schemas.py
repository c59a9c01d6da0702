"""Base classes of request and response bodies, whose docstrings are the API's documentation; lists in pages.

A page has at most `limit` entries after a cursor, and the cursor of the next page. Pure."""

import base64
import binascii
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Query
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, WithJsonSchema

from headrace.errors import SpecError

Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
"""Stays the whole number or the float that it is; to a JSON Schema each is a number, and generators of clients make one
type of it."""


class ResponseBody(BaseModel):
    """Base of responses. Fields are described by their docstrings."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class RequestBody(BaseModel):
    """Base of request bodies. Fields are described by their docstrings; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def shown_by(*examples: dict[str, Any]) -> ConfigDict:
    """The configuration of a body with examples for its documentation, which must be valid. Of two, the second is for
    routes without a job.
    """
    return ConfigDict(json_schema_extra={"examples": list(examples)})


JobName = Annotated[str, InPath(description="The job's name.", max_length=64)]


def finite(value: Any) -> Any:
    """`value` for JSON: numbers that are not finite become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): finite(each) for key, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
        case _:
            return value


MAX_LIMIT = 200
DEFAULT_LIMIT = 50
MAX_CURSOR = 400
Item = TypeVar("Item")


class Page(ResponseBody, Generic[Item]):
    """A part of a list."""

    items: list[Item]
    next: str | None
    """The value of `after` for the next page; null on the last page."""


@dataclass(frozen=True, slots=True)
class Paging:
    """The page that a request wants."""

    limit: int = DEFAULT_LIMIT
    after: str | None = None
    """The position in the list after which the page begins; None: at the start."""


async def _paging(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Most entries of the page.")] = DEFAULT_LIMIT,
    after: Annotated[str | None, Query(max_length=MAX_CURSOR, description="`next` of the previous page.")] = None,
) -> Paging:
    return Paging(limit, None if after is None else decoded(after))


Paged = Annotated[Paging, Depends(_paging)]


def encoded(place: str) -> str:
    """A position in a list as a cursor. Clients must not interpret it."""
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def decoded(cursor: str) -> str:
    """The position that a cursor stands for. Raises SpecError."""
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise SpecError(f"{cursor!r} is not a cursor; use `next` of the previous page", "query.after") from None


def number_after(paging: Paging, default: int = 0) -> int:
    """The number that the cursor stands for. Raises SpecError."""
    if paging.after is None:
        return default
    if not paging.after.removeprefix("-").isdecimal() or len(paging.after) > 18:
        raise SpecError("this cursor is of another list; use `next` of the previous page", "query.after")
    return int(paging.after)


def page(items: Sequence[Item], paging: Paging, place_of: Callable[[Item], str]) -> Page[Item]:
    """The page of `items`, which are in list order. `place_of` gives an entry's position: unique and constant.

    If the last entry of the previous page no longer exists, the list starts over.
    """
    begin = 0
    if paging.after is not None:
        places = [place_of(item) for item in items]
        begin = places.index(paging.after) + 1 if paging.after in places else 0
    return cut(items[begin : begin + paging.limit + 1], paging, place_of)


def cut(found: Sequence[Item], paging: Paging, place_of: Callable[[Item], str]) -> Page[Item]:
    """The page of `found`, which has one entry more than the limit if there are further pages."""
    items = list(found[: paging.limit])
    more = len(found) > paging.limit
    return Page(items=items, next=encoded(place_of(items[-1])) if more and items else None)
