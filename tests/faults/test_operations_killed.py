"""A job with days and shrinks, killed around them, ends like the undisturbed one."""

import json

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.integration.timed_job import write_timed_job

pytestmark = pytest.mark.usefixtures("warm")

COMPARED = ("events", "samples", "rejected", "positions", "metrics", "digest", "passes")
DAILY = ["tables.default.delete_after_days=1", "tables.default.delete_below=0.12", "tables.default.decay=0.7"]
PLANNED = [
    AtFailpoint(RANK_0, point, hit)
    for point, hit in (
        (Failpoint.OPERATION_LOGGED, 1), (Failpoint.OPERATED, 1), (Failpoint.OPERATED, 2), (Failpoint.CLOSED, 2),
        (Failpoint.OPERATION_LOGGED, 1), (Failpoint.COMMITTED, 1), (Failpoint.OPERATED, 1), (Failpoint.REPLAYED, 1),
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("trainers", "shards"), [(1, 0), (2, 2)], ids=["embedded", "2 trainers x 2 shards"])
def test_a_death_around_a_shrink_changes_nothing(tmp_path, trainers, shards):
    path = write_timed_job(tmp_path, "", num_lines=1500, step_s=1200.0)
    said = []
    calm, killed = (
        load_job(
            path,
            [f"store.path={store}", f"cluster={{trainers={trainers}, shards={shards}}}", *DAILY, "train.threads=1",
             "tables.default.max_shrink_fraction=1", "commit={every='600s', every_passes=4, keep=2}"],
        )
        for store in ("calm", "killed")
    )  # fmt: skip
    undisturbed = Deaths(calm.store, iter([]))
    assert run(calm, undisturbed, lambda worker, text: said.append(f"{worker}: {text}")).code == 0, said[-20:]
    deaths = Deaths(killed.store, iter(PLANNED))
    outcome = run(killed, deaths, lambda worker, text: said.append(f"{worker}: {text}"))
    assert outcome.code == 0 and not deaths.unasked, (outcome, said[-20:])
    assert [(died.death, died.point) for died in deaths.died] == [(death, death.point) for death in PLANNED]
    assert deaths.closes == undisturbed.closes
    assert report(killed.store) == report(calm.store)
    shrinks = [shrinks_of(store) for store in (killed.store, calm.store)]
    assert shrinks[1][-5:] == shrinks[0][-5:] and len(shrinks[1]) > 4, "the same, at the same versions"


def report(store):
    found = json.loads((store / "report.json").read_text())
    return {key: found[key] for key in COMPARED}


def shrinks_of(store):
    """The versions at which tables shrink, as far as the log goes back."""
    operations = JobHistory.of(read(store / "log")).operations_by_version()
    return sorted(v for v, records in operations.items() for record in records if record.body["op"] == "shrink")
