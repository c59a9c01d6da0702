"""Makes the environment of a checkout: `python3 deploy/environment.py .venv train,ui [--constraint FILE]`.

Installs Headrace from the checkout with the extras named, by uv where it is installed, else by pip. On a machine
without a GPU it takes the CPU build of PyTorch, which has no CUDA, if the index of those builds answers. Prints the
large downloads, and at the end what was fetched. Needs the standard library alone: it runs before anything is
installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

CPU_TORCH = "https://download.pytorch.org/whl/cpu"
"""The index of PyTorch's builds without CUDA."""
ANSWER_S = 5.0
"""Longest wait for that index."""
SHOWN_MB = 20
"""Downloads from this size on are shown."""
DOWNLOAD = re.compile(r"Downloading (\S+) \(([\d.]+) ?([kKMG])i?B\)")
MB = {"k": 1e-3, "K": 1e-3, "M": 1.0, "G": 1e3}


def has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA's and its driver."""
    return shutil.which("nvidia-smi") is not None or os.path.exists("/proc/driver/nvidia/version")


def answers(index: str) -> bool:
    """Whether a package index answers soon."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=ANSWER_S):
            return True
    except (OSError, ValueError):
        return False


def installer(python: Path) -> list[str]:
    """The command that installs packages for `python`."""
    uv = shutil.which("uv")
    return [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]


def install(command: Sequence[str]) -> float:
    """Run an installer; returns the megabytes that it fetched. Ends this program where it fails."""
    fetched, lines = 0.0, list[str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines.append(line)
            if (found := DOWNLOAD.search(line)) is not None:
                size = float(found[2]) * MB[found[3]]
                fetched += size
                if size >= SHOWN_MB:
                    print(f"  fetching {found[1]} ({size:,.0f} MB)", flush=True)
    if process.returncode != 0:
        sys.exit("".join(lines[-40:]) + f"error: {' '.join(command)} ended with {process.returncode}")
    return fetched


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("extras")
    parser.add_argument("--constraint", type=Path)
    given = parser.parse_args()
    started_s, python = time.monotonic(), given.folder / "bin" / "python"
    if not python.exists():
        venv.create(given.folder, with_pip=True)
    command = installer(python)
    print(f"installing headrace[{given.extras}] into {given.folder} with {Path(command[0]).name}", flush=True)
    locked = ["--constraint", str(given.constraint)] if given.constraint else []
    fetched = 0.0
    if not has_gpu() and not list(given.folder.glob("lib/python*/site-packages/torch")):
        if answers(CPU_TORCH):
            fetched += install([*command, "--index-url", CPU_TORCH, "torch"])
        else:
            print("  PyTorch's index of CPU builds does not answer; that for GPUs is a download of 3 GB", flush=True)
    fetched += install([*command, *locked, "--editable", f".[{given.extras}]"])
    size = sum(path.lstat().st_size for path in given.folder.rglob("*")) / 1e6
    print(
        f"ready after {time.monotonic() - started_s:.0f} s: fetched {fetched:,.0f} MB, "
        f"{given.folder} takes {size:,.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
