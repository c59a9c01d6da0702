"""A job whose exports can be served, made by hand: every kind of slot, a small ONNX, golden predictions. No torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
from onnx import TensorProto, helper

from headrace.dataset.spec.config import DenseSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.keys import sign_of_text
from headrace.pserver.config import TableSection
from headrace.trainer.config import ExportSection, TaskSection
from headrace.trainer.exports import golden as goldens
from headrace.trainer.exports.model_document import describe
from headrace.trainer.exports.onnx_model import with_weights
from headrace.trainer.replica.updates import ReplicaRows, ReplicaUpdate, TableUpdate
from tests.fakes.exports import _note, key, write_export

SCHEMA = Schema.of(
    [
        SparseSlot(name="a"),
        SparseSlot(name="b", pooling="mean", values="string", weighted=True, padding=sign_of_text(b"none")),
        SparseSlot(name="history", pooling="none", max_len=3, keep="tail"),
        DenseSlot(kind="dense", name="d", size=2),
    ]
)
TABLES = {"default": TableSection(dim=4)}
TASKS = (TaskSection(name="ctr", label="click"),)
WIDTH = 5
TEXTS = ("red", "green", "blue", "none")


def model_json(default_row=()):
    return describe(SCHEMA, TABLES, TASKS, ExportSection(), {"default": default_row})


def template() -> bytes:
    """ctr = sigmoid(w . (a + b + sum of history + how long it is) + v . d)."""
    f, inputs = TensorProto.FLOAT, []
    shapes = {"a": [5], "b": [5], "history": [3, 5], "history.mask": [3], "d": [2]}
    for name, shape in shapes.items():
        kind = TensorProto.BOOL if name.endswith(".mask") else f
        inputs.append(helper.make_tensor_value_info(name, kind, ["B", *shape]))
    nodes = [
        helper.make_node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.INT64, [1], [1])),
        helper.make_node("ReduceSum", ["history", "one"], ["h"], keepdims=0),
        helper.make_node("Cast", ["history.mask"], ["marks"], to=f),
        helper.make_node("ReduceSum", ["marks", "one"], ["long"], keepdims=1),
        helper.make_node("Sum", ["a", "b", "h", "long"], ["sum"]),
        helper.make_node("MatMul", ["sum", "model.w"], ["wide"]),
        helper.make_node("MatMul", ["d", "model.v"], ["numbers"]),
        helper.make_node("Add", ["wide", "numbers"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["ctr"]),
    ]
    weights = [helper.make_tensor(f"model.{name}", f, [size], [0.0] * size) for name, size in (("w", 5), ("v", 2))]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("ctr", f, ["B"])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def samples(rng: Any, num: int) -> pa.Table:
    """As golden.parquet has them, without predictions: paddings dropped, sequences cut."""
    lists = lambda most, draw: [[draw() for _ in range(rng.integers(0, most + 1))] for _ in range(num)]  # noqa: E731
    b = lists(3, lambda: sign_of_text(TEXTS[rng.integers(3)].encode()))
    return pa.table(
        {
            "a": pa.array(lists(3, lambda: int(rng.integers(30))), pa.list_(pa.uint64())),
            "b": pa.array(b, pa.list_(pa.uint64())),
            "b.weight": pa.array([[float(rng.uniform(0, 2)) for _ in each] for each in b], pa.list_(pa.float32())),
            "history": pa.array(lists(3, lambda: int(rng.integers(30))), pa.list_(pa.uint64())),
            "d": pa.array(rng.normal(size=(num, 2)).tolist(), pa.list_(pa.float32())),
        }
    )


class Job:
    """Rows and weights that change from version to version, and what is exported of them."""

    def __init__(self, folder: Path, seed: int = 1, name: str = "small") -> None:
        self.folder, self.name, self.rng = folder, name, np.random.default_rng(seed)
        self.rows: dict[tuple[str, int], Any] = {}
        self.dense = {"w": np.zeros(5, np.float32), "v": np.zeros(2, np.float32)}
        self.model, self.onnx = model_json(), template()
        self.chain: list[str] = []
        self.samples = samples(self.rng, 16)

    def learn(self, num: int = 20, forget: int = 0) -> tuple[dict, list]:
        """-> rows that changed, rows that went."""
        known = [("a", sign) for sign in range(25)] + [("history", sign) for sign in range(25)]
        known += [("b", sign_of_text(text.encode())) for text in TEXTS[:2]]
        gone = [list(self.rows)[at] for at in self.rng.permutation(len(self.rows))[:forget]]
        picked = [known[at] for at in self.rng.permutation(len(known))[:num]]
        draw = lambda: self.rng.normal(size=WIDTH).astype(np.float16).tolist()  # noqa: E731  # exports of any type hold it
        changed = {row: draw() for row in picked if row not in gone}
        for row in gone:
            del self.rows[row]
        self.rows |= changed
        self.dense = {name: self.rng.normal(size=old.shape).astype(np.float32) for name, old in self.dense.items()}
        return changed, gone

    def find(self, _table, keys_U):
        """Rows as golden predictions are made of: of no row, anything."""
        by_key = {key(*row): value for row, value in self.rows.items()}
        found_U = np.array([each in by_key for each in keys_U.tolist()], bool)
        rows = [by_key.get(each, [77] * WIDTH) for each in keys_U.tolist()]
        return found_U, np.array(rows, np.float32).reshape(-1, WIDTH)

    def predictions(self, asked=None):
        asked = self.samples if asked is None else asked
        blank = {"ctr": np.zeros(len(asked), np.float32)}
        with_blank = goldens.with_predictions(asked, blank)
        whole = with_weights(self.onnx, {name: value for name, value in self.dense.items()})
        return goldens.replay(with_blank, whole, self.find, self.model).predictions["ctr"]

    def golden(self) -> bytes:
        return goldens.as_bytes(goldens.with_predictions(self.samples, {"ctr": self.predictions()}))

    def export(self, version: int, *, timeline: str = "t1", base: bool = False, forget: int = 0, point: bool = True,
               **manifest: Any) -> Path:  # fmt: skip
        """Learn, and write what a base or a delta has of it."""
        changed, gone = self.learn(forget=forget)
        base = base or not self.chain
        kind = "base" if base else "delta"
        parent = None
        if not base:
            number, parent_kind = self.chain[-1].rpartition("/")[2].split("-")
            parent = (int(number), parent_kind)
        path = write_export(
            self.folder / timeline, kind, version, self.rows if base else changed, [] if base else gone,
            parent=parent, dense=self.dense, timeline=timeline, job=self.name, **manifest,
        )  # fmt: skip
        told = json.loads((path / "manifest.json").read_text())
        for name, content in (
            ("model.json", json.dumps(self.model).encode()),
            ("dense.onnx", with_weights(self.onnx, self.dense)),
            ("golden.parquet", self.golden()),
        ):
            (path / name).write_bytes(content)
            _note(path, told["files"], name)
        (path / "manifest.json").write_text(json.dumps(told))
        self.chain = [f"{timeline}/{path.name}"] if base else [*self.chain, f"{timeline}/{path.name}"]
        if point:
            self.point(version, timeline)
        return path

    def point(self, version: int, timeline: str = "t1", chain=None, **more: Any) -> None:
        chain = self.chain if chain is None else chain
        told = {"format": 1, "timeline": timeline, "version": version, "path": chain[-1], "chain": chain, **more}
        unfinished = self.folder / "_current.json"
        unfinished.write_text(json.dumps(told))
        unfinished.replace(self.folder / "current.json")  # whole at once, as a job writes it: a replica reads meanwhile

    def update(
        self, version: int, *, whole: bool = False, forget: int = 0, timeline: str = "t1", **changes
    ) -> ReplicaUpdate:
        """The same as it comes over a live feed."""
        changed, gone = self.learn(forget=forget)
        rows = dict(self.rows) if whole else changed
        keys_U = np.array([key(*row) for row in rows], np.uint64)
        chunk = ReplicaRows(keys_U, np.zeros(len(keys_U), np.uint16), np.array(list(rows.values()), np.float32))
        gone_U = np.array([] if whole else [key(*row) for row in gone], np.uint64)
        told = {
            "job": self.name, "timeline": timeline, "version": version, "whole": whole,
            "tables": {"default": TableUpdate([chunk], gone_U)}, "dense": dict(self.dense), "event_time_s": None,
            "model": self.model if whole else None, "onnx": self.onnx if whole else None,
        }  # fmt: skip
        return ReplicaUpdate(**(told | changes))


def asked(samples: pa.Table) -> list[dict[str, Any]]:
    """Tensors of a request for these samples, ragged."""
    by_sign = {sign_of_text(text.encode()): text for text in TEXTS}
    tensors = []
    for slot in SCHEMA.sparse:
        values = samples.column(slot.name).to_pylist()
        flat = [each for sample in values for each in sample]
        kind = "BYTES" if slot.name == "b" else "UINT64"
        flat = [by_sign[each] for each in flat] if slot.name == "b" else flat
        tensors.append({"name": slot.name, "datatype": kind, "shape": [len(flat)], "data": flat})
        lengths = [len(each) for each in values]
        tensors.append({"name": f"{slot.name}.lengths", "datatype": "INT64", "shape": [len(values)], "data": lengths})
    weights = [each for sample in samples.column("b.weight").to_pylist() for each in sample]
    tensors.append({"name": "b.weight", "datatype": "FP32", "shape": [len(weights)], "data": weights})
    tensors.append(
        {"name": "d", "datatype": "FP32", "shape": [len(samples), 2], "data": samples.column("d").to_pylist()}
    )
    return tensors
