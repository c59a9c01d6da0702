"""The result of trainer.metrics.meter does not depend on ranks, order or restarts."""

import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.exact_auc import exact_auc
from headrace.trainer.config import MetricsSection, TaskSection
from headrace.trainer.metrics.auc import sum_group_aucs_reference
from headrace.trainer.metrics.measures import reliability, reliability_reference
from headrace.trainer.metrics.meter import LocalReduce, Meter
from headrace.trainer.metrics.samples import ObservedBatch
from headrace.trainer.metrics.totals import FRACTION_ONE, add_samples, empty

CTR = TaskSection(name="ctr", label="click")
STAY = TaskSection(name="stay", label="seconds", loss="mse")


class ThreadedRanks:
    """Ranks as `world` threads that meet at every call."""

    def __init__(self, world):
        self.barrier = threading.Barrier(world, timeout=20)
        self.box = [None] * world

    def rank(self, number):
        return _Rank(self, number)


class _Rank:
    def __init__(self, ranks, number):
        self.ranks, self.number = ranks, number

    def _meet(self, value):
        self.ranks.box[self.number] = value
        self.ranks.barrier.wait()
        everybody = list(self.ranks.box)
        self.ranks.barrier.wait()
        return everybody

    def sum(self, array):
        return np.sum(self._meet(array.copy()), axis=0)

    def gather(self, columns):
        everybody = self._meet({name: column.copy() for name, column in columns.items()})
        return everybody if self.number == 0 else None


def batch(seed, size=64, step=0, day=0.0, tasks=("ctr",)):
    rng = np.random.default_rng(seed)
    prediction = {name: rng.random(size, dtype=np.float32) for name in tasks}
    return ObservedBatch(
        step=step,
        prediction_B=prediction,
        label_B={name: (rng.random(size) < 0.4).astype(np.float32) for name in tasks},
        weight_B={name: rng.integers(0, 3, size).astype(np.float32) / 2 for name in tasks},
        time_s_B=day * 86400 + rng.random(size) * 1000,
        group_B=rng.integers(0, 9, size).astype(np.uint64),
        slices={"device": rng.integers(0, 12, size).astype(np.uint64)},
        tensors={"loss": rng.random(size, dtype=np.float32), "gate": rng.standard_normal((size, 3))},
    )


def config(**changes):
    return MetricsSection(**{"gauc_by": "impression", "slices": ("device",), "max_slice_values": 4} | changes)


def meter(folder=None, *, timed=True, tasks=(CTR,), **changes):
    return Meter(config(**changes), tasks, timed=timed, halves_folder=folder)


def joined(batches, task="ctr"):
    return tuple(
        np.concatenate([getattr(b, c)[task] for b in batches]) for c in ("prediction_B", "label_B", "weight_B")
    )


def run_ranks(passes, world, folder=None):
    """The meter of rank 0. `passes`: for each pass a list of batches, distributed over the ranks in turn."""
    ranks, meters = ThreadedRanks(world), [meter(folder) for _ in range(world)]

    def work(number):
        for batches in passes:
            for step, observed in enumerate(batches[number::world]):
                meters[number].add(_at_step(observed, step))
            meters[number].close_pass(ranks.rank(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return meters[0]


def close(one, observed):
    """A pass of one batch."""
    one.add(observed)
    one.close_pass(LocalReduce())


def _at_step(observed, step):
    return ObservedBatch(step, *(getattr(observed, name) for name in list(ObservedBatch.__dataclass_fields__)[1:]))


def test_the_measures_of_a_pass_are_those_of_its_samples(tmp_path):
    batches = [batch(seed, step=seed) for seed in range(5)]
    one = meter(tmp_path)
    for observed in batches:
        one.add(observed)
    found = one.close_pass(LocalReduce())["ctr"]
    prediction, label, weight = joined(batches)
    group = np.concatenate([b.group_B for b in batches])
    kept = weight > 0
    assert found["count"] == kept.sum()
    assert found["mean_label"] == pytest.approx(np.average(label, weights=weight))
    assert found["mean_prediction"] == pytest.approx(np.average(prediction, weights=weight))
    assert found["calibration"] == pytest.approx(found["mean_prediction"] / found["mean_label"])
    losses = -np.where(label == 1, np.log(prediction), np.log1p(-prediction))
    assert found["logloss"] == pytest.approx(np.average(losses, weights=weight), rel=1e-5)
    entropy = -(m := found["mean_label"]) * np.log(m) - (1 - m) * np.log(1 - m)
    assert found["normalized_entropy"] == pytest.approx(found["logloss"] / entropy)
    error = prediction.astype(float) - label
    assert found["mae"] == pytest.approx(np.average(abs(error), weights=weight))
    assert found["mse"] == pytest.approx(np.average(error**2, weights=weight))
    assert found["rmse"] == pytest.approx(found["mse"] ** 0.5)
    assert found["acc"] == pytest.approx(np.average((prediction >= 0.5) == (label == 1), weights=weight))
    assert abs(found["auc"] - exact_auc(prediction, label, weight)) <= found["auc_error"] + 1e-12
    total, groups = sum_group_aucs_reference(group[kept], prediction[kept], label[kept])
    assert found["gauc"] == pytest.approx(total / FRACTION_ONE / groups)
    assert found["gauc_groups"] == groups


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(2, 3), st.randoms(use_true_random=False))
def test_ranks_and_order_change_no_bit(seeds, world, random):
    passes = [[batch(seed, size=20, day=0.3 * p) for seed in seeds] for p in range(2)]
    alone = run_ranks(passes, 1)
    for batches in passes:
        random.shuffle(batches)
    together = run_ranks(passes, world)
    assert together.report() == alone.report()
    assert together.fingerprint() == alone.fingerprint()
    state, other = alone.state(), together.state()
    assert state.facts == other.facts
    assert state.arrays.keys() == other.arrays.keys()
    assert all((state.arrays[name] == other.arrays[name]).all() for name in state.arrays)


def test_different_passes_have_different_fingerprints():
    digests = set()
    for seed in range(3):
        one = meter()
        one.add(batch(seed))
        one.close_pass(LocalReduce())
        digests.add(one.fingerprint())
    assert len(digests) == 3


def test_life_is_the_sum_of_passes_and_the_pass_is_only_its_own():
    split, whole = meter(), meter()
    for seed in range(4):
        split.add(batch(seed))
        split.close_pass(LocalReduce())
        whole.add(batch(seed))
    alone = meter()
    alone.add(batch(3))
    assert split.report()["pass"]["ctr"]["auc"] == alone.close_pass(LocalReduce())["ctr"]["auc"]
    whole.close_pass(LocalReduce())
    for name in ("count", "auc", "logloss", "mean_prediction", "acc"):
        assert split.report()["life"]["ctr"][name] == whole.report()["life"]["ctr"][name]
    tensors = split.report()["tensors"]
    assert tensors["life"] == whole.report()["tensors"]["life"]
    assert tensors["pass"]["loss"]["mean"] == pytest.approx(batch(3).tensors["loss"].mean())
    assert tensors["life"]["gate"]["max"] == max(batch(seed).tensors["gate"].max() for seed in range(4))


def test_the_window_drops_passes_older_than_its_length():
    one = meter(window=86_400.0)
    for day in range(4):
        one.add(batch(day, day=day))
        one.close_pass(LocalReduce())
    report = one.report()
    assert report["window"] == report["pass"]
    assert report["life"]["ctr"]["count"] > report["window"]["ctr"]["count"]


def test_a_late_pass_joins_its_own_part_of_the_window_or_none():
    one, hour = meter(), 1 / 24
    counts = []
    for number, day in enumerate((10, 10 - 3 * hour, 10 - 30 * hour)):
        one.add(batch(number, day=day))
        one.close_pass(LocalReduce())
        counts.append(one.report()["window"]["ctr"]["count"])
    assert counts[0] < counts[1] == counts[2]
    assert one.report()["life"]["ctr"]["count"] > counts[2]


def test_one_event_of_the_far_future_does_not_empty_the_window():
    one = meter()
    for number in range(2):
        observed = batch(number, day=1)
        observed.time_s_B[0] = 4e9 if number else np.nan
        one.add(observed)
        one.close_pass(LocalReduce())
    assert one.report()["window"]["ctr"]["count"] == one.report()["life"]["ctr"]["count"]


def test_without_event_time_the_window_is_the_last_24_passes():
    one = meter(timed=False, gauc_by=None, slices=())
    for number in range(26):
        one.add(batch(number, size=10 if number < 2 else 1))
        one.close_pass(LocalReduce())
    masked = sum(int((batch(n, size=1).weight_B["ctr"] == 0).sum()) for n in range(2, 26))
    assert one.report()["window"]["ctr"]["count"] == 24 - masked


def test_an_empty_pass_and_one_class_are_none_never_nan():
    one = meter()
    found = one.close_pass(LocalReduce())["ctr"]
    assert found["count"] == 0 and found["auc"] is None and found["logloss"] is None and found["gauc"] is None
    only = batch(1)
    only.label_B["ctr"][:] = 1
    one.add(only)
    found = one.close_pass(LocalReduce())["ctr"]
    assert found["auc"] is None and found["gauc"] is None and found["normalized_entropy"] is None
    assert found["logloss"] > 0
    json.dumps(one.report(), allow_nan=False)


def test_masked_samples_are_ignored_even_without_a_label():
    plain, masked = meter(slices=()), meter(slices=())
    observed = batch(1)
    plain.add(observed)
    hidden = batch(1)
    hidden.label_B["ctr"][hidden.weight_B["ctr"] == 0] = np.nan
    masked.add(hidden)
    assert plain.close_pass(LocalReduce()) == masked.close_pass(LocalReduce())


def test_tasks_are_measured_separately_and_values_have_no_auc(tmp_path):
    one = meter(tmp_path, tasks=(CTR, STAY))
    observed = batch(1, tasks=("ctr", "stay"))
    one.add(observed)
    found = one.close_pass(LocalReduce())
    assert "auc" in found["ctr"] and "auc" not in found["stay"] and "logloss" not in found["stay"]
    assert found["ctr"]["mse"] != found["stay"]["mse"]
    assert "auc" not in one.halves()["last"]["stay"]


def test_the_state_survives_a_restart(tmp_path):
    straight = meter(tmp_path / "a")
    for number in range(6):
        straight.add(batch(number, day=0.2 * number))
        straight.close_pass(LocalReduce())
        if number == 3:
            state = straight.state()
            facts = json.loads(json.dumps(state.facts, allow_nan=False))
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "predictions.bin").write_bytes(
                (tmp_path / "a" / "predictions.bin").read_bytes() + b"torn"
            )
    again = meter(tmp_path / "b")
    again.load_state(type(state)(state.arrays, facts))
    for number in (4, 5):
        again.add(batch(number, day=0.2 * number))
        again.close_pass(LocalReduce())
    assert again.report() == straight.report()
    assert again.halves() == straight.halves()
    assert again.fingerprint() == straight.fingerprint()


def gone_on(saved, other):
    """`other`, with the state of a meter loaded as from a commit."""
    state = saved.state()
    other.load_state(type(state)(state.arrays, json.loads(json.dumps(state.facts, allow_nan=False))))
    return other


def counted(one, scope):
    return one.report()[scope]["ctr"]["count"]


@pytest.mark.parametrize("after", [{"window": 24 * 86_400.0}, {"timed": False}])
@pytest.mark.parametrize("flipped", [False, True])
def test_a_window_with_parts_of_another_length_starts_anew(after, flipped, caplog):
    before = {"window": 7200.0}
    old, new = (meter(**each) for each in ((after, before) if flipped else (before, after)))
    for day in range(3):
        close(old, batch(day, day=100 + day))
    gone_on(old, new)
    assert caplog.messages == ["metrics.window or event_time changed: the window of the metrics starts anew"]
    assert counted(new, "window") == 0 and counted(new, "life") == counted(old, "life") > 0
    for day in (103, 103.01):
        close(new, batch(7, day=day))
    assert counted(new, "window") == 2 * counted(new, "pass") > 0


def test_a_window_saved_without_its_unit_continues(caplog):
    old = meter()
    close(old, batch(1))
    state = old.state()
    new = meter()
    new.load_state(type(state)(state.arrays, {name: fact for name, fact in state.facts.items() if name != "part_s"}))
    assert counted(new, "window") == counted(old, "window") > 0 and not caplog.messages


SLICES = {
    "another slot": {"slices": ("hour",)},
    "one more": {"slices": ("hour", "device")},
    "none": {"slices": ()},
    "fewer values": {"max_slice_values": 2},
    "more values": {"max_slice_values": 6},
}


@pytest.mark.parametrize("how", SLICES)
def test_saved_metrics_that_differ_start_anew_and_the_rest_continues(how, tmp_path, caplog):
    def with_hour(number):
        observed = batch(number)
        observed.slices["hour"] = observed.slices["device"] % np.uint64(3)
        return observed

    old, new = meter(tmp_path), meter(tmp_path, **SLICES[how])
    close(old, with_hour(1))
    gone_on(old, new)
    again = meter(tmp_path, **SLICES[how])
    assert len(caplog.messages) == 1 and "slice/" in caplog.text
    close(new, with_hour(2))
    gone_on(new, again)
    assert len(caplog.messages) == 1
    close(old, with_hour(2))
    for one in (new, again):
        for scope in ("life", "window"):
            found, straight = ({**each.report()[scope]["ctr"]} for each in (one, old))
            slices, before = found.pop("slices", {}), straight.pop("slices")
            assert found == straight
            assert slices.keys() == set(SLICES[how].get("slices", ("device",)))
            for slot in slices:
                goes_on = how == "one more" and slot == "device"
                total = sum(value["count"] for value in slices[slot].values())
                assert total == (straight["count"] if goes_on else new.report()["pass"]["ctr"]["count"])
                assert not goes_on or slices[slot] == before[slot]
        assert one.halves() == old.halves() is not None


def test_equal_tasks_continue_and_halves_of_other_tasks_are_not_measured(tmp_path, caplog):
    both, tasks = (CTR, STAY), ("ctr", "stay")
    old, new = meter(tmp_path), meter(tmp_path, tasks=both)
    close(old, batch(1))
    gone_on(old, new)
    assert any("task/stay" in message for message in caplog.messages)
    close(new, batch(2, tasks=tasks))
    again = gone_on(new, meter(tmp_path, tasks=both))
    life = again.report()["life"]
    assert life["ctr"]["count"] > again.report()["life"]["stay"]["count"] == new.report()["pass"]["stay"]["count"] > 0
    assert new.halves() is None and again.halves() is None
    assert gone_on(again, meter(tmp_path)).halves() is None
    assert gone_on(old, meter(tmp_path)).halves() == old.halves() is not None


def test_halves_saved_with_other_groups_are_not_measured(tmp_path):
    old = meter(tmp_path)
    close(old, batch(1))
    assert gone_on(old, meter(tmp_path, gauc_by=None)).halves() is None


def test_halves_are_exact_and_in_training_order(tmp_path):
    one = meter(tmp_path)
    batches = [batch(seed, size=31, step=seed % 4) for seed in range(8)]
    for begin in (0, 4):
        for observed in batches[begin : begin + 4]:
            one.add(observed)
        one.close_pass(LocalReduce())
    prediction, label, weight = joined(batches)
    middle, halves = len(label) // 2, one.halves()
    for name, part in (("first", slice(0, middle)), ("last", slice(middle, None))):
        assert halves[name]["ctr"]["auc"] == pytest.approx(exact_auc(prediction[part], label[part], weight[part]))
        assert halves[name]["ctr"]["count"] == (weight[part] > 0).sum()
        group = np.concatenate([b.group_B for b in batches])[part]
        kept = weight[part] > 0
        total, groups = sum_group_aucs_reference(group[kept], prediction[part][kept], label[part][kept])
        assert halves[name]["ctr"]["gauc"] == pytest.approx(total / FRACTION_ONE / groups)


def test_halves_of_three_ranks_are_in_order_of_step_then_rank(tmp_path):
    passes = [[batch(10 * p + n, size=5 + n) for n in range(7)] for p in range(2)]
    run_ranks(passes, 3, tmp_path / "three")
    run_ranks(passes, 1, tmp_path / "one")
    three, one = ((tmp_path / name / "predictions.bin").read_bytes() for name in ("three", "one"))
    assert three == one


def test_a_custom_metric_is_summed_like_the_others():
    class Highest:
        name, size = "share_above_half", 2

        def add(self, prediction_B, label_B, weight_B, state_W):
            state_W += ((prediction_B > 0.5) & (weight_B > 0)).sum(), (weight_B > 0).sum()

        def value(self, state_W):
            return float(state_W[0] / state_W[1]) if state_W[1] else None

    one = Meter(MetricsSection(), (CTR,), timed=False, own=(Highest(),))
    assert one.close_pass(LocalReduce())["ctr"]["share_above_half"] is None
    batches = [batch(seed) for seed in range(2)]
    for observed in batches:
        one.add(observed)
        one.close_pass(LocalReduce())
    prediction, _, weight = joined(batches)
    assert one.report()["life"]["ctr"]["share_above_half"] == (prediction[weight > 0] > 0.5).mean()


@given(st.lists(st.tuples(st.integers(0, 63), st.integers(0, 1), st.integers(1, 4)), max_size=60))
def test_the_reliability_curve_is_that_of_the_twin(samples):
    totals = empty(1, 64)
    prediction_B, label_B, weight_B = np.array(samples or [(0, 0, 0)], np.float32).T.copy()
    add_samples(prediction_B / 64, label_B, weight_B, np.zeros(len(label_B), np.int64), True, totals)
    found = reliability(totals[0])
    assert found == [pytest.approx(each) for each in reliability_reference(totals[0])]
    assert sum(each["weight"] for each in found) == weight_B.sum()


def test_tenths_of_the_reliability_curve_hold_a_tenth_of_the_samples_each():
    random = np.random.default_rng(3)
    totals = empty(1, 65_536)
    prediction_B = random.random(100_000).astype(np.float32)
    label_B = (random.random(100_000) < prediction_B**2).astype(np.float32)
    add_samples(prediction_B, label_B, np.ones_like(label_B), np.zeros(100_000, np.int64), True, totals)
    found = reliability(totals[0])
    assert [each["weight"] for each in found] == pytest.approx([10_000] * 10, abs=20)
    assert [each["prediction"] for each in found] == pytest.approx([0.05 + 0.1 * n for n in range(10)], abs=0.01)
    assert all(each["label"] == pytest.approx(each["prediction"] ** 2, abs=0.02) for each in found)
