"""Answers an orchestrator whether this process is alive and ready: /live and /ready, over plain HTTP without tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from millrace.http.open_pages import OpenPage, Pages, pages_served

OPTION = "--health"

Lacks = Callable[[], str]
"""The things that a process lacks to be ready, in words; "" once it is ready. Any thread."""


def health_served(at: str | None, lacks: Lacks) -> AbstractContextManager[None]:
    """Answer at HOST:PORT while the context lasts; nowhere for None. Raises SpecError for an address not to be had."""
    return pages_served(at, health_pages(lacks), OPTION, "0.0.0.0:8081")


def health_pages(lacks: Lacks) -> Pages:
    """/live answers 200 as long as the process answers; /ready answers 503 with the reason until nothing lacks."""

    def ready() -> OpenPage:
        reason = lacks()
        return OpenPage(503, f"{reason}\n".encode()) if reason else OpenPage(200, b"ready\n")

    return {"/live": lambda: OpenPage(200, b"live\n"), "/ready": ready}
