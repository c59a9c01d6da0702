"""What fewer bits cost a prediction in AUC: `python -m tests.bench.narrow_predictions` prints it as Markdown.

The examples criteo and news as shipped learn the first half of their events; the version that results predicts the
second half, with rows that travel in each way.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.pserver.config import Wire
from tests.bench.living import EXAMPLES
from tests.bench.modes import FILES
from tests.bench.w1 import ROOT


def halves_of(events: Path, folder: Path) -> list[Path]:
    """Both halves of a file of events, in `folder`."""
    lines = gzip.open(events).readlines()
    parts = [folder / f"{number}-{events.name}" for number in (0, 1)]
    for part, half in zip(parts, (lines[: len(lines) // 2], lines[len(lines) // 2 :]), strict=True):
        with gzip.open(part, "wb", compresslevel=1) as file:
            file.writelines(half)
    return parts


def headrace(*words: object) -> str:
    """The output of a command."""
    command = [sys.executable, "-m", "headrace.service", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if ended.returncode:
        raise RuntimeError(f"{command}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout


def line(example: str) -> str:
    """The line of an example."""
    key, events = FILES[example]
    job = EXAMPLES / example / "job.toml"
    with tempfile.TemporaryDirectory() as folder:
        learnt, held_out = halves_of(events, Path(folder))
        given = [f'{key}=["{learnt}"]', f"store.path={folder}/store", "train.matmul=mkl"]
        settings = [word for setting in given for word in ("--set", setting)]
        headrace("run", job, *settings)
        found = []
        for wire in Wire:
            said = json.loads(headrace("evaluate", job, *settings, "--input", held_out, "--wire", wire, "--json"))
            (task,) = said["metrics"]["tasks"].values()
            found.append(f"{task['auc']:.5f}")
    return f"| {example} | {' | '.join(found)} |"


if __name__ == "__main__":
    print(f"| | {' | '.join(Wire)} |\n{'|---' * (1 + len(Wire))}|")
    for name in FILES:
        print(line(name), flush=True)
