"""Jobs whose rows learn on the devices of trainers: the CPU here, with the bits of rows on shards, whatever happens."""

from pathlib import Path

import pytest

from headrace.failpoints import Failpoint
from headrace.service.faults.export_comparison import differing, export_violations, exported_of
from headrace.service.spec.job import load_job
from tests.e2e.test_examples import CRITEO, EXAMPLES, NEWS, criteo_data, first_lines, news_data, paths, report_of
from tests.faults.test_joins_killed import write_jobs
from tests.integration.stream_job import LIVING, headrace, write_living_job
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


@pytest.mark.parametrize(
    "more", [(), (LITTLE,), ("tables.default.memory=8MiB",), ("train.batch_size=16", "dense.accumulate=2")]
)
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


def on_trainers(job: Path, store: str, world: int, *settings: str) -> dict:
    """A job of several trainers: on the host with one shard, on devices with a shard in each."""
    shards = world if DEVICE in settings else 1
    cluster = f"cluster={{trainers={world},shards={shards}}}"
    ended = headrace(job, cluster, "train.threads=1", *settings, store=store)
    assert ended.code == 0, ended.output
    found = ended.report
    return {key: found[key] for key in ("digest", "metrics", "samples", "events", "positions")}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_trainers_have_the_bits_of_rows_on_a_shard(world, tmp_path):
    job = write_living_job(tmp_path, num_parts=1, num_lines=NUM_LINES // 2, spec=SPEC)
    host, device, little = (
        on_trainers(job, name, world, *settings)
        for name, settings in {"host": (), "device": (DEVICE,), "little": (DEVICE, LITTLE)}.items()
    )
    assert host == device == little


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_trainers_go_on_from_commits_of_rows_on_a_shard_and_back(tmp_path):
    """Each change of the keys closes a pass without events, in both jobs."""
    job = write_living_job(tmp_path, num_parts=3, num_lines=NUM_LINES // 4, spec=SPEC)
    parts = sorted(tmp_path.glob("part-*.txt"))
    later = [part.rename(part.with_suffix(".later")) for part in parts[1:]]
    ends = {}
    for name, ways in {"first": ((DEVICE,), (), (DEVICE, LITTLE)), "then": ((), (DEVICE,), ())}.items():
        for part in later:
            part.with_suffix(".txt").unlink(missing_ok=True)
        for number, settings in enumerate(ways):
            if number:
                later[number - 1].with_suffix(".txt").write_text(later[number - 1].read_text())
            ends[name] = on_trainers(job, name, 2, *settings)
    assert ends["first"] == ends["then"]


def on_devices_and_not(world: int) -> dict[str, list[str]]:
    """Settings of so many trainers by the place of rows; shards are as many in both, so exports have the same files."""
    shards = world if world > 1 else 0
    workers = [f"cluster={{trainers={world},shards={shards}}}", "train.threads=1", "train.matmul=mkl"]
    return {"host": workers, "device": [*workers, DEVICE]}


WORLDS = pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
EVENTS = 600


@WORLDS
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "source", "data"),
    [
        pytest.param("criteo", "lines", CRITEO, marks=[criteo_data, pytest.mark.slow]),
        pytest.param("news", "impressions", NEWS, marks=news_data),
    ],
)
def test_the_examples_have_the_same_bits_with_any_number_of_trainers(name, source, data, world, tmp_path):
    part = first_lines(data, EVENTS, tmp_path / "part.gz")
    found = [
        report_of(
            EXAMPLES / name / "job.toml", tmp_path / where, paths(source, part), "passes.max_events=200", *settings
        )
        for where, settings in on_devices_and_not(world).items()
    ]
    assert found[0]["events"] == EVENTS
    assert [each["digest"] for each in found] == [found[0]["digest"]] * 2
    assert found[0]["halves"] == found[1]["halves"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_exports_are_the_same_with_any_number_of_trainers(world, tmp_path):
    spec = changed(
        LIVING, {key: None for key in ("tables.default.extend_at", "tables.default.slots.history.extend_at")}
    )
    job, found = write_living_job(tmp_path, num_parts=1, num_lines=240, spec=spec), []
    for where, settings in on_devices_and_not(world).items():
        places = [f"exports.{name}.path={tmp_path / where / name}" for name in ("serving", "thin")]
        given = [*settings, *places, "passes.max_events=60"]
        assert headrace(job, *given, store=where).code == 0
        loaded = load_job(job, [f"store.path={where}", *given])
        assert not [*export_violations(loaded, loaded.store / "log")]
        found.append(exported_of(loaded, loaded.store / "log"))
    assert len(found[0]) > 20 and not differing(*found)


@WORLDS
def test_late_labels_have_the_same_bits_with_any_number_of_trainers(world, tmp_path):
    write_jobs(tmp_path)
    reports = [
        headrace(tmp_path / "job.toml", *settings, store=where).report
        for where, settings in on_devices_and_not(world).items()
    ]
    ends = [{key: each[key] for key in ("digest", "metrics", "samples", "events")} for each in reports]
    assert ends[0] == ends[1] and ends[0]["samples"] > 200
