"""Finds the live feed of a job: through its store on this machine, or through a service. Rank 0 answers in both cases.

Addresses and secret are valid for one generation of the job's workers: after a crash they are requested again.
"""

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace import documents
from millrace.deadline import Deadline
from millrace.errors import MillraceError, Refused, Unavailable
from millrace.rpc.job_client import JobClient, NotRunning

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """Addresses of a feed, and the job it belongs to."""

    job: str
    timeline: str
    generation: int
    secret: str
    """Secret of the feed: it allows reading only."""
    chief: str
    """host:port."""
    shards: tuple[str, ...]
    """host:port of each shard, by number."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self) | {"shards": list(self.shards)}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "FeedAddress":
        """The inverse of `message`. Raises Refused for something else."""
        try:
            job, timeline, secret, chief = (str(message[name]) for name in ("job", "timeline", "secret", "chief"))
            shards = tuple(str(each) for each in message["shards"])
            return cls(job, timeline, int(message["generation"]), secret, chief, shards)
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the answer does not say where a feed is: {type(error).__name__}: {error}") from error


Find = Callable[[Deadline], FeedAddress]
"""Finds a feed. Raises Unavailable where the job does not run, Refused for an unknown job or without permission."""


def in_store(store: Path) -> Find:
    """Find the feed through the store's folder; the caller must be able to read the workers' files."""

    def find(deadline: Deadline) -> FeedAddress:
        try:
            with JobClient(store).rank0() as client:
                return FeedAddress.of_message(client.operate({"do": "feed"}, deadline))
        except NotRunning as error:
            raise Unavailable(str(error)) from error  # a replica waits for the next run

    return find


def at_url(job_url: str, token: str | None = None) -> Find:
    """Find the feed through a service: `job_url` is http(s)://host:port/v1/jobs/<job>, `token` that of an operator."""
    url = f"{job_url.rstrip('/')}/feed"
    if not url.startswith(("http://", "https://")):
        raise Refused(f"{job_url!r} is not an address of a job; write one that begins with http:// or https://")

    def find(deadline: Deadline) -> FeedAddress:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310  # checked above
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=max(0.001, deadline.left_s())) as reply:  # noqa: S310
                return FeedAddress.of_message(documents.parse(reply.read(MAX_ANSWER_BYTES), url))
        except urllib.error.HTTPError as error:
            raise _refusal(error, url) from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"{url} does not answer: {error}") from error

    return find


def _refusal(error: urllib.error.HTTPError, url: str) -> MillraceError:
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
