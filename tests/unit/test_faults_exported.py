"""The comparison of exports in fault runs, and the checks of each export."""

import json
from types import SimpleNamespace

import pytest

from headrace.deadline import Deadline
from headrace.service.faults.export_comparison import differing, export_violations, exported_of
from headrace.service.faults.operator import OperatorRequest, request_violations
from headrace.trainer.checkpoint.commits import hash_of
from headrace.trainer.journal.log import Log
from headrace.trainer.journal.pass_plan import PassPlan
from tests.fakes.records import close, operation

CUT = {"op": "export", "stream": "s", "timeline": "t1", "version": 3, "name": "0000000003-base", "type": "base"}
CUT |= {"parent": None, "why": "asked for", "all": False}
END = {
    "op": "exported",
    "stream": "s",
    "timeline": "t1",
    "name": "0000000003-base",
    "outcome": "complete",
    "error": None,
}
END |= {"version": 3}


class Ran:
    """A run that logged some operations and left one whole export."""

    def __init__(self, folder, *logged):
        self.folder, self.store, self.log = folder / "exports" / "job", folder / "store", folder / "log"
        section = SimpleNamespace(path=str(folder / "exports"))
        self.job = SimpleNamespace(store=self.store, spec=SimpleNamespace(exports={"s": section}, name="job"))
        self.store.mkdir(parents=True)
        log = Log.claim(self.log, 1, Deadline.after(5), timeline="t1")
        for content in logged:
            log.append(content)
        log.close()
        self.export = self.folder / "t1" / "0000000003-base"
        self.export.mkdir(parents=True)
        (self.export / "rows-default-0.parquet").write_bytes(b"rows")
        self.tell(ok=True)
        (self.export / "_DONE").touch()
        (self.folder / "donefile.txt").write_text('{"path": "t1/0000000003-base"}\n')
        (self.folder / "current.json").write_text('{"chain": ["t1/0000000003-base"], "passed_at": "now"}')

    def tell(self, ok, made_at="now", day=3):
        stored = hash_of(self.export / "rows-default-0.parquet")
        files = {"rows-default-0.parquet": {"sha256": stored.sha256, "bytes": stored.num_bytes}}
        told = {"made_at": made_at, "day": day, "files": files, "golden": {"ok": ok, "why": "far off"}, "gates": {}}
        (self.export / "manifest.json").write_text(json.dumps(told))

    def troubles(self):
        return list(export_violations(self.job, self.log))

    def exported(self):
        return exported_of(self.job, self.log)


@pytest.fixture
def good(tmp_path):
    return Ran(tmp_path / "good", operation(CUT), operation(END))


def test_two_runs_alike_but_for_time_and_golden_samples_are_alike(good, tmp_path):
    other = Ran(tmp_path / "other", operation(CUT), operation(END))
    other.tell(ok=None, made_at="later")
    told = {"chain": ["t1/0000000003-base"], "passed_at": "later", "head": {"timeline": 1, "generation": 9}}
    (other.folder / "current.json").write_text(json.dumps(told))
    (other.export / "golden.parquet").touch()
    assert differing(good.exported(), other.exported()) == []
    assert not good.troubles()


def test_other_rows_another_parent_or_another_day_differ(good, tmp_path):
    other = Ran(tmp_path / "other", operation(CUT | {"all": True}), operation(END))
    (other.export / "rows-default-0.parquet").write_bytes(b"rowz")
    other.tell(ok=True, day=4)
    assert differing(good.exported(), other.exported()) == [
        "s t1/0000000003-base as it was cut",
        "s t1/0000000003-base/manifest.json",
        "s t1/0000000003-base/rows-default-0.parquet",
    ]
    many = {str(n): n for n in range(9)}
    assert differing(many, {}) == ["0", "1", "2", "6 more differences of exports"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda ran: (ran.export / "_DONE").unlink(), "t1/0000000003-base has no _DONE"),
        (lambda ran: (ran.export / "more").touch(), "t1/0000000003-base differs from its manifest in ['more']"),
        (lambda ran: (ran.export / "rows-default-0.parquet").write_bytes(b"rowz"), "is damaged"),
        (lambda ran: ran.tell(ok=False), "does not give its golden predictions: far off"),
        (lambda ran: (ran.folder / "donefile.txt").write_text(""), "t1/0000000003-base is not in donefile.txt"),
        (
            lambda ran: (ran.folder / "donefile.txt").write_text('{"path": "t1/0000000003-base"}\n' * 2),
            "t1/0000000003-base is in donefile.txt 2 times",
        ),
        (
            lambda ran: (ran.folder / "current.json").write_text('{"chain": ["t1/0000000001-base"]}'),
            "current.json names t1/0000000001-base, which does not exist",
        ),
        (lambda ran: (ran.store / "exports-stage" / "s-0000000003").mkdir(parents=True), "is left in exports-stage"),
    ],
)
def test_what_may_never_be_left_is_found(good, harm, said):
    harm(good)
    assert any(said in trouble for trouble in good.troubles()), good.troubles()


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ([CUT], "export s t1 0000000003-base was cut 1 times and ended 0 times"),
        ([CUT, END, END], "export s t1 0000000003-base was cut 1 times and ended 2 times"),
        ([CUT, END | {"outcome": "failed", "error": "no room"}], "export s 0000000003-base failed: no room"),
    ],
)
def test_what_the_log_may_never_say_is_found(tmp_path, logged, said):
    assert Ran(tmp_path / "ran", *map(operation, logged)).troubles() == [said]


def test_a_request_is_logged_once_and_acts_at_the_version_that_was_answered(tmp_path):
    wish = {"op": "set", "id": "wish-1", "keys": {}}
    logged = [PassPlan(1, ()), operation(wish), close(1)]
    log = Ran(tmp_path / "ran", *logged).log
    assert not list(request_violations([OperatorRequest(wish, 1)], log)) and not list(
        request_violations([OperatorRequest(wish)], log)
    )
    assert list(request_violations([OperatorRequest(wish, 2)], log)) == ["set wish-1 acted at 1, not at 2"]
    assert list(request_violations([OperatorRequest(wish, refused="no")], log)) == ["set wish-1 is logged 1 times"]
    twice = Ran(tmp_path / "twice", *logged, operation(wish)).log
    assert "set wish-1 is logged 2 times" in list(request_violations([OperatorRequest(wish, 1)], twice))
    other = {**wish, "id": "wish-2"}
    assert list(request_violations([OperatorRequest(other, 1)], log)) == [
        "set wish-2 is logged 0 times",
        "set wish-2 acted at None, not at 1",
    ]
    assert not list(request_violations([OperatorRequest(other)], log)), "the stream was over first"
