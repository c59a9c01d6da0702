"""Facts that an agent tells of its machine: cores within a container's limit, an identity that may be given; probes."""

import os
import socket
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from headrace.errors import SpecError
from headrace.http.open_pages import health_served
from headrace.service.cluster.machine import MACHINE, cores_here, machine_id
from headrace.service.server.foreground_run import metrics_served
from headrace.trainer.job_status import Status
from tests.kafka.cluster import free_ports

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", CORES),
        ("", CORES),
        ("100000 100000\n", 1),
        ("1000 100000\n", 1),
        ("150000 100000\n", min(CORES, 2)),
        ("9900000 100000\n", CORES),
        ("nonsense", CORES),
    ],
)
def test_cores_are_those_of_the_container(tmp_path, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    assert cores_here(tmp_path / "cpu.max") == cores


def test_without_a_limit_all_cores_count(tmp_path):
    assert cores_here(tmp_path / "absent") == CORES


def test_an_orchestrator_may_name_the_machine(monkeypatch):
    monkeypatch.delenv(MACHINE, raising=False)
    own = machine_id()
    monkeypatch.setenv(MACHINE, "pod-1")
    first = machine_id()
    monkeypatch.setenv(MACHINE, "pod-2")
    assert len({own, first, machine_id()}) == 3
    monkeypatch.setenv(MACHINE, "")
    assert machine_id() == own


def test_probes_are_answered_until_the_end():
    lacks = ["has no worker"]
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with health_served(f"127.0.0.1:{port}", lambda: lacks[0]):
        assert urlopen(f"{url}/live", timeout=10).read() == b"live\n"
        with pytest.raises(HTTPError, match="503") as refused:
            urlopen(f"{url}/ready", timeout=10)
        assert refused.value.read() == b"has no worker\n"
        lacks[0] = ""
        assert urlopen(f"{url}/ready", timeout=10).read() == b"ready\n"
        with pytest.raises(HTTPError, match="404") as missing:
            urlopen(f"{url}/v1/jobs", timeout=10)
        assert missing.value.read() == b"not found; known: /live, /ready\n"
    with pytest.raises(OSError):
        urlopen(f"{url}/live", timeout=10)
    with health_served(None, lambda: ""):
        pass


def test_a_page_of_another_site_does_not_reach_loopback_by_its_own_name():
    (port,) = free_ports(1)
    with health_served(f"127.0.0.1:{port}", lambda: ""):
        asked = Request(f"http://127.0.0.1:{port}/live", headers={"Host": f"rebound.example:{port}"})
        with pytest.raises(HTTPError, match="400") as refused:
            urlopen(asked, timeout=10)
        assert refused.value.read() == b"not answered by this name; known: 127.0.0.1, ::1, localhost\n"
        for name in ("localhost", "[::1]", "127.0.0.1"):
            known = Request(f"http://127.0.0.1:{port}/live", headers={"Host": f"{name}:{port}"})
            assert urlopen(known, timeout=10).read() == b"live\n"
        with socket.create_connection(("127.0.0.1", port), 10) as old:
            old.sendall(b"GET /live HTTP/1.0\r\n\r\n")
            assert old.makefile("rb").readline().startswith(b"HTTP/1.1 200")
    with health_served(f"127.0.0.2:{port}", lambda: ""):
        assert urlopen(f"http://127.0.0.2:{port}/live", timeout=10).read() == b"live\n"
    with health_served(f"0.0.0.0:{port}", lambda: ""):
        assert urlopen(asked, timeout=10).read() == b"live\n"


def test_a_wrong_address_is_refused():
    with pytest.raises(SpecError, match="--health"), health_served("nowhere", lambda: ""):
        pass
    with pytest.raises(SpecError, match="--metrics"), metrics_served("nowhere", "clicks", Status):
        pass


def test_prometheus_reads_the_figures_of_a_job():
    (port,) = free_ports(1)
    status = {}
    with metrics_served(f"127.0.0.1:{port}", "clicks", lambda: Status(**status)):
        url = f"http://127.0.0.1:{port}/metrics"
        assert 'headrace_state{job="clicks",state="starting"} 1.0' in urlopen(url, timeout=10).read().decode()
        status |= {"state": "training", "events": 7}
        answer = urlopen(url, timeout=10)
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert 'headrace_events_total{job="clicks"} 7.0' in answer.read().decode()
        asked = Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert urlopen(asked, timeout=10).read().endswith(b"# EOF\n")
