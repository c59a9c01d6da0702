"""Reference pages of the documentation, made from the code: `make reference` writes them to docs/reference.

They are kept in the repository, for readers of a clone; tests/unit/test_reference_pages.py fails where one is out of
date. The page of the Python API is mkdocstrings' work.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import typer
from client_stub import stub
from curl_example import curl
from schema_page import Schema, cell, section_table, tables
from typer.cli import get_docs_for_click

from headrace.service.api.app import ApiSettings, app
from headrace.service.cli.main import cli
from headrace.service.jobs.config import ServiceConfig
from headrace.service.kubernetes.pod_settings import PodSettings
from headrace.service.spec.job import JobFile
from headrace.trainer.replica.http_api import app as replica_app

JOB = """# Job file

Every key of a job file, generated from its schema. `headrace spec schema` prints the same as a JSON Schema, and
`headrace spec check job.toml` checks a file against it. A key without a default is required. A duration is text such
as `"250ms"`, `"30s"`, `"10m"`, `"24h"` or `"7d"`; a size is text such as `"64KiB"` or `"512MiB"`.

Any key can be set for one run: `headrace run job.toml --set train.batch_size=256`.
"""
SERVICE = """# Service file

Every key of the file that `headrace serve --config` reads, generated from its schema. `deploy/service.toml` is an
example with every key.
"""
PODS = """# Pods file

Every key of the file that `headrace render kubernetes --pods` reads, YAML or TOML, generated from its schema:
[On Kubernetes](../kubernetes.md#volumes-and-nodes) has an example. Keys in camel case are those of Kubernetes.
"""
CLI = """# Command line

Every command, generated from the program. `headrace COMMAND --help` prints the same. In a checkout the program is
`.venv/bin/headrace`.
"""
REST = """# REST API

Every route, generated from the OpenAPI document, which a service answers at `/v1/openapi.json`. A request carries a
token: `Authorization: Bearer mlr_...`. The role of a route is the least role that may call it. The examples have it in
`$TOKEN`, and use names of [the clicks example](../service.md). `/docs` of a service tries routes out.
"""
REPLICA = """# REST API of a replica

Every route of `headrace replica`, generated from the OpenAPI document, which a replica answers at `/openapi.json`. It
is the Open Inference Protocol v2: see [Tables and exports](../tables.md#a-replica). Errors are `{"error": "..."}`.
"""


STUB = Path(__file__).parents[1] / "service" / "python" / "service_actions.pyi"
"""The types of a service's actions for Python: made from the same document."""


def pages() -> dict[str, str]:
    """The text of every generated page, by its path in the documentation."""
    return {
        "reference/job-file.md": JOB + tables(Schema(JobFile.model_json_schema())),
        "reference/service-file.md": SERVICE + tables(Schema(ServiceConfig.model_json_schema())),
        "reference/pods-file.md": PODS + tables(Schema(PodSettings.model_json_schema())),
        "reference/cli.md": CLI + _commands(),
        "reference/rest.md": REST + _routes(),
        "reference/replica.md": REPLICA + _replica(),
    }


def _commands() -> str:
    """Typer's own documentation of the program, its title left out."""
    command = typer.main.get_command(cli)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="headrace"), name="headrace")
    return text.partition("\n")[2]


def document_of_service() -> dict:
    """The OpenAPI document of a service."""
    host = SimpleNamespace(records=None, work=SimpleNamespace())  # nothing is asked of it: only the document is made
    return app(host, ApiSettings.of_a_run()).openapi()


def _routes() -> str:
    """Every route by resource, the problems that any of them may answer, and the bodies."""
    document = document_of_service()
    routes = [(method, path, told) for path, methods in document["paths"].items() for method, told in methods.items()]
    tags = dict.fromkeys(told["tags"][0] for _, _, told in routes)
    schema = Schema({"$defs": document["components"]["schemas"]}, "#/components/schemas/")
    parts = []
    for tag in tags:
        parts.append(f"\n## {tag.capitalize()} {{#routes-of-{tag}}}\n")
        parts += [_route(*route, schema) for route in routes if route[2]["tags"][0] == tag]
    parts.append("\n## Problems\n\nErrors are problems (RFC 9457): see [Problem](#problem).\n")
    parts += [*_errors(routes), "\n## Bodies\n"]
    return "\n".join(parts) + tables(schema)


def _replica() -> str:
    """Every route of a replica, and the bodies."""
    document = replica_app(None, None, None, None).openapi()  # nothing is asked of it: only the document is made
    routes = [(method, path, told) for path, methods in document["paths"].items() for method, told in methods.items()]
    schema = Schema({"$defs": document["components"]["schemas"]}, "#/components/schemas/")
    parts = [
        "\n## Routes",
        *(_route(*route, schema) for route in routes),
        "\n## Errors\n",
        *_errors(routes),
        "\n## Bodies\n",
    ]
    return "\n".join(parts) + tables(schema)


def _errors(routes: list[tuple[str, str, dict]]) -> list[str]:
    """A table of all errors of the routes."""
    meanings = {
        int(status): answer["description"]
        for _, _, told in routes
        for status, answer in told["responses"].items()
        if int(status) >= 400
    }
    return ["| status | meaning |", "|---|---|", *(f"| {each} | {cell(meanings[each])} |" for each in sorted(meanings))]


def _route(method: str, path: str, told: dict, schema: Schema) -> str:
    """One route: who may call it, its parameters, its body, its answers."""
    act = f", or a token for *{told['x-act']}*" if "x-act" in told else ""
    lines = [
        f"\n### `{method.upper()} {path}` {{#route-{told['operationId'].lower()}}}\n",
        told.get("description", ""),
        "",
    ]
    lines += ["```shell", curl(method, path, told, schema.definitions), "```", ""] if "x-role" in told else []
    lines += [f"Role: {told['x-role']}{act}.", ""] if "x-role" in told else []
    if parameters := told.get("parameters"):
        lines += ["| parameter | in | meaning |", "|---|---|---|"]
        lines += [f"| `{one['name']}` | {one['in']} | {cell(one.get('description', ''))} |" for one in parameters]
        lines.append("")
    if body := told.get("requestBody"):
        inline = [each["schema"] for each in body["content"].values() if "properties" in each.get("schema", {})]
        lines += ["Body:", ""] if inline else [f"Body: {_media(body['content'])}.", ""]
        lines += [section_table(schema, each) for each in inline]
    for status, answer in told["responses"].items():
        if int(status) < 400:
            said = cell(answer["description"].replace("Successful Response", ""))  # FastAPI's words, where we have none
            lines.append(f"Answer {status}: {_media(answer.get('content', {}))}. {said}".rstrip() + "\n")
    refused = [status for status in told["responses"] if int(status) >= 400 and "x-role" in told]
    lines += ["", f"[Problems](#problems): {', '.join(refused)}."] if refused else []
    return "\n".join(lines)


def _media(content: dict) -> str:
    """The types of a body, with links to their schemas."""
    schema = Schema({"$defs": {}}, "#/components/schemas/")
    known = [schema.words(each["schema"]) if each.get("schema") else f"`{name}`" for name, each in content.items()]
    return " or ".join(known) or "no body"


def formatted(text: str) -> str:
    """A stub as ruff writes it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout  # noqa: S603


def write() -> None:
    """Write every page below this folder, and the stub."""
    for uri, text in pages().items():
        (Path(__file__).parent / uri).write_text(text, encoding="utf-8")
    STUB.write_text(formatted(stub(document_of_service())), encoding="utf-8")


if __name__ == "__main__":
    write()
