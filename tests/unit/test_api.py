"""The HTTP API: answers, problems, metrics and address."""

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import headrace
from headrace.errors import SpecError
from headrace.service.api.exposition import exposition
from headrace.service.api.server import bound, parse_address, serving
from headrace.trainer.job_status import Status, read
from tests.fakes.asked_api import api

GOLDEN = Path(__file__).parents[1] / "golden"
STATUS = {
    "job": "news",
    "state": "training",
    "pass": 12,
    "version": 11,
    "events": 220000,
    "samples": 440000,
    "rejected": {"unparsable": 3},
    "skipped_steps": 1,
    "refused": {"plain_text": 7},
    "events_per_s": 100.5,
    "samples_per_s": 201.0,
    "positions": {"a": 200000},
    "lag": {"a": 1500},
    "metrics": {"window": {"ctr": {"auc": 0.75, "slices": {}, "gauc": None}}, "life": {}, "tensors": {}},
    "loss": None,
    "freshness_s": 1.5,
    "event_span_s": {"last": 60.0, "max": 90.0},
    "late": 1,
    "learning": True,
    "tables": {
        "default": {
            "rows": 4321,
            "bytes": 8192,
            "device_rows": 3000,
            "device_bytes": 6000,
            "device_apart": 0.25,
            "rows_by_slot": {"user": 4000},
            "bytes_by_slot": {"user": 7500},
        }
    },
    "time_s": {"pipe": 20.5, "forward": 4.25},
    "pipe_wait": 0.25,
    "advice": "raise pipe.processes",
    "links": {
        "trainer-0": {
            "shard-0": {
                "sent_bytes": 4096,
                "sent_messages": 3,
                "received_bytes": 8192,
                "received_messages": 2,
                "shared_sent_bytes": 1 << 20,
                "shared_received_bytes": 2 << 20,
                "wait_s": 1.5,
            }
        }
    },
    "straggler": {
        "rank": 1,
        "share": 0.31,
        "waits_s": {"0": 0.8},
        "part": "pipe",
        "text": "rank 1 is waited for 31% of the time (rank 0 waits 0.8 s a pass): its pipe is slow",
    },
    "staleness_steps": {"trainer-0": {"mean": 1.25, "max": 3, "behind": 7}},
    "usage": {"shard-0": {"machine": "one", "pid": 7, "cores": 0.5, "cpu_s": 12.5, "memory_bytes": 1 << 20}},
    "restarts": 2,
    "last_death": "shard-0 ended first: killed by SIGKILL",
    "generation": 3,
    "timeline": "t1",
    "commit": {
        "version": 10,
        "age_s": 4.5,
        "writing": True,
        "rows": 700,
        "pause_s": 0.25,
        "write_s": 1.5,
        "failing": None,
        "failing_s": 0.0,
        "mirror": {"version": 9, "behind_s": 2.0, "trouble": None},
        "objects": {"fence": 41, "uploads": 2, "bytes": 7000},
    },
    "restored": "t1-0000000007-g2",
    "passed_over": {},
    "forked": False,
    "trouble": "",
    "operations": {
        "exporting": {
            "main": {
                "version": 8,
                "name": "0000000008-delta",
                "kind": "delta",
                "age_s": 61.5,
                "making": "0000000011-delta",
                "failing": None,
                "failing_s": 0.0,
                "failed_gates": [],
                "command_error": None,
                "last": None,
            }
        }
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory, new_database):
    root = tmp_path_factory.mktemp("api")
    with api(root, database=new_database(root)) as made:
        made.job("news", STATUS)
        yield made


@pytest.fixture
def get(served):
    def got(path, status=STATUS, **more):
        served.host.statuses["news"] = status
        served.api.state.statuses.forget("news")
        return served.get(path, **more)

    return got


def test_health_tells_the_version(get):
    answer = get("/v1/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "version": headrace.__version__})


def test_a_job_tells_what_it_is_doing(get):
    told = get("/v1/jobs/news").json()
    assert told.pop("created") == told.pop("changed")
    assert told == {
        "name": "news",
        "phase": "training",
        "desired": "running",
        "trouble": "",
        "revision": 1,
        "created_by": "tests",
        "outcome": None,
        "build": "",
        "headrace_version": "",
        "day": None,
        "resizing": None,
        "elastic": None,
        "tuning": None,
        "overrides": {},
        "exports": {"main": STATUS["operations"]["exporting"]["main"]},
        "evaluator": None,
        "state": "training",
        "pass": 12,
        "version": 11,
        "events": 220000,
        "samples": 440000,
        "rejected": {"unparsable": 3},
        "events_per_s": 100.5,
        "samples_per_s": 201.0,
        "positions": {"a": 200000},
        "lag": {"a": 1500},
        "metrics": {"window": {"ctr": {"auc": 0.75}}, "life": {}, "pass": {}},
        "loss": None,
        "freshness_s": 1.5,
        "event_span_s": {"last": 60.0, "max": 90.0},
        "late": 1,
        "time_s": {"pipe": 20.5, "forward": 4.25},
        "pipe_wait": 0.25,
        "advice": "raise pipe.processes",
        "learning": True,
        "table_rows": {"default": 4321},
        "restarts": 2,
        "last_death": "shard-0 ended first: killed by SIGKILL",
        "last_error": "",
        "step": "",
        "cause": None,
        "generation": 3,
        "timeline": "t1",
        "commit": {
            "version": 10,
            "age_s": 4.5,
            "writing": True,
            "rows": 700,
            "pause_s": 0.25,
            "write_s": 1.5,
            "failing": None,
            "failing_s": 0.0,
        },
        "mirror": {"version": 9, "behind_s": 2.0, "trouble": None},
        "restored": "t1-0000000007-g2",
        "links": STATUS["links"],
        "straggler": STATUS["straggler"],
        "usage": STATUS["usage"],
        "staleness_steps": STATUS["staleness_steps"],
        "workers": {},
        "alarms": {},
    }


def test_a_job_that_is_starting_has_no_figures_yet(get):
    answer = get("/v1/jobs/news", {"job": "news", "state": "starting"}).json()
    assert answer["state"] == "starting"
    assert answer["pass"] is None
    assert answer["lag"] == {}
    assert (answer["restarts"], answer["last_death"]) == (0, None)
    assert (answer["commit"], answer["mirror"], answer["alarms"]) == (None, None, {})


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/v1/jobs/nws", "there is no job 'nws'; known here: news"),
        ("/v1/jobs/nws/commits", "there is no job 'nws'; known here: news"),
        ("/nowhere", "Not Found"),
    ],
)
def test_what_is_not_there_is_a_problem(get, path, detail):
    answer = get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {"type": "about:blank", "title": "Not Found", "status": 404, "detail": detail}


def test_a_page_elsewhere_cannot_reach_it_by_a_name_of_its_own(get):
    assert get("/v1/jobs", host="evil.example").status_code == 400
    assert get("/v1/jobs", host="mill.example").status_code == 200


def test_metric_names_and_labels_are_the_ones_we_promised():
    full = {**STATUS, "loss": 0.2, "learning_delay": {"buckets": [["0.5", 3], ["+Inf", 4]], "sum_s": 2.5}}
    every = {"auc": 0.7, "gauc": 0.6, "logloss": 0.2, "calibration": 1.0, "index_recall": 0.5, "popular_recall": 0.4}
    full["metrics"] = {"window": {"ctr": every}, "life": {"ctr": every}}
    full["elastic"] = {"min": 2, "max": 8, "present": 4, "spares": 1}
    full["evaluator"] = {"version": 41, "tasks": {"ctr": every}, "restarts": 2}
    full["operations"] = {**STATUS["operations"], "shrinking": {"held": {"default": {"going": 900, "rows": 4321}}}}
    text = exposition([("news", read(Status, full))]).decode()
    assert text == (GOLDEN / "metrics.txt").read_text()


OPENMETRICS_FIRST = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def samples_of(text, parse):
    """Metric samples; the two formats differ in the names of counters' families alone."""
    return {(each.name, *sorted(each.labels.items())): each.value for family in parse(text) for each in family.samples}


def test_metrics_in_openmetrics_are_those_in_prometheus_text(get):
    full = {**STATUS, "learning_delay": {"buckets": [["0.5", 3], ["+Inf", 4]], "sum_s": 2.5}}
    plain = get("/metrics", full)
    answer = get("/metrics", full, headers={"accept": OPENMETRICS_FIRST})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["vary"] == plain.headers["vary"] == "accept"
    found = samples_of(answer.text, openmetrics.text_string_to_metric_families)
    assert found == samples_of(plain.text, text_string_to_metric_families) and len(found) > 20


def test_alarms_are_told_and_counted(get):
    failing = {**STATUS["commit"], "failing": "/store: No space left on device", "failing_s": 3.0, "mirror": None}
    in_trouble = {**STATUS, "commit": failing, "trouble": "the log is full", "forked": True}
    answer = get("/v1/jobs/news", in_trouble).json()
    assert answer["alarms"] == {
        "commits": "commits fail, version 10 is the last one: /store: No space left on device",
        "log": "the log is full",
        "forked": "forked: results may differ from an undisturbed run, see the workers' lines at the start",
    }
    assert answer["mirror"] is None
    text = get("/metrics", in_trouble).text
    for name in ("commit_failing", "trouble", "forked"):
        assert f'headrace_{name}{{job="news"}} 1.0' in text
    assert "headrace_mirror_version{" not in text


def test_exports_that_fail_are_told_and_counted(get):
    main = {"name": "0000000008-delta", "failing": "no room", "failed_gates": ["auc 0.5 is below 0.6"]}
    failing = {**STATUS, "operations": {"exporting": {"main": main, "more": {}}}}
    assert get("/v1/jobs/news", failing).json()["alarms"] == {
        "exports": "exports of main fail, 0000000008-delta is the last complete one: no room",
        "gates": "the newest export is not pointed to, for it failed its gates: main: auc 0.5 is below 0.6",
    }
    text = get("/metrics", failing).text
    assert 'headrace_export_failing{job="news",stream="main"} 1.0' in text
    assert 'headrace_export_failed_gates{job="news",stream="main"} 1.0' in text
    assert 'headrace_export_failing{job="news",stream="more"} 0.0' in text
    after = {**STATUS, "operations": {"exporting": {"main": {**main, "failing": None, "command_error": "exit 3"}}}}
    assert get("/v1/jobs/news", after).json()["alarms"]["exports"] == (
        "the command after export 0000000008-delta of main failed: exit 3"
    )


def test_figures_of_one_job_that_are_none_hide_no_others():
    good, bad = Status(state="training", version=3), Status(state="training", events=10**400)
    text = exposition([("good", good), ("bad", bad)]).decode()
    assert 'headrace_version{job="good"} 3.0' in text
    assert 'headrace_state{job="bad",state="broken"} 1.0' in text


def test_a_figure_of_another_form_hides_no_other_figures(get):
    told = {"state": "training", "version": 3, "learning_delay": {"sum_s": 1, "buckets": [7]}, "tables": {"t": 4}}
    answer = get("/v1/jobs/news", told).json()
    assert (answer["state"], answer["version"], answer["table_rows"]) == ("training", 3, {})


def test_a_file_whose_name_is_no_text_is_a_label_all_the_same():
    status = read(Status, {"state": "training", "positions": {"part-\udcff.txt": 7}})
    text = exposition([("news", status)]).decode()
    assert r'headrace_position{job="news",partition="part-\\udcff.txt"} 7.0' in text


def test_metrics_are_served_as_prometheus_text(get):
    answer = get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'headrace_window_auc{job="news",task="ctr"} 0.75' in answer.text
    assert 'headrace_lag{job="news",partition="a"} 1500.0' in answer.text
    assert "headrace_loss{" not in answer.text


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("localhost:0", ("127.0.0.1", 0)), ("127.1.2.3:1", ("127.1.2.3", 1))],
)
def test_an_address_of_this_machine_alone_is_taken(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["8080", ":8080", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", ""])
def test_what_is_no_address_is_told(text):
    with pytest.raises(SpecError) as caught:
        parse_address(text)
    assert str(caught.value) == f"--listen: {text!r} is not of the form 127.0.0.1:8080"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "example.org", "::1"])
def test_an_address_that_others_reach_is_refused(host):
    with pytest.raises(SpecError, match=f"'{host}' is not this machine's loopback; a foreground run has no tokens"):
        parse_address(f"{host}:8080")


def test_a_port_that_is_taken_is_told():
    with bound("127.0.0.1:0") as first:
        address = f"127.0.0.1:{first.getsockname()[1]}"
        with pytest.raises(SpecError) as caught:
            bound(address)
    message = f"--listen: {address} is not available: Address already in use; choose another port"
    assert str(caught.value) == message


def test_it_is_served_over_the_wire_and_gives_the_port_back(served):
    listener = bound("127.0.0.1:0")
    host, port = listener.getsockname()
    with serving(served.api, listener):
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # or each answer takes 40 ms
        with urllib.request.urlopen(f"http://{host}:{port}/v1/health", timeout=10) as answer:
            assert answer.status == 200
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, port))
