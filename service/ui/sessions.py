"""Who a browser is: a session by its cookie, and the token that its reader gave. In this process's memory alone.

Whether a token opens anything is service.access's to say, each time it is used.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

COOKIE = "millrace_session"
MAX_SESSIONS = 1_000
"""Beyond it the one is forgotten that was used longest ago."""
MAX_EACH = 20
"""Sessions of one token; beyond it its own oldest is forgotten, and nobody else's."""
IDLE_S = 12 * 3_600.0
"""After so long without use a session is over."""


class Sessions:
    """See module docstring. Any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic, max_sessions: int = MAX_SESSIONS) -> None:
        self._now, self._max_sessions = now, max_sessions
        self._tokens: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, token: str) -> str:
        """A new session of who has this token: its name, which nobody can guess."""
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
        """The token of a session; None where there is none of that name, or it is over."""
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
        """Forget a session."""
        with self._lock:
            self._tokens.pop(name or "", None)
