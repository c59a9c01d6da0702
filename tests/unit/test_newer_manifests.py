"""A commit of a newer Headrace stops a job that would continue from an older one; it is not changed."""

import pytest

from headrace.trainer.checkpoint import commits
from headrace.trainer.checkpoint.commits import MANIFEST, NewerFormat
from headrace.trainer.journal.records import SpecOperation
from headrace.trainer.rank0.recovery import Recovery
from tests.fakes.past import SPEC, Past


def test_a_job_does_not_continue_from_before_a_commit_that_it_cannot_read(tmp_path, monkeypatch):
    past = Past(tmp_path / "store").begin()
    past.log.append(SpecOperation(spec=SPEC))
    past.close(1, a=(0, 100))
    past.commit(1)
    past.close(2, a=(100, 200))
    with monkeypatch.context() as newer:
        newer.setattr("tests.fakes.past.FORMAT", commits.FORMAT + 1)
        name = past.commit(2)
    past.end()
    with pytest.raises(NewerFormat, match=f"format {commits.FORMAT + 1}"):
        Recovery(past.store, 2, SPEC).begin()
    assert (past.store / "commits" / name / MANIFEST).exists()
