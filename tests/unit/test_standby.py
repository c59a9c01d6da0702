"""A generation that stands by follows commits, and takes over the state after its resize."""

from contextlib import nullcontext

import pytest

from headrace.pserver.server.commands import AdvanceCommit, RestoreCommit
from headrace.trainer.checkpoint.commits import MANIFEST, CommitDamaged, manifest_text
from headrace.trainer.checkpoint.handover import hand_over
from headrace.trainer.rank0 import resizing as module
from headrace.trainer.rank0.resizing import Standby, StandbyEnded
from headrace.trainer.train.standby_role import StandbyRole
from tests.fakes.manifests import manifest_of

RESIZE = "a"


class Shards:
    """Notes the calls; `after` acts between them."""

    def __init__(self, **after):
        self.calls, self._after = [], after

    def call(self, command, deadline):
        name = {RestoreCommit: "restore", AdvanceCommit: "advance"}[type(command)]
        self.calls.append((name, command.folder.parent.name, command.version))
        self._after.pop(f"{name}_{command.version}", lambda: None)()


def name_of(version):
    return f"t1-{version:010d}-g1"


def manifest(version, acted=()):
    return manifest_of(name_of(version), state={"operations": {"acted": [{"id": each} for each in acted]}})


def commit(store, version, acted=()):
    folder = store / "commits" / name_of(version)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(manifest_text(manifest(version, acted)))
    return folder


def handed(store, version, acted=(RESIZE,)):
    hand_over(store, name_of(version), lambda folder: manifest(version, acted), nullcontext)


def followed(store, shards):
    standby = Standby(store, RESIZE)
    standby.follow(shards)
    standby.finish(shards, standby.handed)
    return standby


def test_it_goes_on_from_commit_to_commit_to_the_one_after_the_resize(tmp_path):
    commit(tmp_path, 1)
    shards = Shards(restore_1=lambda: commit(tmp_path, 2), advance_2=lambda: commit(tmp_path, 3, [RESIZE]))
    standby = Standby(tmp_path, RESIZE)
    standby.follow(shards)
    standby._last.result()
    assert shards.calls == [("restore", "commits", 1), ("advance", "commits", 2), ("advance", "commits", 3)]
    assert standby.handed is None and standby.version == 3


def test_it_goes_on_to_the_state_that_is_handed_over(tmp_path):
    commit(tmp_path, 1)
    handed(tmp_path, 1, ["another"])
    shards = Shards(restore_1=lambda: handed(tmp_path, 2))
    standby = followed(tmp_path, shards)
    assert shards.calls == [("restore", "commits", 1), ("advance", "handover", 2)]
    assert (standby.handed.version, standby.version) == (2, 2)


def test_nothing_is_taken_over_before_the_newest_commit_is_restored(tmp_path):
    commit(tmp_path, 1)
    handed(tmp_path, 2)
    shards = Shards()
    followed(tmp_path, shards)
    assert shards.calls == [("restore", "commits", 1), ("advance", "handover", 2)]


def test_a_request_to_end_finds_what_was_handed_over_before(tmp_path):
    commit(tmp_path, 1)
    standby = Standby(tmp_path, RESIZE)

    def hand_over_and_end():
        handed(tmp_path, 2)
        StandbyRole(standby, 2).drain()

    standby.follow(Shards(restore_1=hand_over_and_end))
    assert standby.handed.version == 2
    other = Standby(tmp_path, "another")
    with pytest.raises(StandbyEnded):
        other.follow(Shards(restore_1=other.end))


@pytest.mark.parametrize("damage", [b"", b"{}"])
def test_a_newest_commit_that_is_damaged_is_told(tmp_path, damage):
    commit(tmp_path, 1)
    (commit(tmp_path, 2) / MANIFEST).write_bytes(damage)
    with pytest.raises(CommitDamaged, match=name_of(2)):
        Standby(tmp_path, RESIZE).follow(Shards())


def test_a_newest_commit_that_is_removed_meanwhile_is_passed_over(tmp_path, monkeypatch):
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    read = module.Commits.read

    def removed_first(self, name):
        (self.folder / name_of(2) / MANIFEST).unlink(missing_ok=True)
        return read(self, name)

    monkeypatch.setattr(module.Commits, "read", removed_first)
    handed(tmp_path, 3)
    shards = Shards()
    followed(tmp_path, shards)
    assert shards.calls == [("restore", "commits", 1), ("advance", "handover", 3)]


def test_a_stop_is_not_forgotten_while_the_trainer_is_restored(tmp_path):
    drained = []

    class Loop:
        def drain(self):
            drained.append(True)

    class Trainer:
        loop = Loop()

    role = StandbyRole(Standby(tmp_path, RESIZE), 2)
    role.drain()
    assert not drained
    role.begin(Trainer())
    assert len(drained) == 1
