"""Idempotency-Key: a request that is repeated because its answer was lost gets the first answer, and has no effect.

Only successful answers are stored, for a day, and at most MAX_REPEATS: a refused request had no effect, and may be
repeated with its key.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from headrace.errors import NotYet, SpecError
from headrace.service.records.database import KEEP_REPEATS, Records, utc_now
from headrace.service.records.schema import RepeatRow

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
MAX_KEY = 200
MAX_BODY = 64 << 10
"""Longest stored answer; none of ours is as long."""
MAX_REPEATS, MAX_REPEATS_EACH = 10_000, 2_000
"""In total and for one caller. Beyond it the oldest are deleted: those of that caller, else of all."""
UNANSWERED = timedelta(minutes=5)
"""After this time a request without an answer counts as lost."""
KEPT_HEADERS = ("location", "etag", "content-type")


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with a key."""

    key: str
    who: str
    method: str
    path: str
    body: bytes

    @property
    def body_hash(self) -> str:
        """Hash of method, path and body."""
        content = f"{self.method} {self.path}\n".encode() + self.body
        return hashlib.blake2b(content, digest_size=32).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: str


class IdempotencyStore:
    """Stored answers by key and caller. Any thread."""

    def __init__(self, records: Records) -> None:
        self._records, self._begun = records, utc_now()

    def begin(self, request: KeyedRequest) -> StoredAnswer | None:
        """The stored answer; None for a new request: answer it, then call `end`.

        Raises SpecError where the key belongs to another request, NotYet while the first one is being answered.
        """
        if not request.key.isascii() or not request.key.isprintable() or not 0 < len(request.key) <= MAX_KEY:
            raise SpecError(f"must be 1 to {MAX_KEY} characters of printable ASCII", HEADER)
        now = utc_now()
        try:
            with self._records.session() as session:
                row = session.get(RepeatRow, (request.key, request.who))
                if row is not None and not self._forgotten(row, now):
                    return _answer_of(row, request)
                if row is not None:
                    session.delete(row)
                    session.flush()
                _make_room(session, request.who)
                session.add(
                    RepeatRow(
                        key=request.key,
                        who=request.who,
                        method=request.method,
                        path=request.path,
                        body_hash=request.body_hash,
                        status=None,
                        headers={},
                        body=None,
                        at=now,
                    )
                )
        except IntegrityError:  # the same request arrived at the same time at another service with this database
            raise NotYet("the same request is being answered; retry") from None
        return None

    def end(self, request: KeyedRequest, answer: StoredAnswer | None) -> None:
        """Store the answer; None: the request had no effect, and may be repeated."""
        with self._records.session() as session:
            row = session.get(RepeatRow, (request.key, request.who))
            if row is None:
                return
            if answer is None or len(answer.body) > MAX_BODY:
                session.delete(row)
            else:
                row.status, row.headers, row.body = answer.status, dict(answer.headers), answer.body

    def _forgotten(self, row: RepeatRow, now: datetime) -> bool:
        """Whether a row has expired: it is too old, or a service that died left it without an answer."""
        if row.at < now - KEEP_REPEATS:
            return True
        return row.status is None and (row.at < self._begun or row.at < now - UNANSWERED)


def _make_room(session: Session, who: str) -> None:
    """Delete the oldest rows where a limit is reached."""
    theirs = select(RepeatRow).where(RepeatRow.who == who)
    for rows, most in ((theirs, MAX_REPEATS_EACH), (select(RepeatRow), MAX_REPEATS)):
        if (session.scalar(select(func.count()).select_from(rows.subquery())) or 0) >= most:
            for row in session.scalars(rows.order_by(RepeatRow.at).limit(most // 10)):
                session.delete(row)


def _answer_of(row: RepeatRow, request: KeyedRequest) -> StoredAnswer:
    if row.body_hash != request.body_hash:
        raise SpecError(f"{request.key!r} is the key of another request; use a new one", HEADER)
    if row.status is None:
        raise NotYet("the same request is being answered; retry")
    return StoredAnswer(row.status, {str(name): str(value) for name, value in row.headers.items()}, row.body or "")
