"""What a service tells, in lines; and whether a JOB is a file here or a job there."""

from functools import partial
from pathlib import Path

import pytest

from headrace.errors import SpecError
from headrace.service.cli.service_output import job_lines, phase_line, progress_lines, status_lines, table_lines
from headrace.service.cli.targets import remote_name
from tests.fakes.shown_page import labels_of

JOB = {"name": "news", "phase": "training", "desired": "running", "trouble": "", "outcome": None}
ENDED = {"code": 1, "reason": "trainer-0 ended first", "lines": ["error: no"], "at": ""}


def test_jobs_stand_below_each_other_with_what_is_wrong_of_them():
    broken = {**JOB, "name": "a-long-name", "phase": "broken", "trouble": "its store went away"}
    failed = {**JOB, "name": "b", "phase": "failed", "outcome": ENDED}
    assert job_lines([JOB, broken, failed]) == [
        "news         training",
        "a-long-name  broken      its store went away",
        "b            failed      ended with 1: trainer-0 ended first",
    ]
    assert job_lines([]) == ["no jobs"]


def test_what_is_wanted_is_told_where_it_is_not_so_yet():
    assert phase_line(JOB) == "news: training"
    assert phase_line({**JOB, "desired": "paused"}) == "news: training; desired: paused"
    assert phase_line({**JOB, "phase": "paused", "desired": "paused"}) == "news: paused"


def test_a_status_has_figures_alarms_and_the_last_words_of_who_died():
    lines = status_lines(
        {**JOB, "phase": "failed", "outcome": ENDED, "events": 1500, "alarms": {"commits": "disk full"}}
    )
    assert lines[0] == "news: failed"
    assert "events 1,500" in lines[1]
    assert lines[2:] == ["ended with 1: trainer-0 ended first", "error: no", "commits: disk full"]


STRAGGLER = {"text": "rank 1 is waited for 31% of the time (rank 0 waits 0.8 s a pass): its pipe is slow"}


def test_a_status_of_a_running_job_names_the_straggler():
    assert status_lines({**JOB, "straggler": STRAGGLER})[-1] == f"straggler: {STRAGGLER['text']}"
    assert not [line for line in status_lines({**JOB, "straggler": None}) if "straggler" in line]


def test_the_live_page_names_the_straggler():
    from headrace.service.ui.job_stream import StreamPart, TimeSpan
    from headrace.service.ui.recorder import Recorder

    async def shown(straggler):
        part = StreamPart("news", Recorder(None), TimeSpan())
        part.refresh({"advice": None, "straggler": straggler, "time_s": {"pipe": 20.5}})

    assert STRAGGLER["text"] in labels_of(partial(shown, STRAGGLER))
    assert STRAGGLER["text"] not in labels_of(partial(shown, None))


def test_a_status_of_a_running_job_has_its_advice():
    assert status_lines({**JOB, "advice": "raise pipe.processes"})[-1] == "advice: raise pipe.processes"
    assert not [line for line in status_lines({**JOB, "advice": None}) if "advice" in line]
    ended = status_lines({**JOB, "advice": "raise pipe.processes", "outcome": ENDED})
    assert not [line for line in ended if "raise" in line], "the lines of the outcome have it"


HELD = {"rows": 1234, "fraction": 0.25, "why": "the day jumped", "command": "let it"}


def test_a_table_tells_rows_memory_slots_and_a_shrink_that_waits():
    table = {"name": "default", "rows": 1234, "bytes": 3 << 20, "dim": 8, "held": HELD, "frozen": ["item", "user"]}
    slots = {"user": {"signs": 2000, "distinct": 17_700.4, "share": 0.25, "name": "user", "new": True}, "none": {}}
    assert table_lines([{**table, "slots": slots}]) == [
        "default: 1,234 rows of dim 8, 3.0 MiB",
        "  a shrink waits: table default, 25.0% of its rows, since the day jumped: `let it` lets them go",
        "  frozen, so their rows do not learn: item, user",
        "  user: signs 2,000, distinct 17,700, share 0.25",
        "  none",
    ]
    assert table_lines([{**table, "rows": None, "bytes": None, "held": None, "slots": {}, "frozen": []}]) == [
        "default: - rows of dim 8"
    ]


def test_a_job_is_watched_to_its_end():
    class Told:
        def events(self, path):
            assert path == "/v1/jobs/news/metrics/stream"
            yield "close", {"version": 1}
            yield "figures", {**JOB, "state": "training", "events": 10, "table_rows": {"t": 5}, "exports": {}}
            yield "end", {"phase": "ended"}
            raise AssertionError("it reads on")

    first, last = progress_lines(Told(), "news")
    assert first.startswith("training  pass -  events 10") and last == "news: ended"


@pytest.mark.parametrize(
    ("job", "url", "name"),
    [
        ("news", "http://x", "news"),
        ("news", None, None),
        ("news.v2", "http://x", "news.v2"),
        ("job.toml", None, None),
        ("folder/job", None, None),
    ],
)
def test_what_ends_in_toml_or_has_a_slash_is_a_file_of_this_machine(job, url, name, monkeypatch):
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    assert remote_name(Path(job), url) == name


def test_a_file_means_the_same_whatever_the_environment_says_but_not_against_the_option(monkeypatch):
    monkeypatch.setenv("HEADRACE_URL", "http://x")
    assert remote_name(Path("job.toml"), "http://x") is None
    with pytest.raises(SpecError, match="job file on this machine"):
        remote_name(Path("job.toml"), "http://y")
