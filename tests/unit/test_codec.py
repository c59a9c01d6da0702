"""Typed values come back from JSON as they were; data that is no value of a class names the field."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import NotUnderstood, packed, plain, typed, unpacked, written


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    ends: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Whole:
    parts: Sequence[Part]
    by_group: Mapping[int, float | None]
    facts: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False


PARTS = st.builds(Part, st.text(), st.tuples(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 5)))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
WHOLES = st.builds(
    Whole, st.lists(PARTS), st.dictionaries(st.integers(-1, 1 << 40), NUMBERS | st.none()), last=st.booleans()
)


@given(WHOLES)
def test_a_value_comes_back_from_json_as_it_was(whole):
    assert typed(Whole, json.loads(json.dumps(plain(whole))), "it") == whole


def test_fields_of_a_newer_program_are_ignored():
    assert typed(Part, {"name": "a", "ends": [0, 1], "newer": 5}, "it") == Part("a", (0, 1))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"parts": [], "by_group": {"x": 1.0}}, "Expected `int`, got `str` - at `key` in `$.by_group`"),
        ({"parts": [{"name": "a"}], "by_group": {}}, "missing required field `ends` - at `$.parts[0]`"),
        ({"parts": [{"name": 5, "ends": [0, 1]}], "by_group": {}}, "Expected `str`, got `int` - at `$.parts[0].name`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_other_data_is_refused_by_the_field(data, said):
    with pytest.raises(NotUnderstood) as caught:
        typed(Whole, data, "commit-7")
    assert str(caught.value).startswith("commit-7: ") and said in str(caught.value)


def test_subclasses_of_plain_types_are_taken():
    assert plain(Whole([], {}, MappingProxyType({"a": 1, "b": np.float64(0.1)})))["facts"] == {"a": 1, "b": 0.1}


def test_the_owner_of_the_data_gives_the_error():
    with pytest.raises(ValueError, match="it: Object missing required field `name`"):
        typed(Part, {}, "it", ValueError)


class Later(msgspec.Struct, frozen=True, omit_defaults=True):
    """A class whose fields came one after the other."""

    always: int | None = written(None)
    sometimes: int | None = None


def test_a_default_may_be_written_or_left_out():
    assert plain(Later()) == {"always": None} and plain(Later(sometimes=3)) == {"always": None, "sometimes": 3}
    assert typed(Later, {}, "it") == Later()


def test_a_value_without_a_form_as_json_is_a_bug():
    with pytest.raises(TypeError, match="a object has no form as JSON"):
        plain(Whole([], {}, {"a": object()}))


def test_a_packed_value_comes_back_and_its_path_is_absolute(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Asked:
        folder: Path
        by_group: Mapping[int, int]

    monkeypatch.chdir(tmp_path)
    asked = Asked(Path("a"), {3: 1 << 63})
    assert unpacked(Asked, packed(asked), "asked") == Asked(tmp_path / "a", {3: 1 << 63})
    with pytest.raises(NotUnderstood, match=r"asked: .*by_group"):
        unpacked(Asked, packed({"folder": "a"}), "asked")
