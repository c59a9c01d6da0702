"""Admission equals its plain rule, on any number of shards, before and after a commit."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.keys import NUM_BUCKETS, bucket_of, mix_reference
from headrace.pserver.admission import Admission
from headrace.pserver.admission.entries import draw_of
from headrace.pserver.admission.exact_counts import ExactCounter, ExactCounterReference
from headrace.pserver.admission.sketch import SketchCounter, SketchCounterReference
from headrace.pserver.admission_entries import MIN_COUNTS_BYTES as MIN_MEMORY
from headrace.pserver.admission_entries import (
    AdmissionEntry,
    CountEntry,
    CountingRule,
    ProbabilityEntry,
    ShowClickEntry,
)
from headrace.pserver.protocol.placement import Placement
from headrace.pserver.protocol.shards import Keys
from headrace.pserver.rows.digest import add

SEED, NONCLK, CLK = 7, 0.1, 1.0
ALL = (0, NUM_BUCKETS)


def admission(*entries, buckets=ALL, seed=SEED):
    return Admission.of(entries, nonclk_coeff=NONCLK, click_coeff=CLK, seed=seed, buckets=buckets)


def count(n, exact=False, memory=MIN_MEMORY):
    return CountEntry(kind="count", n=n, exact=exact, memory=memory)


def score(at, exact=False, memory=MIN_MEMORY):
    return ShowClickEntry(kind="show_click", score=at, exact=exact, memory=memory)


def lot(p):
    return ProbabilityEntry(kind="probability", p=p)


def admit(target, keys, show=1.0, click=0.0, day=0):
    keys = np.array(keys, np.uint64)
    show, click = (np.broadcast_to(np.float32(x), keys.shape).copy() for x in (show, click))
    return target.admit(keys, show, click, day).tolist()


class Reference:
    """The twin of Admission: a reference of one bucket for each bucket that is touched."""

    def __init__(self, *entries):
        self.p = min((e.p for e in entries if e.kind == "probability"), default=1)
        self.counting, self.buckets = [e for e in entries if e.kind != "probability"], {}

    def _tallies(self, bucket):
        if bucket not in self.buckets:
            self.buckets[bucket] = made = []
            for entry in self.counting:
                measure, size = entry.counting(NONCLK, CLK), entry.memory // NUM_BUCKETS
                item = measure.dtype.itemsize
                slots = size // (8 + item) if entry.exact else size // 8 * 8 // item // 4
                made.append(
                    (
                        measure.rates,
                        (ExactCounterReference if entry.exact else SketchCounterReference)(slots, measure.most),
                    )
                )
        return self.buckets[bucket]

    def admit(self, keys, show, click, day):
        admitted = []
        for key, s, c in zip(keys, show, click, strict=True):
            said = [draw_of(key, SEED) < self.p]
            if said[0]:
                said += [t.record(key, s, c, rates, day) for rates, t in self._tallies(bucket_of(key))]
            admitted.append(all(said))
        for key, yes in zip(keys, admitted, strict=True):
            for _, tally in self._tallies(bucket_of(key)) if yes else ():
                if isinstance(tally, ExactCounterReference):
                    tally.forget(key)
        return admitted


LISTS = [
    (count(3),),
    (count(3, exact=True),),
    (count(300),),
    (count(70_000, exact=True),),
    (score(0.5),),
    (score(0.5, exact=True),),
    (lot(0.5), count(2)),
    (count(2, exact=True), score(0.25), lot(0.9)),
    (lot(0.3), lot(0.6)),
    (),
]
# Few buckets and many keys of each, so that counters are shared and tables become full.
KEYS = st.builds(lambda high, bucket: mix_reference(high) & ~0xFFF | bucket, st.integers(0, 60), st.integers(7, 9))
SHOWS = st.sampled_from([0.0, 1.0, 1.0, 2.0, 0.25, 150.0, -1.0])
CLICKS = st.sampled_from([0.0, 0.0, 1.0, 3.0])
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.dictionaries(KEYS, st.tuples(SHOWS, CLICKS), max_size=60)), min_size=1, max_size=8
)


def played(steps):
    """Steps as (keys, show, click, day), the days summed."""
    day = 0
    for days, records in steps:
        day += days
        show, click = ([r[i] for r in records.values()] for i in (0, 1))
        yield list(records), show, click, day


@pytest.mark.parametrize("entries", LISTS, ids=lambda entries: "+".join(e.kind for e in entries) or "none")
@given(steps=STEPS)
@settings(max_examples=30)
def test_it_decides_as_its_plain_twin(entries, steps):
    ours, plain = admission(*entries), Reference(*entries)
    for keys, show, click, day in played(steps):
        assert admit(ours, keys, show, click, day) == plain.admit(keys, show, click, day)


@pytest.mark.parametrize("entries", LISTS[:-2], ids=lambda entries: "+".join(e.kind for e in entries))
@given(steps=STEPS, cut=st.integers(0, 8))
@settings(max_examples=20)
def test_a_commit_read_on_other_shards_changes_nothing(entries, steps, cut):
    """One shard's state over three shards after `cut` steps, and back onto two at the end."""
    whole, parts, placement = admission(*entries), None, Placement.even(3)
    ranges = [placement.buckets_of(shard) for shard in range(3)]
    for number, (keys, *rest, day) in enumerate(played(steps)):
        if number == cut:
            parts = [admission(*entries, buckets=r) for r in ranges]
            state = whole.state()
            assert all(part.load(state, 0) for part in parts)
        decided = admit(whole, keys, *rest, day)
        if parts is not None:
            got, keys = np.zeros(len(keys), bool), np.array(keys, np.uint64)
            routed = placement.route(Keys(keys, np.zeros(len(keys), np.uint16)))
            for part, at in zip(parts, (each.position_P for each in routed), strict=True):
                got[at] = admit(part, keys[at], *(np.array(column)[at] for column in rest), day)
            assert got.tolist() == decided
            assert add(part.digest() for part in parts) == whole.digest()
    if parts is not None:
        halves = [admission(*entries, buckets=r) for r in ((0, 2048), (2048, NUM_BUCKETS))]
        for part, (first, _) in zip(parts, ranges, strict=True):
            state = part.state()
            assert all(half.load(state, first) for half in halves)
        assert add(half.digest() for half in halves) == whole.digest()


def test_the_nth_occurrence_is_admitted_however_steps_cut_the_stream():
    for exact in (False, True):
        one, many = admission(count(5, exact)), admission(count(5, exact))
        assert [admit(one, [99])[0] for _ in range(5)] == [False] * 4 + [True]
        assert [admit(many, [99], show)[0] for show in (2.0, 2.0, 1.0)] == [False, False, True]


def test_ten_shows_of_a_tenth_reach_a_score_of_one():
    """0.1 has no exact binary form: rounding must not cost the key a show."""
    for exact in (False, True):
        ours = admission(score(1.0, exact))
        assert [admit(ours, [5])[0] for _ in range(10)] == [False] * 9 + [True]
        assert admit(admission(score(1.0, exact)), [5], 1.0, 1.0) == [True]


def test_an_exact_count_begins_anew_once_its_key_was_admitted():
    ours = admission(count(2, exact=True))
    assert [admit(ours, [5])[0] for _ in range(4)] == [False, True, False, True]


def test_each_entry_counts_what_the_others_still_refuse():
    ours = admission(count(2, exact=True), score(0.35, exact=True))
    assert [admit(ours, [5])[0] for _ in range(4)] == [False, False, False, True]


def test_a_key_whose_lot_refuses_it_costs_no_counter():
    ours = admission(count(2), lot(0.5))
    keys = [mix_reference(i) for i in range(4000)]
    refused = [key for key in keys if draw_of(key, SEED) >= 0.5]
    empty = ours.digest()
    assert not any(admit(ours, refused)) and ours.digest() == empty
    assert abs(len(refused) / len(keys) - 0.5) < 0.05


def test_lots_differ_by_seed_and_stay():
    keys = [mix_reference(i) for i in range(2000)]
    first, again, other = (admission(lot(0.5), seed=seed) for seed in (1, 1, 2))
    assert admit(first, keys) == admit(again, keys) == admit(first, keys) != admit(other, keys)
    assert [draw_of(key, 42).hex() for key in (0, 1, keys[9])] == GOLDEN_LOTS


GOLDEN_LOTS = ["0x1.653db2a0f0debp-1", "0x1.8d3e6ab10335ep-1", "0x1.39fdb7be39ab4p-3"]


@pytest.mark.parametrize("exact", [False, True])
def test_a_day_halves_what_was_counted(exact):
    ours = admission(count(8, exact))
    admit(ours, [5], 7.0, day=3)
    assert ours.explain(5, 3)[0]["estimate"] == 7
    assert [ours.explain(5, day)[0]["estimate"] for day in (4, 5, 6, 90)] == [3, 1, 0, 0]
    assert admit(ours, [5], 6.0, day=4) == [True]


def test_a_quiet_bucket_is_halved_as_if_it_had_been_touched_every_day():
    """Lazily: reading changes nothing, and touching with nothing to count only brings the day up."""
    lazy, busy = admission(count(200)), admission(count(200))
    for target in (lazy, busy):
        admit(target, [5], 100.0)
    for day in range(1, 4):
        admit(busy, [5], 0.0, day=day)
    before = lazy.digest()
    assert lazy.explain(5, 3) == busy.explain(5, 3) and lazy.digest() == before
    admit(lazy, [5], 0.0, day=3)
    assert lazy.digest() == busy.digest()


def test_a_full_exact_bucket_drops_its_smallest_counts_and_says_so():
    ours, slots = admission(count(100, exact=True)), MIN_MEMORY // NUM_BUCKETS // 9
    keys = [(i + 1) << 12 | 5 for i in range(slots * 7 // 8 + 1)]
    admit(ours, keys[:10], 50.0)
    admit(ours, keys[10:])
    told = ours.explain(keys[0], 0)[0]
    assert told["estimate"] == 50 and told["bucket_dropped_keys"] == len(keys) - 11 and told["bucket_keys"] == 11
    assert ours.explain(keys[-1], 0)[0]["estimate"] == 1 and ours.explain(keys[10], 0)[0]["estimate"] == 0


def test_forgetting_removes_exact_counts_and_leaves_other_keys_alone():
    ours = admission(count(9, exact=True), count(9))
    keys = [(i + 1) << 12 | 5 for i in range(18)]
    admit(ours, keys, 4.0)
    ours.forget(np.array(keys[::2], np.uint64))
    assert [ours.explain(key, 0)[0]["estimate"] for key in keys] == [0, 4] * 9
    assert min(ours.explain(key, 0)[1]["estimate"] for key in keys) >= 4


def test_counts_of_other_units_or_memory_are_not_taken_over():
    source = admission(count(3))
    admit(source, [5])
    for other in (count(3, memory=2 * MIN_MEMORY), count(3, exact=True), count(300), score(2.0)):
        target = admission(other)
        before = target.digest()
        assert not target.load(source.state(), 0) and target.digest() == before
    assert not admission().load(source.state(), 0)


@pytest.mark.parametrize("exact", [False, True])
def test_a_threshold_or_p_may_change_and_what_was_counted_stays(exact):
    """A score's unit follows its threshold: counts are taken over in the new unit, rounded up."""
    source = admission(count(3, exact), score(1.0, exact))
    admit(source, [5], 1.0)
    for at in (0.3, 0.9, 1.0, 7.0, 1000.0, 1e38):
        target = admission(count(4, exact), lot(0.999), score(at, exact))
        assert target.load(source.state(), 0)
        counted, _, scored = target.explain(5, 0)
        assert counted["estimate"] == 1 and 0.1 <= scored["estimate"] <= 0.1 + at / 2**13
    lower = admission(count(3, exact), score(0.05, exact))
    assert lower.load(source.state(), 0) and lower.explain(5, 0)[1]["agrees"]
    assert admit(lower, [5], 2.0) == [True]


def test_what_a_bucket_holds_outgrows_a_counter_in_the_new_unit():
    source, lower = admission(score(1.0)), admission(score(0.25))
    for i in range(20):
        admit(source, [(i + 1) << 12 | 5], 9.0)
    assert lower.load(source.state(), 0)
    error = [target.explain(5, 0)[0]["too_high_by_at_most"] for target in (source, lower)]
    assert error[0] == pytest.approx(error[1], rel=0.01)


def test_what_is_told_of_a_key_is_json():
    ours = admission(count(3), score(0.3, exact=True), lot(1.0))
    admit(ours, [5])
    counted, scored, drawn = json.loads(json.dumps(ours.explain(5, 0)))
    assert (counted["estimate"], counted["agrees"], counted["n"]) == (1, False, 3)
    assert scored["estimate"] == pytest.approx(0.1, abs=1e-4) and scored["score"] == 0.3
    assert drawn["agrees"] and drawn["lot"] == draw_of(5, SEED)


class Clicked(AdmissionEntry):
    """Of an outside package: it has none of the keys of the entries here."""

    kind: str = "clicked"
    least: int = 2

    def counting(self, nonclk_coeff, click_coeff):
        return CountingRule(True, MIN_MEMORY, 0, 0.0, 1.0, self.least)


class Even(AdmissionEntry):
    kind: str = "even"

    @property
    def admits_below(self):
        return 0.5


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (count(3), "count 3: seen about 1 time (sketch, at most +1.04 too high)"),
        (count(3, exact=True), "count 3: seen 1 time (exact)"),
        (score(1.5, exact=True), "show_click 1.5: its score is 1 (exact)"),
        (lot(0.1), "probability 0.1: its random draw is 0.937, which does not admit it"),
        (Clicked(), "clicked: it has counted 1 (exact)"),
        (Even(), "even 0.5: its random draw is 0.937, which does not admit it"),
    ],
)
def test_an_entry_says_what_it_knows_of_a_key_in_a_sentence(entry, words):
    ours = admission(entry)
    admit(ours, [5], click=1.0)
    assert [each["text"] for each in ours.explain(5, 0)] == [words]


def test_a_full_exact_bucket_says_what_it_dropped():
    ours = admission(count(3, exact=True))
    for i in range(60):
        admit(ours, [(i + 1) << 12 | 5])
    (told,) = ours.explain(1 << 12 | 5, 0)
    assert told["bucket_dropped_keys"] and told["text"].endswith(
        f"(exact; its bucket was full, {told['bucket_dropped_keys']} keys were dropped from it)"
    )


def test_memory_is_what_was_asked_for_and_too_little_is_refused():
    for entry in (count(3, memory=16 << 20), count(300, True, 16 << 20), score(1.0, memory=16 << 20)):
        assert 0.98 < admission(entry).num_bytes / (16 << 20) < 1.01
        assert admission(entry, buckets=(0, 1024)).num_bytes == admission(entry).num_bytes / 4
    with pytest.raises(ValueError, match="less than 1MiB"):
        admission(count(3, memory=MIN_MEMORY - 1))
    assert admission().num_bytes == 0 == admission().digest()
    assert admit(admission(), [1, 2]) == [True, True]


def test_kernels_keep_the_state_that_their_twins_keep():
    """Not only decisions: counters, days and masses; keys, counts and drops."""
    entries, rng = (count(9), score(1.0, exact=True)), np.random.default_rng(3)
    ours, plain = admission(*entries), Reference(*entries)
    for day in range(4):
        keys = [mix_reference(int(i)) & ~0xFFF | int(i) % 2 for i in rng.permutation(80)]
        show = rng.integers(0, 3, 80).astype(float).tolist()
        assert admit(ours, keys, show, 0.0, day) == plain.admit(keys, show, [0.0] * 80, day)
    for bucket in (0, 1):
        (_, sketch), (_, exact) = plain.buckets[bucket]
        kept = {
            kind: tally
            for (_, _, tally) in ours._counting
            for kind in (SketchCounter, ExactCounter)
            if isinstance(tally, kind)
        }
        cells = kept[SketchCounter].arrays["cells"][bucket]
        assert cells[: len(sketch.cells)].tolist() == sketch.cells
        assert (sketch.day, sketch.mass) == (3, int(kept[SketchCounter].arrays["mass"][bucket]))
        table = {name: kept[ExactCounter].arrays[name][bucket] for name in ("keys", "counts", "dropped", "used")}
        used = table["counts"] > 0
        assert dict(zip(table["keys"][used].tolist(), table["counts"][used].tolist(), strict=True)) == exact.counts
        assert (int(table["dropped"]), int(table["used"])) == (exact.dropped, len(exact.counts))
