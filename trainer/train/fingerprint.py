"""The environment that a trainer's arithmetic depends on, beside the spec: part of commits, compared at a restart."""

import platform

import numba
import numpy as np
import torch


def fingerprint(device: torch.device) -> dict[str, str]:
    """Versions of libraries, instruction set, device and threads, as text."""
    return {
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": str(torch.get_num_threads()),
    }
