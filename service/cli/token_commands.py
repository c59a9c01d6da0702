"""The commands that create, list and revoke tokens on the machine of the service. The work is in service.auth."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.errors import SpecError
from headrace.service.cli.arguments import Json
from headrace.service.cli.panels import Panel, PanelledGroup

if TYPE_CHECKING:
    from headrace.service.auth.tokens import Token, Tokens

app = typer.Typer()
token = typer.Typer(cls=PanelledGroup, no_args_is_help=True, help="Create, list and revoke API tokens of a service.")
app.add_typer(token, name="token", rich_help_panel=Panel.SERVICE)

Config = Annotated[Path, typer.Option("--config", metavar="SERVICE.TOML", help="The service's configuration.")]
Which = Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.", show_default=False)]
HERE = Path("service.toml")


@token.command()
def create(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its holder, as the audit log shows it.", show_default=False)
    ],
    role: Annotated[
        Literal["viewer", "operator", "admin"],
        typer.Option("--role", help="viewer reads, operator also acts on jobs, admin also creates and deletes them."),
    ],
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="DURATION", help="Such as 12h or 30d. Default: never.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Take the token in this file, in place of one of this name; a second time does nothing.",
        ),
    ] = None,
    config: Config = HERE,
    as_json: Json = False,
) -> None:
    """Create a token and print it. It cannot be printed again.

    Example: headrace token create grafana --role viewer --expires 365d
    """
    from headrace.service.auth.roles import Role

    if token_file is not None:
        text = _text_of(token_file)
        with _tokens(config) as tokens:
            given = described(tokens.add(text, name, Role.of(role), _lifetime(expires)))
        print(json.dumps(given, indent=2) if as_json else f"the token {name!r} ({given['id']}) is {given['state']}")
        return
    with _tokens(config) as tokens:
        made, text = tokens.create(name, Role.of(role), _lifetime(expires))
    print(json.dumps({**described(made), "token": text}, indent=2) if as_json else text)


@token.command("list")
def list_(config: Config = HERE, as_json: Json = False) -> None:
    """List the tokens, without their secrets.

    Example: headrace token list
    """
    with _tokens(config) as tokens:
        there = [described(one) for one in tokens.rows.all()]
    if as_json:
        print(json.dumps(there, indent=2))
        return
    for one in there:
        print(f"{one['id']}  {one['state']:<7}  {one['role']:<8}  {one['name']}{_times(one)}")
    if not there:
        print("no tokens; create one with: headrace token create NAME --role viewer")


@token.command()
def revoke(name: Which, config: Config = HERE, as_json: Json = False) -> None:
    """Revoke a token. A running service notices within a second.

    Example: headrace token revoke grafana
    """
    with _tokens(config) as tokens:
        revoked = tokens.revoke(name)
    if as_json:
        print(json.dumps(described(revoked), indent=2))
        return
    print(f"the token {revoked.name!r} ({revoked.id}) is revoked")


def described(token: "Token") -> dict[str, str | None]:
    """A token as it is listed: everything but its secret."""
    now = datetime.now(UTC)
    state = "live" if token.live(now) else "expired" if token.revoked_at is None else "revoked"
    times = {key: getattr(token, key) for key in ("created_at", "last_used_at", "expires_at", "revoked_at")}
    texts = {key: None if at is None else at.isoformat(timespec="seconds") for key, at in times.items()}
    return {"id": token.id, "name": token.name, "role": token.role.word, "state": state, **texts}


def _times(token: dict[str, str | None]) -> str:
    words = {"created_at": "created", "last_used_at": "last used", "expires_at": "expires", "revoked_at": "revoked"}
    return "".join(f", {word} {token[key]}" for key, word in words.items() if token[key] is not None)


@contextmanager
def _tokens(config: Path) -> Iterator["Tokens"]:
    from headrace.service.auth.token_store import StoredTokens
    from headrace.service.auth.tokens import Tokens
    from headrace.service.jobs.config import load_service
    from headrace.service.records.database import opened

    service = load_service(config)
    service.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with opened(service.database_url) as records:
        yield Tokens(StoredTokens(records))


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: cannot be read: {error}", "--token-file") from None


def _lifetime(text: str | None) -> timedelta | None:
    from headrace.config import parse_duration

    try:
        return None if text is None else timedelta(seconds=parse_duration(text))
    except (ValueError, OverflowError) as error:
        raise SpecError(str(error), "--expires") from None
