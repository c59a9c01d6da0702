"""`headrace serve`: composes the host of jobs, authorization, the API and its pages, and serves them until a signal.

The jobs go on when the service ends; the next start finds them again.
"""

import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from headrace.http.listening import listen
from headrace.http.open_pages import health_served
from headrace.lifecycle import stop_flag
from headrace.logs import setup
from headrace.priority import prioritized

if TYPE_CHECKING:
    from headrace.service.jobs.config import ServiceConfig
    from headrace.service.jobs.host import Host

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Time between two looks whether another service has taken the place of this one."""


def serve(path: Path, health: str | None = None) -> None:
    """Serve as serve_until_stopped, as the whole work of this process."""
    setup("service")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    serve_until_stopped(path, health)


def serve_until_stopped(path: Path, health: str | None = None) -> None:
    """Serve as the file at `path` says until SIGINT or SIGTERM. Main thread only. Raises SpecError.

    `health`: where to answer meanwhile whether this process is alive, and ready, which is once it serves.
    """
    from headrace.service.jobs.config import load_service

    config = load_service(path)
    for script in config.allow.relative_scripts():
        log.warning(
            "allow: the script %r is relative to the base folder of each spec, so a user who may write there chooses "
            "what runs; name it by an absolute path",
            script,
        )
    from headrace.service.jobs.activation import EndedWaiting

    lacks = "starts, or waits for another service to end"
    with (
        stop_flag() as stopping,
        health_served(health, lambda: lacks),
        suppress(EndedWaiting),
        running_service(config, stopping) as service,
    ):
        lacks = ""
        gc.collect()
        gc.freeze()  # else every full garbage collection blocks all requests for a third of a second
        print(f"serving {service.url}, jobs in {config.jobs}", flush=True)
        while not stopping.wait(LOOK_S):
            if service.lost.is_set():
                _begin_anew()


def _begin_anew() -> NoReturn:
    """Replace this process by a new one of the same command, which waits for its turn.

    At once, without an orderly end: nothing of a service whose place was taken may act any more.
    """
    log.warning("another service is active; this one begins anew, and waits for its turn")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@dataclass(frozen=True, slots=True)
class RunningService:
    """A running service."""

    host: "Host"
    url: str
    """Its address."""
    lost: threading.Event
    """Set once another service has taken its place."""


@contextmanager
def running_service(config: "ServiceConfig", stopping: threading.Event | None = None) -> Iterator[RunningService]:
    """Serve by `config`, whose paths are absolute, while the context lasts. Raises SpecError.

    `stopping` ends a wait for another service with the same records: EndedWaiting is raised.

    1. Become the active service of the jobs, and supervise them. 2. Load the tokens, and check where the API may
    listen. 3. Serve the API.
    """
    # Imported here: every command imports this module, and few need a server.
    from headrace.service.api.app import ApiSettings, app
    from headrace.service.api.problems import problem_of
    from headrace.service.api.server import serving
    from headrace.service.auth.exposure import exposure_of
    from headrace.service.auth.guard import Guard
    from headrace.service.auth.token_store import StoredTokens
    from headrace.service.auth.tokens import Tokens
    from headrace.service.jobs.local_host import host_jobs
    from headrace.service.server.waiting import Waiting
    from headrace.service.ui.mount import mount

    with ExitStack() as held:
        waiting = Waiting(config, stopping or threading.Event())
        host = held.enter_context(host_jobs(config, problem_of, waiting))  # 1
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
            fence=None if host.lease is None else host.lease.fence,
        )
        listener = held.enter_context(listen(exposure.host, exposure.port, "listen"))
        api = app(host, terms)
        mount(api, config.limits.max_streams, config.limits.max_streams_each)
        held.enter_context(prioritized())  # for the threads that answer; those that start jobs are there already
        held.enter_context(serving(api, listener, exposure.cert, exposure.key))  # 3
        exposure = replace(exposure, port=listener.getsockname()[1])  # port 0 takes a free one
        lost = threading.Event()
        if host.lease is not None:
            name = exposure.host if exposure.host in exposure.names else exposure.names[-1]  # that of 0.0.0.0
            host.lease.publish(replace(exposure, host=name).url)
            lost = host.lease.lost
        yield RunningService(host, exposure.url, lost)
