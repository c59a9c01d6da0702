"""The house style that a tool can hold: sizes, and that the imported packages are ours."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("service", "trainer", "pserver", "dataset", "millrace")
LINES_MAX, FUNCTION_LINES_MAX = 600, 70


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def test_files_and_functions_fit_a_reader():
    offences = []
    for path in sources():
        text = path.read_text()
        if (lines := text.count("\n")) > LINES_MAX:
            offences.append(f"{path}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX:
                    offences.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize("name", PACKAGES)
def test_our_packages_are_the_ones_imported(name):
    found = Path(importlib.import_module(name).__file__).parent
    assert found == ROOT / name, f"another distribution owns the import name {name!r}"
