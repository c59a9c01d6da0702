"""Every reader of names of files refuses those that lead out of its folder, with an error of its own.

READERS has all places where the name of a file comes from a store, an export, a log or a message. These take no such
names: the live feed (rows, tensors and addresses), kept segments (named by a hash of the job file), prediction outputs
(parts have numbers), handovers (read as commits are).
"""

import hashlib
import json
from pathlib import Path

import pytest

from headrace.codec import packed, plain
from headrace.deadline import Deadline
from headrace.pserver.commit.commit_files import PartObjects
from headrace.pserver.errors import InvalidShardCall, StoreDamaged
from headrace.pserver.server.commands import command_from
from headrace.pserver.store.row_store import StoredFile
from headrace.relative_names import InvalidName, path_below, relative_name
from headrace.trainer.checkpoint.commits import CommitDamaged, canonical, parse_manifest
from headrace.trainer.checkpoint.handover import handed_over
from headrace.trainer.checkpoint.mirror import read_manifest
from headrace.trainer.exports.destination import ExportUnusable, folder_destination
from headrace.trainer.exports.manifest import ManifestUnusable
from headrace.trainer.exports.pointers import read_current
from headrace.trainer.exports.pointers import read_manifest as read_export
from headrace.trainer.exports.reader import open_export, parent_of
from headrace.trainer.journal.fence import FenceDamaged, FencedFile, FenceHistory, LogMode, decode
from headrace.trainer.journal.fenced_log import prepare
from headrace.trainer.journal.records import UndecodableRecord
from headrace.trainer.journal.records import decode as decode_record
from headrace.trainer.replica.export_updates import parsed
from headrace.trainer.train.commit_state import commit_in
from tests.fakes.exports import write_export
from tests.fakes.manifests import manifest_of

SOON = Deadline.after(3600.0)
SHA = hashlib.sha256(b"evil").hexdigest()
COMMIT, EXPORT, LOG = "t1-0000000001-g1", "t1/0000000001-base", "00000001-0001.log"
NAMES = {
    "above": "../outside",
    "far above": "../../../../../../../../tmp/outside",
    "absolute": "/tmp/outside",
    "above inside": "shard-0/../../outside",
    "below and back": "shard-0/..",
    "here": ".",
    "parent": "..",
    "empty": "",
    "empty part": "shard-0//a",
    "folder": "shard-0/",
    "nul": "shard-0/a\0b",
    "lines": "shard-0/a\nb",
    "device": "/dev/null",
    "drive": "C:\\outside",
    "backslashes": "..\\outside",
    "share": "\\\\.\\NUL",
    "address": "s3://bucket/outside",
    "long part": "shard-0/" + "x" * 256,
    "long": "shard-0/" + "x/" * 600 + "x",
    "surrogate": "shard-0/\ud800",
}
NO_TEXT = {"number": 7, "null": None, "list": ["a"], "object": {"a": 1}, "true": True}


def commit_text(**changes):
    manifest = {**plain(manifest_of(COMMIT)), **changes}
    sha256 = hashlib.sha256(canonical(manifest)).hexdigest()
    return json.dumps({"sha256": sha256, "manifest": manifest}).encode()


def part(**changes):
    return {"folder": "shard-0", "buckets": [0, 4096], "tables": {}, "files": {}, **changes}


def restoring(name):
    sent = name.encode("utf-8", "surrogatepass")  # a stranger may send what is no text
    fields = {"folder": "/a", "parts": [part(files={"~" * len(sent): {"sha256": SHA, "bytes": 4}})], "version": 3}
    return packed(fields).replace(b"~" * len(sent), sent, 1)


FILE = {"sha256": SHA, "bytes": 4}
TABLE, CHANGES = {"rows": 1, "rows_by_group": {"0": 1}}, {"from": 0, "to": 1, "changed": 1, "gone": 0}


def of_commit(change):
    return lambda name, tmp_path: parse_manifest(COMMIT, commit_text(**change(name)))


def handed(name, tmp_path):
    folder = tmp_path / "handover" / COMMIT
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(commit_text(files={name: FILE}))
    handed_over(tmp_path, "resize")


def fetched(name, tmp_path):
    PartObjects(str(tmp_path / "objects"), 0).complete(tmp_path / "a" / "b", {name: StoredFile(SHA, 4)}, {SHA: 1}, SOON)


def other_rank(name, tmp_path):
    manifest = {**plain(manifest_of(COMMIT)), "files": {name: FILE}, "objects": {SHA: 1}, "objects_at": str(tmp_path)}
    commit_in({"commit": COMMIT, "manifest": manifest}, tmp_path / "cache")


def of_fence(kind, change):
    def read(name, tmp_path):
        body = {"format": 1, "kind": kind, "generation": 1, "nonce": "n", **change(name)}
        return decode(7, json.dumps(body).encode())

    return read


def claim(name):
    return {"log_id": "a", "timeline": "t1", "mode": "sync", "log": {name: "1 claim\n"}}


def fence_commit(name=COMMIT, live=None, retired=None):
    state = {"since": 1, "claimed": 1, "log_id": "a", "timeline": "t1", "highest": 1, "mode": "sync"}
    return {"name": name, "live": live or {}, "retired": retired or {}, **state}


def written_log(name, tmp_path):
    history = FenceHistory(number=1, generation=1, log_id="a", mode=LogMode.SYNC, files={name: FencedFile(1, ["x\n"])})
    try:
        prepare(tmp_path / "log", history)
    except InvalidName as error:  # a second net: `decode` refuses such names before
        raise FenceDamaged(str(error)) from error


def of_record(op, change):
    return lambda name, tmp_path: decode_record("operation", {"op": op, **export_fields(op), **change(name)})


def export_fields(op):
    common = {"stream": "serving", "version": 1, "timeline": "t1"}
    if op == "rollback":
        return {**common, "paths": [EXPORT], "level": 0.5, "value": 0.4, "why": ""}
    ended = {"type": "base", "name": "0000000001-base", "outcome": "complete", "error": None, "final": False}
    cut = {"id": None, "parent": None, "all": False, "why": "", "clears": False, "arithmetic": "", "address": "/x"}
    more = {"current": True, "failed_gates": [], "command_error": None, "at_s": None, "tables": [], "dtype": "float32"}
    return {**common, **ended, **cut, **more, "base_threshold": 0.0, "delta_threshold": 0.0, "delta_keep_days": None}


def edit(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def of_current(change):
    def read(name, tmp_path):
        (tmp_path / "current.json").write_text(json.dumps({"path": EXPORT, "chain": [EXPORT], **change(name)}))
        open_export(str(tmp_path), tmp_path / "scratch")

    return read


def of_export(**change):
    def read(name, tmp_path):
        path = write_export(tmp_path / "t1", "delta", 2, {}, parent=(1, "base"))
        given = {key: value(name) for key, value in change.items()}
        edit(path, **given)
        found = open_export(str(path), tmp_path / "scratch")
        if "parent" in given:
            parent_of(found)

    return read


def of_destination(change):
    def read(name, tmp_path):
        path = write_export(tmp_path / "t1", "base", 1, {})
        edit(path, **change(name))
        read_export(folder_destination(tmp_path), EXPORT)

    return read


def pointed(change):
    def read(name, tmp_path):
        told = {"format": 1, "timeline": "t1", "version": 1, "path": EXPORT, "chain": [EXPORT], **change(name)}
        (tmp_path / "current.json").write_text(json.dumps(told))
        read_current(folder_destination(tmp_path))

    return read


def followed(change):
    told = {"format": 1, "timeline": "t1", "version": 1, "chain": [EXPORT]}
    return lambda name, tmp_path: parsed(json.dumps({**told, **change(name)}).encode(), "current.json")


def mirrored(name, tmp_path):
    read_manifest(COMMIT, commit_text(files={name: FILE}))


READERS = {
    # --- commits and their files
    "commit: files": (CommitDamaged, of_commit(lambda name: {"files": {name: FILE}})),
    "commit: name": (CommitDamaged, of_commit(lambda name: {"name": name})),
    "commit: objects": (CommitDamaged, of_commit(lambda name: {"objects": {name: 1}})),
    "commit: shards.folder": (CommitDamaged, of_commit(lambda name: {"shards": [part(folder=name)]})),
    "commit: shards.files": (CommitDamaged, of_commit(lambda name: {"shards": [part(files={name: FILE})]})),
    "commit: shards.tables": (CommitDamaged, of_commit(lambda name: {"shards": [part(tables={name: TABLE})]})),
    "commit: shards.objects": (CommitDamaged, of_commit(lambda name: {"shards": [part(objects={name: 1})]})),
    "commit: shards.tables.changes": (
        CommitDamaged,
        of_commit(lambda name: {"shards": [part(tables={"t": {**TABLE, "changes": [{**CHANGES, "file": name}]}})]}),
    ),
    "commit: sha256": (CommitDamaged, of_commit(lambda name: {"files": {"dense": {"sha256": name, "bytes": 4}}})),
    "mirror: files": (CommitDamaged, mirrored),
    "handover: files": (CommitDamaged, handed),
    "parts: files fetched": (StoreDamaged, fetched),
    "parts: message to a shard": (
        InvalidShardCall,
        lambda name, tmp_path: command_from("RestoreCommit", restoring(name)),
    ),
    "message of rank 0: files": (CommitDamaged, other_rank),
    # --- the fence, and the log in it
    "fence: log of a claim": (FenceDamaged, of_fence("claim", claim)),
    "fence: file of a line": (FenceDamaged, of_fence("line", lambda name: {"file": name, "line": "2 plan\n"})),
    "fence: commit": (FenceDamaged, of_fence("commit", lambda name: fence_commit(name=name))),
    "fence: live": (FenceDamaged, of_fence("commit", lambda name: fence_commit(live={name: SHA}))),
    "fence: sha256": (FenceDamaged, of_fence("commit", lambda name: fence_commit(live={COMMIT: name}))),
    "fence: retired": (FenceDamaged, of_fence("commit", lambda name: fence_commit(retired={name: 1.0}))),
    "fence: retirement": (FenceDamaged, of_fence("retirement", lambda name: {"retired": {name: 1.0}})),
    "fence: log files written": (FenceDamaged, written_log),
    "log: export": (UndecodableRecord, of_record("export", lambda name: {"name": name})),
    "log: stream": (UndecodableRecord, of_record("export", lambda name: {"stream": name})),
    "log: timeline": (UndecodableRecord, of_record("exported", lambda name: {"timeline": name})),
    "log: parent": (
        UndecodableRecord,
        of_record("export", lambda name: {"parent": {"name": name, "version": 1, "timeline": "t1"}}),
    ),
    "log: rollback": (UndecodableRecord, of_record("rollback", lambda name: {"paths": [name]})),
    # --- exports
    "export: current.json": (ExportUnusable, of_current(lambda name: {"path": name})),
    "export: files": (ExportUnusable, of_export(files=lambda name: {name: FILE})),
    "export: parent": (ExportUnusable, of_export(parent=lambda name: {"name": name, "version": 1})),
    "export: parent's timeline": (
        ExportUnusable,
        of_export(parent=lambda name: {"name": "0000000001-base", "timeline": name or "/", "version": 1}),
    ),
    "exporter: files": (ManifestUnusable, of_destination(lambda name: {"files": {name: FILE}})),
    "exporter: timeline": (ManifestUnusable, of_destination(lambda name: {"timeline": name})),
    "exporter: name": (ManifestUnusable, of_destination(lambda name: {"name": name})),
    "exporter: parent": (ManifestUnusable, of_destination(lambda name: {"parent": {"name": name}})),
    "exporter: current.json": (ManifestUnusable, pointed(lambda name: {"path": name})),
    "exporter: chain": (ManifestUnusable, pointed(lambda name: {"chain": [name]})),
    "replica: chain": (ExportUnusable, followed(lambda name: {"chain": [name]})),
    "replica: timeline": (ExportUnusable, followed(lambda name: {"timeline": name})),
}
KEYS_OF_OBJECTS = (
    "message",
    "files",
    "objects",
    "tables",
    "shards.",
    "log of",
    "live",
    "retired",
    "retirement",
    "written",
)
"""Readers whose names are keys of a JSON object, or typed: these are always text."""


def refused(reader, name, folder):
    """Whether a reader in a new folder refuses a name with its own error."""
    error, read = READERS[reader]
    (folder / "a" / "b").mkdir(parents=True)
    try:
        read(name, folder)
    except error:
        return True
    return False


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_leads_elsewhere_is_the_error_of_its_owner(reader, tmp_path):
    before = {*Path("/tmp").glob("outside*")}
    for what, name in NAMES.items():
        assert refused(reader, name, tmp_path / what), what
    assert {*Path("/tmp").glob("outside*")} == before
    assert not [path for path in tmp_path.rglob("*outside*") if path.exists()]


def test_the_error_of_a_commit_says_that_a_name_is_wrong(tmp_path):
    with pytest.raises(CommitDamaged, match=r"its manifest has a wrong name: '\.\./out"):
        parse_manifest(COMMIT, commit_text(files={"../out": FILE}))


@pytest.mark.parametrize("reader", [each for each in READERS if not any(key in each for key in KEYS_OF_OBJECTS)])
def test_a_name_that_is_no_text_is_the_error_of_its_owner(reader, tmp_path):
    for what, name in NO_TEXT.items():
        if name is None and reader in ("export: parent's timeline", "exporter: parent"):
            continue  # of the first Headrace, whose exports had no timelines
        assert refused(reader, name, tmp_path / what), what


@pytest.mark.parametrize(
    "name", ["dense.safetensors", "shard-0/default/000012.sst", "shard-10/@t.changes/0-5.st", "CON"]
)
def test_names_of_commits_are_relative_names(name, tmp_path):
    assert relative_name(name) == name
    assert path_below(tmp_path, name) == tmp_path / name


def test_a_link_in_a_folder_leads_nowhere_else(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "shard-0").symlink_to(tmp_path)
    with pytest.raises(InvalidName, match="leads out of .* by a symbolic link"):
        path_below(tmp_path / "store", "shard-0/file")
    with pytest.raises(StoreDamaged, match="symbolic link"):
        fetched_into = tmp_path / "store"
        PartObjects(str(tmp_path), 0).complete(fetched_into, {"shard-0/f": StoredFile(SHA, 4)}, {SHA: 1}, SOON)
    assert not (tmp_path / "f").exists()


def test_a_wrong_name_is_shown_on_one_line_and_bounded():
    with pytest.raises(InvalidName) as found:
        relative_name("a\n\x1b[31m" + "x" * 10_000)
    assert len(str(found.value)) < 250
    assert str(found.value).isprintable()
