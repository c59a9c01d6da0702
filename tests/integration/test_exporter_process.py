"""The exporter process: one request at a time, killed at any failpoint, ended with its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.failpoints import ArmedFailpoint, Failpoint
from headrace.trainer.exports import exporter_process as process_module
from headrace.trainer.exports.exporter_process import ExporterConfig, ExporterProcess
from headrace.trainer.exports.reader import chain_of, open_export, state_at
from tests.fakes.commits_of_rows import TABLE, Job, parent_of

POINTS = (Failpoint.EXPORT_BEGUN, Failpoint.EXPORT_ROWS, Failpoint.EXPORT_MANIFEST, Failpoint.EXPORT_DONE)
ROWS = {("a", n): [n, n, n, n] for n in range(100)} | {("b", n): [1, 2, 3, n] for n in range(100)}


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "store")
    yield job
    job.close()


@pytest.fixture
def start(job):
    """Starts exporters; ends them."""
    made = []

    def start(*faults):
        made.append(ExporterProcess(ExporterConfig(store=job.store, faults=faults)))
        return made[-1]

    yield start
    for exporter in made:
        exporter.close()


@pytest.fixture
def base(job, tmp_path):
    job.set(1, ROWS)
    return job.request(job.commit(1), "base", str(tmp_path / "out"))


def wait_for(condition):
    deadline, pause = Deadline.after(60), threading.Event()
    while not (found := condition()):
        deadline.check("waiting for the exporter")
        pause.wait(0.01)
    return found


def made(exporter, request):
    exporter.submit(request)
    return wait_for(exporter.poll)


def lives(job):
    return [path.name for path in (job.store / "live").glob("export-*")]


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def done_lines(out):
    return [json.loads(line)["path"] for line in (out / "donefile.txt").read_text().splitlines()]


def num_rows(answer, tmp_path):
    export = open_export(answer.path, tmp_path / "scratch").check()
    return sum(len(chunk) for chunk in state_at(chain_of(export), TABLE))


@pytest.mark.slow
def test_one_after_the_other(job, start, base, tmp_path):
    exporter = start()
    assert exporter.poll() is None
    assert (first := made(exporter, base)).outcome == "complete", first
    assert exporter.poll() is None, "each answer once"
    job.set(2, {("a", 1): [5, 5, 5, 5]})
    job.remove(("b", 7))
    second = made(exporter, job.request(job.commit(2, since=1), "delta", base.address, parent_of(base)))
    assert (second.outcome, second.rows, second.tombstones) == ("complete", 1, 1), second
    assert num_rows(second, tmp_path) == 199
    assert lives(job) == [] and done_lines(tmp_path / "out" / "small") == [
        "t1/0000000001-base",
        "t1/0000000002-delta",
    ]


@pytest.mark.parametrize(
    "point", [*POINTS[:1], *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS[1:3]), POINTS[3]]
)
def test_killed_anywhere_it_leaves_no_done_or_all_and_is_made_again(job, start, base, tmp_path, point, capfd):
    killed = start(
        ArmedFailpoint(point=Failpoint.RESTORE_LINKED), ArmedFailpoint(point=point)
    )  # the former is its rank 0's
    answer = made(killed, base)
    out = tmp_path / "out" / "small"
    assert answer.outcome == "failed" and not answer.final and "killed by signal 9" in answer.error
    there = files_in(out)
    assert ("t1/0000000001-base/_DONE" in there) == (point is Failpoint.EXPORT_DONE)
    assert "current.json" not in there and "donefile.txt" not in there
    assert f"fault run: killed at {point}\n" in capfd.readouterr().out
    again = made(killed, base)
    assert again.outcome == "complete" and again.current and again.rows == 200, again
    assert num_rows(again, tmp_path) == 200
    assert done_lines(out) == ["t1/0000000001-base"] and lives(job) == []
    assert made(start(), base).outcome == "complete", "and once more, with nothing left to do"
    assert done_lines(out) == ["t1/0000000001-base"]


def test_the_client_starts_it_anew_after_it_died(base, start):
    exporter = start()
    assert made(exporter, base).outcome == "complete"
    os.kill(exporter._child._process.pid, signal.SIGKILL)
    answer = made(exporter, base)
    assert answer.outcome == "failed" and not answer.final and "killed by signal 9" in answer.error
    assert made(exporter, base).outcome == "complete"


def test_what_it_said_last_is_in_the_answer(base):

    class Wrong(ExporterConfig):
        def model_dump_json(self):
            return '{"store": 5}'

    exporter = ExporterProcess(Wrong(store="."))
    answer = made(exporter, base)
    exporter.close()
    assert answer.outcome == "failed" and "exit code 2; its last words:\nerror: store" in answer.error, answer


@pytest.mark.slow
def test_one_that_does_not_answer_is_killed(job, base, start, monkeypatch):
    monkeypatch.setattr(process_module, "GRACE_S", 0.2)
    exporter = start()
    assert made(exporter, base).outcome == "complete"
    os.kill(exporter._child._process.pid, signal.SIGSTOP)
    slow = base.model_copy(update={"section": base.section.model_copy(update={"deadline": 0.1})})
    answer = made(exporter, slow)
    assert answer.outcome == "failed" and "did not answer in time" in answer.error
    assert made(exporter, base).outcome == "complete"


def test_its_own_deadline_is_an_answer_and_leaves_nothing(job, base, start, tmp_path):
    late = base.model_copy(update={"section": base.section.model_copy(update={"deadline": 0.001})})
    answer = made(start(), late)
    assert answer.outcome == "failed" and not answer.final and "exports.main.deadline" in answer.error
    assert files_in(tmp_path / "out") == [] and lives(job) == []


def test_a_close_in_the_middle_ends_it(job, base, start):
    exporter = start()
    exporter.submit(base)
    wait_for(lambda: exporter._child)
    pid = exporter._child._process.pid
    began_s = time.monotonic()
    exporter.close()
    assert time.monotonic() - began_s < 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_a_killed_one_left_open_goes_with_the_next_start(job, base, start):
    left = job.store / "live" / "export-main-1"
    left.mkdir(parents=True)
    (left / "000001.sst").write_bytes(b"x")
    assert made(start(), base).outcome == "complete"
    assert lives(job) == []


def test_it_ends_with_its_input_and_has_no_torch(job, base):
    command = [sys.executable, "-m", "headrace.trainer.exports"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    config = ExporterConfig(store=job.store).model_dump_json()
    process.stdin.write(f"{config}\n{base.model_dump_json()}\nno request\n".encode())
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [answer["outcome"] for answer in answers] == ["complete", "failed"]
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.stdin.close()
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()


def test_a_wrong_first_line_is_said():
    done = subprocess.run(
        [sys.executable, "-m", "headrace.trainer.exports"], input=b"{}\n", capture_output=True, timeout=60
    )
    assert done.returncode == 2 and b"store" in done.stderr
