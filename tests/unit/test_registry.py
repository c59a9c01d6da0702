"""Registries: Headrace's classes and those of installed packages, and what is said where a package is to blame."""

import importlib
from typing import Literal

import pytest
from pydantic import TypeAdapter

from headrace import registry
from headrace.config import Section, validate
from headrace.errors import SpecError
from headrace.registry import Registry


class Shape(Section):
    pass


class Round(Shape):
    kind: Literal["round"]
    radius: int = 1


class Square(Shape):
    kind: Literal["square"]


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """A registry with installed packages, each given as name -> (name of a shape, its target)."""

    def made(**packages):
        for package, (name, target) in packages.items():
            info = tmp_path / f"{package}-1.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
            (info / "entry_points.txt").write_text(f"[tests.shapes]\n{name} = {target}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return Registry("shape", "tests.shapes", Shape, {"own": "config:Section"} if not packages else {})

    registry._installed.cache_clear()
    yield made
    registry._installed.cache_clear()


def read(shapes, **raw):
    class Whole(Section):
        shape: shapes.union()

    return validate(Whole, {"shape": raw}).shape


HERE = "tests.unit.test_registry"


def test_packages_add_kinds_whose_own_section_checks_them(shapes):
    found = shapes(a=("round", f"{HERE}:Round"), b=("square", f"{HERE}:Square"))
    assert found.names() == ["round", "square"] and found.load("round").__name__ == "Round"
    assert read(found, kind="round", radius=3).radius == 3
    with pytest.raises(SpecError, match="^shape.radius: .*integer"):
        read(found, kind="round", radius="x")
    with pytest.raises(SpecError, match="^shape.kind: 'rund' is none of 'round', 'square'; did you mean 'round'"):
        read(found, kind="rund")
    assert TypeAdapter(found.union()).json_schema()["discriminator"]["mapping"].keys() == {"round", "square"}


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            "no_such_module:X",
            "is of package bad 1.5, which cannot be loaded: ModuleNotFoundError: ",
        ),
        (f"{HERE}:Nothing", "is of package bad 1.5, which cannot be loaded: AttributeError"),
        (f"{HERE}:HERE", f"is of package bad 1.5: {HERE}:HERE is no {HERE}.Shape"),
        (f"{HERE}:Square", 'is of package bad 1.5: Square lacks kind: Literal["round"]'),
    ],
)
def test_a_package_that_cannot_be_used_is_named_to_those_who_use_it_and_to_no_one_else(shapes, target, why):
    found = shapes(bad=("round", target), good=("square", f"{HERE}:Square"))
    assert read(found, kind="square")
    with pytest.raises(SpecError) as refused:
        read(found, kind="round")
    assert f"shape 'round' {why}" in str(refused.value)


def test_two_packages_with_one_name_are_both_named(shapes):
    found = shapes(a=("round", f"{HERE}:Round"), b=("round", f"{HERE}:Round"))
    with pytest.raises(SpecError, match=r"of two packages, package a 1.5 and package b 1.5: uninstall one"):
        found.load("round")


def test_a_name_that_nobody_has_is_told_with_those_there_are(shapes):
    found = shapes(a=("round", f"{HERE}:Round"))
    with pytest.raises(SpecError, match="no shape 'rounds'; did you mean 'round'"):
        found.load("rounds")
