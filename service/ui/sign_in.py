"""Sign in and sign out: plain forms without scripts. A token arrives in a body, and never leaves this process."""

from html import escape
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from headrace.service.auth.guard import Refusal, address_of, check_site
from headrace.service.ui.page_access import PAGE_HEADERS, ROOT, BrowserAuth
from headrace.service.ui.sessions import COOKIE, Sessions

STYLE = (Path(__file__).parent / "style.css").read_text()
"""The style sheet of all pages, light or dark as the reader's system is."""
HOME = f"{ROOT}/"
MAX_TOKEN = 512
MAX_FIELDS = 8

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Headrace: sign in</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><style>{style}</style></head>
<body class="plain"><main><form class="sign-in" method="post" action="{root}/login">
<h1>Headrace</h1>
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="off" autofocus required>
<input type="hidden" name="to" value="{to}">
<p class="{tone}">{said}</p>
<button type="submit">Sign in</button>
</form></main></body></html>
"""
ASKED = "This service needs a token. On its machine, `headrace token create NAME --role viewer` creates one."


class SigningIn:
    """The routes /ui/login and /ui/logout."""

    def __init__(self, door: BrowserAuth, sessions: Sessions) -> None:
        self._door, self._sessions = door, sessions

    def routes(self) -> list[Route]:
        """The routes, to be placed before the pages."""
        return [
            Route(f"{ROOT}/login", self.form, methods=["GET"], include_in_schema=False),
            Route(f"{ROOT}/login", self.sign_in, methods=["POST"], include_in_schema=False),
            Route(f"{ROOT}/logout", self.sign_out, methods=["POST"], include_in_schema=False),
        ]

    async def form(self, request: Request) -> Response:
        """Show the form."""
        return _page(ASKED, place_of(request.query_params.get("to", "")))

    async def sign_in(self, request: Request) -> Response:
        """Start a session, if the token is valid."""
        try:
            form = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=MAX_FIELDS)
        except ValueError:
            return _page(f"Refused: the form has more than {MAX_FIELDS} fields.", HOME, HTTPStatus.BAD_REQUEST)
        token, to = form.get("token", [""])[0].strip(), place_of(form.get("to", [""])[0])
        try:
            check_site(request.headers)
            await self._door.caller(token[:MAX_TOKEN] or "-", address_of(request))
        except Refusal as refusal:
            return _page(f"Refused: {refusal.detail}.", to, refusal.status, refusal.headers)
        self._sessions.end(request.cookies.get(COOKIE))
        answer = RedirectResponse(to, HTTPStatus.SEE_OTHER)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, self._sessions.begin(token), path=ROOT, httponly=True, secure=secure, samesite="lax")
        return answer

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        try:
            check_site(request.headers)
        except Refusal as refusal:
            return _page(f"Refused: {refusal.detail}.", HOME, refusal.status)
        self._sessions.end(request.cookies.get(COOKIE))
        answer = RedirectResponse(f"{ROOT}/login", HTTPStatus.SEE_OTHER)
        answer.delete_cookie(COOKIE, path=ROOT)
        return answer


def place_of(asked: str) -> str:
    """The page to go to next: `asked` if it is a page of ours, else the first page."""
    plain = asked.startswith(HOME) and "//" not in asked and "\\" not in asked and asked.isprintable()
    return asked if plain else HOME


def _page(said: str, to: str, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    tone = "asked" if status is HTTPStatus.OK else "wrong"
    page = PAGE.format(style=STYLE, root=ROOT, to=escape(to), tone=tone, said=escape(said))
    shown = {**PAGE_HEADERS, "cache-control": "no-store", **(headers or {})}
    shown.pop("WWW-Authenticate", None)
    return HTMLResponse(page, status, shown)
