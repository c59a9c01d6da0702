"""Jobs whose rows learn on the trainer's device: the CPU here, with the bits of rows on the shard, whatever happens."""

from pathlib import Path

import pytest

from headrace.failpoints import Failpoint
from tests.integration.stream_job import LIVING, write_living_job
from tests.integration.trainer_here import closes, killed, run
from tests.jobs import changed

NUM_LINES, PASS_EVENTS = 480, 60
SPEC = changed(
    LIVING,
    {
        "exports": None,
        "passes.max_events": PASS_EVENTS,
        "tables.default.extend_at": None,
        "tables.default.slots.history.extend_at": None,
    },
)
"""Admission, ageing and shrinking at each day tick, and two classes of slots."""
DEVICE, LITTLE = "train.rows=device", "train.rows_memory=2KiB"
"""`LITTLE`: most rows find no room."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return write_living_job(tmp_path_factory.mktemp("device"), num_parts=1, num_lines=NUM_LINES, spec=SPEC)


@pytest.fixture(scope="module")
def on_host(job):
    return run(job, job.parent / "host")


@pytest.mark.parametrize("more", [(), (LITTLE,), ("tables.default.memory=8MiB",), ("dense.accumulate=2",)])
def test_a_job_has_the_same_bits(job, on_host, more, tmp_path):
    beside = run(job, tmp_path / "host", *more) if more and more != (LITTLE,) else on_host
    assert run(job, tmp_path / "device", DEVICE, *more) == beside
    assert closes(tmp_path / "device") == closes(job.parent / "host" if beside is on_host else tmp_path / "host")


def test_a_commit_goes_on_without_it_and_with_it_again(job, tmp_path):
    """Each change of the key closes a pass without events, in both jobs."""
    ends = []
    for name, ways in {"first": ((DEVICE,), (), (DEVICE, LITTLE)), "then": ((), (DEVICE,), ())}.items():
        store = tmp_path / name
        run(job, store, *ways[0], drain_after=2 * PASS_EVENTS)
        run(job, store, *ways[1], generation=2, drain_after=5 * PASS_EVENTS)
        ends.append(run(job, store, *ways[2], generation=3))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("point", "hit"),
    [(Failpoint.PARTLY_PUSHED, 3), (Failpoint.BEFORE_CLOSE, 4), (Failpoint.CLOSED, 3), (Failpoint.PARTLY_PUSHED, 7)],
)
def test_a_kill_changes_no_bit(job, on_host, tmp_path, point, hit):
    store = tmp_path / "store"
    killed(job, store, DEVICE, LITTLE, generation=1, point=point, hit=hit)
    assert run(job, store, DEVICE, LITTLE, generation=2) == on_host
