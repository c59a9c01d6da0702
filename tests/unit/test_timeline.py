"""Timelines of processes, and the trace that is made of them."""

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from headrace import timeline
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.api import timelines
from headrace.service.cluster import trace_file
from headrace.service.cluster.trace_file import begin_trace, finish_trace, record_trace
from headrace.service.jobs.errors import WrongPhase
from headrace.timeline import (
    Span,
    TimelineRecorder,
    TracePart,
    TraceWindow,
    parse_window,
    recorded,
    recording,
    span,
    stepped,
)


def part(folder, name="g1-trainer-0", steps=2, after=0):
    return TracePart(window=TraceWindow(steps=steps, after=after), file=folder / f"{name}.json")


def content(given):
    return json.loads(given.file.read_text())


def kinds(given):
    found = content(given)
    return [(found["names"][kind], step) for kind, _, _, _, step in found["spans"]]


def test_nothing_is_recorded_unless_a_part_is_given(tmp_path):
    with recording(None), span(Span.PULL) as nothing:
        stepped()
    assert nothing is None and isinstance(span(Span.PULL), nullcontext) and not list(tmp_path.iterdir())


def test_a_part_holds_the_spans_of_its_steps_and_of_no_others(tmp_path):
    given = part(tmp_path, steps=2, after=1)
    with recording(given):
        for _ in range(5):
            with span(Span.STEP), span(Span.FORWARD):
                pass
            stepped()
    assert kinds(given) == [("forward", 1), ("step", 1), ("forward", 2), ("step", 2)]


def test_a_process_that_ends_before_its_steps_do_writes_what_it_has(tmp_path):
    given = part(tmp_path / "new", steps=200)
    with recording(given), pytest.raises(ZeroDivisionError), span(Span.PUSH):
        raise ZeroDivisionError
    assert kinds(given) == [("push", 0)]


def test_each_thread_has_spans_of_its_own_which_lie_in_their_callers(tmp_path):
    given = part(tmp_path)

    @recorded(Span.LOOKUP)
    def look(wanted):
        with span(Span.WAIT):
            return 2 * wanted

    with recording(given):
        other = threading.Thread(target=look, args=(1,), name="loader-cut")
        other.start()
        other.join()
        assert look(3) == 6
    found = content(given)
    assert {*found["threads"]} == {"main", "loader-cut"} and [span[0] for span in found["spans"]] == 2 * [
        found["names"].index("wait"),
        found["names"].index("lookup"),
    ]
    for inner, outer in (found["spans"][:2], found["spans"][2:]):
        assert inner[1] == outer[1] and outer[2] <= inner[2] <= inner[3] <= outer[3]


def test_a_recorder_keeps_the_newest_spans_and_counts_the_dropped_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_SPANS", 3)
    given = part(tmp_path)
    recorder = TimelineRecorder(given.window, given.file)
    for number in range(8):
        recorder.add(Span.WAIT, number, number + 1)
    recorder.close()
    assert [found[2] for found in content(given)["spans"]] == [5, 6, 7] and content(given)["dropped"] == 5


def test_a_process_that_runs_records_where_a_new_request_asks_it_to(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "LOOK_S", 0.0)
    request, given = tmp_path / "request.json", part(tmp_path)
    request.write_text('{"steps": 9}')  # of an earlier run: it counts no more

    def work(steps):
        for _ in range(steps):
            with span(Span.STEP):
                pass
            stepped()

    with recording(TracePart(file=given.file, request=request)):
        work(5)
        assert not given.file.exists() and isinstance(span(Span.STEP), nullcontext)
        for steps, number in ((2, 1), (3, 2)):
            request.write_text(json.dumps({"steps": steps}))
            os.utime(request, ns=(number, number))
            work(6)
            while len(kinds(given) if given.file.exists() else ()) != steps - 1:
                pass  # a thread writes the part; the step that saw the request is the first one
        request.write_text("none")
        work(2)
    assert kinds(given) == [("step", 1), ("step", 2)]


def test_the_parts_of_a_run_that_goes_on_are_awaited_and_put_together(tmp_path):
    store = tmp_path
    (store / "trace.json").write_text("old")

    def worker():
        with recording(
            TracePart(file=store / "trace-parts" / "g1-trainer-0.json", request=store / "trace-request.json")
        ):
            ready.set()
            while not done.is_set():
                with span(Span.STEP):
                    done.wait(0.01)
                stepped()

    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=worker)
    thread.start()
    ready.wait()
    try:
        said = record_trace(store, 3, ["trainer-0"], Deadline.after(60))
    finally:
        done.set()
        thread.join()
    assert said == str(store / "trace.json") and json.loads((store / "trace.json").read_text())["traceEvents"]
    assert record_trace(store, 3, ["trainer-1"], Deadline.after(0)) == "no worker has recorded a timeline"
    assert not (store / "trace.json").exists(), "the trace of other steps is none of these"


def test_a_process_that_is_killed_leaves_no_broken_part(tmp_path):
    """It dies in the middle of writing: the file of that name never exists."""
    given = part(tmp_path)
    script = f"""
import os, signal
from pathlib import Path
from headrace import durable, timeline
durable.RealDisk.sync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
window = timeline.TraceWindow(steps=1)
with timeline.recording(timeline.TracePart(window=window, file=Path({str(given.file)!r}))), timeline.span("pull"):
    pass
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert not given.file.exists() and [path.suffix for path in tmp_path.iterdir()] == [".tmp"]


def test_a_part_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "file").touch()
    with recording(part(tmp_path / "file")):
        pass
    assert "the timeline of this process cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("200", "'200' is not of the form steps=200 or steps=200,after=1000"),
        ("", "is not of the form"),
        ("steps=", "is not of the form"),
        ("steps=5,steps=6", "is not of the form"),
        ("steps=0", "steps: Input should be greater than or equal to 1"),
        ("steps=20000", "steps: Input should be less than or equal to 10000"),
        ("steps=many", "steps: Input should be a valid integer (got 'many')"),
        ("steps=1.5", "steps: Input should be a valid integer"),
        ("after=3", "steps: is missing"),
        ("steps=3,after=-1", "after: Input should be greater than or equal to 0"),
        ("step=3", "did you mean 'steps'"),
    ],
)
def test_a_wrong_window_is_refused_with_the_reason(text, words):
    with pytest.raises(SpecError) as error:
        parse_window(text)
    assert words in str(error.value) and "--trace" in str(error.value)


def test_a_window_is_read_from_its_text():
    assert parse_window("steps=200") == TraceWindow(steps=200)
    assert parse_window("steps=200, after=1000") == TraceWindow(steps=200, after=1000)


def write_part(store, name, spans, clock="here", wall_ns=10_000_000_000, monotonic_ns=0, **more):
    """A part as a worker writes it: spans are (kind, thread, begin_ns, end_ns, step)."""
    folder = store / "trace-parts"
    folder.mkdir(exist_ok=True)
    facts = {"format": 1, "clock": clock, "wall_ns": wall_ns, "monotonic_ns": monotonic_ns, "dropped": 0}
    facts |= {"names": list(Span), "threads": ["main", "commit_0"], **more}
    whole = {**facts, "spans": [[[*Span].index(kind), *rest] for kind, *rest in spans]}
    (folder / f"{name}.json").write_text(json.dumps(whole))


def spans_of(store):
    trace = json.loads((store / "trace.json").read_text())
    of = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    return [
        (of[each["pid"]], each["tid"], each["name"], each["ts"], each["dur"], each.get("args"))
        for each in trace["traceEvents"]
        if each["ph"] == "X"
    ]


def test_processes_of_a_machine_are_aligned_by_its_clock_and_machines_by_wall_time(tmp_path):
    write_part(tmp_path, "g1-shard-0", [(Span.PULL, 0, 7_000, 9_000, 0)], wall_ns=5_000_000)
    write_part(tmp_path, "g1-trainer-0", [(Span.STEP, 0, 6_000, 9_500, 4)], wall_ns=5_000_999)  # 999 ns later: drift
    write_part(tmp_path, "g1-trainer-1", [(Span.WAIT, 1, 1_000, 3_000, 0)], "there", 5_006_500, 0)
    names = ["shard-0", "trainer-0", "trainer-1"]
    assert finish_trace(tmp_path, names) == str(tmp_path / "trace.json")
    assert spans_of(tmp_path) == [
        ("shard-0", 0, "pull", 1.0, 2.0, None),
        ("trainer-0", 0, "step", 0.0, 3.5, {"step": 4}),
        ("trainer-1", 1, "wait", 1.5, 2.0, None),
    ]
    assert not (tmp_path / "trace-parts").exists()


def test_the_newest_generation_is_shown_and_workers_without_a_part_are_named(tmp_path):
    write_part(tmp_path, "g2-trainer-0", [(Span.PUSH, 0, 0, 1_000, 0)])
    write_part(tmp_path, "g10-trainer-0", [(Span.PULL, 0, 0, 1_000, 0)], dropped=7)
    (tmp_path / "trace-parts" / "g10-shard-0.json").write_text('{"format": 1, "spa')
    (tmp_path / "trace-parts" / "g10-shard-1.json.tmp").write_text('{"format": 1, "spa')
    said = finish_trace(tmp_path, ["trainer-0", "shard-0", "shard-1"])
    assert "; it lacks shard-0, shard-1: killed, or on another machine" in said and "7 older spans were dropped" in said
    assert "g10-shard-0.json is not JSON" in said
    assert [found[2] for found in spans_of(tmp_path)] == ["pull"]


def test_parts_are_awaited_by_their_names_and_read_once(tmp_path, monkeypatch):
    """Parts have up to 10 MB. Those of an older generation count no more."""
    read, plain = [], trace_file.documents.read_object
    monkeypatch.setattr(trace_file.documents, "read_object", lambda path, most: read.append(path) or plain(path, most))
    coming = iter(["g1-shard-0", "g2-trainer-0", "g2-shard-0"])

    def wait(_s):
        assert not read
        write_part(tmp_path, next(coming), [(Span.PULL, 0, 0, 1_000, 0)])

    monkeypatch.setattr(trace_file, "time", SimpleNamespace(sleep=wait))
    said = record_trace(tmp_path, 3, ["trainer-0", "shard-0"], Deadline.after(60))
    assert said == str(tmp_path / "trace.json")
    assert [path.stem for path in read] == ["g1-shard-0", "g2-shard-0", "g2-trainer-0"] and not [*coming]


def test_a_job_is_recorded_by_one_operation_at_a_time(tmp_path, monkeypatch):
    def recorded_meanwhile(*_):
        with pytest.raises(WrongPhase, match="another trace of job 'news' is being recorded; retry once it is done"):
            work(Deadline.after(60))
        return "it"

    for name in ("workers_of", "with_store_defaults", "in_use"):
        monkeypatch.setattr(timelines, name, lambda given: given)
    monkeypatch.setattr(timelines, "record_trace", recorded_meanwhile)
    job = SimpleNamespace(store=tmp_path)
    call = SimpleNamespace(job=job, loaded=None, name="news", start=lambda _kind, _words, _within_s, work: work)
    work = timelines.record(call)
    assert work(Deadline.after(60)) == work(Deadline.after(60)) == {"said": "it"}


def test_a_part_of_another_format_is_named(tmp_path):
    write_part(tmp_path, "g1-trainer-0", [], format=9)
    said = finish_trace(tmp_path, ["trainer-0"])
    assert said.startswith("no worker has recorded a timeline; ") and "is of format 9, not 1" in said
    assert not (tmp_path / "trace.json").exists()


def test_a_traced_run_begins_without_what_an_earlier_one_left(tmp_path):
    write_part(tmp_path, "g1-trainer-0", [])
    (tmp_path / "trace.json").write_text("{}")
    begin_trace(tmp_path)
    assert not list(tmp_path.iterdir())
    begin_trace(tmp_path)
