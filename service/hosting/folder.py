"""A job's own folder: what the service and the job's launcher tell each other there, a file each, each with one writer.

Nothing about a launcher is in the service's memory alone: a service that is started again finds all of it here.
"""

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from millrace import documents
from millrace.durable import REAL, write_whole, writing
from millrace.locks import is_locked
from service.hosting.errors import HostingError
from service.hosting.host import Ending
from service.records.database import utc_now


class Broken(HostingError):
    """A job's folder is not what the service left there."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the service told the launcher that it started last."""

    id: str
    ask: int
    secret: str


@dataclass(frozen=True, slots=True)
class Known:
    """What the launcher says of itself."""

    id: str
    pid: int
    claimed: bool
    """Whether it has claimed the store: from then on that holds the job's run."""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """See module docstring; the folder is for its owner's eyes only. Readers raise Broken."""

    path: Path

    @property
    def lock(self) -> Path:
        """Held by the launcher as long as it lives, from its first instant on."""
        return self.path / "launcher.lock"

    @property
    def address(self) -> Path:
        """Where the launcher serves its Role."""
        return self.path / "launcher.address"

    @property
    def printed(self) -> Path:
        """What the launcher prints itself: nothing, unless by a bug."""
        return self.path / "launcher.out"

    @property
    def own_store(self) -> Path:
        """The store of a spec that names none."""
        return self.path / "store"

    @property
    def workers(self) -> Path:
        """What the launcher tells its workers, secrets among it."""
        return self.path / "workers"

    @property
    def private(self) -> tuple[Path, ...]:
        """What no spec may reach, not even the job's own."""
        names = ("job.json", "launcher.json", "launcher.pid", "launcher.lock", "outcome.json")
        return (*(self.path / name for name in names), self.address, self.printed, self.workers)

    def alive(self) -> bool:
        """Whether a launcher runs here."""
        return is_locked(self.lock)

    # -- what is to be run

    def write_job(self, spec: Mapping[str, Any], base: Path) -> None:
        """The service: what the launcher is to run. Raises Unwritable."""
        self._write("job.json", {"spec": spec, "base": str(base)})

    def job(self) -> tuple[dict[str, Any], Path]:
        """The spec, and where its paths start."""
        content = self._read("job.json")
        if content is None:
            raise Broken(f"{self.path / 'job.json'} is gone; put it back, or delete the job")
        try:
            return dict(content["spec"]), Path(content["base"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged("job.json", error) from error

    # -- the launcher

    def tell(self, told: Told) -> None:
        """The service, before it starts a launcher. Raises Unwritable."""
        self._write("launcher.json", {"id": told.id, "ask": told.ask, "secret": told.secret})

    def told(self) -> Told | None:
        """What the last launcher was told; None before the first."""
        content = self._read("launcher.json")
        try:
            return None if content is None else Told(str(content["id"]), int(content["ask"]), str(content["secret"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged("launcher.json", error) from error

    def say(self, known: Known) -> None:
        """The launcher, of itself. Raises Unwritable."""
        self._write("launcher.pid", {"id": known.id, "pid": known.pid, "claimed": known.claimed})

    def known(self) -> Known | None:
        """What the last launcher said of itself; None before the first did."""
        content = self._read("launcher.pid")
        try:
            return (
                None if content is None else Known(str(content["id"]), int(content["pid"]), content["claimed"] is True)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged("launcher.pid", error) from error

    def kill(self) -> bool:
        """Kill the launcher, and with it its workers; whether it was there to be killed."""
        told, known = self.told(), self.known()
        if told is None or known is None or told.id != known.id:
            return False
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(known.pid)
            try:
                if self.alive():  # so the number is still its own
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return True
            finally:
                os.close(handle)
        return False

    # -- how it ended

    def write_outcome(self, ask: int, ending: Ending, status: Mapping[str, Any]) -> None:
        """The launcher, last of all; or the service, where it gives a job up. Raises Unwritable."""
        content = {
            "ask": ask,
            "code": ending.code,
            "reason": ending.reason,
            "lines": ending.lines,
            "at": ending.at.isoformat(),
            "status": status,
        }
        self._write("outcome.json", content)

    def outcome(self, ask: int) -> tuple[Ending, dict[str, Any]] | None:
        """How the job ended after it was asked for the `ask`-th time, and its last status; None: it has not."""
        content = self._read("outcome.json")
        if content is None or content.get("ask") != ask:
            return None
        try:
            at = datetime.fromisoformat(content["at"])
            ending = Ending(int(content["code"]), str(content["reason"]), tuple(content["lines"]), at)
            return ending, dict(content["status"])
        except (KeyError, TypeError, ValueError) as error:
            told = f"it ended, and how is lost: outcome.json is damaged ({error})"
            return Ending(1, told, (), utc_now()), {}

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
        except documents.NotReadable as error:
            raise self._damaged(name, error.why) from error
        except OSError as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, how: object) -> Broken:
        return Broken(f"{self.path / name} is damaged ({how}); put it back as it was, or delete the job")
