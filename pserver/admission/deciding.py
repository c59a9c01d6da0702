"""Whether a key may have a row: a list of entries that all must agree.

    probability    its lot is below p: for ever, and nothing is kept (lot.py)
    count          its shows reach n                  } counted in sketches (sketch.py)
    show_click     its score reaches the threshold    } or key by key (exact.py)

**What is recorded.** A key whose lot refuses it is refused for good, whatever else the list holds, and is counted
nowhere: it costs no counter. Of every other key *each* entry counts *every* record, whatever the others say, so no
entry starves another. A key without shows or score is decided by what is counted already.
**Admitted keys** have a row and come here no more. Their exact counts are removed, those in sketches stay; where a row
is shrunk later, its key has to be admitted again, from what is then counted.
**Order.** Records are counted in the order given. Keys of different buckets never matter to one another, so results
do not depend on shards or threads as long as the order within each bucket is the same.

Finding which keys have no row, merging ranks' records, and giving rows is pserver.table's work.

Shapes: U unique keys of a step, B buckets of this shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from millrace.keys import NUM_BUCKETS
from pserver.admission.amounts import Measure, in_units_of
from pserver.admission.exact import Exact
from pserver.admission.lot import draw, lot_of, salt_of
from pserver.admission.sketch import Sketch
from pserver.admission.tally import F32, U64, Flags, Tally
from pserver.config import AdmissionEntry, CountEntry, ProbabilityEntry, ShowClickEntry
from pserver.digest import add, join
from pserver.rows import frozen, roomy

Counting = tuple[CountEntry | ShowClickEntry, Measure, Tally]


class Admission:
    """One list of entries over the virtual buckets [begin, end) of a shard. One thread at a time."""

    def __init__(
        self, entries: Sequence[AdmissionEntry], counting: Sequence[Counting], seed: int, buckets: tuple[int, int]
    ) -> None:
        self._entries, self._counting, self._seed, self._buckets = tuple(entries), tuple(counting), seed, buckets
        self._salt = salt_of(seed)
        self._p = min((entry.p for entry in entries if isinstance(entry, ProbabilityEntry)), default=1.0)

    @classmethod
    def of(
        cls,
        entries: Sequence[AdmissionEntry],
        *,
        nonclk_coeff: float,
        click_coeff: float,
        seed: int,
        buckets: tuple[int, int],
    ) -> Self:
        """Nothing counted yet."""
        counting = list[Counting]()
        for entry in entries:
            if not isinstance(entry, ProbabilityEntry):
                measure = Measure.of(entry, nonclk_coeff, click_coeff)
                kind = Exact if entry.exact else Sketch
                counting.append((entry, measure, kind(measure, entry.memory // NUM_BUCKETS, buckets)))
        return cls(entries, counting, int(seed), buckets)

    def admit(self, keys_U: U64, show_U: F32, click_U: F32, day: int) -> Flags:
        """Record one step's merged records of unique keys without rows: (U,) True for a key that now may have one.

        The keys are of this shard's buckets; `day` never falls.
        """
        keys_U, show_U, click_U = frozen(keys_U), frozen(show_U), frozen(click_U)
        open_U = np.ones(len(keys_U), np.bool_)
        if self._p < 1.0:
            draw(keys_U, self._salt, self._p, open_U)
        admitted_U = open_U.copy()
        for _, measure, tally in self._counting:
            tally.record(keys_U, show_U, click_U, measure.rates, day, open_U, admitted_U)
        if self._counting and admitted_U.any():
            self.forget(keys_U[admitted_U])
        return admitted_U

    def forget(self, keys_U: U64) -> None:
        """Remove exact counts of these keys. Sketches hold no keys, only counters that many share: they stay."""
        for _, _, tally in self._counting:
            tally.forget(frozen(keys_U))

    # --- commits -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of all that is counted, by name; every array's first axis is this shard's buckets, in order.

        Costs a copy of `num_bytes`: some 5 ms for each 16 MiB.
        """
        num_buckets = self._buckets[1] - self._buckets[0]
        state = {name: _copy_of(array) for name, array in self._arrays().items()}
        for label, measure, _ in self._labelled():
            state[f"{label}.exponent"] = np.full(num_buckets, measure.exponent, np.int16)
        return state

    def load(self, state: Mapping[str, NDArray[Any]], first_bucket: int) -> bool:
        """Take over this shard's buckets out of a part of a commit, whose first bucket is `first_bucket`.

        False, and nothing is changed, where the part was counted by other entries, or in other memory or kinds of
        counters. `p`, coefficients, a score's threshold, and `n` within its kind of counters may have changed.
        """
        own = self._arrays()
        if state.keys() != {*own, *(f"{label}.exponent" for label, _, _ in self._labelled())}:
            return False
        if any(_unlike(state[name], array) for name, array in own.items()):
            return False
        begin = max(first_bucket, self._buckets[0])
        end = min(first_bucket + len(next(iter(state.values()), ())), self._buckets[1])
        if begin >= end:
            return True
        theirs, ours = (slice(begin - first, end - first) for first in (first_bucket, self._buckets[0]))
        for label, measure, tally in self._labelled():
            exponent = int(state[f"{label}.exponent"][0])
            for name, array in tally.arrays.items():
                part = state[f"{label}.{name}"][theirs]
                if name in tally.units and exponent != measure.exponent:
                    part = in_units_of(part, exponent, measure.exponent)
                array[ours] = part
        return True

    def _labelled(self) -> Iterator[tuple[str, Measure, Tally]]:
        """Counting entries, by a label that tells what counts how: position among them, kind, and whether exactly."""
        for i, (entry, measure, tally) in enumerate(self._counting):
            yield f"{i}-{entry.kind}-{'exact' if entry.exact else 'sketch'}", measure, tally

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {
            f"{label}.{name}": array for label, _, tally in self._labelled() for name, array in tally.arrays.items()
        }

    def digest(self) -> int:
        """128-bit hash of all that is counted, a sum over buckets: digests of disjoint shards add up."""
        return add(join(*tally.digest()) for _, _, tally in self._counting)

    # --- people --------------------------------------------------------------------------------------------------

    def explain(self, key: int, day: int) -> list[dict[str, Any]]:
        """For each entry, in their order, what it has of the key as of a day, JSON-able; changes nothing.

        For a key that has a row, too: then it tells what would be counted on if the row went.
        """
        tallies = iter(self._counting)
        return [
            self._lot(entry, key) if isinstance(entry, ProbabilityEntry) else _counted(*next(tallies), key, day)
            for entry in self._entries
        ]

    def _lot(self, entry: ProbabilityEntry, key: int) -> dict[str, Any]:
        lot = lot_of(key, self._seed)
        return {"kind": entry.kind, "p": entry.p, "lot": lot, "agrees": lot < entry.p}

    @property
    def num_bytes(self) -> int:
        """Memory of all that is counted."""
        return sum(array.nbytes for array in self._arrays().values())


def _counted(entry: CountEntry | ShowClickEntry, measure: Measure, tally: Tally, key: int, day: int) -> dict[str, Any]:
    units = tally.estimate(key, day)
    told: dict[str, Any] = {"kind": entry.kind, "exact": entry.exact}
    told |= {"n": entry.n} if isinstance(entry, CountEntry) else {"score": entry.score}
    told |= {"estimate": measure.value_of(units), "agrees": units >= measure.threshold}
    quality = tally.quality(key, day)
    if "too_high_by_at_most" in quality:
        quality["too_high_by_at_most"] = measure.value_of(1) * quality["too_high_by_at_most"]
    return told | quality


def _unlike(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype != other.dtype or one.shape[1:] != other.shape[1:]


def _copy_of(array: NDArray[Any]) -> NDArray[Any]:
    """A copy whose memory goes back once the commit is written: see `roomy`."""
    copy = roomy(array.shape, array.dtype)
    copy[...] = array
    return copy
