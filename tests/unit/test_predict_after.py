"""Predictions at the end of a job: refused before anything starts, made once the stream is drained."""

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.errors import SpecError
from headrace.lifecycle import ExitCode
from headrace.service.auth.config import AllowSection
from headrace.service.auth.spec_rules import SpecRules
from headrace.service.cluster.job_run import JobRun
from headrace.service.cluster.job_runner import JobRunner
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.predict import prediction
from headrace.service.predict.after_training import RunThenPredict, check_before, request_of
from headrace.service.predict.worker_group import PredictionCancelled, PredictionFailed
from headrace.service.spec.job import LoadedJob, load_job
from headrace.trainer.job_status import EvaluatorStatus, Status
from headrace.trainer.predict.prediction_plan import fingerprint_of
from headrace.trainer.spec.changes import significant_keys
from tests.faults.test_statistics_killed import KNOWING
from tests.integration.stream_job import SPEC

PREDICT = '[predict]\ninput = { paths = ["later.txt"] }\noutput = "predicted"\n'


def job(tmp_path: Path, *overrides: str) -> LoadedJob:
    (tmp_path / "job.toml").write_text(SPEC + PREDICT)
    return load_job(tmp_path / "job.toml", overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('predict.version="12"', "predict.version: is '12'; the model that was just trained predicts"),
        ("predict.spec={}", "predict.spec: the job file is the spec"),
        ('predict.columns=["aa"]', "predict.columns.0: the job has no slot 'aa'; did you mean 'a'"),
        ("predict.shards=0 ", None),
        ("predict.trainers=0", "predict.trainers: Input should be greater than or equal to 1"),
        ("predict.ouput=3", "predict.ouput"),
        ("sources.lines.follow=true", "predict: the stream never ends"),
        ('predict.input={ kafka = { topic = "t" } }', "predict.input.kafka.options: the job's source is not Kafka"),
    ],
)
def test_a_prediction_that_cannot_be_is_refused_with_its_key(tmp_path, override, words):
    if words is None:
        assert job(tmp_path, override).spec.predict.shards == 0
        return
    with pytest.raises(SpecError) as refused:
        job(tmp_path, override)
    assert words in str(refused.value)


def test_what_is_predicted_at_the_end_is_no_part_of_what_passes_give(tmp_path):
    assert significant_keys(job(tmp_path).raw, job(tmp_path, 'predict.output="elsewhere"').raw) == []


def test_through_the_service_its_places_are_confined(tmp_path):
    loaded = job(tmp_path, 'predict.output="/etc/predicted"')
    with pytest.raises(SpecError, match="predict.output"):
        SpecRules(AllowSection(pipe_commands=(("cat",),)), tmp_path).check(loaded.spec, loaded.folder)


def test_a_folder_that_holds_something_else_is_refused_before_anything_starts(tmp_path):
    loaded, folder = job(tmp_path), tmp_path / "predicted"
    check_before(loaded)
    folder.mkdir()
    check_before(loaded, fresh=True)
    (folder / "thesis.tex").touch()
    with pytest.raises(SpecError, match="holds no prediction"):
        check_before(loaded)


def test_predictions_of_a_run_that_is_to_be_removed_are_no_ones_of_the_next(tmp_path):
    loaded, folder = job(tmp_path), tmp_path / "predicted"
    folder.mkdir()
    manifest = {"fingerprint": fingerprint_of(request_of(loaded), loaded.spec)}
    (folder / "_manifest.json").write_text(json.dumps(manifest))
    (folder / "_DONE").touch()
    check_before(loaded)
    with pytest.raises(SpecError, match="of the run that --fresh removes; remove it, too"):
        check_before(loaded, fresh=True)
    with pytest.raises(SpecError, match="holds another prediction"):
        check_before(job(tmp_path, 'predict.columns=["a"]'))


CLUSTER = 'predict.on="cluster"'
ELSEWHERE = ('cluster.launcher="external"', 'store.parts="object"', 'store.mirror="mirror"')


def test_machines_of_the_job_that_cannot_predict_are_refused_before_they_train(tmp_path):
    check_before(job(tmp_path, CLUSTER, "cluster.trainers=2"), tensors=False)
    check_before(job(tmp_path, CLUSTER, "predict.shards=0"), tensors=False)
    with pytest.raises(SpecError, match=r"^predict.shards: shards = 0 keeps the rows inside the one trainer; 2 tr"):
        check_before(job(tmp_path, CLUSTER, "cluster.trainers=2", "predict.shards=0"), tensors=False)
    check_before(job(tmp_path, CLUSTER, *ELSEWHERE), tensors=False)
    (tmp_path / "knowing.toml").write_text(KNOWING + PREDICT)
    knowing = load_job(tmp_path / "knowing.toml", [CLUSTER, *ELSEWHERE])
    with pytest.raises(SpecError, match=r"^predict.on: slot 'known' holds statistics of rows, which each predictor"):
        check_before(knowing, tensors=False)


class Ran(JobRun):
    """A run that has ended in some way."""

    def __init__(self, store: Path, code: int = 0, stopped: bool = False) -> None:
        super().__init__(SimpleNamespace(stopped=stopped, drain=lambda: None), store)
        self._outcome = RunOutcome(code, "the stream is drained")
        (store / "report.json").write_text('{"events": 5}')  # by rank 0

    def run(self) -> RunOutcome:
        return self._outcome

    def status(self):
        return Status(state="done")


MANIFEST = {"version": {"version": 3}, "events": 5, "samples": 7, "rejected": {}, "fingerprint": "f"}


@pytest.fixture
def predicts(tmp_path, monkeypatch):
    """Replace `predict`; the outcome of RunThenPredict, and the statuses and lines meanwhile."""

    def run(act, **ended):
        ran, lines, statuses = Ran(tmp_path, **ended), [], []
        both = RunThenPredict(ran, job(tmp_path), lambda worker, text: lines.append(text))

        def predict(job, request, progress, cancelled, on_line, *, beside, launcher):
            progress(0.5, "1 of 2 parts")
            statuses.append(both.status())
            assert not beside and launcher is None and isinstance(cancelled, threading.Event)
            return act(both, cancelled)

        monkeypatch.setattr(prediction, "predict", predict)
        return both, both.run(), lines, statuses

    return run


def test_while_it_predicts_a_job_drains_with_words_and_its_report_tells_of_it(predicts, tmp_path):
    both, outcome, lines, statuses = predicts(lambda *_: MANIFEST)
    assert (outcome.code, outcome.reason) == (0, "the stream is drained, and 7 samples predicted")
    assert statuses == [Status(state="draining", predicting="1 of 2 parts")]
    assert both.status() == Status(state="done") and "predicting: 1 of 2 parts" in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["events"], report["predict"]["samples"], report["predict"]["metrics"]) == (5, 7, None)


@pytest.mark.parametrize("ended", [{"code": 1}, {"stopped": True}])
def test_a_stream_that_is_not_drained_is_followed_by_no_prediction(predicts, ended):
    both, outcome, _, statuses = predicts(lambda *_: MANIFEST, **ended)
    assert (outcome.code, statuses, both.predicted) == (ended.get("code", 0), [], None)


def test_a_stop_while_it_predicts_ends_it_well_and_an_error_with_its_own_code(predicts):
    def called_off(both, cancelled):
        both.drain()
        assert cancelled.is_set()
        raise PredictionCancelled

    def fails(*_):
        raise PredictionFailed("no such slot")

    _, outcome, _, _ = predicts(called_off)
    assert (outcome.code, outcome.reason) == (0, "stopped while it predicted; the next run continues")
    _, outcome, _, _ = predicts(fails)
    assert outcome.code == ExitCode.FAILED and outcome.reason.endswith("its prediction failed: no such slot")


class Agents:
    """A launcher with workers of other machines: what they hear at the end."""

    def end(self, code, reason):
        self.heard = code, reason


class Scorer:
    """An evaluator with versions to score; the user loses patience."""

    def __init__(self):
        self._hurried, self.status = threading.Event(), lambda: EvaluatorStatus()
        self.waited = False

    def hurry(self):
        self._hurried.set()

    def finish(self):
        self.waited = True
        os.kill(os.getpid(), signal.SIGINT)
        assert self._hurried.wait(10)


@pytest.fixture
def drained(tmp_path, monkeypatch):
    """Predict at the end of a run that has nothing to train; the outcome, and all that took part."""

    def run(act, *overrides, report='{"events": 5, "samples": 5}', stop=False):
        (tmp_path / "report.json").write_text(report)
        agents, scorer, predicted = Agents(), Scorer(), []
        runner = JobRunner("job", [], lambda *_: None, launcher=agents, stop_code=ExitCode.RETRY)
        if stop:
            runner.drain()

        def predict(*_, **__):
            predicted.append(True)
            return act()

        monkeypatch.setattr(prediction, "predict", predict)
        ran = JobRun(runner, tmp_path, evaluator=scorer)
        outcome = RunThenPredict(ran, job(tmp_path, *overrides), lambda *_: None).run()
        return outcome, runner, agents, scorer, bool(predicted)

    return run


def cancelled():
    raise PredictionCancelled


def test_agents_hear_of_a_stop_while_they_predict_and_nothing_waits_for_scores(drained):
    outcome, runner, agents, scorer, predicted = drained(cancelled, CLUSTER)
    assert predicted and outcome.code == ExitCode.DRAINED
    assert runner.stopped and agents.heard[0] == ExitCode.RETRY, "they come again, and the prediction goes on"
    assert not scorer.waited


def test_a_stop_before_the_prediction_on_the_cluster_is_one_of_the_run(drained):
    _, runner, agents, scorer, predicted = drained(cancelled, CLUSTER, stop=True)
    assert (predicted, scorer.waited, runner.stopped, agents.heard[0]) == (False, False, True, ExitCode.RETRY)


def test_a_stop_while_scores_are_waited_for_is_followed_by_no_prediction(drained):
    outcome, runner, _, scorer, predicted = drained(lambda: MANIFEST)
    assert scorer.waited and outcome.code == ExitCode.DRAINED
    assert runner.stopped and not predicted


@pytest.mark.parametrize("on", ["here", "cluster"])
def test_a_model_that_has_learnt_nothing_predicts_nothing(drained, on):
    report = '{"events": 5, "samples": 0, "rejected": {"no label": 5}}'
    outcome, _, agents, scorer, predicted = drained(lambda: MANIFEST, f'predict.on="{on}"', report=report)
    assert outcome.code == ExitCode.NO_SAMPLES and outcome.reason.startswith("nothing was learned")
    assert not predicted and not scorer.waited
    assert on == "here" or agents.heard[0] == ExitCode.NO_SAMPLES
