"""The best k of each group, and the calibration of groups: a plain twin, any order, any number of ranks."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.config import MetricsSection
from headrace.trainer.metrics.meter import LocalReduce, Meter
from headrace.trainer.metrics.ranking import GroupMeasures, add_groups_reference
from headrace.trainer.metrics.samples import ObservedBatch
from tests.unit.test_metrics_meter import CTR, STAY, ThreadedRanks

SAMPLES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 8).map(lambda n: n / 8), st.sampled_from([0.0, 1.0, 0.25])), max_size=40
)


def state_of(samples, at_k):
    measures = GroupMeasures(at_k, calibration=True)
    state = np.zeros(measures.size, np.int64)
    group, prediction, label = (np.array([each[n] for each in samples]) for n in range(3))
    measures.add(group.astype(np.uint64), prediction.astype(np.float32), label.astype(np.float32), state)
    return state, measures


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, at_k=st.sets(st.integers(1, 5), max_size=3), order=st.randoms(use_true_random=False))
def test_the_kernel_is_its_twin_and_the_order_of_samples_does_not_matter(samples, at_k, order):
    state, _ = state_of(samples, at_k)
    columns = [np.array([each[n] for each in samples], dtype) for n, dtype in enumerate((np.uint64, "f4", "f4"))]
    assert state.tolist() == add_groups_reference(*columns, sorted(at_k))
    mixed = list(samples)
    order.shuffle(mixed)
    assert state_of(mixed, at_k)[0].tolist() == state.tolist()


def test_the_measures_of_two_groups_by_hand():
    samples = [(1, 0.9, 0.0), (1, 0.8, 1.0), (1, 0.1, 1.0), (2, 0.5, 1.0), (2, 0.5, 0.0), (3, 0.25, 0.0)]
    state, measures = state_of(samples, (1, 2))
    found = measures.report(state)
    assert found["acc@1"] == 0.0  # the tie of group 2 counts against the model
    assert found["acc@2"] == 1.0
    assert found["recall@2"] == (0.5 + 1.0) / 2
    assert found["group_calibration_error"] == pytest.approx((abs(1.8 - 2) + 0.0 + 0.25) / 6, abs=1e-6)
    nothing = GroupMeasures((3,), calibration=True)
    assert set(nothing.report(np.zeros(nothing.size, np.int64)).values()) == {None}


class Tenths:
    """A metric of one's own: how the predictions lie in ten bins."""

    name, size = "most_common_tenth", 10

    def add(self, prediction_B, label_B, weight_B, state_W):
        state_W += np.bincount((prediction_B[weight_B > 0] * 10).astype(int).clip(0, 9), minlength=10)

    def value(self, state_W):
        return float(state_W.argmax()) if state_W.any() else None


CONFIG = MetricsSection(gauc_by="group", at_k=(1, 3), group_calibration=True, halves=False)


def batches(number):
    rng = np.random.default_rng(number)
    for step in range(6):
        size = 20
        yield ObservedBatch(
            step=step,
            prediction_B={name: rng.integers(0, 16, size).astype(np.float32) / 16 for name in ("ctr", "stay")},
            label_B={name: (rng.random(size) < 0.3).astype(np.float32) for name in ("ctr", "stay")},
            weight_B={name: rng.integers(0, 2, size).astype(np.float32) for name in ("ctr", "stay")},
            group_B=rng.integers(0, 9, size).astype(np.uint64),
        )


def measured(world, passes=3):
    ranks = ThreadedRanks(world)
    meters = [Meter(CONFIG, (CTR, STAY), timed=False, own=(Tenths(),)) for _ in range(world)]

    def work(rank):
        for number in range(passes):
            for at, observed in enumerate(batches(number)):
                if at % world == rank:
                    meters[rank].add(observed)
            meters[rank].close_pass(ranks.rank(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return meters[0]


def test_the_number_of_ranks_changes_nothing_nor_does_a_restart():
    one, three = measured(1), measured(3)
    assert one.report() == three.report()
    assert one.fingerprint() == three.fingerprint()
    life = one.report()["life"]
    assert {"acc@1", "recall@3", "group_calibration_error", "most_common_tenth"} <= life["ctr"].keys()
    assert "acc@1" not in life["stay"] and "most_common_tenth" in life["stay"]  # groups rank probabilities
    again = Meter(CONFIG, (CTR, STAY), timed=False, own=(Tenths(),))
    again.load_state(one.state())
    assert again.report()["life"] == life
    plain = Meter(CONFIG, (CTR, STAY), timed=False)
    plain.load_state(one.state())
    assert plain.report()["life"]["ctr"]["acc@1"] == life["ctr"]["acc@1"]
    assert plain.close_pass(LocalReduce())["ctr"].keys() == life["ctr"].keys() - {"most_common_tenth"}


@pytest.mark.parametrize(
    "keys", [{"at_k": (1,)}, {"group_calibration": True}, {"gauc_by": "g", "at_k": (2, 2)}, {"own": ("a:B", "a:B")}]
)
def test_groups_need_their_slot_and_nothing_is_named_twice(keys):
    with pytest.raises(ValueError, match=r"gauc_by|twice"):
        MetricsSection(**keys)
