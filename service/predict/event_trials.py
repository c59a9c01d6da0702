"""Processes that predict pasted events, one for each job that was asked lately (trainer.predict.event_trial).

A process has imported what it needs when the second question comes. It ends when nobody asks, when another job needs
its place, when its job's spec changes, and with the service.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import documents
from headrace.deadline import Deadline
from headrace.errors import DeadlineExceeded, HeadraceError, NotYet, SpecError
from headrace.extras import require
from headrace.printable import counted
from headrace.process import DEVNULL, ChildProcess, unbuffered
from headrace.secrets import with_secrets
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.history.commit_lookup import reader, scratch
from headrace.service.predict.versions import version_of
from headrace.service.spec.job import LoadedJob
from headrace.trainer.predict.config import LIVE

MODULE = "headrace.trainer.predict.event_trial"
MAX_TEXT, MAX_EVENTS = 64 << 10, 100
"""Most characters of the events of a question, and most events."""
MAX_PROCESSES = 2
"""Most processes at a time; each has the dense model of its job in memory, and the imports of a trainer."""
MAX_ANSWER, READ_BYTES = 16 << 20, 1 << 16
"""Longest answer in bytes, and of one read."""
MAX_SILENT_S = 300.0
"""A process that gives no answer for so long is ended: it has to import, and to look for kernels."""


def events_of(text: str, *, needed: bool = False) -> list[str]:
    """The events in lines of text. Raises SpecError where there are too many, or none and one is `needed`."""
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    events = [line for line in lines if line.strip()][: MAX_EVENTS + 1]
    if len(events) > MAX_EVENTS or len(text) > MAX_TEXT:
        raise SpecError(f"more than {MAX_EVENTS} events, or than {MAX_TEXT:,} characters", "events")
    if needed and not events:
        raise SpecError("no event was given; give each a line, as it comes from the job's source", "events")
    return events


def trial_words(found: Mapping[str, Any]) -> Iterator[str]:
    """The version that predicted, and samples and events that are not shown."""
    yield f"{counted(len(found['samples']), 'sample')}, predicted by version {found['version']:,} ({found['commit']})"
    if found["left_out"]:
        yield f"{counted(found['left_out'], 'further sample')} not shown"
    yield from (f"{counted(each['events'], 'event')} rejected: {each['first']}" for each in found["rejected"])


def trial_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """An answer as lines of text."""
    for number, sample in enumerate(found["samples"], 1):
        told = ((task, "-" if value is None else f"{value:.4f}") for task, value in sample["predictions"].items())
        yield f"sample {number}, of event {sample['event'] + 1}: {', '.join(' '.join(each) for each in told)}"
        for slot in sample["slots"]:
            more = f", and {slot['more']:,} more" if slot["more"] else ""
            without = f"; without a row: {', '.join(slot['missing'])}" if slot["missing"] else ""
            yield f"  {slot['name']} ({slot['kind']}): {', '.join(slot['values'])}{more}{without}"
    yield from trial_words(found)


class TrialProcess:
    """The process of one job. One thread at a time asks; any may close it."""

    def __init__(self, job: LoadedJob) -> None:
        """Raises HeadraceError where it cannot be started."""
        self.job, self._held = job, ExitStack()
        folder = self._held.enter_context(scratch(job.store, reader()))
        self._link, theirs = socket.socketpair()
        self._held.callback(self._link.close)
        with theirs:
            command = (sys.executable, "-P", "-m", MODULE, "--socket", str(theirs.fileno()))
            try:
                self._process = ChildProcess(
                    command,
                    folder=job.folder,
                    environment=unbuffered(os.environ),
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                self._held.close()
                raise HeadraceError(f"the events cannot be predicted: {error}") from error
        self._held.callback(self._process.close)
        self._received, self._number, self._unanswered_s = b"", 0, time.monotonic()
        places = {"folder": str(job.folder), "log": str(job.store / "log"), "scratch": str(folder)}
        self._unsent = _line({"job": with_secrets(job.full, job.secrets), **places})
        """The rest of the last message: a timeout may cut one."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.ends_within(0)

    def serves(self, job: LoadedJob) -> bool:
        """Whether it was started for this spec and these secrets."""
        return (self.job.full, self.job.secrets) == (job.full, job.secrets)

    def ask(self, commit: Path, events: Sequence[str], deadline: Deadline, *, example: bool = False) -> dict[str, Any]:
        """Its answer. Raises NotYet where it is still busy, SpecError; after other errors the process is of no use."""
        self._number += 1
        try:
            self._send(deadline)
            asked = {"events": list(events), "example": example}
            self._unsent = _line({"number": self._number, "commit": str(commit), **asked})
            self._send(deadline)
            while (answer := self._answer(deadline))["number"] != self._number:  # of questions given up before
                self._unanswered_s = time.monotonic()
        except TimeoutError:
            if time.monotonic() - self._unanswered_s > MAX_SILENT_S:
                raise DeadlineExceeded("the events were not predicted in time") from None
            raise NotYet("the process that predicts the events is still getting ready; try again soon") from None
        except OSError:
            code = self._process.end()
            raise HeadraceError(f"the process that predicts the events has ended with code {code}") from None
        self._unanswered_s = time.monotonic()
        if "error" in answer:
            raise SpecError(answer["error"])
        return answer

    def _answer(self, deadline: Deadline) -> dict[str, Any]:
        """Its next answer. Raises TimeoutError, and OSError where it has ended."""
        while b"\n" not in self._received:
            self._link.settimeout(max(0.01, deadline.left_s()))
            more = self._link.recv(READ_BYTES)
            if not more or len(self._received) > MAX_ANSWER:
                raise ConnectionError("no answer")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return documents.parse_object(line, "the prediction's answer")

    def _send(self, deadline: Deadline) -> None:
        """Send what is unsent. Raises TimeoutError, and OSError where it has ended."""
        while self._unsent:
            self._link.settimeout(max(0.01, deadline.left_s()))
            self._unsent = self._unsent[self._link.send(self._unsent) :]

    def close(self) -> None:
        """Kill it, and remove its files. A question in progress fails."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._held.close()


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


@dataclass
class _Place:
    """The process of a job, and who asks it."""

    asking: threading.Lock = field(default_factory=threading.Lock)
    process: TrialProcess | None = None


class EventTrials:
    """The processes of a service. Any thread."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        """By job, the one that was asked last at the end."""
        self._lock, self._closed = threading.Lock(), False

    def ask(
        self, name: str, job: LoadedJob, events: Sequence[str], deadline: Deadline, *, example: bool = False
    ) -> dict[str, Any]:
        """The prediction of events by the newest commit of a job, which `name` has in this service; and an `example`.

        Raises SpecError where there is no commit, NotYet where all processes are busy, DeadlineExceeded.
        """
        require("torch", "a prediction")
        job = with_store_defaults(job)
        with self._place(name, deadline) as place, ExitStack() as held:
            version = held.enter_context(version_of(job, LIVE, None, job.store, deadline=deadline))
            process = self._process(place, job)
            try:
                found = process.ask(version.commit, events, deadline, example=example)
            except (SpecError, NotYet):
                raise
            except BaseException:
                self._end(place)
                raise
            return {**version.description, **found}

    def close(self) -> None:
        """End all processes; none is started after this."""
        with self._lock:
            self._closed = True
            places = list(self._places.values())
            self._places = {}
        for place in places:
            self._end(place)

    @contextmanager
    def _place(self, name: str, deadline: Deadline) -> Iterator[_Place]:
        """The place of a job, for one question."""
        while True:
            with self._lock:
                left = self._take_ended()
                place = self._places.pop(name, None) or _Place()
                if len(self._places) >= MAX_PROCESSES:
                    left.append(self._take_oldest())
                self._places[name] = place
            self._end_taken(left)
            if not place.asking.acquire(timeout=max(0.0, deadline.left_s())):
                raise NotYet("another question about this job is being answered; retry")
            try:
                if self._places.get(name) is place:  # else it was ended while this thread waited
                    yield place
                    return
            finally:
                place.asking.release()

    def _take_ended(self) -> list[_Place]:
        """Take out the places whose processes have ended by themselves, and hold them."""
        taken = list[_Place]()
        for name, place in list(self._places.items()):
            if place.asking.acquire(blocking=False):
                if place.process is not None and place.process.has_ended:
                    taken.append(self._places.pop(name))
                else:
                    place.asking.release()
        return taken

    def _take_oldest(self) -> _Place:
        """Take out the place that was asked longest ago, and hold it. Raises NotYet where all are being asked."""
        for name, place in self._places.items():
            if place.asking.acquire(blocking=False):
                return self._places.pop(name)
        raise NotYet(f"{MAX_PROCESSES} jobs are being tried; retry")

    def _end_taken(self, places: Sequence[_Place]) -> None:
        """End the processes of places that were taken out, and let go of these: who waits for one looks for another."""
        for place in places:
            try:
                self._end(place)
            finally:
                place.asking.release()

    def _process(self, place: _Place, job: LoadedJob) -> TrialProcess:
        """The process of a held place. Raises NotYet once all are closed."""
        process = place.process
        if process is not None and (process.has_ended or not process.serves(job)):
            self._end(place)
        with self._lock:  # so that `close` finds it
            if self._closed:
                raise NotYet("the service is ending")
            if place.process is None:
                place.process = TrialProcess(job)
            return place.process

    def _end(self, place: _Place) -> None:
        with self._lock:
            process, place.process = place.process, None
        if process is not None:
            process.close()
