"""Chooses the crosses of a new job: `python -m headrace.service.planning.cross_choice --config FILE`, a SideConfig.

A linear model learns the first samples of the stream; each pair of sparse slots is then learnt beside its predictions.
Of those by which the loss of later samples falls by more than chance, the best one is taken, then the best one beside
it, and so on. The same learner tells how fast first-order weights should learn. Every sample is predicted before it is
learnt. No clock takes part, so that a repetition chooses the same. service.cluster.tuning starts the process, and reads
RESULT in its folder.

Shapes: B samples, E events, F events of the second half.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist

import numpy as np

from headrace import worker_process
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.samples.batch import Samples
from headrace.dataset.spec.schema import Schema
from headrace.errors import BadInput
from headrace.service.planning.feature_columns import F64, IdColumn, of_cross, of_numbers, of_signs
from headrace.service.planning.feature_worth import FeatureBench, Progress, SampleFacts
from headrace.service.planning.stream_facts import gathered, read_blocks
from headrace.service.spec.job import LoadedJob
from headrace.service.spec.side_config import SideConfig
from headrace.service.spec.tuned_settings import says_how_rows_learn
from headrace.trainer.config import NEWEST_DEFAULTS
from headrace.trainer.cross_config import ChosenPair, CrossChoice
from headrace.trainer.spec.defaults import RATES_BY_SLOTS, rows_learn

PAIR_RATES = (0.1, 0.3)
"""Steps of the learner that are tried for pairs: one whose ids are many learns by short ones."""
CHANCE = 0.01
"""How likely a pair is chosen on a stream in which none says anything."""
MIN_GAIN = 0.00125
"""Least fall of the log loss by a pair."""
RATE_STEP, MAX_RATE = 2.0, 4.0
"""The rate of first-order weights is doubled or halved as long as that pays, up to so many times the rule's."""
MIN_RATE_GAIN, RATE_ERRORS = 0.0075, 3.0
"""Least fall of the log loss by another rate, and by how many standard errors. It is large, as vectors learn what is
left: twice the rate had 0.0116 on *ratings*, where deepfm gains by it, and 0.003 on *steady*, where it loses."""
RATE_SAMPLES = 20_000
"""Samples by which the rate is chosen, the first ones. By more, twice the rate gains as much on *clicks* as on
*ratings*, and deepfm loses by it on *clicks*."""
MAX_CANDIDATES = 24
"""Pairs that are looked at beside those that are chosen."""
MAX_CROSSED_LEN = 4.0
"""Most ids of a pair in a sample, in the mean."""
MAX_NEW = 0.9
"""Share of samples with an id of their own, from which on a pair is not looked at: nothing is learnt of it."""
MAX_SLOTS = 64
"""Sparse slots that are crossed: the first ones."""
MAX_VALUES = 8_000_000
"""Most ids and numbers in memory; the samples end there."""


@dataclass(frozen=True, slots=True)
class _Pair:
    of: tuple[str, str]
    column: IdColumn


def choice_of(job: LoadedJob, samples: Samples) -> CrossChoice:
    """The pairs that pay on these samples, the first ones of the stream of a job, whose first task has log loss."""
    samples = samples.slice(0, min(len(samples), job.spec.crosses.events))
    label_B = samples.meta[job.spec.tasks[0].label].astype(np.float64)
    kept_B = np.flatnonzero((label_B >= 0) & (label_B <= 1))
    samples, label_B, schema = samples.take(kept_B), label_B[kept_B], Schema.of(job.spec.slots)
    try:
        bench, slots, numbers = _bench_of(schema, samples, label_B)
    except BadInput:  # too few samples, or one label alone
        return CrossChoice(samples=len(kept_B))
    by = 1.0
    if _takes_rate(job):
        num = min(len(samples), RATE_SAMPLES)
        by = first_order_rate(schema, samples.slice(0, num), label_B[:num])
    before = bench.choose_rate([*slots.values(), *numbers])
    pairs, end = _chosen(bench, before, _candidates(slots), job.spec.crosses.most)
    return CrossChoice(pairs=pairs, samples=len(kept_B), auc=before.auc, auc_with=end.auc, first_order_rate=by)


def _bench_of(
    schema: Schema, samples: Samples, label_B: F64
) -> tuple[FeatureBench, dict[str, IdColumn], list[IdColumn]]:
    """The bench of samples, and their columns: of sparse slots by name, and of dense ones. Raises BadInput."""
    end_E = np.flatnonzero(np.append(np.diff(samples.event_B) != 0, len(label_B) > 0)) + 1
    bench = FeatureBench(SampleFacts(label_B, end_E, samples.time_s_B))
    slots = {
        slot.name: of_signs(samples.sparse[slot.name], is_mean=slot.sparse.pooling != "sum")
        for slot in schema.emitted.sparse
    }
    return bench, slots, [of_numbers(samples.dense[slot.name]) for slot in schema.emitted.dense]


def _takes_rate(job: LoadedJob) -> bool:
    """Whether a table has first-order weights whose rate follows from the number of slots."""
    of_slots = (job.spec.defaults or NEWEST_DEFAULTS) >= RATES_BY_SLOTS
    tables = job.spec.tables.items()
    return of_slots and any(table.first_order and not says_how_rows_learn(job, name) for name, table in tables)


def first_order_rate(schema: Schema, samples: Samples, label_B: F64) -> float:
    """By how much the rate that follows from the number of slots is to be multiplied."""
    try:
        bench, slots, numbers = _bench_of(schema, samples, label_B)
    except BadInput:  # one label alone
        return 1.0
    columns, rule = [*slots.values(), *numbers], rows_learn(len(schema.uncrossed.sparse))["first_order_optimizer"]["lr"]

    def at(by: float) -> Progress:
        bench.rate = rule * by
        return bench.measure(columns)

    best, whole = 1.0, at(1.0)
    for step in (RATE_STEP, 1 / RATE_STEP):
        before = whole
        while max(best * step, 1 / (best * step)) <= MAX_RATE:
            gain = _gain(bench.facts, before, after := at(best * step))
            if gain.mean < MIN_RATE_GAIN or gain.errors < RATE_ERRORS:
                break
            best, before = best * step, after
        if best != 1:
            break
    return best


def _candidates(slots: Mapping[str, IdColumn]) -> Iterator[_Pair]:
    """The pairs of slots with crosses that are short, come again, and say more than one part alone."""
    parts = [name for name, each in slots.items() if each.num_ids > 1][:MAX_SLOTS]
    for one, other in combinations(parts, 2):
        if slots[one].mean_len * slots[other].mean_len <= MAX_CROSSED_LEN:
            column = of_cross(slots[one], slots[other])
            most_of_parts = max(slots[one].num_ids, slots[other].num_ids)
            if most_of_parts < column.num_ids < MAX_NEW * len(column.id_N):
                yield _Pair((one, other), column)


@dataclass(frozen=True, slots=True)
class _Gain:
    """The fall of the mean log loss of the later samples."""

    mean: float
    errors: float
    """Its number of standard errors, by events."""


def _gain(facts: SampleFacts, before: Progress, after: Progress) -> _Gain:
    fall_E = np.add.reduceat(before.loss_B - after.loss_B, np.append(0, facts.end_E[:-1]))
    late_F = facts.end_E > len(facts.label_B) // 2
    fall_F, samples = fall_E[late_F], np.diff(facts.end_E, prepend=0)[late_F].sum()
    error = fall_F.std() * math.sqrt(len(fall_F))
    return _Gain(float(fall_F.sum() / samples), float(fall_F.sum() / error) if error > 0 else 0.0)


def _chosen(
    bench: FeatureBench, start: Progress, pairs: Iterable[_Pair], most: int
) -> tuple[tuple[ChosenPair, ...], Progress]:
    """The pairs that pay, each beside those before it, and what is predicted with them: at the best of PAIR_RATES."""
    tried, best = 0, {rate: list[tuple[float, int, _Pair]]() for rate in PAIR_RATES}
    for tried, pair in enumerate(pairs, 1):
        for bench.rate, found in best.items():
            gain = _gain(bench.facts, start, bench.measure([pair.column], offset_B=start.logit_B))
            if gain.mean > 0:
                found.append((-gain.mean, tried, pair))
                found.sort(key=lambda each: each[:2])
                del found[MAX_CANDIDATES:]
    needed = NormalDist().inv_cdf(1 - CHANCE / max(1, tried * len(PAIR_RATES)))
    ways = []
    for bench.rate, found in best.items():
        ways.append(_in_turn(bench, start, [pair for *_, pair in found], needed, most))
    return min(ways, key=lambda way: bench.loss(way[1]))


def _in_turn(
    bench: FeatureBench, start: Progress, rest: Sequence[_Pair], needed: float, most: int
) -> tuple[tuple[ChosenPair, ...], Progress]:
    """The best pair by loss whose gain is of so many standard errors, then the best one beside it, and so on."""
    found, columns, at = list[ChosenPair](), list[IdColumn](), start
    while rest and len(found) < most:
        beside = [_gain(bench.facts, at, bench.measure([each.column], offset_B=at.logit_B)) for each in rest]
        pays = [n for n, gain in enumerate(beside) if gain.mean >= MIN_GAIN and gain.errors >= needed]
        if not pays:
            break
        chosen = max(pays, key=lambda n: beside[n].mean)
        found.append(ChosenPair(of=rest[chosen].of, gain=beside[chosen].mean))
        columns.append(rest[chosen].column)
        at = bench.measure(columns, offset_B=start.logit_B)
        rest = [each for n, each in enumerate(rest) if n != chosen and beside[n].mean > 0]
    return tuple(found), at


def first_samples(job: LoadedJob) -> Samples:
    """The first samples of the job's stream, as far as they are there and a choice takes them. Raises SpecError,
    BadInput, as a source."""
    most, tally = job.spec.crosses.events, PassTally()
    with closing(read_blocks(job, most, tally, waits=False)) as blocks:
        samples = gathered(([part] for block in blocks for part in block), most, MAX_VALUES)
    if samples is None:
        raise BadInput(f"the stream gave no sample: {tally.num_events:,} events")
    return samples


def start(path: Path) -> None:
    """Read the configuration, choose, and write the choice."""
    config = worker_process.config_of(path, SideConfig)
    worker_process.begin("crosses")
    job = config.loaded()
    config.write(choice_of(job, first_samples(job)).model_dump_json().encode())


def main() -> None:
    """Run the process."""
    worker_process.main(__doc__, start)


if __name__ == "__main__":
    main()
