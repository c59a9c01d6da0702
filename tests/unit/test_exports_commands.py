"""What people see of a job's exports, which one they mean, and how one that they asked for ended."""

import json

import pytest

from headrace.errors import SpecError
from headrace.service.cli import export_output
from headrace.service.cli.export_commands import choose_stream
from headrace.service.exports import export_list
from headrace.service.exports.export_request import ExportFailed, export_result
from headrace.service.predict.versions import own_export
from headrace.service.spec.job import load_job
from headrace.trainer.exports.pointers import newest_timeline
from headrace.trainer.job_status import Status, read
from tests.fakes.exports import write_export
from tests.integration.stream_job import SPEC

ROWS = {("a", 1): [1, 2, 3, 4, 5], ("a", 2): [5, 4, 3, 2, 1]}
GATES = {"min_auc": {"passed": False, "value": 0.5, "limit": 0.6, "why": "auc of ctr is 0.5"}}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(SPEC + '[exports.main]\npath = "out"\n[exports.more]\n')
    return load_job(path)


@pytest.fixture
def folder(job):
    """A base, a delta that failed a gate, one that is not complete; another timeline."""
    folder = job.folder / "out" / "small"
    write_export(folder / "t1", "base", 3, ROWS)
    write_export(folder / "t1", "delta", 5, ROWS, [("b", 9)], parent=(3, "base"), gates=GATES, why="each 1h")
    write_export(folder / "t2", "base", 4, ROWS)
    unfinished = write_export(folder / "t2", "delta", 6, ROWS, parent=(4, "base"))
    (unfinished / "_DONE").unlink()
    parent = {"name": "0000000003-base", "version": 3, "timeline": "t1"}
    manifest = folder / "t1" / "0000000005-delta" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"parent": parent}))
    return folder


def test_a_list_tells_of_each_export_in_order_of_time(job, folder, capsys):
    export_list.make_current(job, "main", "t1/0000000003-base")
    export_output.list_exports(job, None, as_json=False)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [
        "t1/0000000003-base", "t1/0000000005-delta", "t2/0000000004-base", "t2/0000000006-delta",
    ]  # fmt: skip
    for line, end in zip(lines, ["current", "failed gates: min_auc", "", "not complete"], strict=True):
        assert line.rstrip().endswith(end)
    export_output.list_exports(job, "main", as_json=True)
    base, delta, *_ = json.loads(capsys.readouterr().out)
    assert (base["current"], base["rows"], delta["tombstones"], delta["failed_gates"]) == (True, 2, 1, ["min_auc"])
    export_output.list_exports(job, "more", as_json=False)
    assert capsys.readouterr().out == "there are no exports yet\n"


def test_one_that_cannot_be_read_is_listed_as_damaged(job, folder):
    (folder / "t2" / "0000000004-base" / "manifest.json").write_text("{")
    with export_list.open_streams(job, "main") as [stream]:
        entry = export_list.entries_of(stream)[2]
    assert entry["complete"] and "is not JSON: " in entry["damaged"]


def test_an_export_is_named_by_its_path_name_or_version(job, folder, capsys):
    export_output.show_export(job, "main", "5", as_json=False)
    shown = capsys.readouterr().out
    assert "delta of version 5" in shown and "each 1h" in shown and "builds on t1/0000000003-base" in shown
    assert "gate min_auc: failed: auc of ctr is 0.5" in shown and "2 rows, 1 deleted, 0 pending" in shown
    export_output.show_export(job, "main", "0000000003-base", as_json=True)
    assert json.loads(capsys.readouterr().out)["version"] == 3
    with pytest.raises(SpecError, match="no complete export '6'; there are: t1/0000000003-base, t1/"):
        export_output.show_export(job, "main", "6", as_json=False)


def test_pointing_says_what_serving_gets_and_which_gates_it_failed(job, folder):
    pointed = export_list.make_current(job, "main", "0000000005-delta")
    assert (pointed.path, pointed.failed_gates) == ("t1/0000000005-delta", ["min_auc"])
    assert pointed.url == str(folder / pointed.path)
    current = json.loads((folder / "current.json").read_text())
    assert (current["path"], current["chain"]) == ("t1/0000000005-delta", ["t1/0000000003-base", "t1/0000000005-delta"])


def test_the_stream_must_be_named_where_there_are_several(job):
    assert choose_stream(job, "more") == "more"
    with pytest.raises(SpecError, match="--stream; the job has: main, more"):
        choose_stream(job, None)
    with pytest.raises(SpecError, match="did you mean 'more'"):
        choose_stream(job, "mor")


@pytest.mark.long
def test_the_timelines_of_exports_are_known_where_their_places_answer(job, folder, caplog):
    assert newest_timeline(job.spec.name, job.spec.exports, job.store, job.folder) == 2
    there = job.spec.exports["main"].model_copy(
        update={"path": "s3://nowhere/x?endpoint_override=127.0.0.1:1&scheme=http"}
    )
    away = job.spec.model_copy(update={"exports": {"main": there}})
    assert newest_timeline(away.name, away.exports, job.store, job.folder) == 0 and "are not known" in caplog.text


def told(name="", outcome="complete", **more):
    last = {"name": name, "outcome": outcome, "error": "no room", **more} if name else None
    main = {"name": name, "last": last, "failed_gates": ["auc"]}
    return read(Status, {"operations": {"exporting": {"main": main}}})


def test_how_an_export_that_was_asked_for_ended():
    assert export_result(told(), "main", 5) is None and export_result(told("0000000004-base"), "main", 5) is None
    made = export_result(told("0000000005-base", current=True), "main", 5)
    assert (made.name, made.current, str(made)) == ("0000000005-base", True, "0000000005-base is complete")
    made = export_result(told("0000000005-base", current=False), "main", 5)
    assert (made.current, str(made)) == (False, "0000000005-base is complete, but current.json does not name it: auc")
    with pytest.raises(ExportFailed, match="0000000005-base of main failed: no room"):
        export_result(told("0000000005-base", "failed"), "main", 5)
    assert "another one since" in str(export_result(told("0000000009-delta", "failed", current=False), "main", 5))


def test_a_number_means_the_complete_export_of_that_version_on_the_newest_timeline(job, folder):
    assert own_export(job, "3") == str(folder / "t1" / "0000000003-base")
    write_export(folder / "t2", "base", 3, ROWS)
    assert own_export(job, "3") == str(folder / "t2" / "0000000003-base")
    assert own_export(job, "6") is None, "it is not complete"
    assert own_export(job, "309") is None


def test_a_version_that_several_streams_export_must_be_named_by_its_address(job, folder):
    write_export(job.store / "exports" / "more" / "small" / "t1", "base", 3, ROWS)
    with pytest.raises(SpecError, match=r"version 3 is exported by several streams.*main: .*/out/.*; more: "):
        own_export(job, "3")
