"""Builds the metrics of `metrics.own`: classes of the user's, checked against trainer.metrics.custom.Metric."""

import re
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import SpecError
from headrace.trainer.metrics.custom import MAX_SIZE, RESERVED, Metric
from headrace.trainer.models.registry import import_class

NAME = re.compile(r"[a-z][a-z0-9_@]{0,63}")


def own_metrics(paths: Sequence[str], folder: Path) -> tuple[Metric, ...]:
    """The metrics at "package.module:Class", imported from `folder`, the spec's folder. Raises SpecError."""
    found: dict[str, Metric] = {}
    for number, path in enumerate(paths):
        at = f"metrics.own.{number}"
        metric = import_class(path, folder, at)()
        lacks = [name for name in ("add", "value") if not callable(getattr(metric, name, None))]
        name, size = getattr(metric, "name", None), getattr(metric, "size", None)
        if lacks:
            raise SpecError(f"{path} has no method {lacks[0]!r}; see trainer.metrics.custom.Metric", at)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SpecError(f"{path}: its `name` is {name!r}; use small letters, digits and '_', from a letter on", at)
        if name in RESERVED or name in found:
            raise SpecError(f"{path}: there is a measure {name!r} already; give it another `name`", at)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
            raise SpecError(f"{path}: its `size` is {size!r}; a whole number from 1 to {MAX_SIZE:,}", at)
        found[name] = metric
    return tuple(found.values())
