"""The addresses of the pages. Each page's module has its content."""

from fastapi import FastAPI, Request
from nicegui import ui

from service.ui.frame import top, visitor_of
from service.ui.jobpage import JobPage
from service.ui.overview import Overview
from service.ui.recording import Recorder


def add_pages(api: FastAPI, recorder: Recorder) -> None:
    """Add the pages, which call `api`, and show the records of `recorder`."""

    @ui.page("/", title="Jobs · Millrace")
    def _jobs(request: Request) -> None:
        visitor = visitor_of(api, request)
        top(visitor)
        Overview(visitor)

    @ui.page("/jobs/{name}")
    def _job(request: Request, name: str) -> None:
        ui.page_title(f"{name} · Millrace")
        visitor = visitor_of(api, request)
        top(visitor)
        JobPage(visitor, name, recorder)
