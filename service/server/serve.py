"""`millrace serve`: composes the host of jobs, authorization, the API and its pages, and serves them until a signal.

The jobs go on when the service ends; the next start finds them again.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.http.listening import listen
from millrace.lifecycle import stop_flag
from millrace.logs import setup
from millrace.priority import prioritized

if TYPE_CHECKING:
    from service.jobs.config import ServiceConfig
    from service.jobs.host import Host

log = logging.getLogger(__name__)

Config = Annotated[Path, typer.Option("--config", metavar="SERVICE.TOML", help="The service's configuration.")]


def serve(config: Config = Path("service.toml")) -> None:
    """Host jobs, and serve the API that creates and controls them. The jobs outlive this command."""
    setup("service")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    serve_until_stopped(config)


def serve_until_stopped(path: Path) -> None:
    """Serve as the file at `path` says until SIGINT or SIGTERM. Main thread only. Raises SpecError."""
    from service.jobs.config import load_service

    config = load_service(path)
    for script in config.allow.relative_scripts():
        log.warning(
            "allow: the script %r is relative to the base folder of each spec, so a user who may write there chooses "
            "what runs; name it by an absolute path",
            script,
        )
    with stop_flag() as stopping, running_service(config) as service:
        gc.collect()
        gc.freeze()  # else every full garbage collection blocks all requests for a third of a second
        print(f"serving {service.url}, jobs in {config.jobs}", flush=True)
        stopping.wait()


@dataclass(frozen=True, slots=True)
class RunningService:
    """A running service."""

    host: "Host"
    url: str
    """Its address."""


@contextmanager
def running_service(config: "ServiceConfig") -> Iterator[RunningService]:
    """Serve by `config`, whose paths are absolute, while the context lasts. Raises SpecError.

    1. Lock the jobs for this service, and supervise them. 2. Load the tokens, and check where the API may listen.
    3. Serve the API.
    """
    # Imported here: every command imports this module, and few need a server.
    from service.api.app import ApiSettings, app
    from service.api.problems import problem_of
    from service.api.server import serving
    from service.auth.exposure import exposure_of
    from service.auth.guard import Guard
    from service.auth.token_store import StoredTokens
    from service.auth.tokens import Tokens
    from service.jobs.local_host import host_jobs
    from service.ui.mount import mount

    with ExitStack() as held:
        host = held.enter_context(host_jobs(config, problem_of))  # 1
        tokens = Tokens(StoredTokens(host.records))
        exposure = exposure_of(config.listen, config.access, config.tls, any_token=tokens.any_live())  # 2
        terms = ApiSettings(
            guard=Guard(config.access, tokens),
            tokens=tokens,
            limits=config.limits,
            allow=config.allow,
            private=config.private,
            predicting=config.predicting,
            names=exposure.names,
        )
        listener = held.enter_context(listen(exposure.host, exposure.port, "listen"))
        api = app(host, terms)
        mount(api, config.limits.max_streams, config.limits.max_streams_each)
        held.enter_context(prioritized())  # for the threads that answer; those that start jobs are there already
        held.enter_context(serving(api, listener, exposure.cert, exposure.key))  # 3
        address = replace(exposure, port=listener.getsockname()[1]).url  # port 0 takes a free one
        yield RunningService(host, address)
