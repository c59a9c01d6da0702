"""A job that does not run: its tables are read in its newest commit, and a shrink waits for the next run."""

import json

import pytest
from typer.testing import CliRunner

from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.service.cli.main import cli
from headrace.service.spec.job import load_job
from headrace.service.tables.row import ranking
from headrace.trainer.journal.log import RecordKind, read
from tests.integration.stream_job import headrace
from tests.integration.test_ageing_jobs import ALIVE, NEW, write


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A job that has ended: three days, of which two are left."""
    job = write(tmp_path_factory.mktemp("ended"), range(3))
    ran = headrace(job)
    assert ran.code == 0, ran.output
    return job


def say(command, job, *words):
    """What a command prints, or the words in which it refuses."""
    ran = CliRunner().invoke(cli, [command, str(job), *words])
    assert ran.exception is None or isinstance(ran.exception, HeadraceError), repr(ran.exception)
    return ran.output + str(ran.exception or "")


def rows_of_days(*days):
    return len({item for day in days for item in range(day * NEW, day * NEW + ALIVE)})


@pytest.mark.long
def test_its_tables_and_keys_are_told_as_of_its_newest_commit(ended):
    commit = max(path.name for path in (ended.parent / "store" / "commits").iterdir())
    lines = say("tables", ended).splitlines()
    wanted = rows_of_days(1, 2)
    assert lines[0] == f"the job does not run; this is the state of its newest commit, {commit}"
    assert lines[1].startswith(f"default: {wanted} rows of dim 4, ") and lines[2].startswith(f"  item: rows {wanted}, ")
    [table] = json.loads(say("tables", ended, "--json"))
    assert table["rows"] == table["slots"]["item"]["rows"] == wanted and table["held"] is None
    told = say("explain", ended, "item", str(2 * NEW + ALIVE - 1))
    assert f"the job does not run; this is the state of its newest commit, {commit}" in told
    assert "last seen on day 2, 0 days ago" in told and "a shrink deletes it in 2 days" in told
    assert "it has no row" in say("explain", ended, "item", "0"), "a shrink took it"
    ranked = ranking(load_job(ended), "default", Deadline.after(60))
    assert (ranked["commit"], ranked["total"], ranked["unseen"][0]["rows"] > 0) == (commit, wanted, True)
    assert "there is no sparse slot" in say("explain", ended, "itm", "0")


@pytest.mark.long
def test_what_would_go_is_counted_and_a_shrink_acts_in_the_next_run(ended):
    before = rows_of_days(1, 2)
    going = before - rows_of_days(2)
    dry = say("shrink", ended, "--dry-run", "--delete-after-days", "0")
    assert f"table default: {going} of {before} rows would be deleted" in dry and "counted in its newest commit" in dry
    refused = say("shrink", ended, "--delete-below", "1e9")
    assert f"a shrink would remove {before} of {before} rows" in refused and "--allow removes them" in refused
    log = ended.parent / "store" / "log"
    assert not [record for record in read(log) if record.body.get("op") == "shrink" and record.body["id"]]
    said = say("shrink", ended, "--delete-after-days", "0", "--allow")
    assert f"a shrink of table default is logged for the next run; {going} of {before} rows" in said
    assert read(log)[-1].kind is RecordKind.OPERATION and rows_in(ended) == before
    ran = headrace(ended)
    assert ran.code == 0 and ran.report["tables"]["default"]["rows"] == rows_of_days(2), ran.output
    assert rows_in(ended) == rows_of_days(2)


def rows_in(job):
    return json.loads(say("tables", job, "--json"))[0]["rows"]


def test_a_job_that_never_ran_has_nothing_to_read(tmp_path):
    job = write(tmp_path, range(1))
    for command, *words in (("tables",), ("explain", "item", "1"), ("shrink", "--dry-run")):
        assert "holds no run; `headrace run` begins one" in say(command, job, *words)
