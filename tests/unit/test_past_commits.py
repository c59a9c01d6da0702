"""Commits for people: what is listed, what is found damaged, what is kept, what is removed."""

import json
import os
import subprocess

import msgspec
import pytest

from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import HeadraceError, SpecError
from headrace.pserver.protocol.commit_parts import TableFacts
from headrace.service.cli import commit_output
from headrace.service.history import commit_list as work
from headrace.service.history import commit_lookup
from headrace.service.history.commit_lookup import find_commit_name
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits
from headrace.trainer.checkpoint.rewind import Lineage, rewind
from tests.fakes.past import Past


@pytest.fixture
def past(tmp_path):
    """A job with commits of versions 1, 2 and 3."""
    made = Past(tmp_path / "store").begin()
    made.meet("a")
    for version in (1, 2, 3):
        made.close(version, a=(100 * version - 100, 100 * version))
        made.commit(version)
    yield made
    made.end()


@pytest.fixture
def said(capsys):
    return lambda: capsys.readouterr().out


def names(past):
    return Commits(past.store).names()


def first_sst(past, name):
    return min((Commits(past.store).folder / name).rglob("*.sst"))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What is there


def test_commits_are_listed_in_order_with_what_their_removal_would_free(past):
    work.pin(past.store, "2", "ann")
    entries = work.entries_of(past.store)
    assert [(entry["name"], entry["rows"], entry["held_by"], entry["next"]) for entry in entries] == [
        ("t1-0000000001-g1", 100, [], False),
        ("t1-0000000002-g1", 200, ["ann"], False),
        ("t1-0000000003-g1", 300, [], True),
    ]
    shared = first_sst(past, names(past)[0]).stat().st_size
    for entry in entries:
        assert 0 < entry["own_bytes"] <= entry["bytes"] - shared
        assert entry["damaged"] is None


def test_a_list_shows_a_damaged_manifest_and_says_that_files_were_not_read(past, said):
    flip(Commits(past.store).folder / names(past)[0] / "manifest.json")
    commit_output.list_commits(past.store, as_json=False)
    head, first, second, _ = said().splitlines()
    assert head.split() == ["name", "version", "timeline", "made", "at", "rows", "bytes", "own", "bytes", "held", "by",
                            "sound"]  # fmt: skip
    assert first.split() == ["t1-0000000001-g1", "1", "t1", "-", "-", "-", "-", "no"]
    assert "not verified" in second


def test_a_store_without_commits_says_so(tmp_path, said):
    commit_output.list_commits(Past(tmp_path / "store").store, as_json=False)
    commit_output.verify_commits(tmp_path / "store", None, as_json=False)
    assert said() == 2 * f"{tmp_path / 'store'} has no commit\n"
    with pytest.raises(HeadraceError, match="has no commit"):
        work.prune(tmp_path / "store", 1)


def test_a_commit_shows_what_it_holds(past, said):
    commit_output.show_commit(past.store, "2", as_json=False)
    told = said()
    for words in ("t1-0000000002-g1", "2 of timeline t1", "a 200", "rows: default 200", "nobody", "torch 2.9"):
        assert words in told
    commit_output.show_commit(past.store, "t1-0000000002-g1", as_json=True)
    assert json.loads(said())["version"] == 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5", "t2-0000000005-g4"),  # the newest of the version
        ("4", "t1-0000000004-g1"),
        ("t1-0000000005-g1", "t1-0000000005-g1"),
        ("6", "version 6 exists on another timeline only; name the commit: t1-0000000006-g1"),
        ("7", "there is no commit of version 7; there are: t1-0000000004-g1, "),
        ("x", "there is no commit 'x'; there are: t1-0000000004-g1, "),
        ("9" * 5000, "there is no commit '9999"),
    ],
)
def test_a_version_means_the_newest_commit_of_it_that_led_to_the_present_one(text, answer):
    names = [f"t1-000000000{n}-g1" for n in (4, 5, 6)] + ["t2-0000000005-g3", "t2-0000000005-g4"]
    past = Lineage("t2", {"t1": None, "t2": "t1-0000000004-g1"})
    if answer in names:
        assert find_commit_name(names, text, past) == answer
    else:
        with pytest.raises(SpecError) as caught:
            find_commit_name(names, text, past)
        assert str(caught.value).startswith(answer)


# Whether it is sound


def test_sound_commits_are_told_with_what_was_read(past, said):
    commit_output.verify_commits(past.store, None, as_json=False)
    assert [line.partition(";")[0] for line in said().splitlines()] == [f"{name}: sound" for name in names(past)]
    assert not list((past.store / "holds").iterdir())
    assert not list((past.store / "reruns").iterdir())


def test_what_a_killed_command_held_is_let_go_by_the_next(past, said):
    killed = subprocess.Popen(["true"])
    killed.wait()
    name, host = names(past)[0], commit_lookup._HOST
    for who in (f"verify-{host}-{killed.pid}", f"rerun-{host}-{os.getpid()}", "rerun-elsewhere-1", "verify-1"):
        Commits(past.store).hold(name, who)
    left = past.store / "reruns" / f"verify-{host}-{killed.pid}"
    left.mkdir(parents=True)
    commit_output.verify_commits(past.store, "3", as_json=False)
    kept = ["rerun-elsewhere-1", f"rerun-{host}-{os.getpid()}", "verify-1"]
    assert {name: sorted(kept)} == Commits(past.store).holders()
    assert not left.exists()


def test_verifying_leaves_a_commit_as_it_was(past, said):
    def everything():
        return {path: path.read_bytes() for path in (past.store / "commits").rglob("*") if path.is_file()}

    before = everything()
    commit_output.verify_commits(past.store, None, as_json=False)
    assert everything() == before


def test_a_flipped_bit_is_told_with_every_commit_that_shares_the_file(past, said):
    first, second, third = names(past)
    damaged = first_sst(past, second)
    flip(damaged)
    with pytest.raises(CommitDamaged, match="3 of 3 commits are damaged; no other commit is left"):
        commit_output.verify_commits(past.store, None, as_json=False)
    file = damaged.relative_to(past.store / "commits" / second)
    assert f"  {file} has other bytes than were written; it shares this file with {first}, {third}" in said()


def test_damage_of_one_commit_alone_leaves_the_others_sound(past, said):
    first, second, third = names(past)
    (Commits(past.store).folder / third / "dense.safetensors").unlink()
    with pytest.raises(CommitDamaged, match=f"1 of 3 commits are damaged; the next run begins at {second}"):
        commit_output.verify_commits(past.store, None, as_json=False)
    assert said().splitlines()[2:] == [
        f"{third}: damaged", "  dense.safetensors cannot be read: No such file or directory"
    ]  # fmt: skip
    commit_output.verify_commits(past.store, first, as_json=True)
    assert json.loads(said()) == [{"name": first, "sound": True, "damage": {}}]


def test_a_damaged_manifest_is_told(past, said):
    flip(Commits(past.store).folder / names(past)[2] / "manifest.json")
    with pytest.raises(CommitDamaged, match="1 of 3"):
        commit_output.verify_commits(past.store, None, as_json=False)
    assert "manifest.json" in said()


def test_rows_that_the_manifest_does_not_count_are_told(past, said):
    found = Commits(past.store).read(names(past)[2])
    parts = [msgspec.structs.replace(found.shards[0], tables={"default": TableFacts(299, {1: 299})})]
    past.write_manifest(found.name, 3, parts, found.files)
    with pytest.raises(CommitDamaged):
        commit_output.verify_commits(past.store, "3", as_json=False)
    assert "  shard-0/default has 300 rows, but the manifest says 299" in said()


# What is kept, what goes


def test_a_pruning_keeps_the_newest_and_the_pinned(past, said):
    first, _, third = names(past)
    work.pin(past.store, "1", "pin")
    work.prune(past.store, 1)
    assert names(past) == [first, third]
    work.unpin(past.store, "1", "pin")
    assert work.prune(past.store, 1) == [first]
    assert names(past) == [third]
    assert not (past.store / "commits" / first).exists()


def test_one_commit_is_removed_unless_something_needs_it(past):
    first, second, third = names(past)
    work.pin(past.store, first, "ann")
    with pytest.raises(HeadraceError, match=f"commit {first} is held by ann"):
        work.remove(past.store, "news", first)
    with pytest.raises(HeadraceError, match=f"the next run begins at commit {third}"):
        work.remove(past.store, "news", third)
    with locked(past.store / "lock", Deadline.after(5)), pytest.raises(SpecError, match="is in use"):
        work.remove(past.store, "news", second)
    assert work.remove(past.store, "news", "2") == second
    assert names(past) == [first, third]
    past.end()
    rewind(past.store, Commits(past.store).read(first), "t2")
    work.remove(past.store, "news", third)  # the newest there is, and left behind
    assert names(past) == [first]


def test_a_pruning_keeps_the_commit_that_the_next_run_begins_at(past, said):
    """After a rewind it is not among the newest."""
    first, _, third = names(past)
    past.end()
    rewind(past.store, Commits(past.store).read(first), "t2")
    work.prune(past.store, 1)
    assert names(past) == [first, third]


def test_every_holder_keeps_a_commit_for_himself(past, said):
    for who in ("ann", "bob"):
        work.pin(past.store, "1", who)
    work.unpin(past.store, "1", "ann")
    assert Commits(past.store).holders() == {names(past)[0]: ["bob"]}
    with pytest.raises(HeadraceError, match="t1-0000000001-g1 is not held by ann; it is held by bob"):
        work.unpin(past.store, "1", "ann")


@pytest.mark.parametrize("who", ["", "../x", "a.b", "a b"])
def test_a_holder_is_a_plain_word(past, who):
    with pytest.raises(SpecError, match="--as: .* may contain letters"):
        work.pin(past.store, "1", who)
    assert Commits(past.store).holders() == {}
