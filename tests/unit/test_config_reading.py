"""Reading TOML with overrides, and the units of durations and sizes."""

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, create_model

from headrace.config import (
    DURATION_S,
    SIZE_BYTES,
    Duration,
    Section,
    Size,
    load_toml,
    parse_duration,
    parse_size,
    parse_value,
    validate,
)
from headrace.errors import SpecError


@pytest.fixture
def read(tmp_path):
    def read(text, *overrides):
        (tmp_path / "job.toml").write_text(text)
        return load_toml(tmp_path / "job.toml", overrides)

    return read


def test_overrides_may_be_in_a_file_in_their_order(read, tmp_path):
    file = tmp_path / "more.json"
    file.write_text(json.dumps(["a.b=2", "a.c=[1, 2]", "d=x\ny"]))
    assert read("[a]\nb = 1\n", "a.b=7", f"@{file}", "a.c=3") == {"a": {"b": 2, "c": 3}, "d": "x\ny"}
    for text, words in (("{}", "is not a JSON list of texts"), ("[1]", "is not a JSON list"), ("x", "is not JSON")):
        file.write_text(text)
        with pytest.raises(SpecError, match=words):
            read("a = 1", f"@{file}")
    with pytest.raises(SpecError, match=r"--set @.*absent cannot be read"):
        read("a = 1", f"@{tmp_path / 'absent'}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("1s", 1.0), ("1.5s", 1.5), ("2m", 120.0), ("24h", 86400.0), ("7d", 604800.0)],
)
def test_durations_are_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "size"), [("7B", 7), ("64KiB", 65536), ("512MiB", 512 << 20), ("0.5GiB", 512 << 20)])
def test_sizes_are_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "-5s", "5S", "1e3s", "5s ", "٥s5s", 5, 5.0, None, True, ["5s"]])
def test_what_is_no_duration_says_how_one_is_written(text):
    with pytest.raises(ValueError, match="is not of the form '30s'; units are ms, s, m, h, d"):
        parse_duration(text)


def test_a_duration_or_size_beyond_all_numbers_is_none():
    with pytest.raises(ValueError, match="is too large"):
        parse_duration("9" * 400 + "s")
    with pytest.raises(ValueError, match="is too large"):
        parse_size("9" * 400 + "B")


@pytest.mark.parametrize("text", ["512MB", "512", "MiB", 512])
def test_what_is_no_size_says_how_one_is_written(text):
    with pytest.raises(ValueError, match="is not of the form '512MiB'; units are B, KiB, MiB, GiB, TiB"):
        parse_size(text)


@given(st.integers(0, 10**6), st.sampled_from(sorted(DURATION_S)))
def test_every_unit_of_time_multiplies(number, unit):
    assert parse_duration(f"{number}{unit}") == number * DURATION_S[unit]


@given(st.integers(0, 10**6), st.sampled_from(sorted(SIZE_BYTES)))
def test_every_unit_of_size_multiplies(number, unit):
    assert parse_size(f"{number}{unit}") == number * SIZE_BYTES[unit]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=2", {"a": {"b": 2}}),
        ("a.b=true", {"a": {"b": True}}),
        ('a.b="2"', {"a": {"b": "2"}}),
        ("a.b=1s", {"a": {"b": "1s"}}),  # no TOML: plain text
        ("a.b=x=y", {"a": {"b": "x=y"}}),
        ("a.b=", {"a": {"b": ""}}),
        ("a.b=[1, 2]", {"a": {"b": [1, 2]}}),
        ("a={c = 1}", {"a": {"c": 1}}),
        ("new.deep.key=1", {"a": {"b": 1}, "new": {"deep": {"key": 1}}}),
    ],
)
def test_an_override_takes_the_place_of_a_value(read, override, value):
    assert read("a.b = 1", override) == value


def test_lists_are_indexed_by_number(read):
    assert read("[[s]]\nd = 1\n[[s]]\nd = 2\n", "s.1.d=3", "s.0={}") == {"s": [{}, {"d": 3}]}


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 5000])
def test_a_value_that_python_does_not_read_is_its_text(text):
    assert parse_value(text) == text


def test_a_file_with_a_number_that_python_does_not_read_is_told(read):
    with pytest.raises(SpecError, match="not TOML"):
        read("a = " + "9" * 5000)


def test_a_later_override_wins(read):
    assert read("", "a=1", "a=2") == {"a": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a", "--set 'a' is not of the form a.b=value"),
        ("=1", "--set '=1' is not of the form a.b=value"),
        ("a.b.c=1", "a.b.c: cannot be set: its parent holds a plain value"),
        ("a.b.c.d=1", "a.b.c: cannot be set: its parent holds a plain value"),
        ("s.2.d=1", "s.2: is a list of 1; name an entry by its number from 0"),
        ("s.x=1", "s.x: is a list of 1; name an entry by its number from 0"),
        *(
            (f"s.{n}.d=1", f"s.{n}: is a list of 1; name an entry by its number from 0")
            for n in ("00", "²", "٠", "9" * 5000)
        ),
        ("s.-1=1", "s.-1: is a list of 1; name an entry by its number from 0"),
    ],
)
def test_an_override_without_a_place_is_told(read, override, message):
    with pytest.raises(SpecError) as caught:
        read("a.b = 1\n[[s]]\nd = 1\n", override)
    assert str(caught.value) == message


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"job\.toml: no such file"):
        load_toml(tmp_path / "job.toml")


def test_a_folder_is_no_spec(tmp_path):
    with pytest.raises(SpecError, match="cannot be read: "):
        load_toml(tmp_path)


def test_text_that_is_no_toml_is_told_with_its_line(read):
    with pytest.raises(SpecError, match=r"not TOML: .*at line 2, column"):
        read("a = 1\nb = = 2\n")


def test_bytes_that_are_no_utf_8_are_told(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(SpecError, match="cannot be read: 'utf-8'"):
        load_toml(tmp_path / "job.toml")


class Left(Section):
    """One alternative."""

    kind: Literal["left"]
    size: Size = 1


class Right(Section):
    """The other."""

    kind: Literal["right"] = "right"
    left: int = 0
    parts: tuple[Left, ...] = ()


class Empty(Section):
    """No keys."""


class Whole(Section):
    """A spec in small."""

    one: Annotated[Left | Right, Field(discriminator="kind")] = Right()
    by_name: dict[str, Annotated[Left | Right, Field(discriminator="kind")]] = {}
    maybe: Left | None = None
    empty: Empty = Empty()
    wait: Duration = 1.0
    of: str | Annotated[tuple[str, ...], Field(min_length=1)] = "a"
    lengths: tuple[Duration | Literal["all"], ...] = ()
    begins_as: ClassVar[Mapping[str, str]] = {"twin": "one"}
    twin: Annotated[Left | Right, Field(discriminator="kind")] | None = None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"one": {"kind": "right", "left": "x"}}, "one.left: Input should be a valid integer (got 'x')"),
        ({"one": {"kind": "right", "parts": [{"kind": "left", "siz": 1}]}},
         "one.parts.0.siz: unknown key; did you mean 'size'? known here: kind, size"),
        ({"by_name": {"left": {"kind": "left", "x": 1}}}, "by_name.left.x: unknown key; known here: kind, size"),
        ({"by_name": {"b": {}}}, "by_name.b.kind: is missing; one of 'left', 'right'"),
        ({"maybe": {"kind": "left", "x": 1}}, "maybe.x: unknown key; known here: kind, size"),
        ({"maybe": {"kind": "right"}}, "maybe.kind: Input should be 'left' (got 'right')"),
        ({"empty": {"x": 1}}, "empty.x: unknown key; no key is known here"),
        ({"wait": None}, "wait: None is not of the form '30s'; units are ms, s, m, h, d"),
        ({"one": {"left": 1, "size": "1KiB", "kind": "right"}},
         "one.size: is a key of kind = 'left', which is not set here"),
        ({"of": []}, "of: The list should have at least 1 item after validation, not 0"),
        ({"of": [1]}, "of.0: Input should be a valid string (got 1)"),
        ({"of": 1}, "of: Input should be a valid string (got 1)\nof: is a list, written [..., ...] (got 1)"),
        ({"lengths": ["1x"]}, "lengths.0: '1x' is not of the form '30s'; units are ms, s, m, h, d\n"
         "lengths.0: Input should be 'all' (got '1x')"),
        ({"by_name": []}, "by_name: is a section with keys of its own (got [])"),
    ],
)  # fmt: skip
def test_the_path_of_a_mistake_is_the_writers(raw, message):
    with pytest.raises(SpecError) as caught:
        validate(Whole, raw)
    assert str(caught.value) == message


def test_a_section_without_a_kind_has_that_of_its_default_and_begins_as_the_section_says():
    assert validate(Whole, {"one": {"left": 7}}).one == Right(left=7)
    assert validate(Whole, {"twin": {"left": 7}}).twin == Right(left=7)
    found = validate(Whole, {"one": {"kind": "left", "size": "1KiB"}, "twin": {}})
    assert found.one == found.twin == Left(kind="left", size=1024)
    assert validate(Whole, {"one": {"kind": "left", "size": "1KiB"}, "twin": {"kind": "right"}}).twin == Right()
    with pytest.raises(SpecError, match=r"^by_name.b.kind: is missing"):
        validate(Whole, {"by_name": {"b": {"size": "1KiB"}}})


def test_a_reader_of_some_sections_may_drop_the_others():
    assert validate(Whole, {"wait": "2s", "other": 1}, only_known=True).wait == 2.0
    with pytest.raises(SpecError, match="other: unknown key"):
        validate(Whole, {"other": 1})


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Whole().wait = 2.0


def test_a_section_survives_its_own_dump():
    whole = validate(Whole, {"one": {"kind": "left", "size": "1KiB"}, "wait": "2s"})
    assert validate(Whole, whole.model_dump(mode="json")) == whole


class Described(Section):
    """A section."""

    length: int = Field(3, alias="len")
    """In metres,
    at rest."""
    plain: int = 0


class Inherits(Described):
    """A later one."""

    plain: int = 1
    """Of its own."""


def test_a_schema_has_the_docstrings_of_keys_and_of_those_inherited():
    keys = Inherits.model_json_schema()["properties"]
    assert keys["len"]["description"] == "In metres,\nat rest." and keys["plain"]["description"] == "Of its own."
    assert "description" not in Described.model_json_schema()["properties"]["plain"]


def test_a_section_whose_source_is_not_there_has_a_schema():
    made = create_model("Made", __base__=Section, kind=(int, 1))
    typed = type("Typed", (Described,), {"__module__": "nowhere"})
    assert "description" not in made.model_json_schema()["properties"]["kind"]
    assert typed.model_json_schema()["properties"]["len"]["description"] == "In metres,\nat rest."
