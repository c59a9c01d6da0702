"""The live pages without a browser: downsampled lines, joined closes, formats, and offered actions."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pserver.protocol.table_operations import SLOT_CHANGES
from headrace.service.api.app import OFFERED, ApiSettings, app
from headrace.service.api.forms import FormContext
from headrace.service.api.job_figures import figures_of
from headrace.service.auth.roles import Role
from headrace.service.predict.event_trials import trial_lines, trial_words
from headrace.service.ui import (
    action_catalog,
    format,
    job_history,
    job_learning,
    job_output,
    job_page,
    job_rows,
    job_settings,
    job_stream,
    job_tables,
    job_trial,
    job_versions,
    job_workers,
    new_job,
    overview,
)
from headrace.service.ui.action_catalog import Weight, inputs_of, weight_of
from headrace.service.ui.api_client import routes_of
from headrace.service.ui.charts import (
    MAX_SPARK,
    ChartLine,
    ChartMark,
    lines_chart,
    marks_chart,
    reliability_chart,
    spark_points,
)
from headrace.service.ui.grid import Column, Grid, GridCell
from headrace.service.ui.job_learning import learning_lines, reliability_lines, twin_of
from headrace.service.ui.recorder import Recorder, moment_of
from headrace.service.ui.series import (
    MAX_CLOSES,
    MAX_POINTS,
    append_closes,
    halved,
    metric_line,
    newest,
    thinned,
    within_range,
)
from headrace.service.ui.sessions import IDLE_S, MAX_EACH, Sessions
from headrace.service.ui.sign_in import place_of
from headrace.trainer.job_status import Status, read
from headrace.trainer.spec.changes import hot_keys
from tests.fakes.shown_page import in_order, on_a_page, press

BY_ID = {act.id: act for act in OFFERED}


def close(version, auc=0.5, timeline="t1", minutes=None, task="ctr"):
    at = None if minutes is None else (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes)).isoformat()
    return {"version": version, "timeline": timeline, "event_time": at, "window": {task: {"auc": auc}}}


points = st.lists(st.tuples(st.integers(), st.none() | st.floats(-1e6, 1e6)), max_size=300).map(
    lambda found: [(float(x), y) for x, (_, y) in enumerate(found)]
)


@given(points, st.integers(3, 60))
def test_a_thinned_line_is_part_of_the_line_with_its_ends(line, most):
    kept = thinned(line, most)
    assert len(kept) == min(len(line), most)
    assert kept == [point for point in line if point in kept]  # in order, and nothing made up
    if line:
        assert (kept[0], kept[-1]) == (line[0], line[-1])


def test_a_thinned_line_keeps_a_lonely_peak():
    line = [(float(x), 0.0) for x in range(10_000)]
    line[7_777] = (7_777.0, 1.0)
    assert (7_777.0, 1.0) in thinned(line, 50)


def test_a_list_beyond_its_bound_loses_every_other_one_of_the_older_half():
    assert halved([1, 2, 3, 4], 4) == [1, 2, 3, 4]
    assert halved([1, 2, 3, 4, 5, 6], 4) == [1, 3, 4, 5, 6]
    kept = []
    for number in range(20_000):
        kept = halved([*kept, number], 1_000)
    assert len(kept) <= 1_000 and kept[-1] == 19_999 and kept == sorted(kept)


def test_closes_that_a_rewind_undid_are_gone_from_a_line():
    ours = append_closes([close(1), close(2), close(3)], [close(2, 0.9, "t2")])
    assert [(each["version"], each["timeline"]) for each in ours] == [(1, "t1"), (2, "t2")]
    assert append_closes(ours, []) == ours
    assert len(append_closes([close(n) for n in range(MAX_CLOSES)], [close(MAX_CLOSES)])) < MAX_CLOSES


def test_a_metric_is_over_event_time_where_there_is_any_else_over_versions():
    timed = [close(1, 0.6, minutes=0), close(2, 0.7, minutes=1), close(3, None, minutes=2)]
    assert metric_line(timed, "ctr", "auc", True) == [(1767225600000.0, 0.6), (1767225660000.0, 0.7)]
    assert metric_line(timed, "ctr", "auc", False) == [(1.0, 0.6), (2.0, 0.7)]
    assert metric_line(timed, "cvr", "auc", False) == []


def test_another_job_is_laid_beside_as_far_as_ours_goes():
    ours = [close(n, 0.7) for n in range(3, 6)]
    theirs = [close(n, 0.6) for n in range(1, 10)]
    mine, other = learning_lines(ours, theirs, ("news", "news-frozen"), "auc")
    assert (mine.name, other.name, other.dashed) == ("news", "news-frozen", True)
    assert [x for x, _ in other.points] == [2, 3, 4, 5, 6]
    assert [line.name for line in learning_lines(ours, [], ("news", ""), "auc")] == ["news"]
    assert within_range([(1.0, 1.0)], [(5.0, 1.0), (6.0, 1.0)]) == []


def test_the_frozen_twin_is_the_one_of_that_name():
    assert twin_of("news", ["news", "news-frozen"]) == "news-frozen"
    assert twin_of("news-frozen", ["news", "news-frozen"]) == ""


def test_charts_are_plain_data_within_bounds():
    line = ChartLine("auc", [(float(x), x / 9_999) for x in range(10_000)])
    for options in (
        lines_chart([line, line], by_time=True),
        marks_chart([ChartMark(1.0, "commits", "t1-1")], ["commits"]),
        lines_chart([], by_time=False),
        reliability_chart([ChartLine("ctr", [(0.1, 0.2)])]),
        reliability_chart([]),
    ):
        text = json.dumps(options)
        assert "function" not in text and '":' not in text.replace('": ', "")  # NiceGUI runs keys that begin so
    assert len(lines_chart([line], by_time=True)["series"][0]["data"]) == MAX_POINTS


def test_the_reliability_curve_has_a_line_for_each_task_and_one_that_is_right():
    tenths = [{"prediction": 0.1, "label": 0.2, "weight": 5.0}, {"prediction": 0.5, "label": 0.4, "weight": 5.0}]
    lines = reliability_lines({"ctr": tenths, "new": []})
    assert [(line.name, line.points) for line in lines] == [("ctr", [(0.1, 0.2), (0.5, 0.4)])]
    options = reliability_chart(lines)
    assert [each["data"] for each in options["series"]] == [[[0.1, 0.2], [0.5, 0.4]], [[0, 0], [0.5, 0.5]]]
    assert options["xAxis"]["max"] == 0.5


def test_numbers_are_written_alike_and_none_is_a_dash():
    words = [
        format.format_count,
        format.format_rate,
        format.format_metric,
        format.format_percentage,
        format.format_duration,
        format.format_bytes,
        format.format_time,
    ]
    assert [each(None) for each in words] == ["–"] * len(words)
    assert format.format_count(1234567) == "1,234,567"
    assert (format.format_rate(1234.4), format.format_rate(3.14)) == ("1,234", "3.1")
    assert (format.format_metric(0.76543), format.format_percentage(0.125)) == ("0.7654", "12.5%")
    assert [format.format_bytes(each) for each in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert format.format_time("2026-11-21T17:38:26.808414Z") == "2026-11-21 17:38:26"


def job(phase="training", desired="running", **more):
    known = {"exports": {}, "trouble": "", "outcome": None, "cause": None}
    return {"name": "news", "phase": phase, "desired": desired, **known, **more}


def sensible(found):
    return {act.form.label for act in OFFERED if act.form.possible(found)}


def test_what_makes_sense_follows_the_job():
    assert {"Pause", "Drain", "Stop", "Restart", "Commit", "Change a setting"} <= sensible(job())
    assert not {"Resume", "Rewind", "Export"} & sensible(job())
    assert "Export" in sensible(job(exports={"serving": {}}))
    assert "Resume" in sensible(job("paused", "paused")) and "Pause" not in sensible(job("paused", "paused"))
    of_commits = {"Verify a commit", "Keep a commit", "Release a commit"}
    of_commits.add("Suggest features")  # of which none needs a run
    assert sensible(job("stopped", "stopped")) == {"Resume", "Restart", "Rewind", "Remove a commit", *of_commits}
    assert sensible(job("broken", "running")) == set()


@pytest.fixture(scope="module")
def routes():
    host = SimpleNamespace(records=None, work=SimpleNamespace())
    return routes_of(app(host, ApiSettings.of_a_run()).openapi())


def test_every_act_is_an_operation_of_the_api_and_none_is_a_viewers(routes):
    for act in OFFERED:
        assert routes[act.id].role >= Role.OPERATOR, act.id
        assert routes[act.id].path == act.path
        named = {name for name in re.findall(r"{(\w+)}", act.path) if name != "job"}
        known = named if act.body is None else named | set(act.body.model_fields)
        assert named <= {each.name for each in act.form.fields}
        assert act.form.body is not None or {each.name for each in act.form.fields} <= known


def test_a_form_asks_for_what_the_body_of_its_request_takes():
    def asked(act):
        return [
            (each.name, each.kind.value, each.optional, each.default, each.options) for each in inputs_of(act, known)
        ]

    known = FormContext(job(exports={"serving": {}}), {"tables": {"default": {}}}, ["t1-5", "t1-4"])
    assert asked(BY_ID["pauseJob"]) == asked(BY_ID["makeCommit"]) == []
    assert asked(BY_ID["makeExport"]) == [
        ("stream", "choice", False, None, ["serving"]),
        ("kind", "choice", True, None, ["base", "delta"]),
    ]
    assert asked(BY_ID["shrinkTable"]) == [
        ("table", "choice", False, None, ["default"]),
        ("delete_below", "number", True, None, []),
        ("delete_after_days", "number", True, None, []),
        ("dry_run", "flag", True, True, []),
        ("allow", "flag", True, False, []),
    ]
    assert asked(BY_ID["tickDay"]) == [("to", "number", True, None, [])]
    assert [each[:3] for each in asked(BY_ID["setKeys"])] == [("key", "text", False), ("value", "text", False)]
    assert [each[:3] for each in asked(BY_ID["resizeJob"])] == [
        ("shards", "number", True),
        ("trainers", "number", True),
    ]
    assert asked(BY_ID["rewindJob"]) == [("name", "choice", False, None, ["t1-5", "t1-4"])]
    chosen = FormContext(job(exports={"serving": {}}), exports=["t1/2-base"], given={"name": "t1/2-base"})
    assert [
        each[-2] for each in [(e.name, e.default, e.options) for e in inputs_of(BY_ID["pointToExport"], chosen)]
    ] == [
        None,
        "t1/2-base",
    ]


def test_the_buttons_stand_in_groups():
    labels = {weight: [act.form.label for act in OFFERED if weight_of(act) is weight] for weight in Weight}
    clear, freeze, unfreeze = (f"{each.name.capitalize()} slot" for each in SLOT_CHANGES)
    assert labels == {
        Weight.EVERYDAY: ["Pause", "Resume", "Commit", "Export"],
        Weight.MAINTENANCE: [
            *(
                "Change a setting",
                "Resize",
                "Suggest features",
                "Record a trace",
                "Begin the next day",
                freeze,
                unfreeze,
            ),
            *("Verify a commit", "Keep a commit", "Release a commit", "Serve an export"),
        ],
        Weight.DANGEROUS: [
            *("Drain", "Stop", "Restart", "Delete old rows", "Delete a value", clear, "Remove a commit", "Rewind"),
        ],
    }


def test_a_role_is_offered_what_the_api_says_it_may(routes):
    def offered(role):
        return {
            act.form.label for act in action_catalog.permitted_actions(lambda operation: routes[operation].role <= role)
        }

    assert offered(Role.VIEWER) == set()
    assert offered(Role.OPERATOR) == offered(Role.ADMIN) == {act.form.label for act in OFFERED}


def test_what_was_filled_in_is_sent_as_the_api_takes_it():
    filled = {"table": "default", "delete_below": 0.5, "delete_after_days": 3.0, "dry_run": True, "allow": False}
    names, body = action_catalog.request_of(BY_ID["shrinkTable"], filled)
    assert names == {"table": "default"}
    assert body == {"delete_below": 0.5, "delete_after_days": 3, "dry_run": True, "allow": False}
    assert action_catalog.request_of(BY_ID["tickDay"], {"to": None}) == ({}, {})
    assert action_catalog.request_of(BY_ID["resizeJob"], {"shards": 2.0}) == ({}, {"shards": 2})
    assert action_catalog.request_of(BY_ID["resizeJob"], {"shards": 2.5}) == ({}, {"shards": 2.5})  # for the API
    assert action_catalog.request_of(BY_ID["rewindJob"], {"name": "t1-5"}) == ({"name": "t1-5"}, None)
    assert action_catalog.request_of(BY_ID["pauseJob"], {}) == ({}, None)
    with pytest.raises(ValueError, match="Key: must be filled in"):
        action_catalog.request_of(BY_ID["setKeys"], {"key": "", "value": "1"})


@pytest.mark.parametrize(
    ("text", "value"), [("0.02", 0.02), ("none", None), (" 3 ", 3), ("true", True), ("a b", "a b")]
)
def test_a_setting_is_what_its_text_means(text, value):
    assert action_catalog.request_of(BY_ID["setKeys"], {"key": " train.x ", "value": text}) == (
        {},
        {"keys": {"train.x": value}},
    )


def test_an_answer_that_is_no_operation_is_told_in_words():
    assert action_catalog.answered_words(BY_ID["pauseJob"], "news", {"desired": "paused"}).endswith("will be paused.")
    told = action_catalog.answered_words(BY_ID["pointToExport"], "news", {"path": "t1/2-base", "failed_gates": []})
    assert told == "Serve an export: it is done.\npath: t1/2-base"
    assert action_catalog.answered_words(BY_ID["deleteCommit"], "news", None) == "Remove a commit: it is done."


def test_two_versions_are_compared_by_what_is_known_of_both():
    commit = {"name": "t1-5", "timeline": "t1", "version": 5, "events": 10, "rows": 7, "bytes": 2048}
    close = {"window": {"ctr": {"auc": 0.75, "logloss": None}}}
    first = job_versions.figures_of_version(commit, None)
    second = job_versions.figures_of_version({**commit, "events": 30, "bytes": 1024}, close)
    rows = {key: [cell.text for cell in cells] for key, cells in job_versions.compared_rows(first, second)}
    assert rows["events"] == ["events", "10", "30", "+20"]
    assert rows["bytes"] == ["bytes", "2.0 KiB", "1.0 KiB", "-1.0 KiB"]
    assert rows["window AUC"] == ["window AUC", "–", "0.7500", "–"]
    assert job_versions.key_of({**commit, "stream": "s"}) == "s/t1/t1-5"
    [(_, cells)] = job_history.commit_rows(
        [{**commit, "made_at": None, "own_bytes": None, "next": True, "held_by": [], "damaged": None}],
        job_history.closes_by_version([{**close, "timeline": "t1", "version": 5}]),
    )
    assert [cell.text for cell in cells[4:6]] == ["0.7500", "–"]


def test_a_chart_shows_the_newest_part_of_a_line():
    line = [(float(x), float(x)) for x in range(10)]
    assert newest(line, 2.0) == line[7:] and newest(line, 0) == line and newest([], 5) == []


def test_the_lag_of_many_partitions_has_a_line_for_the_sum():
    moments = [moment_of(read(Status, {"lag": {f"p{n}": n for n in range(20)}}), 1.0)]
    lines = job_stream.lag_lines(moments)
    assert [line.name for line in lines[:3]] == ["all partitions", "p19", "p18"] and len(lines) == 8
    assert lines[0].points == [(1000.0, 190)]


def test_a_rejected_event_is_shown_as_text_and_counted_by_reason():
    event = {"pass_number": 3, "rank": 0, "partition": "a", "position": 7, "reason": "unparsable"}
    [(_, cells), (_, other)] = job_output.rejected_rows(
        [{**event, "detail": "no JSON", "text": "<b>"}, {**event, "detail": "", "text": None}]
    )
    assert (cells[-1].text, cells[-1].raw) == ("<b>", True) and "keep_bytes" in other[-1].text and not other[-1].raw
    rows = job_output.reason_rows({"few": 1, "many": 9}, 100)
    assert [[cell.text for cell in cells] for _, cells in rows] == [["many", "9", "9.0%"], ["few", "1", "1.0%"]]


def test_hot_keys_are_suggested_of_the_tables_there_are():
    keys = hot_keys({"tables": {"default": {"dim": 8, "optimizer": {"kind": "adagrad", "lr": 0.05}}}})
    assert "tables.default.optimizer.lr" in keys and "tables.default.delete_below" in keys
    assert not [key for key in keys if "*" in key or "#" in key or key.endswith("dim")]


def test_an_operation_tells_what_came_of_it():
    def told(result=None, problem=None):
        return action_catalog.outcome_lines({"result": result, "problem": problem})

    assert told({"name": "t1-12", "rows": 12345}) == ["name: t1-12", "rows: 12,345"]
    assert told({"said": "export made", "name": "x"}) == ["export made"]
    assert told({"lines": ["a", "b"]}) == ["a", "b"]
    assert told(None, {"title": "Conflict", "detail": "it runs"}) == ["it runs"]
    counted = {
        "table": "t",
        "rows": 10,
        "going": 5,
        "fraction": 0.5,
        "max_fraction": 0.1,
        "below": {"a": 5},
        "unseen": {},
    }
    assert "5 of 10 rows would be deleted" in told(counted)[0]
    gain = {"auc": 0.0123, "logloss": -0.01, "p": 0.001, "rows": 1200}
    slots = {"user": {**gain, "saved": 1200, "drop": False}, "hour": {**gain, "auc": -0.1, "saved": 24, "drop": True}}
    feature = {"kind": "cross", "of": ["a", "b"], **gain, "slot": {"name": "a_b", "cross": ["a", "b"]}}
    measured = {
        **{"events": 2000, "rejected": 0, "newest": True, "samples": 1900, "auc": 0.7, "rows": 2424},
        **{"features": [feature], "slots": slots, "admission": {}},
    }
    text = told(measured)
    assert text[0].split() == "features that pay, each on top of those before AUC p costs rows".split()
    assert text[1].split() == ["a_b", "+0.0123", "0.0010", "1,200"]
    assert text[4].split() == ["hour", "-0.1000", "0.0010", "24", "1.0%", "drop"] and len(text[1]) == len(text[0])
    assert "1,900 samples of the newest 2,000 events" in text[7] and 'cross = ["a", "b"]' in text


def test_nothing_loads_nicegui_before_somebody_asks_for_a_page():
    folder = Path(action_catalog.__file__).parent
    loads = {path.stem for path in folder.glob("*.py") if re.search("^(import|from) nicegui", path.read_text(), re.M)}
    asked_for, met = ["mount"], set()
    while asked_for:
        met.add(name := asked_for.pop())
        found = re.findall(r"^from headrace\.service\.ui\.(\w+) import", (folder / f"{name}.py").read_text(), re.M)
        asked_for += [each for each in found if each not in met]
    assert len(loads) > 5
    assert not met & loads


def test_how_a_job_failed_is_told_with_its_code():
    outcome = {"code": 1, "reason": "trainer-0 died", "lines": ["boom"], "at": "2026-11-21T17:38:26Z"}
    assert "trainer-0 died" in format.outcome_words(job("failed", outcome=outcome))
    assert format.outcome_words(job("ended", outcome={**outcome, "code": 0})) == ""


def test_the_cause_stands_in_the_list_of_jobs_and_not_twice_at_the_head():
    cause = {"kind": "waiting", "text": "pass 1 stands still", "advice": "Look at the pipe."}
    figures = {"alarms": {"stalled": "pass 1 stands still", "mirror": "it falls behind"}, "cause": cause}
    cell = overview.row_of(job(), figures)[1][-1]
    assert (cell.text, cell.tone) == ("pass 1 stands still; it falls behind", "warn")
    assert overview.row_of(job("failed"), {"cause": {**cause, "kind": "failed"}})[1][-1].tone == "bad"
    starting = overview.row_of(job("starting"), {"step": "Shards start."})[1][-1]
    assert (starting.text, starting.tone) == ("Shards start.", "")
    shown = {**figures_of(Status()).model_dump(), **job(), **figures}
    assert [text for _, text in job_page.notes_of(shown)] == ["it falls behind"]


def test_an_empty_list_says_why_it_is_empty():
    assert "by device" in job_learning.no_slice_text({"metrics": {"slices": ["device"]}})
    assert "metrics.slices" in job_learning.no_slice_text({})
    making = job(exports={"main": {"making": "0000000011-delta"}}, spec={}, commit=None)
    assert "being made: main: 0000000011-delta" in job_history.no_export_text(making)
    assert "of main" in job_history.no_export_text(job(spec={"exports": {"main": {}}}))
    assert "no section" in job_history.no_export_text(job(spec={}))
    assert "every 5s" in job_history.no_commit_text(job(spec={"commit": {"every": "5s"}}, commit=None))
    assert "being written" in job_history.no_commit_text(job(spec={}, commit={"writing": True}))
    assert job_output.no_letter_text({}) == "No event was rejected."
    assert "pipe.dead_letters" in job_output.no_letter_text({"unparsable": 3})
    assert "Shards start." in job_learning.no_close_text(job("starting", step="Shards start."))
    assert "is failed" in job_learning.no_close_text(job("failed", step=""))


def test_a_job_that_trains_with_fewer_than_it_may_is_told_above_its_figures():
    elastic = {"min": 2, "max": 3, "present": 2, "spares": 1, "waits": "goes on with 3 trainers in 9 s", "for_s": 1.2}

    def notes(**more):
        figures = figures_of(read(Status, {"elastic": {**elastic, **more}})).model_dump()
        return job_page.notes_of({**figures, **job()})

    now = "This job has 2 trainers, of 2 to 3, and 1 worker stands by. For 1 s: goes on with 3 trainers in 9 s."
    assert notes(fewer="nothing was heard of the others") == [
        ("warn", "fewer than cluster.trainers.max = 3: nothing was heard of the others"),
        ("", now),
    ]
    assert notes(present=3, spares=0, waits="") == [("", "This job has 3 trainers, of 2 to 3.")]


def test_the_head_has_no_rate_of_a_job_at_rest_and_no_commit_before_the_first():
    def shown(phase, **commit):
        figures = {"events_per_s": 7.0, "samples_per_s": 35.0, "commit": {"writing": True, "age_s": 3.0, **commit}}
        head = job_page.head_figures({**figures_of(read(Status, figures)).model_dump(), **job(phase)})
        return [head[key][:2] for key in ("events_per_s", "committed")]

    assert shown("training", version=0) == [("7.0", "35 samples/s"), ("–", "writing the first")]
    assert shown("training", version=5) == [("7.0", "35 samples/s"), ("5", "writing the next")]
    assert shown("stopped", version=5) == [("–", ""), ("5", "3.0 s ago")]
    assert shown("stopped", version=0) == [("–", ""), ("–", "none yet")]


def test_a_job_that_tunes_says_how_far_it_is_and_then_what_it_has_chosen():
    def notes(**tuning):
        figures = figures_of(read(Status, {"tuning": tuning})).model_dump()
        return job_page.notes_of({**figures, **job()})

    assert notes(trial=3, of=14, name="batch / 4") == [("warn", "tuning: trial 3 of 14: batch / 4")]
    tried = [{"name": "batch / 4", "events": 320, "logloss": 0.5}, {"name": "as it is", "events": 80}]
    [(_, text)] = notes(tried=tried)
    assert text.splitlines()[0] == "This job has chosen its settings: batch / 4."
    assert len(text.splitlines()) == 3
    crosses = {"pairs": [{"of": ["a", "b"], "gain": 0.01}], "samples": 9000, "auc": 0.6, "auc_with": 0.7}
    (_, text), step = notes(name="reads the events", crosses=crosses)
    assert text.splitlines() == [
        "Crosses of its slots: a x b are chosen by 9,000 samples (AUC of a linear model 0.6000, 0.7000 with them).",
        "  a x b  log loss -0.0100",
    ]
    assert step == ("warn", "tuning: reads the events")
    assert "choose crosses" in job_learning.no_close_text(job("tuning", step="Workers choose crosses."))


def test_a_moment_of_many_partitions_keeps_the_sum_of_their_lag():
    few = moment_of(read(Status, {"lag": {"a": 1, "b": 2}, "tables": {"t": {"rows": 3}}, "events_per_s": 7}), 1.0)
    assert (few.lag, few.rows, few.events_per_s, few.at_ms) == ({"a": 1, "b": 2}, 3, 7, 1000.0)
    many = moment_of(read(Status, {"lag": {str(n): 1 for n in range(100)}}), 1.0)
    assert many.lag == {"all": 100} and many.rows is None


def test_freshness_is_in_a_unit_that_a_person_would_use():
    moments = [moment_of(read(Status, {"freshness_s": 7200.0 * n}), float(n)) for n in (1, 2)]
    unit, [line] = job_stream.freshness_line(moments)
    assert unit == "hours" and [y for _, y in line.points] == [2.0, 4.0]
    assert job_stream.freshness_line([])[0] == "seconds"


def test_slices_slots_and_shards_are_rows_of_what_the_api_says():
    slices = {"ctr": {"device": {"1": {"count": 5, "auc": 0.7}, "other": {"count": 0}}}}
    assert job_learning.choices_of(slices) == ["ctr, by device"]
    [(value, cells)] = job_learning.slice_rows(slices, {}, "ctr, by device")
    assert value == "1" and [cell.text for cell in cells] == ["1", "5", "0.7000", "–", "–", "–"]
    table = {"name": "t", "held": None, "slots": {f"s{n}": {"num_samples": n} for n in range(300)}}
    assert len(job_tables.slot_rows([table])) == 300
    [(_, cells)] = job_tables.slot_rows([table | {"slots": {"user": {"drift": 0.3125}}}])
    assert len(cells) == len(job_tables.COLUMNS) and cells[-1].text == "0.3125"
    parts = [{"folder": "shard-0", "rows": {"a": 1, "b": 2}}, {"folder": "shard-1", "rows": {"a": 4}}]
    assert job_tables.rows_by_shard({"parts": parts}) == (["shard-0", "shard-1"], [3, 4])


def test_a_press_on_a_row_is_not_lost_while_rows_come_and_go():
    """Pages hear no press on an element that was replaced while the press was on its way."""
    pressed = []

    async def redrawn():
        shown = Grid((Column("Name"), Column("State")), "", on_open=pressed.append)

        def buttons_of(*names, state):
            shown.show([(name, (GridCell(name, opens=True), GridCell(state))) for name in names])
            return [each for each in in_order() if each.tag == "button" and "opens" in each.classes]

        first = buttons_of("b", "a", "a", state="new")
        more = buttons_of("c", "b", "a", "a", state="old")
        assert [each.text for each in more] == ["c", "b", "a", "a"] and more[1:] == first
        assert buttons_of("a", "c", "b", state="old") == [more[2], more[0], more[1]]
        press(first[0])

    on_a_page(redrawn)
    assert pressed == ["b"]


def test_what_failed_is_red_on_the_timeline():
    commit = {"name": "t1-1", "made_at": "2026-11-21T17:38:26Z", "rows": 5, "damaged": None}
    export = {"stream": "s", "name": "2-base", "made_at": "2026-11-21T17:38:27Z", "kind": "base", "damaged": None}
    marks, rows = job_history.timeline_marks(
        [commit], [{**export, "failed_gates": ["auc"]}, {**export, "failed_gates": []}]
    )
    assert rows == ["commits", "s"]
    assert [mark.color == job_history.RED for mark in marks] == [False, True, False]


def test_of_many_jobs_each_has_its_turn():
    names = [str(n) for n in range(30)]
    assert overview.in_turn(names[:5], 7, 12) == names[:5]
    turns = [overview.in_turn(names, turn, 12) for turn in range(5)]
    assert all(len(each) == 12 for each in turns) and {name for each in turns for name in each} == set(names)


def test_a_job_that_cannot_be_asked_has_a_row_all_the_same():
    told = {"name": "news", "phase": "failed", "trouble": "the store is away", "outcome": None}
    name, cells = overview.row_of(told, None)
    assert name == "news" and cells[0].link == "/jobs/news" and cells[-1].text == "the store is away"


def test_the_first_page_sums_up_all_jobs_and_finds_one():
    jobs = [job("training"), {**job("failed"), "name": "old"}]
    cause = {"kind": "failed", "text": "no file", "advice": ""}
    news = {"name": "news", "events_per_s": 20.0, "freshness_s": 3.0}
    figures = {"news": news, "old": {"name": "old", "events_per_s": 9.0, "freshness_s": 99.0, "cause": cause}}
    tiles = overview.tiles_of(jobs, figures)
    assert tiles["jobs"] == ("2", "1 training, 1 failed", "") and tiles["rate"][0] == "20"
    assert tiles["freshness"][1] == "news" and tiles["wrong"] == ("1", "old", "bad")
    assert overview.tiles_of([], {})["wrong"] == ("0", "", "good")
    assert [overview.matches(jobs[1], *asked) for asked in (("OL", ""), ("ol", "failed"), ("", "training"))] == [
        True, True, False,
    ]  # fmt: skip


def test_a_line_in_a_table_fits_its_box_and_leaves_gaps_out():
    assert spark_points([]) == spark_points([1.0, None]) == ""
    assert spark_points([1.0, None, 3.0]) == "1.0,20.0 95.0,2.0"
    assert spark_points([2.0, 2.0]) == "1.0,20.0 95.0,20.0"
    assert len(spark_points([float(n % 7) for n in range(1_000)]).split()) == MAX_SPARK


def test_alarms_are_kept_with_the_time_they_began_and_ended():
    statuses = {"news": Status(missing="a/*.csv matches no file")}
    jobs = SimpleNamespace(jobs=lambda: [SimpleNamespace(name="news", phase="training")], of=statuses.__getitem__)
    recorder = Recorder(jobs, now_s=lambda: 7.0)
    recorder.look()
    recorder.look()
    statuses["news"] = Status()
    recorder.look()
    changes = recorder.alarm_changes()
    assert [(each.began, each.job, each.at_ms) for each in changes] == [(False, "news", 7000.0), (True, "news", 7000.0)]
    assert "matches no file" in overview.alarm_rows(changes)[0][1][-1].text


def test_output_names_its_worker_once():
    lines = [
        {"at": "2026-11-21T17:39:26.520Z", "worker": "trainer-0", "text": "17:39:26 INFO  trainer-0: hello"},
        {"at": "2026-11-21T17:39:27.520Z", "worker": "shard-1", "text": "plain"},
    ]
    assert job_output.output_text(lines) == "17:39:27 shard-1| plain\n17:39:26 INFO  trainer-0: hello"


def test_a_session_is_over_when_ended_idle_or_crowded_out():
    now = [0.0]
    sessions = Sessions(lambda: now[0], max_sessions=2)
    first, second = sessions.begin("one"), sessions.begin("two")
    assert (sessions.token(first), sessions.token(second)) == ("one", "two")
    assert sessions.token(None) is None and sessions.token("guess") is None
    third = sessions.begin("three")
    assert sessions.token(first) is None and sessions.token(third) == "three"
    sessions.end(third)
    assert sessions.token(third) is None
    now[0] = IDLE_S + 1
    assert sessions.token(second) is None


def test_the_sessions_of_one_token_crowd_out_its_own_alone():
    sessions = Sessions()
    other = sessions.begin("other")
    names = [sessions.begin("mine") for _ in range(MAX_EACH + 1)]
    assert sessions.token(names[0]) is None and sessions.token(names[1]) == "mine"
    assert sessions.token(other) == "other"


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ("/ui/jobs/news", "/ui/jobs/news"),
        ("/ui/", "/ui/"),
        ("", "/ui/"),
        ("https://evil.example/ui/", "/ui/"),
        ("//evil.example/ui/", "/ui/"),
        ("/ui/\r\nSet-Cookie: a=b", "/ui/"),
        ("/ui/..//evil.example", "/ui/"),
        ("/v1/jobs", "/ui/"),
    ],
)
def test_signing_in_leads_to_a_page_of_ours_alone(asked, place):
    assert place_of(asked) == place


def test_a_worker_is_told_with_its_waits_and_those_for_it():
    links = {
        "trainer-0": {"shard-0": {"sent_bytes": 10, "received_bytes": 1, "shared_sent_bytes": 5, "wait_s": 2.0}},
        "trainer-1": {"trainer-0": {"wait_s": 0.5}},
    }
    usage = {"trainer-0": {"machine": "one", "pid": 7, "cores": 0.5, "cpu_s": 9.0, "memory_bytes": 1 << 20}}
    rows = job_workers.worker_rows({"links": links, "usage": usage, "straggler": {"rank": 0}})
    cells = {name: [cell.text for cell in cells] for name, cells in rows}
    assert list(cells) == ["shard-0", "trainer-0", "trainer-1"]
    assert cells["trainer-0"] == [
        *("trainer-0", "trainer", "one", "7", "0.50", "9.0 s", "1.0 MiB", "2.0 s", "0.5 s", "15 B", "1 B"),
        "the others wait for it",
    ]
    assert cells["shard-0"][8] == "2.0 s" and cells["trainer-1"][2] == "–"


JOB = """name = "a"
[sources.clicks]
kind = "files"
[[slots]]
name = "user"
[[slots]]
name = "item"
hash = 9
[tables.default]
dim = 0
"""


def test_an_error_of_a_job_file_stands_at_the_line_of_its_key_or_of_its_section():
    said = "tables.default.dim: at least 1\nslots.1.hash: too few\nsources.clicks.paths: is missing\nno key: is here"
    faults = new_job.faults_of(JOB, said)
    assert [(each.key, each.line) for each in faults] == [
        ("tables.default.dim", 10),
        ("slots.1.hash", 8),
        ("sources.clicks.paths", 2),
        ("", None),
    ]
    assert new_job.faults_of(JOB, "is taken", "body.name")[0] == new_job.Fault("name", "is taken", 1)
    broken = "toml: not TOML: Expected '=' after a key in a key/value pair (at line 3, column 5)"
    assert [each.line for each in new_job.faults_of("# a\u2028b\n[model]\nname\n", broken)] == [3]
    begin, end = new_job.line_range(JOB, 10)
    assert JOB[begin:end] == "dim = 0"


def test_a_tried_event_shows_its_samples_and_the_ids_without_a_row():
    slots = [
        {"name": "user", "kind": "sparse", "values": ["u1", "17"], "missing": ["17"], "more": 3},
        {"name": "age", "kind": "dense", "values": ["0.5"], "missing": [], "more": 0},
    ]
    sample = {"event": 0, "time": None, "predictions": {"ctr": 0.25}, "slots": slots}
    [(key, cells)] = job_trial.sample_rows([sample])
    assert key == "0" and [cell.text for cell in cells] == ["1, of event 1", "0.2500", "1"]
    two = {**sample, "predictions": {"ctr": 0.25, "buys": None}}
    assert job_trial.sample_rows([two])[0][1][1].text == "ctr 0.2500, buys –"
    rows = {key: [cell.text for cell in cells] for key, cells in job_trial.slot_rows(slots)}
    assert rows == {"user": ["user", "sparse", "u1, 17, and 3 more", "17"], "age": ["age", "dense", "0.5", ""]}
    rejected = [{"reason": "unparsable", "events": 1, "first": "event 2: unparsable"}]
    found = {"version": 1200, "commit": "t1-1-g1", "samples": [sample], "left_out": 2, "rejected": rejected}
    assert [*trial_words(found)] == [
        "1 sample, predicted by version 1,200 (t1-1-g1)",
        "2 further samples not shown",
        "1 event rejected: event 2: unparsable",
    ]
    assert [*trial_lines(found)][:3] == [
        "sample 1, of event 1: ctr 0.2500",
        "  user (sparse): u1, 17, and 3 more; without a row: 17",
        "  age (dense): 0.5",
    ]


def test_the_rows_with_most_shows_and_the_days_since_rows_were_seen():
    found = [{"slot": "user", "sign": "17", "show": 1234.0, "click": 2.0, "unseen_days": 3}]
    [(_, cells)] = job_rows.ranked_rows([*found])
    assert [cell.text for cell in cells] == ["user", "17", "1,234", "2", "3"]
    assert job_rows.ranked_rows([{**found[0], "slot": None}])[0][1][0].text == "a slot that is gone"
    parts = [{"from_days": days, "rows": days + 1} for days in (0, 1, 3, 90)]
    chart = job_rows.unseen_bars(parts)
    assert chart["xAxis"]["data"] == ["0", "1–2", "3–89", "90+"] and chart["series"][0]["data"] == [1, 2, 4, 91]


def test_settings_say_where_they_are_from_and_changes_of_the_file_what_takes_them():
    lr = {"key": "tables.default.lr", "file": None, "now": "0.1", "origin": "set"}
    name = {"key": "name", "file": '"x"', "now": '"x"', "origin": "file"}
    rows = job_settings.setting_rows([lr, name])
    assert [[cell.text for cell in cells] for _, cells in rows] == [
        ["tables.default.lr", "0.1", "–", "set while it ran"],
        ["name", '"x"', '"x"', "job file"],
    ]
    assert [key for key, _ in job_settings.setting_rows([lr, name], " LR")] == ["tables.default.lr"]
    change = {"key": "train.batch_size", "was": "256", "now": "512", "note": "", "to_do": "a restart"}
    [(_, cells)] = job_settings.waiting_rows([change])
    assert [cell.text for cell in cells] == ["train.batch_size", "256", "512", "a restart"]


def test_the_newest_trace_is_told():
    done = {"state": "done", "ended": "2026-11-30T10:00:00+00:00", "problem": None, "result": {"said": "trace.json"}}
    assert job_workers.trace_words(done) == "2026-11-30 10:00:00 UTC: trace.json"
    assert job_workers.trace_words({**done, "state": "running"}) == "It is being recorded."
    assert job_workers.trace_words(None) == "No trace was recorded lately."
    assert job_workers.trace_link("a b") == "/trace/a%20b"
