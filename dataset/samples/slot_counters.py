"""Figures of every slot over a pass: empty samples, signs, distinct signs, dropped signs, signs by bucket.

They are integer arrays, so ranks and passes merge exactly: sums and buckets by addition, registers by maximum. The
shards count new and unadmitted rows.

Shapes: S slots, R registers, K buckets, N signs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import U64, Ragged, Samples
from headrace.dataset.spec.config import SlotKind
from headrace.dataset.spec.schema import Schema
from headrace.kernel_cache import njit
from headrace.key_kernels import mix
from headrace.keys import mix_reference

REGISTER_BITS = 11
NUM_REGISTERS = 1 << REGISTER_BITS
"""Registers of each slot's HyperLogLog; the standard error of `distinct` is 1.04 / sqrt(2048) = 2.3 %."""

BUCKET_BITS = 5
NUM_BUCKETS = 1 << BUCKET_BITS
"""Buckets of each slot, by the first bits of the hash of a sign: the shares of two windows tell whether it drifts."""

HALVED_K = 0.5 ** np.arange(65)
"""The term of a register with value k in the harmonic sum."""


class SlotSum(IntEnum):
    """Columns of the sums."""

    SAMPLES = 0
    EMPTY = 1
    VALUES = 2
    PADDING = 3
    CUT = 4
    NON_FINITE = 5


@njit(nogil=True, cache=True)
def observe_signs(sign_N, register_R, bucket_K):  # type: ignore[no-untyped-def]
    """Count the signs of one slot by bucket, and update its HyperLogLog registers (Flajolet et al. 2007)."""
    for n in range(len(sign_N)):
        value = mix(sign_N[n])
        bucket_K[value >> np.uint64(64 - BUCKET_BITS)] += 1
        index = value >> np.uint64(64 - REGISTER_BITS)
        rest = value << np.uint64(REGISTER_BITS)
        held = np.uint64(register_R[index])
        if held > 64 - REGISTER_BITS or (held and rest >> (np.uint64(64) - held)):
            continue  # the usual case: one of the first `held` bits is set, so the rank is not above `held`
        rank = np.uint8(1)
        while rank <= 64 - REGISTER_BITS and rest >> np.uint64(63) == np.uint64(0):
            rest <<= np.uint64(1)
            rank += np.uint8(1)
        register_R[index] = rank


def observe_signs_reference(sign_N: U64, register_R: NDArray[np.uint8], bucket_K: NDArray[np.int64]) -> None:
    """Plain twin: register = first bits, rank = 1 + leading zeros of the other 53 (54 if all are zero)."""
    for sign in sign_N.tolist():
        bits = f"{mix_reference(sign):064b}"
        bucket_K[int(bits[:BUCKET_BITS], 2)] += 1
        index, rest = int(bits[:REGISTER_BITS], 2), bits[REGISTER_BITS:]
        rank = len(rest) - len(rest.lstrip("0")) + 1
        register_R[index] = max(int(register_R[index]), rank)


def distinct_of(register_R: NDArray[np.uint8]) -> float:
    """Estimated number of distinct signs; uses linear counting while many registers are zero."""
    alpha = 0.7213 / (1 + 1.079 / NUM_REGISTERS)
    count_K = np.bincount(register_R, minlength=len(HALVED_K))
    estimate = alpha * NUM_REGISTERS**2 / float(count_K @ HALVED_K)
    num_zero = int(count_K[0])
    if estimate <= 2.5 * NUM_REGISTERS and num_zero:
        return float(NUM_REGISTERS * np.log(NUM_REGISTERS / num_zero))
    return estimate


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """Figures of one slot."""

    name: str
    sparse: bool
    """Whether empty rate, mean count and distinct apply."""
    num_samples: int
    empty_rate: float
    mean_count: float
    distinct: float
    """Approximate."""
    num_padding: int
    num_cut: int
    num_non_finite: int


class SlotCounters:
    """Counters of all slots of a schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._index = {slot.name: index for index, slot in enumerate(schema.slots)}
        self.sums_SK = np.zeros((len(schema.slots), len(SlotSum)), np.int64)
        """Merged by addition."""
        self.registers_SR = np.zeros((len(schema.slots), NUM_REGISTERS), np.uint8)
        """Merged by maximum."""
        self.buckets_SK = np.zeros((len(schema.slots), NUM_BUCKETS), np.int64)
        """Merged by addition. Not in commits."""

    def observe(self, samples: Samples) -> None:
        """Count samples in the form that the model gets."""
        self.sums_SK[:, SlotSum.SAMPLES] += len(samples)
        for name, column in samples.sparse.items():
            self._observe_signs(self._index[name], column)

    def observe_filled(self, slot: str, num_samples: int, column: Ragged | None = None) -> None:
        """Count a slot that was filled after the other slots of its samples were counted; `column`: of a sparse one."""
        self.sums_SK[self._index[slot], SlotSum.SAMPLES] += num_samples
        if column is not None:
            self._observe_signs(self._index[slot], column)

    def _observe_signs(self, index: int, column: Ragged) -> None:
        self.sums_SK[index, SlotSum.EMPTY] += int(np.count_nonzero(column.offset_B1[1:] == column.offset_B1[:-1]))
        self.sums_SK[index, SlotSum.VALUES] += len(column.values_N)
        observe_signs(np.ascontiguousarray(column.values_N), self.registers_SR[index], self.buckets_SK[index])

    def widened(self, schema: Schema) -> "SlotCounters":
        """The same counts among those of a schema with more slots, which have none."""
        wide = SlotCounters(schema)
        rows = [wide._index[slot.name] for slot in self._schema.slots]
        wide.sums_SK[rows], wide.registers_SR[rows] = self.sums_SK, self.registers_SR
        wide.buckets_SK[rows] = self.buckets_SK
        return wide

    def add(self, slot: str, what: SlotSum, count: int) -> None:
        """Add to one sum of a slot."""
        self.sums_SK[self._index[slot], what] += count

    def merge(self, other: "SlotCounters") -> None:
        """Add the counters of another rank or pass."""
        self.sums_SK += other.sums_SK
        self.buckets_SK += other.buckets_SK
        np.maximum(self.registers_SR, other.registers_SR, out=self.registers_SR)

    def figures(self) -> Iterator[SlotFigures]:
        """The figures of all slots, in order."""
        for slot, sums, registers in zip(self._schema.slots, self.sums_SK.tolist(), self.registers_SR, strict=True):
            num = max(1, sums[SlotSum.SAMPLES])
            yield SlotFigures(
                slot.name,
                slot.kind is SlotKind.SPARSE,
                sums[SlotSum.SAMPLES],
                sums[SlotSum.EMPTY] / num,
                sums[SlotSum.VALUES] / num,
                distinct_of(registers) if sums[SlotSum.VALUES] else 0.0,
                sums[SlotSum.PADDING],
                sums[SlotSum.CUT],
                sums[SlotSum.NON_FINITE],
            )
