"""`millrace serve`: the host of many jobs, who may ask what of it, and the API, put together and served until a signal.

The jobs go on when it ends, and are found again by the next one.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.lifecycle import stop_flag
from millrace.listening import listen
from millrace.logs import setup
from millrace.priority import ahead_of_others

if TYPE_CHECKING:
    from service.hosting.config import ServiceConfig
    from service.hosting.host import Host

log = logging.getLogger(__name__)

Config = Annotated[Path, typer.Option("--config", metavar="SERVICE.TOML", help="The service's configuration.")]


def serve(config: Config = Path("service.toml")) -> None:
    """Host jobs, and serve the API that makes them and acts on them; the jobs outlive this command."""
    setup("service")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    serve_until_stopped(config)


def serve_until_stopped(path: Path) -> None:
    """Serve as the file at `path` says until SIGINT or SIGTERM. Main thread only. Raises SpecError."""
    from service.hosting.config import load_service

    config = load_service(path)
    for script in config.allow.relative_scripts():
        log.warning(
            "allow: the script %r is found below the base of each spec, and whoever may write there chooses what runs; "
            "name it by an absolute path",
            script,
        )
    with stop_flag() as stopping, served(config) as service:
        gc.collect()
        gc.freeze()  # else all requests wait, for a third of a second, each time all that is loaded is looked through
        print(f"serving {service.url}, jobs in {config.jobs}", flush=True)
        stopping.wait()


@dataclass(frozen=True, slots=True)
class Served:
    """A service that answers."""

    host: "Host"
    url: str
    """Its address, for people."""


@contextmanager
def served(config: "ServiceConfig") -> Iterator[Served]:
    """Serve as `config` says, all its paths absolute, as long as the context lasts. Raises SpecError.

    1. Nobody else hosts these jobs; they are looked after. 2. Who may ask is known, and where that may be asked is
    checked. 3. The API answers.
    """
    # Not above: every command imports this module, and few need what serves.
    from service.access.exposure import exposure_of
    from service.access.guard import Guard
    from service.access.stored import StoredTokens
    from service.access.tokens import Tokens
    from service.api.app import Terms, app
    from service.api.problems import problem_of
    from service.api.server import serving
    from service.hosting.local_host import hosting
    from service.ui.mounting import mount

    with ExitStack() as held:
        host = held.enter_context(hosting(config, problem_of))  # 1
        tokens = Tokens(StoredTokens(host.records))
        exposure = exposure_of(config.listen, config.access, config.tls, any_token=tokens.any_live())  # 2
        terms = Terms(
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
        held.enter_context(ahead_of_others())  # for the threads that answer; those that start jobs are there already
        held.enter_context(serving(api, listener, exposure.cert, exposure.key))  # 3
        address = replace(exposure, port=listener.getsockname()[1]).url  # port 0 takes a free one
        yield Served(host, address)
