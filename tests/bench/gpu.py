"""`make gpu`: all that this project knows about a GPU, in one run on a machine that has one; ten minutes by estimate.

1. What the machine is. 2. The tests that need a GPU, NCCL between two processes on it among them: sums, and rows on
the devices of two trainers. 3. W1 at both widths:
rows on the device, rows on the host, plain PyTorch and FBGEMM's TBE on the same GPU. 4. Where the time of a step goes.

It writes build/gpu/results.json and build/gpu/table.md, a table for docs/gpu.md, and nothing outside the checkout. A
part that fails or runs over its time is noted, and the others go on. `make gpu DRY=1` prints the plan and runs nothing;
`make gpu DEVICE=cpu` runs a small one with the CPU in the GPU's place, to show that it works.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.gpu_peers import BATCH
from tests.bench.w1 import make

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu"
PEERS = OUT / "fbgemm"
"""FBGEMM is installed here, beside the environment and not in it."""
WIDTHS = (64, 400)
OF_GPUS = ("needs_gpu", "import DEVICES")
"""A test that names one of these runs on a GPU where there is one."""
TAIL = 2_000
"""Characters of a failed part's output that are kept."""


@dataclass(frozen=True)
class Part:
    """One program of the run."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str]
    rate: bool = False
    """Whether its last line is JSON with `samples_per_s`."""
    optional: bool = False
    """Whether the run is whole without it."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rows: int
    steps: int
    tests: tuple[str, ...]


def size_of(device: str) -> Size:
    """All of it on a GPU; on a CPU as much as shows that every part works."""
    if device == "cuda":
        return Size(1_000_000, 150, tests_of_gpus())
    names = "unit/test_device_rows.py", "unit/test_row_learning.py", "contract/test_row_exchange.py"
    return Size(50_000, 30, tuple(f"tests/{name}" for name in names))


def tests_of_gpus() -> tuple[str, ...]:
    """The files with tests that need a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(str(path.relative_to(ROOT)) for path in files if any(word in path.read_text() for word in OF_GPUS))


def installer() -> tuple[str, ...]:
    """The command that installs packages: uv has made the environment where it is installed, and pip elsewhere."""
    uv = shutil.which("uv")
    return (uv, "pip", "install", "--python", sys.executable) if uv else (sys.executable, "-m", "pip", "install")


def plan(device: str, npz: Path) -> Iterator[Part]:
    """The programs in order."""
    size, python, none = size_of(device), sys.executable, dict[str, str]()
    if device == "cuda":
        asked = "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        yield Part("the GPU", ("nvidia-smi", *asked), 60, none, optional=True)
    options = ("-q", "-p", "no:cacheprovider", "-n0", "-m", "not slow", "--timeout", "240")
    chosen = ("-k", "cuda or gpu") if device == "cuda" else ()
    yield Part(
        "tests", (python, "-m", "pytest", *options, *chosen, *size.tests), 480 if device == "cuda" else 900, none
    )
    if device == "cuda":
        wheel = (*installer(), "--no-deps", "--quiet", "--target", str(PEERS), "fbgemm-gpu")
        yield Part("FBGEMM's wheel", wheel, 120, none, optional=True)
    data = ("--npz", str(npz), "--steps", str(size.steps))
    for hidden in WIDTHS:
        ours = (python, "-m", "tests.bench.training", *data, "--hidden", str(hidden), "--set", f"train.device={device}")
        peers = (python, "-m", "tests.bench.gpu_peers", *data, "--hidden", str(hidden), "--device", device)
        for where in ("device", "host"):
            command = (*ours, "--set", f"train.rows={where}", "--cores", str(min(16, os.cpu_count() or 1)))
            yield Part(f"W1/{hidden}, rows on the {where}", command, 240, none, rate=True)
        yield Part(f"W1/{hidden}, plain PyTorch", (*peers, "--kind", "torch"), 240, none, rate=True)
        if device == "cuda":
            found = {"PYTHONPATH": str(PEERS)}
            yield Part(f"W1/{hidden}, FBGEMM's TBE", (*peers, "--kind", "tbe"), 240, found, rate=True, optional=True)
    profiled = (python, "-m", "tests.bench.training", *data, "--set", f"train.device={device}", "--profile")
    yield Part("W1/64, profile of rows on the device", (*profiled, "--set", "train.rows=device"), 240, none, rate=True)


def run(part: Part) -> dict[str, object]:
    """How a program ended, and what it measured."""
    begin, code, printed = time.monotonic(), 0, ""
    try:
        ended = subprocess.run(
            part.command,
            cwd=ROOT,
            env=os.environ | part.environment,
            capture_output=True,
            text=True,
            timeout=part.limit_s,
            check=False,
        )
        code, printed = ended.returncode, ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr
    except subprocess.TimeoutExpired as late:
        until_then = b"\n".join(each for each in (late.stdout, late.stderr) if each).decode(errors="replace")
        code, printed = 124, f"{until_then}\nnot done after {part.limit_s:g} s"
    except OSError as error:
        code, printed = 127, str(error)
    found: dict[str, object] = {"code": code, "took_s": round(time.monotonic() - begin, 1)}
    if code == 0 and part.rate:
        try:
            return found | json.loads(printed.splitlines()[-1])
        except (IndexError, ValueError):
            found["code"], printed = 1, f"{printed}\nits last line is not JSON"
    return found | {"said": printed[-TAIL:]}


def in_words(found: Mapping[str, object]) -> str:
    """How a program ended, in one line: its rate, or the last line of what it said."""
    if "samples_per_s" in found:
        return f"{found['samples_per_s']:,.0f} samples/s"
    last = next((line.strip() for line in reversed(str(found["said"]).splitlines()) if line.strip()), "it said nothing")
    return last if found["code"] == 0 else f"FAILED with code {found['code']}: {last}"


def table(results: Mapping[str, Mapping[str, object]]) -> str:
    """The rates as Markdown."""
    lines = ["| W1 | samples/s | of plain PyTorch |", "|---|---|---|"]
    for name, found in results.items():
        if not name.startswith("W1/") or "profile" in name:
            continue
        beside = results.get(f"{name.split(',')[0]}, plain PyTorch", {})
        rate, plain = found.get("samples_per_s"), beside.get("samples_per_s")
        if isinstance(rate, float):
            ratio = f"{rate / plain:.2f}" if isinstance(plain, float) else "-"
            lines.append(f"| {name[3:]} | {rate:,.0f} | {ratio} |")
        else:
            lines.append(f"| {name[3:]} | did not run | - |")
    return "\n".join(lines) + "\n"


def conditions(facts: Mapping[str, object]) -> str:
    """Where and how the rates were measured, in a sentence."""
    size = size_of(str(facts["device"]))
    on = f"{facts['gpu']}, CUDA {facts['cuda']}" if facts["gpu"] else "the CPU in the GPU's place: no rates of a GPU"
    how = f"{size.steps} steps of {BATCH:,} samples, without the first pass with rows on the device or the host"
    return f"{how}; {on}, {facts['cores']} cores, torch {facts['torch']}, {time.strftime('%Y-%m-%d')}.\n"


def facts(device: str) -> dict[str, object]:
    """The machine and the versions."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda}
    return versions | {"device": device, "gpu": gpu, "cores": os.cpu_count(), "machine": platform.machine()}


def main() -> int:
    """Exit code 0: every part that has to work did; 1: one did not; 2: there is no GPU."""
    arguments = argparse.ArgumentParser(description="Tests and rates on a GPU: writes build/gpu.")
    arguments.add_argument("--dry", action="store_true", help="print the plan, run nothing")
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help='"cpu": a small run without a GPU')
    arguments.add_argument("--only", default="", help="run only the parts whose name has this text")
    given = arguments.parse_args()
    npz = OUT / f"w1-{size_of(given.device).rows}" / "w1.npz"
    parts = [part for part in plan(given.device, npz) if given.only in part.name]
    if given.dry:
        for part in parts:
            print(f"{part.name} (at most {part.limit_s:g} s{', optional' if part.optional else ''})")
            print(f"    {shlex.join(part.command)}")
        print(f"at most {sum(part.limit_s for part in parts) / 60:.0f} min in all, and much less where nothing hangs")
        print(f"writes {OUT / 'results.json'} and {OUT / 'table.md'}")
        return 0
    return measure(given.device, npz, parts)


def measure(device: str, npz: Path, parts: list[Part]) -> int:
    """Run the parts one after another, and write what they found after each."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here. `make gpu DRY=1` shows the plan, `make gpu DEVICE=cpu` runs it on the CPU.")
        return 2
    print(f"the data of W1: {make(npz.parent, size_of(device).rows)}", flush=True)
    results, here = dict[str, dict[str, object]](), facts(device)
    for number, part in enumerate(parts, 1):
        print(f"[{number}/{len(parts)}] {part.name} (at most {part.limit_s:g} s) ...", flush=True)
        results[part.name] = found = run(part)
        print(f"    {in_words(found)} (took {found['took_s']} s)", flush=True)
        (OUT / "results.json").write_text(json.dumps({"facts": here, "parts": results}, indent=1) + "\n")
    if any(part.rate for part in parts):
        (OUT / "table.md").write_text(text := f"{table(results)}\n{conditions(here)}")
        print(f"\n{text}")
    failed = [part.name for part in parts if results[part.name]["code"] and not part.optional]
    why = f'failed: {", ".join(failed)}; the end of their output is "said" in results.json'
    print(f"wrote {OUT}: {why if failed else 'all that has to work did'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
