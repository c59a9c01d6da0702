"""The OpenAPI document of the service: clients can be generated from it."""

import compileall
import importlib
import json
import pkgutil
import re
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.service.api.app import ApiSettings, app

GENERATE_S = 110


@pytest.fixture(scope="module")
def api():
    host = SimpleNamespace(records=None, work=SimpleNamespace())  # nothing is asked of it: only the document is made
    return app(host, ApiSettings.of_a_run())


def parts(value, place=()):
    """Every object of a document, with its place."""
    if isinstance(value, dict):
        yield place, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from parts(inner, (*place, key))


def test_no_schema_has_a_type_that_generators_do_not_know(api):
    """A property that is always null crashes some; of "integer or number" each makes a class of its own."""
    for place, part in parts(api.openapi()["components"]["schemas"]):
        assert part.get("type") != "null" or "anyOf" in place[-2:], place
        kinds = {each.get("type") for each in part.get("anyOf", ())}
        assert not {"integer", "number"} <= kinds, place


def test_constants_of_enums_have_names_of_their_own(api):
    """In Go, those of all enums are in one name space."""
    enums = {name: each for name, each in api.openapi()["components"]["schemas"].items() if "enum" in each}
    assert enums["Phase"]["x-enum-varnames"][:2] == ["PHASE_STARTING", "PHASE_TRAINING"]
    assert enums["OperationState"]["x-enum-varnames"][0] == "OPERATION_STATE_WAITING"
    names = Counter(name for each in enums.values() for name in each["x-enum-varnames"])
    assert names.most_common(1)[0][1] == 1 and all(re.fullmatch(r"[A-Z]\w+", name) for name in names)
    assert all(len(each["enum"]) == len(each["x-enum-varnames"]) for each in enums.values())


@pytest.mark.long
@pytest.mark.parametrize("language", ["python", "go", "typescript-fetch"])
def test_clients_are_generated(api, language, tmp_path, monkeypatch):
    document, out = tmp_path / "openapi.json", tmp_path / "out"
    document.write_text(json.dumps(api.openapi()))
    program = Path(sysconfig.get_path("scripts")) / "openapi-generator-cli"
    command = [program, "generate", "-g", language, "-i", document, "-o", out]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GENERATE_S)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]
    match language:
        case "python":
            assert compileall.compile_dir(out / "openapi_client", quiet=1)
            monkeypatch.syspath_prepend(out)
            package = importlib.import_module("openapi_client")
            modules = [each.name for each in pkgutil.walk_packages(package.__path__, "openapi_client.")]
            for each in modules:
                importlib.import_module(each)
            assert "openapi_client.models.job_status" in modules and len(modules) > 50
        case "go":
            text = "".join(each.read_text() for each in out.glob("model_*.go"))
            constants = Counter(re.findall(r"^\t(\w+) \w+ = \"", text, re.MULTILINE))
            assert "PHASE_RUNNING" not in constants and constants["DESIRED_RUNNING"] == 1
            assert max(constants.values()) == 1, constants.most_common(3)
        case _:
            text = (out / "models" / "JobStatus.ts").read_text()
            assert "freshnessS: number | null;" in text and "phase: Phase;" in text
