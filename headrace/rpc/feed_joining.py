"""The call by which a replica of another machine learns where a job's live feed is, and the replica's client.

The replica shows the join token, as an agent does (headrace.rpc.joining), and gets a certificate for the key of its
signing request. The launcher serves the call; service.cluster.replica_joining answers.
"""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from headrace import documents
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, Refused, Unavailable
from headrace.identity.join_token import JoinToken, StaleToken
from headrace.proto import rendezvous_pb2 as pb
from headrace.rpc import channels
from headrace.rpc.authority_contact import error_of_call, find_head
from headrace.rpc.joining import error_of_refusal, reason_of, refusal_of
from headrace.rpc.refusals import Refusals
from headrace.rpc.rpc_server import RpcServer

SERVICE = pb.DESCRIPTOR.services_by_name["Replicas"]
MAX_CALLS = 4
"""Most calls that are answered at a time; a further one is told to ask again."""
MAX_ANSWER_BYTES = 1 << 20
"""Longest answer."""

FeedAnswer = Callable[[str], Mapping[str, Any]]
"""Takes a signing request (PEM); the addresses of the feed, with a certificate where it needs one. Any thread. Raises
HeadraceError."""


class _Servicer:
    """The call of the service, on threads of the server."""

    def __init__(self, answer: FeedAnswer, callers: RpcServer, noted: Refusals) -> None:
        self._answer, self._source_of, self._noted = answer, callers.source_of, noted
        self._free = threading.Semaphore(MAX_CALLS)

    def Feed(self, request: pb.FeedRequest, context: grpc.ServicerContext) -> pb.FeedReply:
        if not self._free.acquire(blocking=False):
            return pb.FeedReply(refusal=refusal_of(Unavailable("many replicas ask at once; ask again")))
        try:
            return pb.FeedReply(answer_json=json.dumps(self._answer(request.signing_request)).encode())
        except (Unavailable, DeadlineExceeded, NotYet) as error:
            return pb.FeedReply(refusal=refusal_of(Unavailable(str(error))))
        except HeadraceError as error:
            self._noted.note(reason_of(error), self._source_of(context), str(error))
            return pb.FeedReply(refusal=refusal_of(error))
        finally:
            self._free.release()


def serve_feed_address(server: RpcServer, answer: FeedAnswer, noted: Refusals) -> None:
    """Answer replicas at a server that is not started, and that knows the join token."""
    server.add_service(SERVICE, _Servicer(answer, server, noted), joining=("Feed",))


def ask_feed_address(address: str, token: JoinToken, signing_request: str, deadline: Deadline) -> Mapping[str, Any]:
    """The answer of the launcher at `address`, which must have the authority that the token names.

    Raises StaleToken, Refused, DeadlineExceeded, and Unavailable also where another generation begins meanwhile.
    """
    peer = f"the launcher at {address}"
    tls = find_head(address, token, deadline)
    request, path = pb.FeedRequest(signing_request=signing_request), channels.path_of(SERVICE, "Feed")
    with channels.open_channel(address, tls=tls) as channel:
        call = channel.unary_unary(path, channels.serialize, pb.FeedReply.FromString)
        try:
            reply = call(request, timeout=max(0.001, deadline.left_s()), metadata=channels.metadata(token.secret))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise StaleToken() from error
            raise error_of_call(error, peer, tls) from error
    if reply.HasField("refusal"):
        if reply.refusal.kind == pb.Refusal.LATER:
            raise Unavailable(f"{peer}: {reply.refusal.reason}")
        raise error_of_refusal(reply.refusal, peer)
    try:
        return documents.parse_object(reply.answer_json, "its answer", MAX_ANSWER_BYTES)
    except ValueError as error:
        raise Refused(f"{peer} does not say where a feed is: {error}") from error
