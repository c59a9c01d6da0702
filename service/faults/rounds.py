"""Runs a job undisturbed, then repeatedly with deaths, in stores of its own, and compares the results.

service.faults.injection kills the workers; service.cli.fault_output prints the results.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from headrace import documents
from headrace.config import load_toml
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.simulated import SimulatedSource
from headrace.done_markers import DONE
from headrace.errors import HeadraceError, SpecError
from headrace.extras import require
from headrace.failpoints import ArmedFailpoint, Failpoint
from headrace.pserver.consistency.policy import policy_of
from headrace.service.cluster.runtime import OnLine
from headrace.service.cluster.store import REPORT, RERUNS
from headrace.service.cluster.supervision import RunOutcome
from headrace.service.faults.deaths import RANK_0, AtFailpoint, AtInstant, Death, JobFeatures, deaths, failpoint_places
from headrace.service.faults.export_comparison import CUT_WORDS, Exported, differing, export_violations, exported_of
from headrace.service.faults.injection import DeathRecord, Deaths, run
from headrace.service.faults.operator import FaultRunOperator, OperatorRequest, carried_out, request_violations
from headrace.service.history.rerun import rerun_job
from headrace.service.monitor.shows import Show
from headrace.service.spec.job import LoadedJob, load_job
from headrace.trainer.exports.destination import EXPORTS
from headrace.trainer.journal.log import read_history
from headrace.trainer.rank0.shrink_guard import has_rule

COMPARED = ("events", "samples", "rejected", "passes", "positions", "metrics", "halves", "digest")
"""Fields of the report that must be equal."""
COUNTED = ("events", "samples", "rejected", "passes", "positions")
"""Those of a mode whose weights differ from run to run; see counts_of."""
COUNTED_OF_CLOSES = ("number", "day", "events", "samples", "rejected", "event_time_s", "digests")
COMMITS = ("commit.every_passes=2", "commit.keep=2", "train.tune=off")
"""Many commits, of which few are kept. The user's own settings override them."""
FALLBACK = ArmedFailpoint(point=Failpoint.CLOSED, hit=6)
"""The failpoint at which a generation dies that does not reach its own."""
KEEP_ALL = "commit.keep=1000"
"""Also keeps the whole log, which a rerun needs."""
NAME_LENGTH = 57


@dataclass
class Round:
    """One disturbed run."""

    store: Path
    died: Sequence[DeathRecord] = ()
    missed: Sequence[AtFailpoint] = ()
    """Deaths at failpoints that were not reached."""
    unasked: Mapping[int, str] = field(default_factory=dict)
    """Generations that ended in another way than planned, and how."""
    wrong: list[str] = field(default_factory=list)
    """Differences from the undisturbed run, and violations."""
    ended: bool = False
    """True if it reached the end of the stream."""
    requests: list[OperatorRequest] = field(default_factory=list)
    """The requests of its operator."""
    num_exports: int = 0
    """Complete exports that were compared."""

    @property
    def identical(self) -> bool:
        """True if its results are those of the undisturbed run."""
        return self.ended and not self.wrong and not self.unasked


class FaultRuns:
    """The runs of one job. Main thread only."""

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        events: int | None,
        seed: int,
        on_line: OnLine,
        *,
        operated: bool = False,
    ) -> None:
        """`operated`: an operator requests operations meanwhile.

        Raises SpecError where the job's stream has no end, or stores of an earlier fault run exist.
        """
        self._path, self._overrides, self._on_line = path, overrides, on_line
        asked = load_job(path, overrides)
        self.folder = asked.store.with_name(f"{asked.store.name}-faults-{seed}")
        self._raw = load_toml(path, overrides)
        _check_stream(asked, events)
        _check_gates(asked)
        require("torch", "training")
        self.operated, self._seed = operated, seed
        self.repeatable = policy_of(asked.spec.train.mode).repeatable
        """Whether weights and metrics are compared, not only events and counts."""
        self.by_rerun = operated or asked.spec.passes.cut == "arrival"
        self._ours = [*_overrides(asked, events), *([KEEP_ALL] if self.by_rerun else [])]
        if self.folder.exists():
            raise SpecError(f"{self.folder} is left from an earlier fault run; remove it, or give another --seed")
        spec = asked.spec
        inside = spec.train.rows == "device"  # then the shards are in the trainers
        sizes = spec.cluster.num_trainers, 0 if inside else spec.cluster.num_shards
        shrinks = any(table.shrink == "daily" and has_rule(table) for table in spec.tables.values())
        busy = JobFeatures(
            spec.store.mirror is not None,
            operated or shrinks,
            bool(spec.exports),
            spec.store.parts == "object",
            spec.cluster.readers,
        )
        self._num_places = len(failpoint_places(*sizes, busy))
        self._deaths: Iterator[Death] = deaths(seed, *sizes, busy)
        self._calm: Seen = {}, {}, {}
        self._kernels: Mapping[str, Mapping[str, str]] | None = None

    def undisturbed(self) -> int:
        """Make the run to compare with; its number of passes. Raises HeadraceError where it fails by itself."""
        job = self._job("calm")
        seen = Deaths(job.store, iter(()))
        outcome = run(job, seen, self._on_line)
        if outcome.code != 0 or seen.unasked:
            raise HeadraceError(f"the job fails without any fault: {outcome.reason}; its store is {job.store}")
        self._kernels = next((table.kernels for _, table in read_history(seen.log).matmuls()), None)
        self._calm = self._seen(job, seen, exported_of(job, seen.log))
        if wrong := list(export_violations(job, seen.log)):
            raise HeadraceError(f"the exports of the undisturbed run are wrong: {'; '.join(wrong)}")
        return len(seen.closes)

    def disturbed(self, number: int, show: Show) -> Round:
        """Make the n-th run with deaths: at most twice as many as there are pairs of failpoint and worker."""
        job = replace(self._job(f"round-{number:04d}"), kernels=self._kernels)
        seen = Deaths(job.store, islice(self._deaths, 2 * self._num_places), FALLBACK)
        found = Round(job.store)
        operators = FaultRunOperator(job.spec, job.store, self._seed + number)
        try:
            with ExitStack() as held:
                if self.operated:
                    held.enter_context(operators.working())
                outcome = run(job, seen, self._on_line)
        except HeadraceError as error:
            outcome = RunOutcome(error.exit_code, str(error))
        if seen.waiting is not None:
            self._deaths = chain([seen.waiting], self._deaths)
        found.died, found.missed, found.unasked = seen.died, seen.missed, seen.unasked
        found.ended, found.requests = outcome.code == 0, operators.requests
        if found.ended:
            found.wrong += self._compared(job, seen, found, show)
        else:
            found.wrong.append(f"it ended with {outcome.code}: {outcome.reason}")
        if found.identical:
            for left in self.folder.glob(f"{job.store.name}*"):
                shutil.rmtree(left)
        return found

    def _compared(self, job: LoadedJob, seen: Deaths, found: Round, show: Show) -> list[str]:
        """Differences and violations, in words."""
        exported = exported_of(job, seen.log)
        found.num_exports = sum(what.endswith(f"/{DONE}") for what in exported)
        wrong = [*export_violations(job, seen.log), *request_violations(found.requests, seen.log)]
        if not self.by_rerun:
            return [*differences(self._calm, self._seen(job, seen, exported)), *wrong]
        if rerun_job(job, "0", show, keep=True) != 0:
            wrong.append("a rerun of its log differs")
        again = [report_of(store)["digest"] for store in (job.store / RERUNS).iterdir()]
        if self.repeatable and again != [report_of(job.store)["digest"]]:
            wrong.append("a rerun of its log has another digest")
        return wrong

    def _seen(self, job: LoadedJob, deaths: Deaths, exported: Exported) -> "Seen":
        """The results of a run that another one must repeat."""
        seen = deaths.closes, report_of(job.store), exported
        return seen if self.repeatable else counts_of(seen)

    def clear(self) -> None:
        """Remove every store."""
        shutil.rmtree(self.folder)

    def _job(self, name: str) -> LoadedJob:
        store = self.folder / name
        mirror = [f"store.mirror={json.dumps(f'{store}-mirror')}"] if "mirror" in self._raw["store"] else []
        place = f"store.path={json.dumps(str(store))}"
        exports = [
            f"exports.{name}.path={json.dumps(str(store / EXPORTS / name))}" for name in self._raw.get("exports", ())
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        return load_job(self._path, [*COMMITS, *self._overrides, *self._ours, place, *exports, *mirror])


def _overrides(job: LoadedJob, events: int | None) -> list[str]:
    """Settings that separate these runs from the job: the name, under which Kafka shows positions, too."""
    ours = [f"name={json.dumps(job.spec.name[:NAME_LENGTH] + '-faults')}"]
    for name, source in job.spec.sources.items():
        if isinstance(source, SimulatedSource) and events is not None:
            ours.append(f"sources.{name}.events={events}")
        if isinstance(source, KafkaSource) and source.group is not None:
            ours.append(f"sources.{name}.group={json.dumps(source.group + '-faults')}")
    return ours


def _check_gates(job: LoadedJob) -> None:
    """Raise SpecError where exports would wait for scores: fault runs have no evaluator."""
    for name, stream in job.spec.exports.items():
        if stream.gates.evaluator is not None:
            raise SpecError("fault runs have no evaluator; leave this gate out", f"exports.{name}.gates.evaluator")


def _check_stream(job: LoadedJob, events: int | None) -> None:
    """Raise SpecError where the stream never ends, or depends on the positions of the job itself."""
    for name, source in job.spec.sources.items():
        key = f"sources.{name}"
        if isinstance(source, SimulatedSource):
            if events is None and not source.ends:
                raise SpecError("this stream never ends; give --events", key)
            continue
        if events is not None:
            raise SpecError("--events is for simulated sources", key)
        if isinstance(source, FilesSource) and source.follow:
            raise SpecError("this stream never ends; give --set ...follow=false", f"{key}.follow")
        if isinstance(source, KafkaSource) and source.end in ("never", "latest"):
            raise SpecError(
                "all runs must end at the same place: give a time, as in 2024-05-01T00:00:00+00:00", f"{key}.end"
            )
        if isinstance(source, KafkaSource) and source.start in ("latest", "group"):
            raise SpecError('all runs must begin at the same place: give "earliest", or a time', f"{key}.start")
        if not source.ends:
            raise SpecError("this stream never ends", key)


def report_of(store: Path) -> dict[str, Any]:
    """The compared fields of a run's report."""
    report = {}
    with suppress(FileNotFoundError):
        report = documents.read_object(store / REPORT)
    return {key: report.get(key) for key in COMPARED}


Seen = tuple[Mapping[int, Any], Mapping[str, Any], Exported]
"""The results of a run: its closes by number, its report, its exports."""


def counts_of(seen: Seen) -> Seen:
    """Events and counts of the closes and of the report, and the exports that were made, without their content."""
    closes, reported, exported = seen
    counted = {number: {key: body.get(key) for key in COUNTED_OF_CLOSES} for number, body in closes.items()}
    made = {what: value for what, value in exported.items() if what.endswith((CUT_WORDS, f"/{DONE}"))}
    return counted, {key: reported[key] for key in COUNTED}, made


def differences(wanted: Seen, found: Seen) -> list[str]:
    """The differences of two runs, in words."""
    wrong = [f"pass {n}" for n in sorted({*wanted[0], *found[0]}) if wanted[0].get(n) != found[0].get(n)]
    more = [f"{len(wrong) - 3} more passes"] if len(wrong) > 4 else []
    reports = [key for key in wanted[1] if wanted[1][key] != found[1][key]]
    return [*(wrong[:3] if more else wrong), *more, *reports, *differing(wanted[2], found[2])]


# The results of fault runs: a table of deaths, a line that sums them up, and JSON. Pure.

HOW_MEASURED = (
    "in: from the death to the first new close in the log (of the exporter: to the first complete export); "
    "median and longest, without the deaths that another death followed sooner"
)


def place_of(died: DeathRecord) -> tuple[str, str]:
    """The place of a death, and the worker."""
    match died.death:
        case _ if died.elsewhere is not None:
            return died.elsewhere, RANK_0
        case AtFailpoint(worker, point):
            return ("", "") if died.point is None else (point, worker)
        case AtInstant(worker, stopped=stopped, exports=exports):
            when = "at random, exporting" if exports else "at random"
            return "stopped and back" if stopped else when, worker


def table_of(rounds: Sequence[Round], compared: str) -> Table:
    """A row for each place and worker."""
    rows: dict[tuple[str, str], list[tuple[DeathRecord, Round]]] = defaultdict(list)
    for each in rounds:
        for died in each.died:
            rows[place_of(died)].append((died, each))
    table = Table(caption=f"{HOW_MEASURED}\nidentical: {compared}", caption_justify="left")
    for name in ("point", "role"):
        table.add_column(name, no_wrap=True)
    for name in ("kills", "recovered", "in", "at most", "identical"):
        table.add_column(name, justify="right")
    for (point, worker), found in sorted(rows.items()):
        times = [died.recovered_s for died, _ in found if died.recovered_s is not None]
        took = (f"{median(times):.1f} s", f"{max(times):.1f} s") if times else ("-", "-")
        counts = [len(found), sum(each.ended for _, each in found)]
        table.add_row(point, worker, *map(str, counts), *took, str(sum(each.identical for _, each in found)))
    for place in sorted({(death.point, death.worker) for each in rounds for death in each.missed} - rows.keys()):
        table.add_row(*place, "never", "", "", "", "")
    return table


def total_line(rounds: Sequence[Round]) -> str:
    """The sum of all rounds in one line."""
    kills = sum(len(each.died) for each in rounds)
    recovered = sum(len(each.died) for each in rounds if each.ended)
    identical = sum(len(each.died) for each in rounds if each.identical)
    line = f"{kills} kills, {recovered} recovered, {identical} identical"
    exports = sum(each.num_exports for each in rounds)
    requests = sum(carried_out(each.requests) for each in rounds)
    more = [f"{exports} exports"] * bool(exports) + [f"{requests} requests acted"] * bool(requests)
    return "; ".join([line, *more])


def message_of(found: Round) -> dict[str, Any]:
    """A round as JSON: its deaths by place and worker, and what differs."""
    deaths = [(*place_of(died), died.recovered_s) for died in found.died]
    return {
        "store": str(found.store),
        "identical": found.identical,
        "ended": found.ended,
        "deaths": [{"point": point, "role": worker, "recovered_s": took} for point, worker, took in deaths],
        "not_reached": [{"point": missed.point, "role": missed.worker} for missed in found.missed],
        "wrong": found.wrong,
        "ended_otherwise": {str(number): reason for number, reason in found.unasked.items()},
        "exports": found.num_exports,
        "requests": carried_out(found.requests),
    }
