"""`dense.accumulate`: several batches are one step, in a whole job."""

import pytest

from tests.integration.stream_job import headrace, write_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("merged"))


def run(job, store, *settings):
    follows = "tables.default.in_batch=false"  # each of the batches would follow its own events
    ended = headrace(job, "train.threads=1", follows, *settings, store=store)
    assert ended.code == 0, ended.output
    return ended.report


MERGED = ("train.batch_size=8", "dense.accumulate=4")


@pytest.mark.long
@pytest.mark.parametrize("place", ["all_reduce", pytest.param("shards", marks=pytest.mark.slow)])
def test_four_batches_learn_what_a_batch_of_all_their_samples_learns_on_any_number_of_shards(job, place):
    strategy = f"dense.strategy={place}"
    large = run(job, f"large-{place}", "train.batch_size=32", strategy)["metrics"]["life"]["ctr"]
    merged, apart = (
        run(job, f"merged-{place}-{shards}", *MERGED, strategy, f"cluster.shards={shards}") for shards in (0, 2)
    )
    assert merged["digest"] == apart["digest"] and merged["metrics"] == apart["metrics"]
    found = merged["metrics"]["life"]["ctr"]
    assert found["count"] == large["count"]
    assert [found[name] for name in ("auc", "logloss")] == pytest.approx([large["auc"], large["logloss"]], abs=1e-5)
    alone = run(job, f"small-{place}", "train.batch_size=8", strategy)
    assert alone["digest"] != merged["digest"]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [("train.staleness=1",), ("metrics.infer_first=true",), ("dense.strategy=shards", "train.mode=async")],
    ids=["staleness", "infer first", "async"],
)
def test_merged_batches_work_with_every_mode(job, settings):
    name = "-".join(settings).replace(".", "-").replace("=", "-")
    report = run(job, name, *MERGED, *settings, "cluster={trainers=2,shards=2}")
    assert report["metrics"]["life"]["ctr"]["count"] == report["samples"] == report["events"]
