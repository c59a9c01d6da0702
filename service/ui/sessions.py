"""Browser sessions: a cookie names a session, and the session has the visitor's token. In memory only.

service.auth checks the token each time it is used.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

COOKIE = "headrace_session"
MAX_SESSIONS = 1_000
"""Most sessions; beyond it the least recently used one ends."""
MAX_EACH = 20
"""Most sessions of one token; beyond it the oldest one of that token ends."""
IDLE_S = 12 * 3_600.0
"""A session ends after this time without use."""


class Sessions:
    """Any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic, max_sessions: int = MAX_SESSIONS) -> None:
        self._now, self._max_sessions = now, max_sessions
        self._tokens: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, token: str) -> str:
        """Start a session for this token; its name, which cannot be guessed."""
        name = secrets.token_urlsafe(32)
        with self._lock:
            theirs = [other for other, (held, _) in self._tokens.items() if held == token]
            if len(theirs) >= MAX_EACH:
                del self._tokens[theirs[0]]
            self._tokens[name] = (token, self._now())
            if len(self._tokens) > self._max_sessions:
                self._tokens.popitem(last=False)
        return name

    def token(self, name: str | None) -> str | None:
        """The token of a session; None where there is no such session, or it has ended."""
        if not name:
            return None
        with self._lock:
            found = self._tokens.get(name)
            if found is None:
                return None
            token, used_s = found
            if self._now() - used_s > IDLE_S:
                del self._tokens[name]
                return None
            self._tokens[name] = (token, self._now())
            self._tokens.move_to_end(name)
            return token

    def end(self, name: str | None) -> None:
        """End a session."""
        with self._lock:
            self._tokens.pop(name or "", None)
