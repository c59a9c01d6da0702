"""`headrace.connect` and services that answer anything: an error of this project, and the token goes nowhere else."""

import httpx
import pytest

from headrace.errors import Refused
from headrace.service.python.rest_client import ServiceClient
from headrace.service.python.service_connection import Service

JSON = {"content": {"application/json": {"schema": {}}}}
PAGE = {"properties": {"items": {"items": {}}, "next": {}}}


def document(path="/v1/jobs", **changes):
    told = {"operationId": "listJobs", "responses": {"200": JSON}, **changes}
    return {"components": {"schemas": {}}, "paths": {path: {"get": told}}}


def service(answers, asked):
    def answer(request):
        asked.append(request)
        assert len(asked) < 20, "it asks without end"
        found = answers[0] if request.url.path.endswith("openapi.json") else answers[1]
        return httpx.Response(200, json=found)

    return Service(ServiceClient("http://127.0.0.1:8080", "hr_secret", transport=httpx.MockTransport(answer)))


def test_an_action_of_a_document_is_asked():
    asked = []
    with service((document(), {"a": 1}), asked) as made:
        assert made.list_jobs() == {"a": 1}
    assert [each.url.path for each in asked] == ["/v1/openapi.json", "/v1/jobs"]


OTHERS = {
    "a list": [],
    "a number": 5,
    "no schemas": {"paths": {}},
    "a host": document("http://127.0.0.2:9/v1/jobs"),
    "a host without a scheme": document("//127.0.0.2:9/v1/jobs"),
    "no path": document("/v1/{"),
    "a field of a parameter": document("/v1/{a.b}"),
    "no name": document(operationId=None),
    "no status": document(responses={"default": JSON}),
    "errors alone": document(responses={"404": JSON}),
    "a schema that is not there": document(
        responses={"200": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/A"}}}}}
    ),
    "a parameter by reference": document(parameters=[{"$ref": "#/components/parameters/A"}]),
    "keys of a path": {"components": {"schemas": {}}, "paths": {"/v1/jobs": {"parameters": []}}},
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_document_of_another_shape_is_refused(case):
    asked = []
    with service((OTHERS[case], {}), asked) as made, pytest.raises(Refused, match="cannot be read") as error:
        made.list_jobs()
    assert len(asked) == 1 and "hr_secret" not in str(error.value) + repr(made)


@pytest.mark.parametrize("page", [{}, [], {"items": 5, "next": None}, {"items": [], "next": "same"}])
def test_a_list_that_is_none_or_never_ends_is_refused(page):
    listed = document(responses={"200": {"content": {"application/json": {"schema": PAGE}}}})
    with service((listed, page), []) as made, pytest.raises(Refused, match="no page of a list"):
        made.list_jobs()
