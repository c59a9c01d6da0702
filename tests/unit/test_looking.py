"""inspect, diff and materialize: on exports made by hand, and on commits that an import made."""

import json
import sys

import numpy as np
import pytest

from headrace.service.cli import main
from headrace.service.exports import model_import
from headrace.service.exports.model_import import ImportRequest, import_into
from headrace.service.spec.job import load_job
from headrace.trainer.exports.reader import chain_of, open_export, state_at
from headrace.trainer.exports.row_chunks import RowChunk
from tests.fakes.exports import write_export
from tests.integration.stream_job import write_job

BASE = {("a", 1): [0.5, 1, 2, 3, 4], ("a", 2): [0, -1, -2, -3, -4], ("b", 1): [1, 0, 0, 0, 0]}
LATER = {("a", 1): [0.5, 1, 2, 3, 7], ("b", 1): [1, 0, 0, 0, 1], ("b", 7): [1] * 5}


@pytest.fixture
def says(monkeypatch, capfd):
    """Runs the command line; exit code and output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main.main()
        said = capfd.readouterr()
        return end.value.code, said.out + said.err

    return run


@pytest.fixture
def chain(tmp_path):
    """A base of version 1, deltas of 2 and 4."""
    folder = tmp_path / "small" / "t1"
    dense = {"w": np.array([3.0, 4.0]), "same": np.ones(2)}
    return [
        write_export(folder, "base", 1, BASE, dense=dense),
        write_export(folder, "delta", 2, LATER, [("a", 2)], parent=(1, "base"), dense=dense | {"w": [3.0, 4.5]},
                     event_time=[3600.0, 7200.0]),
        write_export(folder, "delta", 4, {("a", 2): [2] * 5}, [("b", 7)], parent=(2, "delta"), dense=dense,
                     event_time=[7200.0, 14400.0]),
    ]  # fmt: skip


def rows_of(path, tmp_path):
    export = open_export(str(path), tmp_path / "scratch")
    return {
        (slot, sign): values
        for chunk in state_at(chain_of(export), "default")
        for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values.tolist(), strict=True)
    }


STATE_4 = {("a", 1): LATER["a", 1], ("a", 2): [2] * 5, ("b", 1): LATER["b", 1]}


# inspect


def test_a_base_is_told_in_words(chain, says):
    code, said = says("inspect", chain[0])
    assert code == 0
    for words in (
        "0000000001-base: base of job small, stream main",
        "version 1 of timeline t1, day 0",
        "event time 1970-01-01T00:00:00+00:00 to 1970-01-01T01:00:00+00:00",
        "table default: 3 rows, 0 pending, 3 in the model; dim 4, float32",
        "  slot a: 2 rows\n",
        "onnx: none: by hand",
        "sound: every file is as written",
    ):
        assert words in said
    assert "tombstones" not in said, "a base has none"


def test_a_delta_tells_what_moved_farthest(chain, says):
    code, said = says("inspect", chain[1], "--top", "1", "--json")
    found = json.loads(said)
    assert code == 0 and found["sound"] and found["chain"] == ["0000000001-base", "0000000002-delta"]
    assert found["movers"]["default"] == {
        "new": 1, "changed": 2, "same": 0,
        "largest": [{"table": "default", "slot": "a", "sign": 1, "distance": 3.0}],
    }  # fmt: skip
    code, said = says("inspect", chain[1])
    assert said.index("  3: slot a, sign 1") < said.index("  1: slot b, sign 1")
    assert "1 new rows, 2 changed, largest moves:" in said and "  slot a: 1 rows, 1 tombstones" in said
    code, said = says("inspect", chain[1], "--top", "0")
    assert "1 new rows, 2 changed\n" in said and "largest moves" not in said


def test_damage_and_a_broken_chain_are_told_and_the_exit_code_says_so(chain, says):
    (chain[1] / "model.json").write_text("[]")
    code, said = says("inspect", chain[1])
    assert code == 1 and "damaged: model.json has" in said
    (chain[0] / "_DONE").unlink()
    code, said = says("inspect", chain[2], "--json")
    assert code == 1 and "0000000001-base, which cannot be used any more" in json.loads(said)["chain_broken"]


def test_gates_are_told(tmp_path, says):
    gates = {"min_auc": {"passed": False, "value": 0.4, "limit": 0.5}}
    _, said = says("inspect", write_export(tmp_path, "base", 1, BASE, gates=gates))
    assert "gate min_auc: FAILED: 0.4, limit 0.5" in said


def test_gates_are_told_in_plain_words(tmp_path, says):
    gates = {
        "finite": {"passed": True, "value": 0, "limit": 0},
        "golden": {"passed": True, "value": "", "limit": True},
        "min_auc": {"passed": True, "value": {"ctr": 0.71}, "limit": 0.5},
        "calibration": {"passed": False, "value": {"ctr": 2.0}, "limit": [0.5, 1.5], "why": "calibration: 2 (ctr)"},
        "max_row_change": {"passed": True, "value": None, "limit": 0.25},
        "min_rows": {"passed": True, "value": 1200, "limit": 1000},
    }
    _, said = says("inspect", write_export(tmp_path, "base", 1, BASE, gates=gates))
    assert [line for line in said.splitlines() if line.startswith("gate ")] == [
        "gate finite: passed: all exported weights are finite",
        "gate golden: passed: the export gives its golden predictions",
        "gate min_auc: passed: 0.71 (ctr), limit 0.5",
        "gate calibration: FAILED: calibration: 2 (ctr)",
        "gate max_row_change: passed: there is nothing to compare with, limit 0.25",
        "gate min_rows: passed: 1,200, limit 1,000",
    ]


def test_what_is_no_export_is_an_error(tmp_path, says):
    code, said = says("inspect", tmp_path)
    assert code == 1 and "is not an export" in said


# diff


def test_two_exports_mean_their_whole_states(chain, says):
    code, said = says("diff", chain[0], chain[2], "--json")
    found = json.loads(said)
    assert code == 1 and not found["same"]
    table = found["tables"]["default"]
    assert {name: table[name] for name in ("new", "gone", "changed", "same")} == {
        "new": 0, "gone": 0, "changed": 3, "same": 0
    }  # fmt: skip
    assert [(move["slot"], move["sign"]) for move in table["largest"]] == [("a", 2), ("a", 1), ("b", 1)]
    assert found["dense"] == []


def test_rows_new_gone_and_changed_are_told_by_slot_and_tensors_with_norms(chain, says):
    code, said = says("diff", chain[0], chain[1])
    assert code == 1
    assert said.splitlines() == [
        "0000000001-base -> 0000000002-delta",
        "table default: 1 new, 1 deleted, 2 changed, 0 the same",
        "  slot a: 0 new, 1 deleted, 1 changed, 0 the same",
        "  slot b: 1 new, 0 deleted, 1 changed, 0 the same",
        "  moved 3: slot a, sign 1",
        "  moved 1: slot b, sign 1",
        "dense w: moved 0.5; norm 5 -> 5.40833",
    ]


def test_the_same_is_exit_code_0_and_trouble_2(chain, says):
    assert says("diff", chain[2], chain[2]) == (0, "0000000004-delta and 0000000004-delta are the same: 3 rows\n")
    code, said = says("diff", chain[2], chain[2].parent)
    assert code == 2 and said.startswith("error: ")


def test_tensors_that_came_went_or_changed_shape_are_told(tmp_path, says):
    old = write_export(tmp_path / "x", "base", 1, {}, dense={"gone": [1.0], "shape": [1.0]})
    new = write_export(tmp_path / "y", "base", 1, {}, dense={"new": [2.0], "shape": [1.0, 1.0]})
    code, said = says("diff", old, new)
    assert code == 1
    for words in ("gone: deleted, norm was 1", "new: new, norm 2", "shape: another shape; norm 1 -> 1.41421"):
        assert words in said


def test_commits_of_a_job_are_compared_and_inspected(tmp_path, says, monkeypatch):
    monkeypatch.setattr(model_import, "shapes_of", lambda job, folder: {"w": (2,)})
    path = write_job(tmp_path, num_parts=1, num_lines=1)
    job = load_job(path)
    import_into(job, ImportRequest(str(write_export(tmp_path / "out", "base", 3, BASE, dense={"w": [3.0, 4.0]}))))
    code, said = says("inspect", "1", "--job", path)
    assert code == 0
    for words in (
        "t0-0000000001-g0: version 1 of timeline t0 of job small",
        "imported from export",
        "table default: 3 rows, day 0",
        "  slot a: 2 rows",
        "shard-0: buckets 0-4096",
        "sound: every file is as written",
    ):
        assert words in said
    code, said = says("diff", "1", "t0-0000000001-g0", "--job", path)
    assert (code, said) == (0, "t0-0000000001-g0 and t0-0000000001-g0 are the same: 3 rows\n")
    (file,) = (job.store / "commits" / "t0-0000000001-g0").glob("dense.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, said = says("inspect", "1", "--job", path, "--json")
    assert code == 1 and json.loads(said)["damage"] == {"dense.safetensors": "has other bytes than were written"}


# materialize


def test_a_chain_becomes_one_base(chain, tmp_path, says):
    code, said = says("materialize", chain[2], "--out", tmp_path / "whole")
    assert code == 0, said
    assert "0000000004-base, 3 rows, materialized from 0000000001-base and 2 deltas, up to 0000000004-delta" in said
    export = open_export(str(tmp_path / "whole"), tmp_path / "scratch").check()
    assert (export.kind, export.manifest["parent"], export.version) == ("base", None, 4)
    assert export.manifest["event_time"] == [0.0, 14400.0]
    table = export.tables["default"]
    assert (table["rows"], table["tombstones"], table["pending"]) == (3, 0, 0)
    assert table["by_slot"] == {"a": {"rows": 2, "tombstones": 0}, "b": {"rows": 1, "tombstones": 0}}
    assert rows_of(tmp_path / "whole", tmp_path) == STATE_4
    assert says("diff", tmp_path / "whole", chain[2])[0] == 0
    assert export.dense()["w"].tolist() == [3.0, 4.0]
    whole = tmp_path / "whole"
    assert (whole / "model.json").read_bytes() == (chain[2] / "model.json").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_it_is_bit_for_bit_the_base_exported_there(tmp_path, says, dtype):
    rng = np.random.default_rng(3)
    first = {("a", sign): rng.normal(size=5) for sign in range(300)}
    then = {("a", sign): rng.normal(size=5) for sign in range(250, 400)}
    gone = [("a", sign) for sign in range(50)]
    write_export(tmp_path / "t1", "base", 1, first, dtype=dtype, rows_a_file=70)
    last = write_export(tmp_path / "t1", "delta", 2, then, gone, parent=(1, "base"), dtype=dtype)
    state = {name: row for name, row in (first | then).items() if name not in gone}
    there = write_export(tmp_path / "other", "base", 2, state, dtype=dtype)
    assert says("materialize", last, "--out", tmp_path / "whole")[0] == 0

    def columns(path):
        export = open_export(str(path), tmp_path / "scratch")
        chunks = list(export.rows("default"))
        return [
            np.concatenate([getattr(chunk, name) for chunk in chunks]).tobytes()
            for name in ("sign_R", "key_R", "weight_R", "vector_RD", *(["scale_R"] if dtype == "int8" else []))
        ]

    assert columns(tmp_path / "whole") == columns(there)


@pytest.mark.parametrize(
    ("options", "version"),
    [
        (["--to", "1"], 1),
        (["--to", "3"], 2),
        (["--to", "9"], 4),
        (["--at", "1970-01-01T02:00:00"], 2),
        (["--at", "1970-01-01T05:00:00+01:00"], 4),
    ],
)
def test_a_version_or_a_time_chooses(chain, tmp_path, says, options, version):
    assert says("materialize", chain[0], "--out", tmp_path / "whole", *options)[0] == 0
    assert open_export(str(tmp_path / "whole"), tmp_path / "scratch").version == version


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "0"], "no export is as old as version 0; the oldest is 0000000001-base"),
        (["--at", "soon"], "'soon' is not a time"),
        (["--at", "1970-01-01", "--to", "3"], "not both"),
    ],
)
def test_what_cannot_be_chosen_is_told(chain, tmp_path, says, options, words):
    code, said = says("materialize", chain[0], "--out", tmp_path / "whole", *options)
    assert code == 2 and words in said
    assert not (tmp_path / "whole").exists()


def test_a_folder_that_is_there_is_left_alone_and_damage_leaves_nothing(chain, tmp_path, says):
    (tmp_path / "whole").mkdir()
    code, said = says("materialize", chain[2], "--out", tmp_path / "whole")
    assert code == 2 and "exists already" in said
    (chain[1] / "rows-default-0.parquet").write_bytes(b"")
    code, said = says("materialize", chain[2], "--out", tmp_path / "new")
    assert code == 1 and "rows-default-0.parquet has 0 bytes" in said
    assert not list(tmp_path.glob("new*"))


def test_a_chain_of_two_types_has_no_base(tmp_path, says):
    write_export(tmp_path, "base", 1, BASE)
    last = write_export(tmp_path, "delta", 2, LATER, parent=(1, "base"), dtype="float16")
    code, said = says("materialize", last, "--out", tmp_path / "whole")
    assert code == 1 and "values of two types" in said
    assert not list(tmp_path.glob("whole*"))


def test_a_chunk_without_columns_has_no_values():
    empty = RowChunk((), np.empty(0, np.int32), np.empty(0, np.uint64), np.empty(0, np.uint64))
    assert empty.values.shape == (0, 0)
