"""Exports to a folder and to a real S3 server: they read back as written; a failed one leaves no _DONE."""

import json
import re
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from headrace.deadline import Deadline
from headrace.pserver.config import TableSection
from headrace.trainer.exports import parquet_files as tables_module
from headrace.trainer.exports.destination import open_destination
from headrace.trainer.exports.export_messages import ParentExport
from headrace.trainer.exports.exporter import export
from headrace.trainer.exports.reader import chain_of, open_export, state_at
from headrace.trainer.exports.scores import Score, Scores
from tests.fakes.commits_of_rows import TABLE, Job, parent_of
from tests.object_servers import azure, gcs  # noqa: F401
from tests.s3_server import s3  # noqa: F401


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "store")
    yield job
    job.close()


EVERY_STORE = pytest.mark.parametrize("address", ["folder", "s3", "gcs", "azure"], indirect=True)
"""For what an export asks of where it is; the rest is in a folder."""


@pytest.fixture
def address(request, tmp_path):
    if (store := getattr(request, "param", "folder")) == "folder":
        return str(tmp_path / "out")
    return request.getfixturevalue(store).uri("bucket", uuid.uuid4().hex)


@pytest.fixture
def scratch(job):
    return job.store / "live" / "export-test"


def opened(answer, tmp_path):
    return open_export(answer.path, tmp_path / uuid.uuid4().hex).check()


def state(export):
    """(slot, sign) -> weight and vector."""
    found = {}
    for chunk in state_at(chain_of(export), TABLE):
        for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values.tolist(), strict=True):
            found[slot, sign] = values
    return found


def weights(rows):
    return {row: np.asarray(values, np.float32).tolist() for row, values in rows.items()}


OTHER = {"model.w": np.zeros((2, 2), np.float32)}
A = {("a", n): [n, n / 2, -n, 0.1] for n in range(500)} | {("b", n): [1, 2, 3, n] for n in range(300)}


@EVERY_STORE
def test_a_base_and_a_delta_replayed_are_the_state(job, address, scratch, tmp_path):
    job.set(1, A)
    base = job.request(job.commit(1), "base", address)
    answer = export(base, scratch)
    assert answer.outcome == "complete" and answer.current and answer.rows == 800, answer
    assert state(opened(answer, tmp_path)) == weights(A)
    job.set(2, {("a", 1): [9, 9, 9, 9], ("c", 5): [7, 7, 7, 7]})
    job.remove(("b", 1), ("b", 2))
    job.set(3, {("b", 2): [3, 3, 3, 3]})
    delta = job.request(job.commit(3, since=1), "delta", address, parent_of(base))
    answer = export(delta, scratch)
    assert (answer.outcome, answer.rows, answer.tombstones, answer.pending) == ("complete", 3, 1, 0), answer
    now = A | {("a", 1): [9, 9, 9, 9], ("c", 5): [7, 7, 7, 7], ("b", 2): [3, 3, 3, 3]}
    del now["b", 1]
    found = opened(answer, tmp_path)
    assert state(found) == weights(now)
    assert found.tables[TABLE]["by_slot"]["b"] == {"rows": 1, "tombstones": 1}
    assert found.tables[TABLE]["model_rows"] == len(now)
    assert not scratch.exists()


def test_an_export_is_pointed_to_only_when_its_score_is_there_and_good(job, address, scratch):
    """A version without a score fails its gate once the wait is over; another one waits for nothing."""
    job.set(1, A)
    gates = {"evaluator": {"auc_min": 0.7, "wait": 0.01}}
    commits, scores = [job.commit(version) for version in (1, 2, 3)], Scores(job.store)
    for commit, auc in ((commits[1], 0.69), (commits[2], 0.71)):
        found = {"tasks": {"ctr": {"auc": auc}}}
        scores.add(Score(version=commit.version, commit=commit.name, at="", metrics=found), ())
    answers = [export(job.request(commit, "base", address, gates=gates), scratch) for commit in commits]
    assert [(each.outcome, each.current) for each in answers] == [("complete", each) for each in (False, False, True)]
    assert [each.failed_gates for each in answers] == [
        ("the evaluator has not scored this version within 0.01 s",),
        ("auc of the evaluator is below 0.7: 0.69 (ctr)",),
        (),
    ]


@pytest.fixture
def made(scratch):
    """Makes an export that must be complete."""

    def made(request):
        answer = export(request, scratch)
        assert answer.outcome == "complete", answer
        assert not scratch.exists()
        return answer

    return made


@pytest.fixture
def outlet(address, tmp_path):
    return open_destination(address, "small", tmp_path / "gathered", Deadline.after(600))


def names(outlet):
    """Every export that is there, and whether it has its DONE."""
    found = [f"{timeline}/{name}" for timeline in outlet.folders("") for name in outlet.folders(timeline)]
    return {path: "_DONE" in outlet.names(path) for path in found if outlet.names(path)}


def current(outlet):
    text = outlet.get("current.json")
    return None if text is None else json.loads(text)


def done_lines(outlet):
    return [json.loads(line)["path"] for line in outlet.tail("donefile.txt").splitlines()]


def edit(outlet, path, **changes):
    outlet.put(path, json.dumps(json.loads(outlet.get(path)) | changes).encode())


def chain(job, address, made, count, **section):
    """A base and deltas that follow it: their requests and answers."""
    requests, parent = [], None
    for version in range(1, count + 1):
        job.set(version, {("a", version): [version, 0, 0, 0]})
        kind = "base" if version == 1 else "delta"
        requests.append(job.request(job.commit(version, since=version - 1), kind, address, parent, **section))
        parent = parent_of(requests[-1])
    return requests, [made(request) for request in requests]


# What is in an export


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    "section", [{"dim": 3}, {"dim": 3, "first_order": False}, {"dim": 0}, {"dim": 3, "extend_at": 5}]
)
def test_any_type_and_shape_reads_back(tmp_path, dtype, section):
    job = Job(tmp_path / "store", TableSection(**section))
    width = section["dim"] + section.get("first_order", True)
    rows = {("a", n): np.linspace(-1, 1, width) * n for n in range(50)}
    job.set(1, rows)
    answer = export(job.request(job.commit(1), "base", str(tmp_path / "out"), dtype=dtype), tmp_path / "scratch")
    found = state(opened(answer, tmp_path))
    for row, values in rows.items():
        assert np.allclose(found[row], values, atol={"float32": 0, "float16": 0.02, "int8": 0.25}[dtype], rtol=1e-6)
    job.close()


def test_thresholds_exclude_rows_and_count_them(job, address, made, tmp_path):
    job.set(1, A, show=1.0)  # scores 0.1
    job.set(1, {("c", 1): [1, 1, 1, 1]}, show=100.0, delta=9.0)
    base = job.request(job.commit(1), "base", address, base_threshold=0.5)
    answer = made(base)
    assert (answer.rows, answer.pending) == (1, 800)
    assert opened(answer, tmp_path).manifest["thresholds"]["base_threshold"] == 0.5
    job.set(2, {("c", 1): [2, 2, 2, 2], ("c", 2): [3, 3, 3, 3]}, show=100.0, delta=9.0)
    job.set(2, {("c", 3): [4, 4, 4, 4]}, show=100.0, delta=0.1)
    job.set(2, {("a", 3): [4, 4, 4, 4]}, show=1.0, delta=9.0)
    commit = job.commit(2, since=1)
    thresholds = {"base_threshold": 0.5, "delta_threshold": 1.0, "golden": 0}
    answer = made(job.request(commit, "delta", address, parent_of(base), **thresholds))
    assert (answer.rows, answer.pending) == (2, 2)
    assert state(opened(answer, tmp_path)) == weights({("c", 1): [2] * 4, ("c", 2): [3] * 4})


def test_after_a_failure_a_delta_takes_all_that_changed(job, address, made):
    job.set(1, A, show=100.0)
    base = job.request(job.commit(1), "base", address)
    made(base)
    job.set(2, {("a", 3): [4, 4, 4, 4]}, show=100.0, delta=0.0)
    request = job.request(job.commit(2, since=1), "delta", address, parent_of(base), delta_threshold=1.0, all=True)
    assert (made(request).rows, made(request).pending) == (1, 0)


def test_an_older_increment_names_more_than_a_delta_takes(job, address, made):
    job.set(1, A)
    job.set(2, {("a", 1): [1, 1, 1, 1]})
    base = job.request(job.commit(2), "base", address)
    made(base)
    job.set(3, {("a", 2): [2, 2, 2, 2]})
    answer = made(job.request(job.commit(3, since=1), "delta", address, parent_of(base)))
    assert (answer.rows, answer.pending) == (1, 0)


@EVERY_STORE
def test_many_files_are_one_table(job, address, made, monkeypatch, tmp_path):
    monkeypatch.setattr(tables_module, "MAX_FILE_ROWS", 100)
    monkeypatch.setattr("headrace.pserver.store.row_files.SCAN_BLOCKS", 2)
    job.set(1, A)
    found = opened(made(job.request(job.commit(1), "base", address)), tmp_path)
    assert len([path for path in found.files if path.startswith("rows-")]) >= 4
    assert sum(file.get("rows", 0) for file in found.files.values()) == 800
    assert state(found) == weights(A)


def test_the_page_tells_other_tools_which_files_are_rows(job, made, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tables_module, "MAX_FILE_ROWS", 100)
    job.set(1, A)
    answer = made(job.request(job.commit(1), "base", str(tmp_path / "runs/job/exports/serving")))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pa.ArrowInvalid, match="Parquet"):
        ds.dataset(answer.path, format="parquet")  # what the page says: an export is several tables
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    (recipe,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    known = {}
    exec(recipe.replace("serving/job", "serving/small").replace("rows-default-", f"rows-{TABLE}-"), known)  # noqa: S102
    rows = known["rows"].to_table().to_pylist()
    found = {(row["slot"], row["sign"]): [row["weight"], *row["vector"]] for row in rows}
    assert found == weights(A) and "800 ['slot', 'sign', 'key', 'weight', 'vector']" in capsys.readouterr().out


def test_an_empty_table_has_no_files_and_is_an_export(job, address, made, tmp_path):
    base = job.request(job.commit(1), "base", address)
    found = opened(made(base), tmp_path)
    assert list(found.files) == ["dense.safetensors"] and state(found) == {}
    answer = made(job.request(job.commit(2, since=1), "delta", address, parent_of(base)))
    assert (answer.rows, answer.tombstones) == (0, 0)


def test_rows_of_a_slot_that_the_spec_has_no_more_keep_a_name(job, address, made, tmp_path):
    job.set(1, {("a", 1): [1, 1, 1, 1], ("c", 2): [2, 2, 2, 2]})
    request = job.request(job.commit(1), "base", address)
    found = opened(made(request.model_copy(update={"slots": {TABLE: {0: "a"}}})), tmp_path)
    assert state(found) == weights({("a", 1): [1] * 4, ("group-7", 2): [2] * 4})


def test_dense_tensors_are_the_models_without_its_prefix(job, address, made, tmp_path):
    found = opened(made(job.request(job.commit(3), "base", address)), tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.dense().items()} == {"w": [[3, 3], [3, 3]]}
    assert found.manifest["onnx"]["ok"] is False and found.manifest["golden"]["ok"] is None


def test_facts_are_in_the_manifest_and_numbers_that_are_none_are_null(job, address, made, tmp_path):
    facts = {"positions": {"0": 5}, "day": 3, "metrics": {"click": {"auc": float("nan")}}, "fingerprint": {"x": "y"}}
    manifest = opened(made(job.request(job.commit(1), "base", address, facts=facts, why="asked")), tmp_path).manifest
    assert (manifest["positions"], manifest["day"], manifest["why"]) == ({"0": 5}, 3, "asked")
    assert manifest["metrics"] == {"click": {"auc": None}} and manifest["fingerprint"] == {"x": "y"}
    assert manifest["event_time"] is None and manifest["parent"] is None


# Steps after a complete export


@EVERY_STORE
def test_current_json_names_the_newest_that_passed_with_its_chain(job, address, made, outlet):
    _, answers = chain(job, address, made, 3)
    assert all(answer.current for answer in answers)
    told = current(outlet)
    assert told["path"] == "t1/0000000003-delta" and told["version"] == 3
    assert told["chain"] == done_lines(outlet) == ["t1/0000000001-base", "t1/0000000002-delta", "t1/0000000003-delta"]


def test_a_gate_that_fails_keeps_it_on_disk_and_says_why(job, address, made, outlet, tmp_path):
    requests, _ = chain(job, address, made, 1)
    job.set(2, {("a", 9): [1, 1, 1, 1]})
    strict = {"gates": {"min_rows": 100}}
    second = job.request(job.commit(2, since=1), "delta", address, parent_of(requests[0]), **strict)
    answer = made(second)
    assert not answer.current and answer.failed_gates == ("2 rows are fewer than 100",)
    assert current(outlet)["version"] == 1 and len(done_lines(outlet)) == 2
    assert opened(answer, tmp_path).manifest["gates"]["min_rows"]["passed"] is False
    job.set(3, {("a", 10): [1, 1, 1, 1]})
    assert made(job.request(job.commit(3, since=2), "delta", address, parent_of(second))).current
    assert current(outlet)["chain"] == done_lines(outlet), "the one that failed is part of the chain"


def test_weights_that_are_no_numbers_are_not_pointed_to(job, address, made, outlet):
    job.set(1, {("a", 1): [float("nan"), 0, 0, 0]})
    answer = made(job.request(job.commit(1), "base", address))
    assert not answer.current and "no finite numbers" in answer.failed_gates[0] and current(outlet) is None


@EVERY_STORE
def test_a_repeated_request_changes_nothing(job, address, made, outlet):
    requests, answers = chain(job, address, made, 2)
    outlet.remove("current.json")
    again = [made(request) for request in requests]
    assert [answer.rows for answer in again] == [answer.rows for answer in answers]
    assert current(outlet)["version"] == 2 and len(done_lines(outlet)) == 2


def test_an_incomplete_line_of_the_donefile_is_dropped(job, tmp_path, made):
    requests, _ = chain(job, str(tmp_path / "out"), made, 1)
    with (tmp_path / "out" / "small" / "donefile.txt").open("ab") as file:
        file.write(b'{"path": "t1/00')
    job.set(2, A)
    made(job.request(job.commit(2, since=1), "delta", str(tmp_path / "out"), parent_of(requests[0])))
    lines = (tmp_path / "out" / "small" / "donefile.txt").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2]


@EVERY_STORE
def test_old_exports_are_removed(job, address, made, outlet):
    parent, kept = None, {}
    for version, kind in enumerate(("base", "delta", "base", "delta", "base", "delta"), 1):
        job.set(version, A)
        request = job.request(
            job.commit(version, since=version - 1), kind, address, None if kind == "base" else parent, keep=2
        )
        answer, parent = made(request), parent_of(request)
        kept[version] = answer.removed
    assert kept[5] == ("t1/0000000002-delta", "t1/0000000001-base")
    assert sorted(names(outlet)) == [f"t1/000000000{n}-{'base' if n % 2 else 'delta'}" for n in (3, 4, 5, 6)]


# Failures


def failed(answer, outlet, path, words):
    assert answer.outcome == "failed" and words in answer.error, answer
    assert not names(outlet).get(path), "it has no _DONE"
    return answer


@EVERY_STORE
def test_a_delta_without_its_parent_is_final(job, address, scratch, made, outlet):
    job.set(1, A)
    parent = ParentExport(name="0000000001-base", version=1, timeline="t1")
    request = job.request(job.commit(2, since=1), "delta", address, parent)
    assert failed(export(request, scratch), outlet, "t1/0000000002-delta", "is not in").final
    requests, _ = chain(job, address, made, 1)
    outlet.remove("t1/0000000001-base/_DONE")
    assert failed(export(request, scratch), outlet, "t1/0000000002-delta", "any more: a base is needed").final
    assert made(requests[0]).outcome == "complete"


def test_a_delta_without_recorded_changes_is_final(job, address, scratch, made, outlet):
    requests, _ = chain(job, address, made, 1)
    job.set(2, A)
    request = job.request(job.commit(2, since=None), "delta", address, parent_of(requests[0]))
    answer = failed(export(request, scratch), outlet, "t1/0000000002-delta", "does not record which rows")
    assert answer.final and "t1/0000000002-delta" not in names(outlet), "nothing half done is left"


@pytest.mark.parametrize("path", ["current.json", "t1/0000000001-base/manifest.json"])
def test_files_of_a_newer_headrace_are_left_alone(job, address, scratch, made, outlet, path):
    requests, _ = chain(job, address, made, 1)
    edit(outlet, path, format=99)
    job.set(2, A)
    request = job.request(job.commit(2, since=1), "delta", address, parent_of(requests[0]))
    assert failed(export(request, scratch), outlet, "t1/0000000002-delta", "is of format 99").final


@EVERY_STORE
def test_another_export_at_the_same_address_is_left_alone(job, address, scratch, made, outlet, tmp_path):
    requests, answers = chain(job, address, made, 1)
    other = requests[0].model_copy(update={"facts": {"positions": {"0": 7}}})
    answer = export(other, scratch)
    assert answer.final and "holds another complete export: its positions is {}" in answer.error
    again = requests[0].model_copy(update={"commit": job.commit(1, timeline="t2", dense=OTHER).folder})
    answer = export(again, scratch)
    assert answer.final and "its dense.safetensors has other tensors" in answer.error
    opened(answers[0], tmp_path)


def test_a_damaged_commit_is_final_and_says_which(job, address, scratch, outlet):
    job.set(1, A)
    commit = job.commit(1)
    for path in commit.folder.glob("shard-1/default/*.sst"):
        path.unlink()
    answer = failed(export(job.request(commit, "base", address), scratch), outlet, "t1/0000000001-base", "default")
    assert answer.final and not scratch.exists()
    commit.folder.joinpath("manifest.json").unlink()
    assert export(job.request(commit, "base", address), scratch).final


@EVERY_STORE
def test_leftovers_of_an_earlier_try_are_removed(job, address, made, outlet, tmp_path):
    outlet.put("t1/0000000001-base/rows-default-7.parquet", b"half")
    job.set(1, A)
    found = opened(made(job.request(job.commit(1), "base", address)), tmp_path)
    assert "rows-default-7.parquet" not in outlet.names("t1/0000000001-base")
    assert state(found) == weights(A)
