"""/docs: an explorer of the OpenAPI document, Swagger UI, with assets from an installed package alone."""

from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from headrace import extras

PATH = "/docs"
PACKAGE = "fastapi_offline"
"""The package whose files of Swagger UI are served; nothing of it is imported."""
MISSING = """The explorer of the API needs files of fastapi-offline: pip install 'headrace[ui]'.
The document itself is at /v1/openapi.json.
"""
ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>REST API · Headrace</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<link rel="stylesheet" href="{PATH}/swagger-ui.css"></head>
<body><main id="explorer"></main>
<script src="{PATH}/swagger-ui-bundle.js"></script><script src="{PATH}/start.js"></script></body></html>
"""
START = """SwaggerUIBundle({
  url: "/v1/openapi.json", dom_id: "#explorer", deepLinking: true, validatorUrl: null,
  persistAuthorization: false, docExpansion: "none", defaultModelsExpandDepth: 0, filter: true,
});
"""


def routes() -> list[Route]:
    """The page and its files."""
    return [
        Route(PATH, _page, include_in_schema=False),
        Route(f"{PATH}/{{file}}", _file, include_in_schema=False),
    ]


async def _page(_request: Request) -> Response:
    if not extras.is_installed(PACKAGE):
        return PlainTextResponse(MISSING, HTTPStatus.NOT_FOUND)
    return HTMLResponse(PAGE, headers=HEADERS)


async def _file(request: Request) -> Response:
    name = request.path_params["file"]
    if name == "start.js":
        return Response(START, headers=HEADERS, media_type="text/javascript")
    if name not in ASSETS or not extras.is_installed(PACKAGE):
        return PlainTextResponse("there is no such file\n", HTTPStatus.NOT_FOUND)
    return FileResponse(_folder() / name, headers=HEADERS, media_type=ASSETS[name])


def _folder() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None, "the caller has looked"
    return Path(spec.origin).parent / "static"
