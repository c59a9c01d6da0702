"""The addresses of the pages. Each page's module has its content."""

from fastapi import FastAPI, Request
from nicegui import ui

from headrace.service.ui.frame import add_header, visitor_of
from headrace.service.ui.job_page import JobPage
from headrace.service.ui.overview import JobsOverview
from headrace.service.ui.recorder import Recorder


def add_pages(api: FastAPI, recorder: Recorder) -> None:
    """Add the pages, which call `api`, and show the records of `recorder`."""

    @ui.page("/", title="Jobs · Headrace")
    def _jobs(request: Request) -> None:
        visitor = visitor_of(api, request)
        add_header(visitor)
        JobsOverview(visitor)

    @ui.page("/jobs/{name}")
    def _job(request: Request, name: str) -> None:
        ui.page_title(f"{name} · Headrace")
        visitor = visitor_of(api, request)
        add_header(visitor)
        JobPage(visitor, name, recorder)
