"""The first contact of a process that joins a job: it learns the certificate of the job's authority from the head.

Nothing is trusted before the certificate has the fingerprint in the join token, so whoever answers instead of the head
gets nothing, neither the token's secret nor a signing request. headrace.rpc.tls_listener answers.
"""

import json
import socket
import ssl

import grpc

from headrace import documents
from headrace.address import parse_address
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused, Unavailable
from headrace.identity import certificates
from headrace.identity.credentials import Credentials
from headrace.identity.join_token import JoinToken
from headrace.identity.peers import PeerName, PeerRole
from headrace.rpc import channels
from headrace.rpc.channels import TlsPeer

PROTOCOL = "headrace-authority"
"""Name of this exchange in the handshake (ALPN)."""
MAX_BYTES = 64 << 10
"""Longest answer."""


def answer(credentials: Credentials) -> bytes:
    """The answer of the head: the certificate of the authority, and its own name."""
    return json.dumps({"authority": credentials.authority, "name": credentials.name.dns}).encode()


def find_head(address: str, token: JoinToken, deadline: Deadline) -> TlsPeer:
    """The head at `address`, for a channel without a certificate of one's own.

    Raises Refused where another job answers, Unavailable where nobody does.
    """
    content = _fetched(address, deadline)
    if not content:
        raise Unavailable(f"the launcher at {address} closed the connection before it answered; is it ending?")
    try:
        found = documents.parse_object(content, "its answer", MAX_BYTES)
        pem, name = str(found["authority"]), PeerName.parse(str(found["name"]))
        fingerprint = certificates.fingerprint(certificates.load(pem))
    except (KeyError, ValueError) as error:
        raise Refused(f"{address} is not the address of a launcher: {error}") from error
    if fingerprint != token.fingerprint:
        raise Refused(
            f"the launcher at {address} has the authority {fingerprint[:16]}, and the join token is of "
            f"{token.fingerprint[:16]}: the token is of another job, or the authority was replaced; get the present "
            "token from the head"
        )
    if name.role is not PeerRole.HEAD:
        raise Refused(f"{address} is the address of {name}, and not of a launcher")
    return TlsPeer(Credentials(authority=pem), name)


def error_of_call(error: grpc.RpcError, peer: str, tls: TlsPeer) -> HeadraceError:
    """The error for a call on a head that was found so: Unavailable where its generation has changed since."""
    if channels.is_distrust(error.details()):
        return Unavailable(f"{peer} shows another certificate now, perhaps of a newer generation")
    return channels.error_of_rpc(error, peer, tls)


def _fetched(address: str, deadline: Deadline) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is checked instead
    context.set_alpn_protocols([PROTOCOL])
    content = b""
    try:
        with socket.create_connection(parse_address(address), max(0.001, deadline.left_s())) as plain:
            with context.wrap_socket(plain) as connection:
                while (part := connection.recv(MAX_BYTES)) and len(content) <= MAX_BYTES:
                    content += part
                    connection.settimeout(max(0.001, deadline.left_s()))
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise Unavailable(f"the launcher at {address} closed the connection: {error}") from error
    except ssl.SSLError as error:
        raise Refused(f"{address} is not the address of a launcher of this version: {error}") from error
    except OSError as error:
        raise Unavailable(f"the launcher at {address} is not reachable: {error}") from error
    return content
