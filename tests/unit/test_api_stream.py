"""Event streams: each listener gets each close once, needs no thread, and cannot block others."""

import asyncio
import json
import threading

import pytest
from fastapi import HTTPException

from headrace.errors import Unavailable
from headrace.service.api import event_streams
from headrace.service.api.event_streams import JobPoll, Streams
from headrace.service.history.closes import TimelineVersion
from headrace.service.jobs.errors import UnknownJob
from headrace.service.jobs.host import Phase


class Job:
    """A job that is looked at."""

    timeline, left = 1, 99_999
    """The present timeline, and up to which version it has what the first one had."""

    def __init__(self):
        self.closes, self.phase, self.looks, self.error, self.threads = [], Phase.TRAINING, 0, None, set()

        self.open = threading.Event()
        self.open.set()

    def look(self, name, since):
        self.looks += 1
        assert self.open.wait(10)
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        if name != "news":
            raise UnknownJob(name, ["news"])
        at = TimelineVersion(
            self.timeline, min(since.version if since else 0, self.left if since and since.timeline == 1 else 99_999)
        )
        found = self.closes[-1:] if since is None else [close for close in self.closes if close > at.version]
        told = [(TimelineVersion(self.timeline, n), json.dumps({"version": n})) for n in found]
        return JobPoll(self.phase, json.dumps({"version": len(self.closes)}), told, told[-1][0] if told else at)

    def rewind(self, left):
        """To version `left`, once."""
        self.timeline, self.left, self.closes = 2, left, self.closes[:left]


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(event_streams, "LOOK_S", 0.005)
    monkeypatch.setattr(event_streams, "TELL_S", 0.02)
    return Job()


class Client:
    """Reads a stream; `stalled`: it does not read what was sent."""

    def __init__(self, stream):
        self.events, self.stalled, self.gone = [], False, asyncio.Event()
        self.task = asyncio.create_task(stream({"type": "http"}, self._receive, self._send))

    async def _receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        while self.stalled:  # noqa: ASYNC110  # whoever stalls does so for good
            await asyncio.sleep(0.005)
        for text in message.get("body", b"").decode().split("\n\n")[:-1]:
            self.events.append(dict(line.partition(": ")[::2] for line in text.splitlines()))

    def of(self, kind):
        return [event for event in self.events if event.get("event") == kind]

    @property
    def versions(self):
        return [TimelineVersion.of(event["id"]).version for event in self.of("close")]


async def until(true):
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)


def test_every_listener_is_told_each_close_once_and_the_end(job):
    async def scenario():
        streams = Streams(job.look, 10, 10)
        job.closes = [1, 2]
        first = Client(await streams.open("news", None, "ann"))
        await until(lambda: first.of("figures"))
        job.closes = [1, 2, 3]
        await until(lambda: first.versions == [3])
        second = Client(await streams.open("news", "1", "ann"))
        await until(lambda: second.versions == [2, 3])
        job.closes = [1, 2, 3, 4, 5]
        await until(lambda: first.versions[-1:] == second.versions[-1:] == [5])
        job.phase = Phase.ENDED
        await asyncio.wait_for(asyncio.gather(first.task, second.task), 10)
        assert (first.versions, second.versions) == ([3, 4, 5], [2, 3, 4, 5])
        for client in (first, second):
            assert client.events[-1] == {"event": "end", "data": '{"phase": "ended"}'}
            assert json.loads(client.of("figures")[-1]["data"]) == {"version": 5}

    asyncio.run(scenario())


def test_closes_of_a_new_timeline_are_told_though_their_versions_come_again(job):
    async def scenario():
        streams = Streams(job.look, 10, 10)
        job.closes = list(range(1, 23))
        there = Client(await streams.open("news", None, "ann"))
        await until(lambda: there.of("figures"))
        job.rewind(20)
        job.closes += [21]
        await until(lambda: there.of("close"))
        job.closes += [22, 23]
        clients = [
            there,
            *[Client(await streams.open("news", each, "ann")) for each in ("t1-22", "t1-9", "t2-21", "22")],
        ]
        await until(lambda: all(client.of("close")[-1:] and client.versions[-1] == 23 for client in clients))
        job.phase = Phase.ENDED
        await asyncio.wait_for(asyncio.gather(*(client.task for client in clients)), 10)
        assert [client.versions[0] for client in clients] == [21, 21, 10, 22, 23]
        for client in clients:
            assert client.versions == list(range(client.versions[0], 24))
        assert [event["id"] for event in there.of("close")] == ["t2-21", "t2-22", "t2-23"]

    asyncio.run(scenario())


def test_who_comes_late_while_the_job_is_looked_at_is_told_what_the_others_had(job):
    async def scenario():
        streams = Streams(job.look, 10, 10)
        job.closes = [1, 2, 3]
        first = Client(await streams.open("news", None, "ann"))
        late = await streams.open("news", None, "ann")  # which is read later
        job.closes = [1, 2, 3, 4, 5]
        await until(lambda: first.versions == [4, 5])
        job.open.clear()
        looks = job.looks
        await until(lambda: job.looks > looks)
        second = Client(late)
        await until(lambda: second.of("figures"))
        await asyncio.sleep(0)
        job.open.set()
        await until(lambda: second.versions == [4, 5])
        job.phase = Phase.ENDED
        await asyncio.wait_for(asyncio.gather(first.task, second.task), 10)
        assert first.versions == second.versions == [4, 5]

    asyncio.run(scenario())


def test_a_job_is_looked_at_once_for_all_who_listen_and_not_when_nobody_does(job):
    async def scenario():
        streams = Streams(job.look, 50, 50)
        clients = [Client(await streams.open("news", None, "ann")) for _ in range(20)]
        before = job.looks
        await asyncio.sleep(0.2)
        assert 0 < job.looks - before <= 45  # one task at 200 looks a second at most
        for client in clients:
            client.gone.set()
        await asyncio.gather(*(client.task for client in clients))
        await asyncio.sleep(0.02)
        before = job.looks
        await asyncio.sleep(0.05)
        assert job.looks == before

    asyncio.run(scenario())


def test_streams_are_bounded_and_one_that_ends_makes_room(job):
    async def scenario():
        streams = Streams(job.look, 1, 1)
        client = Client(await streams.open("news", None, "ann"))
        with pytest.raises(HTTPException) as caught:
            await streams.open("news", None, "ann")
        assert caught.value.status_code == 429
        client.gone.set()
        await client.task
        for error, wanted in ((None, UnknownJob), (Unavailable("away"), Unavailable)):
            job.error = error
            with pytest.raises(wanted):  # which takes no room
                await streams.open("nws", None, "ann")
        job.error = None
        await streams.open("news", None, "ann")

    asyncio.run(scenario())


def test_the_streams_of_one_caller_leave_room_for_others(job):
    async def scenario():
        streams = Streams(job.look, 10, 2)
        clients = [Client(await streams.open("news", None, "ann")) for _ in range(2)]
        with pytest.raises(HTTPException) as caught:
            await streams.open("news", None, "ann")
        assert caught.value.status_code == 429 and "2 streams of yours" in caught.value.detail
        clients.append(Client(await streams.open("news", None, "bob")))
        clients[0].gone.set()
        await clients[0].task
        clients.append(Client(await streams.open("news", None, "ann")))
        for client in clients:
            client.gone.set()
            await client.task

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_dropped_and_the_others_go_on(job, monkeypatch):
    monkeypatch.setattr(event_streams, "SLOW_S", 0.05)

    async def scenario():
        streams = Streams(job.look, 10, 10)
        slow, good = Client(await streams.open("news", None, "ann")), Client(await streams.open("news", None, "ann"))
        await until(lambda: slow.events and good.events)
        slow.stalled = True
        job.closes = [1]
        await asyncio.wait_for(slow.task, 10)
        job.closes = [1, 2]
        await until(lambda: good.versions == [1, 2])
        good.gone.set()
        await good.task

    asyncio.run(scenario())


def test_a_line_that_is_silent_is_kept_open(job, monkeypatch):
    monkeypatch.setattr(event_streams, "HEARTBEAT_S", 0.02)

    async def scenario():
        client = Client(await Streams(job.look, 1, 1).open("news", None, "ann"))
        await until(lambda: len([event for event in client.events if "" in event]) >= 2)
        client.gone.set()
        await client.task

    asyncio.run(scenario())


def test_streams_end_when_the_service_does_and_when_a_job_is_gone(job):
    async def scenario():
        streams = Streams(job.look, 10, 10)
        client = Client(await streams.open("news", None, "ann"))
        await until(lambda: client.events)
        job.error = UnknownJob("news", [])
        await asyncio.wait_for(client.task, 10)
        job.error = None
        client = Client(await streams.open("news", None, "ann"))
        await until(lambda: client.events)
        streams.close()
        await asyncio.wait_for(client.task, 10)
        with pytest.raises(HTTPException):
            await streams.open("news", None, "ann")

    asyncio.run(scenario())


def test_who_comes_again_after_long_is_told_the_newest_closes(job):
    async def scenario():
        job.closes, job.phase = list(range(1, 2 * event_streams.MAX_CAUGHT_UP)), Phase.STOPPED
        client = Client(await Streams(job.look, 10, 10).open("news", "1", "ann"))
        await asyncio.wait_for(client.task, 10)
        assert client.versions == job.closes[-event_streams.MAX_CAUGHT_UP :]
        assert client.events[-1]["event"] == "end"

    asyncio.run(scenario())


def test_the_end_comes_last_also_after_figures_that_nobody_has_fetched_yet(job):
    async def scenario():
        streams = Streams(job.look, 10, 10)
        client = Client(await streams.open("news", None, "ann"))
        await until(lambda: client.of("figures"))
        job.closes, job.phase = [1, 2], Phase.FAILED
        await asyncio.wait_for(client.task, 10)
        assert [event["event"] for event in client.events[-4:]] == ["close", "close", "figures", "end"]

    asyncio.run(scenario())
