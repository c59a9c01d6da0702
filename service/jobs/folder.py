"""A job's own folder: the files by which the service and the job's launcher communicate; each file has one writer.

All facts about a launcher are stored here, so a restarted service finds them.
"""

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.codec import plain
from headrace.durable import REAL, is_locked, write_whole, writing
from headrace.service.jobs.errors import HostingError
from headrace.service.jobs.host import Ending
from headrace.service.records.database import utc_now
from headrace.trainer.job_status import Status, read


class FolderDamaged(HostingError):
    """A job's folder is damaged, or was changed by others."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Identity that the service assigned to the launcher that it started last."""

    id: str
    ask: int
    secret: str


@dataclass(frozen=True, slots=True)
class LauncherProcess:
    """The launcher's report of its own process."""

    id: str
    pid: int
    claimed: bool
    """Whether it has claimed the store, which holds the job's run from then on."""
    version: str = ""
    """Its version of Headrace; empty for one that did not say."""
    environment: str = ""
    """Identity of its environment (service.jobs.build_check); empty for one that did not say."""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Only its owner can read the folder. Readers raise Broken."""

    path: Path

    @property
    def lock(self) -> Path:
        """The lock that the launcher holds from its start to its end."""
        return self.path / "launcher.lock"

    @property
    def address(self) -> Path:
        """The file with the address of the launcher's Role service."""
        return self.path / "launcher.address"

    @property
    def printed(self) -> Path:
        """Output of the launcher itself: empty, except after a bug."""
        return self.path / "launcher.out"

    @property
    def own_store(self) -> Path:
        """The store if the spec names none."""
        return self.path / "store"

    @property
    def workers(self) -> Path:
        """Files from the launcher to its workers, with secrets."""
        return self.path / "workers"

    @property
    def private(self) -> tuple[Path, ...]:
        """Paths that no spec may reach, not even the job's own."""
        names = ("job.json", "launcher.json", "launcher.pid", "launcher.lock", "outcome.json")
        return (*(self.path / name for name in names), self.address, self.printed, self.workers)

    def alive(self) -> bool:
        """Whether a launcher runs here."""
        return is_locked(self.lock)

    # -- the job to run

    def write_job(self, spec: Mapping[str, Any], base: Path) -> None:
        """Write the job that the launcher runs. Called by the service. Raises Unwritable."""
        self._write("job.json", {"spec": spec, "base": str(base)})

    def job(self) -> tuple[dict[str, Any], Path]:
        """The spec, and the folder where its paths start."""
        content = self._read("job.json")
        if content is None:
            raise FolderDamaged(f"{self.path / 'job.json'} is missing; put it back, or delete the job")
        try:
            return dict(content["spec"]), Path(content["base"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged("job.json", error) from error

    # -- the launcher

    def assign(self, assigned: Assignment) -> None:
        """Write the identity of a launcher before its start. Called by the service. Raises Unwritable."""
        self._write("launcher.json", {"id": assigned.id, "ask": assigned.ask, "secret": assigned.secret})

    def assigned(self) -> Assignment | None:
        """The identity of the last launcher; None before the first start."""
        content = self._read("launcher.json")
        try:
            return (
                None if content is None else Assignment(str(content["id"]), int(content["ask"]), str(content["secret"]))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged("launcher.json", error) from error

    def report(self, process: LauncherProcess) -> None:
        """Write the launcher's process. Called by the launcher. Raises Unwritable."""
        self._write("launcher.pid", asdict(process))

    def process(self) -> LauncherProcess | None:
        """The process of the last launcher that reported; None before the first report."""
        content = self._read("launcher.pid")
        try:
            if content is None:
                return None
            told = str(content.get("version", "")), str(content.get("environment", ""))
            return LauncherProcess(str(content["id"]), int(content["pid"]), content["claimed"] is True, *told)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged("launcher.pid", error) from error

    def kill(self) -> bool:
        """Kill the launcher, and thereby its workers; whether it was running, on this machine."""
        assigned, process = self.assigned(), self.process()
        if assigned is None or process is None or assigned.id != process.id:
            return False
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            try:
                if self.alive() and _has_open(process.pid, self.lock):  # else the number is another process's
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return True
            finally:
                os.close(handle)
        return False

    # -- how it ended

    def write_outcome(self, ask: int, ending: Ending, status: Status) -> None:
        """Write how the job ended: the launcher as its last act, or the service for a failed job. Raises Unwritable."""
        content = {
            "ask": ask,
            "code": ending.code,
            "reason": ending.reason,
            "lines": ending.lines,
            "at": ending.at.isoformat(),
            "status": plain(status),
        }
        self._write("outcome.json", content)

    def outcome(self, ask: int) -> tuple[Ending, Status] | None:
        """How the job ended after its start request number `ask`, and its last status; None: it has not ended."""
        content = self._read("outcome.json")
        if content is None or content.get("ask") != ask:
            return None
        try:
            at = datetime.fromisoformat(content["at"])
            ending = Ending(int(content["code"]), str(content["reason"]), tuple(content["lines"]), at)
            return ending, read(Status, {"state": "", **content["status"]})
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it ended, but the reason is lost: outcome.json is damaged ({error})"
            return Ending(1, reason, (), utc_now()), Status(state="")

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.path / name
        with writing(path):
            write_whole(REAL, path, json.dumps(content, default=str).encode())

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            return documents.read_object(path)
        except FileNotFoundError:
            return None
        except documents.InvalidDocument as error:
            raise self._damaged(name, error.why) from error
        except OSError as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, how: object) -> FolderDamaged:
        return FolderDamaged(f"{self.path / name} is damaged ({how}); put it back as it was, or delete the job")


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process of this machine has a file open. A launcher of another one may have the number of a process."""
    with suppress(OSError):
        wanted = path.stat()
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), wanted):
                    return True
    return False
