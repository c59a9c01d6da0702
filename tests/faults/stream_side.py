"""The stream's side of a job without the rest: a planner with what its log would keep, and a source that reads."""

from collections.abc import Callable, Collection

import pytest

from headrace.dataset.spec.config import SourceSection
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import SourceGap
from headrace.dataset.stream.source import Source
from headrace.deadline import Deadline
from headrace.trainer.config import PassesSection
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.rank0.planner import MemoryPlanJournal, PassRules, Planner, StreamEnded


class StreamSide:
    """Passes are planned and read to their end; each `start` is one after a restart."""

    def __init__(self, open_source: Callable[[Collection[str]], Source], on_gap: str = "fail", **passes) -> None:
        self.open_source, self.on_gap = open_source, on_gap
        self.passes = PassesSection(**{"wait": "1ms", "max_events": 100_000} | passes)
        self.known, self.skips, self.positions, self.number = {}, (), {}, 0
        self.journal = MemoryPlanJournal()

    def start(self) -> Planner:
        """A planner that knows what the log says."""
        return Planner(
            self.open_source(self.known),
            PassRules(self.passes, 1, sources=SourceSet.of(SourceSection(on_gap=self.on_gap))),
            journal=self.journal,
            known=self.known,
            skips=self.skips,
        )

    def plans(self, planner: Planner | None = None) -> PassPlan | StreamEnded:
        """The next pass, of `planner` or of one after a restart; it counts as trained."""
        using = planner or self.start()
        try:
            using.request(self.number + 1, self.positions, 0)
            plan = using.take(20.0)
        finally:
            if planner is None:
                using.close()
        assert plan is not None
        self.known, self.skips = using.known, using.skips
        if isinstance(plan, PassPlan):
            self.number += 1
            self.positions |= plan.positions()
        return plan

    def trains(self, planner: Planner | None = None) -> list[bytes | None]:
        """The events of the next pass."""
        return self.reads(self.plans(planner))

    def reads(self, plan: PassPlan) -> list[bytes | None]:
        """The events of a pass, read by a source of its own."""
        source = self.open_source(())
        try:
            return [
                block.value(i)
                for rank in plan.segments
                for segment in rank
                for block in source.read(segment, Deadline.after(20))
                for i in range(len(block))
            ]
        finally:
            source.close()

    def fails(self, planner: Planner | None, match: str) -> None:
        """Assert that the next pass is refused, and that nothing of it was logged."""
        before = len(self.journal.plans), len(self.journal.operations)
        with pytest.raises(SourceGap, match=match):
            self.plans(planner)
        assert (len(self.journal.plans), len(self.journal.operations)) == before

    @property
    def numbers(self) -> dict[str, int]:
        """Number of each partition."""
        return {name: known.number for name, known in self.known.items()}
