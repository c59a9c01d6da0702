"""The demo: its two jobs, their display, the start of the twin, and a second demo in the same folder."""

import io
import socket
import subprocess

import pytest
from rich.console import Console

from headrace import extras
from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import SpecError
from headrace.service.auth.spec_rules import check_spec
from headrace.service.history.fork_of_job import fork
from headrace.service.server import demo
from headrace.service.server.demo import (
    FREEZE_AFTER,
    LATE,
    NAME,
    RATE,
    TWIN,
    Standing,
    demo_job,
    late_command,
    late_job,
    race_line,
    render_race,
    service_of,
    twin_of,
)
from headrace.service.spec.job import LoadedJob
from headrace.trainer.checkpoint.commits import CommitDamaged, Commits, problems_of, read_commit
from headrace.trainer.job_status import Status, read
from headrace.trainer.rank0.recovery import Recovery
from tests.fakes.past import Past

SINCE = 1_700_000_000.0


def job(tmp_path, *overrides, events=None) -> LoadedJob:
    return demo_job(tmp_path / "demo", events, overrides, SINCE)


def standing(auc, twin_auc=None) -> Standing:
    def status(auc, events):
        return read(Status, {"state": "training", "events": events, "metrics": {"window": {"ctr": {"auc": auc}}}})

    twin = None if twin_auc is None else status(twin_auc, 12_000)
    return Standing(status(auc, 14_000), twin, "frozen after 5 passes, 10,000 events")


def test_both_jobs_read_the_same_stream_and_only_one_learns(tmp_path):
    learning = job(tmp_path)
    twin = twin_of(learning)
    assert (learning.spec.name, twin.spec.name) == (NAME, TWIN)
    assert (learning.spec.train.learn, twin.spec.train.learn) == (True, False)
    assert learning.spec.sources == twin.spec.sources and learning.spec.seed == twin.spec.seed
    (source,) = learning.spec.sources.values()
    assert (source.rate, source.since, source.events) == (RATE, SINCE, None)
    assert learning.spec.commit.every_passes == FREEZE_AFTER
    assert learning.store == (tmp_path / "demo" / "jobs" / NAME / "store").resolve()
    assert twin.store == (tmp_path / "demo" / "jobs" / TWIN / "store").resolve()


def test_a_demo_of_so_many_events_ends_its_stream_there_and_overrides_stand_before_the_demos_own(tmp_path):
    (source,) = job(tmp_path, "sources.clicks.rate=0", events=50).spec.sources.values()
    assert (source.events, source.rate) == (50, 0)
    with pytest.raises(SpecError, match="batch_sise"):
        job(tmp_path, "train.batch_sise=5")


def test_the_demos_service_allows_its_two_jobs(tmp_path):
    learning = job(tmp_path)
    root = tmp_path / "demo"
    config = service_of(root, "127.0.0.1:0", learning)
    for each in (learning, twin_of(learning)):
        check_spec(each, config.allow, root / "jobs" / each.spec.name, config.private)


def test_the_job_with_late_clicks_reads_what_the_program_of_its_example_writes(tmp_path, monkeypatch):
    root = tmp_path / "demo"
    late, config = late_job(root), service_of(root, "127.0.0.1:0", job(tmp_path))
    check_spec(late, config.allow, root / "jobs" / late.spec.name, config.private)
    monkeypatch.setattr("headrace.service.server.demo.LATE_IMPRESSIONS", 50)
    subprocess.run(late_command(root), check=True, timeout=60)
    for source in late.spec.sources.values():
        assert all((late.folder / path).stat().st_size for path in source.paths)
    assert late.spec.join is not None and late.store == (root / "jobs" / LATE / "store").resolve()
    report = {"samples": 7, "metrics": {"window": {"ctr": {"auc": 0.7}}}, "left_out": {"click after the window": 3}}
    assert list(demo.late_lines(report))[1] == "  window AUC 0.7000; left out: 3 click after the window"


def test_a_line_has_the_two_aucs_side_by_side():
    assert race_line(standing(0.71)) == (
        f"demo training, 14,000 events  window AUC 0.7100  demo-frozen begins after pass {FREEZE_AFTER}"
    )
    assert race_line(standing(0.71, 0.68)).endswith("demo-frozen 0.6800 at 12,000  learning wins +0.0300")


def test_the_picture_tells_what_the_twin_knows_and_by_how_much_learning_wins():
    out = io.StringIO()
    Console(file=out, width=120).print(render_race(standing(0.75, 0.70)))
    for words in ("0.7500", "0.7000", "+0.0500", "frozen after 5 passes, 10,000 events"):
        assert words in out.getvalue()
    Console(file=out, width=120).print(render_race(Standing(Status())))


@pytest.fixture
def past(tmp_path):
    made = Past(tmp_path / "store").begin()
    made.meet("a")
    made.close(5, a=(0, 100))
    made.commit(5)
    yield made
    made.end()


def test_a_fork_begins_at_the_commit_with_all_it_held(past, tmp_path):
    twin = twin_of(job(tmp_path))
    (name,) = Commits(past.store).names()
    made = fork(past.store, name, twin)
    assert problems_of(made) == {} and (made.manifest.job, made.version) == (TWIN, 5)
    assert made.manifest.positions == {"a": 100}
    assert made.state["forked"] == {"job": "news", "commit": name}
    begun = Recovery(twin.store, 1, twin.raw).begin()
    begun.joblog.close()
    assert (begun.timeline, begun.commit.name, list(begun.replay)) == ("t2", name, [])
    assert Commits(past.store).holders() == {}, "the lease is over"
    assert read_commit(Commits(past.store).folder / name).manifest.job == "news", "the other job's is as it was"


def test_a_fork_of_what_is_gone_or_into_what_has_commits_is_refused(past, tmp_path):
    twin = twin_of(job(tmp_path))
    (name,) = Commits(past.store).names()
    (Commits(past.store).folder / name / "dense.safetensors").rename(tmp_path / "dense")
    with pytest.raises(CommitDamaged, match="dense.safetensors is gone"):
        fork(past.store, name, twin)
    assert Commits(twin.store).names() == []
    (tmp_path / "dense").rename(Commits(past.store).folder / name / "dense.safetensors")
    fork(past.store, name, twin)
    with pytest.raises(SpecError, match="for an empty store"):
        fork(past.store, name, twin)


def test_what_an_earlier_demo_left_is_removed_and_nothing_else(tmp_path):
    root = tmp_path / "runs" / "demo"
    (root / "jobs" / "demo").mkdir(parents=True)
    (root / "records.db-wal").touch()
    demo.clear_root(root)
    assert not root.exists()
    root.mkdir()
    (root / "thesis.tex").touch()
    with pytest.raises(SpecError, match="holds files that are not of a demo"):
        demo.clear_root(root)
    assert (root / "thesis.tex").exists()


def test_a_demo_that_still_runs_is_not_removed(tmp_path):
    with locked(tmp_path / "service.lock", Deadline.after(1)), pytest.raises(SpecError, match="another demo runs"):
        demo.clear_root(tmp_path)
    assert tmp_path.exists()


def test_a_port_that_is_taken_is_another_ones():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert demo.free_address(f"127.0.0.1:{port}") == "127.0.0.1:0"
    assert demo.free_address(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"


def test_without_the_page_the_demo_says_so(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    assert demo.page_line("http://127.0.0.1:1").startswith(
        "the live page needs NiceGUI, which is not installed: pip in"
    )
    monkeypatch.setattr(extras, "is_installed", lambda name: True)
    assert demo.page_line("http://127.0.0.1:1") == "open http://127.0.0.1:1/ to watch it live; Ctrl-C ends it"


def test_a_line_says_what_each_job_does():
    assert all(name in demo.jobs_line() for name in (NAME, TWIN, LATE))
