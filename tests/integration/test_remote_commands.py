"""The command line as a client: every command against a real service, whose jobs do not run."""

import json
import re

import pytest
from typer.testing import CliRunner

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused, SpecError
from headrace.service.auth.roles import Role
from headrace.service.cli.main import cli
from headrace.service.cluster.store import OUTPUT
from headrace.service.jobs.output_files import OutputWriter
from headrace.service.planning.event_sample import EventSample
from headrace.service.planning.job_text import infer_job
from headrace.service.python.rest_client import NotFound
from tests.integration.served_host import served_host
from tests.integration.test_run_processes import SPEC as RUNNING
from tests.integration.test_run_processes import lines

JOB = """
name = "news"
[sources.main]
kind = "simulated"
events = 1000
[pipe]
command = ["cat"]
[[slots]]
name = "user"
[[slots]]
name = "label"
kind = "meta"
[[tasks]]
name = "ctr"
label = "label"
[model]
name = "lr"
[store]
path = "store"
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    (folder / "news.toml").write_text(JOB)
    with served_host(folder) as made:
        made.folder = folder
        yield made


@pytest.fixture
def headrace(service, monkeypatch):
    """Runs a command as a role; its standard output. Raises what it fails with."""

    def run(*words, role=Role.ADMIN, **environment):
        variables = {"HEADRACE_URL": service.url, "HEADRACE_TOKEN": service.texts[role], **environment}
        for name, value in variables.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
        done = CliRunner().invoke(cli, [str(word) for word in words])
        if isinstance(done.exception, HeadraceError):
            raise done.exception
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    return run


def test_a_job_is_submitted_looked_at_acted_on_and_deleted(headrace, service):
    job = service.folder / "news.toml"
    assert headrace("submit", job, "--hold", "--set", "seed=7") == "news\n"
    assert headrace("ls") == "news  stopped\n"
    assert json.loads(headrace("ls", "--json"))[0]["created_by"] == "admin"
    assert service.host.job("news").spec["seed"] == 7
    assert headrace("status", "news", role=Role.VIEWER).startswith("news: stopped")
    assert json.loads(headrace("status", "news", "--json"))["phase"] == "stopped"
    assert headrace("tables", "news").startswith("default: ")
    with pytest.raises(Refused, match="no run is active in .*, and it has no commit"):
        headrace("ranking", "news", "default")
    with pytest.raises(NotFound, match="there is no table 'defult'; did you mean 'default'"):
        headrace("ranking", "news", "defult")
    assert headrace("settings", "news", role=Role.VIEWER).startswith("nothing was changed while the job ran\n")
    assert "  seed = 7 (file)\n" in headrace("settings", "news", "--all")
    with pytest.raises(HeadraceError, match="no run is active"):
        headrace("trace", "news")
    with pytest.raises(HeadraceError, match="holds no run"):
        headrace("try", "news", "--example")
    assert headrace("logs", "news") == ""
    assert headrace("doctor", "news", role=Role.VIEWER).startswith("no commit yet")
    assert headrace("freshness", "news", "--last", role=Role.VIEWER).startswith("not measured yet")
    with pytest.raises(SpecError, match="measures on the job's machine alone; add --last"):
        headrace("freshness", "news")
    with pytest.raises(SpecError, match="--worth: needs a job file on this machine"):
        headrace("doctor", "news", "--worth", job)
    output = OutputWriter(service.host.job("news").store / OUTPUT, 1 << 20)
    for number in range(500):
        output.write("trainer-0", f"line {number}")
    output.close()
    assert len(headrace("logs", "news", "--last", 3).splitlines()) == 3
    assert len(headrace("logs", "news", "--all").splitlines()) == 500
    assert headrace("logs", "news", "--worker", "shard-0", "--all") == ""
    assert headrace("watch", "news").endswith("news: stopped\n")
    assert headrace("stop", "news", role=Role.OPERATOR) == "news: stopped\n"
    assert headrace("delete", "news", "--yes") == "news is deleted\n"
    assert headrace("ls") == "no jobs\n"


def test_what_the_service_refuses_is_told_in_its_words(headrace, service):
    job = service.folder / "news.toml"
    with pytest.raises(SpecError, match="pipe.command: .* allowed: cat"):
        headrace("submit", job, "--set", 'pipe.command=["sh"]')
    with pytest.raises(NotFound, match="nothing"):
        headrace("status", "nothing")
    with pytest.raises(Refused, match="role admin"):
        headrace("submit", job, role=Role.OPERATOR)
    with pytest.raises(Refused, match="HEADRACE_TOKEN"):
        headrace("ls", HEADRACE_TOKEN=None)
    with pytest.raises(SpecError, match="--url"):
        headrace("ls", HEADRACE_URL=None)


def test_what_asks_a_rank0_of_a_job_that_does_not_run_is_told_so(headrace, service):
    headrace("submit", service.folder / "news.toml", "--hold", "--name", "still")
    try:
        for words in (("commit", "still"), ("set", "still", "tables.default.optimizer.lr=0.1")):
            with pytest.raises(HeadraceError, match="run"):
                headrace(*words)
        with pytest.raises(SpecError, match="the job has: none"):
            headrace("export", "still")
    finally:
        headrace("delete", "still", "--yes")


def test_a_job_file_is_one_of_this_machine_whatever_the_environment_says(headrace, service):
    with pytest.raises(HeadraceError, match=r"store"):
        headrace("commit", service.folder / "news.toml")
    with pytest.raises(SpecError, match="job file on this machine"):
        headrace("commit", service.folder / "news.toml", "--url", service.url, HEADRACE_URL=None)
    with pytest.raises(SpecError, match="news: no such file"):
        headrace("commit", "news", HEADRACE_URL=None)


@pytest.mark.long
def test_a_service_measures_the_slots_of_a_job_as_the_job_file_alone(headrace, service):
    data = service.folder / "data"
    events = ({"user": f"u{n * 7 % 31}", "item": f"i{n % 9}", "click": int(n * 7 % 31 < 12)} for n in range(1500))
    (data / "shown.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    job = data / "shown.toml"
    job.write_text(infer_job(EventSample(data / "shown.jsonl", 1500), data).text)
    headrace("submit", job, "--hold", "--name", "shown", "--base", data)
    try:
        words = ("--events", 1200, "--newest", "--json")
        found = json.loads(headrace("suggest", "shown", *words, role=Role.OPERATOR))
        assert found == json.loads(headrace("suggest", job, *words))
        assert found["newest"] and found["samples"] == 1200 and found["slots"]["user"]["saved"] == 31
        with pytest.raises(Refused, match="role operator"):
            headrace("suggest", "shown", role=Role.VIEWER)
        (data / "shown.jsonl").unlink()
        (data / "shown.jsonl").symlink_to(service.folder / "service.toml")
        with pytest.raises(SpecError, match="outside"):
            headrace("suggest", "shown")
    finally:
        headrace("delete", "shown", "--yes")


def test_a_token_is_in_no_error_and_no_output(headrace, service):
    secret = service.texts[Role.ADMIN].rpartition("_")[2]
    assert secret not in headrace("ls", "--json")
    with pytest.raises(HeadraceError) as caught:
        headrace("status", "nothing")
    assert secret not in str(caught.value) and secret not in repr(caught.value.__context__)


@pytest.mark.slow
def test_a_running_job_is_watched_paused_set_committed_exported_and_drained(headrace, service):
    data = service.folder / "data"
    (data / "lines.txt").write_text(lines(0, 3000))
    (service.folder / "live.toml").write_text(RUNNING + "[exports.main]\nat_end = false\n")
    follow = ("sources.lines.follow=true", 'sources.lines.poll="50ms"', 'passes.wait="100ms"')
    sets = [word for setting in follow for word in ("--set", setting)]
    assert headrace("submit", service.folder / "live.toml", "--name", "live", "--base", data, *sets) == "live\n"
    try:
        until(lambda: json.loads(headrace("status", "live", "--json"))["events"] == 3000)
        assert "events 3,000" in headrace("status", "live")
        assert "rows of dim 4" in headrace("tables", "live")
        assert "acts from version" in headrace("set", "live", "tables.default.optimizer.lr=0.01", role=Role.OPERATOR)
        assert re.match(r"t1-\d+-g1\n", headrace("commit", "live", role=Role.OPERATOR))
        assert "complete" in headrace("export", "live", role=Role.OPERATOR)
        headrace("pause", "live", role=Role.OPERATOR)
        until(lambda: json.loads(headrace("status", "live", "--json"))["phase"] == "paused")
        headrace("resume", "live", role=Role.OPERATOR)
        assert "trainer-0: " in headrace("logs", "live", "--worker", "trainer-0")
        headrace("drain", "live", role=Role.OPERATOR)
        assert headrace("watch", "live").endswith("live: ended\n")
    finally:
        if json.loads(headrace("status", "live", "--json"))["phase"] != "ended":
            headrace("stop", "live")
            headrace("watch", "live")
        headrace("delete", "live", "--yes")


def until(true):
    """Wait until something holds; a minute at most."""
    deadline = Deadline.after(90)
    while not true():
        deadline.check("waiting for the job")
