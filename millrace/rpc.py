"""gRPC as every role of a job uses it: loopback, bounded messages, the job's secret, our errors for status codes.

Each service defines its own messages and calls; `millrace.role` and `pserver` build on this module.
"""

import hmac
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from millrace.deadline import Deadline
from millrace.durable import writing
from millrace.errors import DeadlineExceeded, MillraceError, Refused, Unavailable

SECRET_KEY = "millrace-secret"
"""Metadata of every call: the job's secret, so that no stray client of another job is ever served."""
MAX_MESSAGE_BYTES = 4 << 20
"""Default bound of a message; a larger one fails the call with RESOURCE_EXHAUSTED."""


def options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a channel or server: bounded messages; a taken port is an error; no proxies on loopback."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
    ]


class _SecretCheck(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses every call that does not carry the job's secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

        def refuse(_request: Any, context: Any) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong secret: this process belongs to another job")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Go on only with the right secret, compared in constant time."""
        given = dict(details.invocation_metadata).get(SECRET_KEY, "")
        return continuation(details) if hmac.compare_digest(given.encode(), self._secret) else self._refusal


def loopback_server(
    secret: str, *, max_workers: int, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> tuple[grpc.Server, str]:
    """A server that is not started yet, bound to a free port of 127.0.0.1, and its address.

    A call waits while all `max_workers` threads are busy, until its own deadline.
    """
    server = grpc.server(
        ThreadPoolExecutor(max_workers, thread_name_prefix="rpc"),
        interceptors=[_SecretCheck(secret)],
        options=options(max_message_bytes),
    )
    return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.Channel:
    """A channel to a role of the job; connects at the first call."""
    return grpc.insecure_channel(address, options=options(max_message_bytes))


def metadata(secret: str) -> Sequence[tuple[str, str]]:
    """What every call must carry."""
    return ((SECRET_KEY, secret),)


def translated(error: grpc.RpcError, peer: str) -> MillraceError:
    """The error of ours that a failed call stands for; `peer` says who did not answer, for people."""
    code, details = error.code(), error.details()
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{peer} did not answer in time")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Unavailable(f"{peer} is not reachable: {details}")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.FAILED_PRECONDITION:
            return Refused(f"{peer} refused the call: {details}")
        case _:
            return MillraceError(f"{peer} failed: {code.name}: {details}")


def write_address(path: Path, address: str) -> None:
    """Tell the launcher where this process listens: whole or not at all, readable by the owner only.

    Raises Unwritable.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(address)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def await_address(path: Path, deadline: Deadline, alive: Callable[[], None]) -> str:
    """The address that another process writes to `path`; `alive` raises when that process is gone."""
    while not path.exists():
        alive()
        deadline.check(f"waiting for an address in {path}")
        time.sleep(0.02)
    return path.read_text()
