"""gRPC channels to every role of a job: bounded, with the job's secret, and our errors for status codes.

Off loopback a channel has mutual TLS, always. headrace.rpc.rpc_server has the other end, headrace.rpc.unix_sockets
names unix sockets.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from headrace.address import is_loopback, parse_address
from headrace.durable import writing
from headrace.errors import DeadlineExceeded, HeadraceError, Refused, Unavailable
from headrace.identity.credentials import Identity
from headrace.identity.peers import PeerName
from headrace.rpc import channels, unix_sockets

SECRET_KEY = "headrace-secret"
"""Metadata key of the job's secret, in every call: clients of other jobs are refused."""
MAX_MESSAGE_BYTES = 4 << 20
"""Default bound of a message; a larger one fails the call with RESOURCE_EXHAUSTED."""
_DISTRUST = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification", "WRONG_VERSION_NUMBER")
"""Words in the details of a call whose peer is another one, or has no TLS."""
_ENDED = ("Socket closed", "reset by peer", "Broken pipe", "alert")
"""Words in the details of a call whose connection the peer has ended."""


KEEPALIVE_MS, PING_MS = 10_000, 20_000
"""With `keepalive`: how long a connection may be silent before a ping, and how long the peer may take to answer it."""


@dataclass(frozen=True, slots=True)
class TlsPeer:
    """The peer that is expected at an address off loopback, and the identity to show it."""

    identity: Identity
    name: PeerName


def options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a channel or server: bounded messages; a taken port is an error; no proxies on this machine."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def keepalive_options() -> list[tuple[str, int]]:
    """Options of a channel or server whose calls may be silent for long: a peer that is gone is noticed by pings."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_MS),
        ("grpc.http2.ping_timeout_ms", PING_MS),
        ("grpc.http2.max_pings_without_data", 0),  # 0: any number
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]


def path_of(service: ServiceDescriptor, method: str) -> str:
    """The name under which gRPC calls a method of a service."""
    return f"/{service.full_name}/{method}"


def serialize(message: Message) -> bytes:
    """The bytes of a message."""
    return message.SerializeToString()


def needs_tls(address: str) -> bool:
    """Whether an address may be another machine's: neither a unix socket nor a port of loopback."""
    return not address.startswith(unix_sockets.SCHEME) and not is_loopback(parse_address(address)[0])


def open_channel(
    address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES, tls: TlsPeer | None = None, keepalive: bool = False
) -> grpc.Channel:
    """A channel to a role of the job; connects at the first call.

    `keepalive`: see `keepalive_options`. With `tls` it has mutual TLS at every port, and the peer must have the name in
    `tls`. Raises Unavailable if the folder of a unix socket does not exist, and Refused for an address off loopback
    without `tls`.
    """
    try:
        target, descriptor = unix_sockets.target_of(address)
    except OSError as error:
        raise Unavailable(f"{address} is not there: {error.strerror}; has that process ended?") from error
    chosen = [*options(max_message_bytes), *(keepalive_options() if keepalive else [])]
    if tls is not None and not address.startswith(unix_sockets.SCHEME):
        return _tls_channel(address, tls, chosen)
    if needs_tls(address):
        raise Refused(f"{address} is another machine's address, and this process has no certificate to show there")
    channel = grpc.insecure_channel(target, options=chosen)
    if descriptor is not None:
        weakref.finalize(channel, os.close, descriptor)
    return channel


def _tls_channel(address: str, tls: TlsPeer, chosen: list[tuple[str, int]]) -> grpc.Channel:
    mine = tls.identity.current
    own = (mine.key.encode(), mine.certificate.encode()) if mine.certificate else (None, None)
    credentials = grpc.ssl_channel_credentials(mine.authority.encode(), *own)
    name = ("grpc.ssl_target_name_override", tls.name.dns)
    return grpc.secure_channel(address, credentials, options=[*chosen, name])


def metadata(secret: str) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata that every call must carry."""
    return ((SECRET_KEY, secret),)


def error_of_rpc(error: grpc.RpcError, peer: str, tls: TlsPeer | None = None) -> HeadraceError:
    """Our error for a failed call; `peer` names the callee in the message, `tls` is that of the channel."""
    code, details = error.code(), error.details()
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{peer} did not answer in time")
        case grpc.StatusCode.UNAVAILABLE if tls is not None and is_distrust(details):
            return Refused(distrust(peer, details, tls))
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Unavailable(f"{peer} is not reachable: {details}{hint(details, tls)}")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.FAILED_PRECONDITION:
            return Refused(f"{peer} refused the call: {details}")
        case _:
            return HeadraceError(f"{peer} failed: {code.name}: {details}")


def is_distrust(details: str | None) -> bool:
    """Whether a call failed since this process does not accept the certificate of the peer, or the peer has none."""
    return any(word in (details or "") for word in _DISTRUST)


def distrust(peer: str, details: str | None, tls: TlsPeer) -> str:
    """The message for a call that failed so."""
    return (
        f"{peer} does not prove to be {tls.name}: another process has this address, of another job, of another "
        f"generation or without TLS; nothing was sent to it. Check the address, and end processes left over ({details})"
    )


def hint(details: str | None, tls: TlsPeer | None) -> str:
    """The likely cause of a connection that ended at its beginning, or nothing."""
    if tls is None or not tls.identity.current.certificate or not any(word in (details or "") for word in _ENDED):
        return ""
    return f"; if it runs, it may not accept the certificate of {tls.identity.current.name}: its log says why"


def write_address(path: Path, address: str) -> None:
    """Write the address of a launcher for the service: whole or not at all, readable by the owner only.

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


class RenewedChannel:
    """A channel that is opened again when the credentials of this process are renewed.

    A channel of gRPC shows one certificate for ever, also where it connects again after that one has ended.

    Any thread.
    """

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = channels.MAX_MESSAGE_BYTES,
        tls: TlsPeer | None = None,
        keepalive: bool = False,
    ) -> None:
        self._address, self._max_message_bytes, self._tls, self._keepalive = address, max_message_bytes, tls, keepalive
        self._lock = threading.Lock()
        self._open = self._opened()

    @contextmanager
    def for_call(self) -> Iterator[grpc.Channel]:
        """The channel for one call, which a renewal does not disturb: the old one ends with its last call."""
        with self._lock:
            if self._tls is not None and self._tls.identity.current is not self._open.shown:
                before, self._open = self._open, self._opened()
                before.release()
            used = self._open
            used.num_users += 1
        try:
            yield used.channel
        finally:
            with self._lock:
                used.release()

    def close(self) -> None:
        """Close the connection. Calls in flight fail."""
        self._open.channel.close()

    def _opened(self) -> "_OpenChannel":
        shown = None if self._tls is None else self._tls.identity.current
        tls = None if shown is None or self._tls is None else TlsPeer(shown, self._tls.name)
        return _OpenChannel(
            channels.open_channel(
                self._address, max_message_bytes=self._max_message_bytes, tls=tls, keepalive=self._keepalive
            ),
            shown,
        )


class _OpenChannel:
    """A channel, the credentials that it shows, and its users: the one who opened it, and calls."""

    def __init__(self, channel: grpc.Channel, shown: object) -> None:
        self.channel, self.shown, self.num_users = channel, shown, 1

    def release(self) -> None:
        """One user less; the last one closes it."""
        self.num_users -= 1
        if self.num_users == 0:
            self.channel.close()
