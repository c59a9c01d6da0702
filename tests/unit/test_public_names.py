"""Names that users and other programs rely on: they stay where they are, whatever is moved around them."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = {
    "headrace": [*"DataGenerator Inputs Linear Metric Section SequenceInput Shape SlotShape signs".split()],
    "headrace.dataset.generator": ["DataGenerator", "signs"],
    "headrace.dataset.paddle": ["DataGenerator", "MultiSlotDataGenerator", "MultiSlotStringDataGenerator"],
    "headrace.trainer.models.contract": ["Inputs", "SequenceInput", "Shape", "SlotShape"],
    "headrace.config": ["Section"],
}
"""What a user's generator or model imports."""
MODULES = {
    "headrace.dataset": (0, "usage"),
    "headrace.proto.generate": (0, "usage"),
    "headrace.pserver": (0, "usage"),
    "headrace.service": (0, "usage"),
    "headrace.service.jobs.launcher": (0, "usage"),
    "headrace.trainer.train": (0, "usage"),
    "headrace.trainer.exports": (0, ""),  # it reads requests from stdin, which ends at once here
    "headrace.trainer.predict": (0, "usage"),
    "headrace.trainer.replica": (2, "error: "),  # it takes its configuration as JSON, and refuses anything else
}
"""Modules that are run by name, with the exit code of `python -m NAME --help` and a part of what it prints."""
FOLDERS = ("dataset", "headrace", "pserver", "service", "trainer")
RUN_BY_NAME = re.compile(rf'-m"?,? "?((?:{"|".join(FOLDERS)})(?:\.[a-z_]+)*)\b')


def mentioned() -> dict[str, list[str]]:
    """Modules that a file of the project runs by name -> the files."""
    found: dict[str, list[str]] = {}
    texts = [ROOT / "Makefile", ROOT / "docker-compose.yml", *ROOT.glob("*.md"), *ROOT.glob(".ci/*")]
    for folder in (*FOLDERS, "deploy", "docs", "tests"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".sh", ".toml", ".yml")]
    for path in texts:
        if path.is_file():
            for name in RUN_BY_NAME.findall(path.read_text(encoding="utf-8")):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize(("module", "names"), IMPORTS.items())
def test_what_generators_and_models_import_is_there(module, names):
    imported = importlib.import_module(module)
    assert [name for name in names if not hasattr(imported, name)] == []


def test_the_examples_import_public_names_only():
    imports = re.compile(r"^(?:from|import) (headrace\b[\w.]*)(?: import ([\w, ]+))?", re.MULTILINE)
    seen = set()
    for path in (ROOT / "deploy" / "examples").rglob("*.py"):
        for module, names in imports.findall(path.read_text()):
            seen.add(module)
            assert {name.strip() for name in names.split(",")} <= set(IMPORTS.get(module, ())), path
    assert "headrace" in seen


@pytest.mark.long
@pytest.mark.parametrize(("module", "expected"), MODULES.items())
def test_modules_that_are_run_by_name_run(module, expected):
    command = [sys.executable, "-m", module, "--help"]
    ran = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    code, words = expected
    assert ran.returncode == code, ran.stderr
    assert words in (ran.stdout + ran.stderr).lower()


def test_every_module_that_the_project_runs_by_name_is_there():
    found = mentioned()
    known = {"headrace.dataset", "headrace.service", "headrace.trainer.exports"}
    assert known <= found.keys(), "the pattern finds those that are known"
    found.pop("dataset")  # the name of before version 0.2, in a hint and its test
    for name, files in found.items():
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is run by {files}"
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{name}.__main__") is not None, f"{name} is run by {files}"


def test_the_script_headrace_runs():
    script = Path(sys.executable).with_name("headrace")
    ran = subprocess.run([script, "version"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0 and ran.stdout.strip() == importlib.import_module("headrace").__version__
