"""Exports read back: what is refused, what rows say, and chains replayed as a dictionary would."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.blob.blob_store import open_blobs, whole
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.pserver.store.row_store import sort_order_of
from headrace.trainer.exports.destination import ExportTooNew, ExportUnusable, ParentMissing
from headrace.trainer.exports.reader import chain_of, is_export, open_export, state_at
from headrace.trainer.exports.row_chunks import (
    ChunkStream,
    KeysOutOfOrder,
    RowChunk,
    compare_states,
    replay_chunks,
    replayed_reference,
)
from tests.fakes.exports import key, sorted_rows, write_export
from tests.s3_server import s3  # noqa: F401


@pytest.fixture
def opened(tmp_path):
    return lambda path: open_export(str(path), tmp_path / "scratch")


def rows_of(chunks):
    """(slot, sign) -> values, of a stream."""
    found = {}
    for chunk in chunks:
        for slot, sign, values in zip(chunk.names(), chunk.sign_R.tolist(), chunk.values, strict=True):
            assert (slot, sign) not in found
            found[slot, sign] = values.tolist()
    return found


A = {("a", 1): [0.5, 1, 2, 3, 4], ("a", 2): [0, -1, -2, -3, -4], ("b", 1): [1, 0, 0, 0, 0]}


def edit(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


# What is refused


def test_an_export_without_done_is_not_read(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A)
    (path / "_DONE").unlink()
    with pytest.raises(ExportUnusable, match="no _DONE"):
        opened(path)


def test_an_export_of_an_older_headrace_is_read(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A)
    (path / "_DONE").rename(path / "DONE")
    assert opened(path).version == 1
    delta = write_export(tmp_path, "delta", 2, A, parent=(1, "base"))
    assert [each.version for each in chain_of(opened(delta))] == [1, 2], "under a delta with the new name"


def test_a_folder_without_a_manifest_is_no_export(tmp_path, opened):
    with pytest.raises(ExportUnusable, match=r"is not an export"):
        opened(tmp_path)
    assert not is_export(str(tmp_path), tmp_path / "scratch")


def test_a_newer_format_is_named_with_ours(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A, format=7)
    with pytest.raises(ExportTooNew, match=r"format 7; .* reads format 1"):
        opened(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "files": 3}'])
def test_a_manifest_that_cannot_be_read_is_told_of(tmp_path, opened, text):
    path = write_export(tmp_path, "base", 1, A)
    (path / "manifest.json").write_text(text)
    with pytest.raises(ExportUnusable, match=r"cannot be read|JSON"):
        opened(path)


def test_a_manifest_names_no_file_outside(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A)
    edit(path, files={"../other": {"sha256": "", "bytes": 0}})
    with pytest.raises(ExportUnusable, match=r"'\.\./other'"):
        opened(path)


def test_what_points_to_an_export_names_none_elsewhere(tmp_path, opened):
    elsewhere = write_export(tmp_path / "elsewhere" / "t1", "base", 1, A)
    job = tmp_path / "root" / "job"
    job.mkdir(parents=True)
    for path in (str(elsewhere), "../../elsewhere/t1/0000000001-base", "../../..", "."):
        (job / "current.json").write_text(json.dumps({"format": 1, "path": path, "chain": [path]}))
        with pytest.raises(ExportUnusable, match="names what is not of an export"):
            opened(job)


def test_an_export_has_no_links(tmp_path, opened):
    elsewhere = write_export(tmp_path / "elsewhere" / "t1", "base", 1, A)
    linked = tmp_path / "root" / "0000000001-base"
    linked.mkdir(parents=True)
    for path in elsewhere.iterdir():
        (linked / path.name).symlink_to(path)
    with pytest.raises(ExportUnusable, match=r"manifest\.json is a symbolic link"):
        opened(linked)
    (linked / "manifest.json").unlink()
    (linked / "manifest.json").write_bytes((elsewhere / "manifest.json").read_bytes())
    (linked / "_DONE").unlink()
    (linked / "_DONE").touch()
    assert all("is a symbolic link" in problem for problem in opened(linked).problems().values())
    job = tmp_path / "root" / "job"
    job.mkdir()
    (job / "t1").symlink_to(tmp_path / "elsewhere" / "t1")
    (job / "current.json").write_text(json.dumps({"format": 1, "path": "t1/0000000001-base", "chain": []}))
    with pytest.raises(ExportUnusable, match="job/t1 is a symbolic link"):
        opened(job)
    (tmp_path / "latest").symlink_to(elsewhere)
    assert opened(tmp_path / "latest").version == 1, "the address itself may be one"


def test_damage_is_found_by_file(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A)
    assert opened(path).check().problems() == {}
    rows = path / "rows-default-0.parquet"
    content = bytearray(rows.read_bytes())
    content[20] ^= 1
    rows.write_bytes(content)
    (path / "model.json").unlink()
    assert opened(path).problems() == {
        "rows-default-0.parquet": "has other bytes than were written",
        "model.json": "is missing",
    }
    with pytest.raises(ExportUnusable, match=r"rows-default-0\.parquet has other bytes"):
        opened(path).check()


def test_a_missing_file_of_rows_is_told_of_when_it_is_read(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A)
    (path / "rows-default-0.parquet").unlink()
    with pytest.raises(ExportUnusable, match=r"rows-default-0\.parquet is missing"):
        list(opened(path).rows("default"))


def test_an_unknown_table_gets_the_nearest_name(tmp_path, opened):
    with pytest.raises(ExportUnusable, match=r"did you mean 'default'\?"):
        list(opened(write_export(tmp_path, "base", 1, A)).rows("defult"))


def test_vectors_of_another_length_than_the_manifest_tells_are_refused(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A)
    tables = json.loads((path / "manifest.json").read_text())["tables"]
    edit(path, tables={"default": tables["default"] | {"dim": 5}})
    with pytest.raises(ExportUnusable, match="not of 5 numbers"):
        list(opened(path).rows("default"))


def test_keys_out_of_order_or_twice_are_named(tmp_path, opened):
    path = write_export(tmp_path, "base", 1, A, rows_a_file=2)
    first, second = (path / f"rows-default-{number}.parquet" for number in (0, 1))
    second.write_bytes(first.read_bytes())
    slot, sign = sorted_rows(A)[0]
    with pytest.raises(KeysOutOfOrder, match=rf"sign {sign} of slot '{slot}'\) occurs twice"):
        list(state_at([opened(path)], "default"))


# What rows say


@pytest.mark.parametrize(("dtype", "within"), [("float32", 0), ("float16", 1e-2), ("int8", 0.02)])
@pytest.mark.parametrize(("dim", "first_order"), [(4, True), (4, False), (0, True)])
def test_rows_come_back_in_float32_whatever_their_type(tmp_path, opened, dtype, within, dim, first_order):
    rows = {name: values[1 - first_order :][: dim + first_order] for name, values in A.items()}
    export = opened(write_export(tmp_path, "base", 1, rows, dim=dim, first_order=first_order, dtype=dtype))
    found = rows_of(export.rows("default"))
    assert found.keys() == rows.keys()
    for name, values in rows.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=within)
    (chunk,) = export.rows("default")
    assert chunk.values.dtype == np.float32
    assert chunk.key_R.tolist() == [key(*row) for row in sorted_rows(rows)]


def test_rows_come_in_bounded_chunks_over_many_files(tmp_path, opened, monkeypatch):
    monkeypatch.setattr("headrace.trainer.exports.reader.CHUNK_ROWS", 7)
    rows = {("a", sign): [sign, 0, 0, 0, 0] for sign in range(100)}
    export = opened(write_export(tmp_path, "base", 1, rows, rows_a_file=30))
    assert [len(chunk) for chunk in export.rows("default")] == [7, 7, 7, 7, 2] * 3 + [7, 3]
    assert rows_of(export.rows("default")) == rows


def test_the_current_export_of_a_jobs_folder_is_opened(tmp_path, opened):
    path = write_export(tmp_path / "small" / "t1", "base", 3, A)
    (tmp_path / "small" / "current.json").write_text(json.dumps({"format": 1, "path": f"t1/{path.name}"}))
    assert opened(tmp_path / "small").name == "0000000003-base"


# Chains


def test_a_chain_is_replayed_deltas_over_base(tmp_path, opened):
    write_export(tmp_path, "base", 1, A)
    write_export(tmp_path, "delta", 2, {("a", 1): [9, 9, 9, 9, 9], ("b", 7): [1] * 5}, [("a", 2)], parent=(1, "base"))
    last = write_export(tmp_path, "delta", 5, {("a", 2): [3] * 5}, [("b", 7)], parent=(2, "delta"))
    chain = chain_of(opened(last))
    assert [export.version for export in chain] == [1, 2, 5]
    assert rows_of(state_at(chain, "default")) == {("a", 1): [9] * 5, ("a", 2): [3] * 5, ("b", 1): A["b", 1]}
    assert rows_of(state_at(chain[:2], "default")) == {("a", 1): [9] * 5, ("b", 1): A["b", 1], ("b", 7): [1] * 5}


def test_a_chain_whose_parent_is_pruned_says_so(tmp_path, opened):
    last = write_export(tmp_path, "delta", 2, {}, parent=(1, "base"))
    with pytest.raises(ParentMissing, match=r"builds on 0000000001-base, which cannot be used any more"):
        chain_of(opened(last))


def test_a_chain_of_two_types_is_read_in_float32(tmp_path, opened):
    write_export(tmp_path, "base", 1, A)
    last = write_export(tmp_path, "delta", 2, {("a", 1): [2] * 5}, parent=(1, "base"), dtype="float16")
    state = list(state_at(chain_of(opened(last)), "default"))
    assert {chunk.vector_RD.dtype for chunk in state} == {np.dtype(np.float32)}
    assert rows_of(state) == A | {("a", 1): [2] * 5}


def test_a_chain_of_two_dims_is_refused(tmp_path, opened):
    write_export(tmp_path, "base", 1, {("a", 1): [1, 2]}, dim=1)
    last = write_export(tmp_path, "delta", 2, A, parent=(1, "base"))
    with pytest.raises(ExportUnusable, match=r"dim 4, in 0000000001-base dim 1"):
        chain_of(opened(last))


def test_exports_in_an_object_store_are_read_alike(s3, tmp_path):  # noqa: F811
    write_export(tmp_path, "base", 1, A)
    write_export(tmp_path, "delta", 2, {("a", 1): [9] * 5}, [("b", 1)], parent=(1, "base"))
    uri = s3.uri("bucket", "reading")
    blobs = open_blobs(parse(uri), "exports at", Deadline.after(30))
    for path in tmp_path.glob("*/*"):
        blobs.put(f"t1/{path.parent.name}/{path.name}", whole(path.read_bytes()), Deadline.after(30))
    place, _, options = uri.partition("?")
    export = open_export(f"{place}/t1/0000000002-delta?{options}", tmp_path / "scratch")
    assert export.check().name == "0000000002-delta"
    assert rows_of(state_at(chain_of(export), "default")) == {("a", 1): [9] * 5, ("a", 2): A["a", 2]}
    assert not (tmp_path / "scratch" / "none").exists()


# The twin


def stream_of(rows, size, gone):
    names = sorted(rows, key=lambda each: int(sort_order_of(np.array([each], np.uint64))[0]))

    def pieces():
        for begin in range(0, len(names), size):
            part = names[begin : begin + size]
            signs, keys = (np.array(part, np.uint64) for _ in range(2))
            weights = np.array([rows[each][2] or 0 for each in part], np.float32)
            codes = np.array([0 if rows[each][0] == "a" else 1 for each in part], np.int32)
            yield RowChunk(("a", "b"), codes, signs, keys, *(() if gone else (weights, weights[:, None])))

    return ChunkStream(pieces(), "made up", gone=gone)


keys = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
states = st.dictionaries(
    keys, st.tuples(st.sampled_from("ab"), st.just(0), st.integers(0, 9), st.just(())), max_size=30
)


@given(st.lists(st.tuples(st.booleans(), states), max_size=6), st.integers(1, 8))
def test_replay_is_that_of_a_dictionary(streams, size):
    wanted = replayed_reference(streams)
    found, order = {}, []
    for chunk in replay_chunks([stream_of(rows, size, gone) for gone, rows in streams]):
        order += sort_order_of(chunk.key_R).tolist()
        for each, slot, value in zip(chunk.key_R.tolist(), chunk.names(), chunk.weight_R.tolist(), strict=True):
            found[each] = (slot, value)
    assert found == {each: (row[0], row[2]) for each, row in wanted.items()}
    assert order == sorted(order)


@given(states, states, st.integers(1, 8))
def test_two_states_are_paired_by_key(old, new, size):
    found = {"both": set(), "gone": set(), "made": set()}
    for pairs in compare_states(stream_of(old, size, False).chunks, stream_of(new, size, False).chunks):
        assert pairs.old.key_R.tolist() == pairs.new.key_R.tolist()
        found["both"] |= set(pairs.old.key_R.tolist())
        found["gone"] |= set(pairs.gone.key_R.tolist())
        found["made"] |= set(pairs.made.key_R.tolist())
    assert found == {"both": {*old} & {*new}, "gone": {*old} - {*new}, "made": {*new} - {*old}}
