"""deploy/examples/serving/serve.py, in a process of its own: it gives the golden predictions of any export."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from headrace.dataset.spec.schema import Schema
from headrace.keys import key_of_reference, sign_of_text
from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.protocol.shards import Keys, absent
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.onnx_model import with_weights
from headrace.trainer.exports.row_values import as_exported, encode
from tests.unit.test_exports_golden import SCHEMA, TABLES, World, samples

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "deploy" / "examples" / "serving" / "serve.py"


def served(*folders):
    command = [sys.executable, str(SERVE), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def groups_of(schema: Schema, table):
    return sorted({slot.group for slot in schema.sparse if slot.sparse.table == table})


def write_rows(folder, table, keys, weights_UW, dtype, number):
    section, values = TABLES[table], encode(weights_UW, TABLES[table].first_order, dtype)
    columns = {"slot": pa.array(["x"] * len(keys)), "sign": pa.array(keys), "key": pa.array(keys)}
    if section.first_order:
        columns["weight"] = pa.array(values.weight_R)
    flat = pa.array(values.vector_RD.reshape(-1))
    columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, section.dim)
    if dtype == "int8":
        columns["scale"] = pa.array(values.scale_R)
    pq.write_table(pa.table(columns), folder / f"rows-{table}-{number}.parquet")


def folder_of(job, name, kind_of_model):
    folder = job / "t1" / name
    folder.mkdir(parents=True)
    for file, content in kind_of_model.items():
        (folder / file).write_bytes(content)
    return folder


def exported(world, dtype, job):
    """A base with wrong values and keys that go, and the delta that mends it."""
    stage = world.stage()
    weights = {name: value.numpy() for name, value in world.model.state_dict().items()}
    content = {name: (stage / name).read_bytes() for name in ("model.json", "golden.parquet")}
    content["dense.onnx"] = with_weights((stage / "onnx-template.onnx").read_bytes(), weights)
    base, delta = (folder_of(job, name, content) for name in ("0000000001-base", "0000000002-delta"))
    for table in TABLES:
        pairs = [(sign, group) for group in groups_of(SCHEMA, table) for sign in range(40)]
        keys_U = np.array([key_of_reference(*pair) for pair in pairs], np.uint64)
        found_U, weights_UW = world.find(table, keys_U)
        changed_U = found_U & (np.arange(len(keys_U)) % 3 == 0)
        in_base = np.flatnonzero(found_U | ~changed_U)  # those without a row too: they go
        before_UW = np.where(changed_U[:, None], np.float32(0.7), weights_UW)
        for number, part in enumerate(np.array_split(in_base, 2)):
            write_rows(base, table, keys_U[part], before_UW[part], dtype, number)
        write_rows(delta, table, keys_U[changed_U], weights_UW[changed_U], dtype, 0)
        pq.write_table(pa.table({"key": pa.array(keys_U[~found_U])}), delta / f"tombstones-{table}-0.parquet")
    for folder in (base, delta):
        (folder / "_DONE").touch()
    chain = [f"t1/{folder.name}" for folder in (base, delta)]
    (job / "current.json").write_text(json.dumps({"format": 1, "path": chain[-1], "chain": chain}))
    return base, delta


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_an_export_is_served_without_headrace(tmp_path, dtype):
    world = World(tmp_path, ExportSection(golden=20, dtype=dtype), "deep_crossing")
    world.stager.saw(samples(world.rng, 32))
    base, delta = exported(world, dtype, tmp_path / "exports" / "job")
    current = served(tmp_path / "exports" / "job")
    assert current.returncode == 0, current.stdout + current.stderr
    assert current.stdout == served(base, delta).stdout
    assert "20 golden samples" in current.stdout
    stale = served(base)  # the delta is what makes it true
    assert stale.returncode == 1 and "largest difference" in stale.stdout


class LearntWorld(World):
    """Whose keys without a row read a default row that was learnt."""

    ROWS = {"default": np.float32([0.1, -0.7, 0.4, 1 / 3]), "items": np.float32([0.9, -0.2, 0.6, 1e-3])}

    def __init__(self, folder, section, model):
        admission = (CountEntry(kind="count", n=1),)
        learnt = {"admission": admission, "default_row": "learnt", "init_range": 0.5}
        super().__init__(
            folder, section, model, {name: each.model_copy(update=learnt) for name, each in TABLES.items()}
        )

    def tensors(self):
        rows = {f"model.default_row.{name}": torch.from_numpy(row) for name, row in self.ROWS.items()}
        return super().tensors() | rows

    def find(self, table, keys_U):
        rows_UW = self.look({table: Keys(keys_U, np.zeros(len(keys_U), np.uint16))})[table]
        absent_U = absent(rows_UW)
        rows_UW = np.where(absent_U[:, None], np.float32(99), rows_UW)
        return ~absent_U, as_exported(rows_UW, TABLES[table].first_order, self.section.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_keys_without_rows_are_served_with_the_default_row_that_was_learnt(tmp_path, dtype):
    world = LearntWorld(tmp_path, ExportSection(golden=20, dtype=dtype), "deep_crossing")
    world.stager.saw(samples(world.rng, 32))
    base, delta = exported(world, dtype, tmp_path / "exports" / "job")
    current = served(tmp_path / "exports" / "job")
    assert current.returncode == 0, current.stdout + current.stderr
    model = json.loads((delta / "model.json").read_text())
    for name, row in LearntWorld.ROWS.items():
        assert np.float32(model["tables"][name]["default_row"]).tolist() == row.tolist()
        model["tables"][name]["default_row"] = "zeros"
    (delta / "model.json").write_text(json.dumps(model))
    assert served(base, delta).returncode == 1, "some of the golden samples read it"


def test_what_is_not_complete_is_not_served(tmp_path):
    world = World(tmp_path, ExportSection(golden=4), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    base, _ = exported(world, "float32", tmp_path / "exports" / "job")
    (base / "_DONE").rename(base / "DONE")
    assert served(tmp_path / "exports" / "job").returncode == 0, "the marker of an older Headrace"
    (base / "DONE").unlink()
    result = served(tmp_path / "exports" / "job")
    assert result.returncode == 1 and "no complete export, as it has no _DONE" in result.stderr
    assert "Traceback" not in result.stderr


def test_exports_that_cannot_be_compared_or_served_say_what_they_lack(tmp_path):
    world = World(tmp_path, ExportSection(golden=4), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    _, delta = exported(world, "float32", tmp_path / "exports" / "job")
    for name in ("golden.parquet", "dense.onnx"):
        (delta / name).unlink()
        result = served(tmp_path / "exports" / "job")
        assert result.returncode == 1 and f"{delta}: has no {name}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--events", "no.jsonl"), "--events: there is no file no.jsonl"),
        (("--time", "ts"), "--time is for --raw; other events give their unix seconds as 'event_time'"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(tmp_path, arguments, why):
    result = served(tmp_path, *arguments)
    assert result.returncode == 2 and why in result.stderr


def test_a_file_of_events_in_place_of_a_folder_is_told_where_it_goes(tmp_path):
    (tmp_path / "events.jsonl").write_text("{}")
    result = served(tmp_path, tmp_path / "events.jsonl")
    assert result.returncode == 2 and "a file of events is given as --events" in result.stderr


def as_event(sample):
    """What a caller would write of one golden sample: its slots, and more that no slot is of."""
    event = {name: value for name, value in sample.items() if not name.startswith("prediction.")}
    return {**event, "ts": 5, "click": 1}


def test_a_file_of_events_gets_the_predictions_that_headrace_would_give(tmp_path):
    world = World(tmp_path, ExportSection(golden=20), "deep_crossing")
    world.stager.saw(samples(world.rng, 32))
    _, delta = exported(world, "float32", tmp_path / "exports" / "job")
    golden = pq.read_table(delta / "golden.parquet")
    golden = golden.filter(pa.array([0 not in tags for tags in golden["tags"].to_pylist()]))  # 0 is its padding
    assert len(golden) > 5
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(as_event(each)) + "\n" for each in golden.to_pylist()))
    pq.write_table(golden, tmp_path / "events.parquet")
    for name in ("events.jsonl", "events.parquet"):
        result = served(tmp_path / "exports" / "job", "--events", tmp_path / name)
        assert result.returncode == 0, result.stderr
        told = [json.loads(line) for line in result.stdout.splitlines()]
        for task in ("ctr", "cost"):
            wanted = golden[f"prediction.{task}"].to_numpy()
            assert np.allclose([each[task] for each in told], wanted, atol=1e-5), task


def test_events_are_hashed_padded_and_cut_as_the_generator_has_them(tmp_path):
    world = World(tmp_path, ExportSection(golden=4), "deep_crossing")
    world.stager.saw(samples(world.rng, 32))
    exported(world, "float32", tmp_path / "exports" / "job")
    dense = {"age": [0.5, 0.25], "price": 3.5}
    same = [
        {"tags": ["a", "b"], "seen": [1, 2, 3, 4], "user": 7},
        {"tags": [sign_of_text(b"a"), 0, sign_of_text(b"b")], "seen": [9, 9, 1, 2, 3, 4], "user": [7], "item": None},
        {"tags": ["a", "b"], "tags.weight": [1, 1.0], "seen": [1, 2, 3, 4], "user": 7, "item": []},
    ]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(dense | each) + "\n" for each in same))
    result = served(tmp_path / "exports" / "job", "--events", tmp_path / "e.jsonl")
    assert len(result.stdout.splitlines()) == 3 and len(set(result.stdout.splitlines())) == 1, result.stderr


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting property name"),
        ("[1]", "an event is a JSON object, keyed by slot"),
        ('{"event_time": "now"}', "'event_time' is 'now', and must be a number of unix seconds"),
        ('{"age": [1, 2], "price": 1, "user": -1}', "-1 is no sign: a number of 64 bits, or a text"),
        ('{"price": 1.0}', "slot 'age' needs 2 numbers, and has 0"),
        ('{"age": [1, 2], "price": 1, "tags": "a", "tags.weight": [1, 2]}', "slot 'tags' has 1 values and 2 weights"),
    ],
)
def test_an_event_that_cannot_be_read_is_told_by_its_line(tmp_path, line, why):
    world = World(tmp_path, ExportSection(golden=4), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    exported(world, "float32", tmp_path / "exports" / "job")
    (tmp_path / "e.jsonl").write_text('{"age": [1, 2], "price": 1}\n' + line + "\n")
    result = served(tmp_path / "exports" / "job", "--events", tmp_path / "e.jsonl")
    assert result.returncode == 1 and f"line 2: {why}" in result.stderr


def test_raw_events_are_refused_with_the_reason_why_no_export_describes_them(tmp_path):
    world = World(tmp_path, ExportSection(golden=4), "wide_deep")
    world.stager.saw(samples(world.rng, 8))
    exported(world, "float32", tmp_path / "exports" / "job")
    (tmp_path / "e.jsonl").write_text("{}\n")
    result = served(tmp_path / "exports" / "job", "--events", tmp_path / "e.jsonl", "--raw")
    said = 'the export has no "features": its job has not pipe.kind = "columns"\n'
    assert result.returncode == 1 and result.stderr == said


def test_it_needs_nothing_of_headrace_but_for_raw_events():
    """Features of raw events are made by the code of the trainer, so that they have its bits."""
    found = []
    for node in ast.walk(ast.parse(SERVE.read_text())):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [name for name in names if name and name.split(".")[0] == "headrace"]
    assert found == ["headrace.dataset.features.served_events", "headrace.errors"]
    (raw,) = [each for each in ast.parse(SERVE.read_text()).body if getattr(each, "name", "") == "raw_batches_of"]
    assert all(f"from {name}" in ast.unparse(raw) for name in found)
