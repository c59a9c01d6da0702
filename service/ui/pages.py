"""The pages by address. What is on each is its own module's."""

from fastapi import FastAPI, Request
from nicegui import app, ui

from service.ui.frame import top, visitor_of
from service.ui.gate import VISIT
from service.ui.jobpage import JobPage
from service.ui.overview import Overview
from service.ui.recording import Recorder


def add_pages(api: FastAPI) -> None:
    """Add the pages, which ask `api`."""
    recorder = Recorder(api.state.statuses)
    app.on_startup(recorder.run)

    @ui.page("/", title="Jobs · Millrace")
    async def _jobs(request: Request) -> None:
        visitor = await visitor_of(api, request)
        top(visitor, signed_in=request.scope[VISIT].token() is not None)
        await Overview(visitor).begin()

    @ui.page("/jobs/{name}")
    async def _job(request: Request, name: str) -> None:
        ui.page_title(f"{name} · Millrace")
        visitor = await visitor_of(api, request)
        top(visitor, signed_in=request.scope[VISIT].token() is not None)
        await JobPage(visitor, name, recorder).begin()
