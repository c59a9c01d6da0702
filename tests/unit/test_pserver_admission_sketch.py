"""The sketch errs on one side only, within its formula; counts in commits keep their layout."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.keys import mix_reference
from headrace.pserver.admission import Admission
from headrace.pserver.admission.sketch import DEPTH
from headrace.pserver.admission_entries import MIN_COUNTS_BYTES, CountEntry, ShowClickEntry

BUCKET = 5


def counted(n, memory=MIN_COUNTS_BYTES, buckets=(BUCKET, BUCKET + 1)):
    entry = CountEntry(kind="count", n=n, memory=memory)
    return Admission.of([entry], nonclk_coeff=0.1, click_coeff=1.0, seed=1, buckets=buckets)


def keys_of_bucket(begin, end):
    return np.array([mix_reference(i) & ~0xFFF | BUCKET for i in range(begin, end)], np.uint64)


def show(target, keys, shows, day=0):
    shows = np.broadcast_to(np.float32(shows), keys.shape).copy()
    return target.admit(keys, shows, np.zeros(len(keys), np.float32), day)


def estimates(target, keys, day=0):
    return np.array([target.explain(int(key), day)[0]["estimate"] for key in keys])


RECORDS = st.dictionaries(st.integers(0, 80), st.integers(0, 40), max_size=60)


@given(st.lists(st.tuples(st.integers(0, 2), RECORDS), min_size=1, max_size=10))
@settings(max_examples=60)
def test_nothing_is_ever_counted_too_low(steps):
    """Sixteen counters a row for up to 81 keys, ticks included: never below the plain rule, nor above its bound."""
    ours, plain, day = counted(60_000), dict[int, int](), 0
    for days, records in steps:
        day += days
        plain = {key: count >> days for key, count in plain.items()}
        for key, shows in records.items():
            plain[key] = plain.get(key, 0) + shows
        keys = np.array([mix_reference(key) & ~0xFFF | BUCKET for key in records], np.uint64)
        show(ours, keys, list(records.values()), day)
    told = [ours.explain(mix_reference(key) & ~0xFFF | BUCKET, day)[0] for key in range(81)]
    assert all(told[key]["estimate"] >= count for key, count in plain.items())
    if day == 0:
        assert {t["bucket_units"] for t in told} == {sum(plain.values())}
    assert all(t["bucket_units"] >= sum(plain.values()) for t in told)


@pytest.mark.parametrize("skew", ["once", "zipf"])
@pytest.mark.parametrize("ticks", [0, 3])
@pytest.mark.parametrize("load", [1, 8])
def test_the_error_keeps_its_bound(skew, ticks, load):
    """Measured on 40 sketches: share of keys that are further off than e / width * N + 1 is at most exp(-DEPTH)."""
    beyond = []
    for trial in range(40):
        ours = counted(60_000, 4 * MIN_COUNTS_BYTES)
        width = next(iter(ours.state().values())).shape[1] // DEPTH
        keys = keys_of_bucket(trial * 10_000, trial * 10_000 + width * load)
        rng = np.random.default_rng(trial)
        plain = np.zeros(len(keys), np.int64)
        for day in range(ticks + 1):
            shows = np.ones(len(keys)) if skew == "once" else np.minimum(rng.zipf(1.5, len(keys)), 1000)
            plain = (plain >> int(day > 0)) + shows.astype(np.int64)
            show(ours, keys, shows, day)
        bound = ours.explain(int(keys[0]), ticks)[0]["too_high_by_at_most"]
        over = estimates(ours, keys, ticks) - plain
        assert over.min() >= 0
        beyond.append((over > bound).mean())
    assert np.mean(beyond) <= math.exp(-DEPTH)


def test_the_bound_is_not_empty():
    """At as many keys as counters of a row, most estimates are exact, and the bound is a few units."""
    ours = counted(200, 16 << 20)
    keys = keys_of_bucket(0, 1024)
    show(ours, keys, 1)
    told = ours.explain(int(keys[0]), 0)[0]
    assert told["too_high_by_at_most"] == pytest.approx(math.e + 1) and told["with_probability"] > 0.98
    assert (estimates(ours, keys) == 1).mean() > 0.85


def test_full_counters_stop_and_still_admit():
    ours = counted(255)
    key = keys_of_bucket(0, 1)
    assert show(ours, key, 1e30).tolist() == [True] and estimates(ours, key).tolist() == [255]
    assert show(ours, key, 1).tolist() == [True] and estimates(ours, key).tolist() == [255]
    assert estimates(ours, key, day=1).tolist() == [127]


@pytest.mark.parametrize("strange", [float("nan"), float("-inf"), -5.0, 0.0])
def test_strange_shows_count_nothing(strange):
    ours, key = counted(1), keys_of_bucket(0, 1)
    assert show(ours, key, strange).tolist() == [False] and estimates(ours, key).tolist() == [0]


@pytest.mark.parametrize("exact", [False, True])
def test_counts_in_commits_keep_their_layout(exact):
    """Golden: a commit's counts must mean the same in every later version."""
    entries = (
        CountEntry(kind="count", n=9, exact=exact, memory=MIN_COUNTS_BYTES),
        ShowClickEntry(kind="show_click", score=2.0, exact=exact, memory=MIN_COUNTS_BYTES),
    )
    ours = Admission.of(entries, nonclk_coeff=0.1, click_coeff=1.0, seed=1, buckets=(5, 6))
    for day in range(2):
        show(ours, keys_of_bucket(0, 30), np.arange(30) % 4, day)
    state = ours.state()
    hashed = hashlib.sha256(b"".join(array.tobytes() for array in state.values())).hexdigest()
    described = [f"{name} {array.dtype} {array.shape[1:]}" for name, array in state.items()]
    assert (hashed[:16], f"{ours.digest():032x}", described) == GOLDEN[exact]


GOLDEN = {
    False: (
        "c5daa0da9743d4f4",
        "7996d35c6419f9be780319a34029119f",
        [
            "0-count-sketch.cells uint8 (256,)",
            "0-count-sketch.day int32 ()",
            "0-count-sketch.mass uint64 ()",
            "1-show_click-sketch.cells uint16 (128,)",
            "1-show_click-sketch.day int32 ()",
            "1-show_click-sketch.mass uint64 ()",
            "0-count-sketch.exponent int16 ()",
            "1-show_click-sketch.exponent int16 ()",
        ],
    ),
    True: (
        "2e1cdf9bf96eb97e",
        "32aee0d10f5cd944412f177deb7d1301",
        [
            "0-count-exact.keys uint64 (28,)",
            "0-count-exact.counts uint8 (28,)",
            "0-count-exact.used int32 ()",
            "0-count-exact.day int32 ()",
            "0-count-exact.dropped uint64 ()",
            "1-show_click-exact.keys uint64 (25,)",
            "1-show_click-exact.counts uint16 (25,)",
            "1-show_click-exact.used int32 ()",
            "1-show_click-exact.day int32 ()",
            "1-show_click-exact.dropped uint64 ()",
            "0-count-exact.exponent int16 ()",
            "1-show_click-exact.exponent int16 ()",
        ],
    ),
}
