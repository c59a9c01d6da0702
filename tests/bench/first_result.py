"""Seconds from the command to the first result of a new job: `python -m tests.bench.first_result [--rounds 5]`.

`headrace run` of the README's hello world in a new store, in passes of 2,000 events: until the command says its first
words, until crosses are chosen, until the first pass is learnt and committed, and until 20,000 events are. The kernels
are compiled before; `--set` changes the job, as for `headrace run`.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.w1 import ROOT

WORDS = {"first words": "starting ", "crosses": "launcher| crosses: "}
"""What the command prints at each moment."""
LOOK_S = 0.01
CHANGES = ("passes.max_events=2000", "commit.every_passes=1")


def hello_world(folder: Path) -> None:
    """Write the job and its events."""
    page = (ROOT / "README.md").read_text()
    files = dict(re.findall(r'```\w+ title="([a-z.]+)"\n(.*?)```', page, re.S))
    (folder / "job.toml").write_text(files["job.toml"])
    with (folder / "events.jsonl").open("wb") as events:
        subprocess.run([sys.executable, "-c", files["events.py"]], stdout=events, check=True)


def moments(folder: Path, changes: Sequence[str]) -> dict[str, float]:
    """Seconds until each moment, of one run in a new store."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        store, said = Path(name) / "store", Path(name) / "said.txt"
        settings = [word for each in (*CHANGES, f"store.path={store}", *changes) for word in ("--set", each)]
        command = [str(Path(sys.executable).with_name("headrace")), "run", "job.toml", *settings]
        begin_s, found = time.perf_counter(), dict[str, float]()
        with (
            said.open("wb") as output,
            subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT) as running,
        ):
            while running.poll() is None:
                text, now_s = said.read_text(), time.perf_counter() - begin_s
                seen = [each for each, words in WORDS.items() if words in text]
                if any((store / "commits").glob("*/manifest.json")):
                    seen.append("first pass")
                for each in seen:
                    found.setdefault(each, now_s)
                time.sleep(LOOK_S)
        if running.returncode:
            raise RuntimeError(f"the job failed: {said.read_text()}")
        return found | {"end": time.perf_counter() - begin_s}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--set", nargs="*", default=[], dest="changes")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hello_world(folder)
        moments(folder, given.changes)  # compiles
        runs = [moments(folder, given.changes) for _ in range(given.rounds)]
    names = list(dict.fromkeys(name for run in runs for name in run))
    print(json.dumps({each: statistics.median(run[each] for run in runs if each in run) for each in names}))


if __name__ == "__main__":
    main()
