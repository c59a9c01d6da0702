"""One step: losses are weighted means over the samples of all ranks, masks hold, non-finite values are detected."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.deadline import Deadline
from headrace.pserver.config import ShardProcess, TableSection
from headrace.pserver.server.embedded import EmbeddedShards
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.config import TaskSection, TrainSection
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.features.deduplication import tables_of
from headrace.trainer.features.model_inputs import FirstSigns
from headrace.trainer.features.pooling import KernelPooling
from headrace.trainer.features.training_batches import BatchMaker, targets
from headrace.trainer.models.calibration import add_calibration
from headrace.trainer.train.step import RowSums, Stepper, StepSettings

SCHEMA = Schema.of(
    [
        SparseSlot(name="a"),
        DenseSlot(kind="dense", name="d", size=2),
        MetaSlot(kind="meta", names=("click", "buy", "bought", "weight")),
    ]
)
TABLES = {"default": TableSection(dim=2, init_range=0.5)}
CTR = TaskSection(name="ctr", label="click")
PLAIN = StepSettings(schema=SCHEMA, tasks=[CTR], train=TrainSection())
BUY = TaskSection(name="price", label="buy", loss="mse", mask="bought", weight=3.0)


class Sums(nn.Module):
    """Output of both tasks: sum of first-order weight, vector and dense values."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        total = inputs.vectors_BFD.sum((1, 2)) + inputs.first_order_BF.sum(1) + inputs.dense_BC.sum(1)
        return {"ctr": total * self.scale, "price": total * self.scale, "inner": total}


class WithOwnLoss(Sums):
    def losses(self, outputs, inputs):
        return {"size": outputs["inner"].square()}


def samples(click=(1, 0, 0), buy=(2.0, np.nan, 5.0), bought=(1, 0, 1), weight=(1, 2, 0.5)):
    num = len(click)
    meta = {"click": click, "buy": buy, "bought": bought, "weight": weight}
    return Samples(
        {"a": Ragged(np.arange(num, dtype=np.uint64), np.arange(num + 1))},
        {"d": np.full((num, 2), 0.25, np.float32)},
        {name: np.array(values, np.float32) for name, values in meta.items()},
        np.arange(num),
        np.full(num, np.nan),
    )


def step(batch_samples, tasks, model=None, weight_slot="weight", extra_weight=0.0, train=None, at_once=None):
    shards = EmbeddedShards(ShardProcess.alone(TABLES, 1))
    maker = BatchMaker(tables_of(SCHEMA, TABLES, "click"), tasks, weight_slot, shards)
    maker.expect(1, True)
    shards.open_pass(1, Deadline.after(5))
    batch = maker.make(1, batch_samples)
    rows = shards.pull(batch.prepared, Deadline.after(5))
    settings = StepSettings(schema=SCHEMA, tasks=tasks, train=train or TrainSection(), at_once=at_once)
    stepper = Stepper(model or Sums(), settings, KernelPooling(1), torch.device("cpu"))
    weights = {task.name: float(batch.weight_B[task.name].sum()) + extra_weight for task in tasks}
    forward = stepper.forward(batch, rows, weights)
    sums = RowSums.of(batch)
    stepper.backward(batch, forward, sums)
    return batch, rows, forward, (stepper.gradients(batch, sums), sums.finite)


def test_the_loss_is_the_weighted_mean_over_the_samples_of_all_ranks():
    batch, rows, forward, (gradients, finite) = step(samples(), [CTR], extra_weight=6.5)
    logit_B = rows["default"].sum(1) + 0.5
    label_B, weight_B = np.array([1, 0, 0]), np.array([1, 2, 0.5])
    loss_B = np.log1p(np.exp(logit_B)) - label_B * logit_B
    assert finite
    assert forward.loss.item() == pytest.approx((loss_B * weight_B).sum() / 10, rel=1e-5)
    expected_B = (1 / (1 + np.exp(-logit_B)) - label_B) * weight_B / 10
    assert np.allclose(gradients["default"].grads_UD, expected_B[:, None].repeat(3, 1), atol=1e-6)
    assert np.allclose(forward.tensors["loss"], loss_B * weight_B, atol=1e-5)
    assert gradients["default"].show_U.tolist() == [1, 1, 1]
    assert gradients["default"].click_U.tolist() == [1, 0, 0]


def test_a_label_that_is_learnt_at_once_has_the_weights_of_fake_negatives():
    _, rows, _, (gradients, _) = step(samples(), [CTR], at_once="click")
    label_B, weight_B = np.array([1, 0, 0]), np.array([1, 2, 0.5])
    p_B = 1 / (1 + np.exp(-rows["default"].sum(1) - 0.5))
    fake_B = np.where(label_B, 1 + p_B, (1 - p_B) * (1 + p_B))
    expected_B = (p_B - label_B) * weight_B * fake_B / weight_B.sum()
    assert np.allclose(gradients["default"].grads_UD, expected_B[:, None].repeat(3, 1), atol=1e-6)
    (_, _, _, (plain, _)), (_, _, _, (other, _)) = step(samples(), [CTR]), step(samples(), [CTR], at_once="buy")
    assert np.array_equal(plain["default"].grads_UD, other["default"].grads_UD)


def test_a_masked_label_may_be_missing_and_is_not_learnt():
    batch, rows, forward, (gradients, finite) = step(samples(), [BUY], weight_slot=None)
    assert finite
    assert batch.weight_B["price"].tolist() == [1, 0, 1]
    assert gradients["default"].grads_UD[1].tolist() == [0, 0, 0]
    value_B = rows["default"].sum(1) + 0.5
    assert forward.loss.item() == pytest.approx(3 * ((value_B[0] - 2) ** 2 + (value_B[2] - 5) ** 2) / 2, rel=1e-5)
    assert np.allclose(forward.prediction_B["price"], value_B, atol=1e-6)


class Dropping(Sums):
    def __init__(self):
        super().__init__()
        self.dropout, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5).eval()

    def forward(self, inputs):
        return {name: self.dropout(value) for name, value in super().forward(inputs).items()}


def test_a_prediction_is_made_as_in_inference_and_does_not_change_the_model():
    model = Dropping()
    batch, rows, forward, _ = step(samples(), [CTR], model=model)
    stepper = Stepper(model, PLAIN, KernelPooling(1), torch.device("cpu"))
    before = torch.get_rng_state()
    told = stepper.predict(batch, rows, {"ctr": 1.0})
    assert np.allclose(told.prediction_B["ctr"], 1 / (1 + np.exp(-rows["default"].sum(1) - 0.5)), atol=1e-6)
    assert not np.allclose(told.prediction_B["ctr"], forward.prediction_B["ctr"], atol=1e-6)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training and model.dropout.training and not model.frozen.training


def test_a_missing_label_without_a_mask_gives_a_loss_that_is_not_finite():
    *_, (_, finite) = step(samples(click=(1, np.nan, 0)), [CTR], weight_slot=None)
    assert not finite


WEIGHTLESS = {"masked": {"bought": (0, 0, 0)}, "zeros": {"weight": (0, 0, 0)}, "sum": {"weight": (1, 2, -1)}}


@pytest.mark.parametrize("amp", ["off", "float16"])
@pytest.mark.parametrize("how", WEIGHTLESS)
def test_a_step_without_weight_is_not_learnt_and_its_keys_are_still_counted(how, amp):
    model = WithOwnLoss()
    train = TrainSection(amp=amp)
    dense = AllReduceDense(model, DenseSection(), SingleRank())
    dense.clear()
    *_, (gradients, finite) = step(samples(**WEIGHTLESS[how]), [BUY], model=model, train=train)
    assert finite and not gradients["default"].grads_UD.any() and not dense.gradient.any()
    assert gradients["default"].show_U.tolist() == [1, 1, 1]
    assert gradients["default"].click_U.tolist() == [1, 0, 0]


def test_a_rank_without_weight_learns_zeros_where_another_has_some():
    *_, (gradients, finite) = step(samples(bought=(0, 0, 0)), [BUY], extra_weight=2.0)
    assert finite and not gradients["default"].grads_UD.any()


class Severed(Sums):
    def forward(self, inputs):
        return {name: value.detach() for name, value in super().forward(inputs).items()}


def test_a_model_whose_outputs_have_no_gradient_is_an_error():
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(samples(), [CTR], model=Severed())


def test_losses_of_tasks_add_up_with_their_weights():
    _, _, both, _ = step(samples(), [CTR, BUY], weight_slot=None)
    parts = [step(samples(), [task], weight_slot=None)[2].loss.item() for task in (CTR, BUY)]
    assert both.loss.item() == pytest.approx(sum(parts), rel=1e-5)
    assert set(both.prediction_B) == {"ctr", "price"}


def test_a_model_may_add_losses_of_its_own_and_name_tensors_to_measure():
    _, rows, plain, _ = step(samples(), [CTR], weight_slot=None)
    _, _, own, _ = step(samples(), [CTR], model=WithOwnLoss(), weight_slot=None)
    inner_B = rows["default"].sum(1) + 0.5
    assert own.loss.item() == pytest.approx(plain.loss.item() + (inner_B**2).mean(), rel=1e-5)
    assert np.allclose(own.tensors["inner"], inner_B, atol=1e-6)


class WithTargets(Sums):
    """A loss that reads labels and signs, with an inner output."""

    for_losses = ("inner",)

    def losses(self, outputs, inputs, targets):
        self.seen = targets
        return {"wrong": outputs["inner"].square() * targets.label_B["ctr"]}

    def measures(self, outputs, inputs, targets):
        assert not torch.is_grad_enabled()
        return {"of_clicked": outputs["inner"][targets.label_B["ctr"] > 0]}


def test_losses_and_measures_of_a_model_may_read_labels_and_signs():
    model = WithTargets()
    batch, rows, own, _ = step(samples(), [CTR], model=model)
    plain = step(samples(), [CTR])[2]
    inner_B = rows["default"].sum(1) + 0.5
    assert own.loss.item() == pytest.approx(plain.loss.item() + inner_B[0] ** 2 / 3.5, rel=1e-5)
    assert own.tensors["of_clicked"] == pytest.approx(inner_B[:1], abs=1e-6)
    assert "inner" not in own.tensors and "inner" in plain.tensors
    assert model.seen.sign_B["a"].tolist() == [0, 1, 2]
    assert model.seen.weight_B["ctr"].tolist() == [1, 2, 0.5]


def test_the_first_sign_of_a_sample_has_the_bits_of_the_sign():
    column = Ragged(np.array([7, 8, (1 << 64) - 5], np.uint64), np.array([0, 0, 2, 3]))
    signs = FirstSigns({"a": column}, torch.device("cpu"))
    assert signs["a"].tolist() == [0, 7, -5] and list(signs) == ["a"] and len(signs) == 1


def test_samples_are_measured_in_inference_mode_before_the_step_learns_from_them():
    class Dropping(Sums):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(1), nn.Dropout(0.5)

        def forward(self, inputs):
            outputs = super().forward(inputs)
            return {"ctr": self.drop(self.norm(outputs["ctr"][:, None]))[:, 0]}

    torch.manual_seed(3)
    model = Dropping()
    apart = replace(PLAIN, measures_apart=True)
    own = Stepper(model, apart, KernelPooling(1), torch.device("cpu"))
    batch, rows, _, _ = step(samples(), [CTR])
    before, state = model.norm.running_mean.clone(), torch.get_rng_state()
    measured = own.measured(batch, rows, {"ctr": 3.5})
    assert torch.equal(before, model.norm.running_mean) and torch.equal(state, torch.get_rng_state())
    assert model.training and model.drop.training
    logit_B = (rows["default"].sum(1) + 0.5) / np.sqrt(1 + model.norm.eps)
    assert np.allclose(measured.prediction_B["ctr"], 1 / (1 + np.exp(-logit_B)), atol=1e-6)
    plain = Stepper(model, PLAIN, KernelPooling(1), torch.device("cpu"))
    learnt = plain.forward(batch, rows, {"ctr": 3.5})
    assert not np.allclose(learnt.prediction_B["ctr"], measured.prediction_B["ctr"])
    assert plain.measured(batch, rows, {"ctr": 3.5}) is None
    mine = own.forward(batch, rows, {"ctr": 3.5})
    assert not (mine.predictions or mine.measured or mine.calibrated), "the host reads those of `measured` alone"


@pytest.mark.parametrize("at_once", [None, "click"])
def test_measures_that_are_taken_apart_are_not_computed_again_to_learn_and_gradients_have_the_same_bits(at_once):
    class Measuring(WithTargets):
        def __init__(self):
            super().__init__()
            add_calibration(self, ["ctr"])
            self.modes = []
            self.calibration.register_forward_hook(lambda *_: self.modes.append(torch.is_grad_enabled()))

        def measures(self, outputs, inputs, targets):
            self.modes.append(outputs["inner"].requires_grad)
            return super().measures(outputs, inputs, targets)

    modes, learnt = [], []
    for apart in (False, True):
        model, given = Measuring(), replace(PLAIN, measures_apart=apart, at_once=at_once)
        stepper = Stepper(model, given, KernelPooling(1), torch.device("cpu"))
        batch, rows, _, _ = step(samples(), [CTR])
        measured = stepper.measured(batch, rows, {"ctr": 3.5})
        forward, sums = stepper.forward(batch, rows, {"ctr": 3.5}), RowSums.of(batch)
        stepper.backward(batch, forward, sums)
        grads = stepper.gradients(batch, sums)["default"].grads_UD
        modes.append(model.modes)
        learnt.append((grads.tobytes(), model.scale.grad.item(), stepper.take_loss()))
        assert (measured or forward).moments["ctr"].any() and "of_clicked" in (measured or forward).tensors
    assert modes == [[True, True], [False, False]], "both once: while it learns, and in the pass that measures"
    assert learnt[0] == learnt[1]


def test_half_precision_keeps_predictions_near():
    exact, rough = (step(samples(), [CTR], train=TrainSection(amp=amp))[2] for amp in ("off", "bfloat16"))
    assert np.allclose(exact.prediction_B["ctr"], rough.prediction_B["ctr"], atol=0.02)


def test_targets_without_weight_or_mask_are_the_labels():
    label_B, weight_B = targets(samples(), [CTR], None)
    assert label_B["ctr"].tolist() == [1, 0, 0] and weight_B["ctr"].tolist() == [1, 1, 1]


def test_a_pass_that_is_still_read_is_known_when_the_next_number_is_much_higher():
    """Numbers of withdrawn passes are not used again, so there may be any number of them between two passes."""
    maker = BatchMaker(tables_of(SCHEMA, TABLES, "click"), [CTR], None, EmbeddedShards(ShardProcess.alone(TABLES, 1)))
    maker.expect(7, True)
    maker.expect(70, False)
    assert maker.make(7, samples()).prepared.learn and not maker.make(70, samples()).prepared.learn
