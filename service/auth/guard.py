"""Authenticates the caller of a request, and checks the caller's role; a refusal has its status and its reason.

service.auth.tokens looks tokens up, service.auth.limits counts failures.
"""

import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from headrace.address import network_of
from headrace.http.front_door import is_cross_site
from headrace.http.listening import prove
from headrace.logs import LogLimiter
from headrace.service.auth.config import AccessSection
from headrace.service.auth.limits import FailedAttempts
from headrace.service.auth.roles import ANONYMOUS, Caller, Role

Known = TypeVar("Known", Caller, Caller | None)

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class TokenLookup(Protocol):
    """Finds the holder of a token. Any thread."""

    def caller(self, token: str) -> Caller | None:
        """The holder; None for an unknown, wrong, expired or revoked token: the caller cannot tell these apart."""
        ...

    def at_once(self, token: str) -> Caller | None:
        """The holder, if that is known without blocking; None: call `caller`."""
        ...


class NoTokens:
    """The Lookup of a foreground run: it has no tokens."""

    def caller(self, token: str) -> Caller | None:
        """None."""
        return None

    at_once = caller


class Refusal(Exception):
    """A request is refused: status, reason, headers of the answer, and the caller's name."""

    def __init__(
        self, status: HTTPStatus, detail: str, headers: dict[str, str] | None = None, who: str = ANONYMOUS
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.who = status, detail, headers, who


class Guard:
    """Authenticates callers and checks their roles. Any thread."""

    def __init__(
        self,
        access: AccessSection,
        tokens: TokenLookup,
        *,
        granted: Collection[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`granted` are actions that callers without a token may do whatever their role is."""
        self._anonymous = Caller(ANONYMOUS, None if access.anonymous == "none" else Role.of(access.anonymous))
        self._tokens, self._granted, self._now = tokens, frozenset(granted), now
        self._failures, self._refusals = FailedAttempts(access.max_failures, access.failures_per_s), LogLimiter()

    @classmethod
    def of_a_run(cls) -> "Guard":
        """The guard of a foreground run on loopback: every user of this machine may read, and may request a commit."""
        return cls(AccessSection(anonymous="viewer"), NoTokens(), granted=("commit",))

    def caller(self, authorizations: list[str], client: str) -> Caller:
        """The caller at the address `client`, by the `Authorization` headers. Raises Refusal (401, 429).

        A valid token is accepted however many wrong ones came from its address: several users may share the address,
        and nobody finds 256 random bits by trying.
        """
        if not authorizations:
            return self._anonymous
        found = self._tokens.caller(_bearer(authorizations))
        if found is not None:
            return found
        wait_s = self._failures.failed(client, self._now())
        if wait_s > 0:
            seconds = int(wait_s) + 1
            detail = f"too many wrong tokens from this address; try again in {seconds} s"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, detail, {"Retry-After": str(seconds)})
        raise _unauthorized("this token is not known here: it is wrong, has expired, or was revoked")

    def at_once(self, authorizations: list[str], role: Role) -> Caller | None:
        """The caller, if it is known without blocking that they have `role`; None: call `caller` and `admit`."""
        found = self._tokens.at_once(_bearer(authorizations)) if authorizations else self._anonymous
        return found if found is not None and found.role is not None and found.role >= role else None

    def admit(self, caller: Caller, role: Role, act: str = "") -> Caller:
        """`caller`, if they have at least `role`, or were granted `act`. Raises Refusal (401, 403)."""
        if caller.role is not None and caller.role >= role:
            return caller
        if caller == self._anonymous:
            if act and act in self._granted:
                return caller
            raise _unauthorized(f'this needs a token of role {role.word} or above: "Authorization: Bearer mlr_..."')
        has = caller.role.word if caller.role is not None else "none"
        detail = f"this needs the role {role.word}; the token {caller.name!r} has {has}"
        raise Refusal(HTTPStatus.FORBIDDEN, detail, who=caller.name)

    def audit_detail(self, refusal: Refusal, client: str) -> dict[str, str | int] | None:
        """The audit log's details of a refusal of the address `client`; None for most of many like ones."""
        network = network_of(client)
        noted = self._refusals.note((network, refusal.who, refusal.status), self._now())
        if noted is None:
            return None
        left_out = {"left_out": noted.left_out} if noted.left_out else {}
        return {"address": network, "refused": refusal.detail, "times": noted.times, **left_out}


def authorize_without_waiting(request: Request, role: Role) -> Caller | None:
    """The caller of a `request` that changes nothing, if known without blocking; None: call `authorize`."""
    guard: Guard = request.app.state.guard
    is_safe = request.method in SAFE_METHODS
    return proved(request, guard.at_once(request.headers.getlist("authorization"), role)) if is_safe else None


def authorize(request: Request, role: Role, act: str = "") -> Caller:
    """As `authenticate`; a request that changes something is also refused to pages of other sites. Raises Refusal."""
    if request.method not in SAFE_METHODS:
        check_site(request.headers)
    return authenticate(request, role, act)


def authenticate(request: Request, role: Role, act: str = "") -> Caller:
    """The caller of `request`, if they have at least `role`, or were granted `act`. Raises Refusal."""
    guard: Guard = request.app.state.guard
    caller = guard.caller(request.headers.getlist("authorization"), address_of(request))
    return guard.admit(proved(request, caller), role, act)


def proved(connection: HTTPConnection, caller: Known) -> Known:
    """`caller`. Where they have a token, their connection gives way to others after those of strangers."""
    if caller is not None and caller.name != ANONYMOUS:
        prove(connection.scope)
    return caller


def address_of(connection: HTTPConnection) -> str:
    """The client's address; empty where there is none."""
    return connection.client.host if connection.client is not None else ""


def check_site(headers: Headers) -> None:
    """Raise Refusal where a page of another site sends the request."""
    if is_cross_site(headers):
        raise Refusal(HTTPStatus.FORBIDDEN, "pages of other sites may not send requests here")


def _bearer(authorizations: list[str]) -> str:
    """The token; empty where the header is of another kind, or is there twice."""
    scheme, _, token = authorizations[0].partition(" ")
    return token.strip() if len(authorizations) == 1 and scheme.lower() == "bearer" else ""


def _unauthorized(detail: str) -> Refusal:
    return Refusal(HTTPStatus.UNAUTHORIZED, detail, {"WWW-Authenticate": 'Bearer realm="headrace"'})
