"""What an export says of the model as a whole, with whatever rank 0 could prepare."""

import json
from contextlib import contextmanager

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from headrace.trainer.checkpoint.commits import CommitDamaged
from headrace.trainer.exports.golden import as_bytes, from_bytes
from headrace.trainer.exports.model_files import LOST, ServedRows, write_model

WEIGHTS = {1: [2.0], 2: [3.0]}
MODEL = {
    "slots": [{"name": "a", "kind": "sparse", "table": "t", "group": 0, "pooling": "sum"}],
    "tables": {"t": {"exported": True, "default_row": "zeros"}},
    "tasks": [{"name": "click", "output": "click"}],
}


@pytest.fixture
def commit(tmp_path):
    save_file(
        {"model.w": np.float32([[0.125]]), "optimizer.m": np.zeros(1, np.float32)}, tmp_path / "dense.safetensors"
    )
    return tmp_path


def template():
    """click = a x w."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "model.w"], ["y"]), helper.make_node("Squeeze", ["y", "axes"], ["click"])],
        "small",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["B", 1])],
        [helper.make_tensor_value_info("click", TensorProto.FLOAT, ["B"])],
        [
            numpy_helper.from_array(np.float32([[0.0]]), "model.w"),
            numpy_helper.from_array(np.array([1], np.int64), "axes"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(made)
    return made.SerializeToString()


def golden(predictions):
    """Samples with the signs 1, then 1 and 2, then 3."""
    signs = pa.array([[1], [1, 2], [3]], pa.list_(pa.uint64()))
    return as_bytes(pa.table({"a": signs, "prediction.click": pa.array(predictions, pa.float32())}))


def written(commit, served=None, **stage):
    """The files written and how the model came out."""
    folder, files = commit / "stage", {}
    folder.mkdir()
    for name, content in stage.items():
        content = json.dumps(content).encode() if isinstance(content, dict) else content
        (folder / {"model": "model.json", "golden": "golden.parquet", "why": "why.json"}.get(name, name)).write_bytes(
            content
        )
    if "template" in stage:
        (folder / "template").rename(folder / "onnx-template.onnx")

    @contextmanager
    def open_file(name):
        class Sink:
            def write(self, data):
                files[name] = bytes(data)

        yield Sink()

    return files, write_model(commit, folder, open_file, served or rows())


def rows(known=(1, 2), whole=True, told=True):
    from headrace.keys import sign_of

    def find(table, keys_U):
        signs = [sign_of(int(key), 0) for key in keys_U]
        found = np.array([sign in known for sign in signs])
        return found, np.array([WEIGHTS.get(sign, [0.0]) for sign in signs], np.float32)

    return ServedRows(find, whole, told)


RIGHT = [0.25, 0.625, 0.0]


def test_the_model_has_the_commits_weights_and_gives_the_golden_predictions(commit):
    files, model = written(
        commit, model=MODEL, template=template(), golden=golden(RIGHT), why={"onnx": "", "golden": ""}
    )
    assert sorted(files) == ["dense.onnx", "dense.safetensors", "golden.parquet", "model.json"]
    assert model.message()["onnx"] == {"ok": True, "why": ""}
    assert model.message()["golden"] == {"ok": True, "why": "", "max_difference": 0.0}
    assert numpy_helper.to_array(onnx.load_model_from_string(files["dense.onnx"]).graph.initializer[0]).item() == 0.125


def test_a_difference_is_told_and_fails_the_gate(commit):
    _, model = written(commit, model=MODEL, template=template(), golden=golden([0.25, 0.5, 0.0]))
    assert model.gate == (False, "predictions differ by 0.125, more than 1e-05")


def test_a_row_that_is_missing_shows(commit):
    _, model = written(commit, rows(known=(1,)), model=MODEL, template=template(), golden=golden(RIGHT))
    assert model.golden_ok is False and model.max_difference == 0.375


def test_where_thresholds_keep_rows_back_a_base_predicts_without_them(commit):
    served = rows(known=(1,), whole=False)
    files, model = written(commit, served, model=MODEL, template=template(), golden=golden(RIGHT))
    assert from_bytes(files["golden.parquet"]).column("prediction.click").to_pylist() == [0.25, 0.25, 0.0]
    assert model.golden_ok is True and "thresholds" in model.golden_why


def test_of_a_delta_with_thresholds_there_are_no_predictions(commit):
    files, model = written(
        commit, rows(whole=False, told=False), model=MODEL, template=template(), golden=golden(RIGHT)
    )
    assert "golden.parquet" not in files and model.gate is None and "only bases" in model.golden_why


def test_without_all_tables_nothing_is_predicted(commit):
    part = MODEL | {"tables": {"t": {"exported": False, "default_row": "zeros"}}}
    files, model = written(commit, model=part, template=template(), golden=golden(RIGHT))
    assert "golden.parquet" not in files and model.gate is None and "'t' is not exported" in model.golden_why


def test_a_model_that_was_not_traced_says_why_and_keeps_the_predictions(commit):
    files, model = written(commit, model=MODEL, golden=golden(RIGHT), why={"onnx": "a loop", "golden": ""})
    assert sorted(files) == ["dense.safetensors", "golden.parquet", "model.json"]
    assert (model.onnx_ok, model.onnx_why, model.gate) == (False, "a loop", None)


def test_a_template_of_another_model_says_so(commit):
    save_file({"model.w": np.zeros((2, 1), np.float32)}, commit / "dense.safetensors")
    files, model = written(commit, model=MODEL, template=template(), golden=golden(RIGHT))
    assert "dense.onnx" not in files and "traced from another model" in model.onnx_why and model.gate is None


def test_golden_samples_that_cannot_be_replayed_fail_the_gate(commit):
    _, model = written(commit, model=MODEL, template=template(), golden=b"no parquet")
    assert model.golden_ok is False and "cannot be read" in model.golden_why


def test_what_a_restart_lost_is_told(commit):
    files, model = written(commit)
    assert sorted(files) == ["dense.safetensors"]
    assert (model.onnx_why, model.golden_why, model.gate) == (LOST, LOST, None)


def test_dense_tensors_that_cannot_be_read_are_damage(commit):
    (commit / "dense.safetensors").write_bytes(b"x")
    with pytest.raises(CommitDamaged, match=r"dense\.safetensors cannot be read"):
        written(commit)
