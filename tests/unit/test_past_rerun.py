"""What a rerun trains again, by which spec, and what it says of each pass."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.dataset.stream.source import Segment
from headrace.errors import SpecError
from headrace.service.cluster.worker_plan import plan_job
from headrace.service.history.rerun import compared_passes, courses_of, plan_rerun, print_comparison, replace_store
from headrace.service.spec.job import LoadedJob, load_job
from headrace.trainer.checkpoint.commits import MANIFEST, Commits
from headrace.trainer.checkpoint.rewind import NotPossible, rewind
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import SpecOperation, Void
from tests.fakes.past import DIGESTS, Past
from tests.fakes.records import close

NEWS = Path(__file__).parents[1] / "golden" / "news.toml"


@pytest.fixture
def job(tmp_path):
    loaded = load_job(NEWS)
    return LoadedJob(spec=loaded.spec, raw=loaded.raw, folder=loaded.folder, store=tmp_path / "store")


@pytest.fixture
def past(job):
    """Passes 1 to 3 closed under one spec, a commit of 1 and of 2, pass 4 planned."""
    made = Past(job.store).begin()
    made.log.append(SpecOperation(spec=job.raw))
    made.close(1, a=(0, 100))
    made.commit(1)
    made.close(2, a=(100, 1200))
    made.commit(2)
    made.close(3, a=(1200, 1300))
    made.plan(4, a=(1300, 1400))
    yield made
    made.end()


def commit(past, version):
    return Commits(past.store).read(f"t1-000000000{version}-g1")


def course_of(store, commit):
    """The only one."""
    (course,) = courses_of(store, commit)
    return course


def change(past, job, **keys):
    past.log.append(SpecOperation(spec={**job.raw, **keys}))


def test_what_was_closed_after_the_commit_is_trained_again(past):
    numbers = [each.plan.number for each in course_of(past.store, commit(past, 1)).passes]
    assert numbers == [2, 3]
    assert len(course_of(past.store, None).passes) == 3


def test_it_goes_by_the_spec_that_was_in_force_then(past, job):
    change(past, job, train={"batch_size": 7})
    course = course_of(past.store, commit(past, 2))
    again = replace_store(job, course, past.store / "reruns" / "1")
    assert again.spec.train.batch_size == job.spec.train.batch_size
    assert again.spec.commit.on_replay_mismatch == "warn"
    assert again.spec.store.mirror is None
    assert again.spec.cluster.trainers == 1


def test_it_has_as_many_trainers_as_the_passes_had_and_reads_itself(job):
    cluster = {"launcher": "external", "trainers": {"min": 1, "max": 3}, "readers": 2}
    made = Past(job.store).begin()
    made.log.append(SpecOperation(spec={**job.raw, "cluster": cluster}))
    made.close(1, a=(0, 100))
    made.end()
    again = replace_store(job, course_of(job.store, None), job.store / "reruns" / "1")
    plan = plan_job(again, job.store / "workers" / "g1", generation=1)
    assert (len(plan.trainers), len(plan.readers)) == (1, 0)


def test_a_spec_that_changes_on_the_way_is_told_with_where_one_could_begin(past, job):
    past.log.append(Void(number=4, reason="changed"))
    change(past, job, train={**job.raw["train"], "batch_size": 7})
    past.close(5, a=(1300, 1400))
    with pytest.raises(NotPossible, match="^train.batch_size changed after pass 3, .* a commit of version 3 or later"):
        courses_of(past.store, commit(past, 1))


def test_passes_of_another_spec_or_number_of_trainers_begin_at_the_commit_before_them(past, job):
    past.log.append(Void(number=4, reason="changed"))
    past.commit(3)
    change(past, job, train={**job.raw["train"], "batch_size": 7})
    past.close(5, a=(1300, 1400))
    past.commit(5)
    past.log.append(PassPlan(6, ((Segment("a", 0, 1400, 1450),), (Segment("a", 0, 1450, 1500),))))
    past.log.append(close(6, events=100, samples=100, digests=DIGESTS))
    courses = courses_of(past.store, commit(past, 1))
    assert [[each.plan.number for each in course.passes] for course in courses] == [[2, 3], [5], [6]]
    assert [course.commit.version for course in courses] == [1, 3, 5]
    again = [replace_store(job, course, past.store / "reruns" / "1").spec for course in courses]
    before = job.spec.train.batch_size
    assert [(spec.train.batch_size, spec.cluster.trainers) for spec in again] == [(before, 1), (7, 1), (7, 2)]
    (past.store / "commits" / "t1-0000000005-g1" / MANIFEST).unlink()
    with pytest.raises(
        NotPossible, match="^cluster.trainers changed after pass 5, and there is no commit of version 5"
    ):
        courses_of(past.store, commit(past, 1))


def test_a_change_that_has_no_part_in_the_numbers_does_not_matter(past, job):
    change(past, job, commit={"keep": 7})
    past.close(4, a=(1300, 1400))
    assert len(course_of(past.store, commit(past, 1)).passes) == 3


def test_a_commit_after_which_nothing_was_closed_is_told(past):
    past.commit(3)
    with pytest.raises(NotPossible, match="nothing was closed after version 3"):
        course_of(past.store, commit(past, 3))


def test_what_came_after_a_commit_left_behind_is_not_this_timelines(past):
    past.end()
    rewind(past.store, commit(past, 1), "t2")
    with pytest.raises(SpecError, match="commit t1-0000000002-g1 did not lead to the present state"):
        course_of(past.store, commit(past, 2))


def test_a_timeline_of_a_rewind_is_trained_again_from_a_commit_of_its_past_not_from_the_initial_state(past):
    past.end()
    rewind(past.store, commit(past, 2), "t2")
    with pytest.raises(NotPossible, match="timeline t2 began at commit t1-0000000002-g1; begin at that commit, or"):
        course_of(past.store, None)
    past.generation = 2  # the rewind's
    again = past.begin("t2", "t1-0000000002-g1")
    again.close(3, a=(1200, 1300))
    assert [each.plan.number for each in course_of(past.store, commit(past, 1)).passes] == [2, 3]
    assert [each.plan.number for each in course_of(past.store, commit(past, 2)).passes] == [3]


def test_trainers_are_told_which_log_to_compare_with(past, job):
    course = course_of(past.store, commit(past, 1))
    plan = plan_rerun(plan_job(job, past.store / "workers" / "g1", generation=1), past.store, course)
    assert [each.config["rerun"] for each in plan.trainers] == [
        {"store": str(past.store), "commit": "t1-0000000001-g1", "last": 3}
    ] * len(plan.trainers)


def test_every_pass_is_told_and_only_if_all_were_compared_and_alike_it_is_well(past, capsys):
    course = course_of(past.store, commit(past, 1))
    print_comparison(course, compared_passes(course, [(2, []), (3, [])]))
    assert capsys.readouterr().out.splitlines() == [
        "pass 2: 1,100 events: identical",
        "pass 3: 100 events: identical",
        "2 of 2 passes are identical",
    ]
    passes = compared_passes(course, [(2, ["digests differ in dense", "day were 1, are 2"])])
    assert [each["differences"] for each in passes] == [["digests differ in dense", "day were 1, are 2"], None]
    print_comparison(course, passes)
    assert capsys.readouterr().out.splitlines() == [
        "pass 2: 1,100 events: digests differ in dense; day were 1, are 2",
        "pass 3: 100 events: not compared",
        "0 of 2 passes are identical",
    ]


def test_in_a_mode_without_the_same_bits_passes_are_told_to_be_equal_in_their_counts(past, capsys):
    course = course_of(past.store, commit(past, 1))
    of_async = replace(course, spec={**course.spec, "train": {"mode": "async"}})
    print_comparison(of_async, compared_passes(of_async, [(2, []), (3, [])]))
    assert capsys.readouterr().out.endswith("2 of 2 passes are equal in their counts\n")
