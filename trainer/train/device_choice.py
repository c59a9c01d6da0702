"""The device of a trainer: one GPU for each trainer of a machine, or the CPU. How it computes is assembly's choice."""

from collections.abc import MutableMapping

import torch

from headrace.errors import SpecError

CUBLAS_CONFIG, CUBLAS_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable of the environment, and its value: with fixed workspaces (8 of 4,096 KiB) NVIDIA's cuBLAS has the same bits
at every run. Without it, older versions of torch refuse products on a GPU in deterministic mode."""


def pick_device(wanted: str, local_rank: int, world: int) -> torch.device:
    """One GPU for each rank of a machine if there are GPUs and they are wanted; otherwise the CPU. Raises SpecError."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SpecError('is "cuda", but torch sees no GPU here; use "auto" or "cpu"', "train.device")
    return torch.device("cuda", gpu_of(local_rank, world, torch.cuda.device_count()))


def gpu_of(local_rank: int, world: int, num_gpus: int) -> int:
    """The GPU of a trainer, out of those that it sees. Raises SpecError where another trainer has it.

    NCCL refuses two trainers on one GPU. `world`: trainers of the job; one alone takes any GPU.
    """
    if world > 1 and local_rank >= num_gpus:
        seen = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise SpecError(
            f"this machine has more trainers than GPUs: torch sees {seen}, and this is trainer {local_rank + 1} here. "
            f'Set cluster.trainers so that at most {num_gpus} run on it, or train.device = "cpu". Where each trainer '
            "sees a GPU of its own (CUDA_VISIBLE_DEVICES), start its worker with LOCAL_RANK=0",
            "train.device",
        )
    return local_rank % num_gpus


def fix_workspaces(device: torch.device, environment: MutableMapping[str, str]) -> None:
    """Before CUDA starts: have products on a GPU repeat their bits. A value that is set already stays."""
    if device.type == "cuda":
        environment.setdefault(CUBLAS_CONFIG, CUBLAS_WORKSPACES)
