"""Access to the live pages: who is accepted, and what is refused before a page is built."""

import asyncio
import sys

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.websockets import WebSocket

from headrace.service.api.app import ApiSettings, app
from headrace.service.auth.config import AccessSection
from headrace.service.auth.guard import Guard
from headrace.service.auth.roles import Caller, Role
from headrace.service.jobs.memory_host import MemoryHost
from headrace.service.jobs.operation_queue import OperationQueue
from headrace.service.records.database import opened
from headrace.service.ui import mount
from headrace.service.ui.api_client import RequestRefused, Visitor, list_all
from headrace.service.ui.page_access import VISIT, BrowserAuth, PageGate, Visit
from headrace.service.ui.sessions import COOKIE, Sessions

TOKENS = {f"mlr_{role.word}": Caller(role.word, role) for role in Role}


class Known:
    """Tokens by their text."""

    def __init__(self):
        self.tokens = dict(TOKENS)

    def caller(self, token):
        return self.tokens.get(token)

    at_once = caller


class World:
    """An application with the live page, of which the pages themselves say only who came."""

    def __init__(self, host, anonymous="none", max_pages=4, max_each=2):
        self.known = Known()
        guard = Guard(AccessSection(anonymous=anonymous, max_failures=3), self.known)
        self.api = app(host, ApiSettings(guard=guard, names=("trains.example.org",)))
        self.open = []
        mount.mount(self.api, max_pages, max_each)
        self.gate = next(each.app for each in self.api.routes if isinstance(getattr(each, "app", None), PageGate))
        self.gate._pages, self.gate._open_pages = self._page, lambda: self.open
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.api), base_url="http://127.0.0.1")

    async def _page(self, scope, receive, send):
        if scope["type"] == "websocket":
            socket = WebSocket(scope, receive, send)
            await socket.accept()
            return
        visit = scope.get(VISIT)
        await PlainTextResponse(visit.caller.name if visit else "static")(scope, receive, send)

    def ask(self, method, path, **more):
        return asyncio.run(self.http.request(method, path, **more))

    def sign_in(self, token, **headers):
        return self.ask("POST", "/ui/login", data={"token": token, "to": "/ui/jobs/news"}, headers=headers)

    def socket(self, path="/ui/_nicegui_ws/socket.io", **headers):
        """What a websocket that is asked for with these headers is answered: the first message."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.http.cookies.items())
        told = {"host": "127.0.0.1", "cookie": cookies, **headers}
        scope = {
            "type": "websocket", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in told.items()],
            "scheme": "ws", "subprotocols": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        sent = []

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message):
            sent.append(message)

        asyncio.run(self.api(scope, receive, send))
        return sent[0]["type"]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    records = opened(f"sqlite:///{folder / 'records.db'}")
    work = OperationQueue(records, threads=1)
    yield MemoryHost(records, work, folder)
    work.close()
    records.close()


@pytest.fixture
def world(host):
    return World(host)


def test_who_has_no_token_is_asked_for_one_and_comes_to_where_they_went(world):
    answer = world.ask("GET", "/ui/jobs/news")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login?to=/ui/jobs/news")
    form = world.ask("GET", answer.headers["location"])
    assert form.status_code == 200 and 'value="/ui/jobs/news"' in form.text and "<script" not in form.text
    signed = world.sign_in("mlr_viewer")
    assert (signed.status_code, signed.headers["location"]) == (303, "/ui/jobs/news")
    assert world.ask("GET", "/ui/jobs/news").text == "viewer"


def test_the_cookie_holds_no_token_and_is_for_the_pages_alone(world):
    cookie = world.sign_in("mlr_admin").headers["set-cookie"]
    assert "mlr_admin" not in cookie
    assert all(part in cookie for part in ("HttpOnly", "Path=/ui", "SameSite=lax"))
    assert world.ask("GET", "/v1/jobs", headers={"Cookie": cookie.partition(";")[0]}).status_code == 401


def test_a_wrong_token_is_told_so_and_then_to_wait(world):
    answers = [world.sign_in(f"mlr_wrong{n}") for n in range(6)]
    assert {each.status_code for each in answers} == {401, 429}
    assert not [each for each in answers if "set-cookie" in each.headers]
    assert world.sign_in("mlr_viewer").status_code == 303


def test_who_signs_out_is_out_and_so_is_who_lost_their_token(world):
    kept = world.sign_in("mlr_operator").headers["set-cookie"].partition(";")[0]
    assert world.ask("POST", "/ui/logout").status_code == 303
    assert world.ask("GET", "/ui/", headers={"Cookie": kept}).status_code == 303
    world.sign_in("mlr_operator")
    assert world.ask("GET", "/ui/").text == "operator"
    del world.known.tokens["mlr_operator"]
    assert world.ask("GET", "/ui/").status_code == 303
    assert world.socket() == "websocket.close"


def test_each_signing_in_is_a_session_of_its_own(world):
    first = world.sign_in("mlr_admin").cookies[COOKIE]
    second = world.sign_in("mlr_viewer").cookies[COOKIE]
    assert first != second
    world.http.cookies.set(COOKIE, first, path="/ui")
    assert world.ask("GET", "/ui/").status_code == 303  # the one before is over


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_site_signs_nobody_in_or_out_and_opens_no_socket(world, headers):
    assert world.sign_in("mlr_admin", **headers).status_code == 403
    world.sign_in("mlr_admin")
    assert world.ask("POST", "/ui/logout", headers=headers).status_code == 403
    assert world.ask("GET", "/ui/").text == "admin"
    assert world.ask("POST", "/ui/_nicegui_ws/socket.io", headers=headers).status_code == 403
    assert world.socket(**{name.lower(): value for name, value in headers.items()}) == "websocket.close"


def test_a_socket_obeys_the_list_of_names_and_asks_who_is_there(world):
    assert world.socket(origin="http://127.0.0.1") == "websocket.close"
    world.sign_in("mlr_viewer")
    assert world.socket(origin="http://127.0.0.1") == "websocket.accept"
    assert world.socket(host="trains.example.org", origin="https://trains.example.org") == "websocket.accept"
    for host in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", ""):
        assert world.socket(host=host, origin=f"http://{host}") == "websocket.close"
    assert world.socket("/v1/jobs/news/metrics/stream") == "websocket.close"
    assert world.socket("/metrics") == "websocket.close"


def test_pages_answer_under_our_names_alone_and_may_be_framed_by_nobody(world):
    assert world.ask("GET", "/ui/login", headers={"Host": "evil.example"}).status_code == 400
    for path in ("/ui/login", "/ui/", "/ui/_nicegui/x.js"):
        headers = world.ask("GET", path).headers
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_scripts_and_styles_need_no_session_and_pages_are_bounded(world):
    assert world.ask("GET", "/ui/_nicegui/3/static/x.js").text == "static"
    world.sign_in("mlr_viewer")
    world.open = ["admin"] * 4
    answer = world.ask("GET", "/ui/")
    assert answer.status_code == 429 and "as many as limits.max_streams allows;" in answer.text
    assert world.socket(origin="http://127.0.0.1") == "websocket.accept"  # of a page that is open


def test_the_pages_of_one_reader_leave_room_for_others(world):
    world.sign_in("mlr_viewer")
    world.open = ["viewer"]
    assert world.ask("GET", "/ui/").text == "viewer"
    world.open = ["viewer", "viewer", "admin"]
    answer = world.ask("GET", "/ui/")
    assert answer.status_code == 429 and "you have 2 open pages" in answer.text
    world.sign_in("mlr_admin")
    assert world.ask("GET", "/ui/").text == "admin"


def test_a_form_of_more_fields_than_ours_has_is_refused(world):
    many = {f"field{number}": "x" for number in range(9)}
    answer = world.ask("POST", "/ui/login", data={"token": "mlr_viewer", **many})
    assert answer.status_code == 400 and "more than 8 fields" in answer.text


@pytest.mark.parametrize("origin", ["http://[evil", "http://[::1", "null", "\xff"])
def test_an_origin_that_is_no_address_is_another_site(world, origin):
    headers = {"origin": origin.encode("latin-1")}
    answer = world.ask("POST", "/ui/login", data={"token": "mlr_viewer"}, headers=headers)
    assert answer.status_code == 403 and COOKIE not in answer.cookies


def test_where_everybody_has_a_role_nobody_is_asked(host):
    world = World(host, anonymous="viewer")
    assert world.ask("GET", "/ui/").text == "anonymous"
    world.sign_in("mlr_admin")
    assert world.ask("GET", "/ui/").text == "admin"


def test_the_first_address_leads_to_the_pages_and_the_document_has_none_of_them(world):
    assert world.ask("GET", "/").headers["location"] == "/ui/"
    assert world.ask("GET", "/ui").headers["location"] == "/ui/"
    assert world.ask("GET", "/v1/nothing").headers["content-type"] == "application/problem+json"
    assert not [path for path in world.api.openapi()["paths"] if not path.startswith(("/v1/", "/metrics"))]


def test_without_the_extra_the_first_address_says_how_to_have_it(monkeypatch, host):
    monkeypatch.setitem(sys.modules, "nicegui", None)
    api = app(host, ApiSettings.of_a_run())
    mount.mount(api, 4, 2)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://127.0.0.1")
    answer = asyncio.run(http.get("/"))
    assert answer.status_code == 200 and "pip install 'headrace[ui]'" in answer.text and answer.text.count("\n") == 1
    assert asyncio.run(http.get("/ui/")).status_code == 404


def test_a_page_asks_as_its_reader_and_is_told_what_they_are(world):
    async def asked(token):
        visit = Visit(lambda: token, "127.0.0.1", world.known.tokens.get(token))
        visitor = Visitor(world.api, visit)
        try:
            jobs = await list_all(visitor, "/jobs")
            with pytest.raises(RequestRefused) as refused:
                await visitor.call("pauseJob", {"job": "news"})
            return jobs, visitor.may("pauseJob"), visitor.may("listJobs"), refused.value.status
        finally:
            await visitor.leave()

    assert asyncio.run(asked("mlr_viewer")) == ([], False, True, 403)
    jobs, may, _, status = asyncio.run(asked("mlr_operator"))
    assert (jobs, may, status) == ([], True, 404)


def test_a_door_counts_failures_by_address(world):
    door = BrowserAuth(world.api, Sessions())

    async def fail(address):
        with pytest.raises(Exception, match="token") as refused:
            await door.caller("mlr_wrong", address)
        return refused.value.status

    assert [asyncio.run(fail("10.0.0.1")) for _ in range(5)][-1] == 429
    assert asyncio.run(fail("10.0.0.2")) == 401
