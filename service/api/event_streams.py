"""Server-sent events of jobs: one task polls each job that has listeners, and passes its news on to all of them.

A listener queues a bounded number of events. Figures that were not sent yet are replaced by newer ones. A client that
does not read is disconnected. Listeners need no threads of their own.
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

from headrace.errors import HeadraceError
from headrace.service.api.problems import http_error
from headrace.service.auth.limits import CallerShares
from headrace.service.history.closes import TimelineVersion
from headrace.service.jobs.host import AT_REST, Phase

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Time between two polls of a job."""
TELL_S = 1.0
"""Shortest time between two `figures` events while no pass closes."""
HEARTBEAT_S = 10.0
"""Longest time without an event; then a comment keeps the connection open."""
SLOW_S = 15.0
"""How long a client may take to read an event; then it is disconnected."""
MAX_WAITING = 256
"""Most closes queued for a client; a client that falls farther behind is disconnected, and may reconnect."""
MAX_CAUGHT_UP = 500
"""Most closes replayed to a client that reconnects; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event, encoded once for all listeners."""

    text: bytes
    """The encoded event."""

    @classmethod
    def of(cls, kind: str, data: str, number: str = "") -> "ServerEvent":
        """An event of a kind, with one line of data, and an id or none."""
        head = f"id: {number}\n" if number else ""
        return cls(f"{head}event: {kind}\ndata: {data}\n\n".encode())


@dataclass(frozen=True, slots=True)
class JobPoll:
    """The result of one poll of a job."""

    phase: Phase
    figures: str
    """As JSON."""
    closes: Sequence[tuple[TimelineVersion, str]]
    """Passes closed since the last poll, each as JSON, oldest first."""
    at: TimelineVersion
    """The moment of the last close; without closes, that of the last poll on the job's present timeline."""


Looker = Callable[[str, TimelineVersion | None], JobPoll]
"""Polls a job: its closes after a moment, or without one only the newest. Blocks. Raises HeadraceError.

If the job was rewound since, the closes of its present timeline from the rewind on are after the moment.
"""


@dataclass(eq=False, slots=True)
class _Listener:
    """One client."""

    at: TimelineVersion
    """The last close that it was sent."""
    waiting: deque[ServerEvent] = field(default_factory=deque)
    figures: ServerEvent | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    def enqueue(
        self,
        closes: Sequence[tuple[TimelineVersion, ServerEvent]],
        figures: ServerEvent | None,
        last: Sequence[ServerEvent] = (),
    ) -> None:
        """Queue closes that it has not got yet, and figures in place of older ones."""
        self.waiting.extend(event for moment, event in closes if moment > self.at)
        self.at = max([self.at, *(moment for moment, _ in closes)])
        self.waiting.extend(last)
        self.figures = None if last else figures or self.figures  # the last ones are among `last`
        self.over = self.over or len(self.waiting) > MAX_WAITING + MAX_CAUGHT_UP
        self.woken.set()

    def take(self) -> bytes:
        """All queued events."""
        found = b"".join(event.text for event in (*self.waiting, *([self.figures] if self.figures else [])))
        self.waiting.clear()
        self.figures = None
        self.woken.clear()
        return found


@dataclass(eq=False, slots=True)
class _Watched:
    """A job with listeners."""

    at: TimelineVersion
    """The last close that all its listeners were sent."""
    listeners: list[_Listener] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Streams:
    """The open streams. On the event loop, except `close`."""

    def __init__(self, look: Looker, max_streams: int, max_each: int) -> None:
        self._look, self._max_streams, self._shares = look, max_streams, CallerShares(max_each)
        self._watched: dict[str, _Watched] = {}
        self._num_streams = 0
        self._closing = False

    async def open(self, job: str, last_id: str | None, who: str) -> "EventStream":
        """A stream of one job's events for `who`. Raises UnknownJob, and 429 where a limit is reached."""
        if self._closing or self._num_streams >= self._max_streams:
            raise http_error(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._num_streams} streams are open, as many as limits.max_streams = {self._max_streams} allows",
            )
        if not self._shares.take(who):
            raise http_error(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._shares.max_each} streams of yours are open, as many as limits.max_streams_each allows",
            )
        since = TimelineVersion.of(last_id or "")
        self._num_streams += 1  # from here on it counts
        try:
            first = await run_in_threadpool(self._look, job, since)
        except BaseException:
            self._release(who)
            raise
        begin = [_close(*each) for each in first.closes[-MAX_CAUGHT_UP:]] if since is not None else []
        return EventStream(self._events(job, begin, first, _Listener(first.at)), lambda: self._release(who))

    def close(self) -> None:
        """End all streams soon. Any thread."""
        self._closing = True

    def _release(self, who: str) -> None:
        self._num_streams -= 1
        self._shares.give_back(who)

    async def _events(
        self, job: str, begin: list[ServerEvent], first: JobPoll, listener: _Listener
    ) -> AsyncGenerator[bytes, None]:
        yield b"".join(event.text for event in (*begin, ServerEvent.of("figures", first.figures)))
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
        watched.at = min(watched.at, listener.at)  # so that a close since its first poll is sent
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
        """Poll a job while it has listeners, and pass news on to them."""
        sent, sent_s, now_s = "", 0.0, asyncio.get_running_loop().time
        last: list[ServerEvent] = []
        try:
            while not self._closing:
                await asyncio.sleep(LOOK_S)
                since = watched.at
                seen = await run_in_threadpool(self._look, job, since)
                if watched.at != since:
                    continue  # a listener that was sent less has joined meanwhile
                news = seen.figures != sent and (bool(seen.closes) or now_s() - sent_s >= TELL_S)
                if news:
                    sent, sent_s = seen.figures, now_s()
                closes = [(moment, _close(moment, data)) for moment, data in seen.closes]
                figures = ServerEvent.of("figures", seen.figures) if news else None
                for listener in watched.listeners if figures or closes else ():
                    listener.enqueue(closes, figures)
                watched.at = seen.at
                if seen.phase in AT_REST:
                    last = [ServerEvent.of("figures", seen.figures), _end(seen.phase)]
                    return
        except HeadraceError as error:  # the job does not answer, or was deleted: its listeners may reconnect
            log.info("the event streams of job %s end: %s", job, error)
        finally:
            if self._watched.get(job) is watched:
                del self._watched[job]
            for listener in watched.listeners:
                listener.over = True
                listener.enqueue((), None, last)


def _close(moment: TimelineVersion, data: str) -> ServerEvent:
    return ServerEvent.of("close", data, str(moment))


def _end(phase: Phase) -> ServerEvent:
    return ServerEvent.of("end", json.dumps({"phase": phase.value}))


class EventStream(Response):
    """Sends events as they arrive, until the last one, or until the client leaves or does not read for SLOW_S."""

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
