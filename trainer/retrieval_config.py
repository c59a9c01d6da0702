"""The section [retrieval] of a job file: the items of a two-tower model, and where their catalogue is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from headrace.config import Section
from headrace.errors import SpecError
from headrace.text_kinds import TextKind

MODEL = "two_tower"
"""The model that has vectors of users and of items."""
USER_VECTOR = "user_vector"
"""The output of the model that is the user's vector."""
POPULARITY = "popularity.count_DK"
"""The tensor of the model with the counts of items, where their popularity is part of their vectors."""


class ItemsSection(Section):
    """The items that can be retrieved."""

    holds: ClassVar[Mapping[str, TextKind]] = {
        "slot": TextKind.NAME,
        "files": TextKind.PATTERNS,
    }

    slot: str
    """The slot that tells items apart: the first one of `model.settings.item`."""
    files: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...], Field(min_length=1, max_length=1000)
    ]
    """The catalogue: files or globs, relative to the spec's folder, with lines of JSON, plain or compressed, or
    Parquet. Each item has the slots of `model.settings.item`, and may have further fields for filters
    (docs/retrieval.md)."""
    unseen: bool = False
    """Whether items are found, too, whose slot has no row: no event had them yet, or they were forgotten."""


class RetrievalSection(Section):
    """Retrieval of items by replicas, and how its recall is measured as the job learns."""

    items: ItemsSection
    """The items."""
    measure: Annotated[int, Field(ge=0, le=65_536)] = 256
    """Most events of a pass, in each trainer, whose items are looked for in the index before they are learnt from, with
    a positive sample of the first task each; of more, every so-manieth. 0: recall is not measured."""
    at: Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], Field(min_length=1, max_length=8)] = (20, 100)
    """Numbers k of recall@k and hit rate@k, ascending. Gates and charts take the first one."""

    @field_validator("at")
    @classmethod
    def _ascend(cls, at: tuple[int, ...]) -> tuple[int, ...]:
        if list(at) != sorted(set(at)):
            raise ValueError("write the numbers k in ascending order, each once")
        return at


def check_retrieval(section: RetrievalSection | None, model: str | None, settings: Mapping[str, Any]) -> None:
    """Raise SpecError where the model has no such items. `settings` are the model's, which were checked."""
    if section is None:
        return
    if model != MODEL:
        raise SpecError(f'retrieval needs vectors of items: model.name = "{MODEL}"', "retrieval")
    first = item_slots_of(settings)[0]
    if section.items.slot != first:
        raise SpecError(
            f"{section.items.slot!r} does not tell items apart; the first slot of model.settings.item does: {first!r}",
            "retrieval.items.slot",
        )


def describe_retrieval(section: RetrievalSection | None, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of model.json by which replicas and exports retrieve items. It names no file of the job's machine."""
    if section is None:
        return None
    popularity = {"popularity": POPULARITY} if settings.get("popularity") else {}
    return popularity | {
        "slot": section.items.slot,
        "item_slots": item_slots_of(settings),
        "unseen": section.items.unseen,
        "user_vector": USER_VECTOR,
        "item_vector": "item_vector",
    }


def catalogue_files(section: RetrievalSection | None, folder: Path) -> tuple[str, ...]:
    """The files of the catalogue on the job's machine, or globs of them. `folder`: the spec's."""
    return () if section is None else tuple(str(folder / each) for each in section.items.files)


def item_slots_of(settings: Mapping[str, Any]) -> list[str]:
    """The slots of the item in the settings of the model."""
    given = settings["item"]
    return [given] if isinstance(given, str) else list(given)
