"""The processes that predict pasted events: their places, their ends, and a question that a timeout cuts."""

import json
import os
import signal
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.dataset.samples.batch import Samples
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, NotYet, SpecError
from headrace.service.history.commit_lookup import lease
from headrace.service.predict import event_trials
from headrace.service.predict.event_trials import MAX_ANSWER, MAX_PROCESSES, EventTrials, TrialProcess
from headrace.service.spec.job import load_job
from headrace.trainer.journal.log import store_locked
from headrace.trainer.predict import event_trial
from headrace.trainer.predict.event_trial import MAX_SAMPLES, MAX_TOLD, EventTrial, TrialQuestion
from tests.integration import stream_job


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(stream_job.SPEC)
    return load_job(tmp_path / "job.toml")


class FakeProcess:
    """Answers at once; `during` runs first."""

    def __init__(self, job):
        self.job, self.has_ended, self.closed, self.during = job, False, 0, lambda: None
        started.append(self)

    serves = TrialProcess.serves

    def ask(self, commit, events, deadline, *, example):
        self.during()
        return {"samples": [*events]}

    def close(self):
        self.closed += 1


started: list[FakeProcess] = []


@pytest.fixture
def trials(monkeypatch):
    @contextmanager
    def version_of(*_args, **_keys):
        yield SimpleNamespace(commit=Path("c"), description={"version": 1})

    for name, fake in {"version_of": version_of, "TrialProcess": FakeProcess, "require": lambda *_: None}.items():
        monkeypatch.setattr(event_trials, name, fake)
    started.clear()
    return EventTrials()


def asked(trials, name, job, seconds=5.0):
    return trials.ask(name, job, ["x"], Deadline.after(seconds))


def test_a_process_stays_until_another_job_needs_its_place(trials, job):
    for name in ("a", "b", "a"):
        assert asked(trials, name, job) == {"version": 1, "samples": ["x"]}
    assert len(started) == MAX_PROCESSES
    asked(trials, "c", job)
    assert [each.closed for each in started] == [0, 1, 0], "b was asked longest ago"
    trials.close()
    assert [each.closed for each in started] == [1, 1, 1]


def test_processes_that_ended_by_themselves_are_reaped_by_the_question_of_another_job(trials, job):
    asked(trials, "a", job)
    started[0].has_ended = True
    asked(trials, "b", job)
    assert [each.closed for each in started] == [1, 0]


def test_a_question_that_waits_while_its_place_is_ended_gets_another_process(trials, job):
    asked(trials, "a", job)
    asked(trials, "b", job)
    close, ending, go_on = started[0].close, threading.Event(), threading.Event()

    def closing_slowly():
        ending.set()
        assert go_on.wait(5)
        close()

    started[0].close = closing_slowly
    other = threading.Thread(target=asked, args=(trials, "c", job))
    other.start()
    assert ending.wait(5)
    assert asked(trials, "a", job) == {"version": 1, "samples": ["x"]}, "the end holds no other question up"
    go_on.set()
    other.join(5)
    assert not other.is_alive() and [each.closed for each in started[:2]] == [1, 1]
    trials.close()
    assert [each.closed for each in started] == [1] * len(started)


def test_no_process_starts_after_the_end(trials, job):
    asked(trials, "a", job)
    started[0].during = trials.close
    asked(trials, "a", job)
    for name in ("a", "b"):
        with pytest.raises(NotYet, match="is ending"):
            asked(trials, name, job)
    assert [each.closed for each in started] == [1]


def test_the_rest_of_a_question_that_a_timeout_cut_is_sent_before_the_next_one(job, monkeypatch):
    links = []

    class Child:
        def __init__(self, *_args, pass_fds, **_keys):
            links.append(socket.socket(fileno=os.dup(pass_fds[0])))

        def close(self):
            links[0].close()

    monkeypatch.setattr(event_trials, "ChildProcess", Child)
    process, large = TrialProcess(job), "x" * (4 << 20)
    for _ in range(2):
        with pytest.raises(NotYet):
            process.ask(Path("c"), [large], Deadline.after(0.05))
    lines, read = links[0].makefile("rb"), []

    def answer():
        for line in lines:
            read.append(json.loads(line))
            if "number" in read[-1]:
                links[0].sendall(json.dumps({"number": read[-1]["number"], "samples": []}).encode() + b"\n")

    answering = threading.Thread(target=answer)
    answering.start()
    assert process.ask(Path("c"), ["y"], Deadline.after(5))["number"] == 3
    process._link.shutdown(socket.SHUT_RDWR)
    answering.join(5)
    process.close()
    assert [each.get("events") for each in read] == [None, [large], ["y"]], "the second one was never begun"


def test_the_process_has_the_secrets_of_the_job_and_another_one_follows_new_secrets(job, monkeypatch):
    monkeypatch.setattr(event_trials, "ChildProcess", lambda *_args, **_keys: SimpleNamespace(close=lambda: None))
    full = {**job.full, "sources": {"k": {"kind": "kafka", "options": {"sasl_plain_password": "***"}}}}
    monkeypatch.setattr(type(job), "full", property(lambda _: full))
    secrets = {"sources.k.options.sasl_plain_password": "p"}
    process = TrialProcess(replace(job, secrets=secrets))
    sent = json.loads(process._unsent)["job"]
    assert sent["sources"]["k"]["options"] == {"sasl_plain_password": "p"}
    assert process.serves(replace(job, secrets=secrets)) and not process.serves(replace(job, secrets={}))
    process.close()


def test_a_source_that_takes_too_long_or_fails_costs_an_example_alone(monkeypatch):
    def never(*_):
        while True:
            pass

    monkeypatch.setattr(event_trial, "EXAMPLE_S", 0.05)
    monkeypatch.setattr(event_trial, "_first_event", never)
    assert event_trial.recent_event(None, Path(), Path()) is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    for text, expected in {"a\tb \u3000": "a\tb \u3000", "a\nb": None, "\x1b[2J": None, "": None}.items():
        monkeypatch.setattr(event_trial, "_first_event", lambda *_, text=text: text.encode())
        assert event_trial.recent_event(None, Path(), Path()) == expected
    monkeypatch.setattr(event_trial, "_first_event", lambda *_: 1 / 0)
    assert event_trial.recent_event(None, Path(), Path()) is None


def test_a_trial_waits_no_longer_for_the_lock_of_a_store_and_fetches_nothing(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "commits" / "c").mkdir(parents=True)
    manifest = SimpleNamespace(objects_at="s3://bucket/")
    commit = SimpleNamespace(
        name="c", folder=tmp_path / "commits" / "c", manifest=manifest, files={"rows": SimpleNamespace(num_bytes=2)}
    )
    ignored = {name: lambda *_: None for name in ("hold", "release")}
    commits = SimpleNamespace(folder=tmp_path / "commits", names=lambda: ["c"], read=lambda name: commit, **ignored)
    with pytest.raises(SpecError, match="in the object store alone"), leased(commits, 5):
        pass
    (commit.folder / "rows").write_bytes(b"12")
    with leased(commits, 5):
        pass
    with store_locked(tmp_path, Deadline.after(5)), pytest.raises(DeadlineExceeded), leased(commits, 0.05):
        pass


@pytest.mark.parametrize(
    ("size", "expected"), [(10, [MAX_SAMPLES, 200 + 300 - MAX_SAMPLES]), (MAX_TOLD // 3, [2, 498])]
)
def test_samples_beyond_the_bounds_of_an_answer_are_counted(size, expected):
    built = []

    class Trial(EventTrial):
        def __init__(self):
            """Holds nothing."""

        def _open(self, folder):
            """A commit."""

        def _blocks(self, events, tally):
            for num in (200, 300):
                yield Samples({}, {}, {}, np.arange(num), np.full(num, np.nan))

        def _predicted(self, samples, events):
            for event in samples.event_B.tolist():
                built.append(event)
                yield {"event": event, "text": "x" * size}

    found = Trial().answer(TrialQuestion(number=1, commit=Path("c"), events=("x",)))
    assert [len(found["samples"]), found["left_out"]] == expected
    assert len(built) <= expected[0] + 1 and len(json.dumps(found)) < MAX_ANSWER


def leased(commits, seconds):
    return lease(commits, "c", "predict1", deadline=Deadline.after(seconds))
