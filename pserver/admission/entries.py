"""Decides whether a key may have a row: a list of entries that must all agree.

    probability    the key's draw is below p: fixed for ever, nothing is stored
    count          its shows reach n                  } counted in sketches (sketch.py)
    show_click     its score reaches the threshold    } or key by key (exact_counts.py)

**Counting.** A key that `probability` refuses is refused for good and counted nowhere, so it takes no counter. For
every other key *each* entry counts *every* record, whatever the other entries say, so no entry starves another. A
record without shows or score is decided by the existing counts.
**Admitted keys** have a row and are not seen here again. Their exact counts are removed; those in sketches stay. If a
shrink deletes the row, the key must be admitted again, from the counts that remain.
**Order.** Records are counted in the order given. Keys of different buckets do not affect each other, so results do not
depend on shards or threads if the order within each bucket is the same.
**Draws.** Several `probability` entries use the same draw of a key, in [0, 1) from (seed, key), so the smallest p
decides; raising p keeps every key that was admitted.

pserver.tables.table finds the keys without rows, merges the ranks' records, and makes rows.

Shapes: U unique keys of a step, B buckets of this shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import GOLDEN, MASK, NUM_BUCKETS, mix_reference
from headrace.pserver.admission.counting import F32, U64, Flags, KeyCounter, in_units_of
from headrace.pserver.admission.exact_counts import ExactCounter
from headrace.pserver.admission.sketch import SketchCounter
from headrace.pserver.admission_entries import AdmissionEntry, CountingRule
from headrace.pserver.rows.arrays import allocate, frozen
from headrace.pserver.rows.digest import add, join

Counting = tuple[AdmissionEntry, CountingRule, KeyCounter]
SCALE = 2.0**-53


class Admission:
    """One list of entries over the virtual buckets [begin, end) of a shard. One thread at a time."""

    def __init__(
        self,
        entries: Sequence[AdmissionEntry],
        counting: Sequence[Counting | None],
        seed: int,
        buckets: tuple[int, int],
    ) -> None:
        """`counting`: of each entry; None: it does not count."""
        self._entries = list(zip(entries, counting, strict=True))
        self._counting, self._seed, self._buckets = [each for each in counting if each], seed, buckets
        self._salt = salt_of(seed)
        self._p = min((entry.admits_below for entry in entries), default=1.0)

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
        """With counts at 0."""
        counting = list[Counting | None]()
        for entry in entries:
            measure = entry.counting(nonclk_coeff, click_coeff)
            if measure is None:
                counting.append(None)
            else:
                kind = ExactCounter if measure.exact else SketchCounter
                counting.append((entry, measure, kind(measure, measure.memory // NUM_BUCKETS, buckets)))
        return cls(entries, counting, int(seed), buckets)

    def admit(self, keys_U: U64, show_U: F32, click_U: F32, day: int) -> Flags:
        """Count one step's merged records of unique keys without rows. Returns (U,) whether each key may have one now.

        The keys are in this shard's buckets; `day` never decreases.
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
        """Remove the exact counts of these keys. Counters of sketches are shared by many keys, so they stay."""
        for _, _, tally in self._counting:
            tally.forget(frozen(keys_U))

    # --- commits -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of all counts, by name; the first axis of each array is this shard's buckets, in order.

        Copies `num_bytes`: about 5 ms for each 16 MiB.
        """
        num_buckets = self._buckets[1] - self._buckets[0]
        state = {name: _copy_of(array) for name, array in self._arrays().items()}
        for label, measure, _ in self._labelled():
            state[f"{label}.exponent"] = np.full(num_buckets, measure.exponent, np.int16)
        return state

    def load(self, state: Mapping[str, NDArray[Any]], first_bucket: int) -> bool:
        """Copy this shard's buckets from a part of a commit, whose first bucket is `first_bucket`.

        Returns False and changes nothing if the part has other entries, another memory size or another type of
        counters. `p`, coefficients, a score's threshold, and `n` within its type of counters may differ.
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

    def _labelled(self) -> Iterator[tuple[str, CountingRule, KeyCounter]]:
        """Counting entries with a label: position among them, kind, and whether they count exactly."""
        for i, (entry, measure, tally) in enumerate(self._counting):
            yield f"{i}-{entry.kind}-{'exact' if measure.exact else 'sketch'}", measure, tally

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {
            f"{label}.{name}": array for label, _, tally in self._labelled() for name, array in tally.arrays.items()
        }

    def digest(self) -> int:
        """128-bit hash of all counts, a sum over buckets: digests of disjoint shards add up."""
        return add(join(*tally.digest()) for _, _, tally in self._counting)

    # --- explanation ---------------------------------------------------------------------------------------------

    def explain(self, key: int, day: int) -> list[dict[str, Any]]:
        """The state of each entry for a key as of a day, in order, JSON-able; "text" says it in words. Changes nothing.

        For a key with a row: the counts from which it would go on if the row were deleted.
        """
        return [
            self._drawn(entry, key) if counted is None else _counted(*counted, key, day)
            for entry, counted in self._entries
        ]

    def _drawn(self, entry: AdmissionEntry, key: int) -> dict[str, Any]:
        lot = draw_of(key, self._seed)
        agrees = lot < entry.admits_below
        effect = "which admits it" if agrees else "which does not admit it"
        text = f"{entry.kind} {entry.admits_below:g}: its random draw is {lot:.3g}, {effect}"
        return entry.model_dump(mode="json") | {"lot": lot, "agrees": agrees, "text": text}

    @property
    def num_bytes(self) -> int:
        """Memory of all counts."""
        return sum(array.nbytes for array in self._arrays().values())


def _counted(entry: AdmissionEntry, measure: CountingRule, tally: KeyCounter, key: int, day: int) -> dict[str, Any]:
    units = tally.estimate(key, day)
    state: dict[str, Any] = {"kind": entry.kind, "exact": measure.exact}
    state |= entry.model_dump(mode="json", exclude={"kind", "exact", "memory"})
    estimate = measure.value_of(units)
    state |= {"estimate": estimate, "agrees": units >= measure.threshold}
    quality = tally.quality(key, day)
    if "too_high_by_at_most" in quality:
        quality["too_high_by_at_most"] = measure.value_of(1) * quality["too_high_by_at_most"]
    said = entry.said(estimate, "" if measure.exact else "about ")
    return state | quality | {"text": f"{said} ({_in_words(quality)})"}


def _in_words(quality: Mapping[str, Any]) -> str:
    if "too_high_by_at_most" in quality:
        return f"sketch, at most +{quality['too_high_by_at_most']:.3g} too high"
    dropped = quality["bucket_dropped_keys"]
    return f"exact; its bucket was full, {dropped:,} keys were dropped from it" if dropped else "exact"


def _unlike(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype != other.dtype or one.shape[1:] != other.shape[1:]


def _copy_of(array: NDArray[Any]) -> NDArray[Any]:
    """A copy whose memory is returned once the commit is written: see `allocate`."""
    copy = allocate(array.shape, array.dtype)
    copy[...] = array
    return copy


# --- draws of `probability`: a key's draw is the same for ever --------------------------------------------------------


def salt_of(seed: int) -> np.uint64:
    """The number that is combined with each key before it is mixed; from the job's seed."""
    return np.uint64(mix_reference((seed + GOLDEN) & MASK))


@njit(nogil=True, cache=True)
def draw(keys_U, salt, p, open_U):  # type: ignore[no-untyped-def]
    """open_U = whether each key's draw is below `p`."""
    for u in range(len(keys_U)):
        open_U[u] = np.float64(mix(keys_U[u] ^ salt) >> np.uint64(11)) * SCALE < p


def draw_of(key: int, seed: int) -> float:
    """The key's draw in [0, 1): the top 53 bits of mix(key ^ mix(seed + GOLDEN)). With `<`, the twin of `draw`."""
    return float((mix_reference(key ^ int(salt_of(seed))) >> 11) * SCALE)
