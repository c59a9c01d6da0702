"""A job with two towers that can be served, made by hand: its items are texts with a kind and a price. No torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from headrace.dataset.spec.config import DenseSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.keys import sign_of_text
from headrace.pserver.config import TableSection
from headrace.trainer.config import ExportSection, TaskSection
from headrace.trainer.exports.model_document import describe
from headrace.trainer.replica.updates import ReplicaRows, ReplicaUpdate, TableUpdate
from headrace.trainer.retrieval_config import RetrievalSection, catalogue_files, describe_retrieval
from tests.fakes.exports import key

SCHEMA = Schema.of(
    [
        SparseSlot(name="user"),
        SparseSlot(name="item", values="string"),
        SparseSlot(name="kind", values="string", pooling="mean"),
        DenseSlot(kind="dense", name="price", size=1),
    ]
)
GROUPS = {slot.name: slot.group for slot in SCHEMA.sparse}
TABLES = {"default": TableSection(dim=4)}
LENGTH = 3
KINDS = ("news", "sports", "music")


def template() -> bytes:
    """user_vector = user . u; item_vector = (item + kind) . i + price . p; ctr = the sigmoid of their product."""
    f = TensorProto.FLOAT
    shapes = {"user": 5, "item": 5, "kind": 5, "price": 1}
    inputs = [helper.make_tensor_value_info(name, f, ["B", size]) for name, size in shapes.items()]
    nodes = [
        helper.make_node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.INT64, [1], [1])),
        helper.make_node("MatMul", ["user", "model.u"], ["user_vector"]),
        helper.make_node("Add", ["item", "kind"], ["both"]),
        helper.make_node("MatMul", ["both", "model.i"], ["of_item"]),
        helper.make_node("MatMul", ["price", "model.p"], ["of_price"]),
        helper.make_node("Add", ["of_item", "of_price"], ["item_vector"]),
        helper.make_node("Mul", ["user_vector", "item_vector"], ["product"]),
        helper.make_node("ReduceSum", ["product", "one"], ["logit"], keepdims=0),
        helper.make_node("Sigmoid", ["logit"], ["ctr"]),
    ]
    sizes = {"u": 5, "i": 5, "p": 1}
    weights = [helper.make_tensor(f"model.{n}", f, [s, LENGTH], [0.0] * s * LENGTH) for n, s in sizes.items()]
    outputs = [helper.make_tensor_value_info("ctr", f, ["B"])]
    outputs += [helper.make_tensor_value_info(name, f, ["B", LENGTH]) for name in ("user_vector", "item_vector")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def item(number: int) -> dict[str, Any]:
    """A line of the catalogue."""
    name = f"i{number}"
    return {
        "item": name,
        "kind": [KINDS[number % 3]],
        "price": number / 8,
        "tags": ["all", name],
        "year": 2000 + number,
    }


class TowersJob:
    """Rows and weights that change from version to version, and a catalogue."""

    name = "small"

    def __init__(self, folder: Path, num_items: int = 40, *, unseen: bool = False) -> None:
        self.catalogue, self.rng = folder / "items.jsonl", np.random.default_rng(1)
        self.items = [item(number) for number in range(num_items)]
        self.write()
        items = {"slot": "item", "files": ["items.jsonl"], "unseen": unseen}
        section = RetrievalSection.model_validate({"items": items})
        told = describe_retrieval(section, {"item": ["item", "kind", "price"]})
        self.files = catalogue_files(section, folder)
        tasks = (TaskSection(name="ctr", label="click"),)
        self.model = describe(SCHEMA, TABLES, tasks, ExportSection(), retrieval=told)
        self.onnx = template()
        self.rows: dict[tuple[str, int], Any] = {}
        self.dense: dict[str, Any] = {}

    def write(self) -> None:
        """Write the catalogue, whole at once."""
        unfinished = self.catalogue.with_name("_items")
        unfinished.write_text("".join(json.dumps(each) + "\n" for each in self.items))
        unfinished.replace(self.catalogue)

    def update(self, version: int, *, whole: bool = False, gone: tuple[str, ...] = (), num: int = 20) -> ReplicaUpdate:
        """The next version: some rows, and those of the items `gone` no longer."""
        known = [("user", sign) for sign in range(5)] + [("kind", sign_of_text(each.encode())) for each in KINDS]
        known += [("item", sign_of_text(each["item"].encode())) for each in self.items if each["item"] not in gone]
        picked = known if whole else [known[at] for at in self.rng.permutation(len(known))[:num]]
        changed = {row: self.rng.normal(size=5).astype(np.float32) for row in picked}
        lost = [("item", sign_of_text(each.encode())) for each in gone]
        for row in lost:
            self.rows.pop(row, None)
        self.rows |= changed
        self.dense = {
            n: self.rng.normal(size=(s, LENGTH)).astype(np.float32) for n, s in (("u", 5), ("i", 5), ("p", 1))
        }
        keys_U = np.array([key(*row, GROUPS) for row in changed], np.uint64)
        chunk = ReplicaRows(keys_U, np.zeros(len(keys_U), np.uint16), np.array(list(changed.values()), np.float32))
        gone_U = np.array([] if whole else [key(*row, GROUPS) for row in lost], np.uint64)
        return ReplicaUpdate(
            job=self.name, timeline="t1", version=version, whole=whole,
            tables={"default": TableUpdate([chunk], gone_U)}, dense=dict(self.dense), event_time_s=None,
            items=self.files, model=self.model if whole else None, onnx=self.onnx if whole else None,
        )  # fmt: skip

    def whole(self, version: int) -> ReplicaUpdate:
        """The same version for a replica that begins with it."""
        keys_U = np.array([key(*row, GROUPS) for row in self.rows], np.uint64)
        chunk = ReplicaRows(keys_U, np.zeros(len(keys_U), np.uint16), np.array(list(self.rows.values()), np.float32))
        return ReplicaUpdate(
            job=self.name, timeline="t1", version=version, whole=True,
            tables={"default": TableUpdate([chunk], np.empty(0, np.uint64))}, dense=dict(self.dense),
            event_time_s=None, items=self.files, model=self.model, onnx=self.onnx,
        )  # fmt: skip

    def best(self, user: int, open_of=lambda _: True) -> list[tuple[str, float]]:
        """Items with their scores, best first, computed in float64."""
        row = lambda slot, sign: np.asarray(self.rows.get((slot, sign), np.zeros(5)), np.float64)  # noqa: E731
        vector, found = row("user", user) @ self.dense["u"], []
        for each in self.items:
            sign = sign_of_text(each["item"].encode())
            if ("item", sign) not in self.rows or not open_of(each):
                continue
            both = row("item", sign) + row("kind", sign_of_text(each["kind"][0].encode()))
            found.append((each["item"], float(vector @ (both @ self.dense["i"] + each["price"] * self.dense["p"][0]))))
        return sorted(found, key=lambda pair: -pair[1])
