"""Learners to compare with: logistic regression, FTRL-proximal and a field-aware factorization machine.

Each learns sample by sample, from ids hashed into a table of fixed size, with one setting for all streams. A sample is
predicted before any sample of its event is learnt, since all that an event shows is seen at once.

Shapes: N ids or values of all samples, B samples, E events, W weights, F fields, K length of a vector.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.dataset.samples.batch import Samples
from headrace.kernel_cache import njit
from headrace.keys import GOLDEN

F32, F64 = NDArray[np.float32], NDArray[np.float64]
I64, U64 = NDArray[np.int64], NDArray[np.uint64]
MIX = np.uint64(0xBF58476D1CE4E5B9)
MAX_LOGIT = 30.0


@dataclass(frozen=True)
class Flat:
    """Samples as ids with values: sample b has `id_N[offset_B1[b]:offset_B1[b + 1]]`, events begin at `event_E1`."""

    id_N: U64
    """Mixed with the field, so that fields share no id. A dense value is one id of its own field."""
    value_N: F64
    field_N: I64
    """Fields below `num_sparse` are sparse, the others dense."""
    offset_B1: I64
    event_E1: I64
    label_B: F64
    num_sparse: int

    @classmethod
    def of(cls, samples: Samples, label: str) -> "Flat":
        """All slots of samples but meta slots."""
        num, num_sparse = len(samples), len(samples.sparse)
        columns = [(slot.values_N, np.diff(slot.offset_B1), slot.weights_N) for slot in samples.sparse.values()]
        for values_BD in samples.dense.values():
            columns += [(np.zeros(num, np.uint64), np.ones(num, np.int64), column_B) for column_B in values_BD.T]
        sample_N = np.concatenate([np.repeat(np.arange(num), length_B) for _, length_B, _ in columns])
        order_N = np.argsort(sample_N, kind="stable")
        field_N = np.repeat(np.arange(len(columns)), [len(id_N) for id_N, _, _ in columns])[order_N]
        value_N = np.concatenate([np.ones(len(id_N)) if by_N is None else by_N for id_N, _, by_N in columns])
        with np.errstate(over="ignore"):
            id_N = np.concatenate([id_N for id_N, _, _ in columns])[order_N]
            id_N = (id_N + (field_N.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)) * MIX
        return cls(
            id_N ^ (id_N >> np.uint64(31)),
            value_N[order_N].astype(np.float64),
            field_N,
            np.concatenate([[0], np.cumsum(np.bincount(sample_N, minlength=num))]),
            np.flatnonzero(np.diff(samples.event_B, prepend=-1, append=-1)),
            samples.meta[label].astype(np.float64),
            num_sparse,
        )

    @property
    def longest(self) -> int:
        """Ids of the sample with the most."""
        return int(np.diff(self.offset_B1).max())

    @property
    def mean_length(self) -> float:
        """Ids of a sample, on average; at least 1."""
        return max(1.0, float(self.offset_B1[-1]) / len(self.label_B))


@dataclass(frozen=True)
class Learnt:
    """What a learner made of a stream."""

    prediction_B: F64
    """Before learning."""
    rows: int | None = None
    """Ids with a weight."""
    num_bytes: int | None = None


# -- linear models ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """FTRL-proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013). Without `l1` and `l2`
    it is logistic regression by Adagrad."""

    crosses: bool = False
    """Whether each pair of ids of two sparse slots is an id, too."""
    rate: float = 0.5
    """As `FieldAware.rate`; pairs count, too."""
    l1: float = 0.0
    l2: float = 0.0
    bits: int = 22

    def learn(self, flat: Flat) -> Learnt:
        """Predict and learn all samples."""
        z_W, n_W = np.zeros(1 << self.bits), np.zeros(1 << self.bits)
        n = flat.longest
        key_S, value_S = np.empty(n * (n + 1) // 2 + 1, np.int64), np.empty(n * (n + 1) // 2 + 1)
        columns = flat.id_N, flat.value_N, flat.field_N, flat.offset_B1, flat.event_E1, flat.label_B
        settings = flat.num_sparse, self.crosses, self._rate(flat), self.l1, self.l2
        prediction_B = _linear(*columns, *settings, z_W, n_W, key_S, value_S)
        return Learnt(prediction_B, int(np.count_nonzero(n_W)), z_W.nbytes + n_W.nbytes)

    def _rate(self, flat: Flat) -> float:
        num = flat.mean_length
        return self.rate / math.sqrt(num * (num + 1) / 2 if self.crosses else num)

    def learn_reference(self, flat: Flat) -> list[float]:
        """The plain twin of `learn`: the predictions, by a dictionary of weights."""
        rate = self._rate(flat)
        state: dict[int, tuple[float, float]] = {}  # by key: z and n
        predictions = []

        def weight(key: int) -> float:
            z, n = state.get(key, (0.0, 0.0))
            return 0.0 if abs(z) <= self.l1 else (math.copysign(self.l1, z) - z) / ((1 + n**0.5) / rate + self.l2)

        def predict(features: list[tuple[int, float]]) -> float:
            return chance(sum(weight(key) * value for key, value in features))

        for begin, end in zip(flat.event_E1[:-1], flat.event_E1[1:], strict=True):
            shown = [(self._features(flat, b), flat.label_B[b]) for b in range(begin, end)]
            predictions += [predict(features) for features, _ in shown]
            for features, label in shown:
                error = predict(features) - label
                for key, value in features:
                    z, n = state.get(key, (0.0, 0.0))
                    gradient = error * value
                    sigma = ((n + gradient**2) ** 0.5 - n**0.5) / rate
                    state[key] = z + gradient - sigma * weight(key), n + gradient**2
        return predictions

    def _features(self, flat: Flat, b: int) -> list[tuple[int, float]]:
        mask, found = (1 << self.bits) - 1, [(0, 1.0)]
        at = range(flat.offset_B1[b], flat.offset_B1[b + 1])
        for i in at:
            found.append((int(flat.id_N[i]) & mask, float(flat.value_N[i])))
            for j in at if self.crosses else ():
                if flat.field_N[i] < flat.field_N[j] < flat.num_sparse:
                    mixed = (int(flat.id_N[i]) * int(MIX) + int(flat.id_N[j])) * GOLDEN % (1 << 64)
                    found.append((mixed >> 32 & mask, float(flat.value_N[i] * flat.value_N[j])))
        return found


def chance(logit: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-min(max(logit, -MAX_LOGIT), MAX_LOGIT)))


_chance = njit(nogil=True, cache=True)(chance)


@njit(nogil=True, cache=True)
def _features(id_N, value_N, field_N, begin, end, num_sparse, crosses, mask, key_S, value_S):  # type: ignore[no-untyped-def]
    """Write keys and values of a sample, the constant first; how many."""
    key_S[0], value_S[0], num = 0, 1.0, 1
    for i in range(begin, end):
        key_S[num], value_S[num] = np.int64(id_N[i] & mask), value_N[i]
        num += 1
        if not crosses:
            continue
        for j in range(begin, end):
            if field_N[i] < field_N[j] and field_N[j] < num_sparse:
                mixed = (id_N[i] * MIX + id_N[j]) * np.uint64(GOLDEN)
                key_S[num] = np.int64((mixed >> np.uint64(32)) & mask)
                value_S[num] = value_N[i] * value_N[j]
                num += 1
    return num


@njit(nogil=True, cache=True)
def _weight(z, n, rate, l1, l2):  # type: ignore[no-untyped-def]
    return 0.0 if abs(z) <= l1 else (math.copysign(l1, z) - z) / ((1.0 + math.sqrt(n)) / rate + l2)


@njit(nogil=True, cache=True)
def _linear(  # type: ignore[no-untyped-def]
    id_N, value_N, field_N, offset_B1, event_E1, label_B, num_sparse, crosses, rate, l1, l2, z_W, n_W, key_S, value_S
):
    prediction_B, mask = np.empty(len(label_B)), np.uint64(len(z_W) - 1)
    for e in range(len(event_E1) - 1):
        for learns in (False, True):
            for b in range(event_E1[e], event_E1[e + 1]):
                begin, end = offset_B1[b], offset_B1[b + 1]
                num = _features(id_N, value_N, field_N, begin, end, num_sparse, crosses, mask, key_S, value_S)
                logit = 0.0
                for s in range(num):
                    logit += _weight(z_W[key_S[s]], n_W[key_S[s]], rate, l1, l2) * value_S[s]
                error = _chance(logit) - label_B[b]
                if not learns:
                    prediction_B[b] = error + label_B[b]
                    continue
                for s in range(num):
                    key, gradient = key_S[s], error * value_S[s]
                    n = n_W[key] + gradient * gradient
                    sigma = (math.sqrt(n) - math.sqrt(n_W[key])) / rate
                    z_W[key] += gradient - sigma * _weight(z_W[key], n_W[key], rate, l1, l2)
                    n_W[key] = n
    return prediction_B


# -- field-aware factorization machine --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldAware:
    """A field-aware factorization machine (Juan et al., RecSys 2016), as its library learns it: Adagrad, samples scaled
    to length 1. Beside the pairs of sparse ids it has the weights of `Linear`'s kind, for dense values, too."""

    dim: int = 4
    rate: float = 0.5
    """Divided by the square root of the number of ids of a mean sample, all of which move at once."""
    bits: int = 18

    def learn(self, flat: Flat) -> Learnt:
        """Predict and learn all samples."""
        tables = self._tables(flat)
        columns = flat.id_N, flat.value_N, flat.field_N, flat.offset_B1, flat.event_E1, flat.label_B
        prediction_B = _field_aware(*columns, flat.num_sparse, self.rate / math.sqrt(flat.mean_length), *tables)
        return Learnt(prediction_B, int(np.count_nonzero(tables[1] > 1)), sum(table.nbytes for table in tables))

    def _tables(self, flat: Flat) -> tuple[F32, F32, F32, F32]:
        """Weights and their accumulators, then vectors and theirs."""
        size = 1 << self.bits, flat.num_sparse, self.dim
        vectors = np.random.default_rng(1).random(size, np.float32) * np.float32(self.dim**-0.5)
        return np.zeros(size[0], np.float32), np.ones(size[0], np.float32), vectors, np.ones(size, np.float32)

    def learn_reference(self, flat: Flat) -> list[float]:
        """The plain twin of `learn`: the predictions, by vectors of numpy."""
        rate = self.rate / math.sqrt(flat.mean_length)
        w_W, wn_W, v_WFK, vn_WFK = (table.astype(np.float64) for table in self._tables(flat))
        predictions: list[float] = []
        for begin, end in zip(flat.event_E1[:-1], flat.event_E1[1:], strict=True):
            for learns in (False, True):
                for b in range(begin, end):
                    at = slice(flat.offset_B1[b], flat.offset_B1[b + 1])
                    key = (flat.id_N[at] & np.uint64((1 << self.bits) - 1)).astype(np.int64)
                    value, field = flat.value_N[at], flat.field_N[at]
                    sparse = np.flatnonzero(field < flat.num_sparse)
                    scale = 1 / max(float((value[sparse] ** 2).sum()), 1e-12)
                    pairs = [(i, j) for i in sparse for j in sparse if field[i] < field[j]]
                    sides = [((key[i], field[j]), (key[j], field[i]), scale * value[i] * value[j]) for i, j in pairs]
                    logit = w_W[0] + sum(w_W[key] * value) + sum(v_WFK[i] @ v_WFK[j] * by for i, j, by in sides)
                    error = chance(logit) - flat.label_B[b]
                    if not learns:
                        predictions.append(error + flat.label_B[b])
                        continue
                    for k, by in [(0, 1.0), *zip(key.tolist(), value.tolist(), strict=True)]:
                        wn_W[k] += (error * by) ** 2
                        w_W[k] -= rate * error * by / wn_W[k] ** 0.5
                    for i, j, by in sides:
                        of_i, of_j = error * by * v_WFK[j], error * by * v_WFK[i]
                        for side, gradient in ((i, of_i), (j, of_j)):
                            vn_WFK[side] += gradient**2
                            v_WFK[side] -= rate * gradient / vn_WFK[side] ** 0.5
        return predictions


@njit(nogil=True, cache=True)
def _field_aware(  # type: ignore[no-untyped-def]
    id_N, value_N, field_N, offset_B1, event_E1, label_B, num_sparse, rate, w_W, wn_W, v_WFK, vn_WFK
):
    prediction_B, mask = np.empty(len(label_B)), np.uint64(len(w_W) - 1)
    for e in range(len(event_E1) - 1):
        for learns in (False, True):
            for b in range(event_E1[e], event_E1[e + 1]):
                begin, end = offset_B1[b], offset_B1[b + 1]
                logit, norm = np.float64(w_W[0]), 0.0
                for i in range(begin, end):
                    logit += w_W[np.int64(id_N[i] & mask)] * value_N[i]
                    if field_N[i] < num_sparse:
                        norm += value_N[i] * value_N[i]
                scale = 1.0 / max(norm, 1e-12)
                logit += _pairs(id_N, value_N, field_N, begin, end, num_sparse, scale, 0.0, v_WFK, vn_WFK)
                error = _chance(logit) - label_B[b]
                if not learns:
                    prediction_B[b] = error + label_B[b]
                    continue
                wn_W[0] += error * error
                w_W[0] -= rate * error / math.sqrt(wn_W[0])
                for i in range(begin, end):
                    key, gradient = np.int64(id_N[i] & mask), error * value_N[i]
                    wn_W[key] += gradient * gradient
                    w_W[key] -= rate * gradient / math.sqrt(wn_W[key])
                _pairs(id_N, value_N, field_N, begin, end, num_sparse, scale * error, rate, v_WFK, vn_WFK)
    return prediction_B


@njit(nogil=True, cache=True)
def _pairs(id_N, value_N, field_N, begin, end, num_sparse, scale, rate, v_WFK, vn_WFK):  # type: ignore[no-untyped-def]
    """The sum over pairs of sparse ids, each times `scale`. With a rate: learn them, `scale` times the error."""
    total, mask = 0.0, np.uint64(len(v_WFK) - 1)
    for i in range(begin, end):
        for j in range(begin, end):
            if field_N[i] >= field_N[j] or field_N[j] >= num_sparse:
                continue
            one, other = np.int64(id_N[i] & mask), np.int64(id_N[j] & mask)
            by = scale * value_N[i] * value_N[j]
            for k in range(v_WFK.shape[2]):
                vi, vj = v_WFK[one, field_N[j], k], v_WFK[other, field_N[i], k]
                total += by * vi * vj
                if rate:
                    vn_WFK[one, field_N[j], k] += (by * vj) ** 2
                    v_WFK[one, field_N[j], k] -= rate * by * vj / math.sqrt(vn_WFK[one, field_N[j], k])
                    vn_WFK[other, field_N[i], k] += (by * vi) ** 2
                    v_WFK[other, field_N[i], k] -= rate * by * vi / math.sqrt(vn_WFK[other, field_N[i], k])
    return total
