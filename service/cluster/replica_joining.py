"""Replicas of other machines join a job at its launcher: by the join token they learn where its live feed is.

The other launchers than the local one listen for workers anyway, and answer replicas there.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.address import address_of, format_address, is_wildcard, parse_address
from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.identity.authority import Authority, open_authority
from headrace.identity.join_token import FILE as TOKEN
from headrace.identity.join_token import check_token, open_token
from headrace.identity.peers import PeerRole, PeerRule
from headrace.rpc import refusals
from headrace.rpc.feed_joining import MAX_CALLS, FeedAnswer, serve_feed_address
from headrace.rpc.job_client import JobClient, NotRunning
from headrace.rpc.rendezvous import MAX_CONNECTIONS
from headrace.rpc.rpc_server import RpcServer
from headrace.rpc.tls_listener import TlsEndpoint
from headrace.service.cluster.runtime import LAUNCHER, OnLine
from headrace.service.cluster.store import IDENTITY
from headrace.service.spec.config import NOBODY_JOINS, ClusterSection
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.launchers import launcher_of
from headrace.trainer.replica.feed_address import certified

ANSWER_S = 5.0
"""Longest wait for rank 0, which knows the addresses."""
CLOSE_S = 1.0
"""Longest wait for a call in flight at the end."""


def feed_answer(store: Path) -> FeedAnswer:
    """Answers replicas of the job that runs in `store`, as rank 0 says, with a certificate of its generation."""

    def answer(signing_request: str) -> Mapping[str, Any]:
        try:
            with JobClient(store).rank0() as client:
                found = client.operate({"do": "feed"}, Deadline.after(ANSWER_S))
        except NotRunning as error:
            raise Unavailable(str(error)) from error
        return certified(found, store, signing_request)

    return answer


@contextmanager
def replicas_joining(job: LoadedJob, on_line: OnLine) -> Iterator[None]:
    """Answer replicas at `cluster.listen` while a job runs whose workers are all on this machine; nobody where it is
    not set.

    Raises SpecError and Unavailable where the address is not available.
    """
    cluster, folder = job.spec.cluster, job.store / IDENTITY
    if not launcher_of(cluster).same_machine or cluster.listen == NOBODY_JOINS:
        yield
        return
    authority = open_authority(folder, job.spec.name)
    open_token(folder, authority)
    host, port = parse_address(cluster.listen)
    server = RpcServer(
        secrets.token_hex(32),  # nobody has it
        max_workers=MAX_CALLS,
        max_connections=MAX_CONNECTIONS,
        tls=_endpoint(cluster, authority),
        check_token=lambda given: check_token(folder / TOKEN, given),
    )
    try:
        serve_feed_address(server, feed_answer(job.store), refusals.PROCESS)
        server.start()
        shown = server.address
        if is_wildcard(host):
            shown = format_address(address_of(cluster.interface), parse_address(shown)[1])
        hint = f"`headrace replica --join {shown} --feed-token-file {folder / TOKEN}` starts one"
        on_line(LAUNCHER, f"answers replicas at {shown}; {hint}")
        yield
    finally:
        server.close(CLOSE_S)


def _endpoint(cluster: ClusterSection, authority: Authority) -> TlsEndpoint:
    """Where replicas join. Generation 0 has no workers, so no certificate is accepted there."""
    host, port = parse_address(cluster.listen)
    head = authority.identity(authority.name(0, PeerRole.HEAD, 0))
    return TlsEndpoint(host, head, PeerRule(authority.job, 0, {}), port, key="cluster.listen", joins=True)
