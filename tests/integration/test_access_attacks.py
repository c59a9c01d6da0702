"""Attacks on a service over a real socket; none succeeds."""

import json
import logging
import os
import socket
import time

import pytest

from headrace.service.auth.roles import Role
from tests.integration.served_host import SPEC, served_host

SECRET_FILE = "what no answer may hold"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "secret.txt").write_text(SECRET_FILE)
    tls = {"cert": "data/tls.crt", "key": "data/tls.key"}
    limits = {"max_body": "256KiB", "max_jobs": 3}
    with served_host(folder, limits=limits, access={"max_failures": 5}, tls=tls) as made:
        made.folder = folder
        assert made.create().status_code == 201
        store = made.host.job("news").store
        (store / "dead_letters").mkdir(parents=True)
        (store / "dead_letters" / "pass-0000000001-rank-0.jsonl").symlink_to(folder / "secret.txt")
        yield made


def routes(service):
    document = service.ask("GET", "/v1/openapi.json", role=None).json()
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            if method in ("get", "post", "put", "patch", "delete"):
                yield method.upper(), path, told


def filled(path):
    return path.replace("{job}", "news").replace("{", "").replace("}", "")


OPEN = {("GET", "/v1/health"), ("GET", "/v1/ready")}


def test_without_a_token_nothing_but_its_health_is_told(service):
    for method, path, _ in routes(service):
        answer = service.ask(method, filled(path), role=None)
        if (method, path) in OPEN:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["content-type"] == "application/problem+json"


def test_no_route_is_opened_by_a_lower_role_than_it_says(service):
    asked = 0
    for method, path, told in routes(service):
        if told.get("x-role") not in ("operator", "admin"):
            assert method == "GET", f"a viewer may {method} {path}"
            continue
        lower = [role for role in Role if role < Role.of(told["x-role"])]
        for role in lower:
            answer = service.ask(method, filled(path), role=role)
            assert answer.status_code == 403, (method, path, role)
            assert told["x-role"] in answer.json()["detail"]
            asked += 1
    assert asked > 20


def test_what_administers_is_an_admins_and_what_acts_is_no_viewers(service):
    told = {(method, path): each["x-role"] for method, path, each in routes(service) if (method, path) not in OPEN}
    for method, path in [("POST", "/v1/jobs"), ("DELETE", "/v1/jobs/{job}"), ("GET", "/v1/audit")]:
        assert told[method, path] == "admin"
    assert all(role == "admin" for (_, path), role in told.items() if "/tokens" in path)
    assert all(role != "viewer" for (method, _), role in told.items() if method != "GET")
    assert told["GET", "/v1/jobs/{job}/feed"] == "operator"  # it tells a secret
    assert told["GET", "/v1/jobs/{job}/deadletters/{file}"] == "operator"  # they hold what events held


def test_a_token_in_the_address_or_a_cookie_is_none(service):
    text = service.texts[Role.ADMIN]
    for more in (
        {"params": {"token": text}},
        {"params": {"access_token": text}},
        {"headers": {"Cookie": f"token={text}; Authorization=Bearer {text}"}},
        {"headers": {"X-Authorization": f"Bearer {text}"}},
    ):
        assert service.ask("GET", "/v1/jobs", role=None, **more).status_code == 401


NAMES = [
    "..",
    "../..",
    "..%2f..",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%252f..%252fetc",
    "....//",
    "news%00",
    "news/../../jobs",
    "%c0%ae%c0%ae",
    "\\..\\..",
    "secret.txt",
    "pass-0000000001-rank-0.jsonl",
    "news%0d%0aX-Evil:%201",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_to_a_file_outside(service, name):
    """Job, commit, export, table, file of dead letters, operation: whatever is named by an address."""
    store = service.host.job("news").store
    paths = [
        f"/v1/jobs/{name}",
        f"/v1/jobs/news/commits/{name}",
        f"/v1/jobs/news/exports/{name}/t0/x",
        f"/v1/jobs/news/exports/main/{name}/x",
        f"/v1/jobs/news/exports/main/t0/x/files/{name}",
        f"/v1/jobs/news/deadletters/{name}",
        f"/v1/jobs/news/deadletters/..%2f..%2f{name}",
        f"/v1/jobs/news/tables/{name}",
        f"/v1/operations/{name}",
        f"/v1/jobs/news/output?worker={name}",
    ]
    for path in paths:
        answer = service.raw(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Authorization: Bearer {service.texts[Role.ADMIN]}\r\n\r\n".encode()
        )
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        allowed = (200, 400, 404, 409, 422, 503) if "output" in path or name == ".." else (400, 404, 409, 422, 503)
        assert status in allowed, (path, answer)
        assert SECRET_FILE.encode() not in body and b"root:" not in body
        assert b"x-evil" not in head.lower()
        assert str(store.parents[2]).encode() not in body.replace(str(store).encode(), b""), (path, body)


SPECS = {
    "another command": {"pipe": {"command": ["bash", "-c", "id"]}},
    "the command with more": {"pipe": {"command": ["cat", "/etc/passwd"]}},
    "a class of its own": {"model": {"class": "evil:Model"}},
    "a file elsewhere": {"sources": {"main": {"kind": "files", "paths": ["/etc/passwd"]}}},
    "files above": {"sources": {"main": {"kind": "files", "paths": ["../../*.db"]}}},
    "the records": {"sources": {"main": {"kind": "files", "paths": ["ROOT/service/records.db"]}}},
    "the key": {"sources": {"main": {"kind": "files", "paths": ["ROOT/data/tls.key"]}}},
    "whatever is a key": {"sources": {"main": {"kind": "files", "paths": ["ROOT/data/*.key"]}}},
    "another job": {"store": {"path": "ROOT/service/jobs/news/store"}},
    "a store elsewhere": {"store": {"path": "/etc/cron.d"}},
    "a store above": {"store": {"path": "../../evil"}},
    "a mirror elsewhere": {"store": {"mirror": "s3://evil/bucket"}},
    "a mirror with a password": {"store": {"mirror": "s3://key:hunter2@evil/bucket"}},
    "exports elsewhere": {"exports": {"main": {"path": "/var/www"}}},
    "a command after exports": {"exports": {"main": {"command": ["curl", "http://evil"]}}},
    "a table that is a path": {"tables": {"../../../evil": {}}, "slots": [{"name": "user", "table": "../../../evil"}]},
    "a name that is a path": {"name": "../evil"},
    "a name with a line's end": {"name": "evil\n"},
    "a link out": {"store": {"path": "ROOT/data/out/store"}},
    "more slots than memory": {"slots": [{"names": [f"s{n}_{{1..10000}}" for n in range(100)]}]},
    "a key of no spec": {"__class__": {"x": 1}},
}


@pytest.mark.parametrize("what", SPECS)
def test_a_spec_that_names_more_than_is_allowed_makes_no_job(service, what):
    out = service.folder / "data" / "out"
    if not out.is_symlink():
        out.symlink_to(service.folder)
    changed = json.loads(json.dumps(SPECS[what]).replace("ROOT", str(service.folder)))
    answer = service.create({**SPEC, "name": "evil", **changed})
    assert answer.status_code == 422, answer.text
    assert "hunter2" not in answer.text
    assert [job.name for job in service.host.jobs()] == ["news"]
    assert os.listdir(service.config.jobs) == ["news"]


@pytest.mark.parametrize(
    "base", ["/", "/etc", "ROOT", "ROOT/service", "ROOT/data/..", "data", "../data", "ROOT/data/out"]
)
def test_a_base_outside_of_the_roots_makes_no_job(service, base):
    answer = service.create({**SPEC, "name": "evil"}, base=base.replace("ROOT", str(service.folder)))
    assert answer.status_code == 422, answer.text
    assert os.listdir(service.config.jobs) == ["news"]


@pytest.mark.parametrize(
    "change",
    [
        {"input": {"paths": ["/etc/passwd"]}, "output": "out"},
        {"input": {"paths": ["x"]}, "output": "/var/www"},
        {"input": {"paths": ["x"]}, "output": "../../evil"},
        {"input": {"paths": ["x"]}, "output": "out", "version": "/etc"},
        {"input": {"kafka": {"topic": "t", "options": {"ssl_cafile": "/etc/passwd"}}}, "output": "out"},
    ],
)
def test_a_prediction_that_names_more_than_is_allowed_is_not_begun(service, change):
    answer = service.ask("POST", "/v1/jobs/news/predictions", json=change)
    assert answer.status_code == 422, answer.text


def test_a_spec_beside_a_prediction_is_held_to_the_same(service):
    base = str(service.folder / "data")
    for what in ("another command", "a file elsewhere", "a class of its own", "more slots than memory"):
        spec = {**SPEC, "store": {"path": "store"}, **SPECS[what]}
        asked = {"input": {"paths": ["x"]}, "output": "out", "version": "export", "spec": spec, "base": base}
        answer = service.ask("POST", "/v1/predictions", json=asked)
        assert answer.status_code == 422, (what, answer.text)
    assert not (service.folder / "data" / "out" / "_manifest.json").exists()


def test_what_is_too_large_or_too_deep_is_refused_and_the_service_goes_on(service):
    deep = b'{"spec": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}"
    arrays = b'{"spec": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    toml = json.dumps({"toml": "a = " + "[" * 20_000 + "]" * 20_000}).encode()
    numbers = b'{"spec": {"seed": ' + b"9" * 100_000 + b"}}"
    large = json.dumps({"spec": {"name": "x" * 300_000}}).encode()
    keys = json.dumps({"spec": {f"k{n}": {} for n in range(20_000)}}).encode()
    for body in (deep, arrays, toml, numbers, large, keys, b'{"spec": NaN}', b"\xff\xfe", b"", b"[]", b"null"):
        answer = service.ask("POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 413, 422), (body[:40], answer.status_code, answer.text[:300])
    assert service.ask("GET", "/v1/health").status_code == 200


def test_a_body_without_a_length_is_cut_off_at_the_bound(service):
    def endless():
        for _ in range(64):
            yield b" " * 65536

    answer = service.ask("POST", "/v1/jobs", content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nContent-Length: 40\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -4\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: xchunked\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n",
        "GET /v1/jobs HTTP/1.1\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: evil.example\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1@evil.example\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: 127.0.0.1\r\n",
        "GET http://evil.example/v1/jobs HTTP/1.1\r\nHost: evil.example\r\n",
    ],
)
def test_requests_that_two_readers_could_read_differently_and_other_hosts_are_refused(service, head):
    """With an admin's token: it is the form that is refused. What follows the first request is not read as another."""
    token = f"Authorization: Bearer {service.texts[Role.ADMIN]}\r\n"
    smuggled = (
        f"0\r\n\r\nDELETE /v1/jobs/news HTTP/1.1\r\nHost: 127.0.0.1\r\n{token}If-Match: *\r\nConnection: close\r\n\r\n"
    )
    body = smuggled if head.startswith("POST") else ""
    answer = service.raw(f"{head}{token}Connection: close\r\n\r\n{body}".encode())
    statuses = [int(part.split()[0]) for part in answer.decode().split("HTTP/1.1 ")[1:]]
    assert statuses and all(status >= 400 for status in statuses), answer
    assert [job.name for job in service.host.jobs()] == ["news"]


def test_two_tokens_in_one_request_are_none(service):
    right, low = service.texts[Role.ADMIN], service.texts[Role.VIEWER]
    for first, second in ((right, low), (low, right), (right, right)):
        answer = service.raw(
            f"GET /v1/audit HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer {first}\r\n"
            f"Authorization: Bearer {second}\r\n\r\n".encode()
        )
        assert answer.split()[1] in (b"401", b"429")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_site_changes_nothing_and_reads_nothing(service, headers):
    answer = service.ask("POST", "/v1/jobs/news/resume", headers=headers)
    assert answer.status_code == 403 and "other sites" in answer.json()["detail"]
    read = service.ask("GET", "/v1/jobs", headers=headers)
    assert not [name for name in read.headers if name.startswith("access-control-")]
    asked = service.ask("OPTIONS", "/v1/jobs", headers={**headers, "Access-Control-Request-Method": "POST"})
    assert not [name for name in asked.headers if name.startswith("access-control-")]


def test_a_form_of_a_page_is_no_request(service):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = service.ask("POST", "/v1/jobs", content=json.dumps({"spec": SPEC}), headers={"Content-Type": kind})
        assert answer.status_code == 422


def test_wrong_tokens_are_told_nothing_and_then_to_wait_but_right_ones_come_in(service):
    told = set()
    for number in range(30):
        wrong = f"mlr_{number:016x}_{'0' * 64}"
        answer = service.ask("GET", "/v1/jobs", role=None, headers={"Authorization": f"Bearer {wrong}"})
        told.add((answer.status_code, answer.json()["detail"] if answer.status_code == 401 else ""))
    assert {status for status, _ in told} == {401, 429}
    assert len(told) == 2
    assert int(answer.headers["retry-after"]) >= 1
    assert service.ask("GET", "/v1/jobs").status_code == 200


def test_forwarded_addresses_do_not_make_the_wait_another_ones(service):
    statuses = []
    for number in range(12):
        headers = {
            "Authorization": "Bearer x",
            "X-Forwarded-For": f"10.0.0.{number}",
            "Forwarded": f"for=10.1.0.{number}",
        }
        statuses.append(service.ask("GET", "/v1/jobs", role=None, headers=headers).status_code)
    assert statuses[-1] == 429


def test_a_revoked_token_is_out_at_once(service):
    made = service.ask("POST", "/v1/tokens", json={"name": "leaver", "role": "viewer"}).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    assert service.ask("GET", "/v1/jobs", role=None, headers=headers).status_code == 200
    assert service.ask("DELETE", f"/v1/tokens/{made['id']}").status_code == 200
    assert service.ask("GET", "/v1/jobs", role=None, headers=headers).status_code in (401, 429)


def test_a_token_is_told_once_and_its_secret_is_nowhere_else(service):
    key = {"Idempotency-Key": "again"}
    made = service.ask("POST", "/v1/tokens", json={"name": "once", "role": "viewer"}, headers=key)
    secret = made.json()["token"].rpartition("_")[2]
    service.ask("POST", "/v1/tokens", json={"name": "once", "role": "viewer"}, headers=key)
    for path in ("/v1/tokens", "/v1/audit?limit=200", "/v1/operations", "/metrics", "/v1/openapi.json"):
        assert secret not in service.ask("GET", path).text
    files = [path for path in service.config.root.rglob("*") if path.is_file()]
    assert files and not [path for path in files if secret.encode() in path.read_bytes()]


def test_nobody_is_shown_the_password_of_a_spec(service, caplog):
    caplog.set_level(logging.DEBUG)
    options = {"bootstrap_servers": "broker:9092", "sasl_mechanism": "PLAIN", "sasl_plain_username": "me"}
    source = {"kind": "kafka", "topics": ["t"], "options": {**options, "sasl_plain_password": "hunter2"}}
    made = service.create({**SPEC, "name": "kafka", "sources": {"main": source}})
    assert made.status_code == 201
    try:
        for path in ("", "/spec", "/log", "/output", "/commits"):
            assert "hunter2" not in service.ask("GET", f"/v1/jobs/kafka{path}").text
        shown = service.ask("GET", "/v1/jobs/kafka/spec").json()["spec"]
        assert shown["sources"]["main"]["options"]["sasl_plain_password"] == "***"
        assert "hunter2" not in service.ask("GET", "/v1/audit?limit=200").text
        assert "hunter2" not in caplog.text
        folder = service.host.job("kafka").folder
        assert folder.stat().st_mode & 0o077 == 0
        assert service.config.root.stat().st_mode & 0o077 == 0
    finally:
        etag = service.ask("GET", "/v1/jobs/kafka").headers["etag"]
        assert service.ask("DELETE", "/v1/jobs/kafka", headers={"If-Match": etag}).status_code == 204


def test_there_are_no_more_jobs_than_the_bound(service):
    made = [service.create({**SPEC, "name": f"more-{n}"}).status_code for n in range(4)]
    assert made == [201, 201, 429, 429]
    for n in range(2):
        service.ask("DELETE", f"/v1/jobs/more-{n}", headers={"If-Match": "*"})


def test_a_client_that_sends_nothing_keeps_nobody_waiting(service):
    idle = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(400)]
    try:
        for connection in idle[::2]:
            connection.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
        begun = time.monotonic()
        assert service.ask("GET", "/v1/health").status_code == 200
        assert time.monotonic() - begun < 5
    finally:
        for connection in idle:
            connection.close()


def test_an_answer_says_little_of_what_answers_and_is_no_page(service):
    answer = service.ask("GET", "/v1/jobs")
    assert "uvicorn" not in answer.headers.get("server", "")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
