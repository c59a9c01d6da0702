"""Dense parameters in one flat buffer learn exactly as with torch's optimizers."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from headrace.errors import SpecError
from headrace.trainer.collectives.ranks import SingleRank
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense.flat_parameters import ALIGN_FLOATS, FlatOptimizer, FlatParameters
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.dense_optimizers import DenseAdagrad, DenseAdam, DenseAdamW, DenseSgd


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))


PLAIN = {
    "sgd": (DenseSgd(kind="sgd", lr=0.1, momentum=0.5), lambda p: torch.optim.SGD(p, 0.1, momentum=0.5)),
    "adam": (DenseAdam(lr=0.1), lambda p: torch.optim.Adam(p, 0.1)),
    "adamw": (
        DenseAdamW(kind="adamw", lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2),
    ),
    "l2": (DenseAdam(lr=0.1, weight_decay=0.2), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.2)),
    "adagrad": (DenseAdagrad(kind="adagrad", lr=0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    "sgd-l2": (DenseSgd(kind="sgd", lr=0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)),
    "momentum-l2": (
        DenseSgd(kind="sgd", lr=0.1, momentum=0.5, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, weight_decay=0.2),
    ),
    "adagrad-l2": (
        DenseAdagrad(kind="adagrad", lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.2),
    ),
    "sgd-excluded": (
        DenseSgd(kind="sgd", lr=0.1, momentum=0.5, weight_decay=0.2, no_decay=("bias", "2.")),
        lambda p: torch.optim.SGD(excluded(p), 0.1, momentum=0.5, weight_decay=0.2),
    ),
    "adamw-excluded": (
        DenseAdamW(kind="adamw", lr=0.1, weight_decay=0.2, no_decay=("bias", "2.")),
        lambda p: torch.optim.AdamW(excluded(p), 0.1, weight_decay=0.2),
    ),
    "adam-excluded": (
        DenseAdam(lr=0.1, weight_decay=0.2, no_decay=("bias", "2.")),
        lambda p: torch.optim.Adam(excluded(p), 0.1, weight_decay=0.2),
    ),
    "adagrad-excluded": (
        DenseAdagrad(kind="adagrad", lr=0.1, weight_decay=0.2, no_decay=("bias", "2.")),
        lambda p: torch.optim.Adagrad(excluded(p), 0.1, weight_decay=0.2),
    ),
}


def excluded(parameters):
    """Of the model's four parameters the first one decays."""
    first, *rest = parameters
    return [{"params": [first]}, {"params": rest, "weight_decay": 0.0}]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_flat_buffer_learns_as_separate_parameters_do(kind):
    section, make = PLAIN[kind]
    flat, plain = model(), model()
    part = AllReduceDense(flat, DenseSection(optimizer=section), SingleRank())
    optimizer = make(plain.parameters())
    for seed in range(5):
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
        part.clear()
        flat(x).square().mean().backward()
        part.after_backward(0, 1.0)
        part.wait()
        part.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


CLASSES = {
    "sgd": (DenseSgd(kind="sgd", lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": PLAIN["sgd"],
    "adam": (
        DenseAdam(lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, foreach=False, fused=True),
    ),
    "adamw": (
        DenseAdamW(kind="adamw", lr=0.1, beta2=0.99, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.1, betas=(0.9, 0.99), weight_decay=0.1, foreach=False, fused=True),
    ),
    "decoupled": (
        DenseAdam(lr=0.1, beta2=0.99, weight_decay=0.1, decoupled=True),
        lambda p: torch.optim.AdamW(p, 0.1, betas=(0.9, 0.99), weight_decay=0.1, foreach=False, fused=True),
    ),
    "adagrad": (
        DenseAdagrad(kind="adagrad", lr=0.1, initial=0.2),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.2, foreach=False),
    ),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_weights_and_state_are_those_of_torch_s_classes_bit_for_bit(kind):
    section, make = CLASSES[kind]
    random = torch.Generator().manual_seed(4)
    start = torch.randn(500, generator=random)
    flat, theirs = start.clone(), nn.Parameter(start.clone())
    ours, optimizer = FlatOptimizer(flat, section), make([theirs])
    for _ in range(5):
        theirs.grad = torch.randn(500, generator=random)
        ours.step(theirs.grad)
        optimizer.step()
    state = {name: value for name, value in optimizer.state[theirs].items() if value is not None}
    assert torch.equal(flat, theirs)
    assert ours.state.keys() == state.keys() == (set() if kind == "sgd" else section.state)
    for name, value in state.items():
        assert torch.equal(ours.state[name], value) and ours.state[name].dtype == value.dtype


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_decoupled_weight_decay_shrinks_weights_and_leaves_the_state_alone(kind):
    lr, decay, random = 0.1, 0.2, torch.Generator().manual_seed(4)
    start = torch.randn(500, generator=random)
    flat, plain = start.clone(), nn.Parameter(start.clone())
    section, theirs = {
        "sgd": (DenseSgd(kind="sgd", lr=lr, momentum=0.5, weight_decay=decay, decoupled=True),
                torch.optim.SGD([plain], lr, momentum=0.5)),
        "adagrad": (DenseAdagrad(kind="adagrad", lr=lr, weight_decay=decay, decoupled=True),
                    torch.optim.Adagrad([plain], lr)),
    }[kind]  # fmt: skip
    ours = FlatOptimizer(flat, section)
    for _ in range(5):
        plain.grad = torch.randn(500, generator=random)
        ours.step(plain.grad)
        plain.data *= 1 - lr * decay
        theirs.step()
    assert torch.allclose(flat, plain, rtol=0, atol=1e-6)


def test_a_part_of_a_name_that_no_parameter_has_is_refused():
    section = DenseSection(optimizer=DenseAdamW(kind="adamw", no_decay=("bias", "biass")))
    with pytest.raises(SpecError, match=r"no_decay: no parameter has 'biass' in its name; there are 0.weight, 0.bias"):
        AllReduceDense(model(), section, SingleRank())


def test_optimizers_without_the_later_keys_are_written_as_before_there_were_any():
    for optimizer in (DenseSgd(kind="sgd"), DenseAdagrad(kind="adagrad"), DenseAdamW(kind="adamw")):
        assert not {"no_decay", "decoupled"} & optimizer.model_dump(mode="json").keys()
    assert DenseSgd(kind="sgd", no_decay=("bias",)).model_dump(mode="json")["no_decay"] == ["bias"]


START = """
import sys, torch
from headrace.trainer.config import TrainSection
from headrace.trainer.dense.all_reduce import AllReduceDense
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.train.device import set_up_torch
from headrace.trainer.collectives.ranks import SingleRank

set_up_torch(TrainSection(), 1, torch.device("cpu"))
assert torch.are_deterministic_algorithms_enabled()
part = AllReduceDense(torch.nn.Linear(2, 2), DenseSection(), SingleRank())
part.gradient.fill_(1.0)
part.step()
print(sorted({"torch._dynamo", "torch._inductor"} & sys.modules.keys()))
"""


@pytest.mark.long
def test_a_trainer_does_not_load_torch_s_compiler_which_takes_as_long_as_torch():
    assert subprocess.run([sys.executable, "-c", START], capture_output=True, text=True).stdout == "[]\n"


def test_every_parameter_begins_at_a_multiple_of_64_bytes():
    flat = model()
    AllReduceDense(flat, DenseSection(), SingleRank())
    base = next(flat.parameters()).data_ptr()
    assert all((p.data_ptr() - base) % (4 * ALIGN_FLOATS) == 0 for p in flat.parameters())


def test_the_gradient_is_clipped_to_its_largest_norm():
    section = DenseSection(clip_norm=0.5, optimizer=DenseSgd(kind="sgd", lr=1.0))
    flat = nn.Linear(2, 1, bias=False)
    start = flat.weight.detach().clone()
    part = AllReduceDense(flat, section, SingleRank())
    flat(torch.tensor([[30.0, 40.0]])).sum().backward()
    part.step()
    assert torch.allclose(start - flat.weight, torch.tensor([[0.3, 0.4]]), atol=1e-5)


def test_the_digest_covers_weights_and_optimizer_state():
    flat = model()
    part = AllReduceDense(flat, DenseSection(), SingleRank())
    before = part.digest()
    assert before == part.digest()
    flat(torch.ones(1, 3)).sum().backward()
    part.step()
    assert part.digest() != before


def test_a_gradient_that_is_not_finite_is_detected_and_a_large_one_is_accepted():
    flat = nn.Linear(2, 1)
    part = AllReduceDense(flat, DenseSection(), SingleRank())
    part.gradient[:2] = 3e38
    assert part.finite()
    part.gradient[1] = float("nan")
    assert not part.finite()


def test_gradients_whose_sum_over_ranks_may_not_be_finite_are_not_either():
    flat = FlatParameters(nn.Linear(2, 1))
    flat.gradient[1] = -3e38
    assert flat.finite(world=1) and not flat.finite(world=2)
    flat.gradient[1] = -1.5e38
    assert flat.finite(world=2)


def test_a_model_without_parameters_is_no_error():
    part = AllReduceDense(nn.Identity(), DenseSection(), SingleRank())
    part.clear()
    part.after_backward(0, 1.0)
    part.wait()
    assert part.finite()
    part.step()
    part.flush()
    assert part.tensors() == {}


class Centred(nn.Module):
    """Keeps a moving mean, as models often do, by replacing the registered tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean()
        return (x - self.mean) * self.weight


def test_a_buffer_that_the_model_replaces_is_saved_hashed_and_loaded():
    learnt, fresh = Centred(), Centred()
    part, other = (AllReduceDense(each, DenseSection(), SingleRank()) for each in (learnt, fresh))
    before = part.digest()
    learnt(torch.tensor([4.0]))
    assert part.tensors()["model.mean"].item() == 2.0
    assert part.digest() != before
    fresh(torch.tensor([6.0]))
    other.load({name: tensor.clone() for name, tensor in part.tensors().items()})
    assert fresh.mean.item() == 2.0 and other.digest() == part.digest()


@pytest.mark.parametrize("old", PLAIN)
@pytest.mark.parametrize("new", PLAIN)
def test_another_dense_optimizer_starts_with_its_own_state_and_keeps_the_weights(old, new):
    def learnt(part, flat):
        part.clear()
        flat(torch.ones(2, 3)).square().mean().backward()
        part.after_backward(0, 1.0)
        part.wait()
        part.step()

    before, after = model(), model()
    part = AllReduceDense(before, DenseSection(optimizer=PLAIN[old][0]), SingleRank())
    learnt(part, before)
    saved = {name: tensor.clone() for name, tensor in part.tensors().items()}
    other = AllReduceDense(after, DenseSection(optimizer=PLAIN[new][0]), SingleRank())
    other.load(saved)
    assert all(torch.equal(other.tensors()[name], saved[name]) for name in saved if name.startswith("model."))
    assert old != new or other.digest() == part.digest()
    learnt(other, after)


def test_of_the_state_of_adagrad_the_sum_alone_begins_at_initial():
    adagrad = DenseAdagrad(kind="adagrad", initial=0.25)
    assert (adagrad.start("sum"), adagrad.start("residual.0")) == (0.25, 0.0)
