"""Finds the live feed of a job: through its store on this machine, its launcher, or a service. Rank 0 answers.

Addresses and secret are valid for one generation of the job's workers: after a crash they are requested again. Where
the job listens for other machines, the replica gets a certificate for this generation with them: it sends a signing
request, and whoever can read the job's store signs it. The private key never travels.
"""

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.address import is_loopback
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused, Unavailable
from headrace.identity import FOLDER, certificates
from headrace.identity.authority import open_authority
from headrace.identity.credentials import Credentials
from headrace.identity.join_token import read_token
from headrace.identity.peers import PeerName, PeerRole
from headrace.rpc.channels import TlsPeer
from headrace.rpc.feed_joining import ask_feed_address
from headrace.rpc.job_client import JobClient, NotRunning

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """Addresses of a feed, and the job it belongs to."""

    job: str
    timeline: str
    generation: int
    secret: str
    """Secret of the feed: it allows reading only."""
    rank0: str
    """host:port."""
    shards: tuple[str, ...]
    """host:port of each shard, by number."""
    embedded: bool = False
    """Whether the one shard is in rank 0's process."""
    credentials: Credentials | None = field(default=None, repr=False)
    """The replica's, where the job listens for other machines."""

    @classmethod
    def of_message(cls, message: Mapping[str, Any], key: str = "") -> "FeedAddress":
        """The answer of rank 0, as `certified` completes it for the replica with the private key `key`.

        Raises Refused for something else.
        """
        try:
            job, timeline, secret, rank0 = (str(message[name]) for name in ("job", "timeline", "secret", "chief"))
            shards = tuple(str(each) for each in message["shards"])
            own = None
            if message.get("tls"):
                own = Credentials(authority=message["authority"], certificate=message["certificate"], key=key)
            embedded = bool(message.get("embedded"))
            return cls(job, timeline, int(message["generation"]), secret, rank0, shards, embedded, own)
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the answer does not say where a feed is: {type(error).__name__}: {error}") from error

    def peer(self, shard: int | None) -> TlsPeer | None:
        """A shard, or rank 0 if None, and the credentials to show it; None where all are on this machine."""
        if self.credentials is None:
            return None
        role, number = (PeerRole.TRAINER, 0) if shard is None or self.embedded else (PeerRole.SHARD, shard)
        return TlsPeer(self.credentials, PeerName(self.job, self.generation, role, number))


def certified(answer: Mapping[str, Any], store: Path, signing_request: str) -> Mapping[str, Any]:
    """Rank 0's answer, with a certificate for a replica's signing request (PEM) where the feed needs one.

    `store`: the job's. Raises SpecError, and InvalidRequest.
    """
    if not answer.get("tls"):
        return answer
    name = PeerName(str(answer["job"]), int(answer["generation"]), PeerRole.REPLICA, 0)
    authority = open_authority(store / FOLDER, name.job)
    return {**answer, "authority": authority.pem, "certificate": authority.sign(signing_request, name)}


Find = Callable[[Deadline], FeedAddress]
"""Finds a feed. Raises Unavailable where the job does not run, Refused for an unknown job or without permission."""


def in_store(store: Path) -> Find:
    """Find the feed through the store's folder; the caller must be able to read the workers' files."""

    def find(deadline: Deadline) -> FeedAddress:
        try:
            with JobClient(store).rank0() as client:
                answer = client.operate({"do": "feed"}, deadline)
            key = certificates.draw_key()
            return FeedAddress.of_message(certified(answer, store, certificates.signing_request(key)), key)
        except NotRunning as error:
            raise Unavailable(str(error)) from error  # a replica waits for the next run

    return find


def at_launcher(address: str, token_file: Path) -> Find:
    """Find the feed through the launcher that listens at `address`. The file with the job's join token is read again
    each time, since an operator may replace the token. Raises SpecError for a file that holds none."""
    read_token(token_file)

    def find(deadline: Deadline) -> FeedAddress:
        key = certificates.draw_key()
        token, request = read_token(token_file), certificates.signing_request(key)
        return FeedAddress.of_message(ask_feed_address(address, token, request, deadline), key)

    return find


def at_url(job_url: str, token: str | None = None) -> Find:
    """Find the feed through a service: `job_url` is http(s)://host:port/v1/jobs/<job>, `token` that of an operator."""
    url = f"{job_url.rstrip('/')}/feed"
    if not url.startswith(("http://", "https://")):
        raise Refused(f"{job_url!r} is not an address of a job; write one that begins with http:// or https://")
    if url.startswith("http://") and not is_loopback(urllib.parse.urlsplit(url).hostname or ""):
        raise Refused(
            f"{job_url!r} leads to another machine in clear: whoever is between could read the token, and answer "
            "instead; write https://, and name the file of its authority's certificate in SSL_CERT_FILE if this "
            "machine does not know it"
        )

    def find(deadline: Deadline) -> FeedAddress:
        key = certificates.draw_key()
        query = urllib.parse.urlencode({"signing_request": certificates.signing_request(key)})
        request = urllib.request.Request(f"{url}?{query}", headers={"Accept": "application/json"})  # noqa: S310  # checked above
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=max(0.001, deadline.left_s())) as reply:  # noqa: S310
                return FeedAddress.of_message(documents.parse(reply.read(MAX_ANSWER_BYTES), url), key)
        except urllib.error.HTTPError as error:
            raise _refusal(error, url) from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"{url} does not answer: {error}") from error

    return find


def _refusal(error: urllib.error.HTTPError, url: str) -> HeadraceError:
    """Unavailable for errors that pass (server errors, a job that is not up, too many requests), else Refused."""
    passes = error.code >= 500 or error.code in (408, 409, 425, 429)
    kind = Unavailable if passes else Refused
    with error:
        said = error.read(MAX_ANSWER_BYTES).decode(errors="replace")
    try:
        said = str(documents.parse_object(said, url)["detail"])
    except (ValueError, LookupError, TypeError):
        said = said[:200]
    return kind(f"{url} answered {error.code}: {said}")
