"""The core runs without the extras: no module of it imports their libraries, and commands that need one say so."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace import extras
from headrace.errors import SpecError
from headrace.extras import LIBRARIES, missing, require

ROOT = Path(__file__).parents[2]
CLICKS = str(ROOT / "deploy" / "examples" / "clicks" / "job.toml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOLDERS = ("dataset", "pserver", "service", "trainer")

PLACES = {
    "confluent_kafka": ("headrace.dataset.sources.librdkafka_reader",),
    "fastavro": ("headrace.dataset.features.avro_events",),
    "kafka": tuple(f"headrace.dataset.sources.{name}" for name in (
        "kafka_client", "kafka_python_reader", "kafka_reader", "kafka_source", "librdkafka_reader",
    )),
    "nicegui": ("headrace.service.ui",),
    "psycopg": (),
    "ray": ("headrace.service.cluster.ray_driver",),
    "tensorboard": (),
    "torch": (
        "headrace.trainer.collectives",
        "headrace.trainer.dense",
        "headrace.trainer.device_copies",
        "headrace.trainer.features",
        "headrace.trainer.models",
        "headrace.trainer.predict",
        "headrace.trainer.train",
    ),
}  # fmt: skip
"""Modules and packages that may need a library when they are imported. Others import these late, or not at all."""
BROUGHT = {"h11": "uvicorn", "llvmlite": "numba", "starlette": "fastapi"}
"""Distributions that we import and do not name, and the one that requires them as a part of itself."""


# Imports


def name_of(path):
    """The module of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = parts if parts[0] == "headrace" else ("headrace", *parts)
    return ".".join(inside).removesuffix(".__init__")


@cache
def product():
    """By module: the modules that it imports at its top, and those that it imports anywhere."""
    found = {}
    for folder in (*FOLDERS, "headrace"):
        for path in (ROOT / folder).rglob("*.py"):
            if not {"deploy", "old_names"} & set(path.parts) and (folder != "headrace" or not inside_link(path)):
                tree = ast.parse(path.read_text())
                found[name_of(path)] = set(imports(tree.body, late=False)), set(imports(tree.body, late=True))
    return found


def inside_link(path):
    return path.relative_to(ROOT).parts[1] in (*FOLDERS, "deploy")


def imports(statements, *, late):
    """The modules that are imported; `late`: also in functions, and for types alone."""
    for node in statements:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not late:
                pass
            case ast.If(test=ast.Name("TYPE_CHECKING")) if not late:
                yield from imports(node.orelse, late=late)
            case _:
                for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                    yield from imports(getattr(node, part, ()), late=late)


def needing(library):
    """The modules that cannot be imported without a library."""
    importers = defaultdict(set)
    for module, (first, _) in product().items():
        for name in first:
            importers[name.split(".")[0] if name.split(".")[0] == library else name].add(module)
    found, left = set(), [library]
    while left:
        new = importers[left.pop()] - found
        found |= new
        left += new
    return found


@pytest.mark.parametrize("library", PLACES)
def test_only_its_own_rooms_need_a_library_of_an_extra(library):
    rooms = PLACES[library]
    stray = {each for each in needing(library) if not any(f"{each}.".startswith(f"{room}.") for room in rooms)}
    assert stray == set(), f"they import {library} at their top, or what does; import it late, behind extras.require"


def test_the_table_names_every_library():
    assert PLACES.keys() == LIBRARIES.keys()
    assert all(needing(library) for library in PLACES.keys() - {"psycopg", "tensorboard"}), (
        "else the test above finds nothing"
    )


def distributions_of(texts):
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_every_import_is_of_a_distribution_that_the_project_names():
    known, core = packages_distributions(), distributions_of(PROJECT["dependencies"])
    allowed = {library: distributions_of(EXTRAS[extra]) for library, (_, extra) in LIBRARIES.items()}
    allowed["grpc_tools"] = distributions_of(EXTRAS["dev"])
    offences = set()
    for module, (_, anywhere) in product().items():
        for name in {each.split(".")[0] for each in anywhere} - sys.stdlib_module_names - {"headrace", "__future__"}:
            brought_by = {canonicalize_name(each) for each in known.get(name, [name])}
            brought_by |= {BROUGHT[each] for each in brought_by & BROUGHT.keys()}
            if not brought_by & allowed.get(name, core):
                offences.add((name, module))
    assert offences == set()


@pytest.mark.parametrize(("part", "whole"), BROUGHT.items())
def test_what_is_not_named_is_required_by_what_is(part, whole):
    assert part in {canonicalize_name(Requirement(text).name) for text in requires(whole)}


@pytest.mark.parametrize("module", LIBRARIES)
def test_the_extra_of_a_message_brings_the_library(module):
    brought_by = {canonicalize_name(each) for each in packages_distributions()[module]}
    assert brought_by & distributions_of(EXTRAS[LIBRARIES[module][1]])


def test_all_has_every_extra_but_those_for_a_cluster_and_for_us():
    (text,) = EXTRAS["all"]
    assert Requirement(text).extras == EXTRAS.keys() - {"all", "bench", "dev", "docs", "ray", "tensorboard"}
    (text,) = (each for each in EXTRAS["dev"] if each.startswith("headrace"))
    assert Requirement(text).extras == {"all", "bench", "ray", "tensorboard"}


# Messages


def test_a_missing_library_is_named_with_its_user_and_the_command(monkeypatch):
    assert missing("torch", "training") == ""
    require("torch", "training")
    monkeypatch.setitem(sys.modules, "torch", None)
    words = "training needs PyTorch, which is not installed: pip install 'headrace[train]'"
    assert missing("torch", "training") == words
    with pytest.raises(SpecError, match=f"^{re.escape(f'model: {words}')}$"):
        require("torch", "training", "model")


def test_a_folder_of_the_same_name_is_no_library(monkeypatch, tmp_path):
    (tmp_path / "fastavro_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not extras.is_installed("fastavro_of_nobody")


KAFKA = "--set", 'sources.clicks={kind="kafka", topics=["clicks"], options={bootstrap_servers="127.0.0.1:1"}}'
AVRO = (
    *("--set", 'pipe={kind="columns", format="avro", schema_file="event.avsc"}'),
    *("--set", 'sources.clicks={kind="files", paths=["events.jsonl"], event_time={kind="none"}}'),
)
RAY = "--set", 'cluster={launcher="ray", ray_address="127.0.0.1:6379"}'
STORE = "--set", 'store.path="touched"'
NO_TORCH = "training needs PyTorch, which is not installed: pip install 'headrace[train]'"
NO_KAFKA = (
    "sources.clicks.kind: a source of Kafka needs kafka-python, which is not installed: pip install 'headrace[kafka]'"
)
NO_AVRO = """pipe.format: "avro" needs fastavro, which is not installed: pip install 'headrace[avro]'"""
NO_RAY = (
    "cluster.launcher: every machine of a Ray cluster needs Ray, which is not installed: pip install 'headrace[ray]'"
)
NO_PREDICTION = NO_TORCH.replace("training", "a prediction")
NO_POSTGRES = "database: PostgreSQL needs psycopg, which is not installed: pip install 'headrace[postgres]'"
PREDICT = ("predict", CLICKS, "--input", "events.jsonl", "--output", "touched")

COMMANDS = {
    "version": (("version",), ""),
    "help": (("--help",), ""),
    "schema": (("spec", "schema"), ""),
    "infer": (("spec", "infer", "events.jsonl"), ""),
    "diff": (("spec", "diff", CLICKS, CLICKS), ""),
    "check": (("spec", "check", CLICKS), NO_TORCH),
    "check a wrong spec": (("spec", "check", CLICKS, "--set", "seed=-1"), "seed: "),
    "check kafka": (("spec", "check", CLICKS, *KAFKA), NO_KAFKA),
    "check avro": (("spec", "check", CLICKS, *AVRO), NO_AVRO),
    "check ray": (("spec", "check", CLICKS, *RAY), NO_RAY),
    "run": (("run", CLICKS, *STORE), NO_TORCH),
    "run kafka": (("run", CLICKS, *STORE, *KAFKA), NO_KAFKA),
    "run avro": (("run", CLICKS, *STORE, *AVRO), NO_AVRO),
    "faults": (("faults", CLICKS, "--events", "100", *STORE), NO_TORCH),
    "demo": (("demo",), NO_TORCH),
    "predict": (PREDICT, NO_PREDICTION),
    "serve": (("serve",), NO_POSTGRES),
}
"""By a name for the test: the arguments of `headrace`, and the error; "" where it needs no extra."""

PROGRAM = """
import contextlib, io, json, sys

commands, libraries = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(libraries))  # None: an import fails
from headrace.service.cli.main import main

ends = {}
for name, arguments in commands.items():
    sys.argv, errors = ["headrace", *arguments], io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            ends[name] = end.code or 0, errors.getvalue()
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A folder, and how each command ended there, in one process without the libraries: most of its time is imports."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "events.jsonl").write_text("".join(f'{{"user": {n}, "click": {n % 2}}}\n' for n in range(100)))
    (folder / "service.toml").write_text('root = "service"\ndatabase = "postgresql+psycopg://db/headrace"\n')
    asked = json.dumps([{name: arguments for name, (arguments, _) in COMMANDS.items()}, list(LIBRARIES)])
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, asked], cwd=folder, capture_output=True, text=True, check=False, timeout=100
    )
    assert told.returncode == 0, told.stderr
    return folder, json.loads(told.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_needs_its_extra_alone_and_says_so_first(core, name):
    _, ends = core
    code, errors = ends[name]
    problem = COMMANDS[name][1]
    if problem:
        assert (code, errors.startswith(f"error: {problem}")) == (2, True), errors
        assert errors.count("\n") == 1 or not problem.endswith("'")
    else:
        assert code == 0, errors


def test_a_command_without_its_extra_leaves_nothing_behind(core):
    folder, ends = core
    assert ends.keys() == COMMANDS.keys()
    assert {path.name for path in folder.iterdir()} == {"events.jsonl", "service", "service.toml"}
    assert not [path for path in (folder / "service" / "jobs").iterdir()]
