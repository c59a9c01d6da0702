"""Events whose label the loss does not take are rejected, whole, with words; specs that cannot work, too."""

import numpy as np
import pytest

from headrace.dataset.pipe.label_bounds import LabelBounds, reject_labels
from headrace.dataset.pipe.segment_work import PipeInput, PipeOutput
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import MetaSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.source import Segment
from headrace.errors import SpecError
from headrace.service.spec.job import load_job
from headrace.trainer.spec.class_rules import label_bounds_of

SPEC = """
name = "next"

[sources.lines]
kind = "files"
paths = ["part-*.txt"]

[pipe]
command = ["cat"]

[[slots]]
names = ["user", "item"]

[[slots]]
name = "next"
kind = "meta"
type = "uint64"

[[tasks]]
name = "next"
label = "next"
loss = "softmax"

[tables.default]
dim = 4

[model]
name = "next_item"
settings = { classes = 100, mode = "divided", without = "item" }

[store]
path = "store"
"""


def outcome(class_B, event_B, dtype):
    schema = Schema.of((MetaSlot(kind="meta", name="next", type="int64"),))
    meta = {"next": np.array(class_B, dtype)}
    samples = Samples({}, {}, meta, np.array(event_B, np.int64), np.zeros(len(event_B)))
    return PipeOutput(SlotCounters(schema), [samples])


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("traced", [True, False])
def test_an_event_with_one_wrong_class_is_rejected_whole(dtype, traced):
    made = outcome([3, 100, 5, 99, 1 << 40], [7, 8, 8, 9, 12], dtype)
    work = PipeInput(Segment("part-0.txt", 0, 7, 13), [], [], 6)
    reject_labels(work, made, [LabelBounds.of_classes("next", 100)], traced=traced)
    assert made.blocks[0].meta["next"].tolist() == [3, 99] and made.blocks[0].event_B.tolist() == [7, 9]
    places = ["part-0.txt at 8", "part-0.txt at 12"]
    if not traced:
        places = ["part-0.txt at 7, output line 9", "part-0.txt at 7, output line 13"]
    assert [str(each) for each in made.rejections] == [
        f"{place}: class out of range: next is {value}; the model has the classes 0 to 99"
        for place, value in zip(places, (100, 1 << 40), strict=True)
    ]
    again = len(made.rejections)
    reject_labels(work, made, [LabelBounds.of_classes("next", 100)], traced=traced)
    assert len(made.rejections) == again


def test_a_class_below_0_is_wrong():
    made = outcome([-1, 0], [0, 1], np.int64)
    reject_labels(PipeInput(Segment("p", 0, 0, 2), [], [], 2), made, [LabelBounds.of_classes("next", 10)], traced=True)
    assert made.blocks[0].meta["next"].tolist() == [0]


def test_log_loss_takes_labels_from_0_to_1_where_the_task_has_one():
    made = outcome([0, 0.5, 1, -1, 2, np.nan, 3], range(7), np.float32)
    made.blocks[0].meta["there"] = np.array([1, 1, 1, 1, 1, 1, 0], np.float32)
    bounds = [LabelBounds.of_probability("next", "there")]
    reject_labels(PipeInput(Segment("p", 0, 0, 7), [], [], 7), made, bounds, traced=True)
    assert made.blocks[0].event_B.tolist() == [0, 1, 2, 5, 6]
    assert [str(each) for each in made.rejections] == [
        f'p at {place}: label out of range: next is {label}; loss = "bce" takes labels from 0 to 1; use loss = "mse" '
        "for other values"
        for place, label in ((3, -1.0), (4, 2.0))
    ]


@pytest.mark.parametrize(("loss", "reason"), [("bce", Reason.LABEL), ("mse", None)])
def test_each_loss_says_which_labels_it_takes(tmp_path, loss, reason):
    text = (
        SPEC.replace('loss = "softmax"', f'loss = "{loss}"').replace('"next_item"', '"lr"').replace("settings =", "#")
    )
    assert [each.reason for each in label_bounds_of(spec(tmp_path, text).spec)] == ([reason] if reason else [])


def spec(tmp_path, text=SPEC, *settings):
    (tmp_path / "job.toml").write_text(text)
    return load_job(tmp_path / "job.toml", list(settings))


def test_the_number_of_classes_is_that_of_the_model(tmp_path):
    assert label_bounds_of(spec(tmp_path).spec) == [LabelBounds.of_classes("next", 100)]


REFUSED = {
    "train.staleness=1": "train.staleness: does not work with items that are divided over trainers",
    "train.learn=false": "train.learn: does not work with items that are divided",
    "metrics.infer_first=true": "metrics.infer_first: does not work with items that are divided",
    "dense.strategy='sharded'": "dense.strategy: does not work with items that are divided",
    "dense.overlap=true": "dense.overlap: does not work with items that are divided",
    "dense.compression='bf16'": "dense.compression: does not work with items that are divided",
    "dense.hierarchy={group=2}": "dense.hierarchy: does not work with items that are divided",
    "dense.clip_norm=1": "dense.clip_norm: does not work with items that are divided",
    "dense.optimizer={kind='lamb'}": "dense.optimizer.kind: lamb needs whole parameters",
    "model.settings.mode='sampled'": 'mode = "sampled" needs samples',
    "model.settings={classes=100,mode='sampled',samples=9,recall_at=[]}": "dense.optimizer: items that",
    "model.settings={classes=100,samples=9}": 'samples is for mode = "sampled", not for "full": remove it',
    "model.settings={classes=5}": "top = 10 is more than the 5 items",
    "model.settings={}": "model.settings.classes",
    "model.settings={classes=100,without='itm'}": "model.settings.without",
    "model={name='deepfm'}": 'tasks.0.loss: "softmax" is the loss of model "next_item"',
    "tasks=[{name='next',label='next'}]": "tasks: the first task of next_item has loss",
    "tasks=[{name='a',label='next'},{name='next',label='next',loss='softmax'}]": "tasks: the first task of next_item",
    "tasks=[{name='next',label='next',loss='softmax',weight=2.0}]": "tasks.0.weight: this task is the only one",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_does_not_work_with_many_classes_is_refused(tmp_path, setting):
    with pytest.raises(SpecError) as caught:
        spec(tmp_path, SPEC, setting)
    assert REFUSED[setting] in str(caught.value)


def test_a_label_of_floats_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"tasks\.0\.label: 'next' must hold the number of a class"):
        spec(tmp_path, SPEC.replace('type = "uint64"', 'type = "float"'))
