"""The store's folder: claimed once, never taken from another run, cleared only of files of a run."""

import json
import os
import stat

import pytest

from headrace.durable import SymbolicLinkFound
from headrace.errors import SpecError
from headrace.service.cluster.run_folder import run_folder, worker_folder, write_private
from headrace.service.cluster.store import LOCK, MADE_BY_A_RUN, MARKER, REPORT, RUN, WORKERS, check_run, claimed


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def claim(folder, fresh=False, job="news"):
    with claimed(folder, job, fresh=fresh) as store:
        return store


def refusal(folder, fresh=False):
    with pytest.raises(SpecError) as caught:
        claim(folder, fresh)
    return str(caught.value)


def test_a_new_store_is_made_with_its_marker(tmp_path):
    store = tmp_path / "a" / "b"
    claim(store)
    assert names(store) == sorted([LOCK, MARKER, RUN])
    assert json.loads((store / MARKER).read_text()) == {"kind": "store", "format": 1}
    assert json.loads((store / RUN).read_text())["job"] == "news"


def test_an_empty_folder_may_become_a_store(tmp_path):
    claim(tmp_path)
    assert (tmp_path / MARKER).exists()


def test_the_run_a_store_holds_goes_on_without_the_report_of_its_end(tmp_path):
    claim(tmp_path)
    told = (tmp_path / RUN).read_text()
    (tmp_path / "log").mkdir()
    (tmp_path / REPORT).write_text("{}")
    claim(tmp_path)
    assert names(tmp_path) == sorted([LOCK, MARKER, RUN, "log"])
    assert (tmp_path / RUN).read_text() == told


def test_another_jobs_run_is_refused_with_a_hint(tmp_path):
    claim(tmp_path, job="clicks")
    assert refusal(tmp_path) == (
        f"store.path: {tmp_path} holds a run of job 'clicks', not of 'news'; give --fresh to remove it and begin anew, "
        "or choose another store.path"
    )
    claim(tmp_path, fresh=True)
    assert json.loads((tmp_path / RUN).read_text())["job"] == "news"


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_run_that_cannot_be_named_is_refused(tmp_path, text):
    claim(tmp_path)
    (tmp_path / RUN).write_text(text)
    assert refusal(tmp_path).startswith(f"store.path: {tmp_path / RUN} cannot be read (")


def test_a_clearing_that_was_cut_short_is_no_run(tmp_path, monkeypatch):
    claim(tmp_path)
    for name in ("log", "commits"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("headrace.service.cluster.store.shutil.rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        claim(tmp_path, fresh=True)
    monkeypatch.undo()
    assert refusal(tmp_path) == (
        f"store.path: {tmp_path} holds parts of a run (log, commits) but no {RUN}; put that back, or give --fresh"
    )
    claim(tmp_path, fresh=True)
    assert names(tmp_path) == sorted([LOCK, MARKER, RUN])


def cut_short(*_):
    raise KeyboardInterrupt


def test_fresh_removes_what_a_run_made_and_nothing_else(tmp_path):
    claim(tmp_path)
    for name in MADE_BY_A_RUN:
        if name.endswith(".json"):
            (tmp_path / name).write_text("old")
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "part").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path, fresh=True)
    assert names(tmp_path) == sorted([LOCK, MARKER, RUN, "notes.txt"])
    assert "old" not in (tmp_path / RUN).read_text()


def test_fresh_removes_a_link_and_not_what_it_points_to(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    store = tmp_path / "store"
    claim(store)
    (store / "model").symlink_to(elsewhere)
    claim(store, fresh=True)
    assert names(elsewhere) == ["kept"]
    assert not (store / "model").is_symlink()


FOLLOWED = sorted({*MADE_BY_A_RUN} - {WORKERS})


@pytest.mark.parametrize("act", ["run", "look"])
@pytest.mark.parametrize(
    "name", [*FOLLOWED, LOCK, MARKER, "commits/t1-0000000001-g1", "log/00000001-0001.log", "live/g1-shard-0"]
)
def test_what_a_store_holds_is_no_link_to_somewhere_else(tmp_path, name, act):
    elsewhere, store = tmp_path / "elsewhere", tmp_path / "store"
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("secret")
    claim(store)
    path = store / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(elsewhere / "its")
    path.symlink_to(elsewhere / "its" if (elsewhere / "its").exists() else elsewhere)
    before = {each.name: each.read_bytes() for each in elsewhere.iterdir()}
    with pytest.raises(
        SymbolicLinkFound, match=f"{path} is a symbolic link, .* move what it names to this place"
    ) as refused:
        claim(store) if act == "run" else check_run(store, "news")
    assert refused.value.exit_code == 2
    assert {each.name: each.read_bytes() for each in elsewhere.iterdir()} == before


def test_a_link_in_place_of_the_workers_folder_is_replaced_and_not_followed(tmp_path):
    elsewhere, store = tmp_path / "elsewhere", tmp_path / "store"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    claim(store)
    (store / WORKERS).symlink_to(elsewhere)
    claim(store)
    with worker_folder(store / WORKERS, None):
        assert not (store / WORKERS).is_symlink()
    assert names(elsewhere) == ["kept"]


def test_links_that_are_no_part_of_a_run_stay_as_they_are(tmp_path):
    claim(tmp_path / "store")
    (tmp_path / "store" / "notes").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    claim(tmp_path / "link")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_is_no_store_is_never_touched(tmp_path, fresh):
    (tmp_path / REPORT).write_text("someone's")
    assert refusal(tmp_path, fresh) == (
        f"store.path: {tmp_path} is not empty and no store of Headrace (it has no {MARKER}); choose another folder"
    )
    assert names(tmp_path) == [REPORT]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_store_in_use_is_refused(tmp_path, fresh):
    with claimed(tmp_path, "news", fresh=False):
        assert refusal(tmp_path, fresh) == f"store.path: {tmp_path} is in use by a run that has not ended"
    assert (tmp_path / RUN).exists()


def test_a_file_at_the_path_of_the_store_is_refused(tmp_path):
    (tmp_path / "store").write_text("")
    assert refusal(tmp_path / "store") == f"store.path: {tmp_path / 'store'} cannot be used: File exists"


def test_the_run_folder_is_private_and_gone_at_the_end(tmp_path):
    path = tmp_path / "workers"
    path.mkdir()
    (path / "left by a launcher that was killed").write_text("")
    with run_folder(path) as folder:
        assert names(folder) == []
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        write_private(folder / "a.json", {"secret": "s"})
        assert stat.S_IMODE((folder / "a.json").stat().st_mode) == 0o600
        assert json.loads((folder / "a.json").read_text()) == {"secret": "s"}
    assert not path.exists()


def test_a_store_is_for_its_owner_only_whether_it_is_made_or_was_open(tmp_path):
    old_mask = os.umask(0)
    try:
        claim(tmp_path / "new")
        (tmp_path / "open").mkdir(mode=0o777)
        claim(tmp_path / "open")
    finally:
        os.umask(old_mask)
    for store in ("new", "open"):
        assert stat.S_IMODE((tmp_path / store).stat().st_mode) == 0o700


def test_configurations_may_lie_elsewhere_and_are_found_through_the_store(tmp_path):
    path, private = tmp_path / "store" / "workers", tmp_path / "private"
    for left in (lambda: path.mkdir(parents=True), lambda: path.symlink_to(tmp_path)):
        left()  # by a launcher that was killed
        with worker_folder(path, private) as folder:
            write_private(folder / "a.json", {"secret": "s"})
            assert path.is_symlink() and path.resolve() == private
            assert json.loads((path / "a.json").read_text()) == {"secret": "s"}
            assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert not path.is_symlink() and not private.exists()
        assert tmp_path.exists(), "a link that was left is removed, not what it leads to"
    path.symlink_to(tmp_path)
    with worker_folder(path, None) as folder:
        assert folder == path and not path.is_symlink()
