"""Measures what slots of a job are worth on events of its stream, and features that would add to them.

For a job of a service in a process: `python -m headrace.service.planning.job_features --config FILE`, a SuggestConfig.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import worker_process
from headrace.config import PositiveCount
from headrace.dataset.features.pair_columns import pair_column
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.config import ColumnsPipe
from headrace.dataset.spec.schema import Schema, Slot
from headrace.errors import BadInput, SpecError
from headrace.service.cluster.store_defaults import with_store_defaults
from headrace.service.planning.feature_columns import (
    IdColumn,
    of_counters,
    of_history,
    of_numbers,
    of_signs,
)
from headrace.service.planning.feature_worth import Feature, FeatureWorth, Gain, SampleFacts, entry_of, find_features
from headrace.service.planning.stream_facts import gathered, read_blocks
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.side_config import SideConfig
from headrace.service.spec.side_groups import beside
from headrace.trainer.predict.background import lower_priority

SUFFIX = "-suggest"
"""Of the Kafka groups of a measurement."""
MAX_SAMPLES = 200_000
"""Most samples that are measured."""
MAX_VALUES = 8_000_000
"""Most ids and numbers in memory; the sample ends there."""


class SuggestConfig(SideConfig):
    """Configuration of the process, whose RESULT is a `Suggestions.message`."""

    events: PositiveCount
    newest: bool


@dataclass(frozen=True, slots=True)
class Suggestions:
    """The measured features of a job."""

    found: FeatureWorth
    events: int
    rejected: int
    features: tuple[tuple[str, Feature, Gain], ...]
    """Those that pay, with a name for the slot of each."""
    entries: tuple[Mapping[str, Any], ...]
    """Their slots in the job file."""
    droppable: tuple[str, ...]
    """Slots that are worth nothing, or less, and of which no other slot is made."""
    newest: bool
    """Whether the events are the last ones of the stream, not the first ones."""

    def message(self) -> dict[str, Any]:
        """As JSON-able data."""
        found = self.found

        def gain(each: Gain, rows: int) -> dict[str, Any]:
            return {"auc": each.auc, "logloss": each.loss, "p": each.p, "rows": rows}

        def slot(name: str, each: Gain, rows: int) -> dict[str, Any]:
            return gain(each, rows) | {"saved": rows, "drop": name in self.droppable}

        chosen = zip(self.features, self.entries, strict=True)
        return {
            "events": self.events,
            "rejected": self.rejected,
            "newest": self.newest,
            "samples": found.samples,
            "auc": found.auc,
            "rows": found.num_rows,
            "features": [
                {"kind": feature.kind, "of": feature.of, **gain(worth, feature.column.num_rows), "slot": dict(entry)}
                for (_, feature, worth), entry in chosen
            ],
            "slots": {name: slot(name, *each) for name, each in found.slots.items()},
            "admission": {
                str(times): gain(each, rows) | {"saved": found.num_rows - rows}
                for times, (each, rows) in found.admission.items()
            },
        }


def suggest_features(job: LoadedJob, num_events: int, *, newest: bool = False) -> Suggestions:
    """Measure the job on its first events, or its newest ones. Raises SpecError, BadInput, and as a source.

    A job that has begun is measured as it learns: with the crosses that it has chosen.
    """
    job = beside(with_store_defaults(job), SUFFIX)
    found, tally = measure_job(job, num_events, newest=newest)
    schema = Schema.of(job.spec.slots)
    names = {slot.name for slot in schema.slots}
    texts = {slot.name for slot in schema.sparse if slot.sparse.values == "string"}
    features, entries = [], []
    for feature, gain in found.features:
        entry = entry_of(feature, names, texts)
        if feature.kind == "cross" and not isinstance(job.spec.pipe, ColumnsPipe):
            entry = {"name": entry["name"], "pairs": [list(feature.of)]}
        names.add(entry["name"])
        features.append((str(entry["name"]), feature, gain))
        entries.append(entry)
    used = {name for feature, _ in found.features for name in feature.of} | _parts(schema)
    free = {name: each for name, each in found.slots.items() if name not in used}
    droppable = tuple(name for name, (gain, _) in free.items() if gain.loss <= 0 and gain.auc >= 0)
    rejected = sum(tally.rejected.values())
    return Suggestions(found, tally.num_events, rejected, tuple(features), tuple(entries), droppable, newest)


def _parts(schema: Schema) -> set[str]:
    """The slots of which the job makes others."""
    pairs = {name for slot in schema.crossed for pair in slot.sparse.pairs for name in pair}
    remembered = {name for slot in schema.histories for name in (slot.history.key, slot.history.of)}
    return pairs | remembered | {name for slot in schema.counters for name in slot.counters.keys}


def measure_job(
    job: LoadedJob,
    num_events: int,
    *,
    ids: Mapping[str, Sequence[str]] | None = None,
    doubted: Collection[str] = (),
    newest: bool = False,
) -> tuple[FeatureWorth, PassTally]:
    """Measure the job's slots and features on its first events, and what was read.

    `ids`: slots of the job that are tried in place of others. `doubted`: slots that must pay. `newest`: see
    `read_blocks`. Raises SpecError, BadInput, and as a source.
    """
    spec, schema, tally = job.spec, Schema.of(job.spec.slots), PassTally()
    task = next((each for each in spec.tasks if each.loss == "bce"), None)
    if task is None or spec.join is not None:
        what = "its labels come from a join" if task else 'no task has loss = "bce"'
        raise SpecError(f"features cannot be measured: {what}", "join" if task else "tasks")
    samples = _read(job, num_events, tally, newest=newest)
    label_B = samples.meta[task.label].astype(np.float64)
    kept_B = np.flatnonzero((label_B >= 0) & (label_B <= 1))
    samples, label_B = samples.take(kept_B), label_B[kept_B]
    end_E = np.flatnonzero(np.append(np.diff(samples.event_B) != 0, len(kept_B) > 0)) + 1
    facts = SampleFacts(label_B, end_E, samples.time_s_B)
    columns = _columns(schema, samples, facts)
    tried = [Feature("ids", tuple(of), {"name": name}, columns.pop(name)) for name, of in (ids or {}).items()]
    crosses = {slot.name for slot in schema.sparse if slot.entry.cross or slot.sparse.pairs}
    return find_features(facts, columns, task.label, ids=tried, doubted=doubted, crosses=crosses), tally


def _read(job: LoadedJob, num_events: int, tally: PassTally, *, newest: bool) -> Samples:
    with closing(read_blocks(job, num_events, tally, newest=newest)) as blocks:
        samples = gathered(blocks, MAX_SAMPLES, MAX_VALUES)
    if samples is None:
        rejected = sum(tally.rejected.values())
        raise BadInput(f"the stream gave no sample: {tally.num_events:,} events, {rejected} rejected")
    return samples


def _columns(schema: Schema, samples: Samples, facts: SampleFacts) -> dict[str, IdColumn]:
    """Of all slots that the model gets, in order; statistics of rows are left out, as there are no rows."""
    emitted = {
        slot.name: of_signs(samples.sparse[slot.name], is_mean=slot.sparse.pooling != "sum")
        for slot in schema.emitted.sparse
    }

    def column(slot: Slot) -> IdColumn:
        if slot in schema.histories:
            history = slot.history
            when_B = np.ones(len(samples), np.bool_)
            if history.when is not None:
                when_B = np.nan_to_num(samples.meta[history.when].astype(np.float64)) != 0
            return of_history(emitted[history.key], emitted[history.of], when_B, facts.end_E, history.last)
        if slot in schema.counters:
            windows_s = np.array(slot.counters.windows_s, np.int64)
            keys = [emitted[name] for name in slot.counters.keys]
            return of_counters(keys, facts.click_B, facts.end_E, facts.time_s_B, windows_s)
        if slot in schema.crossed:
            return of_signs(pair_column(samples.sparse, slot))
        return emitted[slot.name] if slot.name in emitted else of_numbers(samples.dense[slot.name])

    return {slot.name: column(slot) for slot in (*schema.sparse, *schema.dense) if slot not in schema.statistics}


def start(path: Path) -> None:
    """Read the configuration, measure, and write what is found."""
    config = worker_process.config_of(path, SuggestConfig)
    worker_process.begin("suggest")
    lower_priority()
    found = suggest_features(config.loaded(), config.events, newest=config.newest)
    config.write(json.dumps(found.message()).encode())


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
