"""From the samples of a pass to questions about counters, and from counts to the floats of a slot."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import DenseSlot, HistorySection, MetaSlot, SparseSlot
from headrace.dataset.spec.counters import Counted, CountersSection
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.pserver.config import ShardProcess
from headrace.pserver.protocol.histories import HistoryAnswers
from headrace.pserver.rows.counter_kernels import MAX_COUNT, UNIT, packed, width_of
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.trainer.exports.slot_files import sub_windows
from headrace.trainer.features.counter_columns import KINDS, counter_column, fill_values, value_reference
from headrace.trainer.features.history_reader import HistoryReader
from headrace.trainer.spec.history_tables import history_tables, remembered_of
from tests.fakes.ragged import ragged

PRIOR, WEIGHT = 0.1, 5.0
OF_USER = CountersSection(key="user", windows=("all",), click="click", prior=PRIOR, prior_weight=WEIGHT)
OF_PAIR = CountersSection(key=("user", "item"), what=("clicks", "shows"), windows=("1h", "all"), click="click")
SHOWN = CountersSection(key="item", what=("shows",), windows=("1m",))
ENTRIES = (
    DenseSlot(name="of_user", kind="dense", counters=OF_USER),
    SparseSlot(names=("user", "item")),
    SparseSlot(name="past", history=HistorySection(key="user", of="item", last=2)),
    DenseSlot(name="of_pair", kind="dense", counters=OF_PAIR),
    DenseSlot(name="price", kind="dense"),
    DenseSlot(name="shown", kind="dense", counters=SHOWN),
    MetaSlot(name="click", kind="meta"),
)
SCHEMA = Schema.of(ENTRIES)
SAMPLES = st.tuples(
    st.lists(st.integers(0, 2), max_size=2),  # signs of the user: none, one, or one more than counts
    st.lists(st.integers(0, 2), max_size=1),
    st.sampled_from([0.0, 1.0, float("nan")]),
    st.sampled_from([0.0, 30.5, 61.0, 4000.0, -1.0, float("nan"), float("inf"), 1e12]),
)

BLOCKS = st.lists(st.lists(st.lists(SAMPLES, min_size=1, max_size=3), max_size=4), max_size=3)


class Blocks:
    """A PassReader of made blocks of events."""

    def __init__(self, passes):
        self._passes = passes

    def read(self, pass_number, segments, tally):
        tally.slots = SlotCounters(SCHEMA.emitted)
        for events in self._passes[pass_number - 1]:
            users, items, clicks, times = zip(*(each for event in events for each in event), strict=True) or [()] * 4
            event_B = np.repeat(np.arange(len(events)), [len(event) for event in events])
            price = np.zeros((len(event_B), 1), np.float32)
            meta = {"click": np.array(clicks, np.float32)}
            sparse = {"user": ragged(users), "item": ragged(items)}
            block = Samples(sparse, {"price": price}, meta, event_B, np.array(times, np.float64))
            tally.slots.observe(block)
            yield block

    def close(self):
        pass


def seen(known, key, window_s, time_s):
    """Shows and clicks of a key in a window: a plain reading of the docs. Times of these tests never go far back."""
    if not window_s:
        return len(known.get(key, [])), sum(click for _, click in known.get(key, []))
    part_s = window_s // 6
    timed = [(at // part_s, click) for at, click in known.get(key, []) if 0 <= at <= MAX_COUNT]
    now, newest = time_s // part_s, max((at for at, _ in timed), default=0)
    found = [click for at, click in timed if max(now, newest) - 6 <= at <= now]
    return (len(found), sum(found)) if 0 <= time_s <= MAX_COUNT else (0, 0)


def plain(passes):
    """The floats of every sample: a dictionary that reads the events in order."""
    known, rows = {}, []
    for event in (event for blocks in passes for events in blocks for event in events):
        told = []
        for users, items, click, time in event:
            time_s = int(time) if 0 <= time <= MAX_COUNT else -1
            keys = {
                "user": (0, *users[:1]) if users else None,
                "item": (1, *items[:1]) if items else None,
                "pair": (2, users[0], items[0]) if users and items else None,
            }
            told += [(key, time_s, int(click == click and click != 0)) for key in keys.values() if key is not None]
            n, c = seen(known, keys["user"], 0, time_s)
            pair = [seen(known, keys["pair"], window_s, time_s) for window_s in (3600, 0)]
            rows.append(
                [
                    *(math.log1p(n), math.log1p(c)),
                    math.log((c + PRIOR * WEIGHT) / (n + WEIGHT) / PRIOR) if n else 0.0,
                    *(math.log1p(each) for n, c in pair for each in (c, n)),
                    math.log1p(seen(known, keys["item"], 60, time_s)[0]),
                ]
            )
        for key, time_s, click in told:
            known.setdefault(key, []).append((time_s, click))
    return rows


@settings(max_examples=40, deadline=None)
@given(st.lists(BLOCKS, min_size=1, max_size=3))
def test_every_sample_has_the_counts_that_the_log_gives_it(passes):
    passes = [[events for events in blocks if events] for blocks in passes]
    shards, found = EmbeddedShards(ShardProcess.alone(history_tables(SCHEMA), 1, histories=remembered_of(SCHEMA))), []
    reader = HistoryReader(Blocks(passes), SCHEMA, shards, 20.0)
    for number in range(1, len(passes) + 1):
        shards.open_pass(number, Deadline.after(20))
        reader.opened(number)
        tally = PassTally()
        for samples in reader.read(number, (), tally):
            assert list(samples.dense) == ["of_user", "of_pair", "price", "shown"], "in the order of the schema"
            mine = np.concatenate([samples.dense[name] for name in ("of_user", "of_pair", "shown")], 1)
            found += mine.tolist()
        assert len({figures.num_samples for figures in tally.slots.figures()}) == 1
        shards.close_pass(0, Deadline.after(20))
    shards.close()
    assert np.array_equal(np.array(found).reshape(-1, 8), np.array(plain(passes), np.float32).reshape(-1, 8))


@given(
    st.lists(st.tuples(st.integers(0, MAX_COUNT), st.integers(0, MAX_COUNT)), min_size=1, max_size=6),
    st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
    st.floats(0.001, 0.999),
    st.floats(0.01, 1e6),
)
def test_the_kernel_gives_the_values_of_its_twin(counts, what, prior, weight):
    counts = [(max(pair), min(pair)) for pair in counts]
    value_BC = np.empty((1, len(counts) * len(what)), np.float32)
    kinds = np.array([KINDS.index(each) for each in what])
    fill_values(np.array([[n for pair in counts for n in pair]]), kinds, prior, weight, value_BC)
    wanted = [value_reference(each, *pair, prior, weight) for pair in counts for each in what]
    assert value_BC[0].tolist() == np.array(wanted, np.float32).tolist()


def test_a_sample_without_a_key_has_zeros_and_a_new_key_too():
    answers = HistoryAnswers(np.array([0, 2]), np.zeros(2, np.uint64))
    assert counter_column(np.array([-1, 0]), answers, OF_USER).tolist() == [[0.0] * 3] * 2


def test_counts_of_a_half_life_are_in_parts_of_one_and_come_last():
    fading = CountersSection(key="user", what=("shows", "clicks"), windows=("all",), half_lives=("1h",), click="click")
    assert fading.windows_s == (0, -3600) and fading.size == 4
    answers = HistoryAnswers(np.array([0, 4]), np.array([3, 1, UNIT * 5 // 2, UNIT // 2], np.uint64))
    values = counter_column(np.array([0, -1]), answers, fading).tolist()
    assert values == [[np.float32(math.log1p(n)) for n in (3, 1, 2.5, 0.5)], [0.0] * 4]


def test_counters_without_half_lives_are_written_as_before():
    assert "half_lives" not in OF_USER.model_dump(mode="json")
    fading = CountersSection(key="user", what=("shows",), half_lives=("1h",))
    assert CountersSection.model_validate(fading.model_dump(mode="json")) == fading


def test_the_file_of_an_export_has_a_row_for_each_half_life_with_shows():
    word_UC = np.array([[0, 0, 0], [7, 2 * UNIT, UNIT]])
    row_N, columns = sub_windows(packed(word_UC), (-60,))
    assert row_N.tolist() == [1]
    assert [column.tolist() for column in columns] == [[-60], [70], [10], [2 * UNIT], [UNIT]]


def test_the_files_of_an_export_have_each_sub_window_with_shows():
    word_UC = np.zeros((3, width_of((60, 0))), np.int64)
    word_UC[1, [0, 1 + 2 * (8 % 7), 2 + 2 * (8 % 7), 1 + 2 * (3 % 7)]] = 8, 5, 2, 1  # newest 8; and of 3
    word_UC[2, 15:] = 9, 4
    row_N, columns = sub_windows(packed(word_UC), (60, 0))
    assert row_N.tolist() == [1, 1, 2]
    assert [column.tolist() for column in columns] == [[60, 60, 0], [30, 80, 0], [10, 10, 0], [1, 5, 9], [0, 2, 4]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"windows": ("90s",)}, "whole minutes"),
        ({"windows": ("400d",)}, "at most 366 days"),
        ({"windows": ("1h", "60m")}, "a window is there twice"),
        ({"click": None}, "need click"),
        ({"what": ("ctr", "ctr")}, "what has a number twice"),
        ({"key": ("user",)}, "at least 2 items"),
        ({"windows": ()}, "needs windows or half_lives"),
        ({"half_lives": ("90s",)}, "90 s is not a half-life"),
        ({"half_lives": ("1d", "24h")}, "a half-life is there twice"),
        ({"half_lives": tuple(f"{n}h" for n in range(1, 9))}, "at most 8 together"),
    ],
)
def test_counters_that_make_no_sense_are_refused(keys, said):
    with pytest.raises(ValueError, match=said):
        CountersSection.model_validate({"key": "user", "windows": ("1h",), "click": "click"} | keys)


def test_the_size_of_a_slot_is_that_of_its_counters():
    assert [slot.entry.size for slot in SCHEMA.counters] == [3, 4, 1] and Counted.CTR in OF_USER.what
    again = DenseSlot.model_validate(ENTRIES[0].model_dump())
    assert again == ENTRIES[0] and again.size == 3
    with pytest.raises(ValueError, match="leave it out"):
        DenseSlot(name="x", kind="dense", size=2, counters=OF_USER)
