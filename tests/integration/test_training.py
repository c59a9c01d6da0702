"""One log gives one model, wherever the rows are and however often it runs; every event counts once."""

import shutil

import pytest

from tests.integration.stream_job import headrace, write_job

NUM_LINES = 400 + 393 + 386


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("small"))


def run(job, trainers, shards, store, *settings):
    ended = headrace(job, f"cluster.trainers={trainers}", f"cluster.shards={shards}", *settings, store=store)
    assert ended.code == 0, ended.output
    assert ended.report["events"] == ended.report["samples"] == NUM_LINES
    assert ended.report["rejected"] == {}
    return ended.report


@pytest.fixture(scope="module")
def embedded(job):
    return run(job, 1, 0, "embedded")


@pytest.mark.long
@pytest.mark.parametrize("shards", [0, 2, *(pytest.param(shards, marks=pytest.mark.slow) for shards in (1, 3))])
def test_one_trainer_ends_with_the_same_bits_wherever_its_rows_are(job, embedded, shards):
    again = run(job, 1, shards, f"one-{shards}")
    assert again["digest"] == embedded["digest"]
    assert again["metrics"] == embedded["metrics"]
    assert again["halves"] == embedded["halves"]


@pytest.mark.slow
def test_three_trainers_end_with_the_same_bits_on_any_number_of_shards(job):
    one, two = run(job, 3, 1, "three-1"), run(job, 3, 3, "three-3")
    assert one["digest"] == two["digest"]
    assert one["metrics"] == two["metrics"]


SLICED = 'dense.strategy="shards"'


@pytest.mark.long
def test_dense_parameters_on_shards_learn_what_trainers_learn_and_the_same_bits_on_any_number_of_shards(job, embedded):
    one, two = run(job, 1, 0, "sliced", SLICED), run(job, 1, 2, "sliced-2", SLICED)
    assert one["digest"] == two["digest"] and one["metrics"] == two["metrics"]
    auc = one["metrics"]["life"]["ctr"]["auc"]
    assert auc == pytest.approx(embedded["metrics"]["life"]["ctr"]["auc"], abs=1e-4)


@pytest.mark.long
def test_trainers_with_the_dense_parameters_on_shards_end_with_the_same_bits_on_any_number_of_shards(job):
    one, two = run(job, 3, 1, "sliced-three-1", SLICED), run(job, 3, 2, "sliced-three-2", SLICED)
    assert one["digest"] == two["digest"] and one["metrics"] == two["metrics"]


@pytest.mark.slow
def test_no_bit_depends_on_how_slices_and_rows_travel(job):
    wanted = run(job, 2, 2, "in-one-message", SLICED)
    ways = (
        ("dense.slice_floats=1000",),
        ("dense.slice_floats=1000", 'dense.priority="fifo"'),
        ("train.early_rows=true",),
    )
    for number, settings in enumerate(ways):
        found = run(job, 2, 2, f"otherwise-{number}", SLICED, *settings)
        assert found["digest"] == wanted["digest"] and found["metrics"] == wanted["metrics"]


@pytest.mark.long
def test_a_job_changes_the_place_of_its_dense_parameters_and_goes_on(job, tmp_path):
    moving = write_job(tmp_path, num_parts=1)
    seen = []
    for number, place in enumerate(('dense.strategy="all_reduce"', SLICED, 'dense.strategy="all_reduce"')):
        shutil.copy(job.parent / f"part-{number}.txt", tmp_path)
        ended = headrace(moving, place, "cluster.shards=2")
        assert ended.code == 0, ended.output
        seen.append(ended.report["metrics"]["life"]["ctr"])
    counts = [each["count"] for each in seen]
    assert counts == sorted(set(counts)) and seen[2]["auc"] > seen[0]["auc"]


ASYNC = ('train.mode="async"', SLICED)


@pytest.mark.long
@pytest.mark.parametrize("shards", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_one_trainer_that_waits_for_nobody_has_the_bits_of_sync(job, shards):
    wanted, found = run(job, 1, 0, f"sync-{shards}", SLICED), run(job, 1, shards, f"async-{shards}", *ASYNC)
    assert found["digest"] == wanted["digest"] and found["metrics"] == wanted["metrics"]


@pytest.mark.long
def test_trainers_that_do_not_wait_for_each_other_learn_as_well(job, embedded):
    found = run(job, 2, 2, "async-two", *ASYNC)
    assert found["metrics"]["life"]["ctr"]["count"] == NUM_LINES and found["passes"] == embedded["passes"]
    assert found["metrics"]["life"]["ctr"]["auc"] == pytest.approx(embedded["metrics"]["life"]["ctr"]["auc"], abs=0.05)


SGD = ('dense.optimizer={kind="sgd"}', 'tables.default.optimizer={kind="sgd"}', SLICED)


@pytest.mark.long
@pytest.mark.parametrize(("shards", "staleness"), [pytest.param(0, 0, marks=pytest.mark.slow), (2, 0), (2, 1)])
def test_one_trainer_with_a_copy_for_each_batch_has_the_bits_of_sync(job, shards, staleness):
    wanted = run(job, 1, 0, f"sgd-{shards}-{staleness}", *SGD)
    copies = ('train.mode="geo"', "train.k_steps=1", f"train.staleness={staleness}")
    found = run(job, 1, shards, f"geo-{shards}-{staleness}", *SGD, *copies)
    assert found["digest"] == wanted["digest"] and found["metrics"] == wanted["metrics"]


@pytest.mark.long
def test_trainers_with_copies_for_several_batches_learn_from_every_event(job):
    found = run(job, 2, 2, "geo-two", *SGD, 'train.mode="geo"', "train.k_steps=3", "train.staleness=1")
    life = found["metrics"]["life"]["ctr"]
    assert life["count"] == NUM_LINES and life["auc"] > 0.5


@pytest.mark.long
def test_bytes_of_copies_fall_with_the_number_of_batches_between_exchanges(tmp_path):
    """One pass of 32 batches. Nearly all bytes are of dense parameters: a row of one batch is sent whatever k is."""
    job = write_job(tmp_path, num_parts=1, num_lines=2048)
    wide = ("model.settings={hidden=[256, 256]}", "passes.max_events=2048", "train.batch_size=64")
    sent = {}
    for k_steps in (1, 2, 4):
        mode = ('train.mode="geo"', f"train.k_steps={k_steps}", "cluster.shards=2")
        links = headrace(job, *SGD, *wide, *mode, store=f"geo-{k_steps}").report["links"]["trainer-0"].values()
        sent[k_steps] = sum(link[f"shared_{way}_bytes"] for link in links for way in ("sent", "received"))
    for k_steps in (2, 4):
        assert sent[k_steps] * k_steps == pytest.approx(sent[1], rel=0.1)


STALE = "train.staleness=2"


@pytest.fixture(scope="module")
def stale(job):
    return run(job, 1, 0, "stale", STALE)


@pytest.mark.long
def test_rows_that_lag_behind_give_another_model(embedded, stale):
    assert stale["digest"] != embedded["digest"]
    assert stale["metrics"]["life"]["ctr"]["auc"] == pytest.approx(embedded["metrics"]["life"]["ctr"]["auc"], abs=0.05)


@pytest.mark.long
@pytest.mark.parametrize("shards", [0, 2, *(pytest.param(shards, marks=pytest.mark.slow) for shards in (1, 3))])
def test_rows_that_lag_behind_give_the_same_bits_wherever_they_are(job, stale, shards):
    again = run(job, 1, shards, f"stale-{shards}", STALE)
    assert again["digest"] == stale["digest"]
    assert again["metrics"] == stale["metrics"]


@pytest.mark.long
def test_a_staleness_longer_than_every_pass_is_as_good_as_any_other(job):
    """The first pass ends before the pull of any step waits for a push."""
    one, two = (
        run(job, 1, shards, f"longer-{shards}", "train.staleness=8", "train.batch_size=128") for shards in (0, 2)
    )
    assert one["digest"] == two["digest"]


@pytest.mark.slow
def test_three_trainers_end_with_the_same_bits_on_any_number_of_shards_though_rows_lag_behind(job):
    one, two = run(job, 3, 1, "stale-three-1", STALE), run(job, 3, 3, "stale-three-3", STALE)
    assert one["digest"] == two["digest"]
    assert one["metrics"] == two["metrics"]


def test_the_report_has_what_was_learnt(embedded):
    life = embedded["metrics"]["life"]["ctr"]
    assert life["count"] == NUM_LINES and 0.55 < life["auc"] < 1
    assert embedded["passes"] == 3
    assert set(embedded["halves"]) == {"first", "last"}
    assert embedded["halves"]["last"]["ctr"]["auc"] > embedded["halves"]["first"]["ctr"]["auc"]


@pytest.mark.slow
def test_a_frozen_twin_does_not_learn(job):
    twin = headrace(job, "train.learn_until=400", store="frozen")
    assert twin.code == 0, twin.output
    assert twin.report["samples"] == NUM_LINES
    short = headrace(job, "train.learn_until=0", store="never")
    assert short.report["metrics"]["life"]["ctr"]["auc"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.long
def test_a_run_that_ended_is_resumed_and_finds_nothing_left_to_do(job, embedded):
    again = headrace(job, store="embedded")
    assert again.code == 0, again.output
    same = ("digest", "events", "samples", "passes", "positions", "metrics", "halves")
    assert {name: again.report[name] for name in same} == {name: embedded[name] for name in same}
    anew = headrace(job, store="embedded", options=["--fresh"])
    assert anew.code == 0 and anew.report["digest"] == embedded["digest"]
