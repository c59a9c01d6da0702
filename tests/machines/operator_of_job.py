"""An operator of a job on test machines: keeps its launcher and its agents running while machines die, as it is told.

It is what an orchestrator such as Kubernetes does: a process that has ended is started again, a machine that was lost
gets its files again. It knows nothing of generations.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.trainer.journal.log_file import read_files
from headrace.trainer.journal.records import Claim, PassClose
from tests.machines.external_job import ExternalJob, Output
from tests.machines.network import Machine

POLL_S = 0.05


class Place:
    """A worker's place: the machine and the role of the agent that is kept running there."""

    def __init__(self, machine: Machine, role: str) -> None:
        self.machine, self.role = machine, role
        self.agent: Output | None = None


class Operator:
    """Runs a job to its end. `files` gives a machine the job's files."""

    def __init__(self, job: ExternalJob, machines: list[Machine], files: Callable[[Path], object]) -> None:
        head, second, third = self.machines = machines
        self._job, self._files = job, files
        self.closes: dict[int, Mapping[str, Any]] = {}
        """Every close ever logged, by number."""
        self.timelines: set[str] = set()
        self.launchers: list[Output] = []
        self.places = [
            Place(*each) for each in ((head, "trainer"), (second, "trainer"), (second, "shard"), (third, "shard"))
        ]
        for machine in machines:
            files(machine.tmp)
        self.token = job.token()
        self._identity = {path.name: path.read_bytes() for path in (head.tmp / "store" / "identity").iterdir()}

    @property
    def ended(self) -> bool:
        """Whether the job has ended well."""
        return bool(self.launchers) and self.launchers[-1].process.poll() == 0

    def attend(self, until: Callable[[], bool], within_s: float) -> bool:
        """Keep everything running until something holds, or the job has ended; whether it holds."""
        until_s = time.monotonic() + within_s
        while not until():
            if self.ended:
                return until()
            assert time.monotonic() < until_s, f"{within_s:g} s passed:\n{self._job.said}"
            self._start_what_has_ended()
            self.read_log()
            time.sleep(POLL_S)
        return True

    def restore(self, machine: Machine) -> None:
        """Give a machine that was lost its files, and the head the identity of the job."""
        self._files(machine.tmp)
        if machine is self._job.head:
            folder = machine.tmp / "store" / "identity"
            folder.mkdir(parents=True, mode=0o700)
            for name, content in self._identity.items():
                (folder / name).touch(0o600)
                (folder / name).write_bytes(content)

    def move(self, machine: Machine, to: Machine) -> None:
        """Keep the workers of a machine running on another one from now on; those that still run there are left."""
        for place in self.places:
            if place.machine is machine:
                place.machine, place.agent = to, None

    def read_log(self) -> None:
        """Note the closes in the log of the head, which may be pruned, torn or lost at any moment."""
        records: list[Any] = []
        with suppress(HeadraceError, FileNotFoundError):
            records = [record for file in read_files(self._job.head.tmp / "store" / "log") for record in file.records]
        for record in records:
            if isinstance(record.content, PassClose):
                before = self.closes.setdefault(record.content.number, record.body)
                assert before == record.body, "a close was logged with other bits"
            elif isinstance(record.content, Claim):
                self.timelines.add(record.content.timeline)

    def _start_what_has_ended(self) -> None:
        if not self.launchers or self.launchers[-1].process.poll() is not None:
            self.launchers.append(self._job.run())
        for place in self.places:
            if place.agent is None or place.agent.process.poll() is not None:
                place.agent = self._job.agent(place.machine, "--role", place.role, token=self.token)
