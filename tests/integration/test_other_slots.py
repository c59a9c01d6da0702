"""A job whose slots change while its stream goes on: it goes on with its rows and weights, whatever is killed."""

import json

import numpy as np
import pytest

from headrace.config import validate
from headrace.dataset.spec.schema import Schema
from headrace.failpoints import Failpoint
from headrace.service.cluster.store_defaults import spec_with_rows, with_store_defaults
from headrace.service.faults.deaths import RANK_0, AtFailpoint
from headrace.service.faults.injection import Deaths, run
from headrace.service.jobs.spec_difference import CarriedRows, carried_over
from headrace.service.spec.job import load_job
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.config import TrainerJob
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from tests.integration.stream_job import headrace

pytestmark = pytest.mark.usefixtures("warm")

PIPE = """
import json, sys

for line in sys.stdin:
    event = json.loads(line)
    values = [event[name] for name in sys.argv[1:]]
    print(*(f"{len(each)} {' '.join(map(str, each))}" for each in values))
"""
SPEC = """
name = "moving"
seed = 3

[sources.lines]
kind = "files"
paths = ["part-*.txt"]

[pipe]
command = ["python", "fields.py", {names}]

{slots}
[[slots]]
name = "click"
kind = "meta"

[[tasks]]
name = "ctr"
label = "click"

{tables}
[model]
name = "dcn_v2"
[model.settings]
hidden = [8]

[train]
batch_size = 16
threads = 1

[passes]
max_events = 60

[dense]
optimizer = {{ kind = "adagrad", lr = 0.05, initial = 0.1 }}

[commit]
every = "600s"
keep = 20

[exports.serving]
base = "720h"
delta = "1h"

[store]
path = "store"
"""
TABLES = {"default": "dim = 4", "more": "dim = 2"}
FIRST = {"d": "dense", "a": "default", "b": "default", "c": "default"}
WIDER = {"e": "dense", "c": "default", "f": "more", "d": "dense", "a": "default", "b": "default", "g": "default"}
NARROWER = {name: kind for name, kind in WIDER.items() if name not in ("b", "e")}


def job_of(folder, slots, trainers, shards):
    """The job file with these slots."""
    entries = [
        f'[[slots]]\nname = "{name}"\n' + ('kind = "dense"\n' if kind == "dense" else f'table = "{kind}"\n')
        for name, kind in slots.items()
    ]
    used = [name for name in TABLES if name in slots.values()]
    text = SPEC.format(
        names=", ".join(f'"{name}"' for name in (*slots, "click")),
        slots="\n".join(entries),
        tables="\n".join(f"[tables.{name}]\n{TABLES[name]}\n" for name in used),
    )
    (folder / "job.toml").write_text(text)
    return load_job(folder / "job.toml", [f"cluster={{trainers={trainers}, shards={shards}}}"])


def events_come(folder, number):
    rng = np.random.default_rng(number)
    with (folder / f"part-{number}.txt").open("w") as text:
        for _ in range(180):
            event = {name: [int(rng.integers(20))] for name in "abcfg"}
            event |= {"d": [float(rng.normal())], "e": [float(rng.normal())]}
            event["click"] = [int(rng.random() < (0.8 if (event["a"][0] + event["f"][0]) % 2 else 0.2))]
            text.write(json.dumps(event) + "\n")


def ran(job, *deaths):
    said = []
    dying = Deaths(job.store, iter([AtFailpoint(RANK_0, point, hit) for point, hit in deaths]))
    outcome = run(job, dying, lambda worker, line: said.append(f"{worker}: {line}"), fresh=False)
    assert outcome.code == 0, (outcome, said[-20:])
    assert [died.point for died in dying.died] == [point for point, _ in deaths]
    return JobHistory.of(read(job.store / "log"))


def groups_in_force(store):
    spec = validate(TrainerJob, spec_with_rows(store), only_known=True)
    return {slot.name: slot.group for slot in Schema.of(spec.slots).sparse}


def rows_by_group(store):
    found = {}
    for part in Commits(store).whole()[-1].shards:
        for name, facts in part.tables.items():
            for group, rows in facts.rows_by_group.items():
                of_table = found.setdefault(name, {})
                of_table[group] = of_table.get(group, 0) + rows
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", [(1, 0), pytest.param((2, 2), marks=pytest.mark.slow)], ids=["1 trainer", "2 x 2"])
def test_slots_come_move_and_go_in_a_stream_and_a_rerun_from_before_the_change_is_identical(tmp_path, place):
    (tmp_path / "fields.py").write_text(PIPE)
    events_come(tmp_path, 0)
    job = job_of(tmp_path, FIRST, *place)
    ran(job)
    assert groups_in_force(job.store) == {"a": 0, "b": 1, "c": 2}
    before = Commits(job.store).whole()[-1]

    events_come(tmp_path, 1)
    job = job_of(tmp_path, WIDER, *place)
    would = carried_over(with_store_defaults(job))
    assert would.version == before.version
    assert would.tables == {"default": CarriedRows(60, {}, dropped=False)}
    assert would.numbers == {"a": 0, "b": 1, "c": 2, "f": 3, "g": 4}
    weights = {each.name: each for each in would.weights}
    assert weights["cross.0.map.weight"][1:] == ([13, 13], [20, 20], 169)
    assert weights["deep.0.weight"][1:] == ([8, 13], [8, 20], 104)
    assert Commits(job.store).whole()[-1].name == before.name
    history = ran(job, (Failpoint.CLOSED, 2))
    assert groups_in_force(job.store) == {"a": 0, "b": 1, "c": 2, "f": 3, "g": 4}
    assert history.closed > before.version
    assert rows_by_group(job.store) == {"default": {0: 20, 1: 20, 2: 20, 4: 20}, "more": {3: 20}}
    again = headrace(tmp_path / "job.toml", command="rerun", options=("--from", before.name))
    assert again.code == 0, again.output
    assert "identical" in again.output

    events_come(tmp_path, 2)
    job = job_of(tmp_path, NARROWER, *place)
    assert carried_over(with_store_defaults(job)).tables["default"] == CarriedRows(60, {"b": 20}, dropped=False)
    ran(job, (Failpoint.RESTORED, 1))
    assert groups_in_force(job.store) == {"a": 0, "c": 2, "f": 3, "g": 4}
    assert rows_by_group(job.store)["default"][1] == 20  # until ageing removes them
