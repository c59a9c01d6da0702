"""Whoever dies around operations and exports, the exporter too, changes nothing: not one file of an export."""

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.deaths import EXPORTER, RANK_0, AtFailpoint, AtInstant
from headrace.service.faults.export_comparison import differing, export_violations, exported_of
from headrace.service.faults.injection import Deaths, run
from headrace.service.spec.job import load_job
from tests.faults.test_kills import report, said_by
from tests.integration.stream_job import write_living_job

pytestmark = pytest.mark.usefixtures("warm")

SETTINGS = [
    "commit={every='600s', every_passes=3, keep=2}", "passes.max_events=32", "train.threads=1", "train.batch_size=16",
    "exports.serving.delta='12h'", "exports.thin.delta='48h'",
]  # fmt: skip


def then(*deaths):
    """An exporter's deaths, each followed by rank 0's a moment later: a generation has one at a point."""
    return [each for death in deaths for each in (death, AtInstant(RANK_0, 0, 0.5))]


PLANNED = [
    AtFailpoint(RANK_0, Failpoint.OPERATION_LOGGED),
    AtFailpoint(RANK_0, Failpoint.EXPORT_CUT),
    *then(AtFailpoint(EXPORTER, Failpoint.EXPORT_BEGUN), AtFailpoint(EXPORTER, Failpoint.EXPORT_ROWS)),
    AtFailpoint(RANK_0, Failpoint.OPERATED, 2),
    *then(AtFailpoint(EXPORTER, Failpoint.EXPORT_MANIFEST), AtFailpoint(EXPORTER, Failpoint.EXPORT_DONE)),
    AtInstant(EXPORTER, 0, 0.05, exports=1),
    AtInstant(RANK_0, 0, 0.2, exports=1),
    AtInstant(RANK_0, 0, 0.1, exports=1),
]


def job_at(folder, store, shards):
    exports = [f"exports.{name}.path='{folder / store / 'exports' / name}'" for name in ("serving", "thin")]
    return load_job(
        folder / "job.toml", [f"store.path={store}", f"cluster={{trainers=1, shards={shards}}}", *SETTINGS, *exports]
    )


@pytest.mark.timeout(600)  # some half a minute each, on two cores of their own
@pytest.mark.slow
@pytest.mark.parametrize("shards", [0, 2], ids=["embedded", "2 shards"])
def test_a_death_around_operations_and_exports_changes_nothing(tmp_path, shards):
    write_living_job(tmp_path, num_lines=500)
    said = []
    undisturbed, disturbed = (job_at(tmp_path, store, shards) for store in ("calm", "killed"))
    calm = Deaths(undisturbed.store, iter([]))
    assert run(undisturbed, calm, said_by(said)).code == 0, said
    deaths = Deaths(disturbed.store, iter(PLANNED))
    outcome = run(disturbed, deaths, said_by(said))
    assert outcome.code == 0, (outcome, said[-20:])
    assert [died.death for died in deaths.died] == PLANNED
    assert [died.point for died in deaths.died] == [getattr(death, "point", None) for death in PLANNED]
    assert not deaths.unasked
    assert deaths.closes == calm.closes
    assert report(disturbed.store) == report(undisturbed.store)
    wanted, found = exported_of(undisturbed, calm.log), exported_of(disturbed, deaths.log)
    assert differing(wanted, found) == []
    assert not list(export_violations(undisturbed, calm.log)) and not list(export_violations(disturbed, deaths.log))
    assert_worth_it(wanted)


def assert_worth_it(exported):
    """That the job has bases, deltas on deltas, deleted rows, and exports that went again."""
    names = [what.split("/")[1] for what in exported if what.startswith("serving t1/") and what.endswith("/_DONE")]
    assert sum(name.endswith("base") for name in names) > 1 and sum(name.endswith("delta") for name in names) > 5
    assert any("tombstones" in what for what in exported)
    cut = sum(what.startswith("thin ") and what.endswith("as it was cut") for what in exported)
    assert cut > sum(what.startswith("thin ") and what.endswith("/_DONE") for what in exported)
