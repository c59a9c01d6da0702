"""Tries settings of a job on the first events of its stream, and lets a new job choose its own before its first pass.

Each setting trains the same events from the beginning, as an embedded job in a store of its own. The first one reads
source and pipe and keeps the samples in files, which the others read. Successive halving (Jamieson, Talwalkar 2016) by
the loss of samples that are predicted before they are learnt: no clock takes part, so that a repetition chooses the
same. A job is a function of its settings and its log, so the new job need not take over what the best one has learnt.
"""

import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import Opening
from headrace.deadline import Deadline
from headrace.durable import REAL, write_whole, writing
from headrace.errors import HeadraceError, SpecError
from headrace.extras import require
from headrace.lifecycle import ExitCode, stop_flag
from headrace.service.cluster.runtime import LAUNCHER, OnLine
from headrace.service.cluster.store import TUNED, TUNING
from headrace.service.cluster.store_defaults import newest_spec
from headrace.service.cluster.warm import warm_launchers
from headrace.service.cluster.worker_plan import OF_ANY_JOB
from headrace.service.spec.job import LoadedJob, job_of
from headrace.service.spec.side_groups import with_own_groups
from headrace.service.spec.tuned_settings import AS_IT_IS, Keys, settings_to_try, under_choice, with_keys
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read_history
from headrace.trainer.tuning_config import TriedSetting, TuningChoice

SUFFIX = "-tuning"
"""Of the Kafka groups of its runs."""
SAMPLES = "samples"
MAX_KEPT_BYTES = 8 << 30
"""Most bytes of kept samples; the rest is read through source and pipe again."""
PASSES = 8
"""Number of passes of the events."""
ROUNDS = ((2, 1), (4, 2), (8, 4))
"""Successive halving: after so many of the passes, one of so many of the settings goes on."""
LEFT_OUT = ("exports", "predict", "evaluator", "guards", "cluster", "tuning")
"""Sections of the job that its runs lack."""
OPEN_S = 60.0


class TuningStopped(HeadraceError):
    """The job was asked to stop before it had chosen its settings."""

    def __init__(self) -> None:
        super().__init__("stopped while it tried settings; the next start tries them again")


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and how it fared; see TriedSetting."""

    name: str
    keys: Keys
    events: int = 0
    logloss: float | None = None
    auc: float | None = None

    @property
    def merit(self) -> tuple[bool, int, float]:
        """Lower is better: those that have trained more come first, then those with the lower loss."""
        return self.logloss is None, -self.events, self.logloss or 0.0


def tuned_at_start(job: LoadedJob, on_line: OnLine, stopped: ExitCode = ExitCode.DRAINED) -> LoadedJob:
    """The job under the settings that it chooses, if it is new and may choose any. Its store is held. Raises
    TuningStopped, with the exit code `stopped`. Main thread only.

    1. Remove what a killed run has left. 2. Try the settings. 3. Write the choice: until then the next run begins anew.
    """
    folder = job.store / TUNING
    shutil.rmtree(folder, ignore_errors=True)  # 1
    if not _is_due(job):
        return job
    settings = dict(list(settings_to_try(job).items())[: job.spec.tuning.settings])
    events = job.spec.tuning.events
    if len(settings) < 2 or not _has_backlog(job, events, on_line):
        return job
    on_line(LAUNCHER, f"tuning: {len(settings)} settings learn the first {events:,} events each in turn")
    begin_s = time.monotonic()
    try:
        tried = try_settings(job, settings, folder, events, on_line)  # 2
    except TuningStopped as error:
        error.exit_code = stopped
        raise
    except SpecError as error:
        on_line(LAUNCHER, f"not tuned: {error}")
        return job
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    choice = TuningChoice(tried=tuple(TriedSetting(**asdict(each)) for each in tried)).model_dump(mode="json")
    with writing(job.store / TUNED):
        write_whole(REAL, job.store / TUNED, json.dumps(choice).encode())  # 3
    on_line(LAUNCHER, f"tuned in {time.monotonic() - begin_s:.1f} s: {words_of(tried)}")
    return under_choice(job, choice)


def _is_due(job: LoadedJob) -> bool:
    train = job.spec.train
    if train.tune != "auto" or not train.learn or job.spec.tuning.chosen is not None or job.ends_after is not None:
        return False
    return newest_spec(job.store) is None


def _has_backlog(job: LoadedJob, events: int, on_line: OnLine) -> bool:
    """Whether the stream has so many events now, and this machine can learn them."""
    spec = job.spec
    try:
        require("torch", "training")
        deadline = Deadline.after(OPEN_S)
        opening = Opening(folder=job.folder, job=spec.name + SUFFIX, seed=spec.seed, deadline=deadline)
        source = open_sources(with_own_groups_of(job), opening)
        try:
            waiting = sum(each.end - max(each.begin, each.start) for each in source.partitions(deadline))
        finally:
            source.close()
    except (HeadraceError, OSError) as error:
        on_line(LAUNCHER, f"not tuned, for the stream cannot be learnt on this machine: {error}")
        return False
    if waiting < events and not source.bounded:
        on_line(
            LAUNCHER,
            f"not tuned: the stream has {waiting:,} of {events:,} events yet; `headrace sweep` compares settings later",
        )
    return waiting >= events


def with_own_groups_of(job: LoadedJob) -> Mapping[str, Any]:
    """The sources of the job, with Kafka groups of their own."""
    return job_of(with_own_groups(job.whole(), job.spec, SUFFIX), job.folder).spec.sources


def try_settings(
    job: LoadedJob, settings: Mapping[str, Keys], folder: Path, events: int, on_line: OnLine
) -> list[Trial]:
    """The settings in the order of their merit, each after it has trained at most the first `events` positions.

    `settings`: by name, values by the path of their key. `folder`: for their stores, new. Main thread only. Raises
    SpecError where none can be run, TuningStopped.
    """
    each_pass = max(1, events // PASSES)
    jobs = {
        name: _beside(job, keys, folder / f"{number:02}", folder / SAMPLES, each_pass)
        for number, (name, keys) in enumerate(settings.items())
    }
    trials = {name: Trial(name, keys) for name, keys in settings.items()}
    begin_s, first = time.monotonic(), True
    with warm_launchers(OF_ANY_JOB), stop_flag() as stopping:
        for passes, most in rounds(len(trials)):
            for trial in _best(trials.values())[:most]:
                trials[trial.name] = _trained(trial, jobs[trial.name], passes * each_pass)
                if stopping.is_set():  # before or after a run, which hears of stops itself
                    raise TuningStopped
                if first:
                    whole_s = (time.monotonic() - begin_s) * num_passes(len(trials)) / passes
                    on_line(LAUNCHER, f"tuning takes about {whole_s:.0f} s, by the first of its runs")
                    first = False
    if all(each.logloss is None for each in trials.values()):
        raise SpecError("no setting could be trained")
    return _best(trials.values())


def rounds(settings: int) -> list[tuple[int, int]]:
    """Up to which pass how many of so many settings train, by round; where none is left out, rounds are one."""
    found = {max(2, -(-settings // share)): passes for passes, share in ROUNDS}
    return [(passes, most) for most, passes in found.items()]


def num_passes(settings: int) -> int:
    """How many passes so many settings train, all of them together."""
    found = rounds(settings)
    before = (0, *(passes for passes, _ in found))
    return sum(most * (passes - last) for (passes, most), last in zip(found, before, strict=False))


def _best(trials: Iterable[Trial]) -> list[Trial]:
    """By merit; of equal ones the first."""
    return sorted(trials, key=lambda each: each.merit)


def _beside(job: LoadedJob, keys: Keys, store: Path, samples: Path, each_pass: int) -> LoadedJob:
    """The job under a setting, in a store of its own. Raises SpecError."""
    raw = {key: value for key, value in job.whole().items() if key not in LEFT_OUT}
    raw |= {"store": {"path": str(store)}, "cluster": {"trainers": 1, "shards": 0}}
    own = {
        "train.tune": "off",
        "train.matmul": "mkl",  # the measured ones depend on a clock
        "metrics.halves": False,
        "metrics.slices": [],
        "passes.keep_in": str(samples),
        "passes.keep": f"{MAX_KEPT_BYTES >> 20}MiB",
        "passes.max_events": each_pass,
        "passes.cut": "count",
        "commit.keep": PASSES,  # so that the log keeps the closes of the last half
    }
    return job_of(with_keys(with_own_groups(raw, job.spec, SUFFIX), {**keys, **own}), job.folder)


def _trained(trial: Trial, job: LoadedJob, positions: int) -> Trial:
    """The setting after it has trained so many positions of the stream. Raises TuningStopped."""
    from headrace.service.cluster.job_run import open_run  # which tunes new jobs

    with open_run(replace(job, ends_after=positions), lambda worker, text: None) as opened:
        outcome = opened.run()
        if opened.launcher.stopped:
            raise TuningStopped
    trial = replace(trial, events=positions)
    if outcome.code != ExitCode.DRAINED:
        return replace(trial, logloss=None, auc=None)
    return measured(trial, read_history(job.store / "log"), {task.name: task.weight for task in job.spec.tasks})


def measured(trial: Trial, history: JobHistory, weights: Mapping[str, float]) -> Trial:
    """The setting by the closes in its log: means over the last half of its passes. `weights`: of losses, by task."""
    newest = max(history.closes, default=0)
    closes = [each.content for number, each in sorted(history.closes.items()) if 2 * number > newest]
    last = [each for each in closes if each.samples]
    losses = [sum(weight * _loss(each.of_pass.get(task, {})) for task, weight in weights.items()) for each in last]
    aucs = [each.of_pass.get(next(iter(weights)), {}).get("auc") for each in last]
    samples = [each.samples for each in last]
    loss = _mean(losses, samples)
    auc = None if None in aucs else _mean(aucs, samples)
    return replace(trial, logloss=loss, auc=auc)


def _loss(measures: Mapping[str, Any]) -> float:
    """The log loss of a task, or its squared error; not a number where it has neither."""
    value, rmse = measures.get("logloss"), measures.get("rmse")
    if value is None:
        return math.nan if rmse is None else float(rmse) ** 2
    return float(value)


def _mean(values: Sequence[float], samples: Sequence[int]) -> float | None:
    """The mean, weighted by samples; None where there is none."""
    mean = math.fsum(value * number for value, number in zip(values, samples, strict=True)) / max(1, sum(samples))
    return mean if values and math.isfinite(mean) else None


def words_of(tried: Sequence[Trial]) -> str:
    """The choice in one line."""
    best = tried[0]
    if not best.keys:
        return f"the job stays {AS_IT_IS}, the best of {len(tried)} settings"
    keys = ", ".join(f"{key} = {value}" for key, value in best.keys.items())
    return f"{best.name!r} is the best of {len(tried)} settings: {keys}"
