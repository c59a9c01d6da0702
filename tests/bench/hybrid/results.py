"""The file with all results: JSON, written whole after each run, so that a bench can go on where it ended."""

import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.durable import REAL, write_whole
from tests.bench.hybrid.cluster import HERE, Measured
from tests.bench.hybrid.setups import Setup

RESULTS = HERE / "results.json"
"""Those of docs/paper.md."""


class Results:
    """Not for two processes at once."""

    def __init__(self, path: Path) -> None:
        self._path, self._runs = path, list[dict[str, Any]]()
        if path.exists():
            self._runs = json.loads(path.read_text())["runs"]

    def num_of(self, setup: Setup) -> int:
        """Runs of a setup."""
        return len(self.of(setup))

    def of(self, setup: Setup) -> list[Measured]:
        """The results of a setup."""
        return [Measured(**run["measured"]) for run in self._runs if run["setup"] == asdict(setup)]

    def setups(self) -> list[Setup]:
        """All that were measured, in the order of their first runs."""
        return list(dict.fromkeys(Setup(**run["setup"]) for run in self._runs))

    def add(self, setup: Setup, measured: Measured) -> None:
        """Keep a result."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._runs.append({"setup": asdict(setup), "measured": asdict(measured), "machine": machine(), "at": at})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(REAL, self._path, json.dumps({"runs": self._runs}, indent=1).encode())

    def median(self, setup: Setup, name: str) -> float | None:
        """The median of a figure over all runs; None without one."""
        values = [getattr(result, name) for result in self.of(setup)]
        return statistics.median(values) if values else None

    def machines(self) -> list[str]:
        """On what it was measured."""
        return sorted({run["machine"] for run in self._runs})


def machine() -> str:
    """The processor and its cores."""
    found = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    models = [line.partition(":")[2].strip() for line in found.splitlines() if line.startswith("Model name")]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.processor()}"
