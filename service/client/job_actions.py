"""Actions on a job of a service, for the commands that also work on job files of this machine."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.client.paths import path_of

if TYPE_CHECKING:
    from headrace.service.client.rest_client import ServiceClient


COMMIT_S = 900.0
"""Longest time for a commit: more than a job's default deadline for one."""

UPGRADE_S = 1800.0
"""Longest time to wait for jobs that move to another build: as long as the service waits for one."""

PREDICT_S = 7 * 86400.0
"""Longest time to wait for a prediction job: as long as the service keeps an operation."""


def commit(client: "ServiceClient", job: str, deadline: Deadline) -> str:
    """Have a commit made; return its name."""
    return str(client.done(client.post(path_of("jobs", job, "commits")), deadline)["name"])


def export(
    client: "ServiceClient", job: str, stream: str | None, kind: str | None, deadline: Deadline
) -> dict[str, Any]:
    """Have an export made; return its facts and a summary, "said". `stream` may be None if the job has only one."""
    if stream is None:
        stream = _only_stream(client, job)
    body = {"stream": stream, **({} if kind is None else {"kind": kind})}
    return dict(client.done(client.post(path_of("jobs", job, "exports"), body), deadline))


def set_keys(client: "ServiceClient", job: str, keys: Mapping[str, Any], deadline: Deadline) -> int:
    """Change settings; return the first version they act on."""
    operation = client.change("PATCH", path_of("jobs", job), {"keys": dict(keys)})
    return int(client.done(operation, deadline)["version"])


def resize(
    client: "ServiceClient", job: str, shards: int | None, trainers: int | None, deadline: Deadline
) -> dict[str, Any]:
    """Change the numbers of workers; return them, and the version after which they train."""
    numbers = {"shards": shards, "trainers": trainers}
    body = {name: number for name, number in numbers.items() if number is not None}
    return dict(client.done(client.post(path_of("jobs", job, "resize"), body), deadline))


def upgrade(client: "ServiceClient", job: str | None, build: str, deadline: Deadline) -> list[dict[str, Any]]:
    """Move a job, or all, to a build; return for each where it came from and where it is."""
    path = "/v1/upgrade" if job is None else path_of("jobs", job, "upgrade")
    done = client.done(client.post(path, {"build": build}), deadline)
    return list(done["jobs"]) if job is None else [dict(done)]


def predict(
    client: "ServiceClient", job: str, request: Mapping[str, Any], notify: Callable[[str], None]
) -> dict[str, Any]:
    """Run a prediction job; return its manifest. Paths in the request are paths at the service."""
    operation = client.post(path_of("jobs", job, "predictions"), request)
    return dict(client.done(operation, Deadline.after(PREDICT_S), notify))


def _only_stream(client: "ServiceClient", job: str) -> str:
    streams = list(client.get(path_of("jobs", job, "spec"))["spec"].get("exports", {}))
    if len(streams) != 1:
        raise SpecError(f"name one with --stream; the job has: {', '.join(streams) or 'none'}", "exports")
    return str(streams[0])
