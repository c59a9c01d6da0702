"""Any request, valid or not, gets an answer that the OpenAPI document describes."""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.service.auth.roles import Role
from headrace.service.jobs.host import NewJob
from headrace.trainer.checkpoint.commits import Commits
from tests.fakes.asked_api import PROBLEM, api

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)
EXAMPLES = 3
"""Of each kind, by operation."""
STREAM = "/v1/jobs/{job}/metrics/stream"


@pytest.fixture(scope="module")
def served(tmp_path_factory, new_database):
    root = tmp_path_factory.mktemp("api")
    with api(root, database=new_database(root)) as made:
        made.job("news", {"version": 2})
        made.host.act("news", "stop", "tests")
        made.past()
        yield made


@pytest.fixture(scope="module")
def document(served):
    return json.loads(served.get("/v1/openapi.json").text)


@pytest.fixture(scope="module")
def schema(document):
    found = schemathesis.openapi.from_dict(document)
    found.config.update(base_url="http://127.0.0.1")
    return found


def there(served, data, operation):
    """Names of what is there, for parameters in the path, each as often as names that are made up."""
    known = {
        "job": ["news"],
        "name": Commits(served.host.root / "news" / "store").names()[:2],
        "table": ["default"],
        "file": ["../../records.db"],
        "id": [each.id for each in served.host.work.list(limit=1)],
    }
    return {
        parameter: data.draw(st.sampled_from(names))
        for parameter, names in known.items()
        if names and f"{{{parameter}}}" in operation.path and operation.path != STREAM and data.draw(st.booleans())
    }


def operations(schema):
    return {f"{each.ok().method.upper()} {each.ok().path}": each.ok() for each in schema.get_all_operations()}


@pytest.mark.long
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_makes_it_fail_and_every_answer_is_described(served, schema, mode):
    seen = Counter()
    for operation in operations(schema).values():
        with suppress(Unsatisfiable):  # what takes anything cannot be asked wrongly
            _try(served, operation, mode, seen)
    assert seen[404] and seen[422], seen
    assert mode is GenerationMode.NEGATIVE or (seen[200] > 10 and seen[202]), seen


def _try(served, operation, mode, seen):
    @seed(7)
    @settings(
        max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(data=st.data())
    def tried(data):
        if "news" not in [job.name for job in served.host.jobs()]:
            spec = json.loads((served.host.root / "spec.json").read_text())
            served.host.create(NewJob(spec=spec, start=False), "tests")
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.path_parameters = {**(case.path_parameters or {}), **there(served, data, operation)}
        sent = case.as_transport_kwargs()
        request = httpx.Request(
            sent["method"], sent["url"], params=sent.get("params"), headers=_headers(served, sent),
            json=sent.get("json"), content=_content(sent), cookies=sent.get("cookies"),
        )  # fmt: skip
        response = served.send(request)
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    (served.host.root / "spec.json").write_text(json.dumps(dict(served.host.job("news").spec)))
    try:
        tried()
    except Exception as error:
        error.add_note(f"{operation.method.upper()} {operation.path}, {mode}")
        raise


def _headers(served, sent):
    wanted = {name: str(value) for name, value in (sent.get("headers") or {}).items()}
    wanted = {name: value for name, value in wanted.items() if name.lower() not in ("host", "authorization")}
    return {**wanted, "Authorization": f"Bearer {served.token}"}


def _content(sent):
    data = sent.get("data")
    return data.encode() if isinstance(data, str) else data if isinstance(data, bytes) else None


def test_every_route_and_its_role_is_the_one_we_promised(document):
    lines = [
        f"{method.upper():<6} {path}  {told['x-role']}{' or for ' + told['x-act'] if 'x-act' in told else ''}"
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    ]
    assert "\n".join(lines) + "\n" == (GOLDEN / "api.txt").read_text()


def test_every_route_is_described_and_says_who_may(document):
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            where = f"{method} {path}"
            assert told["operationId"] and told["summary"] and told["description"], where
            assert told["security"] == ([] if told["x-role"] == "none" else [{"bearer": []}]), where
            problems = [each for status, each in told["responses"].items() if int(status) >= 400]
            assert problems and all(list(each["content"]) == [PROBLEM] for each in problems), where
            for parameter in told.get("parameters", ()):
                assert parameter.get("description") or parameter["in"] == "path", f"{where}: {parameter['name']}"


def test_each_route_lets_in_its_role_and_no_lower_one(served, document):
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            if told["x-role"] == "none":
                continue
            needed = Role.of(told["x-role"])
            address = path.replace("{job}", "nobody").replace("{", "").replace("}", "")
            assert served.ask(method, address, token=None).status_code == 401, path
            for role in Role:
                status = served.ask(method, address, token=served.tokens[role]).status_code
                assert (status == 403) == (role < needed), f"{method} {path} as {role}: {status}"
