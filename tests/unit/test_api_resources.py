"""Each resource of a job with a history: what it shows, and the actions on it."""

import json
import shutil
import threading
import tomllib
from pathlib import Path

import pytest

from headrace.dataset.loader.dead_letters import encode_letter
from headrace.dataset.samples.rejection import Reason, Rejection
from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import Unavailable
from headrace.service.auth.roles import Role
from headrace.service.history.dead_letters import newest_letters
from headrace.service.jobs.errors import Cancelled
from headrace.service.jobs.host import PrintedLine
from headrace.service.jobs.operation_queue import as_cancelled
from headrace.service.predict.event_trials import EventTrials
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.journal.log import read
from headrace.trainer.journal.log_file import listed
from tests.fakes.asked_api import PROBLEM, api
from tests.fakes.exports import write_export
from tests.integration.stream_job import SPEC

FIRST, SECOND = "t1-0000000001-g1", "t1-0000000002-g1"
STATUS = {
    "version": 2,
    "overrides": {"tables.default.delete_below": 0.1},
    "metrics": {
        "life": {
            "ctr": {
                **{"auc": 0.7, "gauc": None, "slices": {"a": {"3": {"auc": 0.6}}}},
                "reliability": [{"prediction": 0.1, "label": 0.2, "weight": 3.0}],
            }
        },
        "window": {"ctr": {"auc": 0.75}},
        "tensors": {"pass": {"loss": {"mean": 0.5}}},
    },
    "tables": {
        "default": {
            "rows": 300,
            "bytes": 4096,
            "new_rows": 5,
            "unadmitted": 7,
            "rows_by_slot": {"a": 290, "b": 10},
            "frozen": ["b"],
        }
    },
    "slots": {"a": {"distinct": 20, "mean_count": 1.0}},
    "operations": {
        "shrinking": {"held": {"default": {"rows": 300, "going": 200, "fraction": 0.66}}},
        "guards": {"slots": {"a": {"drift": 0.5}}, "outside": {}},
    },
}
ROWS = {("a", 1): [1, 2, 3, 4, 5], ("a", 2): [5, 4, 3, 2, 1]}
GATES = {"min_auc": {"passed": False, "value": 0.5, "limit": 0.6, "why": "auc of ctr is 0.5"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory, new_database):
    """A stopped job with two commits, two exports, dead letters and output."""
    root = tmp_path_factory.mktemp("api")
    with api(root, database=new_database(root)) as made:
        made.job("small", STATUS, tomllib.loads(SPEC + '[exports.main]\npath = "out"\n'))
        past = made.past("small")
        letters = past.store / "dead_letters"
        letters.mkdir()
        (letters / "pass-000000000002-rank-0.jsonl").write_text('{"partition": "a"}\n')
        bad = [Rejection("b", n, Reason.UNPARSABLE, "no JSON", b"<b>\x1b\xff" * n) for n in (1, 2)]
        for number, each in enumerate(bad, 4):
            (letters / f"pass-{number:012d}-rank-0.jsonl").write_bytes(encode_letter(each, keep_bytes=True) + b"{")
        (letters / "secret.txt").write_text("no")
        (letters / "pass-000000000003-rank-0.jsonl").symlink_to("/etc/passwd")
        folder = made.host.job("small").base / "out" / "small"
        write_export(folder / "t1", "base", 3, ROWS)
        write_export(folder / "t1", "delta", 5, ROWS, [("b", 9)], parent=(3, "base"), gates=GATES)
        manifest = folder / "t1" / "0000000005-delta" / "manifest.json"
        parent = {"name": "0000000003-base", "version": 3, "timeline": "t1"}
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"parent": parent}))
        made.host.lines["small"] = [PrintedLine(n, "", f"trainer-{n % 2}", f"line {n}") for n in (10, 20, 30)]
        yield made


def missing(answer, words):
    assert (answer.status_code, answer.headers["content-type"]) == (404, PROBLEM), answer.text
    assert words in answer.json()["detail"]


def test_commits_are_told_as_the_command_tells_them(served):
    first, second = served.get("/v1/jobs/small/commits").json()["items"]
    assert (first["name"], first["rows"], first["next"], second["name"], second["next"]) == (
        FIRST,
        100,
        False,
        SECOND,
        True,
    )
    told = served.get("/v1/jobs/small/commits/2").json()
    assert (told["name"], told["positions"], told["progress"], told["made_with"]) == (
        SECOND, {"a": 200}, {"num_events": 40}, {"torch": "2.9"},
    )  # fmt: skip
    assert told["parts"] == [{"folder": "shard-0", "buckets": [0, 4096], "rows": {"default": 200}}]
    missing(served.get("/v1/jobs/small/commits/9"), "there is no commit of version 9; there are: ")
    missing(served.get("/v1/jobs/small/commits/..%2F..%2Frecords.db"), "Not Found")


def test_a_commit_is_kept_by_who_asks_read_back_and_removed(served):
    assert served.post(f"/v1/jobs/small/commits/{FIRST}/pin").json() == {"name": FIRST, "held_by": ["admin"]}
    both = served.post(f"/v1/jobs/small/commits/{FIRST}/pin", {"holder": "night"}).json()["held_by"]
    assert both == ["admin", "night"]
    Commits(served.host.job("small").store).hold(FIRST, "export-main")
    for act in ("pin", "unpin"):  # what an export holds, it lets go itself
        for holder in ("export-main", "verify-here-7", "predict2-here-7", "read3-here-7"):
            answer = served.post(f"/v1/jobs/small/commits/{FIRST}/{act}", {"holder": holder})
            assert answer.status_code == 422 and answer.json()["path"] == "holder", answer.text
    assert "export-main" in Commits(served.host.job("small").store).holders()[FIRST]
    Commits(served.host.job("small").store).release(FIRST, "export-main")
    done = served.done(served.post(f"/v1/jobs/small/commits/{FIRST}/verify"))
    assert done["result"] == {"name": FIRST, "damage": {}, "shared": {}, "files": 5, "rows": 100, "sound": True}
    answer = served.ask("DELETE", f"/v1/jobs/small/commits/{FIRST}")
    assert answer.status_code == 409 and "is held by admin, night" in answer.json()["detail"]
    for body in (None, {"holder": "night"}):
        served.post(f"/v1/jobs/small/commits/{FIRST}/unpin", body)
    store = served.host.job("small").store
    with locked(store / "lock", Deadline.after(5)):
        for method, path in (("DELETE", FIRST), ("POST", f"{FIRST}/rewind")):
            refused = served.ask(method, f"/v1/jobs/small/commits/{path}")
            assert refused.status_code == 409 and "is running; stop it" in refused.json()["detail"]
    done = served.done(served.post("/v1/jobs/small/commits"))
    assert (done["state"], done["problem"]["status"]) == ("failed", 409)
    assert done["problem"]["detail"].startswith("no run is active in")
    done = served.done(served.post(f"/v1/jobs/small/commits/{FIRST}/rewind"))
    assert (done["result"]["timeline"], done["result"]["commit"], done["result"]["left"]) == ("t2", FIRST, SECOND)
    assert served.ask("DELETE", f"/v1/jobs/small/commits/{SECOND}").status_code == 204
    served.api.state.statuses.forget("small")
    assert [each["name"] for each in served.get("/v1/jobs/small/commits").json()["items"]] == [FIRST]


def test_the_log_is_told_in_pages_and_its_closes_as_history(served):
    lines, after = [], ""
    while after is not None:
        told = served.get(f"/v1/jobs/small/log?limit=2{after and f'&after={after}'}").json()
        lines, after = lines + told["items"], told["next"]
    assert [line["number"] for line in lines] == [
        record.number for record in read(served.host.job("small").store / "log")
    ]
    assert lines[0]["kind"] == "claim" and "generation 1" in lines[0]["words"]
    assert served.get("/v1/jobs/small/log?last=1").json()["items"] == lines[-1:]
    history = served.get("/v1/jobs/small/metrics/history?limit=1").json()
    assert (history["items"][0]["version"], history["items"][0]["events"]) == (1, 100)
    assert served.get("/v1/jobs/small/metrics/history?since=1000").json() == {"items": [], "next": None}
    (last,) = served.get("/v1/jobs/small/metrics/history?last=1").json()["items"]
    assert last["window"] == {} and last["event_time"] is None


def test_a_damaged_log_is_told_up_to_the_damage_and_whole_again_once_it_is_repaired(served):
    whole = served.get("/v1/jobs/small/log").json()["items"]
    (path, *_) = listed(served.host.job("small").store / "log")
    good = path.read_bytes()
    begin = [at for at, byte in enumerate(good) if byte == ord("\n")][1] + 1  # of the third record
    path.write_bytes(good[: begin + 20] + b"?" + good[begin + 21 :])
    served.api.state.statuses.kept.drop(("LogPages",))  # a log that was followed soundly shows what it was
    *before, damage = served.get("/v1/jobs/small/log").json()["items"]
    assert before == whole[:2]
    assert (damage["number"], damage["kind"]) == (3, "damage") and f"{path.name}: byte {begin}" in damage["words"]
    assert served.get("/v1/jobs/small/log?last=1").json()["items"] == [damage]
    path.write_bytes(good)
    served.api.state.statuses.forget("small")
    for _ in range(2):  # read whole, then followed again
        assert served.get("/v1/jobs/small/log").json()["items"] == whole


def test_a_job_made_again_under_its_name_has_no_history_of_the_one_before(tmp_path, url):
    def versions():
        return [each["version"] for each in made.get("/v1/jobs/news/metrics/history").json()["items"]]

    with api(tmp_path, database=url) as made:
        made.job("news")
        made.past("news", versions=3)
        assert versions() == [1, 2, 3]
        assert made.post("/v1/jobs/news/stop").status_code == 200
        store = made.host.job("news").store
        assert made.ask("DELETE", "/v1/jobs/news", headers={"if-match": "*"}).status_code == 204
        shutil.rmtree(store)
        made.job("news")
        made.api.state.statuses.forget("news")  # as a POST does
        made.past("news", versions=2)  # whose log begins with the same bytes
        assert versions() == [1, 2]


def test_closes_since_one_that_was_undone_begin_at_the_commit_of_the_rewind(tmp_path, url):
    def history(query):
        page = made.get(f"/v1/jobs/news/metrics/history?{query}").json()
        return [f"{each['timeline']}-{each['version']}" for each in page["items"]], page["next"]

    def told(last_id):
        lines = made.get("/v1/jobs/news/metrics/stream", headers={"last-event-id": last_id}).text.splitlines()
        return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]

    with api(tmp_path, database=url) as made:
        made.job("news")
        past = made.past("news", versions=3)
        assert made.post("/v1/jobs/news/stop").status_code == 200  # a stream of it ends
        assert told("t1-2") == told("2") == history("since=2")[0] == ["t1-3"]
        _, after = history("limit=2")
        past.begin("t2", base="t1-0000000001-g1")
        for version in (2, 3, 4):
            past.close(version, a=(100 * version - 100, 100 * version))
        past.end()
        assert told("t1-3") == history("since=3&timeline=t1")[0] == ["t2-2", "t2-3", "t2-4"]
        assert told("t2-3") == told("3") == history("since=3&timeline=t2")[0] == history("since=3")[0] == ["t2-4"]
        assert history("since=3&timeline=t1&last=2")[0] == ["t2-3", "t2-4"]
        assert history(f"after={after}")[0] == ["t2-2", "t2-3", "t2-4"]
        assert made.get("/v1/jobs/news/metrics/history?timeline=2").status_code == 422


def test_output_is_asked_for_line_by_line(served):
    told = served.get("/v1/jobs/small/output?limit=2").json()
    assert [line["text"] for line in told["items"]] == ["line 10", "line 20"]
    told = served.get(f"/v1/jobs/small/output?after={told['next']}").json()
    assert [line["text"] for line in told["items"]] == ["line 30"]
    assert served.get(f"/v1/jobs/small/output?after={told['next']}").json() == {"items": [], "next": told["next"]}
    assert served.get("/v1/jobs/small/output?last=true&limit=1").json()["items"][0]["text"] == "line 30"
    assert len(served.get("/v1/jobs/small/output?worker=trainer-0").json()["items"]) == 3
    assert [line["text"] for line in served.get("/v1/jobs/small/output?text=E%2020").json()["items"]] == ["line 20"]
    assert served.get("/v1/jobs/small/output?level=WARNING").json()["items"] == []
    assert served.get("/v1/jobs/small/output?level=loud").status_code == 422


def test_dead_letters_are_listed_and_fetched_and_nothing_else_is(served):
    only, *_ = served.get("/v1/jobs/small/deadletters").json()["items"]
    assert (only["name"], only["pass_number"], only["rank"]) == ("pass-000000000002-rank-0.jsonl", 2, 0)
    assert served.get(f"/v1/jobs/small/deadletters/{only['name']}").text == '{"partition": "a"}\n'
    for name in ("secret.txt", "pass-000000000003-rank-0.jsonl", "..%2Frun.json", "pass-000000000009-rank-0.jsonl"):
        assert served.get(f"/v1/jobs/small/deadletters/{name}").status_code == 404


def test_a_job_file_is_begun_with_an_example_or_with_events(served):
    examples = {each["name"]: each for each in served.get("/v1/examples").json()["items"]}
    assert "[store]" not in examples["clicks"]["toml"] and tomllib.loads(examples["clicks"]["toml"])["name"] == "clicks"
    events = "".join(f'{{"user": "u{n % 7}", "click": {n % 2}}}\n' for n in range(40)) + "none\n"
    found = served.post("/v1/specs/infer", {"events": events, "paths": "/data/*.jsonl"}).json()
    spec = tomllib.loads(found["toml"])
    assert (found["events"], len(found["bad_lines"]), found["missing"]) == (40, 1, [])
    assert spec["sources"]["events"]["paths"] == ["/data/*.jsonl"] and "store" not in spec
    assert [slot["name"] for slot in spec["slots"]] == ["user", "click"]
    refused = served.post("/v1/specs/infer", {"events": "none"})
    assert (refused.status_code, "has no event" in refused.json()["detail"]) == (422, True), refused.text
    for method, path in (("GET", "/v1/examples"), ("POST", "/v1/specs/infer")):
        assert served.ask(method, path, token=served.tokens[Role.OPERATOR]).status_code == 403


def test_settings_are_those_in_force_and_changes_of_the_file_that_wait(served):
    found = served.get("/v1/jobs/small/settings").json()
    settings = {each["key"]: each for each in found["settings"]}
    assert settings["train.batch_size"] == {"key": "train.batch_size", "file": "64", "now": "64", "origin": "file"}
    assert settings["passes.wait"]["origin"] == "default" and settings["passes.wait"]["file"] is None
    set_ = {"key": "tables.default.delete_below", "file": None, "now": "0.1", "origin": "set"}
    assert settings[set_["key"]] == set_ and [each for each in found["settings"] if each["origin"] == "set"] == [set_]


def test_events_are_tried_for_their_caller_alone(served, monkeypatch):
    slot = {"name": "a", "kind": "sparse", "values": ["7"], "missing": ["7"], "more": 0}
    sample = {"event": 0, "time": None, "predictions": {"ctr": None}, "slots": [slot]}
    asked, answer = [], {"version": 2, "commit": SECOND, "samples": [sample], "left_out": 0, "rejected": []}
    answer["example"] = None

    def ask(_trials, name, job, events, _deadline, *, example):
        asked.append((name, job.spec.name, events, example))
        return {**answer, "job": "small", "timeline": "t1"}

    monkeypatch.setattr(EventTrials, "ask", ask)
    key = {"Idempotency-Key": "tried"}
    for _ in range(2):
        body = {"events": "x\u2028 1\r\n\ny 2\n", "example": True}
        found = served.post("/v1/jobs/small/try", body, headers=key)
        assert found.status_code == 200 and "idempotency-replayed" not in found.headers, "no answer is kept"
    assert found.json() == answer
    assert asked == [("small", "small", ["x\u2028 1", "y 2"], True)] * 2
    assert served.post("/v1/jobs/small/try", {"events": "x\n" * 101}).status_code == 422
    assert served.post("/v1/jobs/small/try", {"events": "x" * 70_000}).status_code == 422
    assert served.post("/v1/jobs/small/try", {}, token=served.tokens[Role.VIEWER]).status_code == 403
    audited = [each for each in served.get("/v1/audit").json()["items"] if each["path"].endswith("/try")]
    assert audited and not [each for each in audited if "y 2" in json.dumps(each)]


def test_the_newest_rejected_events_are_read_as_harmless_text_the_newest_first(served):
    newest, other, bare = served.get("/v1/jobs/small/rejected").json()["items"]
    assert (newest["pass_number"], newest["position"], newest["bytes"]) == (5, 2, 10)
    assert newest["text"] == "<b>\\x1b\ufffd" * 2 and newest["detail"] == "no JSON"
    assert (other["pass_number"], bare["text"], bare["partition"]) == (4, None, "a")
    (found,) = served.get("/v1/jobs/small/rejected?last=1&reason=unparsable").json()["items"]
    assert found == newest
    assert served.get("/v1/jobs/small/rejected?reason=other").json()["items"] == []
    assert served.get("/v1/jobs/small/rejected", token=served.tokens[Role.VIEWER]).status_code == 403


def test_what_is_no_dead_letter_is_passed_over(tmp_path):
    damaged = ['{"offset": "a"}', '{"line": 1.5}', "[" * 100_000, "[]", "{", '{"x": ' + "[" * 100_000]
    good = encode_letter(Rejection("b", 7, Reason.UNPARSABLE, "no JSON", b"x"), keep_bytes=True).decode()
    lines = [*damaged, good.strip(), '{"bytes": "\u00e9"}', '{"bytes": "="}']
    (tmp_path / "pass-000000000002-rank-0.jsonl").write_text("\n".join(lines))
    found = newest_letters(tmp_path, 9)
    assert [each.text for each in found][-1] == "x" and len(found) == 3
    assert [each.position for each in newest_letters(tmp_path, 9, "unparsable")] == [7]


def test_exports_are_listed_shown_fetched_and_pointed_to(served):
    base, delta = served.get("/v1/jobs/small/exports").json()["items"]
    assert (base["kind"], base["current"], delta["failed_gates"]) == ("base", False, ["min_auc"])
    assert served.get("/v1/jobs/small/exports?stream=x").json()["items"] == []
    told = served.get("/v1/jobs/small/exports/main/t1/0000000005-delta").json()
    assert (told["path"], told["manifest"]["version"]) == ("t1/0000000005-delta", 5)
    pointed = served.post("/v1/jobs/small/exports/main/current", {"name": "5"}).json()
    assert (pointed["path"], pointed["failed_gates"]) == ("t1/0000000005-delta", ["min_auc"])
    assert served.get("/v1/jobs/small/exports").json()["items"][1]["current"]
    files = "/v1/jobs/small/exports/main/t1/0000000003-base/files"
    lies = Path(told["url"]).parent / "0000000003-base"
    assert served.get(f"{files}/rows-default-0.parquet").content == (lies / "rows-default-0.parquet").read_bytes()
    (lies / "notes.txt").write_text("not of the export")
    for name in ("notes.txt", "..%2Fcurrent.json", "x"):
        assert served.get(f"{files}/{name}").status_code == 404
    missing(served.get("/v1/jobs/small/exports/mian/t1/x"), "no stream 'mian' of exports; its streams: main")
    missing(served.get("/v1/jobs/small/exports/main/t1/x"), "no complete export 't1/x'")
    missing(served.post("/v1/jobs/small/exports", {"stream": "x"}), "no stream 'x'")
    assert served.done(served.post("/v1/jobs/small/exports", {"stream": "main"}))["problem"]["status"] == 409


def test_metrics_and_tables_are_told_by_slice_and_slot(served):
    told = served.get("/v1/jobs/small/metrics").json()
    assert told["life"] == {"ctr": {"auc": 0.7}} and told["window"] == {"ctr": {"auc": 0.75}}
    assert (
        told["slices"]["life"] == {"ctr": {"a": {"3": {"auc": 0.6}}}} and told["tensors"]["pass"]["loss"]["mean"] == 0.5
    )
    assert told["reliability"]["life"] == {"ctr": [{"prediction": 0.1, "label": 0.2, "weight": 3.0}]}
    assert told["reliability"]["window"] == {"ctr": []}
    (table,) = served.get("/v1/jobs/small/tables").json()["items"]
    assert table == served.get("/v1/jobs/small/tables/default").json()
    assert (table["rows"], table["dim"], table["slots"]["a"]["distinct"], table["held"]["going"]) == (300, 4, 20, 200)
    assert (table["unadmitted"], table["dirty_rows"], table["slots"]["a"]["rows"]) == (7, None, 290)
    assert table["frozen"] == ["b"]
    assert table["slots"]["a"]["drift"] == 0.5 and "drift" not in table["slots"]["b"]
    missing(served.get("/v1/jobs/small/tables/x"), "there is no table 'x'; known: default")
    missing(served.get("/v1/jobs/small/tables/defualt"), "there is no table 'defualt'; did you mean 'default'?")
    missing(served.post("/v1/jobs/small/slots/aa/clear"), "there is no sparse slot 'aa'; did you mean 'a'?")
    answer = served.get("/v1/jobs/small/tables/default/explain?slot=aa&sign=3")
    assert answer.status_code == 422 and "did you mean 'a'" in answer.json()["detail"]
    # it does not run: its newest commit is read, which in this store is of a spec without slots
    assert served.get("/v1/jobs/small/tables/default/explain?slot=a&sign=3").status_code == 422
    for path, body, status in (
        ("tables/default/shrink", {"dry_run": True}, 422), ("forget", {"slot": "a", "value": "3"}, 409),
        ("forget", {"slot": "a", "value": "3", "everywhere": True}, 409), ("day-tick", None, 409),
        ("slots/a/clear", None, 409),
    ):  # fmt: skip
        assert served.done(served.post(f"/v1/jobs/small/{path}", body))["problem"]["status"] == status


def test_a_prediction_names_only_places_that_are_allowed(served, tmp_path):
    asked = {"input": {"paths": ["part-*.txt"]}, "output": str(tmp_path / "out"), "version": "live"}
    answer = served.post("/v1/jobs/small/predictions", asked)
    assert (answer.status_code, answer.json()["path"]) == (422, "output"), answer.text
    answer = served.post("/v1/jobs/small/predictions", {**asked, "output": "out2", "version": "/etc"})
    assert (answer.status_code, answer.json()["path"]) == (422, "version"), answer.text
    answer = served.post("/v1/jobs/small/predictions", {**asked, "output": "out2", "spec": {}})
    assert (answer.status_code, answer.json()["path"]) == (422, "spec")
    answer = served.post("/v1/predictions", {**asked, "spec": tomllib.loads(SPEC), "base": str(tmp_path)})
    assert (answer.status_code, answer.json()["path"]) == (422, "base")
    assert served.get("/v1/jobs/small/predictions").json()["items"] == []
    assert served.get("/v1/operations?job=small").status_code == 200


def test_who_does_not_want_an_operation_any_more_does_not_wait_for_its_job(served):
    """The job starts, for all that is known, and never does."""
    served.job("starts")
    store = served.host.job("starts").store
    store.mkdir(parents=True)
    with locked(store / "lock", Deadline.after(5)):
        answer = served.post("/v1/jobs/starts/day-tick", {"to": 3})
        assert served.get(answer.headers["location"]).json()["state"] in ("waiting", "running")
        served.post(f"{answer.headers['location']}/cancel")
        assert served.done(answer)["state"] == "cancelled"


def test_an_error_counts_as_a_cancellation_only_where_somebody_asked_for_that():
    cancelled = threading.Event()
    with pytest.raises(Unavailable), as_cancelled(cancelled):
        raise Unavailable("away")
    cancelled.set()
    with pytest.raises(Cancelled), as_cancelled(cancelled):
        raise Unavailable("away")


@pytest.mark.parametrize(
    "asked", [{"shards": True}, {"shards": "2"}, {"trainers": "2"}, {"trainers": 1.0}, {"trainers": None}]
)
def test_a_resize_takes_whole_numbers_alone(served, asked):
    assert served.post("/v1/jobs/small/resize", asked).status_code == 422


def test_a_resize_is_bounded_together_with_the_workers_that_stay(served):
    served.host.statuses["small"] = {**STATUS, "workers": {"shards": 60, "trainers": 2}}
    try:
        answer = served.post("/v1/jobs/small/resize", {"trainers": 5})
    finally:
        served.host.statuses["small"] = STATUS
    assert (answer.status_code, answer.json()["path"]) == (422, "trainers")
    assert "60 shards and 5 trainers are 65 workers; a job has at most 64" in answer.json()["detail"]


@pytest.mark.parametrize("host", ["[::1", "[::1]x", "localhost:x", "a@localhost"])
def test_a_host_header_that_is_none_is_refused(served, host):
    assert served.get("/v1/jobs", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("key", ["tables", "slots", "store", "exports", "model", "cluster"])
def test_a_section_that_is_null_is_refused_with_its_key(served, key):
    spec = {**tomllib.loads(SPEC), "name": "other", key: None}
    answer = served.post("/v1/jobs", {"spec": spec})
    assert (answer.status_code, answer.json().get("path") or answer.json()["detail"][: len(key)]) == (422, key)
