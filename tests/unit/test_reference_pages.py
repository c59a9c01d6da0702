"""Generated pages of the documentation: every key, route and command is there, with its default as a user writes it."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from headrace.config import parse_duration, parse_size
from headrace.service.api.schemas import RequestBody
from headrace.service.jobs.config import ServiceConfig
from headrace.service.spec.job import JobFile
from headrace.trainer.predict.config import PredictionRequest
from tests.goldens import GOLDEN, commands

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(DOCS))  # as MkDocs does for a hook
    try:
        spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def pages(generate):
    return generate.pages()


def rows(page, section):
    """The rows of a section's table by key: its value, default and meaning."""
    (table,) = re.findall(rf"^## .* {{#{section.lower()}}}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*) \|$", table, re.M)
    return {key: (value, default, meaning) for key, value, default, meaning in found}


@pytest.mark.parametrize(("model", "page"), [(JobFile, "job-file"), (ServiceConfig, "service-file")])
def test_every_key_of_a_file_is_on_its_page_once(pages, model, page):
    schema, text = model.model_json_schema(), pages[f"reference/{page}.md"]
    for name, section in schema["$defs"].items():
        if "properties" in section:
            assert rows(text, name).keys() == section["properties"].keys()
        else:
            assert all(json.dumps(value) in text for value in section["enum"])
    (whole,) = re.findall(r"## The whole file\n(.*?)(?=^## )", text, re.M | re.S)
    assert set(re.findall(r"^\| `(\w+)`", whole, re.M)) == schema["properties"].keys()


def test_a_default_is_written_as_a_job_file_has_it(pages):
    page, schema = pages["reference/job-file.md"], JobFile.model_json_schema()["$defs"]
    assert rows(page, "CommitSection")["every"][:2] == ("duration", '`"30s"`')
    assert rows(page, "TableSection")["memory"][:2] == ("size", "-")
    assert rows(page, "KafkaSource")["topics"][1] == "required"
    for name, section in schema.items():
        for key, (value, default, _) in rows(page, name).items() if "properties" in section else ():
            written = json.loads(default.strip("`")) if default.startswith("`") else None
            if value in ("duration", "size") and written:
                parse = parse_duration if value == "duration" else parse_size
                assert parse(written) == section["properties"][key]["default"], f"{name}.{key}"


def test_the_types_of_a_services_actions_are_up_to_date(generate):
    made = generate.formatted(generate.stub(generate.document_of_service()))
    assert generate.STUB.read_text(encoding="utf-8") == made, "service_actions.pyi is out of date: `make reference`"


def test_the_pages_in_the_repository_are_up_to_date(pages):
    for uri, text in pages.items():
        assert (DOCS / uri).read_text(encoding="utf-8") == text, f"docs/{uri} is out of date: run `make reference`"
    written = {f"reference/{path.name}" for path in (DOCS / "reference").glob("*.md")}
    assert written == {*pages, "reference/python.md"}


def test_bodies_that_a_client_sends_and_gets_are_on_the_pages(pages):
    rest, replica = pages["reference/rest.md"], pages["reference/replica.md"]
    for route in ("predictbyjob", "predictbyexport"):
        (section,) = re.findall(rf"{{#route-{route}}}\n(.*?)(?=^### )", rest, re.M | re.S)
        assert "Body: [PredictionRequest](#predictionrequest)." in section
    (body,) = re.findall(r"^### PredictionRequest {#predictionrequest}\n(.*?)(?=^### )", rest, re.M | re.S)
    assert all(f"| `{name}` |" in body for name in ("input", "output", "version", "columns", "spec", "base"))
    for act, sent in (("rollback", ["version", "timeline"]), ("follow", [])):
        (section,) = re.findall(rf"^### `POST /v2/models/{{name}}/{act}`.*?(?=^##)", replica, re.M | re.S)
        assert "Answer 200: [VersionInForce](#versioninforce)." in section
        assert all(re.search(rf"^\| `{name}` \| .* \| .*[a-z].* \|$", section, re.M) for name in sent)
    assert re.search(r"^\| `held_back` \| true or false \| required \| True after a rollback", replica, re.M)


def test_no_cell_of_a_table_breaks_its_row(pages):
    for uri, page in pages.items():
        widths = [len(re.split(r"(?<!\\)\|", line)) for line in page.splitlines() if line.startswith("| `")]
        assert set(widths) <= {4, 5, 6}, uri


def test_every_route_is_on_its_page_with_its_role(pages):
    page = pages["reference/rest.md"]
    for line in (GOLDEN / "api.txt").read_text().splitlines():
        method, path, role = line.split(maxsplit=2)
        (section,) = re.findall(rf"^### `{method} {re.escape(path)}` {{#(?:.*\n)*?Role: (.*)\.$", page, re.M)
        assert section.split(",")[0] == role.split()[0]


def test_every_command_and_option_is_on_its_page(pages):
    page = pages["reference/cli.md"]
    for name, options in commands().items():
        title = f"##+ `headrace {re.escape(name)}`" if name else "# Command line"
        (section,) = re.findall(rf"^{title}\n(.*?)(?=^#+ `|\Z)", page, re.M | re.S)
        assert [option for option in options if option not in section] == [], name


def test_every_route_has_an_example_whose_body_is_valid(generate, pages):
    document = generate.document_of_service()
    routes = [told for methods in document["paths"].values() for told in methods.values()]
    page = pages["reference/rest.md"]
    assert page.count("```shell\ncurl ") == len(routes) and "{" not in "".join(re.findall(r"^curl.*", page, re.M))
    models = [*RequestBody.__subclasses__(), PredictionRequest]
    for model in models:
        for example in model.model_config["json_schema_extra"]["examples"]:
            model.model_validate(example)
    assert {model.__name__ for model in models} <= document["components"]["schemas"].keys()
