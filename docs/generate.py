"""Reference pages of the documentation, made from the code at every build. MkDocs calls `on_files`.

No page is kept in the repository, so none can be out of date. The pages of the Python API are mkdocstrings' work.
"""

from types import SimpleNamespace

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from schema_page import Schema, cell, tables
from typer.cli import get_docs_for_click

from headrace.service.api.app import ApiSettings, app
from headrace.service.cli.main import cli
from headrace.service.jobs.config import ServiceConfig
from headrace.service.spec.job import Job

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
CLI = """# Command line

Every command, generated from the program. `headrace COMMAND --help` prints the same. In a checkout the program is
`.venv/bin/headrace`.
"""
REST = """# REST API

Every route, generated from the OpenAPI document, which a service answers at `/v1/openapi.json`. A request carries a
token: `Authorization: Bearer mlr_...`. The role of a route is the least role that may call it. The first steps are in
[Many jobs over HTTP](../service.md).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for uri, text in pages().items():
        files.append(File.generated(config, uri, content=text))
    return files


def pages() -> dict[str, str]:
    """The text of every generated page, by its path in the documentation."""
    return {
        "reference/job-file.md": JOB + tables(Schema(Job.model_json_schema())),
        "reference/service-file.md": SERVICE + tables(Schema(ServiceConfig.model_json_schema())),
        "reference/cli.md": CLI + _commands(),
        "reference/rest.md": REST + _routes(),
    }


def _commands() -> str:
    """Typer's own documentation of the program, its title left out."""
    command = typer.main.get_command(cli)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="headrace"), name="headrace")
    return text.partition("\n")[2]


def _routes() -> str:
    """Every route by resource, the problems that any of them may answer, and the bodies."""
    host = SimpleNamespace(records=None, work=SimpleNamespace())  # nothing is asked of it: only the document is made
    document = app(host, ApiSettings.of_a_run()).openapi()
    routes = [(method, path, told) for path, methods in document["paths"].items() for method, told in methods.items()]
    tags = dict.fromkeys(told["tags"][0] for _, _, told in routes)
    parts = []
    for tag in tags:
        parts.append(f"\n## {tag.capitalize()} {{#routes-of-{tag}}}\n")
        parts += [_route(*route) for route in routes if route[2]["tags"][0] == tag]
    problems = {
        int(status): answer["description"]
        for _, _, told in routes
        for status, answer in told["responses"].items()
        if int(status) >= 400
    }
    parts.append(
        "\n## Problems\n\nErrors are problems (RFC 9457): see [Problem](#problem).\n\n| status | meaning |\n|---|---|"
    )
    parts += [f"| {status} | {cell(problems[status])} |" for status in sorted(problems)]
    parts.append("\n## Bodies\n")
    return "\n".join(parts) + tables(Schema({"$defs": document["components"]["schemas"]}, "#/components/schemas/"))


def _route(method: str, path: str, told: dict) -> str:
    """One route: who may call it, its parameters, its body, its answers."""
    act = f", or a token for *{told['x-act']}*" if "x-act" in told else ""
    lines = [
        f"\n### `{method.upper()} {path}` {{#route-{told['operationId'].lower()}}}\n",
        told.get("description", ""),
        "",
    ]
    lines += [f"Role: {told['x-role']}{act}.", ""]
    if parameters := told.get("parameters"):
        lines += ["| parameter | in | meaning |", "|---|---|---|"]
        lines += [f"| `{one['name']}` | {one['in']} | {cell(one.get('description', ''))} |" for one in parameters]
        lines.append("")
    if body := told.get("requestBody"):
        lines += [f"Body: {_media(body['content'])}.", ""]
    for status, answer in told["responses"].items():
        if int(status) < 400:
            said = cell(answer["description"].replace("Successful Response", ""))  # FastAPI's words, where we have none
            lines.append(f"Answer {status}: {_media(answer.get('content', {}))}. {said}".rstrip() + "\n")
    refused = [status for status in told["responses"] if int(status) >= 400]
    lines += ["", f"[Problems](#problems): {', '.join(refused)}."]
    return "\n".join(lines)


def _media(content: dict) -> str:
    """The types of a body, with links to their schemas."""
    schema = Schema({"$defs": {}}, "#/components/schemas/")
    known = [schema.words(each["schema"]) if each.get("schema") else f"`{name}`" for name, each in content.items()]
    return " or ".join(known) or "no body"
