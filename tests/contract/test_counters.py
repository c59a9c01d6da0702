"""The law of counters: they depend on the log alone, whatever the numbers of trainers and shards."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol.histories import HistoryQuestions
from headrace.pserver.protocol.table_operations import ForgetRow
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.rows.counter_kernels import (
    MAX_BACK_S,
    MAX_COUNT,
    NO_TIME,
    PARTS,
    UNIT,
    count,
    count_reference,
    packed,
    unpacked,
    width_of,
)
from headrace.pserver.rows.digest import add
from headrace.pserver.server.commands import DigestRows, Operate, RestoreCommit
from tests.contract import shards_world as w

WINDOWS_S, GROUP = (60, 0, 3600), 4
SECTION = TableSection(dim=width_of(WINDOWS_S), first_order=False, init_range=0.0, optimizer=Sgd(kind="sgd"))
TIMES = st.one_of(
    st.integers(0, 400),
    st.integers(5000, 5400),
    st.sampled_from([NO_TIME, MAX_BACK_S, MAX_BACK_S + 8000, 3 * MAX_BACK_S, MAX_COUNT]),
)
SAMPLES = st.tuples(TIMES, st.integers(0, 3), st.integers(0, 3)).map(lambda each: (*each[:2], min(each[1:])))
EVENTS = st.lists(st.lists(st.tuples(st.integers(0, 3), SAMPLES), min_size=1, max_size=3), max_size=10)
"""Each event has samples of (key, (time, shows, clicks))."""


def key_of(number):
    return int(w.keys(number).keys_U[0])


def asked(events):
    """The questions of the twin."""
    return [(key, event, sample) for event, of in enumerate(events) for key, sample in of]


def questions(events):
    samples = asked(events)
    words = [word for _, _, (time_s, *more) in samples for word in (time_s % (1 << 64), *more)]
    return HistoryQuestions(
        GROUP,
        np.array([key_of(key) for key, _, _ in samples], np.uint64),
        np.array([event for _, event, _ in samples], np.int64),
        np.arange(len(samples) + 1) * 3,
        np.array(words, np.uint64),
    )


def plain(passes, windows_s=WINDOWS_S):
    known = {}
    return [count_reference(asked(events), windows_s, known) for events in passes]


def answers_of(samples, windows_s):
    """The kernel's answers to (key, event, sample), and the words of the rows after them."""
    columns = np.array([sample for _, _, sample in samples], np.int64).reshape(-1, 3).T.copy()
    order = [np.array([each[place] for each in samples], np.int64) for place in (0, 1)]
    word_UC = np.zeros((4, width_of(windows_s)), np.int64)
    answer_QV = np.empty((len(samples), 2 * len(windows_s)), np.int64)
    count(*order, *columns, np.array(windows_s), word_UC, answer_QV)
    return answer_QV.tolist(), word_UC


def run(world, passes, first=1):
    """The answers of each pass, and the digests of the closes."""
    found, closes = [], []
    for number, events in enumerate(passes, first):
        cuts = [len(events) * rank // len(world.ranks) for rank in range(len(world.ranks) + 1)]
        parts = [questions(events[begin:end]) for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]

        def act(rank, shards, number=number, parts=parts):
            shards.open_pass(number, w.soon())
            answer = shards.recall(number, {"counts": parts[rank]}, w.soon())["counts"]
            return answer.sign_M.reshape(-1, 2 * len(WINDOWS_S)).tolist(), shards.close_pass(number, w.soon())

        answers = world.each(act)
        found.append([counts for of_rank, _ in answers for counts in of_rank])
        closes.append(add(int(digest, 16) for digest in answers[0][1].values()))
    return found, closes


def world_of(shards, ranks, **more):
    return w.job(shards, ranks, {"counts": SECTION}, histories={"counts": WINDOWS_S}, **more)


@settings(max_examples=80, deadline=None)
@given(EVENTS, st.sampled_from([WINDOWS_S, (-600, 60, -60, 0)]))
def test_the_kernel_counts_as_its_twin(events, windows_s):
    answers, word_UC = answers_of(asked(events), windows_s)
    assert answers == plain([events], windows_s)[0]
    assert unpacked(packed(word_UC)).tolist() == word_UC.tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 1000)), min_size=1, max_size=20), st.booleans())
def test_a_half_life_halves_counts_to_within_a_few_hundredths(shown, in_order):
    shown = sorted(shown) if in_order else shown
    last_s = max(at_s for at_s, _ in shown)
    samples = [(0, number, (at_s, shows, shows // 2)) for number, (at_s, shows) in enumerate(shown)]
    answers, _ = answers_of([*samples, (0, len(samples), (last_s, 0, 0))], (-600,))
    for found, share in zip(answers[-1], (1, 2), strict=True):
        exact = sum((shows // share) * 2 ** ((at_s // 100 - last_s // 100) / PARTS) for at_s, shows in shown)
        assert exact - 0.1 < found / UNIT < exact + 1e-4 * (1 + exact), "rounded down, once for each sample"


@settings(max_examples=15, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=3))
def test_an_embedded_shard_answers_as_the_twin(passes):
    with world_of(0, 1) as world:
        assert run(world, passes)[0] == plain(passes)


@settings(max_examples=3, deadline=None)
@given(st.lists(EVENTS, min_size=2, max_size=3))
def test_counters_and_digests_are_those_of_one_trainer_with_any_numbers(passes):
    with world_of(0, 1) as world:
        one, digest = run(world, passes), world.one.call(DigestRows(), w.soon())
    for shards, ranks in ((2, 2), (3, 3)):
        with world_of(shards, ranks) as world:
            assert run(world, passes) == one, (shards, ranks)
            assert world.one.call(DigestRows(), w.soon()) == digest


PASSES = [
    [[(1, (30, 1, 1)), (1, (30, 1, 0))], [(1, (45, 1, 0))]],
    [[(1, (105, 1, 1))], [(1, (3000, 1, 0))], [(1, (4230, 1, 0)), (2, (NO_TIME, 1, 1))]],
    [[(1, (4235, 0, 0)), (2, (4235, 0, 0)), (3, (4235, 0, 0))]],
]
SEEN = [
    [[0] * 6, [0] * 6, [2, 1, 2, 1, 2, 1]],
    [[1, 0, 3, 1, 3, 1], [0, 0, 4, 2, 4, 2], [0, 0, 5, 2, 1, 0], [0] * 6],
    [[1, 0, 6, 2, 2, 0], [0, 0, 1, 1, 0, 0], [0] * 6],
]
"""Shows and clicks of the last minute, of all time, of the last hour: begins are rounded to 10 s or 600 s."""


def test_windows_round_their_begin_to_a_sixth_and_events_do_not_see_themselves():
    assert PARTS == 6 and plain(PASSES) == SEEN
    with world_of(0, 1) as world:
        assert run(world, PASSES)[0] == SEEN


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3)])
def test_counters_go_on_from_a_commit_on_other_shards(before, after, tmp_path):
    with world_of(before, 1, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        run(world, PASSES[:2])
        parts = w.commit(world.one, tmp_path / "commit", 2)
    with world_of(after, 1, live=tmp_path / "again") as world:
        world.one.call(RestoreCommit(tmp_path / "commit", parts, 2), w.soon())
        assert run(world, PASSES[2:], first=3)[0] == SEEN[2:]


def test_a_far_future_time_of_one_event_does_not_stop_a_window():
    wrong = [[[(1, (MAX_COUNT, 1, 1))]], [[(1, (1000, 1, 1))]], [[(1, (1001, 0, 0))]]]
    with world_of(0, 1) as world:
        assert run(world, wrong)[0][2] == [[1, 1, 2, 2, 1, 1]]


def test_counts_stop_at_their_greatest_number():
    many = [[[(1, (5, MAX_COUNT, MAX_COUNT))], [(1, (6, 7, 7))], [(1, (6, 1, 0))]]]
    with world_of(0, 1) as world:
        assert run(world, many)[0][0][2] == [MAX_COUNT] * 6


def test_a_forgotten_key_has_no_counts():
    with world_of(0, 1) as world:
        run(world, PASSES[:1])
        world.one.call(Operate(1, [ForgetRow(table="counts", group=GROUP, key=key_of(1))]), w.soon())
        assert run(world, [[[(1, (46, 0, 0))]]], first=2)[0] == [[[0] * 6]]


@pytest.mark.parametrize(("change", "value"), [("offset_Q1", [0, 2]), ("sign_N", [5, 1 << 40, 0]), ("sign_N", [5, 0])])
def test_questions_that_are_not_three_numbers_are_refused(change, value):
    parts = {"offset_Q1": [0, 3], "sign_N": [5, 1, 0]} | {change: value}
    parts |= {"sign_N": parts["sign_N"][: parts["offset_Q1"][1]]}
    bad = HistoryQuestions(
        GROUP,
        np.array([key_of(1)], np.uint64),
        np.zeros(1, np.int64),
        np.array([0, len(parts["sign_N"])], np.int64),
        np.array(parts["sign_N"], np.uint64),
    )
    with world_of(0, 1) as world:
        world.one.open_pass(1, w.soon())
        with pytest.raises(InvalidShardCall, match="has not a time, shows and clicks"):
            world.one.recall(1, {"counts": bad}, w.soon())
