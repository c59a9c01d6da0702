"""What people ask a running job: it waits until it has acted, whatever happens to rank 0 meanwhile."""

import base64
import json
import re
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from headrace.blob.store_address import parse
from headrace.deadline import Deadline
from headrace.durable import locked
from headrace.errors import HeadraceError, NotYet, SpecError
from headrace.keys import sign_of_text
from headrace.rpc.job_client import JobClient, NotRunning, Unfinished
from headrace.rpc.role import serve_role
from headrace.service.cli.table_commands import _counting_note, _pair, app
from headrace.service.monitor.alarms import Alarm, alarms
from headrace.service.spec.job import load_job
from headrace.service.tables import row, table_requests
from headrace.service.tables.forget import contains, drop_letters, prediction_files, remaining_copies, requests_of
from headrace.service.tables.row import sign_of
from headrace.service.tables.table_requests import current_day
from headrace.service.tables.traces import Traces
from headrace.trainer.checkpoint.commits import Commits
from headrace.trainer.job_status import Status, read
from tests.fakes.past import Past
from tests.unit.test_spec import NEWS, load


class RankZeros:
    """The ranks 0 of one job, one after another. What is asked for acts at `acts_at`, which is closed unless `open`."""

    def __init__(self, past, held):
        self.past, self.store, self._held, self._serving = past, past.store, held, None
        self.job = JobClient(past.store)
        self.asked, self.acts_at, self.version, self.answers = [], 7, 7, []

    def run(self, generation):
        folder = self.store / "workers" / f"g{generation}"
        folder.mkdir(parents=True)
        socket = folder / "trainer-0.socket"
        self._serving = self._held.enter_context(serve_role(self.status, print, "s", socket, None, self.answer))
        (folder / "rank0.json").write_text(json.dumps({"address": self._serving.address, "secret": "s"}))

    def die(self):
        self._serving.close()

    def status(self):
        return {"version": self.version, "day": 4}

    def answer(self, request):
        self.asked.append(request)
        answer = self.answers.pop(0) if self.answers else {"version": self.acts_at}
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer


@pytest.fixture
def rank0s(tmp_path):
    past = Past(tmp_path / "store").begin()
    with ExitStack() as held:
        held.callback(past.end)
        past.held = held.enter_context(ExitStack())
        past.held.enter_context(locked(past.store / "lock", Deadline.after(5)))
        yield RankZeros(past, held)


WISH = {"op": "set", "keys": {"tables.default.decay": 0.9}}


def soon():
    return Deadline.after(20)


def test_it_is_asked_once_and_waited_for_until_it_has_acted(rank0s):
    rank0s.run(1)
    rank0s.answers = [{"version": None}, {"version": None}]
    assert rank0s.job.carry_out(WISH, soon()) == 7
    assert len(rank0s.asked) == 3 and rank0s.asked[0] == rank0s.asked[2]
    assert rank0s.asked[0]["do"] == "ask" and rank0s.asked[0]["operation"].keys() == {*WISH, "id"}


def test_it_has_acted_once_the_close_is_told(rank0s):
    rank0s.run(1)
    rank0s.version = 6

    def closed():
        rank0s.version = 7
        return {"version": 7}

    rank0s.answers = [{"version": 7}, closed]
    assert rank0s.job.carry_out(WISH, soon()) == 7 and len(rank0s.asked) == 2


def test_the_rank0_after_one_that_died_is_asked_the_same_with_the_same_id(rank0s):
    rank0s.run(1)

    def again():
        rank0s.die()
        rank0s.run(2)
        return {"version": None}

    rank0s.answers = [again]
    assert rank0s.job.carry_out(WISH, soon()) == 7
    assert len({asked["operation"]["id"] for asked in rank0s.asked}) == 1 < len(rank0s.asked)


def test_where_the_rank0_is_still_finding_out_it_is_asked_again(rank0s):
    rank0s.run(1)
    rank0s.answers = [NotYet("the rows are being counted"), NotYet("the rows are being counted")]
    assert rank0s.job.carry_out(WISH, soon()) == 7 and len(rank0s.asked) == 3


def test_no_is_no(rank0s):
    rank0s.run(1)
    rank0s.answers = [SpecError("seed: cannot be set while the job runs")]
    with pytest.raises(HeadraceError, match="^seed: cannot be set while the job runs$"):
        rank0s.job.carry_out(WISH, soon())


def test_a_job_that_does_not_run_cannot_be_asked(tmp_path):
    past = Past(tmp_path / "store").begin()
    past.end()
    with pytest.raises(NotRunning, match="no run is active"):
        JobClient(past.store).carry_out(WISH, soon())


def test_time_that_is_over_says_whether_it_is_logged(rank0s):
    rank0s.run(1)
    rank0s.acts_at = None
    with pytest.raises(Unfinished, match="it is logged, and acts at the close of a pass that is still open"):
        rank0s.job.carry_out(WISH, Deadline.after(0.3))
    rank0s.answers = [NotYet("the rows are being counted")] * 50
    with pytest.raises(Unfinished, match="no answer in time: the rows are being counted"):
        rank0s.job.carry_out(WISH, Deadline.after(0.3))


def test_a_run_that_ends_in_between_leaves_it_to_the_next(rank0s):
    rank0s.run(1)

    def ends():
        rank0s.past.held.close()
        rank0s.die()
        return {"version": None}

    rank0s.answers = [{"version": None}, ends]
    with pytest.raises(Unfinished, match="the run has ended, and the next run carries it out"):
        rank0s.job.carry_out(WISH, soon())


def test_a_run_that_ends_without_an_answer_may_have_logged_it(rank0s):
    rank0s.run(1)

    def ends():
        rank0s.past.held.close()
        rank0s.die()
        return {"version": None}

    rank0s.answers = [ends]
    with pytest.raises(Unfinished, match="without an answer: `headrace log` shows whether it is logged"):
        rank0s.job.carry_out(WISH, soon())


def test_answers_are_waited_for_and_so_is_the_day(rank0s):
    rank0s.run(1)
    rank0s.answers = [NotYet("counting"), {"rows": 3}]
    assert rank0s.job.answer({"do": "dry_run"}, soon()) == {"rows": 3}
    assert current_day(rank0s.store, soon()) == 4


# -- values and signs


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [("a.b=0.5", "a.b", 0.5), ("a.b=3", "a.b", 3), ("a.b=none", "a.b", None), ("a.b=x=y", "a.b", "x=y")],
)
def test_a_value_is_read_as_in_a_job_file_and_none_is_nothing(text, key, value):
    assert _pair(text) == (key, value)


@pytest.mark.parametrize("text", ["a.b", "=3", ""])
def test_what_is_no_pair_is_told(text):
    with pytest.raises(SpecError, match="is not of the form KEY=VALUE"):
        _pair(text)


@pytest.mark.parametrize("text", ["a.b=inf", "a.b=1e999", "a.b=[nan]", "a.b=2026-11-21"])
def test_a_value_that_no_json_carries_is_refused_by_its_key(text):
    with pytest.raises(SpecError, match=r"^a\.b: .* is not a finite number, a text"):
        _pair(text)


def test_a_shrink_with_a_rule_beyond_all_bounds_is_refused_before_the_job_is_looked_for():
    shrink = ["shrink", "nowhere.toml", "--dry-run"]
    for option, value in (("--delete-below", "nan"), ("--delete-after-days", "9223372036854775808")):
        refused = CliRunner().invoke(app, [*shrink, option, value])
        assert refused.exit_code == 2 and option in refused.output
    for beyond in ("inf", "1e+39"):
        with pytest.raises(
            SpecError, match=rf"--delete-below: is a score, at most 3\.4.*e\+38 \(got {re.escape(beyond)}\)"
        ):
            CliRunner().invoke(app, [*shrink, "--delete-below", beyond], catch_exceptions=False)


def test_a_sign_is_a_number_or_the_hash_of_a_text():
    texts = load('slots.0={names=["user"],values="string"}', "metrics.slices=[]").spec
    assert sign_of(texts, "user", "ada") == sign_of_text(b"ada")
    numbers = load().spec
    assert sign_of(numbers, "user", "18446744073709551615") == (1 << 64) - 1
    for wrong in ("-1", "1.5", "18446744073709551616", "9" * 5000, "ada", "٣"):
        with pytest.raises(SpecError, match="decimal numbers of 64 bits"):
            sign_of(numbers, "user", wrong)
    with pytest.raises(SpecError, match="there is no sparse slot 'usr'; did you mean 'user'?"):
        sign_of(numbers, "usr", "3")


def test_a_threshold_that_is_counted_up_to_may_begin_the_counts_anew():
    assert "the counts restart" in _counting_note("tables.default.admission.0.n")
    assert _counting_note("tables.default.admission.0.p") == _counting_note("tables.default.optimizer.lr") == ""


# -- dead letters


def letter(event, detail=""):
    data = {} if event is None else {"bytes": base64.b64encode(event).decode()}
    return json.dumps({"partition": "t/0", "offset": 1, "reason": "r", "detail": detail, **data}).encode() + b"\n"


def test_letters_that_hold_a_value_go_and_the_others_stay_as_they_were(tmp_path):
    path = tmp_path / "pass-000000000001-rank-0.jsonl"
    kept = letter(b"user 17") + letter(None) + b'{"partition": "t", "offset": 2, "reason": "too long"}\n'
    path.write_bytes(letter(b"user ada, click") + kept + letter(None, "label of ada is missing"))
    assert drop_letters(path, "ada") == 2 and path.read_bytes() == kept
    assert drop_letters(path, "ada") == 0 and path.read_bytes() == kept
    assert list(tmp_path.iterdir()) == [path]


def test_a_letter_has_a_value_also_as_json_writes_it():
    assert contains(letter(b'{"user": "Jos\\u00e9"}'), "José") and contains(letter(b'{"user": "a\\"b"}'), 'a"b')
    assert contains(letter("{'user': 'José'}".encode()), "José")


def test_a_letter_that_has_no_bytes_holds_nothing():
    assert not contains(letter(None), "ada") and not contains(b'{"reason": "x", "bytes": null, "detail": null}', "ada")


def test_commits_from_before_are_named_and_exports(tmp_path):
    past = Past(tmp_path / "store").begin()
    for number in (1, 2, 3):
        past.close(number, a=(100 * number - 100, 100 * number))
        past.commit(number)
    past.end()
    job = load_job(NEWS, [f"store.path={past.store}", 'exports.main={base="24h"}'])
    Commits(past.store).hold("t1-0000000001-g1", "alice")
    commits, until, held, exports = remaining_copies(job, 3, now_s=1_700_000_000.0)
    assert commits.endswith("t1-0000000001-g1, t1-0000000002-g1") and held.endswith(": t1-0000000001-g1")
    assert until.startswith("commit.keep is 3: 2 more commits prune them, by 2023-11-14 22:14 UTC")
    assert "versions before 3" in exports and "which keeps 2 bases, by 2023-11-16 22:13 UTC" in exports
    assert list(remaining_copies(load_job(NEWS, [f"store.path={past.store}"]), 1, 0.0)) == []
    once = load_job(NEWS, [f"store.path={past.store}", "exports.main={}"])
    assert "exports.main.base is not set, so none is due by itself" in list(remaining_copies(once, 1, 0.0))[-1]


def test_predictions_that_contain_a_value_are_named(tmp_path):
    own = {
        "a": {"prediction.ctr": [0.5], "user": [["ada"]]},
        "b": {"sign": pa.array([[1], [7]], pa.list_(pa.uint64()))},
    }
    others = {"c": {"user": [["bob"], None], "sign": pa.array([None, 8], pa.uint64())}, "d": {"x": [{"user": "ada"}]}}
    for name, columns in {**own, **others}.items():
        pq.write_table(pa.table(columns), tmp_path / f"part-{name}.parquet")
    (tmp_path / "_dead_letters").mkdir()
    (tmp_path / "_dead_letters" / "part-0.jsonl").write_bytes(letter(b"user bob") + letter(b"user ada"))
    [line] = prediction_files(parse(str(tmp_path)), "ada", 7)
    assert line.startswith("predictions contain it: part-a.parquet, part-b.parquet, _dead_letters/part-0.jsonl in ")
    there, none = parse(str(tmp_path)), parse(str(tmp_path / "none"))
    assert list(prediction_files(there, "eve", 9)) == list(prediction_files(none, "ada", 7)) == []
    [line] = prediction_files(parse("s3://bucket/out"), "ada", 7)
    assert line.startswith("predictions may contain it: s3://bucket/out is not searched")


def test_more_rows_than_one_operation_takes_are_several():
    rows = Traces({("a", 1): np.arange(5000, dtype=np.uint64), ("b", 0): np.arange(10, dtype=np.uint64)}, ())
    first, second = requests_of(rows)
    assert [(each["table"], each["group"], len(each["keys"])) for each in first] == [("a", 1, 4096)]
    assert [(each["table"], each["keys"][0], len(each["keys"])) for each in second] == [("a", 4096, 904), ("b", 0, 10)]


# -- shrinks, and what is known of a key


def test_tables_meant_are_the_one_named_or_those_with_a_rule():
    rules = {"a": False, "b": True}
    assert table_requests.choose_tables(rules, None, ruled=False) == ["b"] and table_requests.choose_tables(
        rules, "a", ruled=False
    ) == ["a"]
    assert table_requests.choose_tables(rules, None, ruled=True) == ["a", "b"]
    with pytest.raises(SpecError, match="there is no table 'c'"):
        table_requests.choose_tables(rules, "c", ruled=False)
    with pytest.raises(SpecError, match="no table has a rule that deletes rows"):
        table_requests.choose_tables({"a": False}, None, ruled=False)


def test_a_dry_run_in_words():
    answer = {
        "table": "default", "rows": 1000, "going": 300, "fraction": 0.3, "max_fraction": 0.2,
        "below": {"user": 250}, "unseen": {"user": 20, "item": 30},
    }  # fmt: skip
    assert table_requests.format_dry_run(answer) == [
        "table default: 300 of 1,000 rows would be deleted (30.0%; more than max_shrink_fraction = 20.0%: "
        "needs --allow)",
        "  slot   score below        unseen",
        "  user           250            20",
        "  item             0            30",
    ]
    assert table_requests.format_dry_run({**answer, "going": 0, "fraction": 0.0, "below": {}, "unseen": {}}) == [
        "table default: 0 of 1,000 rows would be deleted (0.0%; within max_shrink_fraction = 20.0%)"
    ]


def test_a_shrink_says_how_many_rows_were_counted(rank0s):
    rank0s.run(1)
    rank0s.answers = [NotYet("the rows are being counted"), {"rows": 1000, "going": 300}]
    [shrunk] = table_requests.shrink(rank0s, ["default"], {"delete_below": 0.5, "allow": True}, soon())
    assert str(shrunk) == (
        "table default is shrunk from version 7 on; 300 of 1,000 rows met the rule when they were counted"
    )
    assert [asked["do"] for asked in rank0s.asked] == ["dry_run", "dry_run", "ask"]


def test_a_shrink_that_waits_is_an_alarm_that_names_the_command():
    held = {"a": {"fraction": 0.315, "why": "the day jumped", "command": "headrace shrink JOB.TOML --table a --allow"}}
    told = alarms(read(Status, {"operations": {"shrinking": {"held": held}}}))
    assert told == {
        Alarm.SHRINK: "a shrink waits, for it would take too much: table a, 31.5% of its rows, since the day "
        "jumped: `headrace shrink JOB.TOML --table a --allow` lets them go"
    }
    assert alarms(read(Status, {"operations": {"shrinking": {"held": {}}}})) == {}


def test_clicks_of_a_join_that_find_no_impression_are_an_alarm_above_one_percent():
    assert alarms(read(Status, {"clicks_unmatched": 0.01})) == alarms(read(Status, {"clicks_unmatched": None})) == {}
    assert (
        "more than 1% of recent clicks find no impression"
        in alarms(read(Status, {"clicks_unmatched": 0.011}))[Alarm.CLICKS]
    )


def test_slots_outside_their_bounds_and_a_rollback_are_alarms_in_words():
    rollback = {"back": "auc fell", "current": "t1/0000000005-base", "trouble": None}
    outside = {"user": {"why": "coverage is below 0.9", "action": "alarm", "since": 4}}
    operations = {"exporting": {"serving": {"rollback": rollback}}, "guards": {"outside": outside}}
    assert alarms(read(Status, {"operations": operations})) == {
        Alarm.ROLLBACK: "exports of serving are held: auc fell; current.json went back to t1/0000000005-base",
        Alarm.GUARDS: "slots are outside their bounds: slot user: coverage is below 0.9; `headrace doctor` says more",
    }
    rollback["trouble"] = "none exists"
    told = alarms(read(Status, {"operations": {"exporting": {"serving": {"rollback": rollback}}}}))[Alarm.ROLLBACK]
    assert told == "exports of serving: auc fell; current.json cannot go back: none exists"
    stuck = {"metric": "auc", "stuck": True}
    told = alarms(read(Status, {"operations": {"exporting": {"serving": {"rollback": stuck}}}}))[Alarm.ROLLBACK]
    assert told == "exports of serving: auc has fallen, and no export from before is promoted"


COUNTED = {
    "kind": "count", "exact": False, "n": 3, "estimate": 2.0, "agrees": False, "too_high_by_at_most": 1.0,
    "with_probability": 0.98, "bucket_units": 7, "text": "count 3: seen about 2 times (sketch, at most +1 too high)",
}  # fmt: skip
ROW = {
    "slot": "user", "sign": 5, "table": "default", "group": 0, "key": 99, "bucket": 3, "row": True, "day": 9,
    "sweeping": False, "admission": [COUNTED], "show": 4.0, "click": 1.0,
    "score": 1.3, "delta_score": 0.5, "last_seen_day": 7, "unseen_days": 2, "changed_version": 12,
    "weights": [0.25, -1.0], "leaves_after_days": 28,
}  # fmt: skip


def test_what_is_known_of_a_key_in_words():
    assert list(row.format_explanation(ROW)) == [
        "slot user, sign 5: table default, group 0",
        "key 99, bucket 3",
        "admission: admitted; it must be admitted again if its row is deleted",
        "admission: count 3: seen about 2 times (sketch, at most +1 too high)",
        "score 1.3: shows 4, clicks 1",
        "delta_score 0.5; changed in version 12",
        "last seen on day 7, 2 days ago",
        "if it is never seen again, a shrink deletes it in 28 days",
        "weights 0.25 -1",
    ]
    assert "last seen on day 7, 1 day ago" in row.format_explanation({**ROW, "unseen_days": 1})
    assert "the next shrink deletes it" in row.format_explanation({**ROW, "leaves_after_days": 0})
    frozen = list(row.format_explanation({**ROW, "frozen": True}))
    assert any(
        line.startswith("weights") and line.endswith("its slot is frozen, so they stay as they are") for line in frozen
    )
    assert any("it stays" in line for line in row.format_explanation({**ROW, "leaves_after_days": None}))


def test_the_rows_with_most_shows_in_words():
    first = {"slot": "user", "sign": "17", "show": 1234.0, "click": 2.0, "unseen_days": 3}
    of_gone = {**first, "slot": None, "sign": "5", "show": 9.0}
    unseen = [{"from_days": days, "rows": 1000 * (days + 1)} for days in (0, 1, 3, 90)]
    found = {"rows": [first, of_gone], "unseen": unseen, "scanned": 5, "total": 9, "commit": "t1-2-g1"}
    assert list(row.format_ranking(found)) == [
        "5 of 9 rows were looked at, in the commit t1-2-g1",
        "slot                 sign  shows  clicks  days unseen",
        "user                   17  1,234       2            3",
        "a slot that is gone     5      9       2            3",
        "rows by days unseen: 0: 1,000, 1–2: 2,000, 3–89: 4,000, 90+: 91,000",
    ]
    of_a_run = {"rows": [], "unseen": unseen[:1], "scanned": 9, "total": 9}
    assert list(row.format_ranking(of_a_run)) == ["9 rows were looked at", "rows by days unseen: 0+: 1,000"]


def test_what_is_known_of_a_key_without_a_row_in_words():
    without = {name: ROW[name] for name in ("slot", "sign", "table", "group", "key", "bucket", "day")} | {"row": False}
    assert list(row.format_explanation({**without, "admission": [], "shard": 1}))[1:] == [
        "key 99, bucket 3, shard 1",
        "it has no row: it was never pushed, or its row was deleted",
    ]
    assert list(row.format_explanation({**without, "admission": ROW["admission"]}))[-1] == "it has no row"
