"""Defaults of the job spec, in numbered sets: a store continues with the set that it began with.

A logged spec has every key, and the number of its set. Specs logged before sets had numbers left defaults out; they use
set 1. `defaults_<n>.json` is set n, frozen, by class of the spec's models and key. A later key is in no frozen set and
takes the default of its class, unless older stores need another one. To change a default: freeze the newest set as the
file of its number, raise NEWEST_DEFAULTS, and change the class. From set 5 on, a table without an optimizer gets rates
by the number of slots (`rows_learn`). Imports no torch.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.config import GrownSection, Section, validate
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.config import OF_ROWS, TableSection, extends
from headrace.pserver.row_optimizers import Adagrad
from headrace.renamed_keys import with_present_names
from headrace.trainer.config import NEWEST_DEFAULTS, ModelSection, TrainerJob
from headrace.trainer.models.registry import MODELS, settings_of

FIRST = 1
"""The set of a logged or committed spec without a number."""
RATES_BY_SLOTS = 5
"""The first set in which the rates of rows follow from the number of slots."""
MIN_SLOTS = 6
"""Fewer slots have the rates of so many."""
LATER_OF_CLUSTER: Mapping[str, Any] = {
    **{"interface": "lo", "listen": "127.0.0.1:0", "trust_interface": False},
    **{"launcher": "local", "node_timeout": 30.0, "ray_address": None, "wire": "float32"},
    "resources": {role: {"cores": 1.0, "memory": 0, "gpus": 0} for role in ("trainer", "shard")},
}
"""Defaults of the keys of `cluster`, a section of the service, that older logged specs lack in every set."""
MAX_REMEMBERED = 64
"""Size of the cache of full specs: a replay needs a few of them again and again."""

Frozen = Mapping[str, Mapping[str, Any]]
"""Defaults by class and key."""


def fill_defaults(spec: Mapping[str, Any], *, unset: int = FIRST) -> dict[str, Any]:
    """A spec with every default written out, and the number of its set; `unset`: the set of a spec without a number.

    Sections that trainers do not know are unchanged. A spec that is invalid in this version gets no defaults; its
    renamed keys have their present names.
    """
    return documents.parse_object(_in_full(json.dumps(spec, default=str), unset), "a spec")


def unwritten_defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of later keys, which no full spec has where they are not set, by the path of the key."""
    try:
        return dict(_unwritten(validate(TrainerJob, spec, only_known=True), ""))
    except SpecError:
        return {}


def _unwritten(value: object, path: str) -> Iterator[tuple[str, Any]]:
    match value:
        case Section():
            fields = type(value).model_fields
            for name in value.later if isinstance(value, GrownSection) else ():
                if getattr(value, name) == fields[name].default:
                    yield f"{path}{name}", fields[name].default
            for name, field in fields.items():
                yield from _unwritten(getattr(value, name), f"{path}{field.alias or name}.")
        case Mapping():
            for name, part in value.items():
                yield from _unwritten(part, f"{path}{name}.")


@lru_cache(MAX_REMEMBERED)
def _in_full(text: str, unset: int) -> str:
    spec = documents.parse_object(text, "a spec")
    number = spec.get("defaults") or unset
    try:
        spec, _ = with_present_names(spec, TrainerJob.renamed)
        job = validate(TrainerJob, {**spec, "defaults": number}, only_known=True)
        full = _written_out(job, job.model_dump(mode="json", by_alias=True), frozen(number))
    except SpecError:
        return json.dumps(spec)
    if number >= RATES_BY_SLOTS:
        chosen = job.crosses.chosen if job.crosses.choose != "off" else None
        by = chosen.first_order_rate if chosen is not None else 1.0
        learn = rows_learn(len(Schema.of(job.slots).uncrossed.sparse), by)
        for name, table in job.tables.items():
            if learns_by_slots(table):
                full["tables"][name] |= learn
                if not table.first_order:
                    full["tables"][name]["first_order_optimizer"] = None
                if not (table.in_batch if "in_batch" in table.model_fields_set else may_follow_events(job, table)):
                    del full["tables"][name]["in_batch"]
    rest = {name: section for name, section in spec.items() if name not in full}
    cluster = frozen(number).get("ClusterSection", {})
    if cluster or "cluster" in rest:
        rest["cluster"] = {**LATER_OF_CLUSTER, **cluster, **rest.get("cluster", {})}
    return json.dumps({**full, **rest})


def rows_learn(num_slots: int, by: float = 1.0) -> dict[str, Any]:
    """How rows learn, by the number of sparse slots, in a table that does not say it. `by` multiplies the rate of
    first-order weights: what the job has chosen by its first samples.

    A sample moves one row of each slot at once, and their sum is the prediction: first-order weights take steps of
    1 / sqrt(slots). Vectors meet in pairs, each with all others: 1 / slots. The accumulators begin above 0, so a first
    step is as long as its error is large. trainer/README.md has the measurements.
    """
    num = max(num_slots, MIN_SLOTS)
    vector = Adagrad(lr=_two_digits(0.4 / num), initial=0.1)
    first_order = Adagrad(lr=_two_digits(by * _two_digits(0.4 / num**0.5)), initial=1.0)
    return {
        "optimizer": vector.model_dump(mode="json"),
        "first_order_optimizer": first_order.model_dump(mode="json"),
        "grad_scale": "sum",
        "in_batch": True,
    }


def learns_by_slots(table: TableSection) -> bool:
    """Whether a table says nothing of how its rows learn, so that it follows from the number of slots."""
    return not OF_ROWS & table.model_fields_set


def may_follow_events(job: TrainerJob, table: TableSection) -> bool:
    """Whether a table of the job may have `in_batch`: trainers learn on rows of the shards, with a whole model."""
    has_logits = any(task.loss != "softmax" for task in job.tasks)
    whole = job.train.mode != "geo" and job.dense.strategy != "pipeline"
    return table.first_order and not extends(table) and whole and has_logits


def _two_digits(rate: float) -> float:
    return float(f"{rate:.2g}")


@cache
def frozen(number: int) -> Frozen:
    """The frozen defaults of a set; empty for the newest set, which is in the classes."""
    if number == NEWEST_DEFAULTS:
        return {}
    return documents.read_object(Path(__file__).with_name(f"defaults_{number}.json"))


def _written_out(section: Section, dumped: dict[str, Any], table: Frozen) -> dict[str, Any]:
    """All keys of a section; `dumped` is the section as JSON."""
    for name, field in type(section).model_fields.items():
        key = field.alias or name
        if key not in dumped:  # a key of features that is not set
            continue
        default = next((table[c.__name__] for c in type(section).__mro__ if key in table.get(c.__name__, ())), {})
        if name not in section.model_fields_set and key in default:
            dumped[key] = default[key]
        else:
            dumped[key] = _value(getattr(section, name), dumped[key], table)
    if isinstance(section, ModelSection) and section.name is not None and section.name in MODELS.names():
        settings = settings_of(section)
        dumped["settings"] = _written_out(settings, settings.model_dump(mode="json", by_alias=True), table)
    return dumped


def _value(value: object, dumped: Any, table: Frozen) -> Any:
    match value:
        case Section():
            return _written_out(value, dumped, table)
        case Mapping():
            return {name: _value(part, dumped[str(name)], table) for name, part in value.items()}
        case tuple():
            return [_value(part, dump, table) for part, dump in zip(value, dumped, strict=True)]
    return dumped
