"""Runs the rounds of a fault run, and prints their results."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from headrace.printable import print_printable
from headrace.service.cluster.runtime import OnLine
from headrace.service.faults.rounds import FaultRuns, Round, message_of, table_of, total_line
from headrace.service.monitor.lines import labelled
from headrace.trainer.job_status import Status

BY_CLOSES = "every close, the report and every file exported, compared with the undisturbed run's"
BY_COUNTS = "events and counts of every close and of the report, and the exports made: in this mode weights differ"
BY_RERUN = "every close and the digest, compared with a rerun of the run's own log; each request acted once"


class _Quiet:
    """Writes the workers' lines to a file. See service.monitor.shows.Show."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def on_line(self, worker: str, text: str) -> None:
        print_printable(labelled(worker, text), file=self._file, flush=True)

    def watching(self, _status: Callable[[], Status]) -> nullcontext[None]:
        return nullcontext()


def run_rounds(made: Callable[[OnLine], FaultRuns], rounds: int, seed: int, *, as_json: bool) -> bool:
    """Run the undisturbed run and the rounds; return whether all are identical.

    With `as_json` the progress is on standard error.
    """
    console = Console(stderr=as_json)
    console.print(f"seed {seed}")
    lines: list[_Quiet] = []
    runs = made(lambda worker, text: lines[0].on_line(worker, text))
    show = _Quiet(runs.folder / "output.txt")
    lines.append(show)
    console.print(f"undisturbed: {runs.undisturbed()} passes")
    found: list[Round] = []
    for number in range(1, rounds + 1):
        found.append(runs.disturbed(number, show))
        console.print(f"round {number}: {total_line(found[-1:])}{_trouble(found[-1])}", soft_wrap=True)
    if as_json:
        print(json.dumps({"seed": seed, "rounds": [message_of(each) for each in found]}, indent=2))
    else:
        by_closes = BY_CLOSES if runs.repeatable else BY_COUNTS
        console.print(table_of(found, BY_RERUN if runs.by_rerun else by_closes))
        console.print(f"{total_line(found)} (seed {seed})")
    if all(each.identical for each in found):
        runs.clear()
        return True
    console.print(f"stores and output are kept: {runs.folder}", soft_wrap=True)
    return False


def _trouble(found: Round) -> str:
    unasked = [
        f"generation {number} ended in another way than planned: {reason}" for number, reason in found.unasked.items()
    ]
    text = "; ".join([*found.wrong, *unasked])
    return f"; {text} ({found.store})" if text else ""
