"""Connections that ask for nothing, slowly or too much, over real sockets: they are closed, and others are answered."""

import asyncio
import socket
from contextlib import closing, suppress

import pytest
from fastapi import FastAPI, Request

from service.api import connections, outer
from service.api.problems import on_error
from service.api.server import bound, serving

LONG_S = 0.2
ASK = b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def listener():
    with closing(bound("127.0.0.1:0")) as listener:
        yield listener


@pytest.fixture
def ask(listener):
    """Opens a connection and sends what is given. What was sent before it is served is there when it is accepted."""
    opened = []

    def ask(sent=b""):
        opened.append(socket.create_connection(listener.getsockname(), 30))
        opened[-1].sendall(sent)
        return opened[-1]

    yield ask
    for each in opened:
        each.close()


def served(listener):
    api = FastAPI()
    api.add_middleware(outer.Outer, names=(), max_body=1000)
    api.add_exception_handler(Exception, on_error)

    @api.get("/slow")
    async def slow():
        await asyncio.sleep(LONG_S)
        return "done"

    @api.post("/read")
    async def read(request: Request):
        return len(await request.body())

    return serving(api, listener)


def answered(connection):
    """All that comes until the other side closes."""
    with connection.makefile("rb") as stream:
        return stream.read()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /slow HTTP/1.1\r\nhost: local", ASK + b"GET /slow HT"], ids=["nothing", "half", "half a second"]
)
def test_who_does_not_ask_is_not_waited_for(listener, ask, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_S", LONG_S / 4)
    connection = ask(sent)
    with served(listener):
        assert answered(connection).count(b"200 OK") == sent.count(ASK)


def test_an_answer_may_take_longer_than_asking(listener, ask, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", LONG_S / 4)
    connection = ask(ASK)
    with served(listener):
        assert b'"done"' in answered(connection)


def test_a_head_that_is_too_long_is_not_read_on(listener, ask):
    with served(listener):
        head = b"GET /slow HTTP/1.1\r\nx: " + b"y" * (connections.MAX_HEAD + 1)
        assert answered(ask(head)).startswith(b"HTTP/1.1 400")


def test_a_body_that_does_not_come_is_not_waited_for(listener, ask, monkeypatch):
    post = b"POST /read HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 9\r\n\r\n"
    with served(listener):
        assert answered(ask(post + b"whole one")).endswith(b"\r\n\r\n9")
        monkeypatch.setattr(outer, "BODY_S", 0.05)
        assert answered(ask(post + b"half")).startswith(b"HTTP/1.1 408")


def test_of_more_connections_than_there_is_room_for_the_last_are_closed_and_the_others_answered(
    listener, ask, monkeypatch
):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 0)
    first, _, third = ask(ASK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")), ask(), ask()
    with served(listener):
        with suppress(ConnectionResetError):
            assert third.recv(1) == b""
        assert b'"done"' in answered(first)
