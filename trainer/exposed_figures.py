"""How a figure names its metric of /metrics, as part of the type of its field."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

Number = int | float


class Exposed(Struct, frozen=True, kw_only=True):
    """The metric of a field, as part of its type. Fields of a class may share a metric, with different labels."""

    name: str
    """Without "_total"."""
    help: str
    kind: str
    """"counter", "gauge" or "histogram"."""
    by: tuple[str, ...] = ()
    """The labels that name the entries of a mapping, from the outermost one on."""
    labels: Mapping[str, str] = {}
    """Further labels, with their values."""
    value: Callable[[Any], Number | str | None] | None = None
    """The number in a value of the field, which may be null; None: there is no sample. By default it is the value."""
    after: str | None = None
    """The metric that this one follows in /metrics, if that is not the metric of the field before."""


class Entries(Struct, frozen=True):
    """Part of the type of a mapping of parts that have metrics: the labels that name its entries."""

    by: tuple[str, ...]


def counter(name: str, text: str, *by: str, **more: Any) -> Exposed:
    """A number that grows until the process that counts restarts."""
    return Exposed(name=name, help=text, kind="counter", by=by, **more)


def gauge(name: str, text: str, *by: str, **more: Any) -> Exposed:
    """A number at this moment."""
    return Exposed(name=name, help=text, kind="gauge", by=by, **more)


def histogram(name: str, text: str) -> Exposed:
    """Numbers in buckets, of a LearningDelay."""
    return Exposed(name=name, help=text, kind="histogram")


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(values: object) -> dict[str, Number]:
    """The entries of a mapping that are numbers."""
    return {str(key): each for key, each in values.items() if is_number(each)} if isinstance(values, Mapping) else {}
