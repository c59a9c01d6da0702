"""Devices of ranks that are processes: the CPU, whose sums are gloo's, and a GPU, whose sums are NCCL's.

A machine with one GPU is enough for tests. NCCL refuses two ranks on a GPU of one machine, so each rank calls itself a
machine of its own (NCCL_HOSTID), and they sum through sockets.
"""

import os

import pytest
import torch

from headrace.trainer.train.device import CUBLAS_CONFIG, CUBLAS_WORKSPACES

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def machine_of_its_own(rank: int) -> dict[str, str]:
    """What the environment of a rank says where ranks share a GPU."""
    return {"NCCL_HOSTID": f"rank-{rank}", "LOCAL_RANK": "0"}


def environment_of(rank: int) -> dict[str, str]:
    """The whole environment of a rank on a shared GPU, or on the CPU."""
    return os.environ | machine_of_its_own(rank) | {CUBLAS_CONFIG: CUBLAS_WORKSPACES}
