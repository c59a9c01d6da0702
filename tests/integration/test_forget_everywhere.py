"""A person is forgotten: no row of any table has the value any more, and the rows of all others are as they were."""

import json
import random
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.dataset.features.feature_kernels import crossed_reference
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.keys import key_of_reference, sign_of_text
from headrace.pserver.protocol.table_operations import ExportCut
from headrace.pserver.rows import history_kernels
from headrace.pserver.rows.row_format import groups_of
from headrace.service.spec.job import load_job
from headrace.service.tables.committed_tables import newest
from headrace.trainer.exports.row_selection import CommitTableRows, RowSelection, weights_of
from headrace.trainer.spec.history_tables import history_tables
from headrace.trainer.spec.join_tables import join_tables
from tests.integration.running_job import RunningJob
from tests.integration.test_operations import say, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

HEAD = """
name = "people"
model = { name = "lr" }
passes = { max_events = 100, cut = "count" }
commit = { every = "1000s", keep = 9 }
tasks = [{ name = "ctr", label = "click" }]
pipe = { kind = "columns" }
sources.lines = { kind = "files", paths = ["*.jsonl"], follow = true, poll = "10ms", event_time = { field = "ts" } }
store = { path = "store" }
"""
SLOTS = """
[[slots]]
names = ["user", "item", "genre"]
values = "string"
[[slots]]
name = "same"
from = "user"
values = "string"
[[slots]]
name = "few"
from = "user"
values = "string"
hash = 8
[[slots]]
name = "user_genre"
cross = ["user", "genre"]
[[slots]]
name = "user_place"
cross = ["user", "place"]
values = "string"
[[slots]]
name = "readers"
values = "string"
share = "readers"
history = { key = "item", of = "user", last = 3 }
[[slots]]
name = "read"
values = "string"
history = { key = "user", of = "item", last = 3 }
[[slots]]
name = "of_genre"
values = "string"
history = { key = "user_genre", of = "item", last = 3 }
[[slots]]
name = "pairs"
kind = "dense"
counters = { key = ["user", "item"], what = ["shows"], windows = ["all"] }
[[slots]]
name = "both"
pairs = [["user", "genre"], ["item", "genre"], ["item", "user"]]
[[slots]]
name = "click"
kind = "meta"
"""
GONE = "u7"


@pytest.fixture
def start(tmp_path):
    jobs = []

    def started(slots):
        path = tmp_path / "job.toml"
        path.write_text(HEAD + slots)
        jobs.append(RunningJob(path, tmp_path))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill()


def write(folder, name, events):
    (folder / "new").write_text("".join(json.dumps(each) + "\n" for each in events))
    (folder / "new").rename(folder / name)


def committed(folder):
    """By table of the newest commit: slot groups by key, and weights by key."""
    job = load_job(folder / "job.toml", [])
    commit, schema = newest(job), Schema.of(job.spec.slots)
    tables = {**job.spec.tables, **history_tables(schema), **join_tables(job.spec.join)}
    found = {}
    for table, section in tables.items():
        with CommitTableRows(commit, table, section, {}, folder / "read") as rows:
            chunks = list(rows.all(RowSelection(ExportCut(since=0), commit.version, True), Deadline.after(60)))
        found[table] = {}
        for chunk in chunks:
            weights_UD = weights_of(chunk.words_UW, int(section.first_order) + section.dim)
            found[table] |= dict(
                zip(
                    chunk.keys_U.tolist(), zip(groups_of(chunk.words_UW).tolist(), weights_UD, strict=True), strict=True
                )
            )
    return found


def traces(events, schema):
    """By table: the keys of rows with the value, and whether a history has it, from the events alone."""
    group = {slot.name: slot.group for slot in schema.sparse}
    gone, genres, items, both = sign_of_text(GONE.encode()), set(), set(), set()
    one, other = (sign_of_text(pair) for pair in (b"user,genre", b"item,user"))
    for each in events:
        if each["user"] == GONE:
            genres.add(crossed_reference([gone, sign_of_text(each["genre"].encode())]))
            items.add(sign_of_text(each["item"].encode()))
            both.add(crossed_reference([one, gone, sign_of_text(each["genre"].encode())]))
            both.add(crossed_reference([other, sign_of_text(each["item"].encode()), gone]))
    user = key_of_reference(gone, group["user"])
    crosses = {key_of_reference(sign, group["user_genre"]) for sign in genres}
    both = {key_of_reference(sign, group["both"]) for sign in both}
    return {
        "default": {*crosses, *both, *(key_of_reference(gone, group[name]) for name in ("user", "same", "readers"))},
        "history-read": {user},
        "history-of_genre": crosses,
        "counters-pairs": {key_of_reference(sign ^ user, group["item"]) for sign in items},
    }


def remembering(rows):
    """Keys of histories that have the value."""
    gone = sign_of_text(GONE.encode())
    found = set()
    for key, (_, weights_D) in rows.items():
        (length,), (sign_L,) = history_kernels.unpacked(np.array(weights_D)[None])
        found |= {key} if gone in sign_L[:length].tolist() else set()
    return found


def test_all_rows_with_a_value_go_and_no_others_and_a_rerun_repeats_it(start, tmp_path):
    chance = random.Random(3)
    events = [
        {"user": f"u{chance.randrange(12)}", "item": f"i{chance.randrange(9)}", "genre": chance.choice("abc")}
        | {"place": chance.choice("xy"), "click": chance.randrange(2), "ts": 1_700_000_000 + number}
        for number in range(400)
    ]
    job = start(SLOTS)
    write(tmp_path, "a.jsonl", events[:200])
    job.until_events(200, within_s=120)
    first = say_to(tmp_path, "commit").strip()
    write(tmp_path, "b.jsonl", events[200:])
    job.until_events(400)
    say_to(tmp_path, "commit")
    before = committed(tmp_path)
    gone = traces(events, Schema.of(load_job(tmp_path / "job.toml", []).spec.slots))
    gone["history-readers"] = remembering(before["history-readers"])
    assert gone["history-readers"] and all(keys <= before[table].keys() for table, keys in gone.items())
    said = say_to(tmp_path, "forget", "user", GONE, "--everywhere", "--timeout", "200")
    after = committed(tmp_path)
    for table, rows in before.items():
        assert rows.keys() - after[table].keys() == gone.get(table, set()), table
        assert all(np.array_equal(rows[key][1], row[1]) for key, row in after[table].items())
    assert GONE not in said and "other rows with this value: none any more" in said
    assert "slot few: values share rows by `hash`" in said and "slot user_place: place is no slot" in said
    assert "commit.keep is 9: " in said and " UTC if the job runs on" in said
    write(tmp_path, "c.jsonl", [{**each, "user": "u1", "ts": each["ts"] + 1000} for each in events[:100]])
    until(job, lambda status: status["events"] == 500, "pass of what came later")
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 0, output
    repeated = say_to(tmp_path, "rerun", "--from", first)
    number = int(repeated.split(" of ")[1].split()[0])
    assert number > 3 and f"{number} of {number} passes are identical" in repeated


def test_a_sample_that_waits_for_its_click_goes(start, tmp_path):
    slots = '[[slots]]\nnames = ["user", "item"]\nvalues = "string"\n[[slots]]\nname = "click"\nkind = "meta"\n'
    slots += '[[slots]]\nname = "impression"\nkind = "meta"\ntype = "uint64"\n'
    job = start(slots + '[join]\nlabel = "click"\nkey = "impression"\nwindow = "1h"\n')
    shown = [{"user": f"u{n % 10}", "item": f"i{n % 3}", "impression": n, "ts": 1_700_000_000 + n} for n in range(100)]
    write(tmp_path, "a.jsonl", shown)
    job.until_events(100, within_s=120)
    said = say_to(tmp_path, "forget", "user", GONE, "--everywhere", "--timeout", "200")
    assert "10 of table join-pending" in said
    clicks = [{"impression": n, "click": 1, "ts": 1_700_000_200 + n} for n in range(99)]
    write(tmp_path, "b.jsonl", [*clicks, {"user": "z", "item": "z", "impression": 100, "ts": 1_700_100_000}])
    status = until(job, lambda status: status["events"] == 200, "the clicks")
    assert status["left_out"] == {"click without an impression": 10}


def say_to(folder, command, *words):
    return say(SimpleNamespace(spec=folder / "job.toml"), folder / "store", command, *words)
