"""Mutual TLS in front of a gRPC server: a port whose connections lead to the server's unix socket.

A peer's certificate is checked here, before gRPC sees a byte of it, so that each stranger is counted and told with the
reason. A peer with a certificate of this job that is not accepted, such as one of an older generation, gets as far as
its first call: that call is refused in words. gRPC's own TLS could do neither.
"""

import asyncio
import os
import secrets
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from headrace.address import format_address
from headrace.connection_places import Place, yielding
from headrace.errors import SpecError
from headrace.http.listening import BACKLOG, ConnectionBounds
from headrace.identity import certificates
from headrace.identity.certificates import WrongPeer
from headrace.identity.credentials import Credentials, Identity
from headrace.identity.peers import PeerName, PeerRule
from headrace.rpc import authority_contact, refusals, unix_sockets
from headrace.rpc.refusals import RefusalReason, Refusals

HANDSHAKE_S = 10.0
"""Longest time for a handshake."""
MAX_UNPROVEN = 256
"""Most connections whose peer has shown neither a certificate of the job nor its secret; beyond it, or beyond a share
of the descriptors, one of them gives way to a new one (headrace.connection_places): strangers keep no peer out.

Each agent of the largest job (64 trainers, 64 shards) has one until it has joined."""
YIELD_S = 0.002
"""Shortest time between two that give way: each connection has MAX_UNPROVEN times as long to prove itself."""
MAX_PEERS = 256
"""Most connections of peers that are proven; a further one is closed at once.

At the head each worker of the largest job has one, and its agent one."""
CHUNK_BYTES = 1 << 16
"""Bytes copied at a time, and the bound of what waits in each direction."""
UNSENT_BYTES = 1 << 17
"""Most bytes that the kernel takes from one connection before it sends them: an answer to a ping of a peer behind a
slow link is not long behind them."""
CLOSE_S = 1.0
"""Longest time for the last bytes of a connection when the listener closes."""
_PREFIX = "unix-abstract:"
_PLAIN = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "RECORD_TOO_SMALL")


@dataclass(frozen=True, slots=True)
class TlsEndpoint:
    """Where a process listens off loopback, who it is, and which peers it accepts."""

    host: str
    identity: Identity
    accepts: PeerRule
    port: int = 0
    """0: a free one."""
    key: str = "cluster.interface"
    """The key of the spec that gives `host`."""
    joins: bool = False
    """Whether processes that have no certificate yet may connect: at the head, which signs one for them."""
    certifies: bool = True
    """Whether they get one when they join, and need it from then on. On loopback the secret is enough."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that has a certificate of the job, or joins. Its calls are refused where there is an objection."""

    name: PeerName | None
    """None: it joins, and has no certificate yet."""
    source: str
    """Address of its machine."""
    objection: str = ""
    """The reason in words why it is refused, or nothing."""
    reason: RefusalReason = RefusalReason.OTHER_PEER
    """The kind of that reason."""
    counted: bool = False
    """Whether the refusal was counted when it connected; it may break off before its first call."""


class TlsListener:
    """Listens from its construction on; forwards until `close`."""

    def __init__(self, endpoint: TlsEndpoint, server: Path, noted: Refusals = refusals.PROCESS) -> None:
        """Listen for the gRPC server at the unix socket `server`.

        Raises SpecError where the endpoint's host is no address of this machine, or its port is taken.
        """
        self._endpoint, self._noted = endpoint, noted
        self._target, self._descriptor = unix_sockets.target_of(unix_sockets.address_of(server))
        self._shown = endpoint.identity.current
        self._authority = certificates.load(self._shown.authority)
        self._context = server_context(self._shown, joins=endpoint.joins)
        self._socket = _bound(endpoint)
        self.address = format_address(endpoint.host, self._socket.getsockname()[1])
        self.certifies = endpoint.certifies
        self._peers: dict[str, tuple[Peer, Place]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection; asyncio itself does not keep them
        self._handshakes: set[asyncio.Task[None]] = set()
        self._unproven: list[Place] = []  # oldest first; proven ones may still be there
        self._max_unproven = min(MAX_UNPROVEN, max(1, ConnectionBounds.here().open // 4))
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="tls", daemon=True)
        self._thread.start()

    def peer(self, connection: str) -> Peer | None:
        """The peer of a connection, as gRPC names it; None for one that did not come through this listener."""
        found = self._peers.get(connection.removeprefix(_PREFIX))
        return None if found is None else self._judged(found[0])

    def prove(self, connection: str) -> None:
        """A call by this connection has the secret: no stranger takes its place. Any thread."""
        found = self._peers.get(connection.removeprefix(_PREFIX))
        if found is not None and not found[1].proven and self._num_proven() < MAX_PEERS:
            found[1].proven = True

    def _num_proven(self) -> int:
        return sum(place.proven for _, place in list(self._peers.values()))

    def change(self, identity: Identity, accepts: PeerRule) -> None:
        """Be another process of the same job to connections from now on, and accept other peers.

        Peers that are connected and not accepted any more are refused at their next call.
        """
        self._endpoint = replace(self._endpoint, identity=identity, accepts=accepts)

    def close(self) -> None:
        """Stop listening and end all connections. A second call does nothing."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        self._socket.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    # --- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _serve(self) -> None:
        while True:
            try:
                connection, source = await self._loop.sock_accept(self._socket)
            except OSError:  # it is gone already, or descriptors are short
                await asyncio.sleep(0.01)
                continue
            self._begin(connection, source[0])
            await asyncio.sleep(0)  # the task begins, so that it closes its connection when it is cancelled
            await self._make_room()

    def _begin(self, connection: socket.socket, source: str) -> None:
        place = Place.of(source, lambda: task.cancel())
        task = self._loop.create_task(self._take(connection, source, place))
        self._tasks.add(task)
        self._handshakes.add(task)
        self._unproven.append(place)
        task.add_done_callback(lambda task: self._forget(task, place))

    async def _make_room(self) -> None:
        """End a connection of a stranger where they are too many."""
        self._unproven = [place for place in self._unproven if not place.proven]
        if len(self._unproven) > self._max_unproven and (ended := yielding(self._unproven)) is not None:
            self._noted.note(
                RefusalReason.SILENT, ended.network, "too many connections, of which this one was the oldest"
            )
            self._unproven.remove(ended)
            ended.end()
            await asyncio.sleep(YIELD_S)

    def _forget(self, task: asyncio.Task[None], place: Place) -> None:
        self._tasks.discard(task)
        self._handshakes.discard(task)
        if place in self._unproven:
            self._unproven.remove(place)

    async def _end(self) -> None:
        """End all connections. Those whose server has ended have CLOSE_S for their last bytes."""
        if last := self._tasks - self._handshakes:
            await asyncio.wait(last, timeout=CLOSE_S)
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn

    async def _take(self, connection: socket.socket, source: str, place: Place) -> None:
        """One connection, from its handshake to its end."""
        reader = asyncio.StreamReader(CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._present_context(),
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=CLOSE_S,
            )
        except asyncio.CancelledError:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            self._noted.note(*_told(error, source))
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        if (task := asyncio.current_task()) is not None:
            self._handshakes.discard(task)
        try:
            connected = transport.get_extra_info("ssl_object")
            if connected.selected_alpn_protocol() == authority_contact.PROTOCOL:
                writer.write(authority_contact.answer(self._shown))
                return
            peer = self._peer_of(connected, source)
            if peer is not None:
                place.proven = peer.name is not None
                await self._forward(peer, place, reader, writer)
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _present_context(self) -> ssl.SSLContext:
        """The context with the present certificate. Connections that began with another one are not affected."""
        if (current := self._endpoint.identity.current) is not self._shown:
            self._context = server_context(current, joins=self._endpoint.joins)
            self._shown = current
        return self._context

    def _peer_of(self, connection: ssl.SSLObject, source: str) -> Peer | None:
        certificate = connection.getpeercert(binary_form=True)
        if certificate is None:  # the handshake lets only those pass that may join
            return Peer(None, source)
        if self._num_proven() >= MAX_PEERS:
            self._noted.note(RefusalReason.TOO_MANY, source, f"{MAX_PEERS} such connections are open already")
            return None
        try:
            name = certificates.check_signed(certificate, self._authority, datetime.now(UTC))
        except WrongPeer as error:
            self._noted.note(RefusalReason.WRONG_CERTIFICATE, source, str(error))
            return None
        peer = self._judged(Peer(name, source))
        if peer.objection:
            self._noted.note(peer.reason, source, peer.objection)
        return replace(peer, counted=bool(peer.objection))

    def _judged(self, peer: Peer) -> Peer:
        """A peer with the objection of now, if there is one."""
        if peer.name is None:
            return peer
        rule = self._endpoint.accepts
        old = peer.name.job == rule.job and peer.name.generation != rule.generation
        reason = RefusalReason.OTHER_GENERATION if old else RefusalReason.OTHER_PEER
        return replace(peer, objection=rule.objection(peer.name), reason=reason)

    async def _forward(
        self, peer: Peer, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy in both directions until one side ends."""
        name = f"headrace-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to_server:
            to_server.setblocking(False)
            to_server.bind(f"\0{name}")  # by which gRPC names the connection
            self._peers[name] = peer, place
            try:
                await self._loop.sock_connect(to_server, self._target.removeprefix(unix_sockets.SCHEME))
                served, server = await asyncio.open_connection(sock=to_server, limit=CHUNK_BYTES)
                copies = [asyncio.ensure_future(_copy(*ends)) for ends in ((reader, server), (served, writer))]
                try:
                    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for copy in copies:
                        copy.cancel()
                    server.close()
                    await asyncio.gather(*copies, return_exceptions=True)
            except OSError:
                pass  # the server has ended, and so does the connection
            finally:
                del self._peers[name]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _told(error: OSError, source: str) -> tuple[RefusalReason, str, str]:
    """The reason of a failed handshake, for Refusals.note."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return RefusalReason.WRONG_CERTIFICATE, source, f"its certificate is not of this job: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = str(error.reason or error)
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return RefusalReason.NO_CERTIFICATE, source, "it has no certificate; workers get one when they join"
        if reason in _PLAIN:
            return RefusalReason.PLAIN_TEXT, source, "it does not speak TLS, which this port requires"
        return RefusalReason.WRONG_CERTIFICATE, source, f"the handshake failed: {reason}"
    return RefusalReason.SILENT, source, "it began no handshake, or did not finish it: a port scan?"


def server_context(credentials: Credentials, *, joins: bool) -> ssl.SSLContext:
    """TLS 1.3 for a server of gRPC whose clients have a certificate of the job's authority.

    `joins`: or none yet, and they may ask for the certificate of the authority.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.num_tickets = 0  # each connection shows its certificate
    context.set_alpn_protocols(["h2", authority_contact.PROTOCOL] if joins else ["h2"])
    if joins:
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.authority)
    # The module takes keys from files only; this one is in memory, and nobody else can open it.
    with os.fdopen(os.memfd_create("identity", os.MFD_CLOEXEC), "w") as file:
        file.write(credentials.key + credentials.certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _bound(endpoint: TlsEndpoint) -> socket.socket:
    host, port = endpoint.host, endpoint.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        raise SpecError(f"{format_address(host, port)} is not available: {error.strerror}", endpoint.key) from error
    return listener
