"""An output in an object store: the bytes of a folder, complete at once or not at all, whatever is killed."""

import re
import threading
from contextlib import ExitStack

import pytest

from headrace.blob.blob_store import whole
from headrace.blob.bucket import open_bucket
from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.errors import SpecError
from headrace.service.predict.prediction import PlannedPrediction, claim_output, fix_plan
from headrace.service.predict.versions import PredictionVersion
from headrace.trainer.predict.output_files import PredictionOutput
from headrace.trainer.predict.output_place import BucketPlace
from headrace.trainer.predict.prediction_plan import OutputTaken, PredictionPlan, fingerprint_of
from headrace.trainer.predict.worker import run
from tests.contract.predict_world import ARROW, content, make_world
from tests.object_servers import azure, gcs  # noqa: F401  # fixtures
from tests.s3_server import proxy, s3  # noqa: F401  # fixtures

pytestmark = pytest.mark.timeout(120)

CALLS = ("put", "put_new", "take", "remove_work")
"""Calls of a place that change it."""


class Killed(BaseException):
    """In place of a death."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(
        tmp_path_factory.mktemp("world"), ARROW.replace("[pipe]", "[pipe]\nmax_bad_fraction = 0.2"), num_lines=60
    )


@pytest.fixture(scope="module")
def in_folder(world):
    output = world.job.folder / "alone"
    world.predict(output)
    return content(output)


@pytest.fixture(params=["s3", "gcs", "azure"])
def store(request):
    return request.getfixturevalue(request.param)


def opened(store, prefix):
    return open_bucket(parse(store.uri("bucket", prefix)), "test", Deadline.after(30))


def blobs(store, prefix):
    """Every object below a prefix of the bucket, by name."""
    found, soon = opened(store, prefix), Deadline.after(30)
    return {name: found.get(name, 1 << 30, soon) for name in found.below("", soon)}


def predict(world, output, **asked):
    """As service.predict does, with the worker in this process."""
    request = world.request(output, **asked)
    place, fingerprint = world.output(request), fingerprint_of(request, world.job.spec)
    with ExitStack() as held:
        if (done := claim_output(place, fingerprint, held)) is not None:
            return done
        version = PredictionVersion(world.commit, {"commit": "it"})
        plan = PredictionPlan.read(place.place) or fix_plan(request, world.job, fingerprint, version, place)
        run(world.worker(request, 0, ()))
        return PlannedPrediction(world.job, request, place, plan, lambda *_: None, lambda: None).complete()


def test_an_object_store_gets_the_files_of_a_folder(world, in_folder, store):
    world.predict(store.uri("bucket", "out"))
    assert blobs(store, "out") == in_folder
    assert any(name.startswith("_dead_letters/") for name in in_folder)
    assert PredictionOutput(store.uri("bucket", "out")).metrics()["tasks"]["ctr"]["count"] > 50


def test_shards_and_trainers_make_the_same_objects(world, in_folder, s3):  # noqa: F811
    world.predict(s3.uri("bucket", "out-2"), trainers=2, shards=2)
    assert blobs(s3, "out-2") == in_folder


def test_the_worth_of_slots_fetches_each_part_once(world, s3, monkeypatch):  # noqa: F811
    fetched, local = [], BucketPlace.local
    monkeypatch.setattr(BucketPlace, "local", lambda place, name: fetched.append(name) or local(place, name))
    predict(world, s3.uri("bucket", "worth"), worth=True)
    observed = [name for name in fetched if "observed" in name]
    assert observed and len(observed) == len({*observed})
    assert len(PredictionOutput(s3.uri("bucket", "worth")).metrics()["worth"]) > 1


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_it_is_complete_once_and_has_each_part_once(
    world,
    s3,  # noqa: F811
    monkeypatch,
    after,
):
    prefix, killed_at, left = f"killed-{after}", [], 0
    world.predict(world.job.folder / f"whole-{after}", segment_events=100)
    whole = content(world.job.folder / f"whole-{after}")

    def dying(act):
        def call(self, *args):
            nonlocal left
            left -= 1
            found = act(self, *args) if after or left else None
            if left == 0:
                killed_at.append(str(args[-1] if act.__name__ == "take" else [*args, "work"][0]))
                raise Killed
            return found

        return call

    for name in CALLS:
        monkeypatch.setattr(BucketPlace, name, dying(getattr(BucketPlace, name)))
    cue, parts_made = 0, False
    while True:
        cue += 1
        if not parts_made and sum("/mark-" in name for name in blobs(s3, prefix)) == 3:
            parts_made, cue = True, 1
        left = cue
        try:
            predict(world, s3.uri("bucket", prefix), segment_events=100)
            break
        except Killed:
            found = blobs(s3, prefix)
            assert ("_DONE" in found) <= ("_SUCCESS" in found) <= ("_manifest.json" in found)
            if "_SUCCESS" in found:
                assert {**found, "_DONE": b""}.items() >= whole.items(), "all of it was there before"
    assert blobs(s3, prefix) == whole
    kinds = {re.sub(r"-\d+", "", name.rpartition("/")[2]) for name in killed_at}
    assert kinds >= {"plan.json", "part.parquet", "mark.json", "_metrics.json", "_manifest.json", "_SUCCESS", "_DONE"}


def test_another_prediction_is_refused_and_a_rerun_does_nothing(world, in_folder, store):
    manifest = predict(world, store.uri("bucket", "twice"))
    before = blobs(store, "twice")
    assert predict(world, store.uri("bucket", "twice")) == manifest and blobs(store, "twice") == before
    with pytest.raises(OutputTaken, match="holds another prediction; choose another place, or remove it"):
        predict(world, store.uri("bucket", "twice"), batch_size=16)
    opened(store, "mine").put("file", whole(b"mine"), Deadline.after(30))
    with pytest.raises(SpecError, match="output: .*is not empty and holds no prediction"):
        predict(world, store.uri("bucket", "mine"))
    assert blobs(store, "mine") == {"file": b"mine"}


def test_two_runs_of_one_request_at_once_make_one_output(world, in_folder, s3):  # noqa: F811
    request = world.request(s3.uri("bucket", "both"))
    fingerprint, found = fingerprint_of(request, world.job.spec), []
    output, version = world.output(request), PredictionVersion(world.commit, {"commit": "it"})
    with ExitStack() as held:
        assert claim_output(output, fingerprint, held) is None
        assert claim_output(output, fingerprint, held) is None, "nothing is locked"
        threads = [
            threading.Thread(target=lambda: found.append(fix_plan(request, world.job, fingerprint, version, output)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] == found[1]
        newer = PredictionVersion(world.commit, {"commit": "newer"})
        with pytest.raises(OutputTaken, match="another prediction into .* has begun meanwhile"):
            fix_plan(request, world.job, fingerprint, newer, output)
        run(world.worker(request, 0, ()))
        run(world.worker(request, 0, ()))
        first, second = (world.complete(request, plan) for plan in found)
    assert first == second and blobs(s3, "both") == in_folder


@pytest.mark.parametrize("before", ["marks", "observed"])
def test_a_run_whose_work_is_removed_by_a_quicker_one_has_its_manifest(
    world,
    in_folder,
    s3,  # noqa: F811
    monkeypatch,
    before,
):
    request = world.request(s3.uri("bucket", f"slow-{before}"))
    plan, act = world.plan(request), getattr(PredictionOutput, before)
    run(world.worker(request, 0, ()))

    def slow(self, *args):
        monkeypatch.setattr(PredictionOutput, before, act)
        world.complete(request, plan)
        return act(self, *args)

    monkeypatch.setattr(PredictionOutput, before, slow)
    assert world.complete(request, plan) == PredictionOutput(request.output).manifest()
    assert blobs(s3, f"slow-{before}") == in_folder


def test_events_are_read_from_an_object_store(world, in_folder, store):
    for number in range(3):
        content = (world.job.folder / f"part-{number}.txt").read_bytes()
        opened(store, "events").put(f"part-{number}.txt", whole(content), Deadline.after(30))
    asked = {"paths": ["part-*.txt"], "root": store.uri("bucket", "events")}
    world.predict(store.uri("bucket", "from-there"), input=asked)
    found = blobs(store, "from-there")
    assert {n: b for n, b in found.items() if n != "_manifest.json"}.items() <= in_folder.items()


def test_a_store_that_fails_for_a_moment_is_asked_again(world, in_folder, s3, proxy):  # noqa: F811
    proxy.refuse(3)
    world.predict(s3.uri("bucket", "refused", proxy.port))
    assert blobs(s3, "refused") == in_folder
