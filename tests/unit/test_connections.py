"""Connections that send nothing, slowly, too much or ambiguous heads, over real sockets, at both servers."""

import asyncio
import logging
import socket
from contextlib import closing, suppress

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from headrace.http import connections
from headrace.http.listening import MAX_CONNECTIONS, ConnectionBounds, listen
from headrace.logs import RepeatFilter
from headrace.service.api import middleware
from headrace.service.api import server as of_the_service
from headrace.service.api.problems import on_error
from headrace.service.auth.config import AccessSection
from headrace.service.auth.guard import Guard, authenticate
from headrace.service.auth.roles import Caller, Role
from headrace.trainer.replica import access
from headrace.trainer.replica import http_api as of_a_replica

LONG_S = 0.2
TOKEN = "t" * 16
ASK = b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n"
CLOSING = ASK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
HELD, KNOWN = ASK.replace(b"slow", b"held"), ASK.replace(b"slow", b"known")
KNOWN = KNOWN.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n")
POST = b"POST /read HTTP/1.1\r\nhost: localhost\r\n"


class OneToken:
    """The TokenLookup of the service."""

    def caller(self, token):
        return Caller("anne", Role.OPERATOR) if token == TOKEN else None

    at_once = caller


@pytest.fixture
def listener():
    with closing(listen("127.0.0.1", 0, "listen")) as listener:
        yield listener


@pytest.fixture
def ask(listener):
    """Opens a connection and sends what is given. What was sent before it is served is there when it is accepted."""
    opened = []

    def ask(sent=b"", source="127.0.0.1"):
        opened.append(socket.create_connection(listener.getsockname(), 30, (source, 0)))
        with suppress(OSError):  # refused meanwhile
            opened[-1].sendall(sent)
        return opened[-1]

    yield ask
    for each in opened:
        each.close()


@pytest.fixture(params=["service", "replica"])
def served(request, listener):
    """Serves as long as its context lasts."""
    api, is_replica = FastAPI(), request.param == "replica"
    if not is_replica:
        api.add_middleware(middleware.RequestChecks, names=(), max_body=1000)
        api.add_exception_handler(Exception, on_error)

    @api.get("/slow")
    async def slow():
        await asyncio.sleep(LONG_S)
        return "done"

    @api.get("/held")
    async def held():
        async def parts():
            yield "begun"
            await asyncio.sleep(20)

        return StreamingResponse(parts())

    api.state.guard = Guard(AccessSection(anonymous="viewer"), OneToken())

    @api.get("/known")
    async def known(request: Request):
        if request.headers["authorization"] and not is_replica:
            authenticate(request, Role.OPERATOR)

    @api.post("/read")
    async def read(request: Request):
        return len(await request.body())

    if not is_replica:
        return lambda token=None: of_the_service.serving(api, listener)
    return lambda token=None: of_a_replica.serving(access.RequestGate(api, token, 1000, 10, local=True), listener)


def answered(connection):
    """All that comes until the other side closes."""
    found = b""
    with suppress(ConnectionResetError):  # closed before all was read that was sent
        while part := connection.recv(1 << 16):
            found += part
    return found


@pytest.mark.parametrize(
    "sent", [b"", b"GET /slow HTTP/1.1\r\nhost: local", ASK + b"GET /slow HT"], ids=["nothing", "half", "half a second"]
)
def test_a_client_that_does_not_ask_is_not_waited_for(served, ask, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_S", LONG_S / 4)
    connection = ask(sent)
    with served():
        assert answered(connection).count(b"200 OK") == sent.count(ASK)


def test_an_answer_may_take_longer_than_asking(served, ask, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", LONG_S / 4)
    connection = ask(CLOSING)
    with served():
        assert b'"done"' in answered(connection)


MANY = connections.MAX_HEAD // 4
READ = connections.MAX_HEAD + (256 << 10)
"""More than one read of asyncio brings."""
TOO_LONG = {
    "one header": b"GET /slow HTTP/1.1\r\nx: " + b"y" * (connections.MAX_HEAD + 1),
    "a whole one": ASK[:-2] + b"x: " + b"y" * connections.MAX_HEAD + b"\r\n\r\n",
    "many": ASK[:-2] + b"x: y\r\n" * MANY + b"\r\n",
    "the line": b"GET /" + b"y" * connections.MAX_HEAD,
    "trailers": POST + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * (READ // 6),
    "a chunk's name": POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"y" * READ,
}


@pytest.mark.parametrize("what", TOO_LONG)
def test_a_head_that_is_too_long_is_not_read_on(served, ask, what):
    with served():
        assert answered(ask(TOO_LONG[what])).startswith(b"HTTP/1.1 400")


def test_a_body_is_no_head_however_it_comes(served, ask):
    chunks = b"1;name\r\nx\r\n" * 900
    with served():
        said = answered(
            ask(POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\nlast: x\r\n\r\n")
        )
        assert said.startswith(b"HTTP/1.1 200") and said.endswith(b"900")


SMUGGLED = {
    "length, chunked": b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
    "chunked, length": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    "two lengths": b"content-length: 0\r\ncontent-length: 4\r\n",
    "two codings": b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
    "a coding before": b"transfer-encoding: identity, chunked\r\n",
    "a coding behind": b"transfer-encoding: chunked, identity\r\n",
    "no coding": b"transfer-encoding: xchunked\r\n",
    "a space": b"content-length: 4\r\ntransfer-encoding : chunked\r\n",
    "a sign": b"content-length: +0\r\n",
}


@pytest.mark.parametrize("what", SMUGGLED)
def test_a_body_with_two_ends_is_refused_and_what_follows_is_not_read(served, ask, what):
    with served():
        said = answered(ask(POST + SMUGGLED[what] + b"\r\n0\r\n\r\n" + CLOSING))
        assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1 ") == 1


def test_a_chunked_body_of_http_1_0_is_refused(served, ask):
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"connection: keep-alive\r\n"
    with served():
        said = answered(ask(old + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + CLOSING))
        assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1 ") == 1


def test_requests_one_behind_the_other_are_answered(served, ask):
    with served():
        said = answered(ask(POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n" + CLOSING))
        assert said.count(b"200 OK") == 2 and b'"done"' in said


def test_a_body_that_does_not_come_is_not_waited_for(served, ask, monkeypatch):
    post = POST + b"connection: close\r\ncontent-length: 9\r\n\r\n"
    with served():
        assert answered(ask(post + b"whole one")).endswith(b"\r\n\r\n9")
        monkeypatch.setattr(middleware, "BODY_S", 0.05)
        monkeypatch.setattr(access, "BODY_S", 0.05)
        assert answered(ask(post + b"half")).startswith(b"HTTP/1.1 408")


def test_idle_connections_of_a_stranger_keep_nobody_out(served, listener, ask):
    listener.room = ConnectionBounds(answered=16, open=18)
    with served():
        idle = [ask(b"GET /slow HT" * (number % 2)) for number in range(30)]
        assert b'"done"' in answered(ask(CLOSING))
        still_open = [each for each in idle if not is_ended(each)]
        assert idle[-13:] == still_open  # 14 places, of which the asking one took one


def test_a_client_with_a_token_keeps_its_connection_and_strangers_give_way(served, listener, ask):
    listener.room = ConnectionBounds(answered=8, open=9)
    with served(TOKEN):
        known, unknown = ask(KNOWN), ask(ASK)
        assert b"200 OK" in one_answer(known) and b"HTTP/1.1 " in unknown.recv(1 << 16)
        for _ in range(30):
            ask()
        known.sendall(KNOWN)
        assert b"200 OK" in one_answer(known)
        assert is_ended(unknown)


def test_a_request_beyond_the_answered_ones_is_told_so_and_beyond_the_open_ones_closed(served, listener, ask):
    listener.room = ConnectionBounds(answered=2, open=3)
    with served():
        first = ask(HELD)
        assert first.recv(1 << 16)  # it is under way, so it does not give way
        second = ask(HELD)
        assert b"HTTP/1.1 503" in second.recv(1 << 16)
        assert not is_ended(first)
        first.close()
        second.close()


def test_requests_of_one_address_keep_no_other_address_out(served, listener, ask):
    listener.room = ConnectionBounds(answered=8, open=9)
    with served():
        busy = []
        for _ in range(7):
            busy.append(ask(HELD))
            assert busy[-1].recv(1 << 16)  # it is under way
        assert b'"done"' in answered(ask(CLOSING, source="127.0.0.2"))
        for each in busy:
            each.close()


def one_answer(connection):
    """The answer to KNOWN."""
    found = b""
    while not found.endswith(b"null"):
        found += connection.recv(1 << 16)
    return found


def is_ended(connection):
    """Whether the server has ended a connection, on which nothing is asked now."""
    connection.settimeout(0.02)
    try:
        while connection.recv(1 << 16):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(("descriptors", "answered"), [(1 << 20, MAX_CONNECTIONS), (1024, 455), (256, 113), (2, 1)])
def test_connections_take_half_of_the_descriptors_at_most(descriptors, answered):
    room = ConnectionBounds.of(descriptors)
    assert room.answered == answered <= room.open
    assert room.open <= max(1, descriptors // 2)


def test_what_strangers_have_a_log_say_is_bounded(caplog):
    now_s = 0.0
    log = logging.getLogger("headrace.test.repeats")
    log.addFilter(repeats := RepeatFilter(lambda: now_s))
    try:
        for _ in range(2000):
            log.warning("invalid")
        for number in range(2000):
            log.warning("no %d" % number)  # noqa: UP031  # as a library may, that words its lines itself
        now_s = 3600.0
        log.warning("later %s", "on")
    finally:
        log.removeFilter(repeats)
    said = [record.getMessage() for record in caplog.records if record.name == log.name]  # servers end meanwhile
    assert said[:4] == ["invalid", *(f"invalid (this occurred {times} times)" for times in (10, 100, 1000))]
    assert len(said) == 101 and said[-1] == "later on (1904 other lines were left out)"
