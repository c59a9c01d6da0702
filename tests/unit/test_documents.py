"""JSON documents: bounded in size and depth, and named in errors."""

import ast
import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import documents
from headrace.documents import MAX_DEPTH, InvalidDocument
from headrace.errors import SpecError
from headrace.pserver.config import ShardProcess
from headrace.pserver.errors import StoreDamaged
from headrace.pserver.store import rocks_store
from headrace.service.jobs.folder import FolderDamaged, JobFolder
from headrace.service.python.rest_client import parsed_events
from headrace.service.spec.job import load_job
from headrace.service.tables import forget
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits
from headrace.trainer.journal.log_file import RecordPlace, record_of
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.output_place import WORK, FolderPlace
from headrace.trainer.predict.prediction_plan import PLAN, PredictionPlan
from headrace.worker_process import config_of

ROOT = Path(__file__).parents[2]
NEWS = ROOT / "tests" / "golden" / "news.toml"
PACKAGES = ("service", "trainer", "pserver", "dataset", "headrace")
OWN = {
    "headrace/documents.py": "the reader itself",
    "dataset/formats/generator_columns.py": "HEADRACE_SLOTS, which the pipe sets; a generator starts in no time",
}
"""Files that call json.loads themselves, and why."""

WRONG = {
    "brackets": (b"[" * 100_000, "has lists and objects nested deeper than 100"),
    "objects": (b'{"a":' * 100_000, "has lists and objects nested deeper than 100"),
    "garbage": (b"\x00\xff\x13nonsense", "is not JSON: "),
    "not UTF-8": (b'{"a": "\xff"}', "is not JSON: "),
    "nothing": (b"", "is not JSON: "),
    "cut off": (b'{"a": [1, 2', "is not JSON: "),
    "digits": (b"1" * 5000, "is not JSON: "),
    "a list": (b"[]", "is not a JSON object"),
    "a number": (b"1", "is not a JSON object"),
    "long": (b'"' + b"x" * 2000 + b'"', "is longer than 1,000 bytes"),
}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value):
    """The plain twin of what `exceeds` counts."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(0, 6), st.booleans())
def test_depth_is_that_of_lists_and_objects_outside_of_strings(value, depth, escaped):
    text = json.dumps(value, ensure_ascii=escaped)
    assert documents.text_nested_deeper(text, depth) == (depth_of(value) > depth)
    assert documents.text_nested_deeper(text.encode("utf-8", "surrogatepass"), depth) == (depth_of(value) > depth)


@given(VALUES, st.integers(0, 6))
def test_the_depth_of_a_value_is_told_likewise(value, depth):
    assert documents.value_nested_deeper(value, depth) == (depth_of(value) > depth)


def test_a_spec_is_bounded_in_depth_so_that_documents_which_hold_it_are_read():
    def load(depth):
        return load_job(NEWS, [f"model.settings.hidden={'[' * depth}{']' * depth}"])

    for depth in (documents.MAX_SPEC_DEPTH, 300):
        with pytest.raises(SpecError, match="nested deeper than 64"):
            load(depth)
    with pytest.raises(SpecError, match="hidden"):
        load(20)


@given(VALUES)
def test_what_is_written_is_read(value):
    assert documents.parse(json.dumps(value), "it") == value


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_document_is_said_with_its_name(name, tmp_path):
    content, why = WRONG[name]
    path = tmp_path / "store" / "it.json"
    path.parent.mkdir()
    path.write_bytes(content)
    max_bytes = 1000 if name == "long" else documents.MAX_BYTES
    with pytest.raises(InvalidDocument) as refused:
        documents.read_object(path, max_bytes)
    assert str(refused.value).startswith(f"{path} {why}")
    assert refused.value.exit_code == 1
    assert isinstance(refused.value, ValueError), "those who expect json's own errors meet it"


def test_as_many_brackets_side_by_side_as_one_likes_may_be_there():
    assert documents.parse(json.dumps([[[]]] * 100_000), "it")[7] == [[]]
    assert documents.parse(json.dumps("[{" * 100_000), "it").startswith("[{")
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert documents.parse(deep, "it")
    with pytest.raises(InvalidDocument, match="nested deeper"):
        documents.parse(f"[{deep}]", "it")


def test_json_is_read_here_and_nowhere_else():
    found = []
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
        if any(node.attr in ("loads", "load") and getattr(node.value, "id", "") == "json" for node in calls):
            found.append(str(path.relative_to(ROOT)))
    assert sorted(set(found) - set(OWN)) == []


# -- those who read documents

DEEP = b"[" * 100_000
GARBAGE = b"\x00\xff\x13nonsense"


def read_commit(path):
    folder = path / "commits" / "t1-0000000004-g1"
    assert Commits(path).whole() == [], "passed over"
    with pytest.raises(CommitDamaged, match="t1-0000000004-g1: its manifest cannot be read"):
        Commits(path).read(folder.name)


def read_header(path):
    with pytest.raises(StoreDamaged, match="header"):
        rocks_store._check_header(path / "header", 3)


def read_plan(path):
    with pytest.raises(InvalidDocument, match=str(path / PLAN)):
        PredictionPlan.read(FolderPlace(path))


def read_mark(path):
    assert PredictionOutput(path).mark(0) is None, "its part is made again"


def read_worker(path):
    with pytest.raises(SpecError, match="worker.json"):
        config_of(path / "worker.json", ShardProcess)


def read_job_folder(path):
    with pytest.raises(FolderDamaged, match=r"job\.json is damaged .*put it back"):
        JobFolder(path).job()


def read_dead_letter(path):
    assert forget.drop_letters(path / "letters", "x") == 1


READERS = {
    "commits/t1-0000000004-g1/manifest.json": read_commit,
    "header": read_header,
    PLAN: read_plan,
    "work/mark-000000.json": read_mark,
    "worker.json": read_worker,
    "job.json": read_job_folder,
    "letters": read_dead_letter,
}


@pytest.mark.parametrize("content", [DEEP, GARBAGE, b"[]"], ids=["deep", "garbage", "list"])
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_document_is_named_or_passed_over_by_its_reader(tmp_path, name, content):
    path = tmp_path / name.replace("work/", f"{WORK}/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    READERS[name](tmp_path)


def test_a_log_record_whose_bytes_are_right_and_that_says_nothing_is_none():
    for body in (DEEP, b'{"n": 1}', b'{"kind": "close"}'):
        line = b"1 %08x %s\n" % (zlib.crc32(body), body)
        assert record_of(line.replace(b" [", b" {", 1), RecordPlace(Path("log"), 0)) is None


def test_what_a_service_answers_is_bounded_in_depth():
    lines = iter(["data: " + "[" * 100_000, ""])
    with pytest.raises(InvalidDocument, match="an event of the service has lists and objects nested"):
        list(parsed_events(lines))
