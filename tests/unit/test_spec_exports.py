"""Where a job's streams export to: each in a place of its own, however it is spelled."""

import pytest

from headrace.blob.store_address import COPY, FORMS
from tests.unit.test_spec import NEWS, load, message

STORE = "store.path=/runs/news"
SHARED_PLACES = {
    'exports.a={path="out"} ; exports.b={path="out"}': ("b", NEWS.parent / "out", "a"),
    'exports.a={path="out"} ; exports.b={path="./x/../out/"}': ("b", NEWS.parent / "out", "a"),
    f'exports.a={{path="file://{NEWS.parent}/out"}} ; exports.b={{path="out"}}': ("b", NEWS.parent / "out", "a"),
    f'{STORE} ; exports.a={{path="/runs/news/exports/b"}} ; exports.b={{}}': ("a", "/runs/news/exports/b", "b"),
    f'{STORE} ; exports.a={{}} ; exports.b={{path="/runs/news/exports/a"}}': ("b", "/runs/news/exports/a", "a"),
    'exports.a={path="s3://m/p"} ; exports.b={path="s3://m/p/"}': ("b", "s3://m/p", "a"),
    'exports.a={path="s3://m/p?region=eu"} ; exports.b={path="s3://m/p"}': ("b", "s3://m/p", "a"),
}


@pytest.mark.parametrize("overrides", SHARED_PLACES)
def test_two_streams_never_share_a_place_however_it_is_spelled(overrides):
    stream, place, other = SHARED_PLACES[overrides]
    assert message(*overrides.split(" ; ")) == (
        f"exports.{stream}.path: leads to {place}, as stream {other!r} does: each needs its own destination, "
        "for its current.json"
    )


def test_two_streams_in_a_folder_and_through_a_link_to_it_share_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    found = message(f'exports.a={{path="{tmp_path}/out"}}', f'exports.b={{path="{tmp_path}/link"}}')
    assert f"leads to {tmp_path}/out, as stream 'a' does" in found


def test_streams_of_places_of_their_own_are_taken():
    one, other = "http://one:9000", "http://other:9000"
    for first, second in (
        ("out", "out/a"),
        ("s3://m/p", "s3://m/q"),
        ("s3://m/p", "m/p"),
        (f"s3://m/p?endpoint_override={one}", f"s3://m/p?endpoint_override={other}"),
    ):
        assert len(load(f'exports.a={{path="{first}"}}', f'exports.b={{path="{second}"}}', "exports.c={}").spec.exports)


NO_PLACES = {
    "ftp://m/p": f"ftp:// is not supported; write {FORMS}",
    "hdfs://m/p": f"hdfs:// is not supported; {COPY}",
    "": f"is empty; write {FORMS}",
    "~nobody-of-this-name/out": "Could not determine home directory.",
}


@pytest.mark.parametrize("path", NO_PLACES)
def test_what_is_no_place_is_told_with_its_key(path):
    assert message(f'exports.a={{path="{path}"}}') == f"exports.a.path: {NO_PLACES[path]}"


LONG, DEEP = "x" * 256, "x/" * 2200
TOO_LONG = {
    f'exports.a={{path="{LONG}"}}': "exports.a.path: has a name of 256 bytes; a file system takes at most 255",
    f'exports.a={{path="out/{LONG}/b"}}': "exports.a.path: has a name of 256 bytes",
    f'exports.a={{path="file:///{LONG}"}}': "exports.a.path: has a name of 256 bytes",
    f'exports.a={{path="{DEEP}"}}': "exports.a.path: has 4",
    f'exports.a={{path="s3://m/{"x" * 769}"}}': "exports.a.path: has a prefix of 769 bytes; at most 768",
    f'store.mirror="{LONG}"': "store.mirror: has a name of 256 bytes",
    f'store.mirror="{"é" * 128}"': "store.mirror: has a name of 256 bytes",
    f'store.mirror="file:///{DEEP}"': "store.mirror: has 4",
    f'store.path="{LONG}"': "store.path: has a name of 256 bytes",
    f'store.path="/{"x/" * 1900}"': "store.path: leads to a path of 3800 bytes; a store has at most 3584",
    f'passes.keep_in="{LONG}"': "passes.keep_in: has a name of 256 bytes",
    f'sources.impressions={{kind="files",paths=["{LONG}/a"]}}': "sources.impressions.paths.0: has a name of 256 bytes",
}


@pytest.mark.parametrize("override", TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_path_that_no_file_system_takes_is_refused_with_its_key(override):
    assert message(override).startswith(TOO_LONG[override])


def test_the_longest_names_are_taken():
    longest = "x" * 255
    assert load(f'exports.a={{path="{longest}/{longest}"}}', f'store.mirror="{longest}"')
