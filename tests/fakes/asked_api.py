"""The API as tests ask it: without a network, of jobs in memory, or of a real host."""

import asyncio
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from headrace.service.api.app import ApiSettings, app
from headrace.service.api.problems import problem_of
from headrace.service.auth.config import AccessSection, AllowSection
from headrace.service.auth.guard import Guard
from headrace.service.auth.roles import Role
from headrace.service.auth.tokens import MemoryTokenRows, Tokens
from headrace.service.jobs.config import LimitsSection
from headrace.service.jobs.host import NewJob
from headrace.service.jobs.memory_host import MemoryHost
from headrace.service.jobs.operation_queue import OperationQueue
from headrace.service.records.database import opened
from tests.fakes.past import Past
from tests.integration.stream_job import SPEC

PROBLEM = "application/problem+json"


class Served:
    """An application, asked as a client asks it; `token` is sent unless another is given."""

    def __init__(self, api: FastAPI, token: str | None = None) -> None:
        self.api, self.token = api, token

    def ask(self, method: str, path: str, *, host: str = "127.0.0.1", token: str | None = "", **more: Any) -> Any:
        """One request; its answer."""

        wanted = self.token if token == "" else token
        headers = dict(more.pop("headers", None) or {})
        if wanted is not None:
            headers["authorization"] = f"Bearer {wanted}"
        return self.send(httpx.Request(method, f"http://{host}{path}", headers=headers, **more))

    def send(self, request: httpx.Request) -> Any:
        """One request; its answer."""

        async def sent() -> httpx.Response:
            transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport) as client:
                return await client.send(request)

        return asyncio.run(sent())

    def get(self, path: str, **more: Any) -> Any:
        return self.ask("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        return self.ask("POST", path, **({} if body is None else {"json": body}), **more)

    def done(self, answer: Any) -> dict[str, Any]:
        """The operation that an answer 202 tells of, once it is over."""
        assert answer.status_code == 202, answer.text
        while (told := self.get(answer.headers["location"]).json())["ended"] is None:
            pass
        return told


class Api(Served):
    """The API of jobs in memory, with a token of each role."""

    def __init__(
        self,
        root: Path,
        limits: LimitsSection | None = None,
        allow: AllowSection | None = None,
        database: str | None = None,
    ) -> None:
        limits = limits or LimitsSection()
        self.records = opened(database or f"sqlite:///{root / 'records.db'}")
        work = OperationQueue(self.records, threads=2, max_operations=limits.max_operations, problem_of=problem_of)
        self.host = MemoryHost(self.records, work, root)
        tokens = Tokens(MemoryTokenRows())
        self.tokens = {role: tokens.create(role.word, role)[1] for role in Role}
        terms = ApiSettings(
            guard=Guard(AccessSection(), tokens),
            tokens=tokens,
            limits=limits,
            allow=allow or AllowSection(roots=(str(root),)),
            names=("mill.example",),
        )
        super().__init__(app(self.host, terms), self.tokens[Role.ADMIN])

    def close(self) -> None:
        self.host.work.close()
        self.records.close()

    def job(self, name: str = "news", status: dict[str, Any] | None = None, spec: dict[str, Any] | None = None) -> Any:
        """A job that trains."""
        made = self.host.create(NewJob(spec=spec or tomllib.loads(SPEC), name=name), "tests")
        self.host.statuses[name] = {"job": name, "state": "training", **(status or {})}
        return made

    def past(self, name: str = "news", versions: int = 2) -> Past:
        """The past of a job: so many versions, a commit of each."""
        past = Past(self.host.job(name).store)
        (past.store / "run.json").write_text(json.dumps({"job": name}))
        past.begin()
        past.meet("a")
        for version in range(1, versions + 1):
            past.close(version, a=(100 * version - 100, 100 * version))
            past.commit(version)
        past.end()
        return past


@contextmanager
def api(root: Path, **more: Any) -> Iterator[Api]:
    made = Api(root, **more)
    try:
        yield made
    finally:
        made.close()
