"""A part of the live page, made without a browser."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


def on_a_page(act: Callable[[], Awaitable[T]]) -> T:
    """What `act` returns, which makes elements of a page."""
    from nicegui import Client  # takes a second, which most tests of these files do not need
    from nicegui.page import page

    async def acted() -> T:
        with Client(page("/news"), request=None):
            return await act()

    return asyncio.run(acted())


def in_order() -> list[Any]:
    """The elements of the present page, as a browser has them."""
    from nicegui import context

    return list(context.client.layout.descendants())


def labels_of(show: Callable[[], Awaitable[None]]) -> list[str]:
    """The texts of all labels that `show` makes."""
    from nicegui import ui

    async def shown() -> list[str]:
        await show()
        return [each.text for each in in_order() if isinstance(each, ui.label)]

    return on_a_page(shown)


def press(element: Any) -> None:
    """Press an element as a browser does: by its number, which is not there any more if it was replaced."""
    [listener] = [each for each in element._event_listeners.values() if each.type == "click"]
    element.client.handle_event({"id": element.id, "listener_id": listener.id, "args": []})
