"""The calibration of predictions: it follows a stream, at any weight of its samples, and is a part of the model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headrace.errors import BadInput, SpecError
from headrace.trainer.config import TaskSection
from headrace.trainer.dense.flat_parameters import FlatParameters
from headrace.trainer.exports.onnx_model import OnnxModel, with_weights
from headrace.trainer.models.calibration import (
    FOLLOWED_STEPS,
    MAX_MEMORY,
    MEMORY,
    SHARE,
    SUMS,
    Calibration,
    add_calibration,
    moments,
    moments_reference,
    motion,
    newton_step,
)
from headrace.trainer.models.contract import Shape, SlotShape
from headrace.trainer.train.tracing import FrozenModel, trace

WIDTH = 4
STILL = 160.0, 0.0, 160.0, 160.0
"""The sums of motion of 160 samples, whose logits have the mean 0 and the variance 1."""
SAMPLES = st.lists(
    st.tuples(st.integers(-40, 40), st.integers(0, 32), st.sampled_from([0, 1]), st.sampled_from([0, 1, 2, 0.5]))
)


def sigmoid(logit):
    return 1 / (1 + np.exp(-logit))


def followed(logit_N, label_N, weight_N, batch=256, calibration=None):
    """The probabilities of a stream, each before its batch is followed."""
    kept = Calibration(["ctr"]) if calibration is None else calibration
    found = []
    for at in range(0, len(logit_N), batch):
        logit_B, label_B, weight_B = (each[at : at + batch].astype(np.float32) for each in (logit_N, label_N, weight_N))
        prediction_B = torch.sigmoid(kept("ctr", torch.from_numpy(logit_B))).numpy()
        found.append(prediction_B)
        kept.learn(moments(logit_B, prediction_B, label_B, weight_B)[None])
    return np.concatenate(found)


@given(SAMPLES)
def test_moments_are_those_of_the_twin(samples):
    # multiples of powers of two: every sum is exact
    columns = [[z / 8 for z, *_ in samples], [p / 32 for _, p, *_ in samples]]
    columns += [[float(y) for *_, y, _ in samples], [float(w) for *_, w in samples]]
    found = moments(*(np.array(each, np.float32) for each in columns))
    assert found.tolist() == moments_reference(*columns)


@given(st.lists(st.floats(0.01, 50), min_size=4, max_size=4), st.sampled_from([0.25, 8.0, 1024.0]))
def test_a_common_factor_of_all_weights_changes_nothing(sizes, factor):
    z, one, other, error = sizes
    sums = [error, -error / 2, z * z * one + other, z * one, one, one]
    weighted = [each * factor for each in sums[:5]] + [one * factor**2]
    known = [0.0] * 5
    scale, offset, information = newton_step((1.0, 0.0), known, sums)
    found = newton_step((1.0, 0.0), known, weighted)
    assert found[:2] == pytest.approx((scale, offset), abs=1e-9)
    assert found[2][2] == pytest.approx(factor * information[2])


def test_what_is_remembered_is_bounded_and_a_large_batch_counts_whole():
    sums = [0.0, 0.0, 300.0, 0.0, 100.0, 100.0]
    information = [0.0] * 5
    for _ in range(20):
        *_, information = newton_step((1.0, 0.0), information, sums)
    assert information[2] == pytest.approx(MEMORY)
    for _ in range(480):
        *_, information = newton_step((1.0, 0.0), information, sums)
    assert information[2] == pytest.approx(MAX_MEMORY) and information[4] == MAX_MEMORY / SHARE
    information = [0.0, 0.0, MEMORY, MEMORY, 0.0]
    *_, information = newton_step((1.0, 0.0), information, [10 * each for each in sums])
    assert information[2] == pytest.approx(1000.0)


@pytest.mark.parametrize("share_kept", [1.0, 0.1])
def test_a_stream_whose_base_rate_and_scale_move_stays_calibrated(share_kept):
    random = np.random.default_rng(1)
    n = 200_000
    true_N = random.normal(-1.5, 1, n) + np.where(np.arange(n) > 120_000, 0.7, 0.0)
    logit_N = 1.6 * true_N + 0.8  # what the model says: too far out, and too high
    label_N = random.random(n) < sigmoid(true_N)
    kept_N = label_N | (random.random(n) < share_kept)
    weight_N = np.where(label_N, 1.0, 1 / share_kept)[kept_N]
    logit_N, label_N = logit_N[kept_N], label_N[kept_N]
    prediction_N = followed(logit_N, label_N, weight_N)

    def of(values_N):
        parts = np.array_split(values_N * weight_N, 20)
        return np.array([each.sum() for each in parts])[2:]

    before = of(sigmoid(logit_N)) / of(label_N)
    after = of(prediction_N) / of(label_N)
    assert abs(before - 1).min() > 0.05
    windows = np.cumsum(of(prediction_N)) / np.cumsum(of(label_N))
    within = 0.02 if share_kept == 1 else 0.03  # which negatives are kept is noise of its own
    assert abs(windows - 1).max() < within
    assert abs(after - 1).max() < 2 * within

    def loss(p_N):
        half = len(p_N) // 2
        return -(weight_N * np.where(label_N, np.log(p_N), np.log(1 - p_N)))[half:].sum()

    assert loss(prediction_N) < 0.99 * loss(sigmoid(logit_N))


def test_at_first_it_changes_no_bit():
    calibration, logit_B = Calibration(["ctr"]), torch.randn(100)
    assert torch.equal(calibration("ctr", logit_B), logit_B)
    assert torch.equal(calibration("another", logit_B), logit_B)


def test_sums_without_weight_or_that_are_not_finite_are_left_out():
    calibration = Calibration(["a", "b"])
    calibration.learn(np.array([[0.0] * SUMS, [np.inf, *[1.0] * (SUMS - 1)]]))
    assert calibration.state_dict()["scale_T"].tolist() == [1, 1]
    assert not calibration.state_dict()["information_TI"].any()


def test_a_wild_gradient_keeps_the_order_of_predictions():
    calibration = Calibration(["ctr"])
    calibration.learn(np.array([[1e9, -1e9, 1.0, 0.0, 1.0, 1.0, *STILL]]))
    assert float(calibration.state_dict()["scale_T"][0]) > 0


def test_a_young_model_that_moves_in_every_step_is_followed(monkeypatch):
    random = np.random.default_rng(3)
    steps, size = 40, 1024
    n = steps * size
    true_N = random.normal(-1.5, 0.5, n)
    label_N = random.random(n) < sigmoid(true_N)
    logit_N = true_N + 1.6 * np.repeat(0.85 ** np.arange(steps), size)  # by up to 0.24 in a step

    def farthest():
        found = followed(logit_N, label_N, np.ones(n), size), label_N
        predicted, clicks = (np.cumsum(each.reshape(steps, size)[4:].sum(1)) for each in found)
        return abs(predicted / clicks - 1).max()

    now = farthest()
    monkeypatch.setattr("headrace.trainer.models.calibration.FOLLOWED_STEPS", 0)
    assert now < 0.08 < 0.15 < farthest()


def test_logits_that_move_by_chance_alone_are_not_followed():
    moved, before = motion([0.0, 0.0, 0.0], STILL)
    assert moved == 0 and before == [1, 0, pytest.approx(1 / 160)]
    moved, _ = motion(before, [160.0, 160 * 0.3, 160 * 1.09, 160.0])
    assert moved == 0, "within three standard deviations of the difference, 0.34"
    moved, after = motion(before, [160.0, -160.0, 160 * 2.0, 160.0])
    assert -1 < moved < -0.8 and after == [2, -1, pytest.approx(1 / 160)]


def test_motion_is_followed_in_the_first_steps_only():
    moved, after = motion([FOLLOWED_STEPS, 0.0, 0.0], [160.0, -160.0, 160.0, 160.0])
    assert moved == 0 and after == [FOLLOWED_STEPS, 0, 0]


def test_a_calibration_of_a_store_without_motion_is_not_young():
    random = np.random.default_rng(4)
    old, now = Calibration(["ctr"]), Calibration(["ctr"])
    for _ in range(5):
        followed(random.normal(-1, 1, 512), random.random(512) < 0.25, np.ones(512), calibration=old)
    now.load_state_dict({**old.state_dict(), "motion_TM": torch.zeros(1, 3)})
    for offset in (0, 1):  # the stream's own motion
        followed(random.normal(offset - 1, 0.1, 512), np.ones(512), np.ones(512), 512, now)
    assert now.motion_TM.tolist() == [[FOLLOWED_STEPS, 0, 0]]


class Tower(nn.Module):
    """A model without settings."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        return {"ctr": self.linear(inputs.vectors["item"]).squeeze(1)}


def calibrated_tower():
    model = Tower()
    add_calibration(model, ["ctr"])
    model.calibration.learn(np.array([[30.0, -20.0, 90.0, 5.0, 40.0, 40.0, *STILL]]))
    assert model.calibration.scale_T[0] != 1 and model.calibration.offset_T[0] != 0
    return model


def test_an_export_has_the_calibration_of_its_version():
    tasks = [TaskSection(name="ctr", label="click")]
    shape = Shape((SlotShape("item", WIDTH, False),), (), (), ("ctr",))
    template = trace(first := calibrated_tower(), shape, tasks)
    model = calibrated_tower()
    model.calibration.learn(np.array([[-30.0, 10.0, 90.0, 5.0, 40.0, 40.0, *STILL]]))
    frozen = FrozenModel(first, tasks)
    state = model.state_dict()
    frozen.load(state)
    vectors = torch.randn(7, WIDTH)
    filled = OnnxModel(with_weights(template, {name: value.numpy() for name, value in state.items()}))
    found = filled.run({"item": vectors.numpy()})["ctr"]
    logit = model.linear(vectors).squeeze(1)
    wanted = torch.sigmoid(logit * state["calibration.scale_T"][0] + state["calibration.offset_T"][0])
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5)
    assert abs(found - torch.sigmoid(logit).detach().numpy()).max() > 0.01


def test_the_key_may_change_between_two_runs():
    saved = FlatParameters(calibrated_tower()).tensors()
    without, anew = Tower(), Tower()
    add_calibration(anew, ["ctr"])
    FlatParameters(without).load(saved)
    assert torch.equal(without.linear.weight, saved["model.linear.weight"])
    FlatParameters(anew).load({name: value for name, value in saved.items() if "calibration" not in name})
    assert torch.equal(anew.linear.weight, saved["model.linear.weight"])
    assert anew.calibration.scale_T.tolist() == [1]
    with pytest.raises(BadInput, match="is of another model than the spec's: model.linear.bias"):
        FlatParameters(anew).load({name: value for name, value in saved.items() if not name.endswith("bias")})


def test_a_model_with_something_of_that_name_is_refused():
    model = Tower()
    model.calibration = nn.Linear(1, 1)
    with pytest.raises(SpecError, match="attribute 'calibration'"):
        add_calibration(model, ["ctr"])
