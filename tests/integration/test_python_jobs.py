"""`headrace.Job`: a job in a program, which does what the commands of its names do."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pyarrow.compute as pc
import pytest

from headrace import HeadraceError, Job
from tests.integration.stream_job import write_job

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.long]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job.load(write_job(tmp_path_factory.mktemp("job")), ["train.batch_size=32"])


def test_a_job_is_checked_run_and_its_metrics_are_a_table(job, capfd):
    checked = job.check()
    assert (checked.job, checked.trainers, checked.missing_data) == ("small", 1, None)
    report = job.run()
    assert report.samples == 1179 and report.digest and report == job.report()
    assert "done: " in capfd.readouterr().out
    table = job.metrics()
    assert table.column_names[:7] == ["version", "timeline", "event_time", "day", "events", "samples", "task"]
    assert pc.sum(table["samples"]).as_py() == 1179 and set(table["task"].to_pylist()) == {"ctr"}
    assert 0.3 < table["window_auc"][-1].as_py() < 1 and "pass_logloss" in table.column_names


def test_events_are_predicted_as_files_of_them_are(job):
    if not (job.store / "report.json").exists():
        job.run()
    part = job.store.parent / "part-0.txt"
    lines = part.read_text().splitlines()[:50]
    found = job.predict(lines, columns=["click"])
    assert len(found) == 50 and 0 < found["prediction.ctr"].to_numpy().mean() < 1 and "click" in found.column_names
    (job.store.parent / "some.txt").write_text("\n".join(lines) + "\n")
    of_file = job.predict(files=[job.store.parent / "some.txt"], columns=["click"])
    assert of_file["partition"][0].as_py().endswith("some.txt")
    assert of_file.drop_columns(["partition"]).equals(found)
    with pytest.raises(HeadraceError, match="line break"):
        job.predict(["1 2\n3 4"])
    with pytest.raises(HeadraceError, match="one of the two"):
        job.predict()


def test_a_sweep_compares_values_over_the_same_events(job, tmp_path):
    first, second = job.sweep({"tables.default.dim": [2, 4]}, folder=tmp_path / "sweep", jobs=2)
    assert first.setting.name == "tables.default.dim=2" and second.setting.name == "tables.default.dim=4"
    assert first.metrics["ctr"]["auc"] > 0.4 and second.metrics != first.metrics
    with pytest.raises(HeadraceError, match="Job.load"):
        Job(job.spec, job.store.parent).sweep({"tables.default.dim": [2, 4]})


def test_a_spec_that_is_wrong_names_its_key_and_a_failed_run_its_reason(job, tmp_path):
    with pytest.raises(HeadraceError, match="model.name"):
        Job({**job.spec, "model": {"name": "nothing"}}, job.store.parent)
    with pytest.raises(HeadraceError, match="has not run"):
        Job({**job.spec, "store": {"path": str(tmp_path / "none")}}, job.store.parent).report()


def test_a_run_on_another_thread_is_refused_and_an_older_run_stays(job):
    if not (job.store / "report.json").exists():
        job.run()
    before = job.report()
    with ThreadPoolExecutor(1) as pool, pytest.raises(HeadraceError, match="main thread"):
        pool.submit(job.run, fresh=True).result()
    assert job.report() == before


def test_a_job_runs_in_a_cell_of_a_notebook_whose_loop_goes_on(job):
    async def cell():
        return job.run(fresh=True)

    assert asyncio.run(cell()).samples == 1179
