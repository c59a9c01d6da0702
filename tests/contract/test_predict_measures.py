"""What a prediction measures beside the built-in measures: metrics of the job's own, and tasks of many classes."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.errors import SpecError
from headrace.trainer.own_metrics import ExpectedCalibrationError
from tests.contract.predict_world import SPEC, content, make_world, rows_of
from tests.jobs import changed

pytestmark = pytest.mark.timeout(120)

OWN = """
import numpy as np


class Shown:
    name, size = "shown", 2

    def add(self, prediction_B, label_B, weight_B, state_W):
        state_W += np.array([len(label_B), int(np.rint(prediction_B * 1024).sum())])

    def value(self, state_W):
        return state_W[1] / 1024 / state_W[0]
"""
CLASSES = changed(
    SPEC.replace('slices = ["a"]', "")
    .replace('gauc_by = "group"', "halves = false")
    .replace('names = ["click", "group"]', 'name = "click"\nkind = "meta"\n[[slots]]\nname = "group"\ntype = "uint64"'),
    {
        "tasks": [{"name": "next", "label": "group", "loss": "softmax"}, {"name": "ctr", "label": "click"}],
        "model": {
            "name": "next_item",
            "settings": {"hidden": [8], "dim": 4, "classes": 50, "recall_at": [1, 10], "scale": 2.0},
        },
        "sample": None,
    },
)


JOINED = changed(
    SPEC.replace('gauc_by = "group"', "halves = false").replace('slices = ["a"]', ""),
    {"sources.lines.event_time": {"slot": "time"}, "join": {"label": "click", "key": "shown", "window": "60s"}},
    slots=[
        {"name": "shown", "kind": "meta", "type": "uint64"},
        {"name": "time", "kind": "meta", "type": "int64"},
    ],
)


def joined_lines(rng, parts=3, lines=80):
    """By part, (time, key, click): impressions, some repeated, and clicks of some, early, in time and too late."""
    found = [[] for _ in range(parts)]
    for key in range(parts * lines // 2):
        at, part = int(rng.integers(10_000, 20_000)), int(rng.integers(parts))
        found[part].append((at, key, 0))
        if key % 7 == 0:
            found[(part + 1) % parts].append((at + int(rng.integers(120)), key, 0))
        if rng.random() < 0.5:
            found[int(rng.integers(parts))].append((at + int(rng.integers(-20, 150)), key, 1))
    return found


def write_lines(folder, parts, rng):
    """The events of `joined_lines` as files of the job."""
    for number, events in enumerate(parts):
        lines = [
            f"2 0.5 {rng.normal():.3f} 1 {rng.integers(20)} 1 {rng.integers(300)} 1 7 1 {click} 1 3 1 {key} 1 {at}"
            for at, key, click in events
        ]
        (folder / f"part-{number}.txt").write_text("\n".join(lines) + "\n")


def expected_labels(events):
    """By the first impression of a key and its clicks, event by event: labels in time, and which are measured."""
    impressions = sorted((at, key) for at, key, click in events if not click)
    clicks = sorted((at, key) for at, key, click in events if click)
    labels, since = [], {}
    for at, key in impressions:
        if at - since.get(key, -1e9) <= 60:
            continue
        since[key] = at
        labels.append(any(other == key and abs(then - at) <= 60 for then, other in clicks))
    return labels


def metrics(output):
    return json.loads((output / "_metrics.json").read_text())


def test_own_metrics_are_those_of_all_samples_on_any_number_of_workers(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "mine.py").write_text(OWN)
    spec = SPEC.replace("[metrics]", '[metrics]\nown = ["expected_calibration_error", "mine:Shown"]')
    world = make_world(tmp_path / "job", spec, num_lines=100)
    world.predict(tmp_path / "one")
    found, table = metrics(tmp_path / "one")["tasks"]["ctr"], rows_of(tmp_path / "one")
    prediction, label = (table[name].to_numpy() for name in ("prediction.ctr", "label.ctr"))
    calibration = ExpectedCalibrationError()
    state = np.zeros(calibration.size, np.int64)
    calibration.add(prediction, label, np.ones_like(label), state)
    assert found["expected_calibration_error"] == calibration.value(state)
    assert found["shown"] == pytest.approx(prediction.mean(), abs=1e-3)
    world.predict(tmp_path / "two", trainers=2, shards=1)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    world.predict(tmp_path / "none", metrics=False)
    assert not (tmp_path / "none" / "_metrics.json").exists()
    (tmp_path / "job" / "mine.py").write_text(OWN.replace("size = ", "length = "))
    with pytest.raises(SpecError, match=r"metrics.own.1: .*its `size` is"):
        world.predict(tmp_path / "broken")


def test_the_next_item_is_measured_over_all_items(tmp_path):
    (tmp_path / "job").mkdir()
    world = make_world(tmp_path / "job", CLASSES, num_lines=100)
    for name, more in (("one", {}), ("two", {"trainers": 2, "shards": 1})):
        world.predict(tmp_path / name, outputs=["next", "ctr", "items", "user_vector"], **more)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    found, table = metrics(tmp_path / "one"), rows_of(tmp_path / "one")
    label = table["label.next"].to_numpy().astype(int)
    items = np.array(table["items"].to_pylist()).astype(int)
    for k in (1, 10):
        hit = (items[:, :k] == label[:, None]).any(axis=1).mean()
        assert found["tensors"][f"recall_at_{k}"]["mean"] == pytest.approx(hit, abs=1e-6)
    user = np.array(table["user_vector"].to_pylist())
    dense = load_file(world.commit / "dense.safetensors")
    classes = next(value for name, value in dense.items() if name.endswith("classes"))
    score = 2 * user @ (classes / np.linalg.norm(classes, axis=1, keepdims=True)).T
    lost = np.log(np.exp(score).sum(1)) - score[np.arange(len(label)), label]
    assert found["tasks"]["next"]["logloss"] == pytest.approx(lost.mean(), rel=1e-4)
    click, ctr = table["label.ctr"].to_numpy(), table["prediction.ctr"].to_numpy().astype(float)
    lost_of_click = -np.log(np.where(click > 0, ctr, 1 - ctr))
    assert found["tasks"]["ctr"]["logloss"] == pytest.approx(lost_of_click.mean(), rel=1e-4)
    assert found["tensors"]["loss"]["mean"] == pytest.approx((lost + lost_of_click).mean(), rel=1e-4)


def test_impressions_are_predicted_and_find_their_clicks_over_the_whole_input(tmp_path):
    (tmp_path / "job").mkdir()
    world, rng = make_world(tmp_path / "job", JOINED, num_lines=80), np.random.default_rng(4)
    parts = joined_lines(rng)
    write_lines(tmp_path / "job", parts, rng)
    manifest = world.predict(tmp_path / "one", columns=["shown"], segment_events=30)
    table, found = rows_of(tmp_path / "one"), metrics(tmp_path / "one")
    events = [event for part in parts for event in part]
    assert table["shown"].to_pylist() == [key for _, key, click in events if not click], "no click is a row"
    assert table["label.ctr"].null_count == len(table) == manifest["samples"] < manifest["events"] == len(events)
    labels = expected_labels(events)
    assert found["tasks"]["ctr"]["count"] == len(labels) < len(table)
    assert found["tasks"]["ctr"]["mean_label"] == pytest.approx(np.mean(labels), abs=1e-9) and 0 < sum(labels)
    assert found["join"] == {"clicks": sum(click for *_, click in events), "joined": sum(labels)}
    world.predict(tmp_path / "two", columns=["shown"], segment_events=30, trainers=2, shards=2)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    world.predict(tmp_path / "whole", segment_events=1000)
    assert metrics(tmp_path / "whole") == found, "however it is cut into parts"
