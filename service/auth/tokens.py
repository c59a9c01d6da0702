"""Bearer tokens: creation, hashing, lookup, revocation, and masking of their text. Storage is behind `TokenRows`.

A token is `mlr_<id>_<secret>`. The id is not secret and identifies the token in lists and logs. The secret is 256
random bits and is shown once; only its BLAKE2b hash with a salt is stored. A slow hash (scrypt) protects secrets that
people choose, because those can be guessed. 256 random bits cannot be guessed, however fast the hash is, and a slow
hash would let anybody who sends wrong tokens use up our processors. Requests are checked by service.auth.guard.
"""

import hashlib
import hmac
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from headrace.errors import SpecError, Unavailable
from headrace.secrets import HIDDEN
from headrace.service.auth.roles import Caller, Role

log = logging.getLogger(__name__)

MAX_TOKENS = 1000
"""Live tokens at a time; at the bound a new one is refused until another is revoked."""
RELOAD_S = 1.0
"""Longest time until a token that another process creates or revokes is noticed."""
NOTE_USE_S = 60.0
"""Shortest time between two writes of a token's last use."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
RESERVED = ("anonymous", "service")
"""Names in the audit log for callers without a token, and for the service itself."""
_PERSON = b"millrace-token"
"""Part of every stored hash: tokens of before version 0.2 stay valid."""
FORM = re.compile(r"mlr_([0-9a-f]{16})_([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Token:
    """The stored form of a token."""

    id: str
    name: str
    """Name of its holder in the audit log and the records."""
    role: Role
    hash: str = field(repr=False)
    salt: str = field(repr=False)
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None

    def live(self, now: datetime) -> bool:
        """Whether it is still valid."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class TokenRows(Protocol):
    """Storage of tokens. Any thread. Methods raise Unavailable where the storage cannot be reached."""

    def all(self) -> list[Token]:
        """All tokens, also revoked and expired ones, by creation time and id."""
        ...

    def add(self, token: Token, now: datetime, *, replaces: bool = False) -> None:
        """Store a new token; if it `replaces` a live one of its name, that one is revoked in the same transaction.

        Raises SpecError where a live one has its name, or there are MAX_TOKENS.
        """
        ...

    def revoke(self, token_id: str, now: datetime) -> bool:
        """Revoke a token; whether there is one with this id."""
        ...

    def used(self, token_id: str, now: datetime) -> None:
        """Record the time of its last use."""
        ...


class MemoryTokenRows:
    """TokenRows in memory, for tests."""

    def __init__(self) -> None:
        self._tokens: dict[str, Token] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Token]:
        with self._lock:
            return sorted(self._tokens.values(), key=lambda token: (token.created_at, token.id))

    def add(self, token: Token, now: datetime, *, replaces: bool = False) -> None:
        with self._lock:
            live = [other for other in self._tokens.values() if other.live(now)]
            before = [other for other in live if replaces and other.name == token.name]
            check_room(token.name, [other.name for other in live if other not in before])
            changed = [token, *(replace(other, revoked_at=now) for other in before)]
            self._tokens |= {each.id: each for each in changed}

    def revoke(self, token_id: str, now: datetime) -> bool:
        with self._lock:
            token = self._tokens.get(token_id)
            if token is not None and token.revoked_at is None:
                self._tokens[token_id] = replace(token, revoked_at=now)
            return token is not None

    def used(self, token_id: str, now: datetime) -> None:
        with self._lock:
            if token_id in self._tokens:
                self._tokens[token_id] = replace(self._tokens[token_id], last_used_at=now)


def check_room(name: str, live: list[str]) -> None:
    """Raise SpecError where no token `name` may be added to the `live` names."""
    if name in live:
        raise SpecError(f"there is already a token {name!r}; revoke it first, or choose another name", "name")
    if len(live) >= MAX_TOKENS:
        raise SpecError(f"there are {MAX_TOKENS} tokens, the most there may be; revoke one first", "name")


def new_token(name: str, role: Role, now: datetime, lifetime: timedelta | None = None) -> tuple[Token, str]:
    """A new token: its stored form and its text, which cannot be recovered later. Raises SpecError."""
    if NAME.fullmatch(name) is None or name in RESERVED:
        message = f"{name!r} is not a token's name: letters, digits, '.', '_', '-', '@', at most 64, and not "
        raise SpecError(message + " or ".join(RESERVED), "name")
    if lifetime is not None and lifetime <= timedelta(0):
        raise SpecError("it would have expired already", "expires")
    try:
        expires_at = None if lifetime is None else now + lifetime
    except OverflowError:
        raise SpecError("is after the year 9999; without this option a token does not expire", "expires") from None
    token_id, secret, salt = secrets.token_hex(8), secrets.token_hex(32), secrets.token_hex(16)
    return Token(token_id, name, role, hashed(secret, salt), salt, now, expires_at), f"mlr_{token_id}_{secret}"


def hashed(secret: str, salt: str) -> str:
    """The stored hash of a secret; `salt` is 16 bytes in hexadecimal."""
    digest = hashlib.blake2b(secret.encode(), digest_size=32, salt=bytes.fromhex(salt), person=_PERSON)
    return digest.hexdigest()


NOBODY = Token("", "", Role.VIEWER, hashed("", "0" * 32), "0" * 32, datetime.min.replace(tzinfo=UTC))
"""Compared with if the id is unknown, so that the check takes as long as that of a wrong secret."""


class Tokens:
    """Looks tokens up in a copy in memory, so that wrong tokens cause no database queries. Any thread."""

    def __init__(
        self,
        rows: TokenRows,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives the date, `now` the seconds that the age of the copy is measured with."""
        self.rows = rows
        self._clock, self._now = clock, now
        self._known: Mapping[str, Token] = {}
        self._loaded_s: float | None = None
        self._noted_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def caller(self, token: str) -> Caller | None:
        """The token's holder; None where it is unknown, wrong, expired or revoked. Raises Unavailable."""
        found = self._find(token, self._current())
        if found is None:
            return None
        self._note(found)
        return Caller(found.name, found.role)

    def at_once(self, token: str) -> Caller | None:
        """Only by a fresh copy, and for a token whose use was recorded lately."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            found = self._find(token, self._known) if self._is_fresh() else None
            return Caller(found.name, found.role) if found is not None and self._is_noted(found) else None
        finally:
            self._lock.release()

    def _find(self, text: str, known: Mapping[str, Token]) -> Token | None:
        match = FORM.fullmatch(text)
        token_id, secret = match.groups() if match is not None else ("", "")
        token = known.get(token_id, NOBODY)
        right = hmac.compare_digest(hashed(secret, token.salt), token.hash)
        return token if right and token is not NOBODY and token.live(self._clock()) else None

    def any_live(self) -> bool:
        """Whether there is a valid token. Raises Unavailable."""
        now = self._clock()
        return any(token.live(now) for token in self._current().values())

    def create(self, name: str, role: Role, lifetime: timedelta | None = None) -> tuple[Token, str]:
        """A new token and its text, which is shown once. Raises SpecError, Unavailable."""
        now = self._clock()
        token, text = new_token(name, role, now, lifetime)
        self.rows.add(token, now)
        self.forget()
        return token, text

    def add(self, text: str, name: str, role: Role, lifetime: timedelta | None = None) -> Token:
        """Store a token whose text is given; one that is there stays as it is, also if it was revoked.

        A new one takes the place of a live one of its name, as where the Secret of a pod was rotated. Raises
        SpecError, Unavailable.
        """
        if (found := FORM.fullmatch(text)) is None:
            raise SpecError("is no token: mlr_, 16 hexadecimal digits, _, 64 hexadecimal digits", "token")
        token_id, secret = found.groups()
        now = self._clock()
        made, _ = new_token(name, role, now, lifetime)
        token = replace(made, id=token_id, hash=hashed(secret, made.salt))
        if (there := next((each for each in self.rows.all() if each.id == token_id), None)) is not None:
            if (hashed(secret, there.salt), name, role) != (there.hash, there.name, there.role):
                raise SpecError(
                    f"{token_id} is another token, {there.name!r}, {there.role.word}; make new ones", "token"
                )
            return there
        self.rows.add(token, now, replaces=True)
        self.forget()
        return token

    def revoke(self, which: str) -> Token:
        """Revoke the token with this id, or the live one with this name. Raises SpecError.

        The text of a token is accepted in place of its id: a user who revokes a token may paste it.
        """
        if (text := FORM.fullmatch(which)) is not None:
            which = text[1]
        now, there = self._clock(), self.rows.all()
        found = [token for token in there if token.id == which or (token.name == which and token.live(now))]
        if not found:
            names = ", ".join(token.name for token in there if token.live(now)) or "none"
            raise SpecError(f"there is no token {which!r}; there are: {names}", "name")
        self.rows.revoke(found[0].id, now)
        self.forget()
        return replace(found[0], revoked_at=found[0].revoked_at or now)

    def forget(self) -> None:
        """Reload the copy before the next lookup."""
        with self._lock:
            self._loaded_s = None

    def _current(self) -> Mapping[str, Token]:
        """All tokens by id, as they were at most RELOAD_S ago."""
        with self._lock:
            if not self._is_fresh():
                now_s = self._now()
                self._known = {token.id: token for token in self.rows.all()}
                self._loaded_s = now_s
            return self._known

    def _is_fresh(self) -> bool:
        return self._loaded_s is not None and self._now() - self._loaded_s < RELOAD_S

    def _is_noted(self, token: Token) -> bool:
        return self._now() - self._noted_s.get(token.id, -math.inf) < NOTE_USE_S

    def _note(self, token: Token) -> None:
        with self._lock:
            if self._is_noted(token):
                return
            self._noted_s[token.id] = self._now()
        try:
            self.rows.used(token.id, self._clock())
        except Unavailable as error:  # a valid token is accepted all the same
            log.warning("the use of token %s was not recorded: %s", token.id, error)


TOKEN = re.compile(r"(mlr_[0-9a-f]{16}_)[0-9a-f]+", re.ASCII | re.IGNORECASE)
"""A token's text, whole or cut off. The id is public, the rest is secret."""


def without_tokens(value: Any) -> Any:
    """JSON, or text, with "***" in place of the secret part of every token in it.

    Users paste tokens where none belongs, in an address or a body.
    """
    if isinstance(value, str):
        return TOKEN.sub(rf"\1{HIDDEN}", value)
    if isinstance(value, Mapping):
        return {without_tokens(key): without_tokens(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_tokens(part) for part in value]
    return value
