"""The settings that a new job tries, and a job under those that it chose. Pure; service.cluster.tuning tries them.

Only keys that the job file leaves out are tried. Values are multiples of the defaults in force.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.config import set_key, validate
from headrace.errors import SpecError
from headrace.pserver.config import OF_ROWS, TableSection
from headrace.service.spec.job import LoadedJob, with_raw
from headrace.trainer.spec.defaults import may_follow_events

Keys = Mapping[str, Any]
"""Values by the path of their key."""
AS_IT_IS = "as it is"
"""Name of the job file's own setting."""
MIN_BATCH, MIN_DIM = 16, 4


def with_keys(raw: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The spec with other values. Raises SpecError."""
    found = copy.deepcopy(dict(raw))
    for path, value in keys.items():
        set_key(found, path, value)
    return found


def under_choice(job: LoadedJob, chosen: Mapping[str, Any] | None) -> LoadedJob:
    """The job with a choice (TuningChoice as JSON), whose values hold where its file sets none. Raises SpecError."""
    if chosen is None:
        return job
    whole = with_keys(job.whole(), {"tuning.chosen": chosen})
    best = chosen["tried"][0].get("keys", {})
    holds = {path: value for path, value in best.items() if _holds(job, path, best)}
    whole = with_keys(whole, holds)
    refused = [path for path in holds if path.endswith(".in_batch") and not _may_follow_events(job, whole, path)]
    whole = with_keys(whole, dict.fromkeys(refused, False))
    return with_raw(job, whole)


def _holds(job: LoadedJob, path: str, best: Keys) -> bool:
    """Whether a chosen value holds: not of a table that the file no longer has, nor of another kind of optimizer."""
    of_path = f"{path.rpartition('.')[0]}.kind"
    if path.startswith("tables.") and path.split(".")[1] not in job.spec.tables:
        return False
    kinds = of_path, of_path.replace(".first_order_optimizer.", ".optimizer.")  # a table has one kind
    fits = all((own := value_at(job.raw, kind)) in (None, best.get(kind, own)) for kind in kinds)
    return fits and not is_set(job.raw, path)


def _may_follow_events(job: LoadedJob, whole: Mapping[str, Any], path: str) -> bool:
    """Whether a chosen `in_batch` is possible beside what the file says now."""
    name = path.split(".")[1]
    try:
        return may_follow_events(job.spec, validate(TableSection, whole["tables"][name]))
    except SpecError:
        return False


def is_set(raw: Any, path: str) -> bool:
    """Whether a spec as written has the key."""
    return value_at(raw, path) is not None


def says_how_rows_learn(job: LoadedJob, table: str) -> bool:
    """Whether the job file has a key of a table by which its rates do not follow from the number of slots."""
    return not OF_ROWS.isdisjoint(value_at(job.raw, f"tables.{table}") or ())


def value_at(raw: Any, path: str) -> Any:
    """The value of a key of a spec as written; None where it has none."""
    for name in path.split("."):
        if not isinstance(raw, Mapping) or name not in raw:
            return None
        raw = raw[name]
    return raw


def settings_to_try(job: LoadedJob) -> dict[str, Keys]:
    """By name, the settings that a new job may try, the job as it is first, the most promising ones next."""
    found: dict[str, Keys] = {AS_IT_IS: {}}
    for name, axis, factor in DESIGN:
        keys = dict(axis(job, factor))
        if keys and keys not in found.values():
            found[name] = keys
    return found


def _row_rates(job: LoadedJob, factor: float) -> Iterator[tuple[str, Any]]:
    """Where a table says nothing of how its rows learn, with all that follows from the number of slots: one key of
    OF_ROWS takes the others from their classes.
    """
    for name, table in job.spec.tables.items():
        by_slots = not says_how_rows_learn(job, name)
        if by_slots:
            yield f"tables.{name}.grad_scale", table.grad_scale
            yield f"tables.{name}.in_batch", table.in_batch
        for part in ("optimizer", "first_order_optimizer"):
            if (section := getattr(table, part)) is not None:
                yield from _rate(job, f"tables.{name}.{part}", section, factor)
                if by_slots and section.kind == "adagrad":
                    yield f"tables.{name}.{part}.initial", section.initial


def _dense_rate(job: LoadedJob, factor: float) -> Iterator[tuple[str, Any]]:
    yield from _rate(job, "dense.optimizer", job.spec.dense.optimizer, factor)


def _rate(job: LoadedJob, path: str, section: Any, factor: float) -> Iterator[tuple[str, Any]]:
    """The rate of an optimizer, with its kind where the file says nothing of it."""
    if is_set(job.raw, f"{path}.lr"):
        return
    if not is_set(job.raw, f"{path}.kind"):
        yield f"{path}.kind", section.kind
    yield f"{path}.lr", float(f"{section.lr * factor:.3g}")


def _batch_size(job: LoadedJob, factor: float) -> Iterator[tuple[str, Any]]:
    if not is_set(job.raw, "train.batch_size"):
        yield "train.batch_size", max(MIN_BATCH, int(job.spec.train.batch_size * factor))


def _dims(job: LoadedJob, factor: float) -> Iterator[tuple[str, Any]]:
    for name, table in job.spec.tables.items():
        if table.dim and not is_set(job.raw, f"tables.{name}.dim"):
            yield f"tables.{name}.dim", max(MIN_DIM, int(table.dim * factor))


Axis = Callable[[LoadedJob, float], Iterator[tuple[str, Any]]]
DESIGN: tuple[tuple[str, Axis, float], ...] = (
    ("row rates x 2.5", _row_rates, 2.5),
    ("row rates / 2.5", _row_rates, 0.4),
    ("batch / 4", _batch_size, 0.25),
    ("dense rate / 3", _dense_rate, 1 / 3),
    ("dense rate x 3", _dense_rate, 3.0),
    ("dim / 2", _dims, 0.5),
    ("batch x 4", _batch_size, 4.0),
    ("dim x 2", _dims, 2.0),
    ("row rates x 6", _row_rates, 6.0),
    ("row rates / 6", _row_rates, 1 / 6),
)
"""Name, keys and factor of each setting."""
