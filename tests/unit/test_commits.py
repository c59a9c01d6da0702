"""Commits on disk: whole or absent, sound or named as damaged, kept or pruned."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.codec import plain
from headrace.trainer.checkpoint.commits import (
    FORMAT,
    MANIFEST,
    CommitDamaged,
    Commits,
    hash_of,
    name_of,
    problems_of,
    read_commit,
    to_prune,
    write_manifest,
)
from tests.fakes.manifests import manifest_of


def make(store, version, generation=1, timeline="t1"):
    """Write a commit of two files; returns its name."""
    name = name_of(timeline, version, generation)
    folder = store / "commits" / name
    (folder / "shard-0" / "default").mkdir(parents=True)
    (folder / "dense.safetensors").write_bytes(b"dense" * version)
    (folder / "shard-0" / "default" / "1.sst").write_bytes(bytes(range(256)) * 10)
    names = ("dense.safetensors", "shard-0/default/1.sst")
    manifest = manifest_of(name, format=1, log_from=7, files={file: hash_of(folder / file) for file in names})
    write_manifest(folder, manifest)
    return name


def test_a_commit_reads_back_as_written(tmp_path):
    commit = Commits(tmp_path).read(make(tmp_path, 3))
    assert (commit.version, commit.timeline, commit.order, commit.log_from) == (3, "t1", (1, 3, 1), 7)
    assert problems_of(commit) == {} and commit.num_bytes == 15 + 2560


@given(st.data())
def test_a_flipped_bit_anywhere_in_a_commit_is_found(tmp_path_factory, data):
    store = tmp_path_factory.mktemp("store")
    folder = store / "commits" / make(store, 3)
    path = data.draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
    content = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        found = problems_of(read_commit(folder))
    except CommitDamaged as error:
        assert folder.name in str(error) and path.name == MANIFEST
    else:  # blanks of the manifest's layout carry nothing
        assert found == {path.relative_to(folder).as_posix(): "has other bytes than were written"} or (
            path.name == MANIFEST and json.loads(content)["manifest"] == plain(read_commit(folder).manifest)
        )


def test_a_shorter_and_a_missing_file_are_named(tmp_path):
    commit = Commits(tmp_path).read(make(tmp_path, 3))
    (commit.folder / "shard-0/default/1.sst").write_bytes(b"short")
    (commit.folder / "dense.safetensors").unlink()
    found = problems_of(commit)
    assert found["shard-0/default/1.sst"] == "has 5 bytes, not 2,560"
    assert "No such file" in found["dense.safetensors"]


def test_a_commit_of_a_newer_format_is_refused_as_such(tmp_path):
    folder = tmp_path / "commits" / make(tmp_path, 3)
    write_manifest(folder, replace(read_commit(folder).manifest, format=FORMAT + 1))
    with pytest.raises(CommitDamaged, match=f"is of format {FORMAT + 1}; this Headrace reads format {FORMAT}"):
        read_commit(folder)


def test_commits_are_listed_in_order_of_time_and_those_without_manifest_are_none(tmp_path):
    names = [make(tmp_path, v, g, t) for t, v, g in (("t1", 9, 1), ("t1", 10, 1), ("t1", 10, 2), ("t2", 3, 3))]
    (tmp_path / "commits" / make(tmp_path, 4, 4, "t2") / MANIFEST).unlink()
    (tmp_path / "commits" / "something").mkdir()
    assert Commits(tmp_path).names() == names


def test_pruning_keeps_the_newest_and_the_held(tmp_path):
    commits = Commits(tmp_path)
    names = [make(tmp_path, version) for version in (1, 2, 3, 4, 5)]
    left_over = tmp_path / "commits" / name_of("t1", 7, 1)
    left_over.mkdir()
    commits.hold(names[1], "pin-anna")
    gone = commits.prune(2, contextlib.nullcontext(), held={names[0]})
    assert gone == [names[2]] and commits.names() == [names[0], names[1], names[3], names[4]]
    assert not left_over.exists() and not (commits.folder / names[2]).exists()
    assert commits.holders() == {names[1]: ["pin-anna"]}
    assert commits.release(names[1], "pin-anna") and not commits.release(names[1], "pin-anna")
    assert commits.prune(2, contextlib.nullcontext()) == [names[0], names[1]]


@given(st.lists(st.integers(0, 99), unique=True).map(sorted), st.integers(1, 5), st.sets(st.integers(0, 99)))
def test_pruned_commits_are_old_and_not_held(versions, keep, held):
    gone = to_prune(versions, keep, held)
    assert not set(gone) & held and not set(gone) & set(versions[-keep:])
    assert {*gone, *versions[-keep:]} | held >= set(versions)
