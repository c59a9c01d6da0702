"""Signatures of manifests and records of the fence: made by the key of the job, and missed where they are wrong."""

import hashlib
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.blob.signature import UNSIGNED, Signature, WrongSignature
from headrace.config import validate
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.trainer.checkpoint.commits import CommitDamaged, canonical
from headrace.trainer.checkpoint.mirror import Mirror, MirrorEmpty
from headrace.trainer.checkpoint.object_store import ObjectStore, manifest_key
from headrace.trainer.config import StoreSection
from headrace.trainer.journal.fence import FenceClaim, FenceCommit, FenceDamaged, LogMode, decode, key_of
from tests.mirrored_store import fetch, kept_in_mirror, make_commit

SOON = Deadline.after(3600.0)  # from the import of this module on, so longer than all tests
OURS = Signature("job", b"k" * 32)


@given(content=st.binary(max_size=300), flip=st.integers(0, 10**6))
def test_a_signed_blob_opens_and_one_of_which_a_bit_differs_does_not(content, flip):
    blob = OURS.signed("fence/1", content)
    assert OURS.opened("fence/1", blob) == content
    changed = bytearray(blob)
    changed[flip % len(blob)] ^= 1 << flip % 7
    with pytest.raises(WrongSignature):
        OURS.opened("fence/1", bytes(changed))


@pytest.mark.parametrize("other", [Signature("job", b"l" * 32), Signature("other", OURS.key)])
def test_another_key_job_or_name_is_refused_in_words(other):
    blob = OURS.signed("fence/1", b"{}")
    for signature, at in ((other, "fence/1"), (OURS, "fence/2")):
        with pytest.raises(WrongSignature, match=f"{at} has a wrong signature: it was changed, is of another job, or"):
            signature.opened(at, blob)
    with pytest.raises(WrongSignature, match=r"fence/1 is not signed, and the job file has store\.key"):
        OURS.opened("fence/1", b"{}")
    with pytest.raises(WrongSignature, match=r"fence/1 is signed, and the job file has no store\.key"):
        UNSIGNED.opened("fence/1", blob)
    assert UNSIGNED.opened("fence/1", UNSIGNED.signed("fence/1", b"{}")) == b"{}"


def test_the_key_is_a_secret_of_32_letters_at_least_and_never_shown(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("s" * 64 + "\n")
    monkeypatch.setenv("JOB_KEY", "e" * 31)
    assert Signature.of({"file": "key"}, "job", tmp_path).key == b"s" * 64
    assert "ss" not in repr(Signature.of({"file": "key"}, "job", tmp_path))
    assert Signature.of(None, "job", tmp_path).signed("a", b"b") == b"b"
    with pytest.raises(SpecError, match=r"store\.key.*a key of 31 letters; 32 are the least"):
        Signature.of({"env": "JOB_KEY"}, "job", tmp_path)
    with pytest.raises(SpecError, match=r"key: .*is not a reference to a secret") as caught:
        validate(StoreSection, {"path": "store", "mirror": "m", "key": {"text": "s" * 64}})
    assert "ssss" not in str(caught.value)
    with pytest.raises(SpecError, match="set mirror, too"):
        validate(StoreSection, {"path": "store", "key": {"env": "JOB_KEY"}})


def changed(text, change):
    """A manifest that somebody without the key has changed, and hashed again."""
    manifest = json.loads(text)["manifest"]
    change(manifest)
    digest = hashlib.sha256(canonical(manifest)).hexdigest()
    return json.dumps({"sha256": digest, "manifest": manifest}).encode()


FORGERIES = {
    "unsigned": lambda old, new: new,
    "with the old signature": lambda old, new: new + old[old.rindex(b"\nhmac") :],
    "by another key": lambda old, new: Signature("job", b"x" * 32).signed("commits/t1-0000000002-g1.json", new),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_commit_of_a_mirror_is_passed_over_and_removed(tmp_path, forgery):
    uri = f"file://{tmp_path}/mirror"
    mirror = Mirror.open(uri, SOON, OURS)
    first, second = (make_commit(tmp_path / "store", version, {"dense": b"%d" % version}) for version in (1, 2))
    for commit in (first, second):
        mirror.upload(commit, [], SOON)
    assert fetch(uri, tmp_path / "good", "job", SOON, OURS).name == second.name
    path = tmp_path / "mirror" / "commits" / f"{second.name}.json"
    forged = changed(second.text, lambda manifest: manifest["positions"].update(events=10**6))
    path.write_bytes(FORGERIES[forgery](path.read_bytes(), forged))
    found = fetch(uri, tmp_path / "new", "job", SOON, OURS)
    assert found.name == first.name
    assert "signature" in found.passed_over[0] or "is not signed" in found.passed_over[0]
    Mirror.open(uri, SOON, OURS).prune(9, (), [], SOON)
    assert kept_in_mirror(tmp_path / "mirror") == {first.name}


def test_a_mirror_without_the_key_gives_nothing(tmp_path):
    uri = f"file://{tmp_path}/mirror"
    Mirror.open(uri, SOON, OURS).upload(make_commit(tmp_path / "store", 1, {"dense": b"1"}), [], SOON)
    with pytest.raises(MirrorEmpty, match=r"is signed, and the job file has no store\.key"):
        fetch(uri, tmp_path / "new", "job", SOON)


@pytest.fixture
def store(tmp_path):
    """The object store of a job with one commit."""
    made = ObjectStore.open(str(tmp_path / "objects"), SOON, OURS)
    text = make_commit(tmp_path / "store", 1, {"dense": b"1"}).text
    sequence = made.sequence(1)
    sequence.catch_up(SOON)
    sequence.claim(FenceClaim(log_id="a", timeline="t1", mode=LogMode.SYNC), SOON)
    sequence.append_commit("t1-0000000001-g1", made.put_manifest("t1-0000000001-g1", text, SOON), [], SOON)
    return made


def test_a_signed_store_completes_an_empty_disk(store, tmp_path):
    (tmp_path / "new").mkdir()
    found = store.prepare(tmp_path / "new", "job", store.sequence().catch_up(SOON), SOON)
    assert found.newest == "t1-0000000001-g1"
    assert (tmp_path / "new" / "commits" / found.newest / "manifest.json").read_bytes().endswith(b"}")


@pytest.mark.parametrize("forgery", ["unsigned", "moved", "appended"])
def test_a_forged_record_of_the_fence_is_refused(store, tmp_path, forgery):
    records = tmp_path / "objects"
    match forgery:
        case "unsigned":
            blob = (records / key_of(2)).read_bytes()
            (records / key_of(2)).write_bytes(blob[: blob.rindex(b"\nhmac")])
        case "moved":  # a record of ours, under a number of somebody's choice
            shutil.copy(records / key_of(1), records / key_of(3))
        case "appended":
            (records / key_of(3)).write_bytes((records / key_of(2)).read_bytes())
    with pytest.raises(FenceDamaged, match=r"fence/00000000000\d (is not signed|has a wrong signature)"):
        store.sequence().catch_up(SOON)


def test_a_forged_manifest_of_a_store_is_refused(store, tmp_path):
    """Although the fence names its hash: it has a key of its own."""
    content = decode(2, OURS.opened(key_of(2), (tmp_path / "objects" / key_of(2)).read_bytes())).content
    assert isinstance(content, FenceCommit)
    ((name, sha256),) = content.live.items()
    path = tmp_path / "objects" / manifest_key(name, sha256)
    blob = path.read_bytes()
    path.write_bytes(blob[: blob.rindex(b"\nhmac")])
    with pytest.raises(CommitDamaged, match=r"is not signed, and the job file has store\.key"):
        store.manifest(name, sha256, SOON)
