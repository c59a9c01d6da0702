"""What an export says of itself, and its golden predictions: what torch said is what numpy and ONNX say again."""

import io
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.errors import BadInput
from headrace.keys import key_of_reference, sign_of_text
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.protocol.shards import Gradients, Keys, StepScale
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.trainer.config import ExportSection, ModelSection, TaskSection
from headrace.trainer.exports import golden
from headrace.trainer.exports.export_messages import ExportRequest
from headrace.trainer.exports.model_document import describe
from headrace.trainer.exports.model_files import ServedRows, write_model
from headrace.trainer.exports.onnx_model import with_weights
from headrace.trainer.exports.row_values import as_exported
from headrace.trainer.models.contract import Shape
from headrace.trainer.models.linear import Kernel, ProductKernels, sizes_of, use_table
from headrace.trainer.models.registry import load_model
from headrace.trainer.train.exporting import ExportStager
from headrace.trainer.train.tracing import input_names
from tests.fakes.model_settings import MODEL_NAMES, fitting

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Schema.of(
    [
        SparseSlot(name="user"),
        SparseSlot(name="tags", pooling="mean", values="string", weighted=True, padding=0),
        SparseSlot(name="seen", pooling="none", max_len=4, keep="tail", table="items", share="items", weighted=True),
        SparseSlot(name="item", table="items", share="items"),
        SparseSlot(name="words", pooling="sqrtn", max_len=9),
        DenseSlot(kind="dense", name="age", size=2),
        DenseSlot(kind="dense", name="price"),
        MetaSlot(kind="meta", names=("click",)),
    ]
)
TABLES = {"default": TableSection(dim=3, init_range=0.5), "items": TableSection(dim=4, first_order=False)}
EQUAL = {name: TableSection(dim=4, init_range=0.5) for name in TABLES}
"""Every model fits these."""
TASKS = (TaskSection(name="ctr", label="click"), TaskSection(name="cost", label="click", loss="mse"))
DEADLINE = Deadline.after(60)


def ragged(rng, num_samples, most, weighted):
    lengths = rng.integers(0, most + 1, num_samples)
    num = int(lengths.sum())
    weights = rng.uniform(0, 2, num).astype(np.float32) if weighted else None
    return Ragged(rng.integers(0, 40, num).astype(np.uint64), np.concatenate([[0], np.cumsum(lengths)]), weights)


def samples(rng, num_samples):
    return Samples(
        {slot.name: ragged(rng, num_samples, slot.sparse.max_len or 3, slot.sparse.weighted) for slot in SCHEMA.sparse},
        {"age": rng.random((num_samples, 2), np.float32), "price": rng.random((num_samples, 1), np.float32)},
        {"click": np.zeros(num_samples, np.float32)},
        np.arange(num_samples),
        np.full(num_samples, np.nan),
    )


def job_of(tables, section):
    """What the stager reads of a job."""
    return SimpleNamespace(tables=tables, tasks=TASKS, exports={"serving": section}, pipe=None)


class World:
    """A job's rank 0: shards with rows for half of the signs, a model with weights, what it stages."""

    def __init__(self, folder, section, model="wide_deep", tables=TABLES):
        self.folder, self.section, self.tables = folder, section, tables
        self.shards = EmbeddedShards(ShardProcess.alone(tables, 3))
        self.rng = np.random.default_rng(5)
        self._learn(tables)
        shape = Shape.of(SCHEMA, tables, [task.name for task in TASKS])
        settings = fitting(model, shape)
        self.model = load_model(ModelSection(name=model, settings=settings), shape, folder)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
        self.stager = ExportStager(
            self.model, SCHEMA, job_of(tables, section), folder / "scratch", self.tensors, self.look
        )

    def tensors(self):
        return {f"model.{name}": value for name, value in self.model.state_dict().items()}

    def look(self, keys):
        return self.shards.pull(self.shards.prepare(keys, learn=False), DEADLINE)

    def _learn(self, tables):
        self.shards.open_pass(1, DEADLINE)
        keys, gradients = {}, {}
        for name, table in tables.items():
            groups = sorted({slot.group for slot in SCHEMA.sparse if slot.sparse.table == name})
            pairs = [(key_of_reference(sign, group), group) for group in groups for sign in range(0, 40, 2)]
            width = table.dim + int(table.first_order)
            keys[name] = Keys(
                *(np.array(column, kind) for column, kind in zip(zip(*pairs, strict=True), "QH", strict=True))
            )
            grads = self.rng.normal(size=(len(pairs), width)).astype(np.float32)
            gradients[name] = Gradients(grads, np.ones(len(pairs), np.float32), np.zeros(len(pairs), np.float32))
        batch = self.shards.prepare(keys, learn=True)
        self.shards.pull(batch, DEADLINE)
        self.shards.exchange(0, batch, gradients, None, StepScale(1), DEADLINE)
        self.shards.close_pass(0, DEADLINE)

    def stage(self):
        stage = self.folder / "stage"
        stage.mkdir()
        request = ExportRequest(
            job="j", stream="serving", section=self.section, kind="base", timeline="t", version=1, parent=None,
            commit=self.folder, address=str(self.folder), stage=stage, tables={}, slots={},
        )  # fmt: skip
        self.stager.stage(request, stage)
        return stage

    def find(self, table, keys_U):
        """Rows as the exporter finds them: of what has none, anything."""
        group_U = np.zeros(len(keys_U), np.uint16)
        rows = self.look({table: Keys(keys_U, group_U)})[table]
        found_U = rows.any(axis=1)
        rows = as_exported(rows, self.tables[table].first_order, self.section.dtype)
        return found_U, np.where(found_U[:, None], rows, np.float32(99))


def replayed(world, stage):
    weights = {name: value.numpy() for name, value in world.model.state_dict().items()}
    onnx = with_weights((stage / "onnx-template.onnx").read_bytes(), weights)
    table = golden.from_bytes((stage / "golden.parquet").read_bytes())
    return table, golden.replay(table, onnx, world.find, json.loads((stage / "model.json").read_text()))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("model", ["wide_deep", "dcn"])
def test_what_the_rank0_predicts_is_what_the_export_gives(tmp_path, dtype, model):
    world = World(tmp_path, ExportSection(golden=20, dtype=dtype), model)
    for _ in range(3):
        world.stager.saw(samples(world.rng, 8))
    stage = world.stage()
    assert json.loads((stage / "why.json").read_text()) == {"onnx": "", "golden": ""}
    table, again = replayed(world, stage)
    assert len(table) == 20 and again.difference < golden.TOLERANCE
    assert set(again.predictions) == {"ctr", "cost"} and np.ptp(again.predictions["ctr"]) > 0.01


def test_weights_and_rows_are_those_of_the_version_not_of_the_start(tmp_path):
    world = World(tmp_path, ExportSection(golden=4), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    with torch.no_grad():
        for parameter in world.model.parameters():
            parameter.mul_(-2)
    _, again = replayed(world, world.stage())
    assert again.difference < golden.TOLERANCE


def test_an_export_that_differs_is_noticed_and_can_be_predicted_anew(tmp_path):
    world = World(tmp_path, ExportSection(golden=8), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    stage = world.stage()
    find = world.find
    world.find = lambda table, keys_U: (found := find(table, keys_U)) and (found[0], found[1] + np.float32(0.1))
    table, again = replayed(world, stage)
    assert again.difference > 1e-3
    anew = golden.with_predictions(table, again.predictions)
    assert anew.column_names == table.column_names
    world.find = world.find
    (stage / "golden.parquet").write_bytes(golden.as_bytes(anew))
    assert replayed(world, stage)[1].difference == 0


def test_what_is_no_number_is_no_agreement(tmp_path):
    world = World(tmp_path, ExportSection(golden=8), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    stage = world.stage()
    world.find = lambda table, keys_U: (np.ones(len(keys_U), bool), np.full((len(keys_U), 4), np.nan, np.float32))
    assert replayed(world, stage)[1].difference == np.inf


def test_a_key_without_a_row_reads_the_default_row_of_model_json(tmp_path):
    world = World(tmp_path, ExportSection(golden=8), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    model = json.loads((world.stage() / "model.json").read_text())
    table = golden.from_bytes((tmp_path / "stage" / "golden.parquet").read_bytes())
    nothing = lambda name, keys_U: (np.zeros(len(keys_U), bool), np.zeros((len(keys_U), 4), np.float32))  # noqa: E731
    assert not golden.feeds_of(table, nothing, model)["user"].any()
    model["tables"]["default"]["default_row"] = [1.0, 2.0, 3.0, 4.0]
    number_B = np.diff(table.column("user").combine_chunks().offsets.to_numpy())
    wanted = number_B[:, None] * np.arange(1, 5)
    assert (golden.feeds_of(table, nothing, model)["user"] == wanted).all()


def test_the_last_samples_are_kept_and_no_more_batches_than_they_need(tmp_path):
    world = World(tmp_path, ExportSection(golden=10), "wide_deep")
    batches = [samples(world.rng, 4) for _ in range(6)]
    for batch in batches:
        world.stager.saw(batch)
    assert len(world.stager._kept) == 3
    table = golden.from_bytes((world.stage() / "golden.parquet").read_bytes())
    last = Samples.concat(batches[3:]).slice(2, 12)
    assert np.array_equal(table.column("price").combine_chunks().flatten().to_numpy(), last.dense["price"][:, 0])
    assert np.array_equal(table.column("seen").combine_chunks().flatten().to_numpy(), last.sparse["seen"].values_N)


def test_what_cannot_be_had_is_told(tmp_path):
    world = World(tmp_path, ExportSection(golden=10), "wide_deep")
    stage = world.stage()
    assert not (stage / "golden.parquet").exists() and (stage / "model.json").exists()
    assert "has seen no sample" in json.loads((stage / "why.json").read_text())["golden"]


class OnlyTrains(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, inputs):
        if not self.training:
            raise RuntimeError("not for inference")
        return {"ctr": inputs.dense_BC.sum(1) + self.bias[0], "cost": inputs.dense_BC.sum(1) * self.bias[1]}


def test_a_module_that_cannot_predict_costs_the_golden_predictions_not_the_job(tmp_path):
    world = World(tmp_path, ExportSection(golden=4), "wide_deep")
    world.model = OnlyTrains()
    world.stager = ExportStager(
        world.model, SCHEMA, job_of(TABLES, world.section), tmp_path / "other", world.tensors, world.look
    )
    world.stager.saw(samples(world.rng, 8))
    stage = world.stage()
    why = json.loads((stage / "why.json").read_text())
    assert "cannot be traced: RuntimeError: not for inference" in why["onnx"]
    assert "cannot predict in inference mode: RuntimeError: not for inference" in why["golden"]
    assert sorted(path.name for path in stage.iterdir()) == ["model.json", "why.json"]


def test_a_table_that_the_stream_leaves_out_is_named(tmp_path):
    world = World(tmp_path, ExportSection(golden=4, tables=("default",)), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    with pytest.raises(BadInput, match="table 'items' is not in this stream"):
        replayed(world, world.stage())


def test_the_document_names_the_inputs_of_the_onnx_in_order():
    document = describe(SCHEMA, TABLES, TASKS, ExportSection())
    shape = Shape.of(SCHEMA, TABLES, [task.name for task in TASKS])
    assert [each["name"] for each in document["inputs"]] == input_names(shape)
    assert {each["name"]: each["shape"] for each in document["inputs"]} == {
        "user": ["B", 4], "tags": ["B", 4], "item": ["B", 4], "words": ["B", 4], "seen": ["B", 4, 4],
        "seen.mask": ["B", 4], "age": ["B", 2], "price": ["B", 1],
    }  # fmt: skip


def test_the_document_tells_each_slot_and_table():
    document = describe(SCHEMA, TABLES, TASKS, ExportSection(dtype="int8", tables=("items",)), {"items": [0.5] * 4})
    assert [slot["name"] for slot in document["slots"]] == [slot.name for slot in SCHEMA.sparse + SCHEMA.dense]
    by_name = {slot["name"]: slot for slot in document["slots"]}
    assert by_name["item"]["rows_of"] == "seen" and by_name["item"]["group"] == by_name["seen"]["group"]
    assert by_name["tags"]["padding"] == "0" and by_name["tags"]["values"] == "string"
    assert document["tables"]["items"] == {
        "dim": 4, "first_order": False, "dtype": "int8", "exported": True, "default_row": [0.5] * 4
    }  # fmt: skip
    assert document["tables"]["default"]["default_row"] == "zeros" and not document["tables"]["default"]["exported"]
    assert json.loads(json.dumps(document)) == document


def test_the_vectors_of_hash_and_key_are_those_of_the_rules():
    document = describe(SCHEMA, TABLES, TASKS, ExportSection())
    assert {"text": "müsli", "sign": str(sign_of_text("müsli".encode()))} in document["hash"]["vectors"]
    assert len(document["key"]["vectors"]) == 15
    mask = (1 << 64) - 1
    for each in document["key"]["vectors"]:  # as the rule says in words
        x = (int(each["sign"]) + (each["group"] + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        assert str(x ^ (x >> 31)) == each["key"]


def test_who_replays_needs_no_torch():
    code = "import sys, trainer.exports.golden, trainer.exports.model_document; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_every_model_of_ours_is_exported_with_a_dense_onnx_that_agrees(model, kernel, tmp_path):
    """Whatever kernels it is trained with. A module that cannot be traced is only warned of: this asks for the file."""
    world = World(tmp_path, ExportSection(), model, tables=EQUAL)
    use_table(world.model, dict.fromkeys(sizes_of(world.model), ProductKernels(*[kernel] * 3)))
    world.stager.saw(samples(world.rng, 9))
    stage, commit, files = world.stage(), tmp_path / "commit", {}
    commit.mkdir()
    save_file({name: value.contiguous() for name, value in world.tensors().items()}, commit / "dense.safetensors")

    @contextmanager
    def open_file(name):
        content = io.BytesIO()
        yield content
        files[name] = content.getvalue()

    written = write_model(commit, stage, open_file, ServedRows(world.find, whole=True, known=True))
    assert written.onnx_ok and "dense.onnx" in files, written.onnx_why
    assert written.golden_ok and written.max_difference <= 1e-5, written.golden_why
