"""What the golden files say there is: commands with their options, metrics with their labels. Other tests hold them."""

import re
from dataclasses import dataclass
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
METRIC_FILES = ("metrics.txt", "replica_metrics.txt")


def commands() -> dict[str, set[str]]:
    """The options of every command, by its words after `headrace`."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in (GOLDEN / "cli.txt").read_text().splitlines():
        if not line.startswith(" "):
            name = line.removeprefix("headrace").strip()
            found[name] = {"--help"}
        else:
            found[name] |= set(re.findall(r"--[a-z-]+", line))
    return found


@dataclass(frozen=True)
class Metric:
    """One name of those that Prometheus is told."""

    name: str
    kind: str
    labels: tuple[str, ...]
    what: str


def metrics(file: str) -> list[Metric]:
    """The metrics of one of METRIC_FILES, in its order."""
    text = (GOLDEN / file).read_text()
    told = re.findall(r"^# HELP (\w+) (.*)\n# TYPE \w+ (\w+)$", text, re.M)
    return [Metric(name, kind, _labels(text, name), what) for name, what, kind in told]


def _labels(text: str, name: str) -> tuple[str, ...]:
    found = re.search(rf"^{name}(?:_count)?{{(.*)}}", text, re.M)
    return tuple(re.findall(r'(\w+)="', found[1])) if found else ()
