"""A rank 0 that dies while it withdraws the plans of an old spec leaves no hole in the stream."""

import pytest

from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import Log, read
from headrace.trainer.journal.records import SpecOperation
from headrace.trainer.rank0.recovery import Recovery
from tests.fakes.past import SPEC, Past


class Killed(BaseException):
    pass


@pytest.mark.parametrize("appends", range(5))
def test_the_plans_left_after_a_kill_have_no_gap(tmp_path, monkeypatch, appends):
    """Killed after this many of the records void 5, void 4, the new spec, the restored commit."""
    past = Past(tmp_path / "store").begin()
    past.log.append(SpecOperation(spec=SPEC))
    for number in (1, 2, 3):
        past.close(number, a=(100 * number - 100, 100 * number))
    past.commit(3)
    past.plan(4, a=(300, 400))
    past.plan(5, a=(400, 500))
    past.end()
    real, left = Log.append, appends

    def append(log, content):
        nonlocal left
        if not left:
            log.close()
            raise Killed
        left -= 1
        return real(log, content)

    changed = {**SPEC, "train": {"batch_size": 7}}
    with monkeypatch.context() as killing:
        killing.setattr(Log, "append", append)
        try:
            Recovery(past.store, 2, changed).begin().joblog.close()
        except Killed:
            assert appends < 4
    assert [each.content.number for each in JobHistory.of(read(past.store / "log")).unclosed()] in ([4, 5], [4], [])
    found = Recovery(past.store, 3, changed).begin()
    found.joblog.close()
    assert found.replay == []
    assert found.last_number == 5
    assert JobHistory.of(read(past.store / "log")).spec == changed
