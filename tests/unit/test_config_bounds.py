"""Every number that a section takes has bounds: walked over all sections, so that a new field is looked at, too."""

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from headrace.config import Section
from headrace.dataset.sources.simulated import SimulatedSource
from headrace.errors import SpecError
from headrace.service.api.schemas import RequestBody
from headrace.service.spec.job import load_job
from headrace.trainer.replica.http_api import Rollback

ROOT = Path(__file__).parents[2]
NEWS = ROOT / "tests" / "golden" / "news.toml"
SECTIONS_BESIDE_CONFIG = (
    "headrace.service.spec.job",
    "headrace.trainer.models.settings",
    "headrace.trainer.exports.export_messages",
    "headrace.trainer.exports.exporter_process",
    "headrace.dataset.__main__",
    "headrace.service.kubernetes.pod_settings",
    "headrace.service.planning.cross_choice",
    "headrace.service.planning.job_features",
    "headrace.service.predict.evaluator",
)
BODIES = (
    "headrace.service.api.admin",
    "headrace.service.api.commits",
    "headrace.service.api.exports",
    "headrace.service.api.jobs",
    "headrace.service.api.tables",
)

WRONG: dict[type, tuple[float, ...]] = {int: (-1, 2**64), float: (-1.0, 1e308, math.inf, -math.inf, math.nan)}
MAY: dict[str, tuple[float, str]] = {
    "Bounds.low": (-1.0, "weights may be below 0"),
    "Bounds.high": (-1.0, "weights may be below 0"),
    "FeatureKeys.scale": (-1.0, "a factor may turn the sign"),
    "FeatureKeys.buckets": (-1.0, "values of events may be below 0"),
    "FeatureKeys.default": (-1, "values of events may be below 0"),
    "ShardProcess.histories": (-1, "windows below 0 are half-lives"),
    "Counters.windows_s": (-1, "windows below 0 are half-lives"),
}
"""Fields that accept one of these numbers, and why."""
FREE = {
    "KafkaSource.options": "kafka-python's own options, which it checks",
    "KafkaInput.options": "likewise",
    "ModelSection.settings": "checked by the model's own section, see trainer.models",
    "PredictionRequest.spec": "checked as a spec",
    "WorkerConfig.job": "checked as a spec",
    "WorkerConfig.secrets": "parts of that spec",
    "SideConfig.job": "checked as a spec",
    "SideConfig.secrets": "parts of that spec",
    "SuggestConfig.job": "checked as a spec",
    "SuggestConfig.secrets": "parts of that spec",
    "EvaluatorConfig.spec": "checked as a spec",
    "PredictWorker.job": "checked as a spec",
    "PredictWorker.uploaded": "read as the manifest of a commit",
    "NodeTerms.nodeSelectorTerms": "Kubernetes' own, checked by its API server",
    "PreferredNodes.preference": "likewise",
    "PodTerm.labelSelector": "likewise",
    "SpreadConstraint.labelSelector": "likewise",
    "Volume.source": "likewise",
    "ExportRequest.facts": "copied into the manifest",
    "Fake.anything": "of this test",
}
"""Fields of any type, and where they are checked."""

Shape = Callable[[float], object]
"""Puts a number to where the field's type has one."""


def sections() -> list[type[BaseModel]]:
    for package in ("", "dataset", "pserver", "trainer", "service"):
        for path in sorted((ROOT / "headrace" / package).rglob("config.py")):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for name in (*SECTIONS_BESIDE_CONFIG, *BODIES):
        importlib.import_module(name)
    found = {each.__name__: each for base in (Section, RequestBody) for each in below(base)} | {"Rollback": Rollback}
    return [found[name] for name in sorted(found)]


def below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        if not each.__module__.startswith("tests"):
            yield each
            yield from below(each)


def numbers(annotation: Any) -> Iterator[tuple[type, Shape]]:
    """Every number of a type, with what is around it; of mappings the values."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if annotation in WRONG:
        yield annotation, lambda value: value
    elif origin is Annotated:
        yield from numbers(inside[0])
    elif origin in (Union, UnionType):
        for each in inside:
            yield from numbers(each)
    elif origin in (tuple, list):
        length = 1 if inside[-1] is Ellipsis or origin is list else len(inside)
        for kind, shape in numbers(inside[0]):
            yield kind, lambda value, shape=shape: [shape(value)] * length
    elif origin is dict:
        for kind, shape in numbers(inside[1]):
            yield kind, lambda value, shape=shape: {"0": shape(value)}


def holds_anything(annotation: Any) -> bool:
    return annotation is Any or any(holds_anything(each) for each in get_args(annotation))


def accepts(model: type[BaseModel], name: str, value: object) -> bool:
    """Whether the field takes the value, whatever else the model misses."""
    try:
        model.model_validate_json(json.dumps({name: value}), strict=True)
    except ValidationError as error:
        return not any(problem["loc"][:1] == (name,) for problem in error.errors())
    return True


def unbounded(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        declared = next(each for each in reversed(model.__mro__) if name in getattr(each, "model_fields", {}))
        path = f"{declared.__name__}.{name}"
        if holds_anything(field.annotation) and path not in FREE:
            yield f"{path} takes anything"
        for kind, shape in numbers(field.annotation):
            for value in WRONG[kind]:
                if accepts(model, field.alias or name, shape(value)) and MAY.get(path, (None,))[0] != value:
                    yield f"{path} accepts {value}"


@pytest.mark.parametrize("model", sections(), ids=lambda model: model.__name__)
def test_every_number_of_a_section_has_bounds(model):
    assert not list(unbounded(model)), "give the field a type of headrace.config with bounds, or say in MAY why it may"


def test_the_walk_finds_what_has_no_bounds():
    class Fake(BaseModel):
        count: int
        pair: tuple[float, float] | None = None
        by_name: dict[str, int] = {}
        anything: Any = None
        named: str = ""

    found = {told.split()[0] for told in unbounded(Fake)}
    assert found == {"Fake.count", "Fake.pair", "Fake.by_name"}


def test_every_exception_is_one():
    models = {model.__name__: model for model in sections()}
    for path, (value, _) in MAY.items():
        model, name = path.split(".")
        shapes = [shape for _, shape in numbers(models[model].model_fields[name].annotation)]
        taken = any(accepts(models[model], name, shape(value)) for shape in shapes)
        assert taken, f"{path} does not accept {value} any more"
    for path in set(FREE) - {"Fake.anything"}:
        model, name = path.split(".")
        assert holds_anything(models[model].model_fields[name].annotation), f"{path} has a type now"


SIMULATED = 'sources={{s={{kind="simulated",{}}}}}'
TOO_LARGE = {
    "passes.wait=-5.0": "passes.wait: Input should be greater than or equal to 0 (got -5.0)",
    "commit.every=-1e308": "commit.every: Input should be greater than or equal to 0 (got -1e+308)",
    "sources.impressions.max_event_bytes=-1": (
        "sources.impressions.max_event_bytes: Input should be greater than or equal to 0 (got -1)"
    ),
    SIMULATED.format(f"events=10,users={2**64}"): (
        f"sources.s.users: Input should be less than or equal to 4294967296 (got {2**64})"
    ),
    SIMULATED.format("events=100000000000,item_life=1,items=4294967296"): (
        "sources.s: numbers of users or items exceed 63 bits: raise item_life, or lower users and items"
    ),
}


@pytest.mark.parametrize("override", TOO_LARGE)
def test_a_number_beyond_its_bounds_is_refused_by_its_key(override):
    with pytest.raises(SpecError) as refused:
        load_job(NEWS, [override])
    assert str(refused.value) == TOO_LARGE[override]


def test_the_numbers_of_a_wide_simulated_stream_fit():
    wide = {"events": 100_000_000_000, "users": 1 << 32, "items": 1 << 32, "item_life": 1_000}
    assert SimulatedSource(kind="simulated", **wide).users == 1 << 32
