"""A job whose trainers do not wait for each other is resized while it runs: every event is learnt once."""

import pytest

from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.faults.resized_job import job_at, report, run, written
from tests.faults.test_kills import ASYNC, GEO, HALF_ASYNC, shows
from tests.faults.test_resizes_killed import DEATHS, DeathsInTurn

pytestmark = pytest.mark.usefixtures("warm")

NUM_LINES = 700
SHORT_PASSES = "passes.max_events=32"
"""So many passes that the stream does not end before the last resize."""
SIZES = ({"shards": 3}, {"trainers": 3}, {"shards": 1}, {"trainers": 1, "shards": 2})
SAME = ("events", "samples", "rejected", "positions")


def assert_learnt_once(job, calm, folder):
    """The same events as in the job left alone, and the same shows and clicks of each row.

    Another number of trainers cuts other passes.
    """
    assert {key: report(job)[key] for key in SAME} == {key: report(calm)[key] for key in SAME}
    shown = shows(job, folder / "rows-resized")
    assert shown == shows(calm, folder / "rows-calm") and len(shown) > 300


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", [ASYNC, HALF_ASYNC, GEO], ids=["async", "half-async", "geo"])
def test_resizes_of_shards_and_trainers_mid_stream_lose_and_repeat_no_event(tmp_path, settings):
    file = written(tmp_path, NUM_LINES)
    calm, resized = (
        job_at(file, name, "{trainers=2, shards=2}", *settings, SHORT_PASSES) for name in ("calm", "resized")
    )
    run(calm)
    said, resizer = run(resized, SIZES)
    assert resizer.acted == list(SIZES) and not resizer.failures, said[-30:]
    assert sum("takes over" in line for line in said) == len(SIZES), said
    plans = JobHistory.of(read(resized.store / "log")).plans
    assert {len(plan.content.segments) for plan in plans.values()} == {1, 2, 3}
    assert_learnt_once(resized, calm, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("settings", [ASYNC, GEO], ids=["async", "geo"])
def test_deaths_on_the_way_of_such_a_resize_lose_and_repeat_no_event(tmp_path, settings):
    file = written(tmp_path)
    calm, killed = (
        job_at(file, name, "{trainers=2, shards=1}", *settings, SHORT_PASSES) for name in ("calm", "killed")
    )
    run(calm)
    deaths = DeathsInTurn(DEATHS)
    said, resizer = run(killed, deaths.sizes("shards", 2, 3, 1), deaths.faults, deaths.said)
    assert deaths.done and len(resizer.acted) > 3, (deaths.died, said[-30:])
    assert_learnt_once(killed, calm, tmp_path)
