"""The client of the API: what it retries, what it must not, what problems become; and lists, operations, streams."""

import json
from datetime import date

import httpx
import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, Refused, SpecError, Unavailable
from headrace.service.cli.targets import path_of
from headrace.service.python import rest_client as module
from headrace.service.python.rest_client import NotFound, ServiceClient, parsed_events


@pytest.fixture
def naps(monkeypatch):
    """Time that passes only while the client sleeps."""

    class Time:
        now_s, taken = 0.0, []

        def sleep(self, seconds):
            self.taken = [*self.taken, seconds]
            self.now_s += seconds

        def monotonic(self):
            return self.now_s

    time = Time()
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr("headrace.deadline.time", time)
    return time


@pytest.fixture
def service(naps):
    """A service that answers with what it is given, in turn, and keeps what it was asked."""

    class Service:
        def __init__(self):
            self.answers, self.asked = [], []
            self.client = ServiceClient("http://127.0.0.1:8080", "mlr_x_y", httpx.MockTransport(self.handle))

        def handle(self, request):
            self.asked.append(request)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            status, body, *headers = answer
            return httpx.Response(status, headers=dict(*headers), json=body)

    service = Service()
    with service.client:
        yield service


def test_what_is_asked_carries_the_token_and_nothing_else_does(service):
    service.answers = [(200, {"a": 1})]
    assert service.client.get("/v1/jobs", limit=5, after=None) == {"a": 1}
    (asked,) = service.asked
    assert asked.headers["authorization"] == "Bearer mlr_x_y"
    assert str(asked.url) == "http://127.0.0.1:8080/v1/jobs?limit=5"


def test_a_redirect_is_not_followed_so_that_the_token_goes_nowhere_else(service):
    service.answers = [(307, {}, {"location": "http://evil.example/"})]
    with pytest.raises(Refused, match="status 307"):
        service.client.get("/v1/jobs")
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, Refused),
        (403, Refused),
        (404, NotFound),
        (409, Refused),
        (412, Refused),
        (422, SpecError),
        (500, Unavailable),
    ],
)
def test_a_problem_is_told_once_in_the_services_words(service, status, error):
    service.answers = [(status, {"title": "No", "detail": "spec.tables: no, for this reason"})]
    with pytest.raises(error, match="for this reason"):
        service.client.post("/v1/jobs", {})
    assert len(service.asked) == 1


def test_who_has_no_token_is_told_how_to_give_one(service):
    service.answers = [(401, {"detail": "this needs a token"})]
    with pytest.raises(Refused, match="--token or HEADRACE_TOKEN"):
        service.client.get("/v1/jobs")


def test_what_is_busy_or_away_is_asked_again_a_post_under_the_same_key(service, naps):
    service.answers = [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("late"),
        (503, {"detail": "starting"}),
        (202, {}),
    ]
    service.client.post("/v1/jobs/a/commits")
    keys = {asked.headers["idempotency-key"] for asked in service.asked}
    assert len(service.asked) == 4 and len(keys) == 1
    assert naps.taken == sorted(naps.taken)


def test_two_posts_have_two_keys(service):
    service.answers = [(202, {})]
    for _ in range(2):
        service.client.post("/v1/jobs/a/commits")
    first, second = (asked.headers["idempotency-key"] for asked in service.asked)
    assert first != second


def test_retry_after_is_waited_for(service, naps):
    service.answers = [(429, {"detail": "slow"}, {"retry-after": "7"}), (200, {})]
    service.client.get("/v1/jobs")
    assert naps.taken == [7.0]


def test_asking_again_ends(service, naps):
    service.answers = [(503, {"detail": "starting"})]
    with pytest.raises(Unavailable, match="starting"):
        service.client.get("/v1/jobs")
    assert naps.now_s <= module.RETRY_S and len(service.asked) < 40


def test_a_service_that_asks_for_a_day_is_not_waited_for(service, naps):
    service.answers = [(503, {"detail": "later"}, {"retry-after": "86400"})]
    with pytest.raises(Unavailable, match="later"):
        service.client.get("/v1/jobs")
    assert naps.taken == []


def test_a_change_is_of_what_was_read_and_is_not_sent_again_where_it_may_have_been_done(service):
    service.answers = [(200, {}, {"etag": '"3"'}), httpx.ReadTimeout("late")]
    with pytest.raises(Unavailable, match="check whether it was done"):
        service.client.change("DELETE", "/v1/jobs/a")
    assert [asked.method for asked in service.asked] == ["GET", "DELETE"]
    assert service.asked[1].headers["if-match"] == '"3"'


def test_a_list_is_read_to_its_end(service):
    service.answers = [(200, {"items": [1, 2], "next": "c"}), (200, {"items": [3], "next": None})]
    assert list(service.client.items("/v1/jobs", job="a")) == [1, 2, 3]
    assert [asked.url.params.get("after") for asked in service.asked] == [None, "c"]


def operation(state, **more):
    return {"id": "op-1", "state": state, "said": "", "result": None, "problem": None, **more}


def test_an_operation_is_waited_for_and_what_it_says_is_told_once(service):
    service.answers = [(200, operation("running", said="writes")), (200, operation("done", result={"name": "c1"}))]
    heard = []
    found = service.client.done(operation("running", said="writes"), Deadline.after(60), heard.append)
    assert found == {"name": "c1"} and heard == ["writes"]
    assert service.asked[0].url.path == "/v1/operations/op-1"


def test_an_operation_that_failed_raises_what_it_failed_with(service):
    for state, more, error in [
        ("failed", {"problem": {"status": 422, "detail": "lr: too large"}}, SpecError),
        ("failed", {"problem": {"status": 503, "detail": "away"}}, Unavailable),
        ("interrupted", {}, Refused),
        ("cancelled", {}, Refused),
    ]:
        with pytest.raises(error):
            service.client.done(operation(state, **more), Deadline.after(60))


def test_an_operation_that_takes_too_long_goes_on_without_us(service):
    service.answers = [(200, operation("running"))]
    with pytest.raises(DeadlineExceeded, match="op-1, which continues"):
        service.client.done(operation("waiting"), Deadline.after(1))


def test_what_answers_in_between_is_no_answer(service):
    service.client._http._transport = httpx.MockTransport(lambda request: httpx.Response(404, text="<html>nginx"))
    with pytest.raises(HeadraceError, match="status 404"):
        service.client.get("/v1/jobs")


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8080", "ftp://x", "http://", "http://anne:secret@x", "http://x?token=secret", "http://x:port"],
)
def test_what_is_no_address_or_holds_a_secret_is_refused_without_repeating_it(url):
    with pytest.raises(SpecError) as caught:
        ServiceClient(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["a b", "a\r\nX: y", "ä", "a\0"])
def test_a_token_cannot_smuggle_a_header(token):
    with pytest.raises(SpecError, match="--token"):
        ServiceClient("http://localhost", token)


def test_a_name_leads_to_no_other_address():
    assert path_of("jobs", "a/../b", "x?y#z") == "/v1/jobs/a%2F..%2Fb/x%3Fy%23z"
    for name in ("", ".", ".."):
        with pytest.raises(SpecError):
            path_of("jobs", name)


def test_events_are_told_apart_and_comments_passed_over():
    text = ': warm\n\nid: 3\nevent: close\ndata: {"a":\ndata: 1}\n\ndata: 2\n\nevent: end\n\nid: 4\ndata: 5\n'
    found = [(event.id, event.name, event.data) for event in parsed_events(iter(text.split("\n")))]
    assert found == [("3", "close", {"a": 1}), ("3", "message", 2), ("4", "message", 5)]


def test_a_stream_that_breaks_is_gone_on_with_behind_the_last_event(naps):
    asked = []

    def handle(request):
        asked.append(request.headers.get("last-event-id"))
        number = len(asked)
        if number == 2:
            raise httpx.ReadError("broken")
        return httpx.Response(200, text=f"id: {number}\nevent: close\ndata: {number}\n\n")

    with ServiceClient("http://localhost", transport=httpx.MockTransport(handle)) as client:
        events = client.events("/v1/jobs/a/metrics/stream")
        assert [next(events) for _ in range(2)] == [("close", 1), ("close", 3)]
    assert asked == [None, "1", "1"]


def test_a_stream_that_is_refused_or_never_comes_back_is_an_error(naps):
    answer = httpx.Response(404, json={"detail": "no such job"})
    with ServiceClient("http://localhost", transport=httpx.MockTransport(lambda request: answer)) as client:
        with pytest.raises(NotFound):
            next(client.events("/v1/jobs/a/metrics/stream"))

    def broken(request):
        raise httpx.ConnectError("refused")

    with ServiceClient("http://localhost", transport=httpx.MockTransport(broken)) as client:
        with pytest.raises(Unavailable, match="does not answer"):
            next(client.events("/v1/jobs/a/metrics/stream"))
    assert naps.now_s <= module.REOPEN_S + 1


@pytest.mark.parametrize("value", [float("inf"), float("nan"), date(2026, 11, 21)])
def test_what_no_json_carries_is_refused_and_not_sent(service, value):
    service.answers = [(200, {})]
    with pytest.raises(SpecError, match="cannot be written as JSON"):
        service.client.post("/v1/jobs", {"spec": {"seed": value}})
    assert not service.asked


def test_json_that_is_asked_is_what_was_given(service):
    service.answers = [(200, {})]
    service.client.post("/v1/jobs", {"spec": {"name": "news"}})
    assert json.loads(service.asked[0].content) == {"spec": {"name": "news"}}
