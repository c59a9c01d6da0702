"""Rules of every route: problems, pages, preconditions, idempotency keys, the audit log."""

import errno
import json
import threading
from datetime import timedelta
from http import HTTPStatus

import httpx
import pytest
from sqlalchemy import select

from headrace.blob.blob_errors import BlobUnavailable, BlobUnwritable
from headrace.errors import NotYet, SpecError, Unavailable
from headrace.rpc.job_client import JobClient
from headrace.service.api import idempotency, problems
from headrace.service.api.idempotency import IdempotencyStore, StoredAnswer
from headrace.service.api.job_cache import TimedCache
from headrace.service.api.schemas import MAX_LIMIT, Paging, decoded, encoded, page
from headrace.service.auth.roles import Role
from headrace.service.jobs.config import LimitsSection
from headrace.service.records.database import utc_now
from headrace.service.records.schema import AuditRow, RepeatRow
from tests.fakes.asked_api import PROBLEM, api
from tests.integration.stream_job import SPEC

KEYS = {"keys": {"tables.default.optimizer.lr": 0.02}}


@pytest.fixture
def served(tmp_path, url):
    with api(tmp_path, limits=LimitsSection(max_body=4096, max_operations=2), database=url) as made:
        made.job("news")
        yield made


def problem(answer, status, words, path=None):
    """Holds the answer to being this problem."""
    told = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM), answer.text
    assert (told["status"], told.get("path")) == (status, path) and words in told["detail"], told
    return answer


# -- problems


def test_whatever_goes_wrong_is_a_problem(served):
    problem(served.get("/v1/jobs/nws"), 404, "there is no job 'nws'; known here: news")
    problem(served.get("/v2"), 404, "Not Found")
    allowed = problem(served.ask("PUT", "/v1/jobs/news"), 405, "Method Not Allowed").headers["allow"]
    assert allowed == "DELETE, GET, PATCH"
    problem(served.get("/v1/jobs?limit=0"), 422, "query.limit: Input should be greater", "query.limit")
    problem(served.get("/v1/jobs?after=!"), 422, "'!' is not a cursor", "query.after")
    problem(served.get("/v1/audit?after=" + encoded("x")), 422, "of another list", "query.after")
    problem(served.get("/v1/jobs", token=None), 401, "this needs a token of role viewer")
    problem(served.get("/v1/audit", token=served.tokens[Role.VIEWER]), 403, "this needs the role admin")
    problem(served.get("/v1/jobs", host="evil.example"), 400, "does not answer as 'evil.example'")
    served.host.away = Unavailable("the records are away")
    served.api.state.statuses.forget("news")
    assert problem(served.get("/v1/jobs/news"), 503, "the records are away").headers["retry-after"] == "1"


def test_mistakes_of_a_body_are_told_by_their_keys(served):
    wrong = {"keys": {}, "kees": 1}
    problem(served.ask("PATCH", "/v1/jobs/news", json=wrong), 422, "kees: Extra inputs are not permitted", "keys")
    problem(served.post("/v1/jobs", {"spec": {}, "toml": ""}), 422, "give either spec or toml")
    spec = SPEC.replace("dim = 4", "dim = -1")
    problem(served.post("/v1/jobs", {"toml": spec, "name": "x"}), 422, "tables.default.dim: ", "tables.default.dim")
    problem(served.post("/v1/jobs", {"toml": "a = "}), 422, "not TOML", "toml")
    answer = served.ask("POST", "/v1/jobs", content=b"{", headers={"content-type": "application/json"})
    problem(answer, 422, "JSON decode error")
    answer = served.ask("POST", "/v1/jobs", content=b"[" * 4000, headers={"content-type": "application/json"})
    problem(answer, 400, "error parsing the body")
    answer = served.ask("POST", "/v1/jobs", content='{"toml": ""}', headers={"content-type": "text/plain"})
    problem(answer, 422, 'sent with the header "Content-Type: application/json"')


def test_a_body_that_is_too_long_is_not_read_on(served):
    problem(served.post("/v1/jobs", {"toml": "x" * 4096}), 413, "a request may have 4,096 bytes")

    async def parts():
        for _ in range(1000):
            sent.append(1)
            yield b"x" * 1024

    sent = []
    request = httpx.Request("POST", "http://127.0.0.1/v1/jobs", content=parts(), headers={
        "content-type": "application/json", "authorization": f"Bearer {served.token}",
    })  # fmt: skip
    problem(served.send(request), 413, "a request may have 4,096 bytes")


def test_a_bug_is_told_without_its_inside_and_written_down(served, monkeypatch):
    def broken(*_):
        raise RuntimeError("a secret")

    monkeypatch.setattr(served.host, "act", broken)
    answer = problem(served.post("/v1/jobs/news/pause"), 500, "an internal error of the service")
    assert "secret" not in answer.text
    assert served.get("/v1/audit").json()["items"][0]["status"] == 500


def test_answers_cannot_be_framed_sniffed_or_kept(served):
    for answer in (served.get("/v1/jobs"), served.get("/v1/nowhere"), served.get("/metrics", token=None)):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_page_of_another_site_can_change_nothing(served):
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}):
        problem(served.post("/v1/jobs/news/pause", headers=headers), 403, "pages of other sites")
    assert served.host.job("news").revision == 1


# -- pages


def test_a_list_is_told_once_over_all_pages(served):
    for number in range(7):
        served.job(f"job-{number}")
    served.api.state.statuses.forget("news")
    names, after = [], ""
    while after is not None:
        told = served.get(f"/v1/jobs?limit=3{after and f'&after={after}'}").json()
        names += [each["name"] for each in told["items"]]
        after = told["next"]
    assert names == [*(f"job-{number}" for number in range(7)), "news"]


def test_where_a_page_ended_with_what_is_gone_the_list_begins_anew():
    paging = Paging(limit=2, after=decoded(encoded("b")))
    assert page(["a", "b", "c"], paging, str).items == ["c"]
    assert page(["a", "c", "d"], paging, str).items == ["a", "c"]
    assert decoded(encoded("t1/ü")) == "t1/ü" and MAX_LIMIT == 200


# -- changes


def test_a_change_needs_the_tag_of_what_was_read(served, monkeypatch):
    monkeypatch.setattr(JobClient, "carry_out", lambda *_: 7)
    tag = served.get("/v1/jobs/news").headers["etag"]
    problem(
        served.ask("PATCH", "/v1/jobs/news", json=KEYS),
        428,
        f"the job as you read it, now {tag}",
    )
    problem(served.ask("DELETE", "/v1/jobs/news"), 428, "send If-Match")
    problem(served.ask("PATCH", "/v1/jobs/news", json=KEYS, headers={"if-match": '"0"'}), 412, "the job has changed")
    problem(served.post("/v1/jobs/news/pause", headers={"if-match": '"0"'}), 412, "the job has changed")
    done = served.done(served.ask("PATCH", "/v1/jobs/news", json=KEYS, headers={"if-match": tag}))
    assert (done["kind"], done["state"], done["result"]["keys"]) == ("set", "done", KEYS["keys"])
    assert done["result"]["version"] == 7
    assert served.get("/v1/jobs/news").headers["etag"] != tag
    problem(served.ask("DELETE", "/v1/jobs/news", headers={"if-match": "*"}), 409, "stop it, and retry")
    assert served.post("/v1/jobs/news/stop").json()["phase"] == "stopped"
    assert served.ask("DELETE", "/v1/jobs/news", headers={"if-match": "*"}).status_code == 204
    problem(served.get("/v1/jobs/news"), 404, "there is no job")


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ('{"tables.default.delete_below": 1e999}', "tables.default.delete_below", "a finite number"),
        ('{"tables.default.delete_after_days": 9999999999}', "tables.default.delete_after_days", "or equal to 1000000"),
        ('{"tables.default.optimizer.lr": "x"}', "tables.default.optimizer.lr", "a valid number"),
        ('{"seed": 7}', "seed", "cannot be set while the job runs"),
    ],
)
def test_a_change_that_cannot_be_is_refused_at_once(served, keys, path, words):
    body = {"content": f'{{"keys": {keys}}}', "headers": {"if-match": "*", "content-type": "application/json"}}
    problem(served.ask("PATCH", "/v1/jobs/news", **body), 422, words, path)
    assert served.get("/v1/operations").json()["items"] == []


def test_a_job_is_made_of_a_spec_and_a_name(served):
    answer = served.post("/v1/jobs", {"toml": SPEC, "name": "other", "start": False})
    assert (answer.status_code, answer.headers["location"], answer.headers["etag"]) == (201, "/v1/jobs/other", '"1"')
    assert (answer.json()["phase"], answer.json()["created_by"]) == ("stopped", "admin")
    problem(served.post("/v1/jobs", {"toml": SPEC, "name": "other"}), 409, "there is a job 'other' already")
    assert served.get("/v1/jobs/other/spec").json()["spec"]["name"] == "other"


def test_operations_are_bounded_listed_and_cancelled(served):
    gate = threading.Event()
    for _ in range(2):
        served.host.work.start("slow", "news", "ann", lambda *_: gate.wait(20))
    answer = served.ask("PATCH", "/v1/jobs/news", json=KEYS, headers={"if-match": "*"})
    assert problem(answer, 429, "operations wait or run").headers["retry-after"] == "1"
    first, second = served.get("/v1/operations?job=news").json()["items"]
    assert first["id"] > second["id"] and served.get("/v1/operations?job=x").json()["items"] == []
    assert served.post(f"/v1/operations/{first['id']}/cancel").status_code == 200
    gate.set()
    problem(served.get("/v1/operations/x"), 404, "there is no operation 'x'")


def test_who_is_told_that_an_operation_is_over_sees_what_it_did(served):
    """However often it was asked a moment ago, and though answers are kept for a while."""
    host, gate = served.host, threading.Event()

    def act(*_):
        assert gate.wait(20)
        host.statuses["news"] = {"job": "news", "state": "training", "overrides": {"a": 1}}

    before = served.get("/v1/jobs/news").json()["overrides"]
    operation = host.work.start("set", "news", "ann", act)
    gate.set()
    while not host.work.get(operation.id).state.over:
        served.get("/v1/jobs/news")
    assert before == {} and served.get("/v1/jobs/news").json()["overrides"] == {"a": 1}


# -- requests that are repeated


def test_a_repeated_request_has_the_first_answer_and_no_effect(served):
    key = {"idempotency-key": "once"}
    first = served.post("/v1/jobs/news/pause", headers=key)
    again = served.post("/v1/jobs/news/pause", headers=key)
    assert served.host.job("news").revision == 2
    assert (again.status_code, again.json(), again.headers["etag"]) == (200, first.json(), first.headers["etag"])
    assert again.headers["idempotency-replayed"] == "true" and "idempotency-replayed" not in first.headers
    problem(served.post("/v1/jobs/news/stop", headers=key), 422, "is the key of another request", "Idempotency-Key")
    other = served.post("/v1/jobs/news/pause", headers=key, token=served.tokens[Role.OPERATOR])
    assert other.json()["revision"] == 3  # a key is its sender's own
    made = [served.post("/v1/jobs/news/commits", headers={"idempotency-key": "two"}) for _ in range(2)]
    assert made[0].json()["id"] == made[1].json()["id"] and made[0].headers["location"] == made[1].headers["location"]


def test_a_refused_request_may_be_sent_again_under_its_key(served):
    key, wanted = {"idempotency-key": "once"}, {"toml": SPEC, "name": "news"}
    problem(served.post("/v1/jobs", wanted, headers=key), 409, "there is a job")
    served.host.act("news", "stop", "ann")
    served.host.delete("news", "ann", False)
    assert served.post("/v1/jobs", wanted, headers=key).status_code == 201


def asked(key="k", body=b"", who="ann"):
    return idempotency.KeyedRequest(key, who, "POST", "/v1/jobs", body)


def test_a_request_that_is_being_answered_waits_unless_its_service_died(served):
    kept, answer = IdempotencyStore(served.records), StoredAnswer(200, {}, "{}")
    assert kept.begin(asked()) is None
    with pytest.raises(NotYet, match="is being answered"):
        kept.begin(asked())
    assert (
        IdempotencyStore(served.records).begin(asked()) is None
    )  # another start of the service: that answer never came
    kept.end(asked(), answer)
    assert kept.begin(asked()) == answer
    with pytest.raises(SpecError, match="must be 1 to 200 characters"):
        kept.begin(asked("k" * 201))


def test_what_is_remembered_of_requests_is_bounded(served, monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_REPEATS", 10)
    kept, answer = IdempotencyStore(served.records), StoredAnswer(200, {}, "{}")
    for number in range(12):
        assert kept.begin(asked(f"k{number}")) is None
        kept.end(asked(f"k{number}"), answer)
    assert kept.begin(asked("k11")) == answer and kept.begin(asked("k0")) is None
    with served.records.session() as session:
        session.get(RepeatRow, ("k11", "ann")).at = utc_now() - timedelta(hours=25)
    assert kept.begin(asked("k11")) is None
    kept.end(asked("k11"), StoredAnswer(200, {}, "x" * (idempotency.MAX_BODY + 1)))
    assert kept.begin(asked("k11")) is None  # too long to be kept


def test_the_requests_of_one_caller_push_out_their_own_alone(served, monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_REPEATS_EACH", 10)
    kept, answer = IdempotencyStore(served.records), StoredAnswer(200, {}, "{}")
    assert kept.begin(asked("k", who="bob")) is None
    kept.end(asked("k", who="bob"), answer)
    for number in range(12):
        assert kept.begin(asked(f"k{number}")) is None
        kept.end(asked(f"k{number}"), answer)
    assert kept.begin(asked("k0")) is None
    assert kept.begin(asked("k", who="bob")) == answer


# -- what is written down, and what is not asked twice


def test_every_change_is_written_down_with_who_what_and_its_status(served):
    served.post("/v1/jobs/news/pause", token=served.tokens[Role.OPERATOR])
    served.ask("PATCH", "/v1/jobs/news", json={"keys": {"a": 1}})
    served.get("/v1/jobs/news")
    served.post("/v1/jobs/news/forget", {"slot": "a", "value": "77"})
    secret = served.post("/v1/tokens", {"name": "ann", "role": "viewer"}).json()["token"]
    told = served.get("/v1/audit").json()["items"]
    assert [(each["who"], each["method"], each["path"], each["status"]) for each in told] == [
        ("admin", "POST", "/v1/tokens", 201),
        ("admin", "POST", "/v1/jobs/news/forget", 202),
        ("admin", "PATCH", "/v1/jobs/news", 428),
        ("operator", "POST", "/v1/jobs/news/pause", 200),
    ]
    assert told[2]["detail"] == {"keys": {"a": 1}} and told[1]["detail"] == {
        "slot": "a",
        "everywhere": False,
    }  # no value
    assert secret not in json.dumps(told)
    (only,) = served.get("/v1/audit?who=operator&job=news&limit=1").json()["items"]
    assert (only["role"], only["job"]) == ("operator", "news")
    assert served.get("/v1/jobs", token=secret).status_code == 200
    assert served.ask("DELETE", "/v1/tokens/ann").json()["revoked"]
    assert served.get("/v1/jobs", token=secret).status_code == 401
    problem(served.ask("DELETE", "/v1/tokens/ann"), 404, "there is no token 'ann'")


def test_a_token_that_stands_in_an_address_or_a_body_is_written_down_nowhere(served):
    made = served.post("/v1/tokens", {"name": "ann", "role": "viewer"}).json()
    secret = made["token"].rpartition("_")[2]
    assert served.ask("DELETE", f"/v1/tokens/{made['token']}").json()["id"] == made["id"]  # whole, it means its id
    assert served.get("/v1/jobs", token=made["token"]).status_code == 401
    problem(served.ask("DELETE", f"/v1/tokens/{made['token'][:-4]}"), 404, "there is no token")
    served.post(f"/v1/jobs/{made['token'][:60]}/pause")
    served.ask("PATCH", "/v1/jobs/news", json={"keys": {"a": [{made["token"]: made["token"]}]}})
    served.post(f"/v1/jobs/news/commits/{made['token']}/pin", {"holder": "ann"})
    served.post("/v1/jobs", {"spec": {}, "name": made["token"][:64]})
    served.post(f"/v1/operations/{made['token']}/cancel", token=served.tokens[Role.VIEWER])  # refused
    with served.records.reading() as session:
        rows = [(row.path, row.job, json.dumps(row.detail)) for row in session.scalars(select(AuditRow))]
    assert len(rows) == 9
    assert secret[:8] not in str(rows)
    assert f"/v1/tokens/mlr_{made['id']}_***" in [path for path, _, _ in rows]


def test_clients_that_ask_often_do_not_ask_the_job_as_often(served):
    for _ in range(20):
        served.get("/v1/jobs/news")
    assert served.host.asked < 20
    now, asked_for = [0.0], []

    def look():
        asked_for.append(1)
        return len(asked_for)

    kept = TimedCache(lambda: now[0], max_kept=2)
    assert [kept.get(("a",), 1, look) for _ in range(3)] == [1, 1, 1]
    now[0] = 1.0
    assert kept.get(("a",), 1, look) == 2
    kept.drop(("a",))
    assert kept.get(("a",), 1, look) == 3
    assert kept.get(("x", "y"), 1, look) == 4
    kept.drop(("x",))
    assert kept.get(("x", "y"), 1, look) == 5
    with pytest.raises(ZeroDivisionError):
        kept.get(("b",), 1, lambda: 1 // 0)
    assert kept.get(("b",), 1, look) == 6 and kept.get(("c",), 1, look) == 7
    assert kept.get(("a",), 1, look) == 8  # forgotten, as there was no more room


def test_a_full_folder_of_exports_is_no_reason_to_ask_again(tmp_path):
    error = BlobUnwritable(
        "exports at /full", tmp_path / "current.json", OSError(errno.ENOSPC, "No space left on device")
    )
    assert problems.status_of(error) == HTTPStatus.INSUFFICIENT_STORAGE and error.exit_code == 1
    assert problems.status_of(BlobUnavailable("exports at s3://b", "reading x", "away")) in problems.AGAIN
