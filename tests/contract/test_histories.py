"""The law of histories: they depend on the log alone, whatever the numbers of trainers and shards."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import codec
from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol import history_messages
from headrace.pserver.protocol.histories import HistoryAnswers, HistoryQuestions
from headrace.pserver.protocol.table_operations import AdvanceDay, ForgetRow, ShrinkRows
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.rows.digest import add
from headrace.pserver.rows.history_kernels import answer_reference, packed, unpacked, width_of
from headrace.pserver.server.commands import DigestRows, Operate, Recall, RestoreCommit, command_from
from tests.contract import shards_world as w

LAST, GROUP = 3, 4
TABLES = {"past": TableSection(dim=width_of(LAST), first_order=False, init_range=0.0, optimizer=Sgd(kind="sgd"))}
BITS = [0, 1, 0x7FC0_AB5E, 0x7F80_0001, 0xFFFF_FFFF, 0x8000_0000]
"""Words that float32 reads as numbers, as infinite, as each kind of NaN, and as minus zero."""
SIGNS = st.builds(lambda low, high: low | high << 32, st.sampled_from(BITS), st.sampled_from(BITS))
EVENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.lists(SIGNS, max_size=4)), min_size=1, max_size=3), max_size=8
)
"""Each event has samples of (key, signs that it adds)."""


def key_of(number):
    return int(w.keys(number).keys_U[0])


def questions(events):
    samples = [(key_of(key), event, signs) for event, of in enumerate(events) for key, signs in of]
    lengths = [len(signs) for _, _, signs in samples]
    return HistoryQuestions(
        GROUP,
        np.array([key for key, _, _ in samples], np.uint64),
        np.array([event for _, event, _ in samples], np.int64),
        np.array([0, *np.cumsum(lengths)], np.int64),
        np.array([sign for _, _, signs in samples for sign in signs], np.uint64),
    )


def told(answers):
    found = answers["past"]
    ends = found.offset_Q1.tolist()
    return [found.sign_M[begin:end].tolist() for begin, end in zip(ends[:-1], ends[1:], strict=True)]


@dataclass
class Log:
    """What was recalled, and the digests of closes."""

    histories: list = field(default_factory=list)
    closes: list = field(default_factory=list)


def run(world, passes, first=1, repeats=False):
    log = Log()
    for number, events in enumerate(passes, first):
        cuts = [len(events) * rank // len(world.ranks) for rank in range(len(world.ranks) + 1)]
        parts = [questions(events[begin:end]) for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]

        def act(rank, shards, number=number, parts=parts):
            shards.open_pass(number, w.soon())
            found = [told(shards.recall(number, {"past": parts[rank]}, w.soon())) for _ in range(1 + repeats)]
            assert all(each == found[0] for each in found)
            return found[0], shards.close_pass(number, w.soon())

        answers = world.each(act)
        log.histories.append([history for histories, _ in answers for history in histories])
        log.closes.append(add(int(digest, 16) for digest in answers[0][1].values()))
    return log


def plain(passes):
    """The law's dictionary, which reads the log in order."""
    known, found = {}, []
    for events in passes:
        found.append([])
        for event in events:
            found[-1] += [known.get(key, []) for key, _ in event]
            for key, signs in event:
                known[key] = [*known.get(key, []), *signs][-LAST:]
    return found


def world_of(shards, ranks, **more):
    return w.job(shards, ranks, TABLES, histories={"past": LAST}, **more)


@settings(max_examples=30, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=3))
def test_an_embedded_shard_answers_as_a_dictionary_that_reads_the_log(passes):
    with world_of(0, 1) as world:
        assert run(world, passes).histories == plain(passes)


@settings(max_examples=4, deadline=None)
@given(st.lists(EVENTS, min_size=2, max_size=3))
def test_histories_and_digests_are_those_of_one_trainer_with_any_numbers(passes):
    with world_of(0, 1) as world:
        one, digest = run(world, passes), world.one.call(DigestRows(), w.soon())
    assert one.histories == plain(passes)
    for shards, ranks in ((1, 1), (2, 2), (3, 3)):
        with world_of(shards, ranks) as world:
            assert run(world, passes, repeats=ranks == 2) == one, (shards, ranks)
            assert world.one.call(DigestRows(), w.soon()) == digest


PASSES = [
    [[(1, [7, 8])], [(1, [9]), (2, [1 << 63])], [(1, [])]],
    [[(2, [0])], [(1, [10, 11]), (1, [12])], [(3, [5])]],
    [[(1, []), (2, []), (3, []), (4, [])]],
]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_histories_go_on_from_a_commit_on_other_shards(before, after, tmp_path):
    with world_of(before, 1, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        run(world, PASSES[:2])
        parts = w.commit(world.one, tmp_path / "commit", 2)
        rest = run(world, PASSES[2:], first=3)
        digest = world.one.call(DigestRows(), w.soon())
    with world_of(after, 1, live=tmp_path / "again") as world:
        world.one.call(RestoreCommit(tmp_path / "commit", parts, 2), w.soon())
        assert run(world, PASSES[2:], first=3) == rest
        assert world.one.call(DigestRows(), w.soon()) == digest
    assert rest.histories == plain(PASSES)[2:] == [[[10, 11, 12], [1 << 63, 0], [5], []]]


def test_a_pass_that_is_given_up_leaves_nothing(tmp_path):
    with world_of(0, 1, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        world.one.open_pass(1, w.soon())
        world.one.recall(1, {"past": questions(PASSES[0])}, w.soon())
        assert world.one.call(DigestRows(), w.soon()) == {"past": 0}


def test_a_shard_refuses_questions_out_of_turn():
    with world_of(2, 2) as world:
        with pytest.raises(InvalidShardCall, match="a call for pass 1 while pass 0 is closed"):
            world.one.recall(1, {"past": questions([])}, w.soon())
        world.each(lambda rank, shards: shards.open_pass(1, w.soon()))
        with pytest.raises(InvalidShardCall, match=r"in tables \['other'\], not \['past'\]"):
            world.one.recall(1, {"other": questions([])}, w.soon())


@pytest.mark.parametrize("part", ["key_Q", "event_Q", "offset_Q1", "sign_N"])
@pytest.mark.parametrize("missing", [4, 8])
def test_messages_that_do_not_fit_are_refused(part, missing):
    asked = questions(PASSES[0])
    again = command_from("Recall", codec.packed(Recall(1, {"past": asked})))
    assert told({"past": answers_of(again.questions["past"])}) == [[7, 8], [9], [1 << 63], []]
    cut = np.frombuffer(getattr(asked, part).tobytes()[:-missing], np.uint8)
    with pytest.raises(InvalidShardCall, match=r"do not fit each other|in the middle of a number"):
        command_from("Recall", codec.packed(Recall(1, {"past": replace(asked, **{part: cut})})))


def answers_of(asked):
    return HistoryAnswers(asked.offset_Q1, asked.sign_N)


def test_an_answer_that_no_message_can_carry_is_refused_with_what_to_lower():
    asked = {"past": answers_of(questions(PASSES[0]))}
    assert history_messages.within_message(asked, 1000) == asked
    with pytest.raises(InvalidShardCall, match=r"lower passes\.max_events or history\.last"):
        history_messages.within_message(asked, 20)


@given(st.lists(st.lists(SIGNS, max_size=LAST), max_size=5))
def test_rows_keep_the_bits_of_signs(histories):
    count_U = np.array([len(each) for each in histories], np.int64)
    sign_UL = np.array([each + [0] * (LAST - len(each)) for each in histories], np.uint64).reshape(-1, LAST)
    again_U, again_UL = unpacked(packed(count_U, sign_UL))
    assert again_U.tolist() == count_U.tolist() and again_UL.tolist() == sign_UL.tolist()


@given(EVENTS)
def test_the_twin_of_the_kernel_is_the_dictionary(events):
    samples = [(key, event, signs) for event, of in enumerate(events) for key, signs in of]
    assert answer_reference(samples, LAST, {}) == plain([events])[0]


@pytest.mark.parametrize("shards", [0, 2])
def test_histories_are_forgotten_and_age_as_rows_do(shards):
    with world_of(shards, 1) as world:
        run(world, [[[(1, [7])], [(2, [8])]], [[(1, [9])]]])  # of day 1, then 2
        key = int(w.keys(1).keys_U[0])
        world.one.call(
            Operate(2, [AdvanceDay(to=5), ShrinkRows(table="past", delete_after_days=3, at_once=True)]), w.soon()
        )
        seen = run(world, [[[(1, []), (2, [])]]], first=3)
        assert seen.histories == [[[7, 9], []]]
        world.one.call(Operate(3, [ForgetRow(table="past", group=GROUP, key=key)]), w.soon())
        assert run(world, [[[(1, [5])], [(1, [])]]], first=6).histories == [[[], [5]]]
