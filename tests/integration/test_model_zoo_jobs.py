"""Models of sequences and of retrieval in whole jobs: the pipe emits the sequence, an export serves it."""

import json

import numpy as np
import pytest

from headrace.failpoints import Failpoint
from headrace.trainer.exports.onnx_model import OnnxModel
from tests.integration.stream_job import headrace
from tests.integration.trainer_here import closes, killed, run

SPEC = """
name = "zoo"
seed = 3

[sources.lines]
kind = "files"
paths = ["part-*.txt"]

[pipe]
command = ["cat"]

[[slots]]
name = "user"

[[slots]]
name = "article"
share = "articles"

[[slots]]
name = "recent"
share = "articles"
pooling = "none"
max_len = 8
keep = "tail"

[[slots]]
name = "click"
kind = "meta"

[[tasks]]
name = "ctr"
label = "click"

[tables.default]
dim = 8
init_range = 0.3
optimizer = { kind = "adagrad", lr = 0.1 }

[model]
MODEL

[train]
batch_size = 64

[dense]
optimizer = { kind = "adam", lr = 0.01 }

[passes]
max_events = 2000

[exports.serving]
on_late = "wait"

[store]
path = "store"
"""
DIN = 'name = "din"\nsettings = { target = "article", sequence = "recent" }'
DEEPFM = 'name = "deepfm"'
TOWERS = (
    'name = "two_tower"\nsettings = { item = "article", hidden = [16], frequency_buckets = 256, recall_at = [1, 10] }'
)


def write_stream(folder, model, num_lines=24_000):
    """A click: the article is among the last ten of the user. Histories of any length, none included."""
    rng = np.random.default_rng(4)
    with (folder / "part-0.txt").open("w") as text:
        for _ in range(num_lines):
            recent = rng.integers(60, size=rng.integers(0, 11))
            article = rng.choice(recent) if len(recent) and rng.random() < 0.5 else rng.integers(60)
            signs = " ".join(map(str, [len(recent), *recent]))
            text.write(f"1 {rng.integers(40)} 1 {article} {signs} 1 {int(article in recent[-8:])}\n")
    job = folder / "job.toml"
    job.write_text(SPEC.replace("MODEL", model))
    return job


@pytest.mark.long
def test_din_learns_in_a_job_what_deepfm_cannot_and_its_export_is_served(tmp_path):
    job = write_stream(tmp_path, DIN)
    ended = headrace(job, "train.threads=1")
    assert ended.code == 0, ended.output
    (manifest,) = (tmp_path / "store").glob("exports/**/manifest.json")
    told = json.loads(manifest.read_text())
    assert told["onnx"]["ok"] and told["golden"]["max_difference"] < 1e-5, told
    assert ended.report["tensors"]["life"]["loss"]["mean"] > 0
    plain = run(write_stream(tmp_path, DEEPFM), tmp_path / "plain", "exports={}", "train.threads=1")
    assert ended.report["halves"]["last"]["ctr"]["auc"] > 0.95
    assert plain.metrics["pass"]["ctr"]["auc"] < 0.9


@pytest.mark.long
def test_the_counters_of_two_towers_come_back_after_a_kill(tmp_path):
    job, calm, store = write_stream(tmp_path, TOWERS, 4000), tmp_path / "calm", tmp_path / "killed"
    settings = ("passes.max_events=500", "exports={}", "model.settings.popularity=100")
    wanted = run(job, calm, *settings)
    store.mkdir()
    killed(job, store, *settings, generation=1, point=Failpoint.CLOSED, hit=5)
    ended = run(job, store, *settings, generation=2)
    assert ended.digest == wanted.digest and closes(store) == closes(calm)
    tensors = ended.metrics["tensors"]["life"]
    assert {"recall_at_1", "recall_at_10", "loss"} <= set(tensors) and "item_vector" not in tensors
    assert 0 < tensors["recall_at_1"]["mean"] < tensors["recall_at_10"]["mean"] < 1


SKIP_GRAM = 'name = "skip_gram"\nsettings = { context = "article", frequency_buckets = 256 }'


@pytest.mark.long
def test_skip_gram_draws_the_same_negatives_again_after_a_kill(tmp_path):
    job, calm, store = write_stream(tmp_path, SKIP_GRAM, 4000), tmp_path / "calm", tmp_path / "killed"
    settings = ("passes.max_events=500", "exports={}", "tables.default.first_order=false")
    wanted = run(job, calm, *settings)
    store.mkdir()
    killed(job, store, *settings, generation=1, point=Failpoint.CLOSED, hit=5)
    ended = run(job, store, *settings, generation=2)
    assert ended.digest == wanted.digest and closes(store) == closes(calm)
    tensors = ended.metrics["tensors"]["life"]
    assert set(tensors) == {"better_than_negatives", "loss"} and 0 < tensors["better_than_negatives"]["mean"] < 1
    other = run(job, tmp_path / "other", *settings, "seed=4")
    assert other.metrics["tensors"] != wanted.metrics["tensors"]


NEXT = 'name = "next_item"\nsettings = { classes = 60, hidden = [16], mode = "divided", recall_at = [1, 10], top = 3 }'


def write_next(folder, num_lines=4000):
    """The next article is the newest one plus 1, mostly; one event of a hundred has an unknown article."""
    rng = np.random.default_rng(4)
    with (folder / "part-0.txt").open("w") as text:
        for line in range(num_lines):
            newest = rng.integers(60)
            following = 77 if line % 100 == 0 else (newest + 1) % 60 if rng.random() < 0.8 else rng.integers(60)
            text.write(f"1 {rng.integers(40)} 1 {newest} 1 {newest} 1 {following}\n")
    job = folder / "job.toml"
    spec = SPEC.replace("MODEL", NEXT).replace('loss = "bce"', "").replace('"click"\n', '"click"\nLOSS\n')
    spec = spec.replace('name = "click"\nLOSS\nkind = "meta"', 'name = "click"\nkind = "meta"\ntype = "uint64"')
    job.write_text(
        spec.replace("LOSS", 'loss = "softmax"').replace('kind = "adam", lr = 0.01', 'kind = "adagrad", lr = 0.1')
    )
    return job


SECOND = (
    "tasks=[{name='ctr',label='click',loss='softmax',weight=0.5},{name='number',label='click',loss='mse',weight=1e-3}]"
)


@pytest.mark.long
def test_divided_items_come_back_after_a_kill_and_their_export_tells_the_best_ones(tmp_path):
    job, calm, store = write_next(tmp_path), tmp_path / "calm", tmp_path / "killed"
    settings = ("passes.max_events=500", "pipe.max_bad_fraction=0.05", SECOND)
    wanted = run(job, calm, *settings)
    store.mkdir()
    killed(job, store, *settings, generation=1, point=Failpoint.CLOSED, hit=5)
    ended = run(job, store, *settings, generation=2)
    assert ended.digest == wanted.digest and closes(store) == closes(calm)
    assert sum(close["rejected"].get("class out of range", 0) for close in closes(store).values()) == 40
    assert 0.5 < ended.metrics["tensors"]["pass"]["recall_at_1"]["mean"] < 0.85
    (manifest,) = calm.glob("exports/**/manifest.json")
    graph = OnnxModel((manifest.parent / "dense.onnx").read_bytes())
    assert json.loads(manifest.read_text())["onnx"]["ok"] and graph.outputs == ("ctr", "number", "items", "scores")


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "most"),
    [((), 1e-5), (("dense.accumulate=3",), 1e-6), (("train.amp=bfloat16",), 1e-2), ((SECOND,), 1e-5)],
    ids=["plain", "accumulate", "amp", "tasks"],
)
def test_items_divided_over_trainers_learn_what_the_whole_softmax_learns(tmp_path, settings, most):
    """With amp the gradients of the perceptron are rounded to numbers of 16 bits, sometimes to the neighbours of those
    that the whole softmax has: tests/contract/test_divided_softmax.py compares a step."""
    job, reports = write_next(tmp_path, num_lines=2000), {}
    for mode in ("full", "divided"):
        ran = headrace(
            job,
            "cluster={trainers=3,shards=2}",
            "passes.max_events=500",
            "pipe.max_bad_fraction=0.05",
            "train.threads=1",
            "train.batch_size=16",
            f'model.settings.mode="{mode}"',
            *settings,
            store=mode,
        )
        assert ran.code == 0, ran.output
        reports[mode] = ran.report
    full, divided = reports["full"], reports["divided"]
    assert divided["samples"] == full["samples"] and divided["passes"] == full["passes"]
    losses = [report["halves"]["last"]["ctr"]["logloss"] for report in (full, divided)]
    assert losses[0] == pytest.approx(losses[1], rel=most)
    if settings == (SECOND,):
        errors = [report["halves"]["last"]["number"]["rmse"] for report in (full, divided)]
        assert errors[0] == pytest.approx(errors[1], rel=most)
    for at in ("recall_at_1", "recall_at_10"):
        recalled = [report["tensors"]["life"][at]["mean"] for report in (full, divided)]
        assert recalled[0] == pytest.approx(recalled[1], rel=max(most, 1e-3)), at
