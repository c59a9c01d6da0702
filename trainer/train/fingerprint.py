"""The environment that a trainer's arithmetic depends on, beside the spec: part of commits, compared at a restart."""

import platform
from collections.abc import Mapping

import numba
import numpy as np
import torch

from trainer.checkpoint.commits import Commit
from trainer.dense_config import DenseSection
from trainer.spec.defaults import fill_defaults

ACCUMULATE = "accumulate"
"""Key of the fingerprint of jobs that learn from several batches in one step."""


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


def merged_rows(dense: DenseSection) -> dict[str, str]:
    """The part of the fingerprint about `accumulate`: before, such a job applied the rows of each batch alone."""
    return {ACCUMULATE: "rows and dense"} if dense.accumulate > 1 else {}


def comparable(commit: Commit, now: Mapping[str, str]) -> Mapping[str, str]:
    """The fingerprint of a commit, to compare with the present one; a change of the job file is no difference."""
    then: Mapping[str, str] = commit.manifest["fingerprint"] or now
    merged = fill_defaults(commit.state["spec"]).get("dense", {}).get("accumulate", 1) > 1
    return then if merged or ACCUMULATE not in now else {**then, ACCUMULATE: now[ACCUMULATE]}
