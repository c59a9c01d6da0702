"""What the arithmetic of a trainer depends on beside the spec: written into commits, compared at a restart."""

import platform

import numba
import numpy as np
import torch


def fingerprint(device: torch.device) -> dict[str, str]:
    """Libraries, instruction set, device and threads, in words."""
    return {
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": str(torch.get_num_threads()),
    }
