"""Credentials that are renewed at half their life, so that a process may run for longer than a certificate lives.

The launcher signs another certificate for the same name and a new key. Connections that exist go on; each new one shows
the new certificate (see Identity). headrace.rpc.rendezvous carries the request.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from headrace.errors import HeadraceError, Refused
from headrace.identity import certificates
from headrace.identity.credentials import Credentials

NUM_TRIES = 20
"""Tries in the second half of a life; each one that fails is logged."""
LOOK_S = 60.0
"""Longest time between two looks at the clock, which may be set meanwhile."""
END_S = 1.0
"""Longest wait at the end for a request in flight."""

AskAgain = Callable[[str], str]
"""Takes a signing request, PEM; returns the certificate for it. Raises HeadraceError."""

log = logging.getLogger(__name__)


class RenewedIdentity:
    """One thread calls `attend`, or `attended` does so; any thread reads `current`."""

    def __init__(self, credentials: Credentials, ask: AskAgain) -> None:
        self._current, self._ask = credentials, ask
        self._next = credentials.half_life

    @property
    def current(self) -> Credentials:
        return self._current

    def attend(self) -> float:
        """Renew the credentials if it is time; seconds until the next call."""
        if datetime.now(UTC) >= self._next:
            try:
                self._current = self._renewed()
                self._next = self._current.half_life
                log.info("the certificate of %s is renewed until %s", self._current.name, _text(self._current.ends))
            except HeadraceError as error:
                self._note(error)
        return min(LOOK_S, max(0.0, (self._next - datetime.now(UTC)).total_seconds()))

    @contextmanager
    def attended(self) -> Iterator["RenewedIdentity"]:
        """Renew on a thread while the context lasts."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(self.attend()):
                pass

        thread = threading.Thread(target=run, name="renewal", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join(END_S)

    def _renewed(self) -> Credentials:
        key = certificates.draw_key()
        certificate = self._ask(certificates.signing_request(key))
        found = self._current.model_copy(update={"key": key, "certificate": certificate})
        try:
            certificates.check_issuer(certificates.load(certificate), certificates.load(found.authority))
        except ValueError as error:
            raise Refused(f"the launcher answered with a damaged certificate: {error}") from None
        if found.name != self._current.name:
            raise Refused(f"the launcher answered with a certificate of {found.name}")
        return found

    def _note(self, error: HeadraceError) -> None:
        """Say that a try has failed, and when the next one is."""
        ends, name = self._current.ends, self._current.name
        self._next = datetime.now(UTC) + (ends - self._current.half_life) / NUM_TRIES
        log.warning(
            "the certificate of %s ends at %s and was not renewed: %s. The next try is at %s. After its end no new "
            "connection with this process succeeds: if the tries go on to fail, restart the job before",
            name,
            _text(ends),
            error,
            _text(self._next),
        )


def _text(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
