"""`headrace run --trace`: the timeline of a real job with two trainers and two shards."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import groupby

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.running_job import RunningJob
from tests.integration.stream_job import headrace, write_job

pytestmark = pytest.mark.long

OF_TRAINERS = {"step", "reading", "pipe", "lookup", "pull", "forward", "backward", "reduce", "push", "wait", "close"}
OF_SHARDS = {"lookup", "pull", "push", "wait", "close", "commit"}
WORKERS = {f"{role}-{number}" for role in ("trainer", "shard") for number in (0, 1)}
TWO_BY_TWO = ("cluster.trainers=2", "cluster.shards=2", "commit.every_passes=1")


class Trace:
    """A trace, as Perfetto reads it."""

    def __init__(self, path):
        events = json.loads(path.read_text())["traceEvents"]
        named = [event for event in events if event["ph"] == "M"]
        self.workers = {each["pid"]: each["args"]["name"] for each in named if each["name"] == "process_name"}
        self.threads = {
            (each["pid"], each["tid"]): each["args"]["name"] for each in named if each["name"] == "thread_name"
        }
        self.spans = [event for event in events if event["ph"] == "X"]

    def of(self, worker):
        return [span for span in self.spans if self.workers[span["pid"]] == worker]

    def by_thread(self):
        found = defaultdict(list)
        for span in self.spans:
            found[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"], span["name"]))
        return found


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    job = write_job(tmp_path_factory.mktemp("traced"))
    beside = [f"--{name}={job.parent / name}" for name in ("log-dir", "tensorboard")]
    ended = headrace(job, *TWO_BY_TWO, options=("--trace", "steps=200", *beside))
    assert ended.code == 0, ended.output
    return ended, Trace(job.parent / "store" / "trace.json"), job


def test_each_rank_and_shard_has_every_kind_of_span(traced):
    ended, trace, job = traced
    assert {*trace.workers.values()} == WORKERS
    for worker in WORKERS:
        kinds = {span["name"] for span in trace.of(worker)}
        assert kinds == OF_SHARDS if worker.startswith("shard") else kinds == OF_TRAINERS | {"commit"}, worker
    assert f"trace     {job.parent / 'store' / 'trace.json'}\n" in ended.output  # and nothing is lacking


def test_the_same_run_wrote_the_output_of_each_worker_and_the_figures_of_each_close(traced):
    ended, _, job = traced
    logs = {path.stem: path.read_text() for path in (job.parent / "log-dir").glob("*.log")}
    assert {"shard-0", "shard-1"} <= {*logs} <= WORKERS | {"launcher"}
    assert " serves at " in logs["shard-0"]
    read = EventAccumulator(str(job.parent / "tensorboard" / "t1")).Reload()
    steps = [each.step for each in read.Scalars("window/ctr/auc")]
    assert steps == list(range(1, ended.report["passes"] + 1))
    assert sum(each.value for each in read.Scalars("stream/events")) == ended.report["events"]


def test_threads_are_named_by_their_role(traced):
    trace = traced[1]
    for pid, worker in trace.workers.items():
        names = {name for (process, _), name in trace.threads.items() if process == pid}
        assert names >= ({"data-plane"} if worker.startswith("shard") else {"main", "loader-read", "loader-cut"})


def test_spans_of_a_thread_nest_and_never_overlap(traced):
    for thread, spans in traced[1].by_thread().items():
        open_until = []
        for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, (thread, name)
            open_until.append(end)


def test_the_spans_of_a_step_fill_it(traced):
    trace = traced[1]
    for rank in (0, 1):
        mine = trace.of(f"trainer-{rank}")
        steps = [span for span in mine if span["name"] == "step"]
        assert [span["args"]["step"] for span in steps] == [*range(len(steps))] and len(steps) > 6
        thread = [span for span in mine if span["tid"] == steps[0]["tid"] and span["name"] != "step"]
        shares = []
        for step in steps:
            end = step["ts"] + step["dur"]
            inner = [(span["ts"], span["ts"] + span["dur"]) for span in thread if step["ts"] <= span["ts"] <= end]
            filled = sum(max(0.0, end - max(begin, before)) for begin, end, before in with_ends_before(inner))
            shares.append(filled / step["dur"])
        # A busy machine may halt a step between two spans, also most of the steps; a kind that lacks, lacks in each.
        assert 0.9 < sorted(shares)[-3] and max(shares) <= 1.001


def with_ends_before(spans):
    """Each span with the end of those before it."""
    before = 0.0
    for begin, end in sorted(spans):
        yield begin, end, before
        before = max(before, end)


def test_a_shard_applies_a_push_after_the_trainers_began_to_send_it(traced):
    """Clocks of processes are aligned: each shard's n-th push begins after both trainers' n-th push began."""
    trace = traced[1]
    pushes = {worker: [span["ts"] for span in trace.of(worker) if span["name"] == "push"] for worker in sorted(WORKERS)}
    assert len({len(times) for times in pushes.values()}) == 1
    for shard in ("shard-0", "shard-1"):
        for at, *sent in zip(pushes[shard], pushes["trainer-0"], pushes["trainer-1"], strict=True):
            assert max(sent) < at


def test_a_timeline_changes_no_digest(traced, tmp_path):
    plain = headrace(write_job(tmp_path), *TWO_BY_TWO)
    assert plain.report["digest"] == traced[0].report["digest"]
    assert not list((tmp_path / "store").glob("trace*"))


def test_a_killed_worker_leaves_no_part_and_the_next_generation_is_traced(tmp_path):
    job = write_job(tmp_path, spec=(job_spec := write_job(tmp_path).read_text()).replace('["cat"]', '["./slow"]'))
    assert job.read_text() != job_spec
    (tmp_path / "slow").write_text("#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.05; done\nexec cat\n")
    (tmp_path / "slow").chmod(0o755)
    running = RunningJob(job, tmp_path, *TWO_BY_TWO, options=("--trace", "steps=5"))
    try:
        running.until_said("training")
        os.kill(running.workers()["trainer-1"], signal.SIGKILL)
        running.until_said("restarting, 1 of 5")
        (tmp_path / "go").touch()
        code, said = running.end()
    finally:
        running.kill()
    assert code == 0, said
    trace = Trace(tmp_path / "store" / "trace.json")
    assert {*trace.workers.values()} == WORKERS and "lacks" not in said
    for rank in (0, 1):
        steps = [span["args"]["step"] for span in trace.of(f"trainer-{rank}") if span["name"] == "step"]
        assert steps == [0, 1, 2, 3, 4]


def test_a_wrong_window_is_refused_before_the_store_is_made(tmp_path):
    job = write_job(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "headrace.service", "run", str(job), "--trace", "steps=none"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "--trace steps=none: steps: Input should be a valid integer" in ended.stderr
    assert not (tmp_path / "store").exists()


def test_all_ranks_record_as_many_steps(traced):
    trace = traced[1]
    steps = sorted((span["pid"], span["args"]["step"]) for span in trace.spans if span["name"] == "step")
    counts = [len([*found]) for _, found in groupby(steps, lambda pair: pair[0])]
    assert len(counts) == 2 and len({*counts}) == 1
