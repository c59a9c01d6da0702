"""Reserved paths of jobs: which paths and patterns could reach one."""

import pytest

from headrace.errors import SpecError
from headrace.service.auth.allowed_paths import AllowedPaths, enclosing_store, reserved_by_jobs, reserved_stores
from headrace.service.cluster.store import MARKER


@pytest.fixture
def data(tmp_path):
    """A root with two stores, one a level deeper, a mirror, and events beside them."""
    for name in ("events", "store", "team/store", "mirror", "exported/news"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "events" / "a.jsonl").touch()
    return tmp_path


def kept(data):
    news = {"store": {"path": "store", "mirror": "mirror"}, "exports": {"main": {"path": "exported"}, "far": {}}}
    return reserved_by_jobs([("news", news, data, data / "store"), ("clicks", {}, data, data / "team" / "store")])


def confines(data, found=None):
    return AllowedPaths.of([str(data)], None, (), kept(data) if found is None else found)


FREE = ["*.jsonl", "events/*.jsonl", "*/*.jsonl?", "{day}/{hour}/{minute}/[a-r]*.jsonl", "events/**/*.jsonl", "even*/*"]
REACHING = ["**/*", "*/log", "st*/*", "s[st]ore/x", "{a}/x", "team/*/x", "*/store/x", "team/**", "mirror/*", "exp*/*/x"]


@pytest.mark.parametrize("pattern", FREE)
def test_a_pattern_that_cannot_match_below_what_is_kept_is_free(data, pattern):
    stores = reserved_stores([data / "store", data / "team" / "store"])
    confines(data, stores).check_pattern(pattern, data, "at")
    if pattern.startswith(("*/", "{")):  # these could match in a store
        return
    confines(data).check_pattern(pattern, data, "at")


@pytest.mark.parametrize("pattern", REACHING)
def test_a_pattern_that_could_is_refused(data, pattern):
    with pytest.raises(SpecError, match="^at: .*which belongs to a job"):
        confines(data).check_pattern(pattern, data, "at")


def test_a_spec_of_an_admin_may_have_a_pattern_that_could_but_none_that_does(data):
    found = confines(data, reserved_stores([data / "store"]))
    found.check_pattern("*/*.jsonl", data, "at")
    (data / "store" / "b.jsonl").touch()
    for pattern in ("*/*.jsonl", "store/*", "store/b.jsonl"):
        with pytest.raises(SpecError, match="^at: "):
            found.check_pattern(pattern, data, "at")


def test_a_folder_is_refused_within_and_around_what_is_kept(data):
    found = confines(data)
    for free in ("out", "events/out", "team/out", "exported/clicks", "stores"):
        found.check_folder(free, data, "at")
    for wrong in ("store", "store/x", "team", "team/store/paused", "mirror/x", "exported", "exported/news/x", "."):
        with pytest.raises(SpecError, match="^at: "):
            found.check_folder(wrong, data, "at")


def test_a_base_may_lie_around_but_not_within(data):
    confines(data).check_base(data, "at")
    with pytest.raises(SpecError, match="^at: "):
        confines(data).check_base(data / "store", "at")


def test_any_folder_with_a_stores_marker_is_one(data):
    (data / "old").mkdir()
    (data / "old" / MARKER).touch()
    assert enclosing_store(data / "old" / "log" / "x") == data / "old" and enclosing_store(data / "events") is None
    assert enclosing_store(data / ("x" * 300) / "y") is None
    with pytest.raises(SpecError, match="old, which belongs to a job"):
        confines(data).check_folder("old/x", data, "at")
    confines(data, reserved_stores([data / "store"])).check_folder("old/x", data, "at")
    confines(data).check_export("old/exports/main", data, "at")
    with pytest.raises(SpecError):
        confines(data).check_export("old/log", data, "at")


def test_a_link_leads_no_export_out_of_its_place(data):
    (data / "exported" / "news" / "x").symlink_to(data / "store")
    confines(data).check_export("exported/news/y", data, "at")
    with pytest.raises(SpecError):
        confines(data).check_export("exported/news/x", data, "at")


@pytest.mark.parametrize(
    "raw", [{"store": 3}, {"exports": []}, {"exports": {"a": 1}}, {"store": {"mirror": "ftp://x"}}]
)
def test_a_spec_that_is_none_any_more_keeps_its_store_all_the_same(data, raw):
    assert reserved_by_jobs([("x", raw, data, data / "store")]).places == (data / "store",)


def test_a_mirror_or_exports_in_an_object_store_are_no_folders(data):
    raw = {"store": {"mirror": "s3://bucket/x"}, "exports": {"main": {"path": "s3://bucket/y"}}}
    assert reserved_by_jobs([("x", raw, data, data / "store")]).places == (data / "store",)
