"""Exports followed: base, deltas, a new base; what is stale or broken is refused and the old version goes on."""

import json
import threading
import time

import numpy as np
import pytest

from headrace.blob.blob_store import open_blobs, whole
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import Unavailable
from headrace.retry import Backoff
from headrace.trainer.exports.destination import ExportUnusable
from headrace.trainer.replica import export_updates, update_loop
from headrace.trainer.replica.export_updates import ChainPlan, CurrentExport, ExportUpdates, parsed, plan
from headrace.trainer.replica.replica_metrics import ReplicaMetrics
from headrace.trainer.replica.replica_state import ReplicaState, ServedVersion
from headrace.trainer.replica.serving_model import golden_inputs
from headrace.trainer.replica.update_loop import UpdateLoop
from tests.fakes.served import Job
from tests.s3_server import s3  # noqa: F401

NOW = 0.05
CHAIN = ("t1/1-base", "t1/2-delta", "t1/3-delta")


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "exports")


@pytest.fixture
def updates(job, tmp_path):
    return ExportUpdates(str(job.folder), tmp_path / "scratch", poll_s=0.01)


def next_of(updates):
    return updates.next(Deadline.after(NOW))


def test_what_is_read_of_a_chain():
    current = CurrentExport("t1", 3, CHAIN)
    assert plan(current, None, None) == ChainPlan(whole=True, paths=CHAIN)
    assert plan(current, ServedVersion("j", "t1", 2), "t1/2-delta") == ChainPlan(whole=False, paths=CHAIN[2:])
    assert plan(current, ServedVersion("j", "t1", 1), "t1/1-base") == ChainPlan(whole=False, paths=CHAIN[1:])
    assert plan(current, ServedVersion("j", "t1", 3), "t1/3-delta") is None
    assert plan(current, ServedVersion("j", "t1", 2), "t1/2-base") == ChainPlan(whole=True, paths=CHAIN)
    assert plan(current, ServedVersion("j", "t2", 2), "t1/2-delta") == ChainPlan(whole=True, paths=CHAIN)


@pytest.mark.parametrize("chain", [["../x"], ["/etc"], ["s3://other/x"], []])
def test_a_chain_leads_nowhere_else(chain):
    told = {"format": 1, "timeline": "t1", "version": 1, "chain": chain}
    with pytest.raises(ExportUnusable, match="names what is not of an export|a chain of 0 exports"):
        parsed(json.dumps(told).encode(), "current.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "has lists and objects nested deeper than 100"),
        ("[]", "is not a JSON object"),
        ("{}", "damaged: its 'format' is null"),
        ('{"format": 1, "timeline": "t1", "version": 1e999, "chain": []}', "damaged: its 'version' is Infinity"),
        ('{"format": 1, "timeline": "t1", "version": 1, "chain": null}', "damaged: its 'chain' is null"),
        ('{"format": 2, "links": []}', "format 2; this replica reads 1"),
    ],
    ids=["empty", "deep", "list", "nothing", "infinite", "no chain", "newer"],
)
def test_what_is_wrong_with_what_points_to_an_export_is_said(text, words):
    with pytest.raises(ExportUnusable, match=rf"current\.json .*{words}"):
        parsed(text.encode(), "current.json")


def applied(state, update, job):
    state.apply(update)
    _, found = state.predict(state.model(), golden_inputs(state.model(), job.samples))
    assert np.abs(found["ctr"] - job.predictions()).max() < 1e-5
    return update.whole, update.version


def test_the_base_then_deltas_then_a_new_base(job, updates):
    state = ReplicaState(10, 1 << 30)
    with pytest.raises(Unavailable, match=r"has no current\.json"):
        next_of(updates)
    job.export(1)
    assert applied(state, next_of(updates), job) == (True, 1)
    assert next_of(updates) is None
    job.export(2, forget=4)
    assert applied(state, next_of(updates), job) == (False, 2)
    job.export(3, forget=6)
    job.export(4, forget=6, point=False)
    job.export(6, forget=6)
    assert applied(state, next_of(updates), job) == (False, 6)
    job.export(7, base=True)
    assert applied(state, next_of(updates), job) == (True, 7)
    job.export(5, base=True, timeline="t2")
    assert applied(state, next_of(updates), job) == (True, 5)
    assert state.served.event_time_s == 3600.0 * 5


def test_a_chain_is_read_at_once_by_who_comes_later(job, updates):
    for version in range(1, 5):
        job.export(version, forget=3 if version > 1 else 0)
    assert applied(ReplicaState(10, 1 << 30), next_of(updates), job) == (True, 4)


def test_exports_of_half_precision_and_of_both_in_one_chain_are_read(job, updates):
    state = ReplicaState(10, 1 << 30)
    job.export(1, dtype="float16")
    assert applied(state, next_of(updates), job) == (True, 1)
    job.export(2, dtype="float32", forget=3)
    assert applied(state, next_of(updates), job) == (False, 2)
    updates.resume(None)
    job.export(3, dtype="float16")
    assert applied(state, next_of(updates), job) == (True, 3)


def spoil(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "file", ["rows-default-0.parquet", "dense.safetensors", "dense.onnx", "manifest.json", "_DONE"]
)
def test_a_damaged_export_is_never_given_and_the_next_base_is(job, updates, file):
    job.export(1)
    assert next_of(updates).version == 1
    path = job.export(2)
    if file == "_DONE":
        (path / file).unlink()
    elif file == "manifest.json":
        (path / file).write_text("{")
    else:
        spoil(path / file)
    with pytest.raises(ExportUnusable, match="0000000002-delta"):
        next_of(updates)
    assert next_of(updates) is None  # it is not tried again at once
    job.export(3)
    with pytest.raises(ExportUnusable, match="0000000002-delta"):
        next_of(updates)
    job.export(4, base=True)
    update = next_of(updates)
    assert (update.version, update.whole) == (4, True)


def test_what_was_refused_is_not_built_upon(job, updates):
    job.export(1)
    first = next_of(updates)
    job.export(2)
    assert next_of(updates).version == 2
    updates.resume(ServedVersion(first.job, first.timeline, first.version))
    job.export(3)
    update = next_of(updates)
    assert (update.version, update.whole) == (3, False)
    assert len(update.tables["default"].rows[0].keys_U) > 20  # of both deltas
    updates.resume(None)
    job.export(4)
    assert next_of(updates).whole


def test_a_refused_export_is_tried_again_after_a_while(job, updates, monkeypatch):
    monkeypatch.setattr(export_updates, "AGAIN_S", 0.0)
    path = job.export(1)
    (path / "_DONE").rename(path / "away")
    with pytest.raises(ExportUnusable):
        next_of(updates)
    (path / "away").rename(path / "_DONE")
    assert next_of(updates).version == 1


def test_who_waits_is_let_go(updates):
    threading.Timer(0.05, updates.close).start()
    with pytest.raises(Unavailable, match="closed"):
        updates.next(Deadline.after(30))


@pytest.fixture
def kept(job, updates, monkeypatch):
    """A keeper at work: state, keeper, figures."""
    monkeypatch.setattr(update_loop, "BACKOFF", Backoff((0.01,), endless=True))
    monkeypatch.setattr(update_loop, "TURN_S", 0.05)
    state = ReplicaState(10, 1 << 30)
    figures = ReplicaMetrics(state)
    keeper, stopping = UpdateLoop(updates, state, figures), threading.Event()
    thread = threading.Thread(target=keeper.run, args=(stopping,))
    thread.start()
    yield state, keeper, figures
    stopping.set()
    updates.close()
    thread.join(10)
    assert not thread.is_alive()


def until(condition):
    deadline = Deadline.after(20)
    while not condition():
        deadline.check("waiting")
        time.sleep(0.005)


def value(figures, name, **labels):
    return figures.registry.get_sample_value(f"headrace_replica_{name}", labels)


def test_a_keeper_serves_what_comes_and_goes_on_with_the_old_where_it_is_broken(job, kept, caplog):
    state, keeper, figures = kept
    job.export(1)
    until(lambda: state.served and state.served.version.number == 1)
    job.golden = lambda: b"no samples"
    job.export(2)
    until(lambda: keeper.refused and value(figures, "following") == 0)
    assert state.served.version.number == 1
    assert "version 1 is still served" in caplog.text and keeper.refused in caplog.text
    assert value(figures, "refused_total", reason="broken") == 1
    del job.golden
    job.export(3)
    until(lambda: keeper.refused == "")  # it is cleared a moment after version 3 is served, as the last of its facts
    assert state.served.version.number == 3 and value(figures, "updates_total", kind="difference") == 1
    assert value(figures, "version", job="small", timeline="t1") == 3
    assert value(figures, "freshness_seconds_count") == 2


def test_an_export_that_is_pointed_back_to_is_refused_as_older(job, kept):
    state, keeper, figures = kept
    job.export(1)
    until(lambda: state.served)
    job.export(2)
    until(lambda: state.served.version.number == 2)
    job.point(1, chain=job.chain[:1])
    until(lambda: "not newer than version 2" in keeper.refused)
    assert state.served.version.number == 2 and value(figures, "refused_total", reason="older") == 1


def test_an_export_that_the_job_went_back_to_is_served_and_then_what_follows_it(job, kept):
    state, keeper, _ = kept
    job.export(1)
    until(lambda: state.served)
    first = job.chain[:1]
    job.export(2)
    until(lambda: state.served.version.number == 2)
    job.point(1, chain=first, rollback={"timeline": "t1", "version": 3})
    until(lambda: state.served.version.number == 1)
    assert not keeper.refused
    job.export(4)
    until(lambda: state.served.version.number == 4)


def test_exports_of_another_job_in_the_same_place_are_refused(job, kept, tmp_path):
    state, keeper, _ = kept
    job.export(1)
    until(lambda: state.served)
    other = Job(job.folder, seed=4, name="other")
    other.export(9, timeline="t7")
    until(lambda: "'other'; this replica serves 'small'" in keeper.refused)
    assert state.served.version.number == 1


def test_what_comes_while_an_older_version_was_chosen_waits(job, kept):
    state, _, _ = kept
    for version in (1, 2):
        job.export(version)
        until(lambda version=version: state.served and state.served.version.number == version)
    state.go_to(1)
    job.export(3)
    job.export(4)
    state.go_to_newest()
    until(lambda: state.served.version.number == 4)
    _, found = state.predict(state.model(), golden_inputs(state.model(), job.samples))
    assert np.abs(found["ctr"] - job.predictions()).max() < 1e-5


class Failing:
    """A source with a bug, then one that works."""

    def __init__(self, update):
        self.update, self.resumed = update, []

    def next(self, deadline):
        if not self.resumed:
            raise ZeroDivisionError
        update, self.update = self.update, None
        if update is None:
            time.sleep(deadline.left_s())
        return update

    def resume(self, served):
        self.resumed.append(served)

    def close(self):
        pass


def test_a_bug_in_an_update_is_told_and_does_not_end_it(job, caplog, monkeypatch):
    monkeypatch.setattr(update_loop, "BACKOFF", Backoff((0.01,), endless=True))
    state = ReplicaState(1, 1 << 20)
    source, stopping = Failing(job.update(1, whole=True)), threading.Event()
    thread = threading.Thread(target=UpdateLoop(source, state, ReplicaMetrics(state)).run, args=(stopping,))
    thread.start()
    until(lambda: state.served)
    stopping.set()
    thread.join(10)
    assert "ZeroDivisionError" in caplog.text and source.resumed == [None]


def test_exports_in_an_object_store_are_followed_alike(job, s3, tmp_path):  # noqa: F811
    uri = s3.uri("bucket", "followed")
    blobs = open_blobs(parse(uri), "exports at", Deadline.after(30))
    updates = ExportUpdates(uri, tmp_path / "scratch", poll_s=0.01)
    state = ReplicaState(10, 1 << 30)
    for version, base in ((1, True), (2, False), (3, True)):
        job.export(version, base=base, forget=0 if base else 3)
        for path in sorted(job.folder.rglob("*")):
            if path.is_file():
                blobs.put(str(path.relative_to(job.folder)), whole(path.read_bytes()), Deadline.after(30))
        assert applied(state, next_of(updates), job) == (base, version)
    held = sum(path.stat().st_size for path in (tmp_path / "scratch").rglob("*"))
    assert held < 2 * sum(path.stat().st_size for path in (job.folder / job.chain[-1]).iterdir())
