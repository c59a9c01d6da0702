"""What a prediction's output promises: the same bytes whoever makes it, resumable, rows only read."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from headrace.codec import plain
from headrace.dataset.stream.errors import BadEvent
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.pserver.commit.commit_files import PartObjects
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import read_commit
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.worker import opened, run
from tests.contract.predict_world import ARROW, SPEC, content, make_world, rows_of
from tests.faults.test_statistics_killed import KNOWING
from tests.integration.stream_job import write_job

pytestmark = pytest.mark.timeout(120)

HANDED = {"columns": ["group", "a", "history", "d"], "outputs": ["ctr", "slot.b", "deep.1"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def alone(world):
    """The output of one trainer with the rows in it."""
    output = world.job.folder / "alone"
    world.predict(output, **HANDED)
    return output


@pytest.mark.parametrize(("trainers", "shards"), [(1, 1), (2, 2), (4, 1)])
def test_the_bytes_do_not_depend_on_trainers_and_shards(world, alone, tmp_path, trainers, shards):
    world.predict(tmp_path / "out", trainers=trainers, shards=shards, **HANDED)
    assert content(tmp_path / "out") == content(alone)


def test_an_output_is_parts_in_order_with_done_and_nothing_of_the_work(alone):
    assert sorted(content(alone)) == [
        "_DONE", "_SUCCESS", "_manifest.json", "_metrics.json", *(f"part-{number:06d}.parquet" for number in range(6))
    ]  # fmt: skip
    manifest = json.loads((alone / "_manifest.json").read_text())
    spans = [(part["partition"], part["begin"], part["end"]) for part in manifest["parts"].values()]
    assert spans == [
        ("part-0.txt", 0, 150), ("part-0.txt", 150, 300),
        ("part-1.txt", 0, 150), ("part-1.txt", 150, 293),
        ("part-2.txt", 0, 150), ("part-2.txt", 150, 286),
    ]  # fmt: skip
    assert manifest["samples"] == manifest["events"] == 879


def test_a_reader_of_parquet_takes_the_folder_for_one_table(alone, arrow, tmp_path):
    assert pq.read_table(alone).equals(rows_of(alone))
    assert ds.dataset(alone, format="parquet").to_table().equals(rows_of(alone))
    arrow.predict(tmp_path / "out")
    assert list((tmp_path / "out" / "_dead_letters").iterdir())
    assert pq.read_table(tmp_path / "out").num_rows == len(rows_of(tmp_path / "out")), "with dead letters, too"


def test_columns_are_the_events_own(world, alone):
    table = rows_of(alone)
    lines = [
        line.split() for part in range(3) for line in (world.job.folder / f"part-{part}.txt").read_text().splitlines()
    ]
    assert table["d"].to_pylist() == [[np.float32(words[1]), np.float32(words[2])] for words in lines]
    assert table["a"].to_pylist() == [[int(words[4])] for words in lines]
    assert table["label.ctr"].to_pylist() == [float(words[-3]) for words in lines]
    assert table["sample"].to_pylist()[:151] == [*range(150), 0], "without events to trace, they are counted by part"
    assert table["offset"].null_count == len(table)


def test_rows_are_those_of_the_version_and_zeros_where_there_are_none(alone):
    table = rows_of(alone)
    vectors = np.array(table["slot.b"].to_pylist(), np.float32)
    signs = np.array([int(row[0]) for row in rows_of(alone)["a"].to_pylist()])
    assert len(signs) == len(vectors)
    zero = ~vectors.any(axis=1)
    assert 0.3 < zero.mean() < 0.7, "every other sign has no row: it reads the default row, not an initial one"


@pytest.mark.parametrize("batch_size", [1, 7, 4096])
def test_predictions_hardly_depend_on_the_size_of_batches(world, alone, tmp_path, batch_size):
    few = {"input": {"paths": ["part-1.txt"]}, "batch_size": batch_size}
    world.predict(tmp_path / "out", **few, **HANDED)
    ours, theirs = rows_of(tmp_path / "out")["prediction.ctr"], rows_of(alone)["prediction.ctr"]
    assert np.abs(ours.to_numpy() - theirs.to_numpy()[300:593]).max() < 1e-6


def test_parts_that_are_there_are_kept_and_the_rest_is_made(world, alone, tmp_path):
    request = world.request(tmp_path / "out", **HANDED)
    plan, output = world.plan(request), PredictionOutput(tmp_path / "out")
    run(world.worker(request, 0, ()))
    times = {number: (tmp_path / "out" / f"part-{number:06d}.parquet").stat().st_mtime_ns for number in (0, 1, 4)}
    (output.work / "mark-000002.json").unlink()  # killed after the part, before its mark
    (tmp_path / "out" / "part-000003.parquet").write_bytes(b"PAR1")  # a disk that lost the end of it
    (tmp_path / "out" / "part-000005.parquet").unlink()
    run(world.worker(request, 0, ()))
    kept = {number: (tmp_path / "out" / f"part-{number:06d}.parquet").stat().st_mtime_ns for number in (0, 1, 4)}
    world.complete(request, plan)
    assert kept == times
    assert content(tmp_path / "out") == content(alone)


def test_nothing_of_the_commit_changes(world, tmp_path):
    before = content(world.commit)
    world.predict(tmp_path / "out")
    assert content(world.commit) == before


def test_a_worker_that_sees_no_folder_of_commits_fetches_the_one_of_its_launcher(world, alone, tmp_path):
    request, commit, objects = (
        world.request(tmp_path / "out", **HANDED),
        read_commit(world.commit),
        tmp_path / "objects",
    )
    uploaded = PartObjects(str(objects), 1).upload(commit.folder, commit.files, {}, Deadline.after(30))
    shards = [{**plain(part), "objects": uploaded} for part in commit.shards]
    manifest = {**plain(commit.manifest), "shards": shards, "objects": uploaded, "objects_at": str(objects)}
    told = {"commit": tmp_path / "on-the-head-alone", "uploaded": {"commit": commit.name, "manifest": manifest}}
    plan = world.plan(request)
    run(world.worker(request, 0, ()).model_copy(update=told))
    world.complete(request, plan)
    assert content(tmp_path / "out") == content(alone)


def test_rows_of_statistics_are_open_in_the_folder_that_is_removed_after_a_kill(tmp_path):
    knowing = make_world(tmp_path, KNOWING, num_lines=60)
    config = knowing.worker(request := knowing.request(tmp_path / "out"), 0, ())
    plan = knowing.plan(request)
    with ExitStack() as held:
        parts = held.enter_context(opened(config))
        parts.loader.submit(0, [plan.segments[0]])
        assert next(iter(parts.loader.batches(0))).batches
        assert {path.name for path in config.live.parent.iterdir()} == {"live", "plan.json"}
        assert [*(config.live / "statistics").iterdir()], "while it runs"


def test_labels_may_be_absent_and_are_then_null_and_not_measured(world, tmp_path):
    folder = tmp_path / "input"
    folder.mkdir()
    write_job(folder, num_parts=1, num_lines=100)
    lines = (folder / "part-0.txt").read_text().splitlines()
    unlabelled = [" ".join([*(words := line.split())[:-4], "0", *words[-2:]]) for line in lines[:40]]
    (folder / "part-0.txt").write_text("\n".join([*unlabelled, *lines[40:]]) + "\n")
    manifest = world.predict(tmp_path / "out", input={"paths": [str(folder / "part-0.txt")]})
    labels = rows_of(tmp_path / "out")["label.ctr"]
    assert manifest["rejected"] == {} and manifest["samples"] == 100
    assert labels[:40].null_count == 40 and labels[40:].null_count == 0
    assert json.loads((tmp_path / "out" / "_metrics.json").read_text())["tasks"]["ctr"]["count"] == 60


def test_a_bad_event_stops_where_the_spec_says_so(world, tmp_path):
    (tmp_path / "bad.txt").write_text("1 nothing\n")
    strict = replace(world, job=load_job(world.job.folder / "job.toml", ['pipe.on_bad_event="fail"']))
    with pytest.raises(BadEvent, match="on_bad_event"):
        strict.predict(tmp_path / "out", input={"paths": [str(tmp_path / "bad.txt")]})


def test_an_output_that_is_none_is_refused_with_those_that_are(world, tmp_path):
    with pytest.raises(SpecError, match=r"outputs: the model has no tensor 'deep.9'; did you mean 'deep.1'"):
        world.predict(tmp_path / "out", outputs=["ctr", "deep.9"])
    with pytest.raises(SpecError, match=r"columns.0: the job has no slot 'grup'; did you mean 'group'"):
        world.predict(tmp_path / "again", columns=["grup"])


@pytest.fixture(scope="module")
def arrow(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("arrow"), ARROW.replace("[pipe]", "[pipe]\nmax_bad_fraction = 0.2"))


def test_samples_of_an_event_are_numbered_and_bad_events_counted(arrow, tmp_path):
    manifest = arrow.predict(tmp_path / "out", columns=["b"])
    expected, bad = [], 0
    for part in range(3):
        for offset, line in enumerate((arrow.job.folder / f"part-{part}.txt").read_text().splitlines()):
            words = line.split()
            bad += words[4] == "7"
            num = 0 if words[4] == "7" else int(words[6]) % 3
            expected += [(f"part-{part}.txt", offset, sample) for sample in range(num)]
    table = rows_of(tmp_path / "out")
    found = zip(*(table[name].to_pylist() for name in ("partition", "offset", "sample")), strict=True)
    assert list(found) == expected
    assert manifest["rejected"] == {"generator error": bad} and bad > 10
    letters = [
        json.loads(line)
        for path in sorted((tmp_path / "out" / "_dead_letters").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert len(letters) == bad and {letter["reason"] for letter in letters} == {"generator error"}


def test_events_with_several_samples_give_the_same_bytes_on_four_trainers(arrow, tmp_path):
    for name, more in (("one", {}), ("four", {"trainers": 4, "shards": 2})):
        arrow.predict(tmp_path / name, **more)
    assert content(tmp_path / "one") == content(tmp_path / "four")


def test_metrics_are_those_of_all_parts_as_one_pass(world, alone, tmp_path):
    world.predict(tmp_path / "out", segment_events=1000)
    ours, theirs = (json.loads((folder / "_metrics.json").read_text()) for folder in (tmp_path / "out", alone))
    assert ours["tasks"] == theirs["tasks"], "however it is cut into parts"
    assert ours["tensors"]["loss"]["mean"] == pytest.approx(ours["tasks"]["ctr"]["logloss"], rel=1e-5)
    table = rows_of(alone)
    prediction, label = table["prediction.ctr"].to_numpy(), table["label.ctr"].to_numpy()
    order = np.argsort(prediction, kind="stable")
    ranks = np.empty(len(order))
    ranks[order] = np.arange(1, len(order) + 1)
    ones = label == 1
    auc = (ranks[ones].sum() - ones.sum() * (ones.sum() + 1) / 2) / (ones.sum() * (~ones).sum())
    assert ours["tasks"]["ctr"]["auc"] == pytest.approx(auc, abs=1e-3)
    assert sum(of["count"] for of in ours["tasks"]["ctr"]["slices"]["a"].values()) == 879


def test_a_learnt_default_row_is_read_by_keys_without_a_row(tmp_path):
    folder = tmp_path / "learnt"
    folder.mkdir()
    learnt = make_world(
        folder,
        SPEC.replace("dim = 4", 'dim = 4\ndefault_row = "learnt"\nadmission = [{ kind = "count", n = 2 }]'),
        num_lines=60,
    )
    learnt.predict(tmp_path / "out", outputs=["ctr", "slot.b"])
    vectors = {tuple(vector) for vector in rows_of(tmp_path / "out")["slot.b"].to_pylist()}
    counts = pa.array([str(v) for v in rows_of(tmp_path / "out")["slot.b"].to_pylist()]).value_counts()
    most = max(counts.to_pylist(), key=lambda each: each["counts"])
    assert len(vectors) > 20 and most["counts"] > 40
    assert not most["values"].startswith("[0.0"), "the learnt row, not zeros"
    assert np.isfinite(rows_of(tmp_path / "out")["prediction.ctr"].to_numpy()).all()


def test_too_many_bad_events_leave_no_done(tmp_path):
    folder = tmp_path / "world"
    folder.mkdir()
    bad = make_world(folder, ARROW, num_lines=450)
    with pytest.raises(Exception, match="max_bad_fraction"):
        bad.predict(tmp_path / "out")
    assert not (tmp_path / "out" / "_DONE").exists()
    shutil.rmtree(folder)
