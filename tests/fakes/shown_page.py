"""A part of the live page, made without a browser."""

import asyncio
from collections.abc import Awaitable, Callable


def labels_of(show: Callable[[], Awaitable[None]]) -> list[str]:
    """The texts of all labels that `show` makes."""
    from nicegui import Client, ui  # takes a second, which most tests of these files do not need
    from nicegui.page import page

    async def shown() -> list[str]:
        with Client(page("/news"), request=None) as client:
            await show()
            return [each.text for each in client.elements.values() if isinstance(each, ui.label)]

    return asyncio.run(shown())
