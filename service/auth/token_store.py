"""Tokens in the service's records."""

from datetime import datetime

from sqlalchemy import or_, select, update

from headrace.service.auth.roles import Role
from headrace.service.auth.tokens import Token, check_room
from headrace.service.records.database import Records
from headrace.service.records.schema import TokenRow, of_row


class StoredTokens:
    """TokenRows in the database."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def all(self) -> list[Token]:
        with self._records.reading() as session:
            return [_token(row) for row in session.scalars(select(TokenRow).order_by(TokenRow.created_at, TokenRow.id))]

    def add(self, token: Token, now: datetime, *, replaces: bool = False) -> None:
        live = TokenRow.revoked_at.is_(None), or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > now)
        with self._records.session() as session:
            if replaces:
                session.execute(update(TokenRow).where(*live, TokenRow.name == token.name).values(revoked_at=now))
            check_room(token.name, list(session.scalars(select(TokenRow.name).where(*live))))
            session.add(
                TokenRow(
                    id=token.id,
                    name=token.name,
                    role=token.role.word,
                    hash=token.hash,
                    salt=token.salt,
                    created_at=token.created_at,
                    expires_at=token.expires_at,
                )
            )

    def revoke(self, token_id: str, now: datetime) -> bool:
        with self._records.session() as session:
            row = session.get(TokenRow, token_id)
            if row is not None and row.revoked_at is None:
                row.revoked_at = now
            return row is not None

    def used(self, token_id: str, now: datetime) -> None:
        with self._records.session() as session:
            session.execute(update(TokenRow).where(TokenRow.id == token_id).values(last_used_at=now))


@of_row
def _token(row: TokenRow) -> Token:
    return Token(
        id=row.id,
        name=row.name,
        role=Role.of(row.role),
        hash=row.hash,
        salt=row.salt,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
