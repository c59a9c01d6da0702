"""The display of a run: as lines of text, and on a terminal."""

import io
import json
import threading

import pytest
from rich.console import Console

from headrace.config import validate
from headrace.dataset.spec.join_section import JoinSection
from headrace.service.monitor import display, lines
from headrace.service.monitor.shows import PlainShow
from headrace.trainer.job_status import Status, read
from headrace.trainer.train.report import waiting_events

STATUS = {
    "job": "news",
    "state": "training",
    "pass": 12,
    "version": 11,
    "events": 220000,
    "samples": 1234567,
    "rejected": {"unparsable": 3, "label missing": 4},
    "events_per_s": 12345.6,
    "samples_per_s": 65432.1,
    "positions": {"a": 200000, "b": 20000},
    "lag": {"a": 1500, "b": 0},
    "metrics": {
        "window": {"ctr": {"auc": 0.73456, "logloss": 0.2, "gauc": 0.6, "slices": {"device": {}}}},
        "life": {"ctr": {"auc": 0.7111}},
        "tensors": {},
    },
    "loss": 0.24999,
    "freshness_s": 1.26,
    "learning": True,
    "tables": {"default": {"rows": 4321, "bytes": 1}},
}
COMMIT = {"version": 9, "age_s": 300.0, "failing": None, "mirror": {"version": 8, "behind_s": 0.0, "trouble": None}}
REPORT = {
    "events": 1000,
    "samples": 5000,
    "rejected": {"unparsable": 7},
    "passes": 3,
    "wall_s": 12.34,
    "metrics": {"life": {"ctr": {"auc": 0.7}}, "window": {"ctr": {"auc": 0.71}}},
    "halves": {"first": {"ctr": {"auc": 0.68}}, "last": {"ctr": {"auc": None}}},
    "digest": "ab" * 32,
}
TABLES = {
    "tables": {
        "default": {
            "rows": 3000, "bytes": 3 << 20,
            "rows_by_slot": {"b": 1000, "longer": 2000}, "bytes_by_slot": {"b": 1 << 20, "longer": 2 << 20},
        }
    },
    "held_shrinks": {
        "default": {"rows": 3000, "going": 2000, "fraction": 2 / 3, "why": "the day jumped", "command": "let it"}
    },
    "time_s": {"pipe": 6.0, "forward": 3.0, "close": 0.99, "commit": 0.01},
    "advice": "60% of the work's time went to pipe: raise pipe.processes",
}  # fmt: skip


def drawn(status, log_lines=()):
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(display.render(read(Status, status), log_lines))
    return console.file.getvalue()


def test_progress_says_how_long_training_waits_for_the_pipe():
    assert "  waits for the pipe 35%" in lines.progress_line(read(Status, {**STATUS, "pipe_wait": 0.35}))
    for share in (None, 0.0, 0.09):
        assert "pipe" not in lines.progress_line(read(Status, {**STATUS, "pipe_wait": share}))


def test_progress_is_one_line():
    assert lines.progress_line(read(Status, STATUS)) == (
        "training  pass 12  events 220,000  samples 1,234,567  12,346 events/s  65,432 samples/s  lag 1,500  "
        "loss 0.2500  ctr AUC 0.7346 (life 0.7111)  rejected 7"
    )


def test_a_line_says_that_collectives_are_not_encrypted_and_how_many_strangers_were_refused():
    open_job = {**STATUS, "interface": "eth0", "refused": {"silent": 1200, "plain_text": 34}}
    line = lines.progress_line(read(Status, open_job))
    assert line.endswith("  over eth0: collectives are not encrypted  refused 1,234 connections and calls")
    closed = lines.progress_line(read(Status, {**STATUS, "interface": None, "refused": {}}))
    assert "encrypted" not in closed and "refused" not in closed


def test_a_frozen_twin_says_that_it_only_predicts():
    assert lines.progress_line(read(Status, {**STATUS, "learning": False})).endswith("  predicts only")
    assert "predicts only" in drawn({**STATUS, "learning": False})


def test_restarts_are_told_with_the_last_death():
    died = {**STATUS, "state": "restarting", "restarts": 2, "last_death": "shard-0 ended first: killed by SIGKILL"}
    told = "restarts 2 (last: shard-0 ended first: killed by SIGKILL)"
    assert lines.progress_line(read(Status, died)).endswith(f"  {told}")
    assert told in drawn(died)
    assert "restarts" not in drawn({**STATUS, "restarts": 0, "last_death": None})


def test_what_is_committed_and_mirrored_is_told():
    committed = {**STATUS, "commit": COMMIT, "generation": 4}
    assert "  committed 9  ctr AUC" in lines.progress_line(read(Status, committed))
    text = drawn(committed)
    for figure in ("committed", "9", "5 min", "mirrored", "8", "generation", "4"):
        assert figure in text, figure


def test_what_is_exported_is_told():
    main = {"version": 8, "name": "0000000008-delta", "age_s": 300.0, "making": "0000000011-base"}
    exporting = {**STATUS, "operations": {"exporting": {"main": main, "more": {}}}}
    assert "  exported main 8, more -  ctr AUC" in lines.progress_line(read(Status, exporting))
    text = drawn(exporting)
    assert "exports main: 0000000008-delta, 5 min ago, making 0000000011-base" in text
    assert "exports more: none yet" in text


TROUBLE = {
    "commit": {**COMMIT, "failing": "/store: full", "mirror": {"version": None, "trouble": "no answer"}},
    "trouble": "training waits",
    "forked": True,
    "passed_over": {"t1-0000000009-g1": "rows has other bytes"},
    "missing": "source clicks: no file matches '*.jsonl' in /jobs/news",
}
ALARMS = [
    "commits fail, version 9 is the last one: /store: full",
    "training waits",
    "the mirror stays at version 0: no answer",
    "forked: results may differ from an undisturbed run, see the workers' lines at the start",
    "damaged commits were passed over: t1-0000000009-g1: rows has other bytes",
    "source clicks: no file matches '*.jsonl' in /jobs/news: the job waits for such files",
]


def test_the_terminal_shows_alarms_and_in_red_those_that_end_the_job():
    console = Console(file=io.StringIO(), width=110, force_terminal=True, color_system="standard")
    console.print(display.render(read(Status, {**STATUS, **TROUBLE}), ()))
    text = console.file.getvalue()
    assert not [alarm for alarm in ALARMS if alarm not in text]
    assert [line for line in text.splitlines() if "\x1b[1;31m" in line] == [
        line for line in text.splitlines() if ALARMS[0] in line or ALARMS[1] in line
    ]


def test_lines_of_text_tell_an_alarm_when_it_goes_on_and_off():
    calm, troubled = read(Status, {**STATUS, "commit": COMMIT}), read(Status, {**STATUS, **TROUBLE})
    assert list(lines.status_changes(troubled, calm)) == [f"ALARM {text}" for text in ALARMS]
    assert list(lines.status_changes(troubled, troubled)) == []
    assert list(lines.status_changes(calm, troubled)) == [f"alarm over: {text}" for text in ALARMS]
    changed = read(Status, {**STATUS, **TROUBLE, "trouble": "still"})
    assert list(lines.status_changes(changed, troubled)) == ["ALARM still"]
    assert next(lines.status_changes(troubled, None)) == f"ALARM {ALARMS[0]}"


@pytest.mark.parametrize("state", ["replaying", "restarting"])
def test_a_recovery_is_a_state(state):
    assert lines.progress_line(read(Status, {**STATUS, "state": state})).startswith(state)
    assert state in drawn({**STATUS, "state": state})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (119, "119.0 s"), (120, "2 min"), (7200, "2 h"), (9e7, "1,042 d")],
)
def test_freshness_is_told_in_the_unit_a_person_would_use(seconds, text):
    assert lines.age(seconds) == text


def test_the_terminal_shows_every_figure():
    text = drawn(STATUS, ["trainer-0| hello"])
    for figure in ("news", "training", "12,346", "65,432", "220,000", "1,234,567", "1,500", "0.2500", "4,321", "1.3 s",
                   "0.7346", "0.7111", "0.6000", "0.2000", "trainer-0| hello"):  # fmt: skip
        assert figure in text, figure


def test_text_of_a_worker_is_never_markup():
    assert "[bold]no[/]" in drawn(STATUS, ["[bold]no[/]"])


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"job": "news", "state": "starting"},
        {key: None for key in STATUS},
        {"commit": None, "passed_over": None, "forked": None, "trouble": None},
        {"commit": {"version": None, "mirror": 3, "failing": None}, "passed_over": ["?"]},
        {"metrics": {"window": None, "life": {"ctr": None}}, "lag": 3, "rejected": [], "tables": {"default": None}},
        {**STATUS, "metrics": {"window": {"ctr": {"auc": None}}}, "loss": "high", "events": True},
    ],
)
def test_what_is_not_known_is_a_dash(status):
    assert "-" in lines.progress_line(read(Status, status))
    assert "events/s" in drawn(status)


def test_the_summary_tells_what_the_report_holds():
    assert list(lines.summary_lines(REPORT)) == [
        "events    1,000",
        "samples   5,000",
        "rejected  7 (unparsable 7)",
        "passes    3",
        "wall time 12.3 s",
        "AUC ctr: life 0.7000, window 0.7100, first half 0.6800, last half -",
    ]


def test_the_summary_tells_of_tables_and_slots_held_shrinks_and_where_the_time_went():
    assert list(lines.summary_lines({**REPORT, **TABLES}))[4:] == [
        "wall time 12.3 s",
        "time      pipe 60%, forward 30%, close 10%",
        "AUC ctr: life 0.7000, window 0.7100, first half 0.6800, last half -",
        "table     default: 3,000 rows, 3.0 MiB",
        "  longer  2,000 rows, 2.0 MiB",
        "  b       1,000 rows, 1.0 MiB",
        "held      table default, 66.7% of its rows, since the day jumped: `let it` lets them go",
        "advice    60% of the work's time went to pipe: raise pipe.processes",
    ]


def test_of_many_slots_the_summary_names_the_largest():
    slots = {f"s{n:02}": n for n in range(30)}
    told = list(lines.summary_lines({"tables": {"t": {"rows": 435, "rows_by_slot": slots}}}))
    assert told[-2:] == ["  s10  10 rows", "  and 10 more slots"] and "  s29  29 rows" in told


def test_the_picture_tells_where_the_time_goes():
    assert "time: pipe 60%, forward 30%, close 10%" in drawn({**STATUS, **TABLES})


def test_the_summary_tells_what_passes_gave_that_were_predicted_first():
    first = {"life": {"ctr": {"auc": 0.65}}, "window": {"ctr": {"auc": 0.6}}}
    metrics = {"metrics": {**REPORT["metrics"], "infer_first": first}}
    *_, last = lines.summary_lines({**REPORT, **metrics})
    assert last == "AUC ctr: life 0.7000, window 0.7100, first half 0.6800, last half -, infer first 0.6500"


def test_the_summary_of_a_softmax_has_its_log_loss_and_recall():
    found = {"auc": None, "logloss": 5.5}
    tensors = {span: {"loss": {"mean": 5.5}, "recall_at_10": {"mean": 0.25}} for span in ("life", "window")}
    report = {"metrics": {"life": {"next": found}, "window": {"next": found}}, "tensors": tensors}
    told = list(lines.summary_lines(report))
    assert told[-2:] == ["log loss next: life 5.5000, window 5.5000", "recall_at_10: life 0.2500, window 0.2500"]


def test_the_summary_of_a_join_tells_how_many_events_still_wait():
    line = "waiting   12 impressions and clicks of the join, whose window has not ended"
    assert line in lines.summary_lines({**REPORT, "waiting": 12})
    assert not [each for each in lines.summary_lines({**REPORT, "waiting": 0}) if each.startswith("waiting")]


@pytest.mark.parametrize(("keys", "waiting"), [({}, 5), ({"max_ahead": "1d"}, 4)])
def test_what_waits_is_the_rows_of_the_join_but_for_its_clock(keys, waiting):
    join = validate(JoinSection, {"label": "click", "key": "id", "window": "1h", **keys})
    assert waiting_events({"join-pending": 5}, join) == waiting
    assert waiting_events({}, join) == 0


def test_the_summary_of_an_empty_run_has_no_metrics():
    assert list(lines.summary_lines({"events": 0, "halves": None})) == [
        "events    0", "samples   -", "rejected  0", "passes    -", "wall time -",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("12:00:01 INFO  trainer-0: hello", "12:00:01 INFO  trainer-0: hello"),
        ("hello", "trainer-0| hello"),
        ("12:00:01 INFO  trainer-01: hello", "trainer-0| 12:00:01 INFO  trainer-01: hello"),
    ],
)
def test_a_line_of_output_names_its_worker_once(text, shown):
    assert lines.labelled("trainer-0", text) == shown


def test_plain_text_tells_progress_only_where_it_has_changed(capsys):
    asked, seen = threading.Semaphore(0), iter([Status(pass_number=1), Status(pass_number=1), Status(pass_number=2)])

    def status():
        answer = next(seen, Status(pass_number=2))
        asked.release()
        return answer

    show = PlainShow(every_s=0.001)
    with show.watching(status):
        for _ in range(4):
            assert asked.acquire(timeout=5)
    show.on_line("trainer-0", "hello")
    said = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in said[:-1]] == ["pass 1", "pass 2"]
    assert said[-1] == "trainer-0| hello"


def test_the_live_display_keeps_the_last_lines_and_leaves_its_last_picture():
    console = Console(file=io.StringIO(), width=110, force_terminal=True, color_system=None)
    show = display.LiveShow(console)
    with show.watching(lambda: read(Status, STATUS)):
        for number in range(display.LOG_LINES + 1):
            show.on_line("trainer-0", f"line {number}")
    last = console.file.getvalue().rpartition("news")[2]
    assert "line 0" not in last
    assert f"line {display.LOG_LINES}" in last


def test_a_recorded_status_survives_json():
    assert drawn(json.loads(json.dumps(STATUS))) == drawn(STATUS)
