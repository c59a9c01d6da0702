"""Pieces of prediction jobs: requests, batches of one size, columns, plans, parts, pace, the model's tensors."""

import json
import threading
import tomllib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from headrace.config import validate
from headrace.dataset.formats.arrow_columns import AnswerReader
from headrace.dataset.formats.multislot_parser import MultiSlotParser, parse_line_reference
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.kinds import AnySource
from headrace.dataset.spec.config import DenseSlot, EventTime, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Partition, Segment
from headrace.errors import BadInput, SpecError
from headrace.pserver.config import TableSection
from headrace.service.cli.prediction_commands import input_of, new_place, place_of
from headrace.service.predict.prediction import predict
from headrace.service.predict.worker_group import PredictionFailed, WorkerDied, error_of
from headrace.service.spec.job import JobFile
from headrace.trainer.config import MetricsSection, TaskSection
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.metrics.tensor_totals import TensorTotal
from headrace.trainer.predict import prediction_plan as planning
from headrace.trainer.predict.background import CpuLimit
from headrace.trainer.predict.config import InputSection, KafkaInput, PredictionRequest
from headrace.trainer.predict.fixed_batches import FixedBatches, filled_up, no_samples
from headrace.trainer.predict.metric_inputs import compute_metrics, metric_table, targets_of
from headrace.trainer.predict.output_columns import OutputColumns, SampleNumbers
from headrace.trainer.predict.output_files import PredictionOutput, writing_part
from headrace.trainer.predict.output_place import open_place
from headrace.trainer.predict.prediction_plan import (
    PredictionPlan,
    fingerprint_of,
    names_commit,
    segments_of,
    source_config,
    with_absolute_paths,
)
from headrace.trainer.predict.predictor import Predictor
from headrace.trainer.train.tracing import FrozenModel
from tests.integration.stream_job import SPEC

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = (
    SparseSlot(name="user"),
    SparseSlot(name="tags", pooling="mean", weighted=True),
    SparseSlot(name="seen", pooling="none", max_len=4),
    DenseSlot(kind="dense", name="age", size=2),
    MetaSlot(kind="meta", name="click"),
    MetaSlot(kind="meta", name="page", type="string"),
)
SCHEMA = Schema.of(ENTRIES)


def request(**asked):
    return validate(PredictionRequest, {"input": {"paths": ["*.txt"]}, "output": "out", **asked})


def spec(text=SPEC):
    return validate(JobFile, tomllib.loads(text))


def samples_of(rng, num):
    def ragged(most, weighted=False):
        lengths = rng.integers(0, most + 1, num)
        total = int(lengths.sum())
        weights = rng.random(total).astype(np.float32) if weighted else None
        return Ragged(rng.integers(0, 30, total).astype(np.uint64), np.concatenate([[0], np.cumsum(lengths)]), weights)

    return Samples(
        {"user": ragged(1), "tags": ragged(3, weighted=True), "seen": ragged(4)},
        {"age": rng.random((num, 2), np.float32)},
        {"click": rng.integers(0, 2, num).astype(np.float32), "page": np.array([f"p{n}" for n in range(num)], object)},
        np.sort(rng.integers(0, max(1, num), num)),
        np.full(num, np.nan),
    )


# -- requests


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"input": {}}, "needs either paths"),
        ({"input": {"paths": ["a"], "kafka": {"topic": "t"}}}, "needs either paths"),
        ({"trainers": 2, "shards": 0}, "need shards = 1 or more"),
        ({"share": 1.5}, "share"),
        ({"colums": ["a"]}, "did you mean 'columns'"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_its_key(asked, words):
    with pytest.raises(SpecError, match=words):
        request(**asked)


def test_rows_are_in_the_one_trainer_unless_there_are_more():
    assert [request(trainers=n).num_shards for n in (1, 2, 4)] == [0, 1, 1]
    assert request(shards=3).num_shards == 3


def test_what_is_a_commit_and_what_an_address():
    commits = ["live", "12", "t1-0000000012-g3"]
    assert all(names_commit(text) for text in commits)
    assert not any(names_commit(text) for text in ["exports/main", "s3://bucket/0000000012-base", "/12", "9" * 5000])


def test_the_input_of_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert input_of(["day/*.gz", "/b"], None) == {"paths": [str(tmp_path / "day/*.gz"), "/b"]}
    assert input_of([], "clicks") == {"kafka": {"topic": "clicks"}}
    assert input_of([], "clicks:0=5-9,12=0-3") == {"kafka": {"topic": "clicks", "ranges": {"0": [5, 9], "12": [0, 3]}}}
    for paths, topic in (([], None), (["a"], "t"), ([], "t:0=9"), ([], "t:x=1-2")):
        with pytest.raises(SpecError):
            input_of(paths, topic)


def test_without_a_job_the_request_must_bring_its_spec():
    with pytest.raises(SpecError, match="does not say how events are parsed"):
        predict(None, request(version="/somewhere"), lambda *_: None, threading.Event())


# -- batches


@given(st.integers(0, 40), st.integers(1, 16))
def test_batches_have_one_size_and_hold_every_sample_once(num, size):
    samples = samples_of(np.random.default_rng(num), num)
    block = FixedBatches(tables_of(SCHEMA, {"default": TableSection(dim=3)}, None), size).block(samples)
    assert [len(batch.samples) for batch in block.batches] == [size] * -(-num // size)
    assert sum(batch.num_samples for batch in block.batches) == num
    for number, batch in enumerate(block.batches):
        ours = samples.slice(number * size, number * size + batch.num_samples)
        theirs = batch.samples.slice(0, batch.num_samples)
        for name, column in ours.sparse.items():
            assert column.values_N.tolist() == theirs.sparse[name].values_N.tolist()
            assert column.offset_B1.tolist() == theirs.sparse[name].offset_B1.tolist()
        assert theirs.meta["page"].tolist() == ours.meta["page"].tolist()
        empty = batch.samples.slice(batch.num_samples, size)
        assert not any(len(column.values_N) for column in empty.sparse.values())


def test_no_samples_can_be_filled_up_and_looked_up():
    filled = filled_up(no_samples(SCHEMA), 5)
    assert len(filled) == 5 and filled.dense["age"].shape == (5, 2)
    (batch,) = FixedBatches(tables_of(SCHEMA, {"default": TableSection(dim=3)}, None), 5).block(filled).batches
    assert len(batch.keys["default"].keys_U) == 0


# -- columns


def numbers_reference(events):
    return [events[:place].count(event) for place, event in enumerate(events)]


@given(st.lists(st.integers(0, 5)).map(sorted), st.lists(st.integers(0, 12)))
def test_samples_are_numbered_within_their_events_however_blocks_are_cut(events, cuts):
    numbering, found = SampleNumbers(traced=True), []
    bounds = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
    for begin, end in zip(bounds, bounds[1:], strict=False):
        found += numbering.number(np.array(events[begin:end], np.int64)).tolist()
    assert found == numbers_reference(events)


def test_two_columns_of_one_name_are_refused():
    job = spec()
    columns = OutputColumns.of(request(columns=["a", "a"], outputs=["ctr", "slot.a"]), job, Schema.of(job.slots))
    assert columns.names()[-3:] == ["a", "prediction.ctr", "slot.a"]
    with pytest.raises(SpecError, match="two columns would be named 'a'"):
        OutputColumns.of(request(columns=["a"], outputs=["ctr", "a"]), job, Schema.of(job.slots))


def test_a_masked_or_absent_label_is_null_and_weighs_nothing():
    samples = samples_of(np.random.default_rng(1), 4)
    samples.meta["click"][:] = [1, 0, np.nan, 1]
    samples.meta["page"] = np.array([1, 0, 1, 1], np.float32)
    tasks = (TaskSection(name="ctr", label="click", mask="page"),)
    label_B, weight_B = targets_of(samples, tasks, None)
    assert label_B["ctr"].tolist() == [1, 0, 0, 1] and weight_B["ctr"].tolist() == [1, 0, 0, 1]
    columns = OutputColumns(SCHEMA, tasks, (), ("ctr",), True)
    table = columns.table(Segment("f", 0, 0, 9), samples, np.zeros(4, np.int64), {"ctr": np.zeros(4, np.float32)})
    assert table["label.ctr"].to_pylist() == [1, None, None, 1]


# -- plans


def test_the_fingerprint_is_of_what_the_output_depends_on():
    job, asked = spec(), request()
    same = [request(trainers=4), request(output="other"), request(share=0.1), request(shards=2)]
    other = [request(columns=["a"]), request(batch_size=7), request(version="3"), request(metrics=False)]
    assert {fingerprint_of(each, job) for each in same} == {fingerprint_of(asked, job)}
    found = {fingerprint_of(each, job) for each in (asked, *other)} | {fingerprint_of(asked, spec(SPEC + "\n"))}
    changed = [
        SPEC.replace('["cat"]', '["tac"]'),
        SPEC.replace("hidden = [8]", "hidden = [4]"),
        SPEC.replace('"mean"', '"sum"'),
    ]
    assert len(found | {fingerprint_of(asked, spec(each)) for each in changed}) == 8
    assert fingerprint_of(asked, spec(SPEC.replace("lr", "lr"))) == fingerprint_of(asked, job)


def test_segments_are_cut_by_position_alone(tmp_path):
    for name, lines in (("a.txt", 5), ("b.txt", 0), ("c.txt", 4)):
        (tmp_path / name).write_text("x\n" * lines)
    cut = segments_of(request().input, spec(), tmp_path, 2)
    assert [(each.partition, each.begin, each.end) for each in cut] == [
        ("a.txt", 0, 2), ("a.txt", 2, 4), ("a.txt", 4, 5), ("c.txt", 0, 2), ("c.txt", 2, 4)
    ]  # fmt: skip
    plan = PredictionPlan("f", {"commit": "c"}, cut)
    place = open_place(tmp_path)
    place.work.mkdir()
    plan.write(place)
    PredictionPlan("g", {"commit": "d"}, cut).write(place)
    assert PredictionPlan.read(place) == plan, "the first one stays"
    PredictionPlan.forget(place)
    assert PredictionPlan.read(place) is None


def test_an_input_is_cut_into_no_more_parts_than_can_be_planned_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.trainer.predict.prediction_plan.MAX_PARTS", 4)
    (tmp_path / "a.txt").write_text("x\n" * 8)
    assert len(segments_of(request().input, spec(), tmp_path, 2)) == 4
    with pytest.raises(SpecError, match="^segment_events: 1 gives 8 parts of this input; the most is 4"):
        segments_of(request().input, spec(), tmp_path, 1)


def test_input_that_is_not_there_is_named_as_the_request_names_it(tmp_path):
    (tmp_path / "a.txt").write_text("x\n")
    asked = request(input={"paths": ["a.txt", "nope.txt"]})
    with pytest.raises(SpecError, match=r"^input\.paths\.1: no file matches 'nope\.txt'") as told:
        segments_of(asked.input, spec(), tmp_path, 2)
    assert told.value.path == "input.paths.1"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"paths": ["*.txt"], "root": "az://c/p"}, "input.root: names no storage account"),
        ({"paths": ["s3://b/x.txt"]}, 'input.paths: 0, "s3://b/x.txt", is an address, not a path'),
        ({"paths": ["/x/*.txt"], "root": "gs://b/p"}, "input: paths are relative to root"),
        ({"paths": ["a.zst"]}, 'input: paths.0, "a.zst", has no lines'),
    ],
)
def test_files_that_no_source_reads_are_named_as_the_request_names_them(asked, said):
    with pytest.raises(SpecError) as told:
        source_config(request(input=asked).input, spec())
    assert str(told.value).startswith(said)


class Topic:
    """A topic of two partitions, of which 5 to 20 are retained."""

    def partitions(self, _deadline):
        return [Partition(f"clicks/{number}", number, 5, 5, 20, True, "id") for number in range(2)]

    def close(self):
        pass


def test_ranges_of_a_topic_are_taken_as_asked_and_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setattr(planning, "open_input", lambda *_: Topic())

    def cut(ranges):
        asked = request(input={"kafka": {"topic": "clicks", **({} if ranges is None else {"ranges": ranges})}})
        return [(each.partition, each.begin, each.end) for each in segments_of(asked.input, spec(), tmp_path, 10)]

    assert cut({"1": [7, 19]}) == [("clicks/1", 7, 17), ("clicks/1", 17, 19)]
    assert cut(None) == [("clicks/0", 5, 15), ("clicks/0", 15, 20), ("clicks/1", 5, 15), ("clicks/1", 15, 20)]
    with pytest.raises(BadInput, match="the request names offsets 3 to 9; it has 5 to 20"):
        cut({"0": [3, 9]})
    with pytest.raises(SpecError, match="no partition 2"):
        cut({"2": [5, 9]})


def test_events_are_read_as_the_jobs_own():
    job = spec(SPEC.replace('paths = ["part-*.txt"]', 'paths = ["x"]\nevent_time = { slot = "click" }\nfollow = true'))
    files = source_config(request().input, job)
    assert files.event_time.slot == "click" and not files.follow
    kafka = request(input={"kafka": {"topic": "t", "options": {"bootstrap_servers": "b:1"}}})
    assert isinstance(config := source_config(kafka.input, job), KafkaSource)
    assert config.end == "latest" and config.event_time.slot == "click"
    with pytest.raises(SpecError, match="bootstrap_servers"):
        source_config(request(input={"kafka": {"topic": "t"}}).input, job)


# -- parts


def a_part(output, number, values):
    table = pa.table({"x": values})
    with writing_part(output, number, table.schema, table.schema) as written:
        written.add(table, table)
    return written


FACTS = {"num_events": 3, "num_samples": 3, "num_judged": 3}


def test_a_part_counts_once_its_mark_is_there(tmp_path):
    output = PredictionOutput(tmp_path)
    output.work.mkdir()
    written = a_part(output, 0, [1, 2, 3])
    assert output.mark(0) is None and not (tmp_path / "part-000000.parquet").exists()
    output.finish(0, written, FACTS)
    assert output.mark(0).num_samples == 3 and output.num_finished() == 1
    (tmp_path / "part-000000.parquet").write_bytes(b"short")
    assert output.mark(0) is None, "its file is not what it was"


def test_a_part_that_failed_leaves_nothing(tmp_path):
    output = PredictionOutput(tmp_path)
    output.work.mkdir()
    schema = pa.schema({"x": pa.int64()})
    with pytest.raises(KeyError), writing_part(output, 0, schema, schema):
        raise KeyError
    assert list(output.work.iterdir()) == []


def test_done_is_last_and_the_work_goes(tmp_path):
    output = PredictionOutput(tmp_path)
    output.work.mkdir()
    assert output.manifest() is None
    output.put("_manifest.json", {"half": True})
    assert output.manifest() is None, "without DONE there is nothing"
    output.end({"whole": True})
    assert output.manifest() == {"whole": True} and not output.work.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_DONE", "_SUCCESS", "_manifest.json"]


def test_an_output_of_an_older_headrace_is_read(tmp_path):
    output = PredictionOutput(tmp_path)
    (tmp_path / "manifest.json").write_text('{"whole": true}')
    (tmp_path / "metrics.json").write_text('{"tasks": {}}')
    assert output.manifest() is None, "without DONE there is nothing"
    (tmp_path / "DONE").touch()
    assert output.manifest() == {"whole": True} and output.metrics() == {"tasks": {}}


def test_an_output_that_an_older_headrace_began_goes_on_under_the_new_names(tmp_path):
    output = PredictionOutput(tmp_path)
    output.work.mkdir()
    (tmp_path / "dead_letters").mkdir()
    (tmp_path / "dead_letters" / "letter").touch()
    (tmp_path / "metrics.json").write_text("{}")
    output.rename_old()
    output.end({"whole": True})
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["_DONE", "_SUCCESS", "_dead_letters/letter", "_manifest.json", "_metrics.json"]


# -- metrics


@settings(max_examples=12)
@given(st.lists(st.integers(0, 30), max_size=3))
def test_metrics_do_not_depend_on_how_samples_are_cut_into_parts(tmp_path_factory, cuts):
    rng = np.random.default_rng(3)
    tasks, config = (TaskSection(name="ctr", label="y"),), MetricsSection(gauc_by="g", slices=("s",))
    prediction, label = rng.random(30, np.float32), rng.integers(0, 2, 30).astype(np.float32)
    group, slices = rng.integers(0, 6, 30).astype(np.uint64), np.array([f"v{n % 3}" for n in range(30)], object)

    def over(bounds):
        folder, files, totals = tmp_path_factory.mktemp("parts"), [], []
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            cut = slice(begin, end)
            weight = np.ones(end - begin, np.float32)
            table = metric_table(
                tasks, {"ctr": prediction[cut]}, {"ctr": label[cut]}, {"ctr": weight}, group[cut], {"s": slices[cut]}
            )
            files.append(folder / str(number))
            with pa.ipc.new_file(str(files[-1]), table.schema) as writer:
                writer.write_table(table)
            total = TensorTotal()
            total.add(prediction[cut])
            totals.append(json.loads(json.dumps({"p": total.to_json()})))
        return compute_metrics(config, tasks, map(nullcontext, files), totals, lambda: None)

    whole = over([0, 30])
    assert over(sorted([0, *cuts, 30])) == whole
    assert whole["tasks"]["ctr"]["count"] == 30 and whole["tasks"]["ctr"]["gauc"] is not None
    assert whole["tensors"]["p"]["sum"] == pytest.approx(float(prediction.sum()), rel=1e-6)
    assert set(whole["tasks"]["ctr"]["slices"]["s"]) == {"other", "v0", "v1", "v2"}


# -- pace


def test_a_process_rests_for_what_it_worked_beyond_its_share():
    clock = {"worked": 0.0, "now": 0.0}
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        clock["now"] += seconds

    pace = CpuLimit(0.5, lambda: clock["worked"], lambda: clock["now"], sleep)
    clock["worked"], clock["now"] = 1.0, 1.0
    pace.rest()
    assert slept == [1.0], "one second of work is half a core's for two"
    clock["now"] += 100.0
    pace.rest()
    clock["worked"], clock["now"] = clock["worked"] + 1.0, clock["now"] + 1.0
    pace.rest()
    assert slept == [1.0, 1.0], "what was not used is not saved up"


# -- how workers end


def test_the_end_of_a_worker_is_told_as_what_it_is():
    tail = ["12:00:01 INFO  predictor-0: part 3", "error: slots.0: is wrong", "  and this too"]
    wrong = error_of("predictor-0", 2, tail)
    assert isinstance(wrong, SpecError) and str(wrong) == "slots.0: is wrong\n  and this too"
    assert isinstance(error_of("predictor-0", 1, tail), PredictionFailed)
    killed = error_of("shard-1", -9, tail[:1])
    assert isinstance(killed, WorkerDied) and "shard-1 ended first: killed by SIGKILL" in str(killed)


# -- the model


TWO_TOWERS = """
import torch
from torch import nn


class TwoTowers(nn.Module):
    def __init__(self, shape, settings):
        super().__init__()
        self.user, self.tags, self.drop = nn.Linear(3, 2), nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, inputs):
        user, tags = self.user(inputs.vectors["user"]), self.tags(inputs.vectors["tags"])
        return {"ctr": self.drop((user * tags).sum(1)), "user_vector": user, "scale": torch.ones(())}
"""


@pytest.fixture
def towers(tmp_path):
    """A model of a user's own with two towers, and rows for its keys."""
    (tmp_path / "towers_of_test.py").write_text(TWO_TOWERS)
    text = SPEC.split("[[slots]]")[0] + "\n".join(
        [
            '[[slots]]\nnames = ["user", "tags"]\npooling = "mean"',
            '[[slots]]\nname = "click"\nkind = "meta"',
            '[[tasks]]\nname = "ctr"\nlabel = "click"',
            "[tables.default]\ndim = 3\nfirst_order = false",
            '[model]\nclass = "towers_of_test:TwoTowers"\n[store]\npath = "store"',
        ]
    )
    job = spec(text)
    schema, rng = Schema.of(job.slots), np.random.default_rng(2)
    samples = Samples(
        {name: Ragged(rng.integers(0, 9, 7).astype(np.uint64), np.arange(8)) for name in ("user", "tags")},
        {},
        {"click": np.ones(7, np.float32)},
        np.arange(7),
        np.full(7, np.nan),
    )
    batches = FixedBatches(tables_of(schema, job.tables, None), 16)
    (batch,) = batches.block(samples).batches
    rows = {"default": rng.normal(size=(len(batch.keys["default"].keys_U), 3)).astype(np.float32)}
    return job, schema, tmp_path, batches, batch, rows


def test_any_tensor_of_the_model_has_a_name(towers):
    job, schema, folder, batches, batch, rows = towers
    predictor = Predictor(job, schema, folder, ("ctr", "user_vector", "slot.tags", "tags", "user"))
    shapes = {name: values.shape for name, values in predictor.try_out(batches, 16).items()}
    assert shapes == {"user_vector": (16, 2), "slot.tags": (16, 3), "tags": (16, 2), "user": (16, 2)}
    told = predictor.predict(batch, rows)
    assert told.prediction_B["ctr"].shape == (7,) and told.tensors["user_vector"].shape == (7, 2)
    assert np.array_equal(told.tensors["user"], told.tensors["user_vector"]), "a module gives what it returned"
    logit = (told.tensors["user"] * told.tensors["tags"]).sum(1)
    np.testing.assert_allclose(told.prediction_B["ctr"], 1 / (1 + np.exp(-logit)), atol=1e-6, err_msg="no dropout")
    assert set(told.measured) == {"user_vector", "scale", "loss"}
    np.testing.assert_allclose(told.measured["loss"], np.log1p(np.exp(-logit)), atol=1e-6)


@pytest.mark.parametrize("name", ["scale", "slot.click", "drop.0", "nothing"])
def test_a_name_that_is_no_value_of_a_sample_is_refused(towers, name):
    job, schema, folder, batches, _, _ = towers
    with pytest.raises(SpecError, match="outputs: the model has no tensor"):
        Predictor(job, schema, folder, (name,)).try_out(batches, 16)


def test_each_name_that_could_be_meant_is_told_once(towers):
    job, schema, folder, batches, _, _ = towers
    with pytest.raises(SpecError, match="known: ") as told:
        Predictor(job, schema, folder, ("zzz",)).try_out(batches, 16)
    known = str(told.value).partition("known: ")[2].split(", ")
    assert "ctr" in known and "slot.tags" in known
    assert len(known) == len(set(known)), known


def test_predictions_are_those_of_the_frozen_model_that_exports_have(towers):
    job, schema, folder, _, batch, rows = towers
    predictor = Predictor(job, schema, folder, ())
    model = predictor._model  # noqa: SLF001
    inputs = predictor._inputs(batch, rows)  # noqa: SLF001
    wanted = FrozenModel(model, job.tasks).predict(inputs)["ctr"][:7]
    assert np.array_equal(predictor.predict(batch, rows).prediction_B["ctr"], wanted)


# -- labels that may be absent


LABELLED = Schema.of((SparseSlot(name="user"), MetaSlot(kind="meta", name="click")))


def test_a_text_label_may_always_be_absent_where_that_is_said():
    lines = [b"1 5 1 1", b"1 5 0", b"1 5 1 nan"]
    strict, bad = MultiSlotParser(LABELLED).parse(b"\n".join(lines) + b"\n")
    assert len(strict) == 1 and [each.line for each in bad] == [2, 3]
    samples, bad = MultiSlotParser(LABELLED, {"click": ""}).parse(b"\n".join(lines) + b"\n")
    assert not bad and np.isnan(samples.meta["click"]).tolist() == [False, True, True]
    for line, value in zip(lines, samples.meta["click"], strict=True):
        told = parse_line_reference(line, LABELLED, {"click": ""})
        assert isinstance(told, dict) and np.array_equal(told["click"], value, equal_nan=True)


def test_an_answers_label_may_always_be_absent_where_that_is_said():
    columns = {
        "event": pa.array([0, 1], pa.int32()),
        "error": pa.array([None, None], pa.string()),
        "user": pa.array([[5], [6]], pa.list_(pa.uint64())),
        "click": pa.array([[1.0], [None]], pa.list_(pa.float32())).flatten(),
    }
    answer = pa.RecordBatch.from_pydict(columns)
    position_E, time_s_E = np.array([7, 8]), np.full(2, np.nan)
    strict, bad = AnswerReader(LABELLED, {}).read(answer, position_E, time_s_E)
    assert strict.event_B.tolist() == [7] and len(bad) == 1
    samples, bad = AnswerReader(LABELLED, {"click": ""}).read(answer, position_E, time_s_E)
    assert samples.event_B.tolist() == [7, 8] and not bad
    assert np.isnan(samples.meta["click"]).tolist() == [False, True]


def test_an_output_is_a_folder_or_an_address_and_relative_folders_start_at_the_job(tmp_path):
    raw = {"input": {"paths": ["a"]}}
    for output, expected in (
        ("out", str(tmp_path / "out")),
        ("/out", "/out"),
        ("s3://bucket/out?region=us-east-1", "s3://bucket/out?region=us-east-1"),
    ):
        request = validate(PredictionRequest, {**raw, "output": output})
        assert with_absolute_paths(request, tmp_path).output == expected
    with pytest.raises(SpecError, match="output: .*ftp:// is not supported; write .s3://bucket/prefix"):
        validate(PredictionRequest, {**raw, "output": "ftp://host/out"})
    assert place_of("s3://bucket/out", here=True) == place_of("s3://bucket/out", here=False) == "s3://bucket/out"
    assert place_of("/out", here=False) == "/out"
    with pytest.raises(SpecError, match="--output: .*names no bucket"):
        place_of("s3:///out", here=True)


@pytest.mark.parametrize("name", ["parts", "a#b", "a?b=c", "a%20b;c"])
def test_parts_of_an_evaluation_are_within_their_place(tmp_path, name):
    with new_place(str(tmp_path / name)) as output:
        assert Path(output).parent == tmp_path / name
        Path(output).mkdir(parents=True)
    assert not list((tmp_path / name).iterdir()), "removed at the end"


def test_files_of_an_object_store_are_named_by_root_and_other_requests_keep_their_fingerprint():
    assert request().what()["input"] == {"paths": [*request().input.paths], "kafka": None}
    given = input_of(["day-8/*.txt"], None, "s3://bucket/events")
    asked = validate(PredictionRequest, {"input": given, "output": "out"})
    source = source_config(asked.input, spec())
    assert (source.root, source.paths) == ("s3://bucket/events", ("day-8/*.txt",))
    assert asked.what()["input"]["root"] == "s3://bucket/events"
    with pytest.raises(SpecError, match="--input: 's3://bucket/x': give the address as --root"):
        input_of(["s3://bucket/x"], None)
    with pytest.raises(SpecError, match="^--root: is where --input begins; a topic has none$"):
        input_of([], "clicks", "s3://bucket/events")
    with pytest.raises(SpecError, match="root is where paths begin"):
        validate(PredictionRequest, {"input": {"kafka": {"topic": "t"}, "root": "s3://b/x"}, "output": "out"})


def test_input_is_read_like_the_source_of_its_kind_without_its_bounds_of_time():
    time = {"field": "ms", "unit": "ms"}
    until = {"event_time": time, "until": "2024-05-01T00:00:00+00:00"}
    sources = {
        "old": {"kind": "files", "paths": ["*.parquet"], "format": "parquet", "columns": ["ms"], **until},
        "lines": {"kind": "files", "paths": ["*.txt"], "event_time": {"field": "s"}, "max_event_bytes": 77},
    }
    job = spec()
    job = job.model_copy(update={"sources": {n: TypeAdapter(AnySource).validate_python(s) for n, s in sources.items()}})
    parquet = source_config(InputSection(paths=("new/*.parquet",)), job)
    assert (parquet.format, parquet.columns, parquet.until) == ("parquet", ("ms",), None)
    assert parquet.event_time == EventTime(**time)
    lines = source_config(InputSection(paths=("new/*.jsonl",)), job)
    assert (lines.format, lines.columns, lines.max_event_bytes) == ("lines", (), 77)


def test_input_leaves_out_the_values_that_the_source_of_its_kind_leaves_out():
    asked = InputSection(kafka=KafkaInput(topic="u")), InputSection(paths=("new/*.jsonl",))
    found, fingerprints = [], set()
    for null, blank in (("skip", "skip"), ("reject", "read")):
        sources = {
            "k": {"kind": "kafka", "topics": ["t"], "options": {"bootstrap_servers": "h:1"}, "null_values": null},
            "f": {"kind": "files", "paths": ["*.txt"], "blank_lines": blank},
        }
        read = {n: TypeAdapter(AnySource).validate_python(s) for n, s in sources.items()}
        job = spec().model_copy(update={"sources": read})
        kafka, lines = (source_config(each, job) for each in asked)
        found.append((kafka.null_values, lines.blank_lines))
        fingerprints |= {fingerprint_of(request(input=each.model_dump(exclude_none=True)), job) for each in asked}
    assert found == [("skip", "skip"), ("reject", "read")] and len(fingerprints) == 4
