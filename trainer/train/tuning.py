"""The trials of a tuning, in one process: `python -m headrace.trainer.train.tuning --config FILE`, a TrialsConfig.

The first events of the stream, or its newest ones, go through source and pipe once. Every setting learns the same
samples from memory, as an embedded trainer that logs and commits nothing. Successive halving (Jamieson, Talwalkar 2016)
by the loss of samples that are predicted before they are learnt, as long as any setting is ahead of the job as it is:
no clock takes part, so that a repetition chooses the same. At last the best change of each kind is tried together with
the others. service.cluster.tuning starts the process, and reads `progress.json` in its store.
"""

import copy
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from headrace import worker_process
from headrace.codec import plain
from headrace.config import PositiveCount, Section, set_key, validate
from headrace.dataset.loader.batch_loader import PassReader, PassTally
from headrace.dataset.loader.pass_shuffle import RankShare
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.source import Segment
from headrace.durable import REAL, write_whole, writing
from headrace.errors import HeadraceError, SpecError
from headrace.secrets import with_secrets
from headrace.trainer.config import NEWEST_DEFAULTS, TrainerJob, WorkerConfig
from headrace.trainer.journal.job_history import ReplayedPass
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.parts import source_of
from headrace.trainer.rank0.recovery import RestartPoint
from headrace.trainer.rank0.stream_excerpts import newest_plans, planned
from headrace.trainer.spec.class_rules import label_bounds_of, masks_of
from headrace.trainer.spec.defaults import fill_defaults
from headrace.trainer.train.assembly import Trainer, open_trainer
from headrace.trainer.tuning_status import PROGRESS, TriedStatus, TuningStatus

PASSES = 8
"""Number of passes of the events."""
ROUNDS = ((2, 1), (4, 2), (8, 4))
"""Successive halving: after so many of the passes, one of so many of the settings goes on."""
MAX_KEPT_BYTES = 1 << 30
"""Most bytes of samples in memory. What comes after them is not learnt."""
MIN_PASSES = 2
MIN_GAIN = 0.003
"""Least share of its loss by which the job as it is must be beaten; less may be chance, and gone later."""
COMBINED = "the best together"

log = logging.getLogger(__name__)


class TrialsConfig(Section):
    """Configuration of the process that tries settings of a job, written by the launcher as JSON."""

    trainer: WorkerConfig
    """The one trainer of each trial, for the job as it is; `store` is a new folder for them all."""
    settings: dict[str, dict[str, Any]]
    """Values by the path of their key, by the name of the setting; the first one is the job as it is."""
    events: PositiveCount
    """Number of positions of the stream that are learnt."""
    newest: bool = False
    """The last ones of the stream, in place of the first."""


@dataclass(frozen=True, slots=True)
class KeptPass:
    """The samples of a pass, in the blocks in which they were read, and the counts."""

    plan: PassPlan
    blocks: Sequence[Samples]
    tally: PassTally


class KeptReader:
    """Reads passes from memory, any number of times; see PassReader."""

    def __init__(self, passes: Sequence[KeptPass]) -> None:
        self._passes = {each.plan.number: each for each in passes}

    def read(self, pass_number: int, segments: Sequence[Segment], tally: PassTally) -> Iterator[Samples]:
        """Samples of the pass."""
        kept = self._passes[pass_number]
        for each in fields(PassTally):
            setattr(tally, each.name, copy.deepcopy(getattr(kept.tally, each.name)))
        yield from kept.blocks

    def close(self) -> None:
        """The next trial reads, too."""


def plans_of(config: WorkerConfig, job: TrainerJob, events: int, *, newest: bool) -> list[PassPlan]:
    """PASSES passes of the first `events` positions of the stream, or of its newest ones; fewer of a short stream."""
    open_source = partial(source_of, config, job, ())
    if newest:
        return newest_plans(open_source, job, events, PASSES, job.train.learn_until)
    return planned(open_source, job, max(1, events // PASSES), PASSES, {}, job.train.learn_until)


def kept_passes(config: WorkerConfig, job: TrainerJob, plans: Iterable[PassPlan]) -> list[KeptPass]:
    """The samples of the passes, as far as memory allows. Raises as source and pipe."""
    found, num_bytes = list[KeptPass](), 0
    reader = SegmentReader(
        source_of(config, job),
        job.pipe,
        Schema.of(job.slots).emitted,
        SourceSet(job.sources),
        None,
        config.folder,
        masks=masks_of(job),
        max_outage_s=job.passes.max_outage,
        memory=job.passes.memory,
        shuffles=RankShare(job.seed, 0, 1) if job.passes.shuffle else None,
        labels=label_bounds_of(job),
    )
    with closing(reader):
        for plan in plans:
            tally, blocks = PassTally(), list[Samples]()
            for block in reader.read(plan.number, plan.segments[0], tally):
                num_bytes += block.num_bytes
                if num_bytes > MAX_KEPT_BYTES:
                    log.info("the samples of %d passes fill the memory of trials", len(found))
                    return found
                blocks.append(block)
            tally.num_samples = sum(map(len, blocks))
            found.append(KeptPass(plan, blocks, tally))
    return found


@dataclass(eq=False)
class Trial:
    """A setting and how it fares."""

    name: str
    keys: Mapping[str, Any]
    losses: list[tuple[int, float, float | None]] = field(default_factory=list)
    """Of each pass that it has learnt: samples, mean loss, AUC."""
    events: int = 0
    failure: str = ""

    def measured(self, passes: int) -> tuple[float | None, float | None]:
        """Mean loss and AUC of the second half of the first so many passes."""
        if self.failure:
            return None, None
        last = [each for each in self.losses[passes // 2 : passes] if each[0]]
        total = sum(samples for samples, _, _ in last)
        loss = math.fsum(samples * loss for samples, loss, _ in last) / max(1, total)
        if not last or not math.isfinite(loss):
            return None, None
        aucs = [(samples, auc) for samples, _, auc in last if auc is not None]
        auc = math.fsum(samples * auc for samples, auc in aucs) / total if len(aucs) == len(last) else None
        return loss, auc

    @property
    def merit(self) -> tuple[bool, int, float]:
        """Lower is better: those that have trained more come first, then those with the lower loss."""
        loss, _ = self.measured(len(self.losses))
        return loss is None, -len(self.losses), loss or 0.0

    def gain_over(self, other: "Trial") -> float:
        """By how much its loss is lower over the passes that both have learnt."""
        passes = min(len(self.losses), len(other.losses))
        mine, theirs = self.measured(passes)[0], other.measured(passes)[0]
        return 0.0 if mine is None or theirs is None else theirs - mine

    def beats(self, other: "Trial") -> bool:
        """Whether it is better than another one that has learnt as much, by MIN_GAIN and in each pass that counts."""
        loss, passes = other.measured(len(other.losses))[0], len(other.losses)
        if loss is None or len(self.losses) < passes:
            return loss is None
        pairs = zip(self.losses[passes // 2 :], other.losses[passes // 2 :], strict=True)
        return self.gain_over(other) >= MIN_GAIN * loss and all(mine[1] < theirs[1] for mine, theirs in pairs)

    def tried(self) -> TriedStatus:
        """As the status shows it."""
        loss, auc = self.measured(len(self.losses))
        return TriedStatus(name=self.name, keys=dict(self.keys), events=self.events, logloss=loss, auc=auc)


def rounds(settings: int, passes: int = PASSES) -> list[tuple[int, int]]:
    """Up to which pass how many of so many settings train, by round; where none is left out, rounds are one."""
    found = {max(2, -(-settings // share)): min(passes, until) for until, share in ROUNDS}
    return [(until, most) for most, until in found.items()]


def best(trials: Iterable[Trial]) -> list[Trial]:
    """By merit; of equal ones the first."""
    return sorted(trials, key=lambda each: each.merit)


def going_on(trials: Sequence[Trial], most: int) -> list[Trial]:
    """The best of them that train in the next round, so many at most: those ahead of the first one, which is the job
    as it is, and this one, as the others are compared with it.
    """
    plain, longest = trials[0], max(len(each.losses) for each in trials)
    ahead = [each for each in trials[1:] if len(each.losses) == longest and _may_win(each, plain)]
    return [*best(ahead)[: most - 1], plain]


def _may_win(trial: Trial, plain: Trial) -> bool:
    """Whether it is ahead by half of what it needs in the end, as a lead may grow; without labels so far all may."""
    loss, _ = plain.measured(len(plain.losses))
    if loss is None:
        return not trial.failure
    return trial.gain_over(plain) > MIN_GAIN / 2 * loss


def combined(trials: Sequence[Trial]) -> Trial | None:
    """The best change of each kind together, as far as each is better than none; None unless there are two, and what
    they gain in sum would be enough to choose them.

    The first trial is the job as it is. Changes of the same keys are of one kind.
    """
    loss, _ = trials[0].measured(len(trials[0].losses))
    by_kind: dict[tuple[str, ...], Trial] = {}
    for each in trials[1:]:
        kind = tuple(sorted(each.keys))
        gain = each.gain_over(trials[0])
        if gain > 0 and (kind not in by_kind or gain > by_kind[kind].gain_over(trials[0])):
            by_kind[kind] = each
    gains = math.fsum(each.gain_over(trials[0]) for each in by_kind.values())
    if len(by_kind) < 2 or loss is None or gains < MIN_GAIN * loss:
        return None
    return Trial(COMBINED, {key: value for each in by_kind.values() for key, value in each.keys.items()})


def chosen_first(trials: Sequence[Trial]) -> list[Trial]:
    """By merit, but for the chosen one, which is the best that beats the job as it is, or this job."""
    found = best(trials)
    chosen = next((each for each in found if each is not trials[0] and each.beats(trials[0])), trials[0])
    return [chosen, *(each for each in found if each is not chosen)]


class Trials:
    """Trains settings on the same passes, and keeps the trainers of those that may go on."""

    def __init__(self, config: TrialsConfig, plans: Sequence[PassPlan], reader: PassReader | None) -> None:
        """`reader`: replaces source and pipe; None: those of the job, which keeps its samples in files."""
        self._config, self._plans, self._reader = config.trainer, plans, reader
        self.trials = [Trial(name, keys) for name, keys in config.settings.items()]
        self._open: dict[str, tuple[ExitStack, Trainer]] = {}
        found = rounds(len(self.trials), len(plans))
        self._runs, self._run = sum(most for _, most in found), 0

    def run(self) -> list[Trial]:
        """All trials, the chosen one first."""
        with ExitStack() as held:
            held.callback(self._close_all)
            for number, (passes, most) in enumerate(rounds(len(self.trials), len(self._plans))):
                chosen = going_on(self.trials, most) if number else self.trials
                if len(chosen) == 1:
                    return chosen_first(self.trials)
                self._runs -= most - len(chosen)
                self._close_all(but=[each.name for each in chosen])
                for each in chosen:
                    self._train(each, passes)
            if (last := combined(self.trials)) is not None:
                self._close_all()
                self.trials.append(last)
                self._runs += 1
                self._train(last, len(self._plans))
        return chosen_first(self.trials)

    def _train(self, trial: Trial, passes: int) -> None:
        self._run += 1
        self.report(TuningStatus(trial=self._run, of=self._runs, name=trial.name))
        if trial.failure:
            return
        try:
            trainer = self._trainer(trial)
            while len(trial.losses) < passes:
                plan = self._plans[len(trial.losses)]
                trial.losses.append(_train_pass(trainer, plan.number))
                trial.events += plan.num_positions
        except HeadraceError as error:
            trial.failure = str(error)
            log.warning("%s: %s", trial.name, error)

    def _trainer(self, trial: Trial) -> Trainer:
        """The trainer of a setting, at the pass where it was left."""
        if trial.name not in self._open:
            job = copy.deepcopy(self._config.job)
            for path, value in trial.keys.items():
                set_key(job, path, value)
            store = self._config.store / f"{self.trials.index(trial):02}"
            store.mkdir()
            more = {"job": job, "store": store, "live": store / "live", "socket": store / "role"}
            replay = [ReplayedPass(plan, 0, None) for plan in self._plans]
            begin = RestartPoint(timeline="", commit=None, replay=replay, last_number=len(replay))
            with ExitStack() as held:
                config = self._config.model_copy(update=more)
                trainer = held.enter_context(open_trainer(config, self._reader, beginning=begin))
                self._open[trial.name] = held.pop_all(), trainer
        return self._open[trial.name][1]

    def _close_all(self, but: Sequence[str] = ()) -> None:
        for name in [each for each in self._open if each not in but]:
            self._open.pop(name)[0].close()

    def report(self, status: TuningStatus) -> None:
        """Tell the launcher how far the trials are. Raises Unwritable."""
        write_progress(self._config.store, status)


def write_progress(store: Path, status: TuningStatus) -> None:
    """Tell the launcher how far the trials are. Raises Unwritable."""
    with writing(store / PROGRESS):
        write_whole(REAL, store / PROGRESS, json.dumps(plain(status)).encode())


def _train_pass(trainer: Trainer, number: int) -> tuple[int, float, float | None]:
    """Train the next pass; its samples, mean loss and AUC."""
    before = trainer.parts.progress.num_samples
    trainer.loop.run(number)
    measures = trainer.parts.progress.status().measures("pass")
    weights = {task.name: task.weight for task in trainer.job.tasks}
    loss = math.fsum(weight * _loss(measures.get(task, {})) for task, weight in weights.items())
    return trainer.parts.progress.num_samples - before, loss, measures.get(next(iter(weights)), {}).get("auc")


def _loss(measures: Mapping[str, Any]) -> float:
    """The log loss of a task, or its squared error; not a number where it has neither."""
    value, rmse = measures.get("logloss"), measures.get("rmse")
    if value is None:
        return math.nan if rmse is None else float(rmse) ** 2
    return float(value)


def try_settings(config: TrialsConfig) -> list[Trial]:
    """The settings, the chosen one first. Raises SpecError where none can be run."""
    worker = config.trainer
    raw = fill_defaults(worker.job, unset=NEWEST_DEFAULTS)
    job = validate(TrainerJob, with_secrets(raw, worker.secrets), only_known=True)
    write_progress(worker.store, TuningStatus(name="reads the events"))
    plans = plans_of(worker, job, config.events, newest=config.newest)
    reader = None
    if job.join is None:  # a join gives events back to source and pipe
        kept = kept_passes(worker, job, plans)
        if len(kept) < MIN_PASSES <= len(plans):
            raise SpecError(
                f"the samples of two of {len(plans)} passes exceed {MAX_KEPT_BYTES >> 20} MiB; lower it",
                "tuning.events",
            )
        plans, reader = [each.plan for each in kept], KeptReader(kept)
    if len(plans) < MIN_PASSES:
        raise SpecError(f"the stream has too few events: {sum(each.num_positions for each in plans):,}")
    trials = Trials(config, plans, reader)
    found = trials.run()
    if found[0].measured(len(found[0].losses))[0] is None:
        raise SpecError(f"no setting could be trained: {found[0].failure or 'no pass has samples with labels'}")
    trials.report(TuningStatus(tried=[each.tried() for each in found]))
    return found


def start(path: Path) -> None:
    """Read the configuration and run."""
    config = worker_process.config_of(path, TrialsConfig)
    worker_process.begin("tuning")
    try_settings(config)


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
