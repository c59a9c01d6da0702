"""Server-sent events of a job: one task asks for each job that somebody listens to, and hands on to all listeners.

A listener holds what it has not sent yet, within bounds: figures that nobody has fetched are replaced by newer ones;
a client that does not read what was sent is cut off. No listener has a thread of its own.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from millrace.errors import MillraceError
from service.access.limiting import Shares
from service.api.problems import refused
from service.hosting.host import AT_REST, Phase
from service.past.closes import Moment

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often a job is looked at."""
TELL_S = 1.0
"""How often its figures are told, where no pass is closed."""
HEARTBEAT_S = 10.0
"""How long a line may be silent; then a comment keeps it open."""
SLOW_S = 15.0
"""How long a client may take to read what was sent; then it is dropped."""
MAX_WAITING = 256
"""Closes that wait to be sent to a client; one that falls behind farther is dropped, and may come again."""
MAX_CAUGHT_UP = 500
"""Closes that are told to who comes again; of more, the newest."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event, made once for all who hear it."""

    text: bytes
    """As it is sent."""

    @classmethod
    def of(cls, kind: str, data: str, number: str = "") -> "Event":
        """With its kind, its data on one line, and its id, if any."""
        head = f"id: {number}\n" if number else ""
        return cls(f"{head}event: {kind}\ndata: {data}\n\n".encode())


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a job at once."""

    phase: Phase
    figures: str
    """As JSON."""
    closes: Sequence[tuple[Moment, str]]
    """Passes closed since the last look, each as JSON; the oldest first."""
    at: Moment
    """The last of them; without any, where the job's present timeline was when it was last looked at."""


Looker = Callable[[str, Moment | None], Look]
"""Looks at a job: closes behind that moment, or, without one, the newest only. Blocks. Raises MillraceError.

Where the job was rewound since, those of the present timeline from there on are behind it.
"""


@dataclass(eq=False, slots=True)
class _Listener:
    """One client."""

    at: Moment
    """The last close that it was told."""
    waiting: deque[Event] = field(default_factory=deque)
    figures: Event | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    def tell(self, closes: Sequence[tuple[Moment, Event]], figures: Event | None, last: Sequence[Event] = ()) -> None:
        """Have it sent: closes that it has not had, figures in place of older ones."""
        self.waiting.extend(event for moment, event in closes if moment > self.at)
        self.at = max([self.at, *(moment for moment, _ in closes)])
        self.waiting.extend(last)
        self.figures = None if last else figures or self.figures  # the last ones are among `last`
        self.over = self.over or len(self.waiting) > MAX_WAITING + MAX_CAUGHT_UP
        self.woken.set()

    def take(self) -> bytes:
        """All that waits, to be sent at once."""
        found = b"".join(event.text for event in (*self.waiting, *([self.figures] if self.figures else [])))
        self.waiting.clear()
        self.figures = None
        self.woken.clear()
        return found


@dataclass(eq=False, slots=True)
class _Watched:
    """A job that somebody listens to."""

    at: Moment
    """The last close that all its listeners were told."""
    listeners: list[_Listener] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Streams:
    """See module docstring. On the event loop, but for `close`."""

    def __init__(self, look: Looker, max_streams: int, max_each: int) -> None:
        self._look, self._max_streams, self._shares = look, max_streams, Shares(max_each)
        self._watched: dict[str, _Watched] = {}
        self._num_streams = 0
        self._closing = False

    async def open(self, job: str, last_id: str | None, who: str) -> "EventStream":
        """A stream of one job's events for `who`. Raises 429 where there, or theirs, are too many, UnknownJob."""
        if self._closing or self._num_streams >= self._max_streams:
            raise refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._num_streams} streams are open, limits.max_streams = {self._max_streams} may be",
            )
        if not self._shares.take(who):
            raise refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._shares.max_each} streams of yours are open, as many as limits.max_streams_each allows",
            )
        since = Moment.of(last_id or "")
        self._num_streams += 1  # from here on it counts
        try:
            first = await run_in_threadpool(self._look, job, since)
        except BaseException:
            self._release(who)
            raise
        begin = [_close(*each) for each in first.closes[-MAX_CAUGHT_UP:]] if since is not None else []
        return EventStream(self._events(job, begin, first, _Listener(first.at)), lambda: self._release(who))

    def close(self) -> None:
        """End all streams soon; from any thread."""
        self._closing = True

    def _release(self, who: str) -> None:
        self._num_streams -= 1
        self._shares.give_back(who)

    async def _events(
        self, job: str, begin: list[Event], first: Look, listener: _Listener
    ) -> AsyncGenerator[bytes, None]:
        yield b"".join(event.text for event in (*begin, Event.of("figures", first.figures)))
        if first.phase in AT_REST:
            yield _end(first.phase).text
            return
        self._listen(job, listener)
        try:
            while not self._closing:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await listener.woken.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if news := listener.take():
                    yield news
                if listener.over:
                    return
        finally:
            self._leave(job, listener)

    def _listen(self, job: str, listener: _Listener) -> None:
        watched = self._watched.setdefault(job, _Watched(listener.at))
        watched.at = min(watched.at, listener.at)  # a close since it looked is told
        watched.listeners.append(listener)
        if watched.task is None:
            watched.task = asyncio.create_task(self._watch(job, watched))

    def _leave(self, job: str, listener: _Listener) -> None:
        watched = self._watched.get(job)
        if watched is None or listener not in watched.listeners:
            return
        watched.listeners.remove(listener)
        if not watched.listeners:
            del self._watched[job]
            if watched.task is not None:
                watched.task.cancel()

    async def _watch(self, job: str, watched: _Watched) -> None:
        """Look at a job as long as somebody listens, and tell all what is new."""
        told, told_s, now_s = "", 0.0, asyncio.get_running_loop().time
        last: list[Event] = []
        try:
            while not self._closing:
                await asyncio.sleep(LOOK_S)
                since = watched.at
                seen = await run_in_threadpool(self._look, job, since)
                if watched.at != since:
                    continue  # meanwhile somebody came who was told less
                news = seen.figures != told and (bool(seen.closes) or now_s() - told_s >= TELL_S)
                if news:
                    told, told_s = seen.figures, now_s()
                closes = [(moment, _close(moment, data)) for moment, data in seen.closes]
                figures = Event.of("figures", seen.figures) if news else None
                for listener in watched.listeners if figures or closes else ():
                    listener.tell(closes, figures)
                watched.at = seen.at
                if seen.phase in AT_REST:
                    last = [Event.of("figures", seen.figures), _end(seen.phase)]
                    return
        except MillraceError as error:  # it is away now, or was deleted: its listeners may come again
            log.info("nobody is told of job %s any more: %s", job, error)
        finally:
            if self._watched.get(job) is watched:
                del self._watched[job]
            for listener in watched.listeners:
                listener.over = True
                listener.tell((), None, last)


def _close(moment: Moment, data: str) -> Event:
    return Event.of("close", data, str(moment))


def _end(phase: Phase) -> Event:
    return Event.of("end", json.dumps({"phase": phase.value}))


class EventStream(Response):
    """Sends events as they come, until there are no more, the client goes, or it does not read for SLOW_S."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], release: Callable[[], None]) -> None:
        self._events, self._release = events, release
        self.background = None
        self.status_code = HTTPStatus.OK
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._release()
            for task in (sending, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, TimeoutError, OSError):
                    await task
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        async def within(message: Message) -> None:
            async with asyncio.timeout(SLOW_S):  # wait_for of Python 3.11 may lose a cancellation
                await send(message)

        await within({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await within({"type": "http.response.body", "body": chunk, "more_body": True})
        await within({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
