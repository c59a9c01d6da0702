"""One run of an example on test machines with slow links, and what its report says of time and traffic."""

import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tests.bench.living import EXAMPLES
from tests.machines import network
from tests.machines.external_job import USUAL_TIMEOUT_S, ExternalJob, object_store

START_S, RUN_S = 120.0, 3600.0


def over_links(
    example: str, events: Path, trainers: int, rate: str, settings: Sequence[str], per_machine: int = 1
) -> Mapping[str, Any]:
    """The report of an example that is trained once over a file of events.

    Each machine has `per_machine` trainers and shards, and a link of `rate`; the object store for commits is on one
    more machine.
    """
    with network.machines(trainers // per_machine + 1) as (*machines, disk), object_store(disk) as address:
        for machine in machines:
            for name in ("job.toml", "generator.py"):
                shutil.copy(EXAMPLES / example / name, machine.tmp)
            (machine.tmp / "data").mkdir()
            shutil.copy(events, machine.tmp / "data")
        size = {"trainers": trainers, "shards": trainers, "node_timeout_s": USUAL_TIMEOUT_S}
        with ExternalJob(machines[0], address(example), *settings, **size) as job:
            token, launcher = job.token(), job.run()
            launcher.until("waits for", START_S)
            for machine in machines:
                machine.shape(rate=rate)
            for role, machine, _ in product(("trainer", "shard"), machines, range(per_machine)):
                job.agent(machine, "--role", role, token=token)
            if launcher.end(RUN_S):
                raise RuntimeError(launcher.said)
            return job.report


def rate_of(report: Mapping[str, Any]) -> float:
    """Samples a second, closes included, commits not."""
    seconds = sum(spent for part, spent in report["time_s"].items() if part != "commit")
    return float(report["samples"] / seconds)


def sent_bytes(report: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes that trainers sent to trainers, and all bytes that were sent."""
    sent = [(a, b, link["sent_bytes"]) for a, peers in report["links"].items() for b, link in peers.items()]
    between_trainers = sum(found for a, b, found in sent if a.startswith("trainer") and b.startswith("trainer"))
    return between_trainers, sum(found for _, _, found in sent)
