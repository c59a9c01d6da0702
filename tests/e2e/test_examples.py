"""The examples that ship, and the spec of the documentation: each loads, runs, and learns what its README says."""

import gzip
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace.service.server.demo import clear_root

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
DATA = Path(os.environ.get("HEADRACE_DATA", ROOT.parent / "shared" / "data"))
NEWS, CRITEO = DATA / "ebnerd" / "impressions.jsonl.gz", DATA / "criteo" / "criteo_80k.txt.gz"
IMPRESSION = {
    **{"ts": 1684393203, "impression": 7, "user_id": 3, "context_article": 5, "last_click": 4, "device_type": 1},
    **{"is_sso": 0, "is_subscriber": 1, "gender": 2, "postcode": 6, "age": 8, "hour_of_day": 9, "day_of_week": 4},
    **{"n_inview": 2, "shown": [10, 11, 12], "clicked": [11]},
}
LINE = "\t".join(["1", "1", "", "0", "-3", *["100"] * 9, "ff", "", *["0000000a"] * 24])

news_data = pytest.mark.skipif(not NEWS.exists(), reason=f"needs {NEWS}; name its folder in HEADRACE_DATA")
criteo_data = pytest.mark.skipif(not CRITEO.exists(), reason=f"needs {CRITEO}; name its folder in HEADRACE_DATA")


def headrace(*words, cwd=None, limit_s=100):
    """The command line, which must end well; returns what it printed."""
    command = [sys.executable, "-m", "headrace.service", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=cwd, env=env, check=False)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def report_of(spec, store, *overrides, limit_s=100):
    """The report of a run of `spec`, its store at `store`."""
    words = [word for override in overrides for word in ("--set", override)]
    headrace("run", spec, "--set", f"store.path={json.dumps(str(store))}", *words, limit_s=limit_s)
    return json.loads((store / "report.json").read_text())


def paths(source, path):
    """An override that points `source` at a file elsewhere."""
    return f"sources.{source}.paths={json.dumps([str(path)])}"


def first_lines(path, count, to):
    """A gzip file of the first `count` lines of another."""
    with gzip.open(path, "rb") as whole, gzip.open(to, "wb", compresslevel=1) as part:
        part.writelines(islice(whole, count))
    return to


def generator(example, name="generator"):
    """The module of an example's generator, or another one of its modules."""
    path = EXAMPLES / example / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{example}_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SPECS = [
    *(f"news/{name}.toml" for name in ("job", "plain", "histories", "counters", "columns", "towers", "next")),
    "criteo/job.toml",
    "clicks/job.toml",
    *(f"clicks_later/{name}.toml" for name in ("job", "labelled")),
    "words/job.toml",
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_spec_of_every_example_is_right(spec):
    assert "is valid" in headrace("spec", "check", EXAMPLES / spec)


def test_every_example_has_a_readme_of_a_screen():
    for example in ("news", "criteo", "clicks", "clicks_later", "words"):
        lines = (EXAMPLES / example / "README.md").read_text().splitlines()
        assert 10 < len(lines) <= 60, f"{example}: {len(lines)} lines"


def columns(made, *events):
    """What a generator gives for events, as lists."""
    return {
        name: np.asarray(column).tolist() for name, column in made.generate_columns(events).items() if name[0] != "C"
    }


@pytest.fixture
def news(monkeypatch):
    """The generator of the news example, as the spec of this name starts it."""

    def made(spec="job.toml"):
        monkeypatch.setenv("HEADRACE_SPEC", str(EXAMPLES / "news" / spec))
        return generator("news").Impressions()

    return made


def test_an_impression_gives_a_sample_for_each_article_shown(news):
    event = json.dumps(IMPRESSION).encode()
    found = columns(news(), event, event)
    assert found["event"] == [0, 0, 0, 1, 1, 1] and found["article"] == [10, 11, 12, 10, 11, 12]
    assert found["click"][:3] == [False, True, False]
    assert found["impression"] == [7.0] * 6 and found["length"] == [0.3] * 6
    assert found["article_page"][1] == (5 << 20) + 11


def test_a_plain_impression_has_no_crossed_fields(news):
    found = columns(news("plain.toml"), json.dumps(IMPRESSION).encode())
    assert not [name for name in found if name.startswith("article_")]


def test_an_impression_without_a_field_is_an_error_that_names_it(news):
    event = {name: value for name, value in IMPRESSION.items() if name != "last_click"}
    with pytest.raises(KeyError, match="last_click"):
        columns(news(), json.dumps(event).encode())


@pytest.mark.parametrize("wrong", [-1, 1.5, "7", None, 1 << 64])
def test_a_field_that_is_no_sign_is_an_error(news, wrong):
    with pytest.raises(ValueError, match="is not a sign|not all are signs"):
        columns(news(), json.dumps(IMPRESSION | {"postcode": wrong}).encode())


def test_each_word_of_a_sentence_is_paired_with_those_two_places_away():
    found = columns(generator("words").Pairs(), b"5 6 7 8", b"", b"9 5")
    pairs = set(zip(found["event"], found["word"], found["near"], strict=True))
    near = {(6, 7), (6, 8), (7, 8), (7, 9), (8, 9)}  # signs are one more than words
    assert pairs == {(0, *each) for each in near | {(b, a) for a, b in near}} | {(2, 10, 6), (2, 6, 10)}
    assert len(found["event"]) == 12 and found["event"] == sorted(found["event"])


def test_missing_integers_are_zero_and_have_a_sign_of_their_own():
    found = columns(generator("criteo").Clicks(), LINE.encode())
    assert found["integers"][0][:5] == pytest.approx([math.log(2), 0.0, 0.0, 0.0, math.log(101)])
    assert found["I2"] == [0]
    assert all(found[f"I{number}"][0] > 0 for number in range(1, 14) if number != 2)
    assert found["click"] == [1.0]


def test_missing_categories_are_empty_slots():
    found = generator("criteo").Clicks().generate_columns([LINE.encode()])
    assert [found["C1"], found["C2"], found["C26"]] == [([255], [True]), ([], [False]), ([10], [True])]


def test_a_line_of_another_number_of_fields_is_an_error_that_counts_them():
    with pytest.raises(ValueError, match="39 fields instead of 40"):
        generator("criteo").Clicks().generate_columns([LINE.rpartition("\t")[0].encode()])


@pytest.mark.long
def test_the_demo_ends_by_itself_and_learning_wins(tmp_path):
    printed = headrace("demo", "--events", 16_000, "--set", "sources.clicks.rate=0", cwd=tmp_path)
    jobs = tmp_path / "runs" / "demo" / "jobs"
    report, twin = (json.loads((jobs / name / "store" / "report.json").read_text()) for name in ("demo", "demo-frozen"))
    assert (report["events"], report["samples"], report["rejected"]) == (16_000, 80_000, {})
    assert report["halves"]["last"]["ctr"]["auc"] > report["halves"]["first"]["ctr"]["auc"]
    assert (twin["events"], twin["samples"]) == (16_000, 80_000), "the twin counts on from where it was frozen"
    assert report["metrics"]["life"]["ctr"]["auc"] > twin["metrics"]["life"]["ctr"]["auc"] > 0.6
    late = json.loads((jobs / "demo-late" / "store" / "report.json").read_text())
    assert 9_000 < late["samples"] <= 10_000 < late["events"] and late["metrics"]["window"]["ctr"]["auc"] > 0.5
    assert "impressions joined with clicks that came minutes later" in printed
    assert "click without an impression" in printed, "a click that came after its impression's window"
    assert "demo-frozen 0.6" in printed and "(frozen after 5 passes, 10,000 events)" in printed


@pytest.mark.long
def test_ctrl_c_ends_the_demo_and_all_it_started(tmp_path):
    command = [sys.executable, "-m", "headrace.service", "demo"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, env=env) as demo:
        assert b"http://127.0.0.1:" in demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(100) == 0
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in content(path)]
    assert left == []
    clear_root(tmp_path / "runs" / "demo")
    assert not (tmp_path / "runs" / "demo").exists()


def content(path):
    """The file's bytes; none where it is gone by now."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


DOCUMENTED_GENERATOR = """
import json
from headrace.dataset.generator import DataGenerator

class Impressions(DataGenerator):
    def generate_columns(self, events):
        shown = [(n, one, a) for n, one in enumerate(map(json.loads, events)) for a in one["shown"]]
        return {
            "event": [n for n, _, _ in shown],
            "user": [one["user"] for _, one, _ in shown],
            "article": [article for _, _, article in shown],
            "last_click": [one["last"] for _, one, _ in shown],
            "device": [one["device"] for _, one, _ in shown],
            "list_length": [float(len(one["shown"])) for _, one, _ in shown],
            "click": [float(article == one["clicked"]) for _, one, article in shown],
            "impression": [float(one["impression"]) for _, one, _ in shown],
        }

Impressions().run()
"""


@pytest.mark.slow
def test_the_spec_of_the_documentation_runs(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "generator.py").write_text(DOCUMENTED_GENERATOR)
    (tmp_path / "job.toml").write_text((ROOT / "tests" / "golden" / "news.toml").read_text())
    with gzip.open(tmp_path / "data" / "impressions.jsonl.gz", "wt") as file:
        for n in range(600):
            event = {"ts": 1_700_000_000 + 60 * n, "impression": n, "user": n % 50, "last": n % 7, "device": n % 3}
            shown = [n % 20, n % 20 + 1, n % 20 + 2]
            file.write(json.dumps(event | {"shown": shown, "clicked": shown[n % 3]}) + "\n")
    headrace("run", tmp_path / "job.toml")
    report = json.loads((tmp_path / "runs" / "news" / "report.json").read_text())
    assert (report["events"], report["samples"], report["rejected"]) == (600, 1800, {})
    life = report["metrics"]["life"]["ctr"]
    assert (life["count"], life["gauc_groups"]) == (1800, 600)
    assert set(life["slices"]["device"]) == {"0", "1", "2", "other"}


@pytest.mark.long
@pytest.mark.data
@news_data
def test_news_learns_from_its_first_events(tmp_path):
    part = first_lines(NEWS, 5_000, tmp_path / "part.jsonl.gz")
    report = report_of(EXAMPLES / "news" / "job.toml", tmp_path / "store", paths("impressions", part))
    assert (report["events"], report["rejected"]) == (5_000, {})
    assert report["halves"]["last"]["ctr"]["auc"] > 0.70


@pytest.mark.long
@pytest.mark.data
@criteo_data
def test_criteo_learns_from_its_first_events(tmp_path):
    part = first_lines(CRITEO, 5_000, tmp_path / "part.txt.gz")
    report = report_of(EXAMPLES / "criteo" / "job.toml", tmp_path / "store", paths("lines", part))
    assert (report["events"], report["rejected"]) == (5_000, {})
    assert report["halves"]["last"]["ctr"]["auc"] > 0.64


@pytest.mark.long
def test_words_of_one_topic_get_vectors_that_point_the_same_way(tmp_path):
    corpus = tmp_path / "corpus.txt"
    words = generator("words", "corpus")
    words.write(corpus, 4_000, 500)
    report = report_of(
        EXAMPLES / "words" / "job.toml", tmp_path / "store", paths("sentences", corpus), "train.threads=1"
    )
    assert (report["events"], report["samples"], report["rejected"]) == (4_000, 296_000, {})
    (export,) = (tmp_path / "store").glob("exports/**/*-base")
    assert (export / "dense.onnx").exists(), "the model is served, too, though it has no dense parameters"
    rows = pq.read_table(export / "rows-default-0.parquet", filters=[("slot", "=", "word")])
    word_V = np.array(rows["sign"].to_pylist()) - 1
    vectors_VD = np.array(rows["vector"].to_pylist())
    vectors_VD /= np.linalg.norm(vectors_VD, axis=1, keepdims=True)
    cosine_VV = vectors_VD @ vectors_VD.T
    np.fill_diagonal(cosine_VV, -2)
    nearest_V = word_V[cosine_VV.argmax(1)]
    assert np.mean(nearest_V % words.TOPICS == word_V % words.TOPICS) > 0.8


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(600)
@news_data
def test_news_reaches_the_figures_of_its_readme(tmp_path):
    def last_half(spec, *overrides):
        store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        path = EXAMPLES / "news" / spec
        report = report_of(path, store, paths("impressions", NEWS), *overrides, limit_s=180)
        assert (report["events"], report["samples"]) == (50_080, 583_054)
        return report["halves"]["last"]["ctr"]

    plain, shipped, towers, frozen = (
        last_half("plain.toml"),
        last_half("job.toml"),
        last_half("towers.toml"),
        last_half("job.toml", "train.learn_until=25040"),
    )
    assert plain["auc"] >= 0.720
    assert shipped["auc"] >= 0.755 and shipped["gauc"] >= 0.675
    remembering = last_half("histories.toml")
    assert remembering["auc"] >= 0.772 and remembering["gauc"] >= 0.705
    counting = last_half("counters.toml")
    assert counting["auc"] >= 0.787 and counting["gauc"] >= 0.735
    assert towers["auc"] >= 0.766 and towers["gauc"] >= 0.695
    assert frozen["auc"] <= shipped["auc"] - 0.03 and frozen["gauc"] <= shipped["gauc"] - 0.1


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(600)
@news_data
def test_news_without_a_generator_reaches_the_figures_of_its_readme(tmp_path):
    spec, store = EXAMPLES / "news" / "columns.toml", tmp_path / "store"
    report = report_of(spec, store, paths("impressions", NEWS), limit_s=500)
    assert (report["events"], report["samples"], report["rejected"]) == (50_080, 583_054, {})
    ctr = report["halves"]["last"]["ctr"]
    assert ctr["auc"] >= 0.7595 and ctr["gauc"] >= 0.683


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(600)
@criteo_data
def test_tuned_dcn_v2_reaches_the_figure_of_the_criteo_readme(tmp_path):
    rates = ("tables.default.optimizer.lr=0.05", "tables.default.first_order_optimizer.lr=0.02")
    tuned = ("model.name=dcn_v2", "train.batch_size=64", *rates)
    report = report_of(EXAMPLES / "criteo" / "job.toml", tmp_path, paths("lines", CRITEO), *tuned, limit_s=500)
    assert report["samples"] == 80_000 and report["halves"]["last"]["ctr"]["auc"] >= 0.7745


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(600)
@criteo_data
def test_criteo_reaches_the_figures_of_its_readme(tmp_path):
    spec, source = EXAMPLES / "criteo" / "job.toml", paths("lines", CRITEO)
    lr = ("model.name=lr", "model.settings={}", "tables.default.dim=0", "tables.default.optimizer.lr=0.05")
    for name, overrides, least in (("lr", lr, 0.760), ("deepfm", (), 0.772), ("dcn_v2", ("model.name=dcn_v2",), 0.772)):
        report = report_of(spec, tmp_path / name, source, *overrides, limit_s=180)
        assert report["halves"]["last"]["ctr"]["auc"] >= least, name
