"""Predictions as people make them: a job trains, and what its versions say of events is written by real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from headrace.config import validate
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.cli.main import cli
from headrace.service.predict.prediction import job_of, predict
from headrace.service.predict.worker_group import PredictionCancelled
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.exports.golden import PREDICTION
from headrace.trainer.predict.config import PredictionRequest
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.prediction_plan import OutputTaken
from tests.contract.predict_world import content, rows_of
from tests.fakes.agents import children_of
from tests.integration.running_job import RunningJob, runs
from tests.integration.stream_job import SPEC, headrace, write_job

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]  # the fixture runs whole jobs
EXPORTED = SPEC + "\n[exports.main]\ngolden = 64\n"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A job that has trained all of its lines, with an export at its end, and those lines once more as a holdout."""
    folder = tmp_path_factory.mktemp("ended")
    path = write_job(folder, spec=EXPORTED)
    run = headrace(path)
    assert run.code == 0, run.output
    return load_job(path)


@pytest.fixture(scope="module")
def export(ended):
    """The export of the job's last version."""
    (done,) = ended.store.glob("exports/main/small/t1/*/_DONE")
    return done.parent


def request_of(output: Path, **asked) -> PredictionRequest:
    raw = {"input": {"paths": ["part-*.txt"]}, "output": str(output), "segment_events": 100}
    return validate(PredictionRequest, {**raw, **asked})


def predicted(job, output, cancelled=None, **asked):
    return predict(job, request_of(output, **asked), lambda *_: None, cancelled or threading.Event())


def state_of(store):
    """When every file of a store was written, and its size."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in store.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def live(ended):
    """What the newest version says, by one trainer with the rows in it; nothing of the store is changed by it."""
    output, before = ended.folder / "live", state_of(ended.store)
    predicted(ended, output, columns=["a", "b", "history", "d"])
    assert state_of(ended.store) == before
    assert Commits(ended.store).holders() == {}, "no lease is left"
    return output


def test_predictions_are_the_golden_ones_of_the_same_versions_export(ended, export, live):
    golden = pq.read_table(export / "golden.parquet")
    by_inputs = {}
    for row in rows_of(live).to_pylist():
        inputs = (*row["d"], *row["a"], *row["b"], *row["history"])
        by_inputs[inputs] = row["prediction.ctr"]
    ours = [by_inputs[(*row["d"], *row["a"], *row["b"], *row["history"])] for row in golden.to_pylist()]
    assert len(ours) == 64
    assert np.abs(np.array(ours) - golden[PREDICTION + "ctr"].to_numpy()).max() < 1e-6


def test_these_are_no_progressive_predictions(ended, live):
    progressive = json.loads((ended.store / "report.json").read_text())["metrics"]["life"]["ctr"]
    after = PredictionOutput(live).metrics()["tasks"]["ctr"]
    assert after["count"] == progressive["count"]
    assert after["auc"] > progressive["auc"] + 0.05, "it has learnt from these very samples"


def test_labels_that_no_loss_takes_reject_their_events_where_they_are_measured(ended, tmp_path):
    """As in training: a click of 7 has no log loss, and that of the others would fall below 0."""
    lines = (ended.folder / "part-0.txt").read_text().splitlines()[:60]

    def with_click(line, click):
        return " ".join([*line.split()[:-3], click, *line.split()[-2:]])

    wrong = {3: "7", 41: "-1"}
    (tmp_path / "good.txt").write_text("".join(f"{line}\n" for at, line in enumerate(lines) if at not in wrong))
    mixed = tmp_path / "mixed.txt"
    mixed.write_text(
        "".join(f"{with_click(line, wrong[at]) if at in wrong else line}\n" for at, line in enumerate(lines))
    )
    good = predicted(ended, tmp_path / "good", input={"paths": [str(tmp_path / "good.txt")]})
    told = predicted(ended, tmp_path / "told", input={"paths": [str(mixed)]})
    assert (good["rejected"], told["rejected"]) == ({}, {"label out of range": 2})
    assert (
        PredictionOutput(tmp_path / "told").metrics()["tasks"] == PredictionOutput(tmp_path / "good").metrics()["tasks"]
    )
    assert rows_of(tmp_path / "told")["prediction.ctr"].equals(rows_of(tmp_path / "good")["prediction.ctr"])
    every = predicted(ended, tmp_path / "every", input={"paths": [str(mixed)]}, metrics=False)
    assert (every["samples"], every["rejected"]) == (60, {}), "nothing is measured"


def test_an_export_says_the_same_without_a_run_of_a_job(ended, export, live, tmp_path):
    raw = {name: value for name, value in ended.raw.items() if name not in ("store", "exports")}
    asked = request_of(tmp_path / "out", version=str(export), spec=raw, base=str(ended.folder), outputs=["ctr"])
    manifest = predict(None, asked, lambda *_: None, threading.Event())
    assert manifest["version"]["name"] == export.name
    assert rows_of(tmp_path / "out")["prediction.ctr"].equals(rows_of(live)["prediction.ctr"])
    with pytest.raises(SpecError, match="does not say how events are parsed"):
        job_of(request_of(tmp_path / "none", version=str(export)))


def test_a_number_names_the_export_of_a_version_whose_commit_is_pruned(ended, export, live, tmp_path):
    number, store = str(int(export.name.partition("-")[0])), tmp_path / "store"
    shutil.copytree(ended.store, store)
    for commit in Commits(store).names():
        shutil.rmtree(store / "commits" / commit)
    pruned = load_job(ended.folder / "job.toml", [f"store.path={store}"])
    manifest = predicted(pruned, tmp_path / "out", version=number)
    assert (manifest["version"]["name"], manifest["version"]["kind"]) == (export.name, "base")
    assert rows_of(tmp_path / "out")["prediction.ctr"].equals(rows_of(live)["prediction.ctr"])
    assert predicted(pruned, tmp_path / "out", version=number) == manifest, "a rerun reads the same"
    with pytest.raises(SpecError, match="no commit of version 309; .*nor is there a complete export of this version"):
        predicted(pruned, tmp_path / "none", version="309")


def test_an_export_of_other_slots_is_refused(ended, export, tmp_path):
    other = load_job(ended.folder / "job.toml", ['slots.2.pooling="sum"'])
    with pytest.raises(SpecError, match="its slots history differ from the job's"):
        predicted(other, tmp_path / "out", version=str(export))
    with pytest.raises(SpecError, match="made with other slots"):
        predicted(other, tmp_path / "again", version="live")


@pytest.mark.slow
def test_four_trainers_and_two_shards_write_the_same(ended, live, tmp_path):
    predicted(ended, tmp_path / "out", columns=["a", "b", "history", "d"], trainers=4, shards=2)
    assert content(tmp_path / "out") == content(live)


def test_the_commit_is_held_meanwhile_and_a_cancelled_one_leaves_its_parts(ended, live, tmp_path):
    cancelled, held, private, told = threading.Event(), [], tmp_path / "private", set()
    private.mkdir()

    def progress(share, text):
        held.append(Commits(ended.store).holders())
        told.update(path.name for path in private.rglob("*.json"))
        assert not list((tmp_path / "out").rglob("predictor-*.json")), (
            "what workers are told does not lie in the output"
        )
        if share:
            cancelled.set()

    asked = request_of(tmp_path / "out", columns=["a", "b", "history", "d"], segment_events=1, version="live")
    with pytest.raises(PredictionCancelled):
        predict(ended, asked, progress, cancelled, private=private)
    assert told == {"predictor-0.json"} and not list(private.iterdir())
    assert [name for holders in held for name in holders][-1:] == Commits(ended.store).names()[-1:]
    assert Commits(ended.store).holders() == {}
    assert list((tmp_path / "out").glob("part-*.parquet")) and not (tmp_path / "out" / "_DONE").exists()


def test_an_output_of_something_else_is_left_alone(ended, live, tmp_path):
    with pytest.raises(OutputTaken, match="holds another prediction"):
        predicted(ended, live, columns=["a"])
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SpecError, match="is not empty"):
        predicted(ended, tmp_path)
    again = predicted(ended, live, columns=["a", "b", "history", "d"])
    assert again["samples"] == 1179, "one that is done is not made again"


def test_what_a_worker_says_is_what_the_caller_hears(ended, tmp_path):
    with pytest.raises(SpecError, match="the model has no tensor 'ctrl'; did you mean 'ctr'"):
        predicted(ended, tmp_path / "out", outputs=["ctrl"])


def test_input_that_is_not_there_is_told_by_the_commands_option(ended, tmp_path):
    words = ["predict", ended.folder / "job.toml", "--input", "nope.txt", "--output", tmp_path / "out"]
    told = CliRunner().invoke(cli, [str(word) for word in words]).exception
    assert str(told).startswith("--input: no file matches '") and "nope.txt" in str(told)


@pytest.mark.slow
def test_a_killed_one_goes_on_where_it_was_and_writes_the_same_bytes(ended, tmp_path):
    job, segments = ended.folder / "job.toml", ["--segment-events", "20", "--set", "pipe.command=['sh', '-c', 'cat']"]
    command = [
        sys.executable,
        "-m",
        "headrace.service",
        "predict",
        str(job),
        "--input",
        str(ended.folder / "part-*.txt"),
    ]
    told = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    output, deadline = tmp_path / "killed", Deadline.after(100)
    process = subprocess.Popen([*command, "--output", str(output), *segments], **told, start_new_session=True)
    while len(list(output.glob("part-*.parquet"))) < 3:
        deadline.check("waiting for parts")
        time.sleep(0.01)
    workers = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(runs(pid) for pid in workers):
        deadline.check("waiting for its workers to go")
        time.sleep(0.02)
    there = {path.name: path.stat().st_mtime_ns for path in output.glob("part-*.parquet")}
    assert workers and 3 <= len(there) < 60, "killed in the middle"
    for folder in (output, tmp_path / "whole"):
        assert (
            subprocess.run([*command, "--output", str(folder), *segments], **told, timeout=110, check=False).returncode
            == 0
        )
    assert content(output) == content(tmp_path / "whole")
    kept = [name for name, at in there.items() if (output / name).stat().st_mtime_ns == at]
    assert len(kept) >= len(there) - 1, "all but one that may have lacked its mark"
    assert Commits(ended.store).holders() == {}


@pytest.mark.slow
def test_a_holdout_is_evaluated_and_nothing_is_left(ended, live):
    command = [
        sys.executable,
        "-m",
        "headrace.service",
        "evaluate",
        str(ended.folder / "job.toml"),
        "--json",
        "--version",
        "4",
    ]
    more = ["--input", str(ended.folder / "part-*.txt")]
    done = subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"] == PredictionOutput(live).metrics()


def test_the_worth_of_all_slots_is_that_of_one_shuffle_for_each(ended, live, tmp_path):
    def measured(name, **asked):
        predicted(ended, tmp_path / name, **asked)
        return PredictionOutput(tmp_path / name).metrics()

    found = measured("worth", shuffle=["d"], worth=True, trainers=2)
    alone = {slot: measured(slot, shuffle=["d", slot]) for slot in ("a", "history")}
    assert {slot: found["worth"][slot] for slot in alone} == {slot: each["tasks"] for slot, each in alone.items()}
    assert {*found["worth"]} == {"a", "b", "history"}, "each slot that the model gets and that is not shuffled already"
    assert found.pop("worth")["a"] != found["tasks"], "it is shuffled"
    assert found == measured("without", shuffle=["d"])


@pytest.mark.slow
def test_beside_training_a_pinned_version_is_read_and_training_ends_alike(tmp_path):
    write_job(tmp_path, num_lines=4000)
    job = RunningJob(tmp_path / "job.toml", tmp_path, "commit.every='200ms'", "commit.keep=1")
    try:
        job.until_events(400)
        loaded = load_job(tmp_path / "job.toml", [f"store.path={job.store}"])
        deadline = Deadline.after(60)
        while not Commits(job.store).names():
            deadline.check("waiting for a commit")
            time.sleep(0.02)
        manifest = predicted(loaded, tmp_path / "out")
        assert manifest["samples"] == 11_979
        code, said = job.end(120)
        assert code == 0, said
    finally:
        job.kill()
    again = headrace(tmp_path / "job.toml", store="again")
    assert job.report["digest"] == again.report["digest"]


NEWS = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "news"
DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "ebnerd" / "impressions.jsonl.gz"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the extract of EB-NeRD is not here")
def test_the_news_examples_predictions_are_the_golden_ones_of_its_export(tmp_path):
    for name in ("job.toml", "generator.py"):
        shutil.copy(NEWS / name, tmp_path / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "impressions.jsonl.gz").symlink_to(DATA)
    settings = ["exports.main={golden=256}"]
    run = headrace(tmp_path / "job.toml", *settings, timeout_s=280)
    assert run.code == 0, run.output
    job = load_job(tmp_path / "job.toml", [*settings, "store.path=store"])
    asked = {"input": {"paths": ["data/impressions.jsonl.gz"]}, "segment_events": 20_000}
    manifest = predicted(job, tmp_path / "out", trainers=2, outputs=["ctr", "slot.article"], **asked)
    assert (manifest["events"], manifest["samples"]) == (50_080, 583_054)
    table = rows_of(tmp_path / "out")
    assert table.schema.field("slot.article").type.list_size == 8
    (done,) = job.store.glob("exports/main/news/t1/*/_DONE")
    golden = pq.read_table(done.parent / "golden.parquet")[PREDICTION + "ctr"].to_numpy()
    assert np.abs(table["prediction.ctr"].to_numpy()[-256:] - golden).max() < 1e-6
