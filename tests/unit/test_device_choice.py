"""Each trainer of a machine has a GPU of its own, and products on it repeat their bits. Tested without a GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.trainer.config import TrainSection
from headrace.trainer.train import device
from headrace.trainer.train.device import CUBLAS_CONFIG, CUBLAS_WORKSPACES, fix_workspaces, gpu_of, pick_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@given(st.integers(1, 16), st.integers(2, 64))
def test_trainers_of_a_machine_have_different_gpus(num_gpus, world):
    num_here = min(world, num_gpus)
    assert [gpu_of(rank, world, num_gpus) for rank in range(num_here)] == list(range(num_here))


@pytest.mark.parametrize(("local_rank", "num_gpus", "seen"), [(1, 1, "1 GPU,"), (2, 2, "2 GPUs,"), (7, 4, "4 GPUs,")])
def test_a_trainer_without_a_gpu_of_its_own_is_told_what_to_set(local_rank, num_gpus, seen):
    with pytest.raises(SpecError) as refused:
        gpu_of(local_rank, 8, num_gpus)
    assert refused.value.path == "train.device"
    for words in (
        seen,
        f"trainer {local_rank + 1} here",
        f"at most {num_gpus}",
        'train.device = "cpu"',
        "LOCAL_RANK=0",
    ):
        assert words in str(refused.value)


@given(st.integers(0, 64), st.integers(1, 16))
def test_one_trainer_alone_takes_any_gpu(local_rank, num_gpus):
    assert 0 <= gpu_of(local_rank, 1, num_gpus) < num_gpus


@pytest.mark.parametrize("wanted", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_the_device_is_what_is_wanted_and_there(wanted, num_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        assert pick_device(wanted, 1, 2) == CPU
        return
    with pytest.raises(SpecError, match="more trainers than GPUs" if num_gpus else "sees no GPU"):
        pick_device(wanted, 1, 2)
    if num_gpus:
        assert pick_device(wanted, 0, 2) == torch.device("cuda", 0)


def test_products_on_a_gpu_repeat_their_bits_unless_the_user_chose():
    environment = {}
    fix_workspaces(CPU, environment)
    assert environment == {}
    fix_workspaces(GPU, environment)
    assert environment == {CUBLAS_CONFIG: CUBLAS_WORKSPACES}
    chosen = {CUBLAS_CONFIG: ":16:8"}
    fix_workspaces(GPU, chosen)
    assert chosen == {CUBLAS_CONFIG: ":16:8"}


def test_workspaces_are_fixed_before_cuda_starts(monkeypatch):
    """A trainer on a CPU leaves the environment alone."""
    environment, seen = {}, []
    monkeypatch.setattr(device.os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((device, dict(environment))))
    device.set_up_torch(TrainSection(), 1, CPU)
    assert environment == {} and not seen
    device.set_up_torch(TrainSection(), 1, GPU)
    assert seen == [(GPU, {CUBLAS_CONFIG: CUBLAS_WORKSPACES})]
