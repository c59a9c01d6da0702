"""The host of many jobs on this machine: each has a folder, a launcher, and a record of its desired state.

This module takes requests and reports states. The supervisor acts on the jobs.
"""

import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace import documents
from headrace.deadline import Deadline
from headrace.durable import check_no_link, locked, writing
from headrace.errors import DeadlineExceeded, HeadraceError, SpecError, Unwritable
from headrace.secrets import secrets_of, without_secrets
from headrace.service.auth.allowed_paths import reserved_stores
from headrace.service.auth.spec_rules import check_spec
from headrace.service.auth.spec_sizes import check_size
from headrace.service.cluster.store import OUTPUT, check_free, in_use, remove
from headrace.service.cluster.supervision import RestartLimits
from headrace.service.jobs import launcher_process, output_files
from headrace.service.jobs.activation import IN_USE_S, Active, Wait, active
from headrace.service.jobs.background import in_background
from headrace.service.jobs.builds import interpreter
from headrace.service.jobs.config import ServiceConfig
from headrace.service.jobs.decisions import ObservedState, phase_of, requested_changes, requested_move
from headrace.service.jobs.errors import JobExists, StillRunning
from headrace.service.jobs.folder import JobFolder
from headrace.service.jobs.host import Action, Desired, HostedJob, LineFilter, NewJob, Phase, PrintedLine
from headrace.service.jobs.operation_queue import OperationQueue, ProblemOf, plain_problem
from headrace.service.jobs.registry import JobRecord, JobRegistry
from headrace.service.jobs.supervisor import Supervisor
from headrace.service.records.database import utc_now
from headrace.service.spec.job import LoadedJob, job_of
from headrace.trainer.job_status import Status

log = logging.getLogger(__name__)

PRUNE_S = 3600.0
"""Time between two deletions of old records."""
TRASH, KEPT = "trash", "kept"
"""Folders below the root: for folders being removed, and for folders of deleted jobs whose stores are kept."""


class _JobChecks:
    """The checks of a job before it is created, and before each start."""

    def __init__(self, config: ServiceConfig, register: JobRegistry, builds: Mapping[str, Path]) -> None:
        self._config, self._register, self._builds = config, register, builds

    def checked(self, request: NewJob) -> LoadedJob:
        """The requested job, validated. Raises SpecError, JobExists, LimitReached."""
        raw = {
            **documents.parse_object(json.dumps(request.spec, default=str), "the spec"),
            **({"name": request.name} if request.name else {}),
        }
        folder = JobFolder(self._config.jobs / str(raw.get("name", "")))
        loaded = job_of(_with_store(raw, folder), folder.path if request.base is None else request.base)
        self._register.check_room(
            loaded.spec.name, self._config.limits.max_jobs
        )  # its name is valid as that of a folder by now
        self.check_apart(loaded)
        self._check(loaded, folder)
        check_free(loaded.store, loaded.spec.name, fresh=False)
        if request.base is not None and not loaded.folder.is_dir():
            raise SpecError(f"{loaded.folder} is not a folder; relative paths of the spec start there", "base")
        return loaded

    def _check(self, job: LoadedJob, own: JobFolder) -> None:
        others = reserved_stores(entry.store for entry in self._register.all() if entry.name != job.spec.name)
        check_spec(job, self._config.allow, own.path, (*self._config.private, *own.private), others)

    def check_start(self, entry: JobRecord) -> None:
        """Check again before a start: the rules may have changed since the job was created."""
        interpreter(self._builds, entry.build)
        self._check(job_of(entry.spec, entry.base), entry.folder)

    def check_apart(self, job: LoadedJob) -> None:
        """Two jobs must not share a store. Raises SpecError."""
        for other in self._register.all():
            if job.store == other.store or job.store in other.store.parents or other.store in job.store.parents:
                raise SpecError(f"{job.store} belongs to job {other.name!r}; choose another folder", "store.path")


class LocalHost:
    """Created by `host_jobs`."""

    def __init__(self, config: ServiceConfig, active: Active, work: OperationQueue) -> None:
        self._config, self.records, self.work = config, active.records, work
        self.lease = active.lease
        """The lease that makes this service the active one; None where there can be no other."""
        records = active.records
        self.builds = {name: build.python for name, build in config.builds.items()}
        self._register = JobRegistry(records)
        self._checks = _JobChecks(config, self._register, self.builds)
        limits = config.limits
        self._supervisor = Supervisor(
            self._register,
            records,
            self._checks.check_start,
            stop_s=limits.stop,
            max_output=limits.max_output,
            limits=RestartLimits(max_restarts=limits.max_restarts, window_s=limits.restart_window),
            python_of=lambda entry: interpreter(self.builds, entry.build),
            fence=active.fence,
        )
        self._creating = threading.Lock()  # one at a time: two requests for one name must not both write its folder
        self._closing = threading.Event()
        self._pruning = threading.Thread(target=self._prune, name="prune", daemon=True)

    def start(self) -> None:
        """Start to supervise the jobs."""
        self._supervisor.start()
        self._pruning.start()

    def close(self) -> None:
        """Stop this host; the jobs go on."""
        self._closing.set()
        self._supervisor.close()
        if self._pruning.is_alive():
            self._pruning.join()

    # -- states

    def jobs(self) -> list[HostedJob]:
        return [self._hosted(entry) for entry in self._register.all()]

    def job(self, name: str) -> HostedJob:
        return self._hosted(self._register.get(name))

    def status(self, name: str) -> Status:
        """ "phase" is that of the job, "state" that of its launcher or of its end."""
        entry = self._register.get(name)
        try:
            return self._status(entry)
        except Exception as error:  # of any kind: an error of one job is reported as its trouble
            log.debug("job %s cannot be read", name, exc_info=error)
            return Status(job=name, state=Phase.BROKEN.value, phase=Phase.BROKEN.value)

    def _status(self, entry: JobRecord) -> Status:
        seen = self._supervisor.observed(entry)
        last = self._last_status(entry, seen)
        phase = phase_of(entry.wanted, seen, last.state)
        state = phase.value if phase is Phase.DRAINING or not last.state else last.state
        if not seen.alive and seen.ending is None:
            state = phase.value  # the last status is that of a dead launcher
        return replace(last, job=entry.name, state=state, phase=phase.value)

    def log_lines(self, name: str, wanted: LineFilter | None, after: int, limit: int) -> list[PrintedLine]:
        return output_files.read_lines(check_no_link(self._register.get(name).store / OUTPUT), wanted, after, limit)

    def _last_status(self, entry: JobRecord, seen: ObservedState) -> Status:
        """The last status of its launcher, or the one written at its end; with an empty state where there is none."""
        if not seen.alive and seen.ending is not None and (outcome := entry.folder.outcome(entry.ask)) is not None:
            return outcome[1]
        return self._supervisor.status(entry.name)

    def _hosted(self, entry: JobRecord) -> HostedJob:
        """The job as it is now. An error of one job affects only that job."""
        try:
            seen = self._supervisor.observed(entry)
            phase = phase_of(entry.wanted, seen, self._last_status(entry, seen).state)
        except Exception as error:
            log.debug("job %s cannot be read", entry.name, exc_info=error)
            seen = ObservedState(broken=f"it cannot be read ({type(error).__name__}: {error}); repair it, or delete it")
            phase = Phase.BROKEN
        version, environment = launcher_process.build_of(entry.folder)
        return HostedJob(
            name=entry.name,
            spec=without_secrets(entry.spec),
            secrets=secrets_of(entry.spec),
            folder=entry.folder.path,
            base=entry.base,
            store=entry.store,
            desired=entry.desired,
            phase=phase,
            trouble=(seen.broken or seen.foreign) if phase is Phase.BROKEN else "",
            revision=entry.revision,
            created=entry.created_at,
            created_by=entry.created_by,
            changed=entry.changed_at,
            outcome=seen.ending,
            build=entry.build,
            version=version,
            environment=environment,
        )

    # -- requests

    def create(self, request: NewJob, who: str) -> HostedJob:
        """1. Check the spec and the limits. 2. Write the spec to the job's folder. 3. Add the job to the records: from
        here on it exists, and starts. A folder left behind between 2 and 3 is reused.
        """
        check_size(request.spec)
        loaded = in_background(lambda: self._checks.checked(request))  # 1
        with self._creating:
            return self._create(loaded, request, who)

    def _create(self, loaded: LoadedJob, request: NewJob, who: str) -> HostedJob:
        """Steps 2 and 3."""
        folder, base = JobFolder(self._config.jobs / loaded.spec.name), loaded.folder
        self._register.check_room(loaded.spec.name, self._config.limits.max_jobs)
        self._checks.check_apart(loaded)
        self.records.check_active()
        _make_folder(folder)  # 2
        folder.write_job(loaded.whole(), base)
        now = utc_now()
        entry = JobRecord(
            name=loaded.spec.name,
            spec=loaded.whole(),
            folder=folder,
            base=base,
            desired=Desired.RUNNING if request.start else Desired.STOPPED,
            asked_at=now,
            created_at=now,
            changed_at=now,
            created_by=who,
        )
        self._register.add(entry, self._config.limits.max_jobs)  # 3
        self._supervisor.wake()
        return self._hosted(entry)

    def delete(self, name: str, who: str, keep_store: bool) -> None:
        """A store that cannot be removed stays, with a warning, so that a broken job can be deleted.

        1. Keep the supervisor from starting it. 2. Remove a store outside of its folder, unless it is kept. 3. Rename
        its folder. 4. Delete its record. 5. Remove its folder. If the service dies after 3, the job is broken until it
        is deleted again.
        """
        with self._supervisor.looking:  # 1
            entry = self._register.get(name)
            own = entry.folder.path in (entry.store, *entry.store.parents)
            with self._still(entry, uses_store=own or not keep_store):
                self.records.check_active()
                if not keep_store and not own:
                    _remove_store(entry)  # 2
                gone = self._moved(entry, KEPT if keep_store and own else TRASH)  # 3
            self._register.remove(name)  # 4
            self._supervisor.forget(name)
        if gone is not None and gone.parent.name == TRASH:
            shutil.rmtree(gone, ignore_errors=True)  # 5: the next start removes what is left

    def check_allowed(self, name: str) -> None:
        self._checks.check_start(self._register.get(name))

    def act(self, name: str, action: Action, who: str) -> HostedJob:
        with self._supervisor.looking:
            entry = self._register.get(name)
            seen = self._supervisor.observed(entry)
            entry = self._register.change(name, requested_changes(entry.wanted, seen, action, utc_now()))
        self._supervisor.wake()
        return self._hosted(entry)

    def use_build(self, name: str, build: str) -> HostedJob:
        interpreter(self.builds, build)
        with self._supervisor.looking:
            entry = self._register.get(name)
            seen = self._supervisor.observed(entry)
            entry = self._register.change(name, requested_move(entry.wanted, seen, build, utc_now()))
        self._supervisor.wake()
        return self._hosted(entry)

    def count_change(self, name: str) -> None:
        self._register.revised(name)

    # -- deletion

    @contextmanager
    def _still(self, entry: JobRecord, *, uses_store: bool) -> Iterator[None]:
        """Keep the job, and with `uses_store` anything in its store, from running during the context.

        Raises StillRunning.
        """
        if self.work.going(entry.name):
            raise StillRunning(entry.name, "has an operation that is not over")
        if not entry.folder.path.exists():
            yield
            return
        with ExitStack() as held:
            try:
                held.enter_context(locked(entry.folder.lock, Deadline.after(IN_USE_S)))
            except DeadlineExceeded:
                raise StillRunning(entry.name, "still runs") from None
            except Unwritable as error:  # so nothing runs there, and the supervisor starts nothing while locked out
                log.warning("job %s is deleted without its lock: %s", entry.name, error)
            if uses_store and _in_use(entry.store):
                raise StillRunning(entry.name, "has its store in use by another run")
            yield

    def _moved(self, entry: JobRecord, where: str) -> Path | None:
        """The job's folder under a new name elsewhere; None where it does not exist."""
        place = self._config.root / where / f"{entry.name}-{utc_now():%Y%m%dT%H%M%S%f}"
        with writing(place):
            place.parent.mkdir(exist_ok=True)
            try:
                entry.folder.path.rename(place)
            except FileNotFoundError:
                return None
        return place

    def _prune(self) -> None:
        while True:
            try:
                self.records.prune(utc_now())
            except HeadraceError as error:
                log.warning("old records are deleted later: %s", error)
            if self._closing.wait(PRUNE_S):
                return


def _in_use(store: Path) -> bool:
    try:
        return in_use(store)
    except OSError:  # nothing can use it either
        return False


def _remove_store(entry: JobRecord) -> None:
    try:
        remove(entry.store, entry.name)
    except (HeadraceError, OSError) as error:
        log.warning("job %s is deleted, its store %s stays: %s", entry.name, entry.store, error)


def _with_store(raw: dict[str, Any], folder: JobFolder) -> dict[str, Any]:
    """The spec; its store is in the job's own folder unless the spec names one."""
    store = raw.get("store", {})
    if not isinstance(store, dict) or "path" in store:
        return raw
    return {**raw, "store": {**store, "path": str(folder.own_store)}}


def _make_folder(folder: JobFolder) -> None:
    """Create the folder. Raises JobExists where it holds more than a spec, though the records have no such job."""
    with writing(folder.path):
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(not path.name.startswith("job.json") for path in folder.path.iterdir()):
            raise JobExists(f"{folder.path.name} (unknown to the records, in {folder.path})")


@contextmanager
def host_jobs(
    config: ServiceConfig, problem_of: ProblemOf = plain_problem, wait: Wait | None = None
) -> Iterator[LocalHost]:
    """The host of the jobs below `config.root`, created if absent. Jobs outlive the context.

    Raises SpecError where another service hosts them, unless `wait` waits for it, and the errors of `active`.
    """
    root = config.root
    with writing(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.jobs.mkdir(exist_ok=True)
    with ExitStack() as held:
        mine = held.enter_context(active(config, wait))
        shutil.rmtree(root / TRASH, ignore_errors=True)
        shutil.rmtree(
            config.predicting, ignore_errors=True
        )  # left by a service that was killed together with its workers
        with writing(config.predicting):
            config.predicting.mkdir(mode=0o700, exist_ok=True)
        limits = config.limits
        work = OperationQueue(
            mine.records, max_operations=limits.max_operations, threads=limits.operations, problem_of=problem_of
        )
        held.callback(work.close)
        host = LocalHost(config, mine, work)
        held.callback(host.close)
        host.start()
        yield host
