"""What follows an export: what is not kept goes, and what is another stream's never does."""

import uuid
from pathlib import Path

import pytest

from headrace.deadline import Deadline
from headrace.durable import RealDisk
from headrace.trainer.exports import pointers
from headrace.trainer.exports.destination import folder_destination, open_destination
from headrace.trainer.exports.manifest import ExportHead, ManifestUnusable
from headrace.trainer.exports.pointers import HeadIsReplaced
from tests.fakes.exports import write_export
from tests.object_servers import azure, gcs  # noqa: F401
from tests.s3_server import s3  # noqa: F401

ROWS = {("a", 1): [1, 2, 3, 4, 5]}


@pytest.fixture
def folder(tmp_path):
    """A base and a delta of one stream and of another, in turn, until version 8."""
    for version in range(1, 9):
        kind = "base" if version in (1, 2, 5, 6) else "delta"
        parent = None if kind == "base" else (version - 2, "base")
        write_export(tmp_path / "t1", kind, version, ROWS, parent=parent, stream=("b", "a")[version % 2])
    return tmp_path


def versions(folder):
    return sorted(int(path.name[:10]) for path in (folder / "t1").iterdir() if (path / "_DONE").exists())


def pruned(folder, keep, stream="a"):
    newest = ["t1/0000000005-base", "t1/0000000007-delta"]
    gone = pointers.remove_old_exports(folder_destination(folder), keep, newest, newest[-1], stream)
    return [int(path[3:13]) for path in gone]


def test_exports_of_another_stream_in_the_same_place_neither_go_nor_count(folder):
    assert pruned(folder, keep=2) == []
    assert pruned(folder, keep=1) == [3, 1]
    assert versions(folder) == [2, 4, 5, 6, 7, 8]


def test_exports_of_an_older_headrace_count_and_go_like_any_other(folder):
    for version in range(1, 6):
        (done,) = (folder / "t1").glob(f"{version:010d}-*/_DONE")
        done.rename(done.with_name("DONE"))
    assert pointers.read_manifest(folder_destination(folder), "t1/0000000001-base")["version"] == 1
    assert pruned(folder, keep=2) == []
    assert pruned(folder, keep=1) == [3, 1]


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 100_000], ids=["torn", "list", "nothing", "deep"])
def test_one_whose_manifest_is_damaged_goes_like_any_other(folder, text):
    (folder / "t1" / "0000000001-base" / "manifest.json").write_text(text)
    assert pruned(folder, keep=1) == [3, 1]


def test_what_is_half_done_goes_unless_it_says_that_it_is_anothers(folder):
    for version in (3, 4):
        (folder / "t1" / f"{version:010d}-delta" / "_DONE").unlink()
    assert pruned(folder, keep=5) == [3]
    assert (folder / "t1" / "0000000004-delta").exists()


BROKEN = {
    "{": "is not JSON: Expecting property name",
    "[" * 100_000: "has lists and objects nested deeper than 100",
    "[]": "is not a JSON object; restore it, or remove it",
    "{}": "is damaged: its 'format' is null; restore it, or remove it",
    '{"format": 1e999}': "is damaged: its 'format' is Infinity; ",
    '{"format": 2}': "is of format 2; this Headrace writes format 1: continue with the newer one",
}


@pytest.mark.parametrize("text", BROKEN, ids=["torn", "deep", "list", "nothing", "infinite", "newer"])
def test_what_is_wrong_with_a_manifest_or_with_what_points_to_one_is_said(folder, text):
    outlet, base = folder_destination(folder), "t1/0000000001-base"
    for path, read in (
        ("current.json", lambda: pointers.read_current(outlet)),
        (f"{base}/manifest.json", lambda: pointers.read_manifest(outlet, base)),
    ):
        (folder / path).write_text(text)
        with pytest.raises(ManifestUnusable) as caught:
            read()
        assert str(caught.value).startswith(f"{folder}/{path} {BROKEN[text]}")


def test_a_field_that_is_not_there_is_named(folder):
    (folder / "current.json").write_text('{"format": 1, "path": "t1/0000000001-base"}')
    with pytest.raises(ManifestUnusable, match=r"current\.json is damaged: its 'chain' is null; restore it"):
        pointers.read_current(folder_destination(folder))


def test_a_current_json_that_a_killed_process_left_unfinished_is_removed(folder, monkeypatch):
    outlet = folder_destination(folder)
    manifest = pointers.read_manifest(outlet, "t1/0000000005-base")
    pointers.write_current(outlet, manifest, ["t1/0000000005-base"])

    class Killed(BaseException):
        """In place of SIGKILL: the rename is not reached, and nothing is cleaned up."""

    def die(*_):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(RealDisk, "rename", die)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        pointers.write_current(outlet, manifest, ["t1/0000000005-base"])
    (folder / "current.json.mine").touch()
    assert len(list(folder.glob("current.json.*"))) == 2
    assert pruned(folder, keep=2) == []
    assert sorted(path.name for path in folder.glob("current.json*")) == ["current.json", "current.json.mine"]


@pytest.fixture(params=["folder", "s3", "gcs", "azure"])
def outlet(request, folder):
    if request.param == "folder":
        return folder_destination(folder)
    address = request.getfixturevalue(request.param).uri("bucket", uuid.uuid4().hex)
    found = open_destination(address, "small", folder / "scratch", Deadline.after(60))
    for path in (folder / "t1").glob("*/*"):
        found.put(str(path.relative_to(folder)), path.read_bytes())
    return found


def point(outlet, path, head):
    pointers.write_current(outlet, pointers.read_manifest(outlet, path), [path], head)


def test_a_head_that_was_replaced_cannot_turn_current_json_back(outlet):
    old, new = ExportHead(1, 4), ExportHead(1, 5)
    point(outlet, "t1/0000000001-base", old)
    point(outlet, "t1/0000000005-base", new)
    for late in (old, ExportHead(0, 9)):
        with pytest.raises(HeadIsReplaced, match="another head has the job"):
            point(outlet, "t1/0000000001-base", late)
        with pytest.raises(HeadIsReplaced):
            pointers.check_head(outlet, late)
    assert pointers.read_current(outlet)["path"] == "t1/0000000005-base"
    for later in (new, ExportHead(1, 6), ExportHead(2, 1)):
        point(outlet, "t1/0000000005-base", later)
        pointers.check_head(outlet, later)


def test_a_head_that_was_replaced_while_it_wrote_current_json_cannot_turn_it_back(outlet, monkeypatch):
    """It has read current.json, sleeps for as long as its machine is frozen, and then writes."""
    old, new, replace = ExportHead(1, 4), ExportHead(1, 5), outlet.replace
    point(outlet, "t1/0000000001-base", old)

    def late(*arguments):
        monkeypatch.undo()
        point(outlet, "t1/0000000005-base", new)
        return replace(*arguments)

    monkeypatch.setattr(outlet, "replace", late)
    with pytest.raises(HeadIsReplaced):
        point(outlet, "t1/0000000003-delta", old)
    assert pointers.read_current(outlet)["path"] == "t1/0000000005-base"


def test_a_write_whose_reply_is_lost_has_taken_place(outlet, monkeypatch):
    replace = outlet.replace
    monkeypatch.setattr(outlet, "replace", lambda *arguments: replace(*arguments) and False)
    point(outlet, "t1/0000000001-base", ExportHead(1, 4))
    assert pointers.read_current(outlet)["head"] == {"timeline": 1, "generation": 4}


def test_a_person_points_anywhere_and_the_head_goes_on(outlet):
    head = ExportHead(1, 4)
    point(outlet, "t1/0000000005-base", head)
    point(outlet, "t1/0000000001-base", None)
    assert pointers.read_current(outlet)["path"] == "t1/0000000001-base"
    with pytest.raises(HeadIsReplaced):
        pointers.check_head(outlet, ExportHead(1, 3))
    point(outlet, "t1/0000000005-base", head)
    outlet.put("current.json", b"{")
    point(outlet, "t1/0000000001-base", None)
    assert pointers.read_current(outlet)["version"] == 1


def test_a_head_passes_over_a_current_json_of_an_older_headrace(outlet):
    point(outlet, "t1/0000000001-base", None)
    assert "head" not in pointers.read_current(outlet)
    pointers.check_head(outlet, ExportHead(1, 1))
    point(outlet, "t1/0000000005-base", ExportHead(1, 1))
