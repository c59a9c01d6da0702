"""What the commands that are also for job files here ask of a job at a service."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from millrace.deadline import Deadline
from millrace.errors import SpecError
from service.remote.asking import path_of

if TYPE_CHECKING:
    from service.remote.client import Client


COMMIT_S = 900.0
"""How long a commit may take: longer than a job lets one take by default."""

PREDICT_S = 7 * 86400.0
"""How long a prediction job is waited for: as long as an operation is remembered."""


def commit(client: "Client", job: str, deadline: Deadline) -> str:
    """Have a commit made; its name."""
    return str(client.done(client.post(path_of("jobs", job, "commits")), deadline)["name"])


def export(client: "Client", job: str, stream: str | None, kind: str | None, deadline: Deadline) -> str:
    """Have an export made of a stream, which need not be named where there is one; what came of it, in words."""
    if stream is None:
        stream = _only_stream(client, job)
    asked = {"stream": stream, **({} if kind is None else {"kind": kind})}
    return str(client.done(client.post(path_of("jobs", job, "exports"), asked), deadline)["said"])


def set_keys(client: "Client", job: str, keys: Mapping[str, Any], deadline: Deadline) -> int:
    """Change settings; the version from which on they act."""
    asked = client.change("PATCH", path_of("jobs", job), {"keys": dict(keys)})
    return int(client.done(asked, deadline)["version"])


def predict(client: "Client", job: str, request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Have a prediction job done; its manifest. Paths of the request are the service's."""
    asked = client.post(path_of("jobs", job, "predictions"), request)
    return dict(client.done(asked, Deadline.after(PREDICT_S), say))


def _only_stream(client: "Client", job: str) -> str:
    streams = list(client.get(path_of("jobs", job, "spec"))["spec"].get("exports", {}))
    if len(streams) != 1:
        raise SpecError(f"name one with --stream; the job has: {', '.join(streams) or 'none'}", "exports")
    return str(streams[0])
