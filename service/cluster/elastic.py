"""An elastic number of trainers: when a job goes on with fewer, and when with more.

`decide` is pure. Elasticity acts on it while a generation waits for its workers, or runs: with fewer trainers it has
the next generation planned anew, with more it asks rank 0 for a resize. Rank 0 logs both. Passes that no commit has
were trained by as many trainers as their plans have, and are replayed by as many: agents of the launcher's own stand in
for those that are missing (service.cluster.stand_ins).
"""

import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.printable import counted
from headrace.service.cluster.generation import Generation
from headrace.service.cluster.runtime import LAUNCHER, Launcher, OnLine
from headrace.service.spec.config import ClusterSection
from headrace.trainer.job_status import ElasticStatus, Status
from headrace.trainer.spec.changes import MOST_TRAINERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """The workers that a launcher knows, as far as they can be trainers. Stand-ins do not count."""

    able: int = 0
    """Trainers that can run once each shard has a worker. Of those that wait for the generation in preparation."""
    leads: bool = True
    """Whether one of them can be rank 0, if there is one."""
    may_come: bool = False
    """Whether a missing one was heard less than cluster.node_timeout ago, and may come back."""
    spares: int = 0
    """Those that no generation has a place for."""
    spare_s: float = 0.0
    """How long the first of these has waited."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """There is nothing to change."""

    reason: str = ""
    """The wait in words; "" without one."""


@dataclass(frozen=True, slots=True)
class GoOnWith:
    """The job goes on with another number of trainers."""

    trainers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRules:
    """The bounds of the number of trainers, and the longest waits."""

    least: int
    most: int
    node_timeout_s: float
    settle_s: float
    """How long the first of new workers waits for others."""


def decide(now: int, known: Attendance, rules: ElasticRules, *, runs: bool) -> GoOn | GoOnWith:
    """The decision for a generation of `now` trainers, which `runs` or waits for its workers."""
    if runs:
        wanted = min(rules.most, now + known.spares)
        if wanted <= now:
            return GoOn()
        joined = f"{counted(known.spares, 'worker')} {'has' if known.spares == 1 else 'have'} joined"
        if known.spare_s < rules.settle_s:
            left_s = rules.settle_s - known.spare_s
            return GoOn(f"goes on with {wanted} trainers in {left_s:.0f} s, as {joined}")
        return GoOnWith(wanted, f"goes on with {wanted} trainers in place of {now}: {joined}")
    if known.able >= now or not known.leads:
        return GoOn()
    fewer = f"{known.able} of {now} trainers can run"
    if known.may_come:
        return GoOn(
            f"{fewer}; goes on with fewer once nothing was heard of the others for {rules.node_timeout_s:g} s "
            "(cluster.node_timeout)"
        )
    if known.able < rules.least:
        return GoOn(f"{fewer}, fewer than cluster.trainers.min = {rules.least}")
    return GoOnWith(
        known.able,
        f"goes on with {counted(known.able, 'trainer')} in place of {now}: nothing was heard of the others for "
        f"{rules.node_timeout_s:g} s (cluster.node_timeout)",
    )


@runtime_checkable
class ElasticLauncher(Launcher, Protocol):
    """A launcher to which workers come, and from which they go, while a job runs."""

    def attendance(self) -> Attendance:
        """The workers that are known now."""
        ...

    def stand_in(self, number: int) -> None:
        """Have as many stand-ins for trainers of the generation in preparation. May be repeated."""
        ...


class ElasticPlans(Protocol):
    """Plans generations of other numbers of trainers. See service.cluster.generation_plans."""

    @property
    def replays(self) -> bool:
        """Whether the generation in preparation only replays passes, by as many trainers as they had."""
        ...

    @property
    def most(self) -> int:
        """The most trainers, by the job file or by a resize before the generation was planned. It is asked for at each
        step."""
        ...

    def aim_at(self, trainers: int) -> None:
        """Plan the next generation with so many."""
        ...


class Elasticity:
    """The number of trainers of one job. `step`: the launcher's thread; `status`: any thread."""

    def __init__(
        self, cluster: ClusterSection, launcher: ElasticLauncher, plans: ElasticPlans, on_line: OnLine
    ) -> None:
        assert cluster.elastic is not None, "the number of trainers is a range"
        self._range, self._cluster = cluster.elastic, cluster
        self._launcher, self._plans, self._on_line = launcher, plans, on_line
        self._now, self._known, self._waits, self._since_s = 0, Attendance(), "", time.monotonic()
        self._fewer: str | None = None  # not known yet
        self._asked = ""  # the last request to rank 0
        self._most = self._range.max

    def step(self, generation: Generation) -> bool:
        """Act on what is known now. True: end this generation, no worker of which runs, and plan another one."""
        now, runs = len(generation.plan.trainers), generation.begun
        known, rules = self._launcher.attendance(), self._rules(generation.rank0.status)
        decision = decide(now, known, rules, runs=runs)
        self._now, self._known, self._most = now if runs else 0, known, rules.most
        self._tell(decision.reason, loud=isinstance(decision, GoOn) and not runs)
        if isinstance(decision, GoOn):
            if runs and now >= self._most:
                self._fewer = ""
            elif runs and self._fewer is None:
                self._fewer = f"the job had {counted(now, 'trainer')} when its launcher was started"
            return False
        if runs:
            self._fewer = ""
            self._grow(generation, decision)
            return False
        if self._plans.replays:
            self._launcher.stand_in(now - known.able)
            return False
        self._fewer = decision.reason
        self._on_line(LAUNCHER, decision.reason)
        self._plans.aim_at(decision.trainers)
        return True

    def status(self) -> ElasticStatus:
        """For people."""
        return ElasticStatus(
            min=self._range.min,
            max=self._most,
            present=self._now,
            spares=self._known.spares,
            waits=self._waits,
            for_s=time.monotonic() - self._since_s if self._waits else 0.0,
            fewer=self._fewer or "",
        )

    def _rules(self, status: Status) -> ElasticRules:
        most = status.overrides.get(MOST_TRAINERS)
        return ElasticRules(
            least=self._range.min,
            most=most if isinstance(most, int) else self._plans.most,
            node_timeout_s=self._cluster.node_timeout,
            settle_s=self._cluster.elastic_wait,
        )

    def _tell(self, waits: str, *, loud: bool) -> None:
        if waits != self._waits:
            if loud and waits:
                self._on_line(LAUNCHER, waits)
            if not (waits and self._waits):
                self._since_s = time.monotonic()
            self._waits = waits

    def _grow(self, generation: Generation, wanted: GoOnWith) -> None:
        """Ask rank 0 for a resize, once for each number."""
        id_ = f"joined-{generation.plan.generation}-{wanted.trainers}"
        if self._plans.replays or id_ == self._asked:
            return
        self._asked = id_
        self._on_line(LAUNCHER, wanted.reason)
        generation.rank0.ask({"op": "resize", "id": id_, "trainers": wanted.trainers, "joined": True})
