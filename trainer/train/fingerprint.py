"""The environment that a trainer's arithmetic depends on, beside the spec: part of commits, compared at a restart."""

import platform
from collections.abc import Mapping
from pathlib import Path

import numba
import numpy as np
import torch

from headrace.trainer.checkpoint.commits import Commit
from headrace.trainer.dense_config import DenseSection
from headrace.trainer.spec.defaults import fill_defaults

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
    then = completed(commit.manifest["fingerprint"] or now, now)
    merged = fill_defaults(commit.state["spec"]).get("dense", {}).get("accumulate", 1) > 1
    return then if merged or ACCUMULATE not in now else {**then, ACCUMULATE: now[ACCUMULATE]}
