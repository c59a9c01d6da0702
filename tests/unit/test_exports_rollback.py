"""When a stream of exports goes back to an older one, and when it goes on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec import plain, typed
from headrace.trainer.config import ExportSection
from headrace.trainer.exports import pointers
from headrace.trainer.exports.destination import folder_destination
from headrace.trainer.exports.export_messages import ExportRequest
from headrace.trainer.exports.exporter import export, point_back
from headrace.trainer.exports.manifest import ManifestUnusable
from headrace.trainer.exports.rollback import RollbackState, has_fallen
from headrace.trainer.guard_config import RollbackSection
from headrace.trainer.journal.records import RollbackOperation
from tests.fakes.exports import write_export
from tests.unit.test_exporting import HOUR, World
from tests.unit.test_spec import message

SECTION = RollbackSection(falls=0.02, closes=3, reference=5)


def closes(section, values, state=None, promoted=True):
    """A fold over closes; every version is exported, and promoted unless it is held. -> decisions by version."""
    state = state or RollbackState()
    found = {}
    for version, value in enumerate(values, 1):
        state.saw(section, version, value)
        if (decision := state.decide(section)) is not None:
            found[version] = decision
            state.went(version, decision.paths, decision.why)
        if promoted and not state.active:
            state.was_promoted(f"t1/{version}", version)
    return found, state


def test_it_goes_back_to_the_newest_export_before_the_fall_and_on_once_the_metric_is_back():
    found, state = closes(SECTION, [0.7] * 6 + [0.6] * 5 + [0.69] * 4)
    assert {version: (each.kind, each.paths[:2]) for version, each in found.items()} == {
        9: ("back", ("t1/6", "t1/5")), 14: ("on", ()),
    }  # fmt: skip
    assert found[9].why == "auc of the window was more than 0.02 below 0.7000 for 3 closes"
    assert [each.version for each in state.promoted] == [1, 2, 3, 4, 5, 6, 14, 15], "none of the fall is ever a target"


def test_an_export_of_the_fall_that_ends_after_the_rollback_is_no_later_target():
    _, state = closes(SECTION, [0.7] * 6 + [0.6] * 3)
    state.was_promoted("t1/8", 8)
    found, _ = closes(SECTION, [None] * 9 + [0.69] * 4 + [0.6] * 3, state, promoted=False)
    assert [(each.kind, each.paths[:1]) for each in found.values()] == [("on", ()), ("back", ("t1/6",))]


@pytest.mark.parametrize(
    "values",
    [
        [0.7] * 6 + [0.6, 0.6, 0.7] * 4,  # never three in a row
        [0.7] * 6 + [0.68] * 9,  # equal to the bound
        [0.7, 0.7, 0.1, 0.1, 0.1],  # no level yet
        [0.7 - 0.001 * n for n in range(30)],  # a slow decline is the new level
        [None, float("nan")] * 5,
    ],
)
def test_it_stays_where_nothing_fell_for_so_long(values):
    assert closes(SECTION, values)[0] == {}


def test_without_an_older_export_it_cannot_go_back():
    found, state = closes(SECTION, [0.7] * 6 + [0.6] * 5, promoted=False)
    assert found == {} and state.status(SECTION).stuck and state.status(SECTION).bound == pytest.approx(0.68)


def test_log_loss_falls_when_it_rises():
    section = SECTION.model_copy(update={"metric": "logloss"})
    assert has_fallen(section, 0.5, 0.53) and not has_fallen(section, 0.5, 0.4)
    assert list(closes(section, [0.5] * 6 + [0.6] * 3)[0]) == [9]


@given(st.lists(st.sampled_from([0.5, 0.6, 0.69, 0.7, 0.71, None]), max_size=40), st.data())
def test_a_restart_decides_as_if_it_had_not_been(values, data):
    at = data.draw(st.integers(0, len(values)))
    whole, _ = closes(SECTION, values)
    first, state = closes(SECTION, values[:at])
    again = typed(RollbackState, json.loads(json.dumps(plain(state))), "it")
    later = {}
    for version, value in enumerate(values[at:], at + 1):
        again.saw(SECTION, version, value)
        if (decision := again.decide(SECTION)) is not None:
            later[version] = decision
            again.went(version, decision.paths, decision.why)
        if not again.active:
            again.was_promoted(f"t1/{version}", version)
    assert first | later == whole


@given(st.lists(st.sampled_from([0.5, 0.6, 0.69, 0.7, 0.71]), max_size=60))
def test_a_target_is_never_of_the_fall_and_decisions_alternate(values):
    found, _ = closes(SECTION, values)
    kinds = [each.kind for each in found.values()]
    assert kinds == ["back", "on"] * (len(kinds) // 2) + ["back"] * (len(kinds) % 2)
    for version, each in found.items():
        targets = [int(path.removeprefix("t1/")) for path in each.paths]
        assert targets == sorted(targets, reverse=True)
        assert all(target <= version - SECTION.closes for target in targets)


# In a job


@pytest.fixture
def world(tmp_path):
    section = ExportSection(base=HOUR, rollback=RollbackSection(falls=0.05, closes=2, reference=5))
    return World(tmp_path, {"main": section})


def hours(world, values, first):
    """A close each hour with these AUCs; every export is complete, and current unless its facts hold it."""
    for hour, value in enumerate(values, first):
        world.close(hour * HOUR, auc=value)
        request = world.exporter.requests[-1] if world.exporter.requests else None
        if request is not None and request.version == world.version and not request.point:
            world.complete(current="rollback" not in request.facts)
    return [each for each in world.log if isinstance(each, RollbackOperation)]


def test_a_rollback_is_logged_once_points_back_and_holds_exports_until_the_metric_is_back(world):
    [back] = hours(world, [0.7] * 5 + [0.5] * 3, 1)
    assert (back.version, back.paths[0], back.level, back.value) == (7, "t1/0000000005-base", 0.7, 0.5)
    pointing = next(request for request in world.exporter.requests if request.point)
    assert (pointing.version, pointing.point) == (7, tuple(back.paths))


def test_what_was_logged_acts_again_in_a_replay(world):
    [back] = hours(world, [0.7] * 5 + [0.5] * 2, 1)
    again = world.restarted()
    again.close(8 * HOUR, auc=0.5, replay=[back])
    assert again.status().rollback.back == back.why


@pytest.mark.parametrize(
    ("rollback", "words"),
    [
        ("{falls=0.1,task='x'}", "exports.a.rollback.task: there is no task 'x'"),
        ("{falls=0.0}", "exports.a.rollback.falls: "),
        ("{falls=0.1,metric='gauc'}", "exports.a.rollback.metric: needs metrics.gauc_by"),
    ],
)
def test_a_metric_that_the_job_has_not_is_refused(rollback, words):
    assert message(f"exports.a.rollback={rollback}".replace("'", '"'), "metrics={}").startswith(words)


# current.json


def request(folder, *paths, version):
    return ExportRequest(
        job="news", stream="main", section=ExportSection(), kind="base", timeline="t1", version=version, parent=None,
        commit=folder, address=str(folder), stage=folder, tables={}, slots={}, point=paths,
    )  # fmt: skip


@pytest.fixture
def outlet(tmp_path):
    for version in (1, 2, 3):
        write_export(tmp_path / "news" / "t1", "base", version, {})
    found = folder_destination(tmp_path / "news")
    point(found, 3)
    return found


def point(outlet, version):
    path = f"t1/{version:010d}-base"
    pointers.write_current(outlet, pointers.read_manifest(outlet, path), [path])


def current(outlet):
    return pointers.read_current(outlet)["version"]


def test_current_json_goes_back_to_the_first_that_exists_and_only_once(outlet, tmp_path):
    wanted = request(tmp_path, "t1/0000000009-base", "t1/0000000002-base", "t1/0000000001-base", version=4)
    answer = export(wanted, tmp_path / "scratch")
    assert (answer.outcome, answer.path, current(outlet)) == ("complete", "t1/0000000002-base", 2)
    point(outlet, 1)  # a person's choice stays
    assert export(wanted, tmp_path / "scratch").outcome == "complete" and current(outlet) == 1


def test_a_rollback_that_is_repeated_late_does_not_undo_a_later_export(outlet, tmp_path):
    export(request(tmp_path, "t1/0000000001-base", version=2), tmp_path / "scratch")
    assert current(outlet) == 3


def test_without_any_export_from_before_it_says_what_to_do(outlet, tmp_path):
    with pytest.raises(ManifestUnusable, match=r"set exports.main.keep higher"):
        point_back(request(tmp_path, "t1/0000000009-base", version=4), outlet, None)
    assert current(outlet) == 3
