"""The law of a join: what is released depends on the log alone, whatever its passes and the numbers of trainers and
shards."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import codec
from headrace.pserver.config import TableSection
from headrace.pserver.errors import InvalidShardCall
from headrace.pserver.protocol import join_messages
from headrace.pserver.protocol.join_clock import CLOCK_KEY, TimeSpans
from headrace.pserver.protocol.joins import JOIN_TABLE, JoinEvents, PassTimes
from headrace.pserver.row_optimizers import Sgd
from headrace.pserver.rows.digest import add
from headrace.pserver.rows.join_kernels import join_reference, join_width_of
from headrace.pserver.server.commands import (
    DigestRows,
    ReadJoinAnswers,
    RestoreCommit,
    SendEventTimes,
    SendJoinEvents,
    command_from,
)
from tests.contract import shards_world as w

WINDOW_S, BYTES = 10.0, 9
SECTION = TableSection(dim=join_width_of(BYTES), first_order=False, init_range=0.0, optimizer=Sgd(kind="sgd"))
EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 15), st.sampled_from([0.0, 0.0, 1.0, 2.5]), st.binary(max_size=BYTES)),
    max_size=12,
)
"""Each has a key, a time in the pass, a label (0: an impression) and a sample."""


def key_of(number):
    return int(w.keys(number).keys_U[0])


def passes_of(drawn):
    """Events of passes whose times advance, as (key, time, label, sample); clicks have no sample."""
    return [
        [(key_of(key), 6.0 * number + at, label, b"" if label else data) for key, at, label, data in events]
        for number, events in enumerate(drawn)
    ]


def events_of(pass_number, events, holds=False, streams=()):
    lengths = [len(data) for *_, data in events]
    times = np.array([at for _, at, _, _ in events], np.float64)
    streams = np.array(streams or [0] * len(events), np.uint64)
    return JoinEvents(
        pass_number,
        PassTimes(times, streams, np.ones(len(events), np.int64)),
        np.array([key for key, *_ in events], np.uint64),
        np.arange(len(events)),
        np.array([at for _, at, _, _ in events], np.float64),
        np.array([label for _, _, label, _ in events], np.float32),
        holds,
        np.array([0, *np.cumsum(lengths)], np.int64),
        np.frombuffer(b"".join(data for *_, data in events), np.uint8),
    )


def told(samples):
    ends = samples.offset_E1.tolist()
    data = [samples.data_N[begin:end].tobytes() for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    return list(zip(samples.order_E.tolist(), samples.time_E.tolist(), samples.label_E.tolist(), data, strict=True))


@dataclass
class Log:
    """The released samples, and the digests of closes."""

    released: list = field(default_factory=list)
    closes: list = field(default_factory=list)


def run(world, passes, first=1, repeats=False, holds=False):
    log = Log()
    for number, events in enumerate(passes, first):
        cuts = [len(events) * rank // len(world.ranks) for rank in range(len(world.ranks) + 1)]
        parts = [events_of(number, events[begin:end], holds) for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]

        def act(rank, shards, number=number, parts=parts):
            shards.open_pass(number, w.soon())
            found = [shards.join(parts[rank], w.soon()) for _ in range(1 + repeats)]
            assert told(found[-1].joined) == told(found[0].joined)
            return found[0], shards.close_pass(number, w.soon())

        answers = world.each(act)
        joined = [each[1:] for answer, _ in answers for each in told(answer.joined)]
        outcomes = [outcome for answer, _ in answers for outcome in answer.outcome_Q.tolist()]
        for answer, _ in answers:
            assert told(answer.expired) == sorted(told(answer.expired)), "each rank's part is in the order of the log"
        expired = sorted(each for answer, _ in answers for each in told(answer.expired))
        log.released.append((outcomes, joined, expired, sum(answer.num_unmatched for answer, _ in answers)))
        log.closes.append(add(int(digest, 16) for digest in answers[0][1].values()))
    return log


def plain(passes, holds=False):
    """The law: a dictionary that reads the log event by event, and knows no passes."""
    known, found = {}, []
    for number, events in enumerate(passes, 1):
        numbered = [(key, number << 32 | place, *rest) for place, (key, *rest) in enumerate(events)]
        outcomes, ended, unmatched = join_reference(numbered, WINDOW_S, known, holds=holds)
        joined = [each[1:] for each in outcomes if each[0] == 1 and not holds]
        found.append(([each[0] for each in outcomes], joined, sorted(each[1:] for each in ended), unmatched))
    return found


def world_of(shards, ranks, **more):
    return w.job(shards, ranks, {JOIN_TABLE: SECTION}, joins={JOIN_TABLE: WINDOW_S}, **more)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=5), st.booleans())
def test_an_embedded_shard_releases_as_a_dictionary_that_reads_the_log(drawn, holds):
    passes = passes_of(drawn)
    with world_of(0, 1) as world:
        assert run(world, passes, holds=holds).released == plain(passes, holds)


@settings(max_examples=3, deadline=None)
@given(st.lists(EVENTS, min_size=2, max_size=4), st.booleans())
def test_releases_and_digests_are_those_of_one_trainer_with_any_numbers(drawn, holds):
    passes = passes_of(drawn)
    with world_of(0, 1) as world:
        one, digest = run(world, passes, holds=holds), world.one.call(DigestRows(), w.soon())
    assert one.released == plain(passes, holds)
    for shards, ranks in ((1, 1), (2, 2), (3, 3)):
        with world_of(shards, ranks) as world:
            assert run(world, passes, repeats=ranks == 2, holds=holds) == one, (shards, ranks)
            assert world.one.call(DigestRows(), w.soon()) == digest


@settings(max_examples=40, deadline=None)
@given(EVENTS.map(lambda events: [(key, 3 * at, *rest) for key, at, *rest in events]), st.booleans())
def test_where_passes_begin_and_end_changes_nothing(drawn, holds):
    (events,) = passes_of([drawn])
    whole = plain([events], holds)[0]
    for size in (1, 2, 7, 1000):
        passes = [events[begin : begin + size] for begin in range(0, len(events), size)]
        with world_of(0, 1) as world:
            released = run(world, passes, holds=holds).released
        outcomes, joined, expired, unmatched = zip(*released, strict=True) if released else ([], [], [], [])
        assert [each for part in outcomes for each in part] == whole[0], size
        assert [each[1:] for part in joined for each in part] == [each[1:] for each in whole[1]] or holds
        assert sorted(each[1:] for part in expired for each in part) == sorted(each[1:] for each in whole[2])
        assert sum(unmatched) == whole[3]


def test_streams_of_a_pass_are_merged_by_time_and_each_keeps_its_order():
    """Impressions of one partition, then clicks of another: of these, one is out of turn."""
    shown = [(key_of(key), 20.0 * key, 0.0, b"x") for key in range(3)]
    clicked = [(key_of(key), 20.0 * key + 5, 1.0, b"") for key in (0, 2, 1)]
    with world_of(0, 1) as world:
        world.one.open_pass(1, w.soon())
        answers = world.one.join(events_of(1, shown + clicked, streams=[7, 7, 7, 8, 8, 8]), w.soon())
    assert answers.position_Q.tolist() == [0, 2, 3, 1, 4, 5], "the last click comes after the one of 45 s"
    assert answers.outcome_Q.tolist() == [0, 0, 0, 1, 1, 0]
    assert told(answers.expired) == [(1 << 32 | 1, 20.0, 0.0, b"x")] and answers.end_X.tolist() == [3]
    assert answers.num_unmatched == 0


PASSES = [
    [(1, 0.0, 0.0, b"one"), (2, 1.0, 0.0, b"two"), (3, 2.0, 1.0, b""), (4, 2.0, 2.5, b"")],
    [(2, 9.0, 1.0, b""), (3, 9.5, 0.0, b"three"), (2, 9.6, 1.0, b""), (2, 9.7, 0.0, b"again")],
    [(1, 10.5, 1.0, b""), (5, 12.0, 0.0, b"five"), (6, 21.9, 0.0, b"six")],
]
PASSES = [[(key_of(key), *rest) for key, *rest in events] for events in PASSES]
SECOND = ([1, 1, 3, 2], [(1.0, 1.0, b"two"), (9.5, 1.0, b"three")], [], 0)
THIRD = ([4, 0, 0], [], [(1 << 32, 0.0, 0.0, b"one")], 1)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3)])
def test_a_join_goes_on_from_a_commit_on_other_shards(before, after, tmp_path):
    with world_of(before, 1, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        assert run(world, PASSES[:2]).released[1] == SECOND
        parts = w.commit(world.one, tmp_path / "commit", 2)
        rest = run(world, PASSES[2:], first=3)
        digest = world.one.call(DigestRows(), w.soon())
        gone = w.commit(world.one, tmp_path / "later", 3)
    with world_of(after, 1, live=tmp_path / "again") as world:
        world.one.call(RestoreCommit(tmp_path / "commit", parts, 2), w.soon())
        assert run(world, PASSES[2:], first=3) == rest
        assert world.one.call(DigestRows(), w.soon()) == digest
    with world_of(after, 1, live=tmp_path / "third") as world:
        world.one.call(RestoreCommit(tmp_path / "later", gone, 3), w.soon())
        assert world.one.call(DigestRows(), w.soon()) == digest, "what expired is gone from commits, too"
    assert rest.released == [THIRD]


def test_a_pass_that_is_given_up_leaves_nothing(tmp_path):
    with world_of(0, 1, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        world.one.open_pass(1, w.soon())
        world.one.join(events_of(1, PASSES[0]), w.soon())
        assert world.one.call(DigestRows(), w.soon()) == {JOIN_TABLE: 0}


def test_a_shard_refuses_events_out_of_turn():
    with world_of(2, 2) as world:
        with pytest.raises(InvalidShardCall, match="a call for pass 1 while pass 0 is closed"):
            world.one.join(events_of(1, []), w.soon())
    with w.job(0, 1) as world:
        world.one.open_pass(1, w.soon())
        with pytest.raises(InvalidShardCall, match="joins nothing"):
            world.one.join(events_of(1, []), w.soon())


def sent(events):
    """Events as a shard gets them."""
    return command_from("SendJoinEvents", codec.packed(SendJoinEvents(events))).events


@pytest.mark.parametrize("missing", [1, 8])
@pytest.mark.parametrize("part", ["key_Q", "place_Q", "time_Q", "label_Q", "offset_Q1", "data_N"])
def test_messages_that_do_not_fit_are_refused(part, missing):
    events = events_of(1, PASSES[0])
    again = sent(events)
    assert again.place_Q.tolist() == [0, 1, 2, 3] and again.data_N.tobytes() == b"onetwo"
    data = getattr(events, part).tobytes()
    with pytest.raises(InvalidShardCall, match=r"do not fit|in the middle of a number"):
        sent(replace(events, **{part: np.frombuffer(data[: max(len(data) - missing, 0)], np.uint8)}))


@pytest.mark.parametrize("part", ["time_A", "stream_K", "length_K"])
def test_times_that_do_not_fit_are_refused(part):
    events = events_of(1, PASSES[0])
    times = replace(events.times, **{part: getattr(events.times, part)[:-1]})
    with pytest.raises(InvalidShardCall, match="do not fit"):
        sent(replace(events, times=times))


@pytest.mark.parametrize("wrong", [{"time_A": np.nan}, {"time_A": np.inf}, {"time_Q": np.nan}, {"label_Q": np.nan}])
def test_messages_with_no_numbers_are_refused(wrong):
    events = events_of(1, PASSES[0])
    for part, value in wrong.items():
        full = np.full(4, value, np.float32 if part == "label_Q" else np.float64)
        of_times = {"times": replace(events.times, time_A=full)}
        events = replace(events, **(of_times if part == "time_A" else {part: full}))
    with pytest.raises(InvalidShardCall, match="is no number"):
        sent(events)


def test_a_sample_that_is_longer_than_a_row_is_refused_and_leaves_nothing():
    with world_of(0, 1) as world:
        world.one.open_pass(1, w.soon())
        with pytest.raises(InvalidShardCall, match="longer than a row"):
            world.one.join(events_of(1, [(key_of(1), 1.0, 0.0, b"x" * (BYTES + 4))]), w.soon())
        assert world.one.join(events_of(1, PASSES[0]), w.soon()).outcome_Q.tolist()


MANY = [
    [(key_of(number), number / 1000, 0.0, b"x" * (number % BYTES)) for number in range(300)],
    [*((key_of(number), 5.0, 1.0, b"") for number in range(120)), (key_of(300), 99.0, 0.0, b"last")],
]
SMALL = 4096
"""Bytes of a message that cannot carry all events, or all samples that they release."""


@pytest.mark.parametrize("holds", [False, True])
def test_what_no_message_can_carry_travels_in_several(holds):
    with world_of(0, 1) as world:
        one = run(world, MANY, holds=holds)
    assert [len(each) for each in one.released[1][:3]] == ([121, 0, 300] if holds else [121, 120, 180])
    with world_of(2, 2, max_message=SMALL) as world:
        assert run(world, MANY, repeats=True, holds=holds) == one


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3000), max_size=30), st.integers(1, 9000))
def test_runs_hold_a_whole_list_within_the_largest_message(sizes, most):
    runs = join_messages.runs_of(np.array(sizes, np.int64), most)
    assert [number for begin, end in runs for number in range(begin, end)] == list(range(len(sizes)))
    assert all(sum(sizes[begin:end]) <= max(0, most - 1024) or end == begin + 1 for begin, end in runs)
    assert runs == [(0, 0)] or all(begin < end for begin, end in runs)


def test_a_part_of_an_answer_that_is_not_there_is_refused():
    command = ReadJoinAnswers(1, 1)
    with world_of(1, 1) as world:
        world.one.open_pass(1, w.soon())
        with pytest.raises(InvalidShardCall, match="did not get yet"):
            world.one.call(command, w.soon())
        world.one.join(events_of(1, PASSES[0]), w.soon())
        with pytest.raises(InvalidShardCall, match="part 1 of an answer that has 1"):
            world.one.call(command, w.soon())


TIMES = [[5.0, 2e9], [], [8.0, 30.0, 2e9], [25.0]]
"""By pass: event times of all ranks."""
BOUNDS = [15.0, 15.0, 18.0, 35.0]


def clocked(world, passes, first=1):
    """The bound of each pass, and the digests."""
    told = []
    for number, times in enumerate(passes, first):

        def act(rank, shards, number=number, times=times):
            shards.open_pass(number, w.soon())
            mine = TimeSpans.of_times(np.array(times[rank :: len(world.ranks)]), 10.0)
            found = {shards.call(SendEventTimes(number, mine, 10.0), w.soon()) for _ in range(2)}
            shards.join(events_of(number, []), w.soon())
            shards.close_pass(number, w.soon())
            return found

        (bounds,) = {frozenset(each) for each in world.each(act)}
        told.append(bounds)
    return told, world.one.call(DigestRows(), w.soon())


def test_the_clock_of_a_join_is_one_for_all_trainers_and_shards_and_is_in_commits(tmp_path):
    passes = [*TIMES[:3], [17.0, *TIMES[3]]]
    with world_of(0, 1, live=tmp_path / "live") as world:
        world.one.call(RestoreCommit(tmp_path, [], 0), w.soon())
        begun = clocked(world, passes[:2])
        parts = w.commit(world.one, tmp_path / "commit", 2)
        rest = clocked(world, passes[2:], first=3)
    assert [min(each) for each in (*begun[0], *rest[0])] == BOUNDS
    with world_of(3, 2, live=tmp_path / "again") as world:
        world.one.call(RestoreCommit(tmp_path / "commit", parts, 2), w.soon())
        assert clocked(world, passes[2:], first=3) == rest
    with world_of(2, 3) as world:
        assert clocked(world, passes)[0] == [*begun[0], *rest[0]]


def test_the_row_of_the_clock_never_expires_and_meets_no_event():
    clock = [(CLOCK_KEY, 30.0, 0.0, b"new"), (CLOCK_KEY, 31.0, 1.0, b"")]
    with world_of(0, 1) as world:
        clocked(world, [[1.0]])
        digest = world.one.call(DigestRows(), w.soon())
        assert run(world, [[(key_of(1), 99.0, 0.0, b"x")]], first=2).released == [([0], [], [], 0)]
        assert run(world, [clock], first=3).released[0][0] == [2, 3]
        assert run(world, [[(key_of(2), 200.0, 1.0, b"")], [(key_of(2), 300.0, 1.0, b"")]], first=4).released
        assert clocked(world, [[]], first=6)[0] == [{11.0}]
        assert digest != {JOIN_TABLE: 0}


@pytest.mark.parametrize("wrong", [{"first_X": []}, {"last_X": [0.0]}, {"count_X": [0]}])
def test_event_times_that_are_no_spans_are_refused(wrong):
    spans = TimeSpans.of_times(np.array([1.0, 2.0]), 10.0)
    again = command_from("SendEventTimes", codec.packed(SendEventTimes(1, spans, 10.0)))
    assert again.spans.count_X.tolist() == [2]
    bad = replace(spans, **{name: np.array(value, getattr(spans, name).dtype) for name, value in wrong.items()})
    with pytest.raises(InvalidShardCall, match="are no spans"):
        command_from("SendEventTimes", codec.packed(SendEventTimes(1, bad, 10.0)))
