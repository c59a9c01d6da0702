"""The evaluator: what a job file may ask of it, scores that are written once, the process that is started again."""

import json
import sys
import threading
from dataclasses import replace

import pytest

from headrace.dataset.stream.source import Partition
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, SpecError
from headrace.retry import Backoff
from headrace.service.cluster import evaluating
from headrace.service.cluster.evaluating import Evaluating, unscored
from headrace.service.faults import rounds
from headrace.service.jobs.preflight import check_run
from headrace.service.monitor.alarms import Alarm, alarms
from headrace.service.monitor.lines import evaluator_line
from headrace.service.predict import prediction
from headrace.service.predict.evaluator import Evaluator
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.exports import scores as scores_file
from headrace.trainer.exports.exporter import _worded
from headrace.trainer.exports.exporter_process import ExportRequest
from headrace.trainer.exports.scores import Score, Scores
from headrace.trainer.job_status import EvaluatorStatus, Status
from headrace.trainer.predict import prediction_plan
from headrace.trainer.spec.changes import significant_keys
from tests.integration.stream_job import SPEC

EVALUATOR = '[evaluator]\ninput = { paths = ["later.txt"] }\n'
GATED = '[exports.main]\nclock = "wall"\n[exports.main.gates.evaluator]\nauc_min = 0.7\n'


def job(tmp_path, *overrides, sections=EVALUATOR):
    (tmp_path / "job.toml").write_text(SPEC + sections)
    return load_job(tmp_path / "job.toml", overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("evaluator.last=100", "evaluator: last bounds a Kafka topic without ranges"),
        ("evaluator.trainers=2 ; evaluator.shards=0", "evaluator: shards = 0 keeps the rows inside the one trainer"),
        ('evaluator.of="exports"', 'evaluator.of: is "exports", and no export waits for a score'),
        ('evaluator.input={kafka={topic="t"}}', "evaluator.input.kafka.options: the job's source is not Kafka"),
        ("evaluator.inputs={}", "evaluator.inputs"),
        (
            'exports.main.gates.evaluator={wait="3s"}',
            "exports.main.gates.evaluator: compares nothing; set one of auc_min",
        ),
        ("exports.main.gates.evaluator={calibration=[2,1]}", "calibration: 2 is above 1, so no export would pass"),
    ],
)
def test_an_evaluator_that_cannot_be_is_refused_with_its_key(tmp_path, override, words):
    with pytest.raises(SpecError) as refused:
        job(tmp_path, *override.split(" ; "))
    assert words in str(refused.value)


def test_a_gate_by_scores_that_nobody_makes_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"exports.main.gates.evaluator: .* add a section \[evaluator\]"):
        job(tmp_path, sections=GATED)
    assert job(tmp_path, sections=EVALUATOR + GATED).spec.evaluator is not None


def test_events_that_are_not_there_are_refused_before_anything_starts(tmp_path):
    loaded = job(tmp_path)
    (tmp_path / "part-0.txt").touch()
    with pytest.raises(SpecError, match="evaluator.input.paths.0: no file matches"):
        check_run(loaded)
    (tmp_path / "later.txt").touch()
    check_run(loaded)


def test_workers_of_other_machines_may_keep_their_rows_in_an_object_store(tmp_path):
    for name in ("part-0.txt", "later.txt"):
        (tmp_path / name).touch()
    check_run(job(tmp_path, 'cluster.launcher="external"', 'store.parts="object"', 'store.mirror="mirror"'))


def test_fault_runs_refuse_a_gate_that_waits_in_vain(tmp_path):
    rounds._check_gates(job(tmp_path))
    with pytest.raises(SpecError, match=r"exports.main.gates.evaluator: fault runs have no evaluator"):
        rounds._check_gates(job(tmp_path, sections=EVALUATOR + GATED))


def test_a_try_of_an_export_lasts_as_long_as_its_deadline_and_its_wait(tmp_path):
    sections = EVALUATOR + GATED + 'wait = "5m"\n'
    assert job(tmp_path, sections=sections).spec.exports["main"].try_s == 600 + 300

    section = job(tmp_path, sections=sections).spec.exports["main"]
    request = ExportRequest.model_construct(stream="main", section=section)
    said = _worded(DeadlineExceeded("no answer"), request)
    assert said == "no answer: exports.main.deadline and exports.main.gates.evaluator.wait are 900 s together"


def test_an_evaluator_is_no_part_of_what_passes_give(tmp_path):
    assert significant_keys(job(tmp_path, sections="").raw, job(tmp_path).raw) == []


# -- scores


def score(version, timeline=1, **found):
    return Score(version=version, commit=f"t{timeline}-{version:010d}-g1", at="2026-11-29T00:00:00+00:00", **found)


def names(scores):
    return [each.version for each in scores.by_commit().values()]


def test_a_score_is_read_as_it_was_written_and_the_newest_is_of_the_newest_timeline(tmp_path):
    scores, found = Scores(tmp_path), score(7, metrics={"tasks": {"ctr": {"auc": 0.7}}}, events=3, samples=2)
    assert scores.newest() is None
    for each in (found, score(9), score(3, timeline=2, error="why")):
        scores.add(each, ())
    assert list(Scores(tmp_path).by_commit().values()) == [found, score(9), score(3, timeline=2, error="why")]
    assert scores.newest() == score(3, timeline=2, error="why") and found.tasks == {"ctr": {"auc": 0.7}}


def test_a_line_that_a_killed_process_began_does_not_count_and_is_written_anew(tmp_path):
    scores = Scores(tmp_path)
    scores.add(score(1), ())
    path = tmp_path / "evaluator" / "scores.jsonl"
    whole = path.read_bytes()
    for torn in (b"{", whole[:-1]):
        path.write_bytes(whole + torn)
        assert names(scores) == [1]
    scores.add(score(2), ())
    assert [json.loads(line)["version"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_damaged_line_is_left_out_with_a_word(tmp_path, caplog):
    scores = Scores(tmp_path)
    scores.add(score(1), ())
    path = tmp_path / "evaluator" / "scores.jsonl"
    path.write_bytes(b'{"version": 1\n{"commit": "x", "version": 1, "at": ""}\n' + path.read_bytes())
    assert names(scores) == [1] and caplog.text.count("a score is left out") == 2


def test_old_lines_go_but_not_those_of_commits_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(scores_file, "KEPT", 3)
    scores = Scores(tmp_path)
    for version in range(1, 7):
        scores.add(score(version), [score(1).commit])
    assert names(scores) == names(Scores(tmp_path)) == [1, 4, 5, 6]


def test_a_gate_waits_for_a_score_up_to_its_deadline(tmp_path):
    scores = Scores(tmp_path)
    assert scores.wait_for(score(4).commit, Deadline.after(0.01)) is None
    writer = threading.Timer(0.1, Scores(tmp_path).add, (score(4), ()))
    writer.start()
    assert scores.wait_for(score(4).commit, Deadline.after(60)) == score(4)
    writer.join()


# -- the order of versions


def test_versions_whose_exports_wait_for_a_score_come_first_then_the_newest(tmp_path):
    loaded = job(tmp_path, sections=EVALUATOR + GATED + '[exports.other]\nclock = "wall"\n')
    commits, scores = Commits(loaded.store), Scores(loaded.store)
    for version in (1, 2, 3, 4):
        folder = commits.folder / score(version).commit
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    assert len(commits.names()) == 4
    commits.hold(score(2).commit, "export-main")
    commits.hold(score(1).commit, "predict1-machine-17")
    commits.hold(score(3).commit, "export-other")
    order = [score(version).commit for version in (2, 4, 3, 1)]
    assert unscored(loaded, scores) == order
    scores.add(score(4), ())
    assert unscored(loaded, scores) == [order[0], *order[2:]]
    section = loaded.spec.evaluator.model_copy(update={"of": "exports"})
    gated = replace(loaded, spec=loaded.spec.model_copy(update={"evaluator": section}))
    assert unscored(gated, scores) == order[:1]


# -- the window of a topic

TOPIC = '[evaluator]\ninput = { kafka = { topic = "t", options = { bootstrap_servers = "x:1" } } }\nlast = 100\n'


class Topic:
    """Two partitions; one is shorter than its share of the window."""

    def __init__(self, *ends):
        self.ends = ends

    def partitions(self, _deadline):
        return [Partition(f"t/{number}", number, 5, 5, end, final=False) for number, end in enumerate(self.ends)]

    def close(self):
        pass


def test_a_window_is_the_newest_events_when_a_version_begins_and_a_kill_does_not_move_it(tmp_path, monkeypatch):
    loaded = job(tmp_path, sections=TOPIC)
    evaluator = Evaluator(loaded, loaded.spec.evaluator, tmp_path, threading.Event())
    evaluator._scores.folder.mkdir(parents=True)
    monkeypatch.setattr(prediction_plan, "open_input", lambda *_: Topic(1000, 20))
    first = evaluator._input(tmp_path / "first")
    assert first.kafka.ranges == {"0": (950, 1000), "1": (5, 20)} and first.kafka.topic == "t"
    monkeypatch.setattr(prediction_plan, "open_input", lambda *_: Topic(1100, 20))
    assert evaluator._input(tmp_path / "first") == first
    assert evaluator._input(tmp_path / "second").kafka.ranges["0"] == (1050, 1100)


def test_a_window_of_another_topic_is_not_applied(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(prediction_plan, "open_input", lambda *_: Topic(1000, 20))
    first = input_of(job(tmp_path, sections=TOPIC), tmp_path / "work" / "commit")
    monkeypatch.setattr(prediction_plan, "open_input", lambda *_: Topic(70))
    other = input_of(job(tmp_path, sections=TOPIC.replace('"t"', '"other"')), tmp_path / "work" / "commit")
    assert first.kafka.topic == "t" and other.kafka.topic == "other" and other.kafka.ranges == {"0": (5, 70)}


def input_of(loaded, folder):
    return Evaluator(loaded, loaded.spec.evaluator, folder, threading.Event())._input(folder)


# -- versions in progress


def test_a_version_in_progress_keeps_its_parts_when_a_newer_one_is_scored(tmp_path):
    loaded = job(tmp_path)
    commits, work = Commits(loaded.store), loaded.store / "evaluator" / "work"
    for version in (1, 2):  # damaged, so that a line with an error is their score
        (commits.folder / score(version).commit).mkdir(parents=True)
        (commits.folder / score(version).commit / "manifest.json").touch()
    for version in (1, 2, 3):
        (work / score(version).commit).mkdir(parents=True)
        (work / score(version).commit / "part").touch()
    evaluator = Evaluator(loaded, loaded.spec.evaluator, tmp_path, threading.Event())
    evaluator._score(score(2).commit)
    assert Scores(loaded.store).newest().error and [path.name for path in work.iterdir()] == [score(1).commit]
    evaluator._score(score(1).commit)
    assert list(work.iterdir()) == []


# -- the process


def test_secrets_of_a_killed_run_are_removed_at_the_next_start(tmp_path):
    loaded, private, cancelled = job(tmp_path), tmp_path / "private", threading.Event()
    private.mkdir()
    (private / "evaluator.json").touch()
    left = prediction._folder_of_run(private)  # of a process that is killed: it is entered, and never left
    (left.__enter__() / "spec.json").write_text("secrets")
    cancelled.set()
    Evaluator(loaded, loaded.spec.evaluator, private, cancelled).run()
    assert [path.name for path in private.iterdir()] == ["evaluator.json"]


def test_an_evaluator_that_dies_is_started_again_and_the_job_hears_of_it(tmp_path, monkeypatch):
    program = "import sys; print('error: the broker is away', file=sys.stderr); sys.exit(75)"
    monkeypatch.setattr(evaluating, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(evaluating, "PAUSES", Backoff.doubling(0.001, 0.002))
    lines, died = [], threading.Event()

    def on_line(worker, text):
        lines.append((worker, text))
        if "ended" in text and sum("ended" in each for _, each in lines) == 5:
            died.set()

    loaded = job(tmp_path)
    folder = Commits(loaded.store).folder / score(1).commit
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    running = Evaluating(loaded, tmp_path, on_line)
    thread = threading.Thread(target=running.run)
    thread.start()
    assert died.wait(60)
    running.stop()
    thread.join(60)
    assert not thread.is_alive()
    found = running.status()
    assert found.restarts >= 5 and found.trouble.endswith("the broker is away")
    assert ("evaluator", "error: the broker is away") in lines
    running.finish()
    assert "the rest is not scored" in lines[-1][1]


def test_deaths_in_a_row_are_counted_anew_once_a_version_is_scored(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "COMMAND", (sys.executable, "-c", "import sys; sys.exit(75)"))
    monkeypatch.setattr(evaluating, "PAUSES", Backoff((*[0.001] * 5, 600.0), endless=True))
    loaded, died, waits, lines = job(tmp_path), threading.Event(), threading.Event(), []

    def on_line(_worker, text):
        lines.append(text)
        died.set() if "again in 600 s" in text else None
        waits.set() if "waiting for the evaluator" in text else None

    for version in (1, 2):
        folder = Commits(loaded.store).folder / score(version).commit
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    running, scores = Evaluating(loaded, tmp_path, on_line), Scores(loaded.store)
    threads = [threading.Thread(target=act) for act in (running.run, running.finish)]
    threads[0].start()
    assert died.wait(60) and running.status().trouble != ""
    scores.add(score(2), ())
    assert running.status().trouble == ""
    threads[1].start()
    assert waits.wait(60), lines
    scores.add(score(1), ())
    threads[1].join(60)
    running.stop()
    threads[0].join(60)
    assert not any(thread.is_alive() for thread in threads) and not any("is not scored;" in line for line in lines)


def test_its_newest_score_and_its_trouble_are_shown():
    tasks = {"ctr": {"auc": 0.71234, "logloss": 0.4}}
    found = EvaluatorStatus(version=1200, commit="c", samples=5000, tasks=tasks, scored=3)
    assert evaluator_line(found) == "evaluator: AUC ctr: version 1200 0.7123 (5,000 samples, 3 versions scored)"
    assert evaluator_line(EvaluatorStatus()) == "evaluator: no version is scored yet"
    assert "cannot be scored: why" in evaluator_line(EvaluatorStatus(version=1, error="why"))
    assert alarms(Status(evaluator=found)) == {}
    assert "broker" in alarms(Status(evaluator=EvaluatorStatus(trouble="the broker is away")))[Alarm.EVALUATOR]
