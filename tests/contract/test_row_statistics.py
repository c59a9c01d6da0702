"""The law of statistics of rows: shows and clicks as the last close left them, and what came before in the pass."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.admission_entries import CountEntry
from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.histories import HistoryQuestions
from headrace.pserver.protocol.shards import Gradients, StepScale
from headrace.pserver.protocol.table_operations import ForgetRow, ShrinkRows
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.rows.statistic_kernels import accumulate, accumulate_reference
from headrace.pserver.server.commands import DigestRows, Operate, RestoreCommit
from tests.contract import shards_world as w

GROUP, ASKED, DECAY = 1, {"statistics-x": "default"}, 0.5
SECTION = TableSection(dim=2, init_range=0.5, optimizer=Sgd(kind="sgd"), decay=DECAY)
SHOWN = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda each: (float(max(each)), float(min(each))))
EVENTS = st.lists(st.lists(st.tuples(st.integers(0, 3), SHOWN), min_size=1, max_size=3), max_size=6)
"""Each event has (key, (shows, clicks)). Halves and whole numbers are exact, so that no order of sums shows."""
PASSES = st.lists(st.tuples(EVENTS, st.integers(0, 2)), min_size=1, max_size=3)
"""Events of each pass, and the days that go by at its close."""


def asked(events):
    return [(key, event, shown) for event, of in enumerate(events) for key, shown in of]


def questions(events):
    found = asked(events)
    return HistoryQuestions(
        GROUP,
        w.keys(*(key for key, _, _ in found)).keys_U,
        np.array([event for _, event, _ in found], np.int64),
        np.arange(len(found) + 1) * 2,
        np.array([shown for _, _, shown in found], np.float64).reshape(-1).view(np.uint64),
    )


def learn(shards, events):
    """One step with the shows and clicks of a rank's part."""
    keys = sorted({key for key, _, _ in asked(events)})
    if not keys:
        shards.exchange(0, None, None, None, StepScale(8), w.soon())
        return
    sums = np.array([np.sum([s for key, _, s in asked(events) if key == k], axis=0) for k in keys], np.float32)
    batch = shards.prepare({"default": w.keys(*keys)}, learn=True)
    (rows_UD,) = shards.pull(batch, w.soon()).values()
    push = Gradients(np.ones_like(rows_UD), sums[:, 0].copy(), sums[:, 1].copy())
    shards.exchange(0, batch, {"default": push}, None, StepScale(8), w.soon())


def run(world, passes, first=1):
    """The answers of each pass."""
    found, day = [], 0
    for number, (events, days) in enumerate(passes, first):
        day += days
        cuts = [len(events) * rank // len(world.ranks) for rank in range(len(world.ranks) + 1)]
        parts = [events[begin:end] for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]

        def act(rank, shards, number=number, parts=parts, day=day):
            shards.open_pass(number, w.soon())
            answer = shards.recall(number, {"statistics-x": questions(parts[rank])}, w.soon())["statistics-x"]
            learn(shards, parts[rank])
            shards.close_pass(day, w.soon())
            return answer.sign_M.view(np.float64).reshape(-1, 2).tolist()

        found.append([pair for of_rank in world.each(act) for pair in of_rank])
    return found


def plain(passes):
    known, found = {}, []
    for events, days in passes:
        found.append([list(pair) for pair in accumulate_reference(asked(events), set(range(4)), known)])
        for key, pair in known.items():
            known[key] = tuple(value * DECAY**days for value in pair)
    return found


def world_of(shards, ranks=1, section=SECTION, **more):
    return w.job(shards, ranks, {"default": section}, histories=ASKED, **more)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sets(st.integers(0, 3)))
def test_the_kernel_tells_what_its_twin_tells(events, counts):
    found = asked(events)
    number_Q, event_Q = (np.array([each[place] for each in found], np.int64) for place in (0, 1))
    added_Q2 = np.array([shown for _, _, shown in found]).reshape(-1, 2)
    value_U2, answer_Q2 = np.zeros((4, 2)), np.empty((len(found), 2))
    accumulate(number_Q, event_Q, added_Q2, np.array([key in counts for key in range(4)]), value_U2, answer_Q2)
    known = {}
    assert [tuple(pair) for pair in answer_Q2.tolist()] == accumulate_reference(found, counts, known)
    assert value_U2.tolist() == [list(known.get(key, (0.0, 0.0))) for key in range(4)]


@settings(max_examples=12, deadline=None)
@given(PASSES)
def test_an_embedded_shard_answers_as_the_twin(passes):
    with world_of(0) as world:
        assert run(world, passes) == plain(passes)


@settings(max_examples=3, deadline=None)
@given(PASSES)
def test_answers_are_those_of_one_trainer_with_any_numbers(passes):
    for shards, ranks in ((2, 2), (3, 3), (w.Narrow(1), 2)):
        with world_of(shards, ranks) as world:
            assert run(world, passes) == plain(passes), (shards, ranks)


@pytest.mark.parametrize("mode", ["async", "geo"])
@settings(max_examples=3, deadline=None)
@given(PASSES)
def test_answers_are_the_same_where_no_rank_waits_for_the_steps_of_another(mode, passes):
    """A rank takes no step before it has its answers, which come once all ranks have asked."""
    for shards, ranks in ((2, 1), (2, 3)):
        with world_of(shards, ranks, mode=mode) as world:
            assert run(world, passes) == plain(passes), (shards, ranks)


@settings(max_examples=3, deadline=None)
@given(PASSES)
def test_one_trainer_has_the_rows_of_sync_in_async(passes):
    def digest(mode):
        with world_of(2, mode=mode) as world:
            return run(world, passes), world.one.call(DigestRows(), w.soon())

    assert digest("async") == digest("sync")


ONE_EVENT = [([[(1, (2.0, 1.0))], [(2, (3.0, 0.0))]], 0)]
ASKS = [([[(1, (0.0, 0.0)), (2, (0.0, 0.0))]], 0)]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3)])
def test_statistics_go_on_from_a_commit_on_other_shards(before, after, tmp_path):
    with world_of(before, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        run(world, ONE_EVENT)
        parts = w.commit(world.one, tmp_path / "commit", 1)
    bounded = SECTION.model_copy(update={"memory": 8 << 20}) if after == 2 else SECTION
    with world_of(after, live=tmp_path / "again", section=bounded) as world:
        world.one.call(RestoreCommit(tmp_path / "commit", parts, 1), w.soon())
        assert run(world, ASKS, first=2) == [[[2.0, 1.0], [3.0, 0.0]]], "with bounded memory, too: no row is loaded"


@pytest.mark.parametrize(
    "operation",
    [
        ForgetRow(table="default", group=GROUP, key=int(w.keys(1).keys_U[0])),
        ShrinkRows(table="default", delete_below=0.5),
    ],
)
def test_a_deleted_row_has_no_statistics_from_its_close_on(operation):
    with world_of(0) as world:
        run(world, ONE_EVENT)
        world.one.call(Operate(1, [operation]), w.soon())
        gone = 0 if isinstance(operation, ForgetRow) else 1
        found = run(world, ASKS, first=2)[0]
        assert found[gone] == [0.0, 0.0] and any(found[1 - gone])


def test_a_key_without_admission_has_no_statistics_and_counts_from_its_row_on():
    selective = SECTION.model_copy(update={"admission": (CountEntry(kind="count", n=3),)})
    shows = [([[(1, (1.0, 1.0))], [(1, (1.0, 0.0))]], 0)] * 3
    with world_of(0, section=selective) as world:
        first, second, third = run(world, shows)
        assert first == [[0.0, 0.0]] * 2 == second, "the second pass has the third show, at whose push the row is made"
        assert third[1][0] == third[0][0] + 1.0 and third[0][0] > 0.0


@pytest.mark.parametrize("sign_N", [[0.0], [1.0, np.inf], [np.nan, 0.0], [1.0, 1.0, 1.0]])
def test_questions_that_are_not_shows_and_clicks_are_refused(sign_N):
    words_N = np.array(sign_N, np.float64).view(np.uint64)
    bad = HistoryQuestions(GROUP, w.keys(1).keys_U, np.zeros(1, np.int64), np.array([0, len(sign_N)]), words_N)
    with world_of(0) as world:
        world.one.open_pass(1, w.soon())
        with pytest.raises(InvalidShardCall, match="has not shows and clicks"):
            world.one.recall(1, {"statistics-x": bad}, w.soon())
