"""What features of a stream are worth: the learner is its twin, and what pays is found, and chance is not."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.samples.batch import Ragged
from headrace.service.planning.feature_columns import IdColumn, of_counters, of_cross, of_history, of_numbers, of_signs
from headrace.service.planning.feature_worth import FeatureBench, SampleFacts, find_features
from headrace.service.planning.progressive_learner import learn, learn_reference


def column(lists, *, is_mean=False):
    values = np.array([each for ids in lists for each in ids], np.uint64)
    return of_signs(Ragged(values, np.cumsum([0, *map(len, lists)])), is_mean=is_mean)


def single(ids):
    return column([[int(each)] for each in ids])


def facts(labels, times=None, ends=None):
    num = len(labels)
    end_E = np.arange(1, num + 1) if ends is None else np.array(ends)
    return SampleFacts(
        np.array(labels, float), end_E, np.full(num, np.nan) if times is None else np.array(times, float)
    )


@given(st.data(), st.integers(1, 3), st.floats(0.01, 1.0))
def test_the_learner_is_its_twin(data, admit, rate):
    ids = st.lists(st.integers(0, 3), max_size=3)
    rows = data.draw(
        st.lists(st.tuples(ids, ids, st.booleans(), st.floats(-3, 3), st.booleans()), min_size=1, max_size=9)
    )
    columns = [column([row[0] for row in rows]), column([row[1] for row in rows], is_mean=True)]
    labels = [float(row[2]) for row in rows]
    ends = [n for n, row in enumerate(rows) if row[4] and n] + [len(rows)]
    logit_B, num = np.array([row[3] for row in rows]), sum(each.num_ids for each in columns)
    starts = np.stack([columns[0].start_B1, columns[1].start_B1 + len(columns[0].id_N)])
    id_N = np.concatenate([columns[0].id_N, columns[1].id_N + columns[0].num_ids])
    share_N = np.concatenate([each.share_N() for each in columns])
    samples = [
        [(int(id_N[n]), float(share_N[n])) for c in range(2) for n in range(starts[c, b], starts[c, b + 1])]
        for b in range(len(rows))
    ]
    expected = learn_reference(samples, labels, ends, admit, rate, logit_B.tolist())
    room = np.empty(num), np.empty(num), np.empty(num, np.int64)
    learn(starts, id_N, share_N, np.array(labels), np.array(ends), admit, rate, *room, logit_B)
    np.testing.assert_allclose(logit_B, expected, rtol=1e-9, atol=1e-12)


def test_columns_of_what_earlier_events_tell():
    user, item = single([1, 1, 2, 1, 1]), single([10, 20, 10, 30, 40])
    click_B, end_E = np.array([True, True, False, False, True]), np.array([1, 2, 3, 5])
    history = of_history(user, item, click_B, end_E, 1)
    lists = [history.id_N[a:b].tolist() for a, b in zip(history.start_B1, history.start_B1[1:], strict=False)]
    assert lists == [[], [0], [], [1], [1]], "the last click of earlier events, none of the same event"
    assert history.num_rows == 1, "user 2 has clicked nothing"
    counts = of_counters([user], click_B, end_E, np.full(5, np.nan), np.array([0]))
    assert counts.num_rows == 2
    shows = counts.id_N.reshape(5, 2)[:, 0].tolist()
    assert shows[0] == shows[2] < shows[1] < shows[3] == shows[4], "0, 1, 0, 2, 2 earlier samples"


def test_a_cross_has_an_id_for_each_pair_and_none_without_a_part():
    crossed = of_cross(column([[1], [1], [2], []]), column([[5], [5, 6], [5], [5]]))
    ids = [crossed.id_N[a:b].tolist() for a, b in zip(crossed.start_B1, crossed.start_B1[1:], strict=False)]
    assert [len(each) for each in ids] == [1, 2, 1, 0]
    assert (crossed.num_ids, ids[0][0] in ids[1], ids[2][0] in ids[1]) == (3, True, False)


def test_numbers_become_ranges_of_equally_many():
    found = of_numbers(np.array([[n, 7.0] for n in range(1000)]))
    counts = np.bincount(found.id_N[0::2])
    assert len(counts) == 20 and counts.min() >= 49 and counts.max() <= 51
    assert len(set(found.id_N[1::2].tolist())) == 1 and found.num_rows == 0
    assert of_numbers(np.array([np.nan, np.inf, 1.0])).id_N.shape == (3,)


def stream(num=6000, seed=1):
    """Labels that a cross of `a` and `b` tells, a user's taste, and noise."""
    random = np.random.default_rng(seed)
    a, b, noise = random.integers(0, 8, num), random.integers(0, 8, num), random.integers(0, 50, num)
    taste = random.normal(0, 1.5, (8, 8))
    user = np.sort(random.integers(0, 60, num))
    chance = 1 / (1 + np.exp(-(taste[a, b] + random.normal(0, 0.5, 60)[user])))
    labels = random.random(num) < chance
    return {"a": single(a), "b": single(b), "noise": single(noise), "user": single(user)}, facts(labels)


def test_the_cross_that_pays_is_found_and_noise_is_not():
    base, sample = stream()
    found = find_features(sample, base, "click")
    gains = [gain for feature, gain in found.features if set(feature.of) == {"a", "b"}]
    assert sum(gain.auc for gain in gains) > 0.05 and max(gain.p for gain in gains) <= 0.002
    assert not any("noise" in feature.of for feature, _ in found.features)
    assert found.slots["noise"][0].auc > -0.005, "nothing is lost without it"
    rows = [num_rows for _, num_rows in found.admission.values()]
    assert rows == sorted(rows, reverse=True) and rows[0] <= found.num_rows
    again = find_features(sample, base, "click")
    assert again.features[0][1] == found.features[0][1] and again.slots == found.slots, "the same at every call"


def test_a_made_up_slot_must_pay():
    base, sample = stream()
    assert find_features(sample, base, "click", doubted={"noise"}).dropped == ("noise",)
    assert "user" not in find_features(sample, base, "click", doubted={"user"}).dropped


def test_a_gain_is_of_the_second_half_and_signs_say_what_is_better():
    base, sample = stream()
    bench = FeatureBench(sample)
    less, more = bench.measure([base["noise"]]), bench.measure([of_cross(base["a"], base["b"])])
    assert bench.gain(less, more).pays and not bench.gain(more, less).pays
    assert not bench.gain(more, more).pays


def test_the_room_of_a_column_without_ids():
    empty = IdColumn(np.zeros(2001, np.int64), np.empty(0, np.int64), 0, 0)
    bench = FeatureBench(facts([n % 2 for n in range(2000)]))
    assert empty.is_single and np.isfinite(bench.measure([empty]).auc)
