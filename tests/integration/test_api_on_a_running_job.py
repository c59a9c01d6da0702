"""The API in front of a job that trains: what is asked for over HTTP happens, and is told as it happens."""

import json
import threading
import time

import httpx
import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, Unavailable
from headrace.rpc.job_client import NotRunning
from headrace.service.api.app import ApiSettings, app
from headrace.service.api.problems import problem_of
from headrace.service.api.server import bound, serving
from headrace.service.auth.config import AccessSection
from headrace.service.auth.guard import Guard, NoTokens
from headrace.service.jobs.foreground_host import foreground_host
from headrace.service.spec.job import load_job
from headrace.trainer.job_status import Status, read
from tests.integration.followed_job import FollowedJob, status_of

SETTINGS = ("commit.every_passes=1000", 'commit.every="1000s"', "passes.wait=100ms", "pipe.max_bad_fraction=0.9")
EXPORTS = ('exports.main={base="24h"}',)


class Client:
    """Asks the API over its socket."""

    def __init__(self, url):
        self.http = httpx.Client(base_url=url, timeout=30)
        self.events, self.ended = [], threading.Event()

    def get(self, path):
        answer = self.http.get(f"/v1/jobs/small{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def done(self, method, path, body=None, **headers):
        """Have an operation done; its result."""
        answer = self.http.request(method, f"/v1/jobs/small{path}", json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        deadline = Deadline.after(60)
        while (told := self.http.get(answer.headers["location"]).json())["ended"] is None:
            deadline.check(f"waiting for {told}")
            time.sleep(0.05)
        assert told["state"] == "done", json.dumps(told)
        return told["result"]

    def until(self, path, true):
        deadline = Deadline.after(60)
        while not true(told := self.get(path)):
            deadline.check(f"{path}: {told}")
            time.sleep(0.05)
        return told

    def listen(self):
        """Take events until the stream ends."""
        with self.http.stream("GET", "/v1/jobs/small/metrics/stream", timeout=60) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            event = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                else:
                    self.events.append(event)
                    event = {}
        self.ended.set()


@pytest.fixture
def followed(tmp_path):
    return FollowedJob(tmp_path, 6)


@pytest.fixture
def client(followed):
    job = followed.start(*SETTINGS, *EXPORTS)

    def status():
        try:
            return read(Status, status_of(job))
        except (Unavailable, DeadlineExceeded, NotRunning, ValueError, FileNotFoundError):
            return Status(state="starting" if job.process.poll() is None else "done")

    loaded = load_job(followed.spec, [*SETTINGS, *EXPORTS, f"store.path={job.store}"])
    terms = ApiSettings(guard=Guard(AccessSection(anonymous="admin"), NoTokens()))
    listener = bound("127.0.0.1:0")
    try:
        with foreground_host(loaded, status, problem_of) as host, serving(app(host, terms), listener):
            client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
            client.job = job
            yield client
            client.http.close()
    finally:
        job.kill()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_job_is_watched_and_acted_on_over_http(followed, client):
    threading.Thread(target=client.listen, daemon=True).start()
    followed.arrive(2)
    client.until("", lambda told: told["version"] == 2)
    name = client.done("POST", "/commits", **{"Idempotency-Key": "one"})["name"]
    assert client.done("POST", "/commits", **{"Idempotency-Key": "one"})["name"] == name
    assert [each["name"] for each in client.get("/commits")["items"]] == [name]
    assert client.done("POST", f"/commits/{name}/verify")["sound"]
    changed = client.done("PATCH", "", {"keys": {"tables.default.optimizer.lr": 0.2}}, **{"If-Match": "*"})
    assert changed["version"] >= 3
    assert client.until("", lambda told: told["overrides"])["overrides"] == {"tables.default.optimizer.lr": 0.2}
    exported = client.done("POST", "/exports", {"stream": "main"})
    (entry,) = client.until("/exports", lambda told: told["items"])["items"]
    assert (entry["name"], entry["complete"], exported["current"]) == (exported["name"], True, True)
    path = f"/v1/jobs/small/exports/main/{entry['timeline']}/{entry['name']}/files/manifest.json"
    assert client.http.get(path).json()["name"] == entry["name"]
    known = client.get("/tables/default/explain?slot=a&sign=3")
    assert known["known"]["row"] and known["lines"][0].startswith("slot a, sign 3")
    ranked = client.get("/tables/default/ranking")
    assert ranked["scanned"] == ranked["total"] == sum(each["rows"] for each in ranked["unseen"]) > 0
    assert all(each["slot"] and int(each["sign"]) >= 0 for each in ranked["rows"]) and ranked["commit"] is None
    assert ranked["rows"][0]["show"] == max(each["show"] for each in ranked["rows"])
    dry = client.done("POST", "/tables/default/shrink", {"dry_run": True, "delete_below": 1000})
    assert dry["going"] == dry["rows"] > 0
    assert {"timeline", "generation", "secret", "chief", "shards"} <= client.get("/feed").keys()
    with (followed.folder / "part-0.txt").open("a") as stream:
        stream.write("nonsense\n")
    followed.arrive(3)
    (letters,) = client.until("/deadletters", lambda told: told["items"])["items"]
    line = client.http.get(f"/v1/jobs/small/deadletters/{letters['name']}").text
    assert json.loads(line.splitlines()[0])["partition"] == "part-0.txt"
    history = client.get("/metrics/history")["items"]
    assert history[0]["window"]["ctr"]["logloss"] > 0 and history[0]["events"] == 100
    assert client.http.post("/v1/jobs/small/stop").status_code == 409
    client.job.process.terminate()
    assert client.ended.wait(60)
    versions = [int(each["id"].removeprefix("t1-")) for each in client.events if each.get("event") == "close"]
    assert versions == sorted(set(versions)) and {2, changed["version"]} <= {1, *versions}
    assert client.events[-1]["event"] == "end"
    words = [each["words"] for each in client.get("/log?limit=200")["items"]]
    assert any("set: tables.default.optimizer.lr = 0.2" in each for each in words)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_job_is_resized_over_http(followed, client):
    followed.arrive(2)
    client.until("", lambda told: told["version"] == 2)
    done = client.done("POST", "/resize", {"shards": 2, "trainers": 2})
    assert (done["shards"], done["trainers"]) == (2, 2) and done["version"] >= 3
    followed.arrive(3)
    told = client.until("", lambda told: told["events"] == 300)
    assert told["generation"] == 2 and told["workers"] == {"trainers": 2, "shards": 2}
    assert told["overrides"] == {"cluster.shards": 2, "cluster.trainers": 2}
    none = client.http.post("/v1/jobs/small/resize", json={"trainers": 0})
    assert none.status_code == 422 and "trainers" in none.text
