"""The door of the routes: who asks, whether they may, and what they are told if not.

Looking tokens up is service.access.tokens' work, counting failures service.access.limiting's.
"""

import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Protocol

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from millrace.front_door import is_cross_site
from millrace.occurrences import Occurrences
from service.access.config import AccessSection
from service.access.limiting import Failures, network_of
from service.access.roles import ANONYMOUS, Caller, Role

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Lookup(Protocol):
    """Who a token belongs to. Any thread."""

    def caller(self, token: str) -> Caller | None:
        """Its holder; None where it is unknown, wrong, expired or revoked, which are not told apart."""
        ...

    def at_once(self, token: str) -> Caller | None:
        """Its holder, where that is known without waiting for anything; None: `caller` tells."""
        ...


class NoTokens:
    """The Lookup of a foreground run: it has no tokens."""

    def caller(self, token: str) -> Caller | None:
        """None."""
        return None

    at_once = caller


class Refusal(Exception):
    """What a caller is told who may not."""

    def __init__(
        self, status: HTTPStatus, detail: str, headers: dict[str, str] | None = None, who: str = ANONYMOUS
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.who = status, detail, headers, who


class Guard:
    """Tells who asks, and whether they may. Any thread."""

    def __init__(
        self,
        access: AccessSection,
        tokens: Lookup,
        *,
        granted: Collection[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`granted`: acts that callers without a token may do whatever their role is."""
        self._anonymous = Caller(ANONYMOUS, None if access.anonymous == "none" else Role.of(access.anonymous))
        self._tokens, self._granted, self._now = tokens, frozenset(granted), now
        self._failures, self._refusals = Failures(access.max_failures, access.failures_per_s), Occurrences()

    @classmethod
    def of_a_run(cls) -> "Guard":
        """Of a foreground run on loopback: everybody on this machine reads, and may have it commit."""
        return cls(AccessSection(anonymous="viewer"), NoTokens(), granted=("commit",))

    def caller(self, authorizations: list[str], client: str) -> Caller:
        """Who asks from the address `client`, by the `Authorization` headers. Raises Refusal (401, 429).

        A right token is let in however many wrong ones came from its address: others may share that, and none of 256
        random bits is found by trying.
        """
        if not authorizations:
            return self._anonymous
        found = self._tokens.caller(_bearer(authorizations))
        if found is not None:
            return found
        wait_s = self._failures.failed(client, self._now())
        if wait_s > 0:
            seconds = int(wait_s) + 1
            told = f"too many wrong tokens from this address; try again in {seconds} s"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, told, {"Retry-After": str(seconds)})
        raise _unknown("this token is not known here: it is wrong, has expired, or was revoked")

    def at_once(self, authorizations: list[str], role: Role) -> Caller | None:
        """Who asks, where it is known without waiting that they may; None: `caller` and `admit` tell."""
        found = self._tokens.at_once(_bearer(authorizations)) if authorizations else self._anonymous
        return found if found is not None and found.role is not None and found.role >= role else None

    def admit(self, caller: Caller, role: Role, act: str = "") -> Caller:
        """`caller`, where they may do what `role` may, or were granted `act`. Raises Refusal (401, 403)."""
        if caller.role is not None and caller.role >= role:
            return caller
        if caller == self._anonymous:
            if act and act in self._granted:
                return caller
            raise _unknown(f'this needs a token of role {role.word} or above: "Authorization: Bearer mlr_..."')
        has = caller.role.word if caller.role is not None else "none"
        told = f"this needs the role {role.word}; the token {caller.name!r} has {has}"
        raise Refusal(HTTPStatus.FORBIDDEN, told, who=caller.name)

    def told_of(self, refusal: Refusal, client: str) -> dict[str, str | int] | None:
        """What the audit log is to say of a refusal of the address `client`; None of most that come often."""
        whose = network_of(client)
        told = self._refusals.note((whose, refusal.who, refusal.status), self._now())
        if told is None:
            return None
        left_out = {"left_out": told.left_out} if told.left_out else {}
        return {"address": whose, "refused": refusal.detail, "times": told.times, **left_out}


def entered_at_once(request: Request, role: Role) -> Caller | None:
    """The caller of a `request` that changes nothing, if it is known without waiting; else ask `entered`."""
    guard: Guard = request.app.state.guard
    is_safe = request.method in SAFE_METHODS
    return guard.at_once(request.headers.getlist("authorization"), role) if is_safe else None


def entered(request: Request, role: Role, act: str = "") -> Caller:
    """As `admitted`; what changes something is refused to pages of other sites, too. Raises Refusal."""
    if request.method not in SAFE_METHODS:
        check_site(request.headers)
    return admitted(request, role, act)


def admitted(request: Request, role: Role, act: str = "") -> Caller:
    """The caller of `request`, who has at least `role`, or was granted `act`. Raises Refusal.

    The guard is `request.app.state.guard`.
    """
    guard: Guard = request.app.state.guard
    return guard.admit(guard.caller(request.headers.getlist("authorization"), address_of(request)), role, act)


def address_of(connection: HTTPConnection) -> str:
    """The client's address; empty where there is none."""
    return connection.client.host if connection.client is not None else ""


def check_site(headers: Headers) -> None:
    """Raise Refusal where a page of another site sends the request."""
    if is_cross_site(headers):
        raise Refusal(HTTPStatus.FORBIDDEN, "pages of other sites may not send requests here")


def _bearer(authorizations: list[str]) -> str:
    """The token; text that is none where the header is another kind, or is there twice."""
    scheme, _, token = authorizations[0].partition(" ")
    return token.strip() if len(authorizations) == 1 and scheme.lower() == "bearer" else ""


def _unknown(detail: str) -> Refusal:
    return Refusal(HTTPStatus.UNAUTHORIZED, detail, {"WWW-Authenticate": 'Bearer realm="millrace"'})
