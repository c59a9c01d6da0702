"""The command line: its surface, its exit codes, and whole runs of fake workers through it."""

import json
import os
import re
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
import typer
from msgspec.structs import replace

import headrace
from headrace.errors import SpecError
from headrace.service.api import server
from headrace.service.cli import main
from headrace.service.cluster import generation_plans
from headrace.service.cluster import job_run as launching
from headrace.service.cluster import worker_plan as planning
from headrace.service.cluster.local import ProcessLauncher
from headrace.service.cluster.runtime import WorkerRole
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.monitor.shows import PlainShow
from headrace.service.server.foreground_run import run_job
from headrace.service.spec import job as jobs
from headrace.service.spec.job import load_job
from headrace.trainer.job_status import CommitStatus, MetricsStatus, Status
from tests.fakes.launch import fake_worker
from tests.integration.stream_job import write_job
from tests.unit.test_launcher import when

GOLDEN = Path(__file__).parents[1] / "golden"
NEWS = GOLDEN / "news.toml"
CAT = "pipe.command=['cat']"
"""Fake workers start no pipe command, but a run is refused where it is not there; the spec's own is another file."""
WORKER = Path(__file__).parents[1] / "fakes" / "worker.py"


def surface(command, name="headrace"):
    """Every command with its parameters, one a line."""
    lines = [name]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        spelled = sorted(parameter.opts) + sorted(parameter.secondary_opts)
        names = ", ".join(spelled) if parameter.param_type_name == "option" else parameter.name
        required = " (required)" if parameter.required else ""
        repeats = " ..." if getattr(parameter, "multiple", False) else ""
        flag = " (flag)" if getattr(parameter, "is_flag", False) else ""
        lines.append(f"    {names}{repeats}{flag}{required}")
    for child in sorted(getattr(command, "commands", {})):
        lines += surface(command.commands[child], f"{name} {child}")
    return lines


@pytest.fixture
def headrace_says(monkeypatch, capfd):
    """Run the command line; gives its exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main.main()
        said = capfd.readouterr()
        return end.value.code, said.out, said.err

    return run


@pytest.fixture
def workers_do(monkeypatch):
    """Make `run` start fakes instead of the real workers: each gets the verbs given."""

    def set_up(*verbs, shards=()):
        def fake(role, number, folder, do):
            return fake_worker(folder, folder, role, number, do, command=(sys.executable, str(WORKER)))

        def plan_job(job, folder, *, generation, **_):
            return planning.JobPlan(
                job=job.spec.name,
                generation=generation,
                run_folder=folder,
                shards=tuple(fake(WorkerRole.SHARD, n, folder, do) for n, do in enumerate(shards)),
                trainers=(fake(WorkerRole.TRAINER, 0, folder, list(verbs)),),
                max_silent_s=60.0,
                secret="s",
            )

        monkeypatch.setattr(generation_plans, "plan_job", plan_job)

    return set_up


def test_the_command_line_is_the_one_we_promised():
    assert "\n".join(surface(typer.main.get_command(main.cli))) + "\n" == (GOLDEN / "cli.txt").read_text()


def test_version_is_the_packages(headrace_says):
    assert headrace_says("version") == (0, f"{headrace.__version__}\n", "")


def test_check_tells_that_a_spec_is_right(headrace_says, tmp_path):
    job = write_job(tmp_path, num_lines=20)
    assert headrace_says(
        "spec", "check", job, "--set", "cluster={trainers=2,shards=3}", "--set", "store.path=runs"
    ) == (
        0,
        f"{job} is valid\njob small; trainers 2; shards 3\nstore {tmp_path / 'runs'}\n",
        "",
    )


def test_check_notes_data_that_is_not_there_yet(headrace_says, tmp_path):
    job = write_job(tmp_path, num_lines=20)
    code, out, _ = headrace_says("spec", "check", job, "--set", 'sources.lines.paths=["*.gz"]', "--set", "store.path=s")
    assert code == 0 and "note: a run is refused until there is data: sources" in out and "'*.gz'" in out


OWN_MODEL = "from torch import nn\nclass Tower(nn.Module):\n  pass\n"
REFUSED_AT_A_START = {
    "tables.default.dim=0": "model.name: deepfm needs vectors: the table of slot 'a' has dim = 0; use lr, or raise it",
    'model={class="absent:Tower"}': "model.class: no module 'absent' in ",
    'model={class="own.part:Tower"}': "model.class: no module 'own.part' in ",
    'model={class="own:Towr"}': "own.py has no class 'Towr'; did you mean 'Tower'?",
    'model={class="torn:Tower"}': "model.class: module 'torn' cannot be imported: ",
    'pipe.command=["no-such-program"]': "pipe.command: 'no-such-program': no such program on PATH",
    'pipe.command=["python","absent.py"]': "absent.py: no such file",
    'sources.lines.event_time={slot="click"}': "event_time.slot: 'click' is not a meta slot of whole numbers",
    "store.path=part-0.txt": "part-0.txt is a file",
    "store.path=part-0.txt/store": "part-0.txt is a file",
    "store.path=other": "other is not empty and no store of Headrace",
    "store.path=" + 300 * "x": "store.path: ",
    'predict={input={paths=["part-0.txt"]},output="other"}': "predict.output: ",
    'sources.lines={kind="kafka",topics=["t"]}': "sources.lines.options.bootstrap_servers: is missing",
    'sources.lines={kind="kafka",topics=["t"],options={bootstrap="b"}}': "sources.lines.options.bootstrap: unknown key",
}


@pytest.mark.parametrize("override", REFUSED_AT_A_START)
def test_check_refuses_what_a_start_would_and_without_torch(headrace_says, tmp_path, override):
    job = write_job(tmp_path, num_lines=20)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    (tmp_path / "own.py").write_text(OWN_MODEL)
    (tmp_path / "torn.py").write_text("def\n")
    settings = ["--set", "store.path=fresh"] if not override.startswith("store") else []
    code, out, err = headrace_says("spec", "check", job, *settings, "--set", override)
    assert (code, out) == (2, "") and REFUSED_AT_A_START[override] in err
    assert not (tmp_path / "fresh").exists(), "a check makes nothing"


def test_check_finds_a_class_without_running_its_module(headrace_says, tmp_path):
    job = write_job(tmp_path, num_lines=20)
    (tmp_path / "own.py").write_text(OWN_MODEL + "raise SystemExit(70)\n")
    settings = ("--set", "store.path=fresh", "--set", 'model={class="own:Tower"}')
    assert headrace_says("spec", "check", job, *settings)[0] == 0


def test_check_tells_what_is_wrong_as_bad_configuration(headrace_says):
    code, out, err = headrace_says("spec", "check", NEWS, "--set", "seed=-1", "--set", "passes.wait=5")
    assert (code, out) == (2, "")
    assert err == (
        "error: seed: Input should be greater than or equal to 0 (got -1)\n"
        "passes.wait: 5 is not of the form '30s'; units are ms, s, m, h, d\n"
    )


def test_a_spec_that_is_not_there_is_told(headrace_says, tmp_path):
    assert headrace_says("run", tmp_path / "job.toml") == (2, "", f"error: {tmp_path / 'job.toml'}: no such file\n")


def test_schema_is_a_json_schema(headrace_says):
    code, out, _ = headrace_says("spec", "schema")
    assert code == 0
    assert json.loads(out)["title"] == "Job"


@pytest.mark.parametrize("arguments", [["rnu"], ["run"], ["run", NEWS, "--frehs"], ["demo", "--events", "0"]])
def test_a_wrong_command_line_is_bad_configuration(headrace_says, arguments):
    assert headrace_says(*arguments)[0] == 2


@pytest.mark.long
def test_a_run_ends_with_a_summary_from_the_report(headrace_says, workers_do, tmp_path):
    workers_do(["say", "hello"], ["exit", 0])
    store = tmp_path / "store"
    code, out, err = headrace_says("run", NEWS, "--set", CAT, "--set", f"store.path={store}")
    assert (code, out) == (0, "done: the stream is drained\n")
    assert "trainer-0| hello" in err
    workers_do(["write", str(store / "report.json"), json.dumps({"events": 5, "samples": 10})], ["exit", 0])
    code, out, _ = headrace_says("run", NEWS, "--set", CAT, "--set", f"store.path={store}", "--fresh")
    assert code == 0
    assert out.splitlines()[:3] == ["done: the stream is drained", "events    5", "samples   10"]
    assert out.splitlines()[-1] == f"report    {store / 'report.json'}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            {"rejected": {"not UTF-8": 1, "unparsable": 4}, "first_rejected": {"unparsable": "t/0 at 3: 'u3'"}},
            "no sample came of 5 events (rejected: unparsable 4, not UTF-8 1, for example t/0 at 3: 'u3')",
        ),
        ({"rejected": {}}, "no sample came of 5 events (rejected: none); look at what the pipe emits"),
        ({"left_out": {"after until": 5}}, ""),
        ({"events": 0}, ""),
    ],
)
def test_a_run_that_learns_nothing_of_its_events_fails(headrace_says, workers_do, tmp_path, report, said):
    written = {"events": 5, "samples": 0, "rejected": {}, "left_out": {}} | report
    workers_do(["write", str(tmp_path / "store" / "report.json"), json.dumps(written)], ["exit", 0])
    code, _, err = headrace_says("run", NEWS, "--set", CAT, "--set", f"store.path={tmp_path / 'store'}")
    assert (code, said in err) == (3 if said else 0, True), err


@pytest.mark.long
def test_a_run_that_fails_tells_who_died_with_its_last_lines(headrace_says, workers_do, tmp_path):
    workers_do(["say", "error: the stream broke"], ["exit", 1])
    code, out, err = headrace_says("run", NEWS, "--set", CAT, "--set", f"store.path={tmp_path}")
    assert (code, out) == (1, "")
    assert err.endswith(
        "last lines of trainer-0:\n  error: the stream broke\nerror: trainer-0 ended first: exit code 1\n"
    )


@pytest.mark.long
def test_a_store_that_holds_another_jobs_run_is_refused_without_fresh(headrace_says, workers_do, tmp_path):
    workers_do(["exit", 0])
    store = f"store.path={tmp_path}"
    assert headrace_says("run", NEWS, "--set", CAT, "--set", store)[0] == 0
    assert headrace_says("run", NEWS, "--set", CAT, "--set", store)[0] == 0
    code, _, err = headrace_says("run", NEWS, "--set", CAT, "--set", store, "--set", "name=olds")
    assert (code, "holds a run of job 'news', not of 'olds'; give --fresh" in err) == (2, True)


def test_an_address_that_cannot_be_listened_on_is_told_before_the_store_is_touched(headrace_says, workers_do, tmp_path):
    workers_do(["exit", 0])
    store = tmp_path / "store"
    code, _, err = headrace_says("run", NEWS, "--set", CAT, "--set", f"store.path={store}", "--listen", "0.0.0.0:80")
    assert code == 2
    assert err.startswith("error: --listen: '0.0.0.0' is not this machine's loopback")
    assert not store.exists()


@pytest.mark.long
def test_the_api_tells_of_a_run_while_it_goes_on(monkeypatch, workers_do, tmp_path):
    go = tmp_path / "go"
    workers_do(["serve"], ["await_file", str(go)], ["exit", 0])
    bound, seen = server.bound, {}

    def listening(address):
        seen["socket"] = bound(address)
        return seen["socket"]

    class Asking(PlainShow):
        def watching(self, status):
            host, port = seen["socket"].getsockname()
            with urllib.request.urlopen(f"http://{host}:{port}/v1/jobs", timeout=10) as answer:
                seen["jobs"] = json.load(answer)
            go.touch()
            return super().watching(status)

    monkeypatch.setattr(server, "bound", listening)
    job = load_job(NEWS, [CAT, f"store.path={tmp_path / 'store'}"])
    assert run_job(job, Asking(), fresh=False, listen="127.0.0.1:0").code == 0
    (listed,) = seen["jobs"]["items"]
    assert (listed["name"], listed["phase"]) == ("news", "starting")


def test_the_last_status_is_the_reports_and_what_it_tells_is_committed():
    before = Status(version=2, commit=CommitStatus(version=1, age_s=9.0, failing="full"), trouble="full", restarts=1)
    report = {"events": 5, "samples": 10, "passes": 3, "metrics": {"life": {"ctr": {"auc": 0.7}}}, "digest": "x"}
    done = Status(state="done", pass_number=3, version=3, events=5, samples=10, restarts=1)
    assert launching.last_status(RunOutcome(0, "drained"), report, before) == replace(
        done,
        metrics=MetricsStatus(life={"ctr": {"auc": 0.7}}),
        commit=CommitStatus(version=3, age_s=0.0),
    )
    assert launching.last_status(RunOutcome(0, "drained"), {}, before) == replace(before, state="done")
    assert launching.last_status(RunOutcome(1, "died"), report, before) == replace(before, state="failed")


def test_a_spec_error_is_no_traceback(headrace_says, monkeypatch):
    def broken(*_):
        raise SpecError("is wrong", "a.b")

    monkeypatch.setattr(jobs, "load_job", broken)
    assert headrace_says("run", NEWS) == (2, "", "error: a.b: is wrong\n")


def test_help_is_there_for_every_command():
    root = typer.main.get_command(main.cli)
    commands = [*root.commands.values(), *root.commands["spec"].commands.values()]
    assert all(command.help and re.search(r"\w", command.help) for command in commands)


@pytest.mark.long
@pytest.mark.parametrize(("options", "expected"), [((), 0), (("--retry-stopped",), 75)])
def test_a_run_that_a_signal_stopped_may_ask_to_be_started_again(
    headrace_says, workers_do, tmp_path, monkeypatch, options, expected
):
    told = []
    monkeypatch.setattr(ProcessLauncher, "end", lambda _, code, reason: told.append(code))
    workers_do(["serve"], ["write", str(tmp_path / "up"), "up"], ["await_drain"], ["exit", 0])
    store = "--set", CAT, "--set", f"store.path={tmp_path / 'store'}"
    with when((tmp_path / "up").exists, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        code, out, _ = headrace_says("run", NEWS, *store, *options)
    assert (code, out) == (expected, "done: stopped after the pass in training\n") and told == [expected]
