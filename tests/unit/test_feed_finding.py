"""Where a feed is: from a store on this machine, or of a service by plain HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import Refused, Unavailable
from headrace.identity import certificates
from headrace.identity.authority import open_authority
from headrace.identity.peers import PeerName, PeerRole
from headrace.rpc.role import serve_role
from headrace.service.api.feed import ANSWER_S
from headrace.trainer.replica.feed_address import FeedAddress, at_url, certified, in_store
from headrace.trainer.replica.feed_updates import FeedUpdates

WHERE = FeedAddress("job", "t1", 3, "secret", "127.0.0.1:1", ("127.0.0.1:2", "127.0.0.1:3"))


MESSAGE = {
    "job": "job",
    "timeline": "t1",
    "generation": 3,
    "tls": False,
    "embedded": False,
    "secret": "secret",
    "chief": "127.0.0.1:1",
    "shards": ["127.0.0.1:2", "127.0.0.1:3"],
}


def soon():
    return Deadline.after(5)


def test_what_a_rank0_says_is_understood():
    assert FeedAddress.of_message(MESSAGE) == WHERE and WHERE.peer(None) is None
    for wrong in ({"shards": None}, {"tls": True}):
        with pytest.raises(Refused, match="does not say where"):
            FeedAddress.of_message(MESSAGE | wrong)


def test_a_replica_of_a_job_for_other_machines_gets_a_certificate_of_its_generation(tmp_path):
    key = certificates.draw_key()
    request = certificates.signing_request(key)
    assert certified(MESSAGE, tmp_path, request) == MESSAGE and not list(tmp_path.iterdir())
    answer = json.loads(json.dumps(certified(MESSAGE | {"tls": True}, tmp_path, request)))
    found = FeedAddress.of_message(answer, key)
    assert found.credentials.name == PeerName("job", 3, PeerRole.REPLICA, 0) and found.credentials.key == key
    assert found.credentials.authority == open_authority(tmp_path / "identity", "job").pem
    assert key not in repr(found)
    assert str(found.peer(1).name) == "shard-1 of generation 3 of job 'job'"
    assert found.peer(None).name == PeerName("job", 3, PeerRole.TRAINER, 0)
    embedded = FeedAddress.of_message(answer | {"embedded": True}, key)
    assert embedded.peer(0).name == PeerName("job", 3, PeerRole.TRAINER, 0)
    with pytest.raises(certificates.InvalidRequest):
        certified(MESSAGE | {"tls": True}, tmp_path, "no request")


def test_the_newest_generation_in_a_store_is_asked(tmp_path):
    with pytest.raises(Unavailable, match="no run is active"):
        in_store(tmp_path)(soon())
    with locked(tmp_path / "lock", soon()):
        the_newest_is_asked(tmp_path)


def the_newest_is_asked(tmp_path):
    for generation in (9, 10):
        folder = tmp_path / "workers" / f"g{generation}"
        folder.mkdir(parents=True)
    with pytest.raises(Unavailable):
        in_store(tmp_path)(soon())  # it has not said where it is
    asked = []

    def answer(request):
        asked.append(request)
        return MESSAGE

    with serve_role(dict, lambda: None, "of 10", folder / "trainer-0.socket", answer=answer) as server:
        (folder / "rank0.json").write_text(json.dumps({"address": server.address, "secret": "of 10"}))
        assert in_store(tmp_path)(soon()) == WHERE
    assert asked == [{"do": "feed"}]
    with pytest.raises(Unavailable):
        in_store(tmp_path)(soon())


def test_a_busy_service_has_its_time_to_say_where_a_feed_is_however_soon_an_update_is_wanted():
    left = []

    def find(deadline):
        left.append(deadline.left_s())
        raise Unavailable("not now")

    with pytest.raises(Unavailable):
        FeedUpdates(find).next(Deadline.after(0))
    assert left[0] > ANSWER_S


@pytest.fixture
def service():
    """A server that gives what it is told to; what it was asked."""
    answers, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802  # its name
            asked.append((self.path, self.headers.get("Authorization")))
            code, body = answers.pop(0)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/jobs/news", answers, asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_service_is_asked_with_the_token(service):
    url, answers, asked = service
    answers += [(200, MESSAGE), (200, MESSAGE)]
    assert at_url(url)(soon()) == at_url(f"{url}/", "a token")(soon()) == WHERE
    paths = [urlsplit(path) for path, _ in asked]
    assert [path.path for path in paths] == ["/v1/jobs/news/feed"] * 2
    assert [token for _, token in asked] == [None, "Bearer a token"]
    requests = [parse_qs(path.query)["signing_request"][0] for path in paths]
    assert all(certificates.public_key_of(each) for each in requests) and requests[0] != requests[1]


def test_a_services_refusal_stays_and_its_trouble_passes(service):
    url, answers, _ = service
    for code, kind in ((404, Refused), (403, Refused), (409, Unavailable), (503, Unavailable)):
        answers.append((code, {"title": "no", "detail": "job 'news' is unknown"}))
        with pytest.raises(kind, match=f"{code}: job 'news' is unknown"):
            at_url(url)(soon())
    answers.append((200, ["nothing"]))
    with pytest.raises(Refused):
        at_url(url)(soon())


def test_nobody_there_is_unavailable_and_no_address_is_refused():
    with pytest.raises(Unavailable, match="does not answer"):
        at_url("http://127.0.0.1:1/v1/jobs/news")(soon())
    with pytest.raises(Refused, match="begins with http"):
        at_url("file:///etc/passwd")
    with pytest.raises(Refused, match="leads to another machine in clear"):
        at_url("http://10.77.0.10:8080/v1/jobs/news")
