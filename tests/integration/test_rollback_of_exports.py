"""A stream whose labels break in the middle: what is served goes back, and comes up again once the labels are right."""

import json

import numpy as np
import pytest

from headrace.trainer.journal.log import read
from headrace.trainer.journal.records import RollbackOperation
from tests.integration.stream_job import SPEC
from tests.integration.trainer_here import run
from tests.jobs import changed

PASS_EVENTS, BEGIN_S, PASS_S = 200, 1_700_006_400, 3600
TIME = {"name": "time", "kind": "meta", "type": "int64"}
TIMED = {
    "sources.lines.event_time": {"slot": "time"},
    "passes.max_events": PASS_EVENTS,
    "metrics.slices": None,
}
JOB = changed(SPEC, TIMED, slots=[TIME]) + """
[exports.serving]
base = "1h"
on_late = "wait"
keep = 100
rollback = { metric = "auc", span = "pass", falls = 0.12, closes = 2, reference = 4 }

[guards]
min_samples = 100
[guards.slots.b]
min_coverage = 0.5
"""  # fmt: skip


def write_part(folder, name, hours, good=True, seed=0):
    """Passes of an hour each. Where labels are not `good`, they say the contrary, and slot b has no value."""
    rng = np.random.default_rng(seed)
    with (folder / name).open("w") as text:
        for line in range(PASS_EVENTS * len(hours)):
            at_s = BEGIN_S + hours[line // PASS_EVENTS] * PASS_S + line % PASS_EVENTS
            x, y = rng.normal(size=2)
            click = int((x > 0) == good)
            b = f"1 {rng.integers(300)}" if good else "0"
            text.write(f"2 {x:.4f} {y:.4f} 1 {rng.integers(20)} {b} 0 1 {click} 1 {rng.integers(40)} 1 {at_s}\n")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_is_served_goes_back_while_labels_are_broken_and_comes_up_again(tmp_path):
    job, store = tmp_path / "job.toml", tmp_path / "store"
    job.write_text(JOB)
    write_part(tmp_path, "part-0.txt", range(6), seed=1)
    write_part(tmp_path, "part-1.txt", range(6, 9), good=False, seed=2)
    broken = run(job, store)
    pointed = json.loads((store / "exports/serving/small/current.json").read_text())
    [back] = operations(store)
    assert pointed["path"] == back.paths[0] and pointed["version"] <= 6 < back.version == 8
    assert pointed["rollback"] == {"timeline": "t1", "version": 8}
    manifests = {path.parent.name: json.loads(path.read_text()) for path in store.glob("exports/*/*/*/*/manifest.json")}
    held = [name for name, manifest in manifests.items() if "rollback" in manifest["gates"]]
    assert len(held) >= 1 and all(int(name.partition("-")[0]) >= 8 for name in held)
    assert broken.guards["outside"]["b"] == {"why": "coverage is below 0.5", "action": "alarm", "since": 7}

    write_part(tmp_path, "part-2.txt", range(9, 15), seed=3)
    run(job, store, generation=2)
    assert [bool(each.paths) for each in operations(store)] == [False], "of this run; the log of the first is pruned"
    pointed = json.loads((store / "exports/serving/small/current.json").read_text())
    assert pointed["version"] > 9 and "rollback" not in pointed


def operations(store):
    records = read(store / "log")
    return [each.content for each in records if isinstance(each.content, RollbackOperation)]
