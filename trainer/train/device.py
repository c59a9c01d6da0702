"""The device of a trainer, and its arithmetic: threads, deterministic algorithms, and all else that sums depend on."""

import ctypes
import os
import platform
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import numba
import numpy as np
import torch

from headrace.errors import SpecError
from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.config import TrainSection
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.spec.defaults import fill_defaults

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


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next step, so that its pages are not faulted in again.

    Without this, several MB are returned to the system and requested again in each step. glibc only: in its malloc.h
    M_TRIM_THRESHOLD is -1 and M_MMAP_THRESHOLD is -3, of which the largest allowed value is 32 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 1 << 30)
        mallopt(-3, 32 << 20)


ACCUMULATE = "accumulate"
"""Key of the fingerprint of jobs that learn from several batches in one step."""
MAKER = "maker"
"""Key of the processor's maker. With the same instruction set, MKL rounds otherwise on AMD's than on Intel's."""
CPU_FACTS = Path("/proc/cpuinfo")


def fingerprint(device: torch.device) -> dict[str, str]:
    """Versions of libraries, instruction set, the processor's maker, device and threads, as text."""
    return {
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        MAKER: maker_in(CPU_FACTS.read_text() if CPU_FACTS.exists() else ""),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": str(torch.get_num_threads()),
    }


def maker_in(facts: str) -> str:
    """The maker named in the text of /proc/cpuinfo; "unknown" where it names none."""
    pairs = (line.partition(":") for line in facts.splitlines())
    named = (value.strip() for key, _, value in pairs if key.strip() in ("vendor_id", "CPU implementer"))
    return next(named, "unknown")


def merged_rows(dense: DenseSection) -> dict[str, str]:
    """The part of the fingerprint about `accumulate`: before, such a job applied the rows of each batch alone."""
    return {ACCUMULATE: "rows and dense"} if dense.accumulate > 1 else {}


def completed(recorded: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """A fingerprint out of a commit or a log; where it does not name the processor's maker, as old ones do not, it has
    the present one."""
    return {MAKER: now[MAKER], **recorded}


def comparable(commit: Commit, now: Mapping[str, str]) -> Mapping[str, str]:
    """The fingerprint of a commit, to compare with the present one; a change of the job file is no difference."""
    then = completed(commit.manifest.fingerprint or now, now)
    merged = fill_defaults(commit.state["spec"]).get("dense", {}).get("accumulate", 1) > 1
    return then if merged or ACCUMULATE not in now else {**then, ACCUMULATE: now[ACCUMULATE]}


def set_up_torch(train: TrainSection, cores: int, device: torch.device) -> None:
    """Fix the threads and choose deterministic algorithms, so that two runs agree bit for bit."""
    torch.set_num_threads(train.threads or cores)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms loads torch's compiler, too
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    keep_freed_memory()
    fix_workspaces(device, os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif train.amp == "float16":
        raise SpecError('"float16" is for GPUs; use "bfloat16" or "off" on a CPU', "train.amp")
