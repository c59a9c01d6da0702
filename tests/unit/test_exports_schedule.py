"""When an export is due, of which kind, and why; what is known of a stream is a fold over log and closes."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import plain, typed
from headrace.trainer.config import ExportSection
from headrace.trainer.exports.stream_state import (
    ExportFacts,
    ExportStreamState,
    LoggedExport,
    ScheduleInput,
    arithmetic_of,
    decide,
    interval_began,
)
from headrace.trainer.journal.records import ExportOperation
from tests.fakes.cut import SHARED, export, exported

HOUR = 3600.0
FACTS = ExportFacts({}, {})
HOURLY = ExportSection(base=24 * HOUR, delta=HOUR)


def now(time_s=0.0, **more):
    return ScheduleInput(**({"time_s": time_s, "timeline": "t1", "arithmetic": "a", "shared": SHARED} | more))


def chain_after(*bodies, begun_s=0.0, fresh=True):
    """A chain that saw these operations, then events."""
    chain = ExportStreamState()
    chain.saw(begun_s, None, 1)
    for body in bodies:
        if isinstance(body, ExportOperation):
            chain.ordered(body, FACTS, tracks=True)
        else:
            chain.over(body)
    if fresh:
        chain.saw(begun_s, None, 1)
    return chain


def based(version=1, at_s=0.0, **more):
    """A chain whose base is complete."""
    body = export(version, at_s=at_s, **more)
    return chain_after(body, exported(body))


# Time


@given(st.floats(0, 4e9), st.floats(0, 4e9), st.sampled_from([60.0, HOUR, 24 * HOUR, 7.0]))
def test_an_interval_is_entered_at_its_first_instant_since_the_epoch(last_s, now_s, interval_s):
    crossed = any(
        last_s < k * interval_s <= now_s
        for k in range(math.floor(last_s / interval_s), math.floor(last_s / interval_s) + 3)
    )
    assert interval_began(interval_s, last_s, None, now_s) == (crossed or now_s < last_s - interval_s)


def test_a_clock_set_back_from_2099_does_not_hold_exports_up():
    chain = based(at_s=4.07e9)
    assert decide(HOURLY, chain, now(1.7e9)).kind == "base"
    chain = based(at_s=1.7e9)
    assert decide(HOURLY, chain, now(1.7e9 - HOUR)) is None, "it does not hurry either"


def test_the_first_export_is_a_base_at_the_first_whole_interval_after_the_beginning():
    chain = chain_after(begun_s=10 * HOUR + 5)
    assert decide(HOURLY, chain, now(11 * HOUR - 1)) is None
    due = decide(HOURLY, chain, now(11 * HOUR))
    assert (due.kind, due.parent, due.why) == ("base", None, "each 1h; a base, for it is the stream's first")


def test_deltas_follow_by_the_hour_and_a_base_by_the_day():
    chain = based(at_s=10 * HOUR)
    assert decide(HOURLY, chain, now(11 * HOUR - 1)) is None
    due = decide(HOURLY, chain, now(11 * HOUR))
    assert (due.kind, due.parent.name, due.all, due.why) == ("delta", "0000000001-base", False, "each 1h")
    due = decide(HOURLY, chain, now(24 * HOUR))
    assert (due.kind, due.why) == ("base", "each 1d")


def test_without_events_or_a_clock_nothing_is_due():
    assert decide(HOURLY, chain_after(), now(None)) is None
    assert decide(HOURLY, based(), now(None)) is None
    quiet = based()
    quiet.fresh = False
    assert decide(HOURLY, quiet, now(100 * HOUR)) is None, "nothing changed since"
    quiet.touched()
    assert decide(HOURLY, quiet, now(100 * HOUR)) is not None, "a row was forgotten"


def test_only_one_is_made_at_a_time_and_what_falls_due_meanwhile_is_merged():
    body, delta = export(1), export(5, "delta", at_s=HOUR)
    chain = chain_after(body, exported(body), delta)
    assert decide(HOURLY, chain, now(3 * HOUR)) is None
    chain.over(exported(delta))
    due = decide(HOURLY, chain, now(3 * HOUR))
    assert (due.kind, due.parent.version) == ("delta", 5)


def test_a_sweep_is_waited_for_where_its_table_is_exported():
    assert decide(HOURLY, based(), now(HOUR, sweeping=["default"])) is None
    assert decide(HOURLY, based(), now(HOUR, sweeping=["other"])) is not None


# The end, wishes


def test_the_end_of_the_stream_calls_for_one_more_if_anything_came_since():
    chain = based()
    assert decide(HOURLY, chain, now(1.0)) is None
    assert decide(HOURLY, chain, now(1.0, ended=True)).why == "the end of the stream"
    assert decide(HOURLY.model_copy(update={"at_end": False}), chain, now(1.0, ended=True)) is None
    chain.fresh = False
    assert decide(HOURLY, chain, now(1.0, ended=True)) is None
    assert decide(ExportSection(), chain_after(), now(None, ended=True)).kind == "base"


def test_the_end_does_not_try_again_and_again_what_failed():
    body = export(1)
    chain = chain_after(body, exported(body, "failed"), fresh=False)
    assert decide(HOURLY, chain, now(1.0, ended=True)) is None
    assert decide(HOURLY, chain, now(HOUR)).kind == "base", "but when the next is due"


def test_a_person_gets_what_is_asked_for_or_a_base_and_why():
    quiet = based()
    quiet.fresh = False
    assert decide(HOURLY, quiet, now(1.0, requested="delta")).kind == "delta"
    assert decide(HOURLY, quiet, now(1.0, requested="base")).why == "asked for"
    due = decide(HOURLY, chain_after(), now(1.0, requested="delta"))
    assert (due.kind, due.why) == ("base", "asked for; a base, for it is the stream's first")


# What must be a base


@pytest.mark.parametrize(
    ("chain", "more", "why"),
    [
        (based(), {"timeline": "t2"}, "it is the first of timeline t2"),
        (based(), {"arithmetic": "b"}, "libraries or hardware changed"),
        (based(), {"shared": replace(SHARED, dtype="int8")}, "dtype changed"),
        (based(), {"shared": replace(SHARED, tables=["a"], address="/x")}, "address and tables changed"),
        (based(), {"parent_gone": True}, "its parent 0000000001-base is gone"),
    ],
)
def test_a_delta_becomes_a_base_and_says_why(chain, more, why):
    due = decide(HOURLY, chain, now(HOUR, **more))
    assert (due.kind, due.why) == ("base", f"each 1h; a base, for {why}")


def test_after_a_fork_the_next_is_a_base_and_then_deltas_again():
    chain = based()
    chain.forked = True
    assert "gave other results" in decide(HOURLY, chain, now(HOUR)).why
    body = export(2, at_s=HOUR)
    chain.ordered(body, FACTS, tracks=True)
    chain.over(exported(body))
    chain.fresh = True
    assert decide(HOURLY, chain, now(2 * HOUR)).kind == "delta"


def test_changes_that_no_commit_kept_make_a_base():
    chain = based()
    chain.tracked = False
    assert "did not record" in decide(HOURLY, chain, now(HOUR)).why


def test_after_a_delta_that_failed_the_next_takes_all_from_the_same_parent():
    base, delta = export(1), export(2, "delta", at_s=HOUR)
    chain = chain_after(base, exported(base), delta, exported(delta, "failed", error="no room"))
    due = decide(HOURLY, chain, now(2 * HOUR))
    assert (due.kind, due.parent.version, due.all) == ("delta", 1, True)
    assert chain.failed == "0000000002-delta: no room" and chain.needs_since("t1") == 1
    again = export(3, "delta", at_s=2 * HOUR)
    chain.ordered(again, FACTS, tracks=True)
    chain.over(exported(again))
    chain.fresh = True
    assert not decide(HOURLY, chain, now(3 * HOUR)).all


def test_after_a_base_that_failed_the_next_is_a_base():
    first, base = export(1), export(2, at_s=HOUR)
    chain = chain_after(first, exported(first), base, exported(base, "failed"))
    due = decide(HOURLY, chain, now(2 * HOUR))
    assert due.kind == "base" and "a base failed (0000000002-base: it failed)" in due.why


def test_a_delta_that_can_never_be_made_is_followed_by_a_base_at_once_but_a_base_is_not():
    base, delta = export(1), export(2, "delta", at_s=HOUR)
    chain = chain_after(base, exported(base), delta, exported(delta, "failed", final=True, error="parent gone"))
    due = decide(HOURLY, chain, now(HOUR + 1))
    assert due.kind == "base" and "parent gone" in due.why
    redone = export(3, at_s=HOUR + 1)
    chain.ordered(redone, FACTS, tracks=True)
    chain.over(exported(redone, "failed", final=True))
    assert decide(HOURLY, chain, now(HOUR + 2)) is None


# The fold


def test_what_commits_must_keep():
    chain = ExportStreamState()
    assert chain.needs_since("t1") is None
    base = export(4)
    chain.ordered(base, FACTS, tracks=True)
    assert chain.needs_since("t1") == 4, "from the base's own commit on"
    chain.over(exported(base))
    delta = export(6, "delta")
    chain.ordered(delta, FACTS, tracks=True)
    assert chain.needs_since("t1") == 4, "the delta may fail"
    chain.over(exported(delta))
    assert chain.needs_since("t1") == 6 and chain.needs_since("t2") is None
    chain.ordered(export(9), FACTS, tracks=True)
    assert chain.needs_since("t1") == 9, "after a base that fails comes a base"
    chain.ordered(export(10), FACTS, tracks=False)
    assert chain.needs_since("t1") is None


def test_the_lowest_event_time_is_since_the_parent():
    base, delta = export(1), export(2, "delta")
    chain = ExportStreamState()
    chain.saw(9.0, (5.0, 9.0), 1)
    chain.ordered(base, FACTS, tracks=True)
    chain.saw(12.0, (7.0, 12.0), 1)
    chain.over(exported(base))
    assert chain.low_s == 7.0
    chain.saw(13.0, (10.0, 13.0), 1)
    chain.ordered(delta, FACTS, tracks=True)
    chain.saw(20.0, (18.0, 20.0), 1)
    chain.over(exported(delta, "failed"))
    assert chain.low_s == 7.0, "what the failed one lacked is in the next"


def test_an_end_of_another_export_is_passed_over():
    chain = ExportStreamState()
    chain.ordered(export(2), FACTS, tracks=True)
    chain.over(exported(export(1)))
    chain.over(exported(export(2, timeline="t9")))
    assert chain.flight is not None and chain.newest is None


bodies = st.lists(
    st.tuples(
        st.sampled_from(["saw", "order", "end", "touch"]),
        st.sampled_from(["base", "delta"]),
        st.sampled_from(["complete", "failed"]),
        st.booleans(),
    ),
    max_size=30,
)


def play(chain, steps, begin=0):
    """Have a chain see some steps of a history; nothing is cut while something is in flight."""
    for number, (what, kind, outcome, flag) in enumerate(steps, begin + 1):
        if what == "saw":
            chain.saw(float(number), (float(number), number + 0.5) if flag else None, int(flag))
        elif what == "order" and chain.flight is None:
            chain.ordered(export(number, kind, at_s=float(number)), ExportFacts({"n": number}, {}), tracks=flag)
        elif what == "end" and chain.flight is not None:
            chain.over(exported(chain.operation, outcome, final=flag))
        elif what == "touch":
            chain.touched()
    return chain


@given(bodies, st.integers(0, 30))
def test_a_chain_goes_on_from_its_state_as_if_nothing_had_happened(steps, at):
    whole = play(ExportStreamState(), steps)
    half = typed(ExportStreamState, json.loads(json.dumps(plain(play(ExportStreamState(), steps[:at])))), "it")
    assert play(half, steps[at:], begin=min(at, len(steps))) == whole


@given(bodies, st.floats(0, 100), st.booleans())
def test_a_delta_always_builds_on_the_newest_complete_export_of_commits_that_kept_changes(steps, time_s, ended):
    chain = play(ExportStreamState(), steps)
    due = decide(ExportSection(base=50.0, delta=5.0), chain, now(time_s, ended=ended))
    if due is not None and due.kind == "delta":
        assert due.parent == chain.newest and chain.tracked and not chain.failed_base
        assert chain.needs_since("t1") == due.parent.version
        assert due.all == bool(chain.failed)
    if due is not None:
        assert chain.flight is None and due.why


def test_a_link_knows_its_path_and_a_fingerprint_has_one_hash():
    assert LoggedExport.of(export(3)).path == "t1/0000000003-base"
    assert arithmetic_of({"a": "1", "b": "2"}) == arithmetic_of({"b": "2", "a": "1"}) != arithmetic_of({"a": "1"})
