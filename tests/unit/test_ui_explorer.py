"""/docs: the explorer of the API, from this service alone."""

import asyncio
import re

import httpx
import pytest
from starlette.applications import Starlette

from headrace import extras
from headrace.service.ui import explorer


def got(path):
    http = httpx.AsyncClient(transport=httpx.ASGITransport(Starlette(routes=explorer.routes())), base_url="http://a")
    return asyncio.run(http.get(path))


def test_the_page_and_all_it_loads_come_from_this_service():
    page = got("/docs")
    assert page.status_code == 200 and 'lang="en"' in page.text
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert set(loaded) == {"/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/start.js", "data:,"}
    for path in loaded[1:]:
        assert got(path).status_code == 200, path
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy
    assert '"/v1/openapi.json"' in got("/docs/start.js").text


@pytest.mark.parametrize("name", ["redoc.standalone.js", "..%2fcore.py", "%2e%2e", "core.py"])
def test_no_other_file_is_served(name):
    assert got(f"/docs/{name}").status_code == 404


def test_without_the_package_the_page_says_how_to_have_it(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda module: False)
    answer = got("/docs")
    assert answer.status_code == 404 and "headrace[ui]" in answer.text
    assert got("/docs/swagger-ui.css").status_code == 404
