"""A real service in this process: a host with its records, the API over a real socket, tokens of every role."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headrace.service.api.app import ApiSettings, app
from headrace.service.api.problems import problem_of
from headrace.service.api.server import bound, serving
from headrace.service.auth.guard import Guard
from headrace.service.auth.roles import Role
from headrace.service.auth.token_store import StoredTokens
from headrace.service.auth.tokens import Tokens
from headrace.service.jobs.config import ServiceConfig, load_service
from headrace.service.jobs.local_host import LocalHost, host_jobs

SPEC = {
    "name": "news",
    "sources": {"main": {"kind": "simulated", "events": 1000}},
    "pipe": {"command": ["cat"]},
    "slots": [{"name": "user"}, {"name": "label", "kind": "meta"}],
    "tasks": [{"name": "ctr", "label": "label"}],
    "model": {"name": "lr"},
}


@dataclass
class ServedHost:
    """The service, and how to ask it."""

    url: str
    config: ServiceConfig
    host: LocalHost
    tokens: Tokens
    texts: dict[Role, str]
    port: int
    http: httpx.Client = field(repr=False)

    def ask(self, method: str, path: str, role: Role | None = Role.ADMIN, **more: Any) -> httpx.Response:
        """One request, with the token of a role."""
        headers = dict(more.pop("headers", {}))
        if role is not None:
            headers.setdefault("Authorization", f"Bearer {self.texts[role]}")
        return self.http.request(method, self.url + path, headers=headers, **more)

    def create(self, spec: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
        """Make a job that does not begin."""
        return self.ask("POST", "/v1/jobs", json={"spec": spec or SPEC, "start": False, **more})

    def raw(self, sent: bytes) -> bytes:
        """The answer to bytes as they are, to the connection's end."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(sent)
            connection.settimeout(10)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        return answer


@contextmanager
def served_host(folder: Path, **sections: Any) -> Iterator[ServedHost]:
    """A service below `folder`: specs may name `cat`, and what lies in folder/data."""
    (folder / "data").mkdir(exist_ok=True)
    told = {"root": "service", "allow": {"pipe_commands": [["cat"]], "roots": ["data"]}, **sections}
    lines = [f"{key} = {json.dumps(value)}" for key, value in told.items() if not isinstance(value, dict)]
    for key, section in told.items():
        if isinstance(section, dict):
            lines += [f"[{key}]", *(f"{name} = {json.dumps(value)}" for name, value in section.items())]
    (folder / "service.toml").write_text("\n".join(lines))
    config = load_service(folder / "service.toml")
    with host_jobs(config, problem_of) as host, httpx.Client(timeout=30) as http:
        tokens = Tokens(StoredTokens(host.records))
        texts = {role: tokens.create(role.word, role)[1] for role in Role}
        guard = Guard(config.access, tokens)
        terms = ApiSettings(
            guard=guard,
            tokens=tokens,
            limits=config.limits,
            allow=config.allow,
            private=config.private,
            predicting=config.predicting,
        )
        listener = bound("127.0.0.1:0")
        port = listener.getsockname()[1]
        with serving(app(host, terms), listener):
            yield ServedHost(f"http://127.0.0.1:{port}", config, host, tokens, texts, port, http)
