"""Answers an orchestrator whether this process is alive and ready: /live and /ready, over plain HTTP without tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from starlette.types import ASGIApp

from headrace.http.open_pages import Pages, pages_served, text_page

OPTION = "--health"

Lacks = Callable[[], str]
"""The things that a process lacks to be ready, in words; "" once it is ready. Any thread."""


def health_served(at: str | None, lacks: Lacks) -> AbstractContextManager[None]:
    """Answer at HOST:PORT while the context lasts; nowhere for None. Raises SpecError for an address not to be had."""
    return pages_served(at, health_pages(lacks), OPTION, "0.0.0.0:8081")


def health_pages(lacks: Lacks) -> Pages:
    """/live answers 200 as long as the process answers; /ready answers 503 with the reason until nothing lacks."""

    def ready() -> ASGIApp:
        reason = lacks()
        return text_page(reason, 503) if reason else text_page("ready")

    return {"/live": lambda: text_page("live"), "/ready": ready}
