"""requirements.lock: exact versions of what CI ran with, which meet pyproject.toml and name no place."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
    if not text.startswith("headrace[")  # an extra that names others
]


def locked():
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}


def test_every_line_is_one_version_and_no_address():
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    assert len(locked()) == len(LINES) > 100


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: needed.name)
def test_what_the_project_needs_is_locked_within_its_bounds(needed):
    version = locked().get(canonicalize_name(needed.name))
    assert version is not None, "run `make lock`"
    assert needed.specifier.contains(version, prereleases=True), f"{version} is not {needed.specifier}; run `make lock`"


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: needed.name)
def test_every_dependency_has_a_bound_that_can_be_tried(needed):
    assert [each.operator for each in needed.specifier] in ([">="], ["=="])
