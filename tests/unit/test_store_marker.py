"""The marker of a store: a damaged one, or one of a newer layout, is refused by name and left alone."""

import pytest

from headrace.errors import SpecError
from headrace.service.cluster.store import MARKER, check_run, claimed, remove

WRONG = {
    b"\x00\xffgarbage": "is not JSON: ",
    b"[" * 100_000: "has lists and objects nested deeper than 100",
    b"[]": "is not a JSON object",
    b"{}": 'is damaged or not of a store; the marker of a store holds {"kind": "store", "format": 1}',
    b'{"kind": "exports", "format": 1}': "is damaged or not of a store",
    b'{"kind": "store", "format": true}': "is damaged or not of a store",
    b'{"kind": "store", "format": 2}': "is of format 2, and this Headrace reads format 1; run the newer one",
    b" " * (2 << 20): "is longer than 1,048,576 bytes",
}


@pytest.fixture
def store(tmp_path):
    with claimed(tmp_path / "store", "clicks", fresh=False) as store:
        (store / "log").mkdir()
    return store


@pytest.mark.parametrize("content", WRONG, ids=lambda content: content[:12].decode("latin-1"))
@pytest.mark.parametrize("act", ["run", "fresh", "look", "remove"])
def test_a_marker_that_is_not_ours_is_refused_and_nothing_is_removed(store, content, act):
    (store / MARKER).write_bytes(content)
    with pytest.raises(SpecError) as refused:
        match act:
            case "run" | "fresh":
                with claimed(store, "clicks", fresh=act == "fresh"):
                    pass
            case "look":
                check_run(store, "clicks")
            case "remove":
                remove(store, "clicks")
    assert str(refused.value).startswith("store.path: ")
    assert f"{store / MARKER} {WRONG[content]}" in str(refused.value)
    assert (store / "log").is_dir() and (store / MARKER).read_bytes() == content


def test_a_run_that_cannot_be_read_is_named(store):
    (store / "run.json").write_bytes(b"[" * 100_000)
    with pytest.raises(SpecError, match=r"run\.json cannot be read .*nested deeper.*; give --fresh"):
        check_run(store, "clicks")
