"""How a service waits while another one with the same records is active: it answers so, and tries to take the lease."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from headrace.errors import Unavailable
from headrace.http import http_server
from headrace.http.connections import PagesConnection
from headrace.http.listening import listen
from headrace.service.api.inactive import InactiveAnswers
from headrace.service.api.middleware import RequestChecks
from headrace.service.auth.exposure import exposure_of
from headrace.service.jobs.config import ServiceConfig
from headrace.service.records.lease import POLL_S, Lease

log = logging.getLogger(__name__)


class Waiting:
    """One wait for the lease; call it once."""

    def __init__(self, config: ServiceConfig, stopping: threading.Event) -> None:
        self._config, self._stopping = config, stopping
        self._why = "another service is active"

    def __call__(self, lease: Lease) -> bool:
        """Wait until the lease is taken; False where `stopping` is set before. Raises SpecError."""
        if self._taken(lease):
            return True
        with self._answering():
            print(f"waiting: {self._why}", flush=True)
            while not self._stopping.wait(POLL_S):
                if self._taken(lease):
                    return True
        return False

    def _taken(self, lease: Lease) -> bool:
        """One attempt. Records that cannot be reached are asked again."""
        try:
            holder = lease.holder()
            if holder is None and lease.take():
                return True
        except Unavailable as error:
            why = f"this service waits for its turn; {error}"
        else:
            why = f"this service waits for its turn; {holder or 'another service'} is active"
        if why != self._why:
            log.info("%s", why)
            self._why = why
        return False

    @contextmanager
    def _answering(self) -> Iterator[None]:
        config = self._config
        exposure = exposure_of(config.listen, config.access, config.tls, any_token=True)
        app: ASGIApp = RequestChecks(InactiveAnswers(lambda: self._why), exposure.names, config.limits.max_body)
        tls = None if exposure.cert is None or exposure.key is None else (exposure.cert, exposure.key)
        listener = listen(exposure.host, exposure.port, "listen")
        with http_server.serving(
            app, listener, tls=tls, thread_name="standby", http=PagesConnection, lifespan="off", ws="none"
        ):
            yield
