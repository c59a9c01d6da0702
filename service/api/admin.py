"""/v1/audit and /v1/tokens: the audit log, and the tokens of callers."""

from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from sqlalchemy import select

from headrace.errors import SpecError
from headrace.service.api.authorization import AuthorizedRoute, HostOf, authorized, note
from headrace.service.api.problems import http_error
from headrace.service.api.schemas import (
    Page,
    Paged,
    RequestBody,
    ResponseBody,
    cut,
    finite,
    number_after,
    page,
    shown_by,
)
from headrace.service.auth.roles import Role
from headrace.service.auth.tokens import Token, Tokens
from headrace.service.records.schema import AuditRow, of_row

router = APIRouter(prefix="/v1", tags=["administration"], route_class=AuthorizedRoute)

RoleName = Literal["viewer", "operator", "admin"]
ROLES: dict[Role, RoleName] = {Role.VIEWER: "viewer", Role.OPERATOR: "operator", Role.ADMIN: "admin"}


class AuditEntry(ResponseBody):
    """A request that changed something, or tried to."""

    id: int
    at: datetime
    who: str
    role: str | None
    method: str
    """The HTTP method, or a word for an action without a request."""
    path: str
    job: str | None
    status: int | None
    """The status of the answer."""
    detail: dict[str, Any]


class TokenEntry(ResponseBody):
    """A token, without its secret."""

    id: str
    name: str
    role: RoleName
    created: datetime
    expires: datetime | None
    last_used: datetime | None
    revoked: datetime | None


class NewToken(TokenEntry):
    """A token that was just created."""

    token: str
    """The text that authenticates. It is shown only here, and not stored."""


class CreateToken(RequestBody):
    """A token to create."""

    model_config = shown_by({"name": "dashboard", "role": "viewer", "days": 90})

    name: str = Field(max_length=64)
    role: RoleName
    days: float | None = Field(default=None, gt=0, le=36_500, allow_inf_nan=False)
    """Days until it expires. Default: never."""


@router.get("/audit", **authorized(Role.ADMIN), operation_id="listAudit", summary="Read the audit log")
def audit(
    host: HostOf,
    paging: Paged,
    job: Annotated[str | None, Query(max_length=64, description="Only actions on this job.")] = None,
    who: Annotated[str | None, Query(max_length=128, description="Only actions of this caller.")] = None,
) -> Page[AuditEntry]:
    """Every request that changed something or tried to, newest first. Entries are kept for 400 days."""
    newest = select(AuditRow).order_by(AuditRow.id.desc()).limit(paging.limit + 1)
    if paging.after is not None:
        newest = newest.where(AuditRow.id < number_after(paging))
    if job is not None:
        newest = newest.where(AuditRow.job == job)
    if who is not None:
        newest = newest.where(AuditRow.who == who)
    with host.records.reading() as session:
        found = [_entry(row) for row in session.scalars(newest)]
    return cut(found, paging, lambda each: str(each.id))


@of_row
def _entry(row: AuditRow) -> AuditEntry:
    return AuditEntry(
        id=row.id,
        at=row.at,
        who=row.who,
        role=row.role,
        method=row.method,
        path=row.path,
        job=row.job,
        status=row.status,
        detail=finite(row.detail),
    )


@router.get("/tokens", **authorized(Role.ADMIN), operation_id="listTokens", summary="List tokens")
def list_tokens(request: Request, paging: Paged) -> Page[TokenEntry]:
    """All tokens in order of creation, also revoked ones."""
    return page([_token_entry(token) for token in _tokens(request).rows.all()], paging, lambda each: each.id)


@router.post(
    "/tokens",
    **authorized(Role.ADMIN),
    status_code=HTTPStatus.CREATED,
    operation_id="createToken",
    summary="Create a token",
)
def create_token(request: Request, asked: CreateToken, response: Response) -> NewToken:
    """Create a token. Its text is shown once, so repeating the request creates another token, or is refused."""
    note(request, name=asked.name, role=asked.role, days=asked.days)
    lifetime = None if asked.days is None else timedelta(days=asked.days)
    token, text = _tokens(request).create(asked.name, Role.of(asked.role), lifetime)
    response.headers["Location"] = f"/v1/tokens/{token.id}"
    return NewToken(**dict(_token_entry(token)), token=text)


@router.delete(
    "/tokens/{token}", **authorized(Role.ADMIN, HTTPStatus.NOT_FOUND), operation_id="revokeToken",
    summary="Revoke a token",
)  # fmt: skip
def revoke_token(request: Request, token: str) -> TokenEntry:
    """Revoke a token, by its id or name."""
    tokens = _tokens(request)
    try:
        return _token_entry(tokens.revoke(token))
    except SpecError as error:
        raise http_error(HTTPStatus.NOT_FOUND, str(error)) from error


def _tokens(request: Request) -> Tokens:
    tokens: Tokens | None = request.app.state.tokens
    if tokens is None:
        raise http_error(HTTPStatus.CONFLICT, "a foreground run has no tokens; `headrace serve` has")
    return tokens


def _token_entry(token: Token) -> TokenEntry:
    return TokenEntry(
        id=token.id,
        name=token.name,
        role=ROLES[token.role],
        created=token.created_at,
        expires=token.expires_at,
        last_used=token.last_used_at,
        revoked=token.revoked_at,
    )
