"""The state that is handed to the next generation is whole or not there, and is used only where it is the newest."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from headrace.deadline import Deadline
from headrace.durable import SymbolicLinkFound
from headrace.trainer.checkpoint import handover
from headrace.trainer.checkpoint.commits import MANIFEST, CommitDamaged
from headrace.trainer.checkpoint.handover import HandoverVoid, check_newest, remove_handover
from headrace.trainer.journal.log import Log, Superseded
from tests.fakes.manifests import manifest_of

NAME, RESIZE = "t1-0000000007-g2", "a"


def manifest(name=NAME, resize=RESIZE):
    return manifest_of(name, state={"operations": {"acted": [{"id": resize}]}})


def hand_over(store, name, write):
    handover.hand_over(store, name, write, nullcontext)


def handed_over(store):
    return handover.handed_over(store, RESIZE)


def test_it_is_there_once_its_manifest_is(tmp_path):
    seen = []

    def write(folder):
        (folder / "rows").write_text("some")
        seen.append(handed_over(tmp_path))
        return manifest()

    assert handed_over(tmp_path) is None
    hand_over(tmp_path, NAME, write)
    assert seen == [None]
    assert (handed_over(tmp_path).name, handed_over(tmp_path).version) == (NAME, 7)
    remove_handover(tmp_path)
    remove_handover(tmp_path)
    assert handed_over(tmp_path) is None


def test_another_one_replaces_it_also_where_it_fails(tmp_path):
    hand_over(tmp_path, NAME, lambda folder: manifest())
    with pytest.raises(ZeroDivisionError):
        hand_over(tmp_path, "t1-0000000008-g2", lambda folder: 1 // 0)
    assert handed_over(tmp_path) is None
    other = "t1-0000000009-g3"
    hand_over(tmp_path, other, lambda folder: manifest(other))
    assert handed_over(tmp_path).name == other


def test_workers_take_over_after_their_own_resize_alone(tmp_path):
    hand_over(tmp_path, NAME, lambda folder: manifest(resize="b"))
    assert handed_over(tmp_path) is None


def test_one_that_is_damaged_is_told(tmp_path):
    hand_over(tmp_path, NAME, lambda folder: manifest())
    path = tmp_path / "handover" / NAME / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"t1", b"t2"))
    with pytest.raises(CommitDamaged, match=NAME):
        handed_over(tmp_path)


@pytest.mark.parametrize("written", [True, False])
def test_a_generation_that_was_replaced_hands_nothing_over(tmp_path, written):
    def claim(generation):
        soon = Deadline.after(10)
        return Log.claim(tmp_path / "log", generation, soon, timeline="t1", base=None, facts={})

    old = claim(2)

    def write(folder):
        if written:
            claim(3).close()
        return manifest()

    if not written:
        claim(3).close()
    hand_over(tmp_path, "t1-0000000008-g3", lambda folder: manifest("t1-0000000008-g3"))
    with pytest.raises(Superseded):
        handover.hand_over(tmp_path, NAME, write, old.exclusive)
    assert written or handed_over(tmp_path).version == 8, "that of the other one stays"
    assert not (tmp_path / "handover" / NAME / MANIFEST).exists()
    old.close()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "handover").symlink_to(tmp_path / "elsewhere")
    for act in (handed_over, remove_handover, lambda store: hand_over(store, NAME, lambda folder: manifest())):
        with pytest.raises(SymbolicLinkFound):
            act(tmp_path)


@pytest.mark.parametrize(("timeline", "closed", "used"), [("t1", 7, True), ("t1", 8, False), ("t2", 7, False)])
def test_it_is_used_only_as_the_state_after_the_last_close_of_the_log(tmp_path, timeline, closed, used):
    hand_over(tmp_path, NAME, lambda folder: manifest())
    history = SimpleNamespace(timeline=timeline, closed=closed)
    if used:
        assert check_newest(history, handed_over(tmp_path)).version == 7
    else:
        with pytest.raises(HandoverVoid, match="is of version 7"):
            check_newest(history, handed_over(tmp_path))
