"""Idempotency-Key: a request that is sent again, for its answer was lost, has the answer of the first, and no effect.

Only what succeeded is kept, for a day and at most MAX_REPEATS of them: a request that was refused did nothing, and may
be sent again under its key.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from millrace.errors import NotYet, SpecError
from service.records.database import KEEP_REPEATS, Records, utc_now
from service.records.tables import RepeatRow

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
MAX_KEY = 200
MAX_BODY = 64 << 10
"""Of an answer that is kept: none of ours is as long."""
MAX_REPEATS, MAX_REPEATS_EACH = 10_000, 2_000
"""In all and of one caller. Beyond it the oldest are forgotten: of the caller who has so many, else of all."""
UNANSWERED = timedelta(minutes=5)
"""After so long a request that has no answer is taken for one that never will."""
KEPT_HEADERS = ("location", "etag", "content-type")


@dataclass(frozen=True, slots=True)
class Request:
    """A request with a key."""

    key: str
    who: str
    method: str
    path: str
    body: bytes

    @property
    def body_hash(self) -> str:
        """Of method, path and body."""
        said = f"{self.method} {self.path}\n".encode() + self.body
        return hashlib.blake2b(said, digest_size=32).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered."""

    status: int
    headers: Mapping[str, str]
    body: str


class Repeats:
    """See module docstring. Any thread."""

    def __init__(self, records: Records) -> None:
        self._records, self._begun = records, utc_now()

    def begin(self, request: Request) -> Answer | None:
        """The answer that the request had; None: it is new, and is to be answered and `ended`.

        Raises SpecError where the key was another request's, NotYet while the first is being answered.
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
        except IntegrityError:  # somebody sent the same at the very same time, to another service on these records
            raise NotYet("the same request is being answered; ask again") from None
        return None

    def end(self, request: Request, answer: Answer | None) -> None:
        """Keep the answer; None: the request did nothing, and may be sent again."""
        with self._records.session() as session:
            row = session.get(RepeatRow, (request.key, request.who))
            if row is None:
                return
            if answer is None or len(answer.body) > MAX_BODY:
                session.delete(row)
            else:
                row.status, row.headers, row.body = answer.status, dict(answer.headers), answer.body

    def _forgotten(self, row: RepeatRow, now: datetime) -> bool:
        """Whether a row counts no more: too old, or left without an answer by a service that died."""
        if row.at < now - KEEP_REPEATS:
            return True
        return row.status is None and (row.at < self._begun or row.at < now - UNANSWERED)


def _make_room(session: Session, who: str) -> None:
    """Forget the oldest ones where there are as many as there may be."""
    theirs = select(RepeatRow).where(RepeatRow.who == who)
    for rows, most in ((theirs, MAX_REPEATS_EACH), (select(RepeatRow), MAX_REPEATS)):
        if (session.scalar(select(func.count()).select_from(rows.subquery())) or 0) >= most:
            for row in session.scalars(rows.order_by(RepeatRow.at).limit(most // 10)):
                session.delete(row)


def _answer_of(row: RepeatRow, request: Request) -> Answer:
    if row.body_hash != request.body_hash:
        raise SpecError(f"{request.key!r} was the key of another request; take a new one for this", HEADER)
    if row.status is None:
        raise NotYet("the same request is being answered; ask again")
    return Answer(row.status, {str(name): str(value) for name, value in row.headers.items()}, row.body or "")
