"""The Role service: how a worker is, a request to end, and one to commit, over gRPC on loopback.

Every worker serves it; the launcher, the API and commands ask. What a status holds is the worker's business.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from millrace import rpc
from millrace.deadline import Deadline
from millrace.errors import MillraceError
from millrace.proto import role_pb2, role_pb2_grpc

CLOSE_S = 1.0
"""How long a call in flight may take to end when its server closes; then it is cut off."""


class _Servicer:
    """The service's calls, each on a thread of the server."""

    def __init__(
        self, status: Callable[[], Mapping[str, Any]], drain: Callable[[], None], commit: Callable[[], None] | None
    ) -> None:
        self._status, self._drain, self._commit = status, drain, commit

    def Status(self, _request: Any, _context: Any) -> Any:  # noqa: N802  # the proto's name
        return role_pb2.StatusReply(status_json=json.dumps(_finite(self._status()), allow_nan=False).encode())

    def Drain(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        self._drain()
        return role_pb2.DrainReply()

    def Commit(self, _request: Any, context: Any) -> Any:  # noqa: N802
        if self._commit is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker leads no commits")
        else:
            self._commit()
        return role_pb2.CommitReply()


def _finite(value: Any) -> Any:
    """`value` for JSON: numbers that are none (an AUC without positives) become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


class RoleServer:
    """A served Role; `close` it, or use it as a context."""

    def __init__(self, server: grpc.Server, address: str) -> None:
        self._server = server
        self.address = address
        """host:port."""

    def close(self) -> None:
        """Stop serving and give the port back."""
        self._server.stop(CLOSE_S).wait()

    def __enter__(self) -> "RoleServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_role(
    status: Callable[[], Mapping[str, Any]],
    drain: Callable[[], None],
    secret: str,
    address_file: Path,
    commit: Callable[[], None] | None = None,
) -> RoleServer:
    """Serve the Role on a free port of loopback, then write its address to `address_file`.

    They are called on threads of the server: all return at once, `drain` and `commit` only raise a flag. A worker that
    leads no commits has no `commit`.
    """
    server, address = rpc.loopback_server(secret, max_workers=2)
    role_pb2_grpc.add_RoleServicer_to_server(_Servicer(status, drain, commit), server)
    server.start()
    rpc.write_address(address_file, address)
    return RoleServer(server, address)


class RoleClient:
    """Asks one worker. Any thread may call. Raises Unavailable, DeadlineExceeded, Refused."""

    def __init__(self, address: str, secret: str) -> None:
        self._address, self._secret = address, secret
        self._channel = rpc.open_channel(address)
        self._stub = role_pb2_grpc.RoleStub(self._channel)

    def status(self, deadline: Deadline) -> dict[str, Any]:
        """How the worker is, as it says."""
        reply = self._call(self._stub.Status, role_pb2.StatusRequest(), deadline)
        status = json.loads(reply.status_json)
        if not isinstance(status, dict):
            raise MillraceError(f"the worker at {self._address} gave a status that is no JSON object")
        return status

    def drain(self, deadline: Deadline) -> None:
        """Ask the worker to finish its pass and end."""
        self._call(self._stub.Drain, role_pb2.DrainRequest(), deadline)

    def commit(self, deadline: Deadline) -> None:
        """Ask the chief to make the state after its pass durable. Raises Refused where the worker leads no commits."""
        self._call(self._stub.Commit, role_pb2.CommitRequest(), deadline)

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def _call(self, method: Any, request: Any, deadline: Deadline) -> Any:
        deadline.check(f"asking the worker at {self._address}")
        try:
            return method(request, timeout=deadline.left_s(), metadata=rpc.metadata(self._secret))
        except grpc.RpcError as error:
            raise rpc.translated(error, f"the worker at {self._address}") from error
