"""The addresses of the pages. Each page's module has its content."""

from html import escape
from http import HTTPStatus
from urllib.parse import quote

import httpx
from fastapi import FastAPI, Request
from nicegui import ui
from starlette.responses import HTMLResponse, Response

from headrace.service.ui.api_client import RequestRefused
from headrace.service.ui.frame import add_header, visitor_of
from headrace.service.ui.job_page import JobPage
from headrace.service.ui.new_job import NewJobPage
from headrace.service.ui.overview import JobsOverview
from headrace.service.ui.page_access import ROOT
from headrace.service.ui.recorder import Recorder
from headrace.service.ui.sign_in import STYLE

NO_JOB = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Answers about a job that does not exist, or whose name no job can have."""
NOT_FOUND = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Not found · Headrace</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><style>{style}</style></head>
<body class="plain"><main class="sign-in">
<h1>There is no such job</h1>
<p>{said}</p>
<p>It was deleted, or its name is mistyped. <a href="{root}/">All jobs</a></p>
</main></body></html>
"""


def add_pages(api: FastAPI, recorder: Recorder) -> None:
    """Add the pages, which call `api`, and show the records of `recorder`."""

    @ui.page("/", title="Jobs · Headrace")
    def _jobs(request: Request) -> None:
        visitor = visitor_of(api, request)
        add_header(visitor)
        JobsOverview(visitor, recorder)

    @ui.page("/new", title="New job · Headrace")
    def _new(request: Request) -> None:
        visitor = visitor_of(api, request)
        add_header(visitor)
        NewJobPage(visitor)

    @ui.page("/jobs/{name}")
    async def _job(request: Request, name: str, tab: str = "") -> Response | None:
        visitor = visitor_of(api, request)
        try:
            await visitor.get(f"/jobs/{quote(name, safe='')}")
        except RequestRefused as refused:
            if refused.status in NO_JOB:
                page = NOT_FOUND.format(style=STYLE, root=ROOT, said=escape(str(refused)))
                return HTMLResponse(page, HTTPStatus.NOT_FOUND)
        except httpx.HTTPError:
            pass  # the page itself says that the service does not answer
        ui.page_title(f"{name} · Headrace")
        add_header(visitor)
        JobPage(visitor, name, recorder, tab)
        return None
