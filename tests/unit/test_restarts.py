"""The decision about another generation after a death."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.service.cluster.supervision import (
    MAX_PAUSE_S,
    Death,
    End,
    Restart,
    RestartLimits,
    RunOutcome,
    decide,
    outcome_of_death,
)

LIMITS = RestartLimits(max_restarts=3, window_s=100)
KILLED = outcome_of_death("shard-0", -9)
REASON = "shard-0 ended first: killed by SIGKILL"


def past(*times_s, progress=False):
    return [Death(at_s, REASON, progress) for at_s in times_s]


def test_the_first_restart_is_immediate_and_says_why():
    assert decide(KILLED, [], 5, LIMITS) == Restart(0, f"{REASON}; restarting, 1 of 3")


def test_pauses_grow_with_the_deaths_in_the_window_without_progress_up_to_a_bound():
    limits = RestartLimits(max_restarts=8, window_s=100)
    pauses = [decide(KILLED, past(*range(number)), 10, limits).after_s for number in range(8)]
    assert pauses == [0, 0.5, 1, 2, 4, 8, MAX_PAUSE_S, MAX_PAUSE_S]
    assert decide(KILLED, past(8), 10, limits).reason == f"{REASON}; restarting in 0.5 s, 2 of 8"


def test_a_death_after_progress_is_followed_at_once_and_the_pauses_start_over():
    limits = RestartLimits(max_restarts=9, window_s=100)
    assert decide(KILLED, past(1, 2, 3), 10, limits, progress=True) == Restart(0, f"{REASON}; restarting, 4 of 9")
    after = [*past(1, 2, 3), *past(4, progress=True)]
    pauses = [decide(KILLED, [*after, *past(*[5] * number)], 10, limits).after_s for number in range(4)]
    assert pauses == [0, 0.5, 1, 2]


def test_progress_allows_no_more_restarts_than_none():
    decision = decide(KILLED, past(1, 2, 3, progress=True), 10, LIMITS, progress=True)
    assert isinstance(decision, End)


def test_deaths_before_the_window_do_not_count():
    assert decide(KILLED, past(0, 1, 2), 102, LIMITS).after_s == 0


def test_at_the_limit_the_job_ends_and_every_death_is_listed():
    deaths = [*past(1, 2), Death(3, "trainer-0 ended first: exit code 70 (a bug)")]
    assert decide(KILLED, deaths, 4, LIMITS) == End(
        RunOutcome(
            70,
            "the workers died 4 times within 100 s, more than cluster.max_restarts = 3 allows: "
            "shard-0 ended first: killed by SIGKILL (3 x); trainer-0 ended first: exit code 70 (a bug) (1 x)",
            "shard-0",
        )
    )


def test_max_restarts_0_is_never():
    assert decide(KILLED, [], 5, RestartLimits(max_restarts=0)) == End(KILLED)


@pytest.mark.parametrize("code", [1, 2])
def test_what_would_come_again_is_never_restarted(code):
    outcome = outcome_of_death("trainer-1", code)
    assert decide(outcome, [], 5, LIMITS) == End(outcome)


def test_a_good_end_is_the_end():
    drained = RunOutcome(0, "the stream is drained")
    assert decide(drained, [], 5, LIMITS) == End(drained)


def test_a_death_while_the_job_was_asked_to_stop_ends_it():
    decision = decide(KILLED, [], 5, LIMITS, stop_asked=True)
    assert decision == End(RunOutcome(70, f"{REASON}; not restarted, for the job was asked to stop", "shard-0"))


@given(st.lists(st.floats(0.01, 50), max_size=40), st.integers(0, 5))
def test_never_more_restarts_than_allowed_in_any_window(gaps_s, allowed):
    limits = RestartLimits(max_restarts=allowed, window_s=100)
    deaths, now_s = [], 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        if isinstance(decide(KILLED, deaths, now_s, limits), End):
            assert sum(now_s - 100 < earlier.at_s for earlier in deaths) >= allowed
            return
        deaths.append(Death(now_s, REASON))
        assert sum(now_s - 100 < earlier.at_s for earlier in deaths) <= allowed
