"""Decisions about a job by desired and observed state: one line a case."""

from datetime import UTC, datetime

import pytest

from headrace.service.cluster.supervision import Death, RestartLimits
from headrace.service.jobs.decisions import (
    DesiredState,
    DrainLauncher,
    FailJob,
    KillLauncher,
    NoAction,
    ObservedState,
    PauseJob,
    ResumeJob,
    StartLauncher,
    decide,
    phase_of,
    requested_changes,
)
from headrace.service.jobs.errors import WrongPhase
from headrace.service.jobs.host import Action, Desired, Ending, Phase

RUNNING, PAUSED, DRAINED, STOPPED = Desired
NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOW_S, STOP_S = 1000.0, 60.0
LIMITS = RestartLimits(max_restarts=3, window_s=600.0)
WELL, BADLY = Ending(0, "the stream is drained", (), NOW), Ending(1, "no room", ("last",), NOW)


def wanted(desired=RUNNING, ask=1, waited_s=0.0, deaths=()):
    return DesiredState(desired=desired, ask=ask, asked_s=NOW_S - waited_s, deaths=deaths)


def alive(ask=1, **seen):
    return ObservedState(alive=True, ask=ask, **seen)


def dead(ask=1, since_s=0.0, **seen):
    return ObservedState(ask=ask, dead_since_s=NOW_S - since_s, **seen)


@pytest.mark.parametrize(
    ("want", "seen", "act"),
    [
        (wanted(), ObservedState(), StartLauncher("asked to begin")),
        (wanted(PAUSED), ObservedState(), StartLauncher("asked to begin")),
        (wanted(STOPPED), ObservedState(), NoAction("it is not to run")),
        (wanted(DRAINED), dead(), NoAction("it is not to run")),
        (wanted(), alive(), NoAction("it runs")),
        (wanted(), alive(paused=True), ResumeJob("asked to resume")),
        (wanted(PAUSED), alive(), PauseJob("asked to pause")),
        (wanted(PAUSED), alive(paused=True), NoAction("it is paused")),
        (wanted(DRAINED), alive(), DrainLauncher("asked to drain")),
        (wanted(DRAINED, waited_s=1e6), alive(draining=True), NoAction("it is ending")),
        (wanted(STOPPED), alive(), DrainLauncher("asked to stop")),
        (wanted(STOPPED, waited_s=59), alive(draining=True), NoAction("it is ending")),
        (wanted(STOPPED, waited_s=60), alive(draining=True), KillLauncher("asked to stop, not ended after 60 s")),
        (wanted(ask=2), alive(ask=1), DrainLauncher("asked to begin anew")),
        (wanted(ask=2, waited_s=60), alive(ask=1), KillLauncher("asked to begin anew, not ended after 60 s")),
        (wanted(ask=2), dead(ask=1), StartLauncher("asked to begin")),
        (wanted(), dead(ending=WELL), NoAction("it has ended")),
        (wanted(), dead(ending=BADLY), NoAction("it has ended")),
        (wanted(STOPPED), dead(ending=BADLY), NoAction("it has ended")),
        (wanted(), ObservedState(broken="job.json is gone"), NoAction("job.json is gone")),
        (wanted(), dead(foreign="in use"), NoAction("in use")),
        (wanted(ask=2), dead(foreign="in use"), NoAction("in use")),
        (wanted(STOPPED, waited_s=60), alive(broken="launcher.json is damaged"), NoAction("launcher.json is damaged")),
    ],
)  # fmt: skip
def test_what_is_done(want, seen, act):
    assert decide(want, seen, NOW_S, STOP_S, LIMITS) == act


def test_a_launcher_that_died_is_followed_by_another_at_once_and_its_death_remembered():
    act = decide(wanted(), dead(since_s=2.0), NOW_S, STOP_S, LIMITS)
    assert act == StartLauncher("its launcher died; restarting, 1 of 3", Death(NOW_S - 2.0, "its launcher died"))


def test_the_next_one_waits_a_while_counted_from_the_death():
    deaths = (Death(NOW_S - 20, "its launcher died"), Death(NOW_S - 10, "its launcher died"))
    seen = dead(since_s=0.9)
    assert decide(wanted(deaths=deaths), seen, NOW_S, STOP_S, LIMITS) == NoAction(
        "its launcher died; restarting in 1 s, 3 of 3"
    )
    act = decide(wanted(deaths=deaths), seen, NOW_S + 0.1, STOP_S, LIMITS)
    assert isinstance(act, StartLauncher) and act.death.at_s == NOW_S - 0.9


def test_too_many_deaths_are_the_end_until_somebody_asks_again():
    deaths = tuple(Death(NOW_S - age_s, "its launcher died") for age_s in (500, 400, 300))
    act = decide(wanted(deaths=deaths), dead(), NOW_S, STOP_S, LIMITS)
    assert isinstance(act, FailJob) and "died 4 times within 600 s" in act.reason
    assert isinstance(decide(wanted(deaths=deaths, ask=2), dead(), NOW_S, STOP_S, LIMITS), StartLauncher)


def test_deaths_of_long_ago_do_not_count():
    deaths = tuple(Death(NOW_S - 601 - n, "its launcher died") for n in range(3))
    assert isinstance(decide(wanted(deaths=deaths), dead(), NOW_S, STOP_S, LIMITS), StartLauncher)


@pytest.mark.parametrize(
    ("want", "seen", "state", "phase"),
    [
        (wanted(), ObservedState(), "", Phase.STARTING),
        (wanted(), alive(), "", Phase.STARTING),
        (wanted(), alive(), "replaying", Phase.REPLAYING),
        (wanted(), alive(), "training", Phase.TRAINING),
        (wanted(PAUSED), alive(), "training", Phase.TRAINING),
        (wanted(PAUSED), alive(paused=True), "paused", Phase.PAUSED),
        (wanted(), alive(), "restarting", Phase.RESTARTING),
        (wanted(DRAINED), alive(), "training", Phase.DRAINING),
        (wanted(STOPPED), alive(), "training", Phase.DRAINING),
        (wanted(ask=2), alive(ask=1), "training", Phase.RESTARTING),
        (wanted(STOPPED, ask=2), alive(ask=1), "training", Phase.DRAINING),
        (wanted(), alive(ending=WELL), "done", Phase.DRAINING),
        (wanted(), alive(), "done", Phase.DRAINING),  # how it ended is not written down yet
        (wanted(), alive(), "failed", Phase.DRAINING),
        (wanted(), dead(), "training", Phase.RESTARTING),
        (wanted(ask=2), dead(ask=1), "training", Phase.STARTING),
        (wanted(), dead(ending=WELL), "done", Phase.ENDED),
        (wanted(DRAINED), dead(ending=WELL), "done", Phase.ENDED),
        (wanted(STOPPED), dead(ending=WELL), "done", Phase.STOPPED),
        (wanted(STOPPED), dead(), "training", Phase.STOPPED),
        (wanted(), dead(ending=BADLY), "failed", Phase.FAILED),
        (wanted(STOPPED), dead(ending=BADLY), "failed", Phase.FAILED),
        (wanted(), alive(broken="damaged"), "training", Phase.BROKEN),
        (wanted(), dead(foreign="in use"), "", Phase.BROKEN),
        (wanted(STOPPED), dead(foreign="a rewind"), "", Phase.STOPPED),
        (wanted(), dead(foreign="a rewind", ending=WELL), "done", Phase.ENDED),
    ],
)
def test_where_it_stands(want, seen, state, phase):
    assert phase_of(want, seen, state) is phase


def anew(ask):
    return {"desired": RUNNING, "ask": ask, "asked_at": NOW, "deaths": ()}


def to(desired):
    return {"desired": desired, "asked_at": NOW}


@pytest.mark.parametrize(
    ("want", "seen", "action", "changes"),
    [
        (wanted(), alive(), Action.PAUSE, to(PAUSED)),
        (wanted(PAUSED), alive(), Action.PAUSE, {}),
        (wanted(PAUSED), alive(), Action.RESUME, to(RUNNING)),
        (wanted(), alive(), Action.RESUME, {}),
        (wanted(STOPPED), dead(), Action.RESUME, anew(2)),
        (wanted(STOPPED), alive(draining=True), Action.RESUME, anew(2)),
        (wanted(), dead(ending=WELL), Action.RESUME, anew(2)),
        (wanted(), alive(ending=WELL), Action.RESUME, anew(2)),
        (wanted(), dead(), Action.RESUME, {}),
        (wanted(PAUSED), alive(), Action.DRAIN, to(DRAINED)),
        (wanted(STOPPED), alive(), Action.DRAIN, {}),
        (wanted(), dead(ending=WELL), Action.DRAIN, {}),
        (wanted(DRAINED), alive(), Action.STOP, to(STOPPED)),
        (wanted(STOPPED), alive(), Action.STOP, {}),
        (wanted(), dead(ending=BADLY), Action.STOP, {}),
        (wanted(), alive(), Action.RESTART, anew(2)),
        (wanted(PAUSED, ask=4), alive(ask=4), Action.RESTART, anew(5)),
        (wanted(ask=2), alive(ask=1), Action.RESTART, {}),
        (wanted(STOPPED, ask=2), alive(ask=1), Action.RESTART, anew(3)),
    ],
)
def test_what_is_asked_for_is_written_down_once(want, seen, action, changes):
    assert requested_changes(want, seen, action, NOW) == changes


@pytest.mark.parametrize(
    ("want", "seen"), [(wanted(STOPPED), dead()), (wanted(DRAINED), alive()), (wanted(), dead(ending=WELL))]
)
def test_what_has_ended_or_is_to_cannot_be_paused(want, seen):
    with pytest.raises(WrongPhase, match="cannot be paused"):
        requested_changes(want, seen, Action.PAUSE, NOW)


def test_every_action_asked_twice_changes_nothing_the_second_time():
    for action in Action:
        want, seen = wanted(), alive()
        changes = requested_changes(want, seen, action, NOW)
        again = DesiredState(
            desired=changes.get("desired", want.desired), ask=changes.get("ask", want.ask), asked_s=NOW_S, deaths=()
        )
        assert requested_changes(again, seen, action, NOW) == {}
