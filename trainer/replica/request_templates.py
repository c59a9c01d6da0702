"""Reads requests whose JSON differs from one before in numbers alone: by its bytes, without a parser.

A client writes its requests by one program, so all their bytes but the digits repeat. A template is read from a request
that trainer.replica.known_requests has read, and gives what that reads of the same bytes, or nothing.

Shapes: L bytes of a template without its numbers, H numbers (holes), N bytes of a request, S signs, F floats.
"""

import re
from collections.abc import Sequence

import numpy as np

from headrace import documents
from headrace.kernel_cache import njit
from headrace.trainer.serving.slot_layout import F32, I64, U64

MAX_BYTES = 1 << 14
"""Longest JSON of which a template is made."""
_DATA = re.compile(rb'"data"\s*:\s*(\[[-+0-9.eE,\s\[\]]*\])\s*[,}]')
_NUMBER = re.compile(rb"-?[0-9][-+0-9.eE]*")
_POWER_P = np.array([10.0**power for power in range(23)])
"""Powers of ten that a float64 holds exactly."""
ZERO, NINE, MINUS, PLUS, DOT, LITTLE_E, LARGE_E = b"09-+.eE"
LAST = (1 << 64) // 10, (1 << 64) % 10
"""Of a number of 64 bits: the most before its last digit, and the digit that is then too large."""
TINY, HUGE = 1e-37, 1e38
"""Between them float32 has its full precision."""
HALF, UNSURE = 1 << 28, 8
"""The bits that float32 drops of a float64 tell how to round, unless they are this close to a half."""


class RequestTemplate:
    """The bytes of one request's JSON but for its numbers, and the place of each number in its arrays."""

    def __init__(self, content: bytes, to_H: I64, num_signs: int, num_floats: int) -> None:
        """`to_H`: the place among signs of each number, or -1 less its place among floats. Raises ValueError where
        `content` does not have as many numbers."""
        found = [
            (part.start() + match.start(1), part.end() + match.start(1))
            for match in _DATA.finditer(content)
            for part in _NUMBER.finditer(match[1])
        ]
        if len(found) != len(to_H):
            raise ValueError(f"{len(found)} numbers in place of {len(to_H)}")
        begins = [0, *(end for _, end in found)]
        ends = [*(begin for begin, _ in found), len(content)]
        self.literals = [content[begin:end] for begin, end in zip(begins, ends, strict=True)]
        """The bytes between numbers."""
        self._literal_L = np.frombuffer(b"".join(self.literals), np.uint8)
        self._end_H1 = np.cumsum([len(each) for each in self.literals])
        self._to_H, self._num_signs, self._num_floats = to_H, num_signs, num_floats

    def read(self, content: bytes) -> tuple[U64, F32] | None:
        """Signs and floats of a request's JSON; None where it has other bytes, or numbers that are not read here."""
        sign_S, float_F = np.empty(self._num_signs, np.uint64), np.empty(self._num_floats, np.float32)
        content_N = np.frombuffer(content, np.uint8)
        if read_numbers(content_N, self._literal_L, self._end_H1, self._to_H, _POWER_P, sign_S, float_F):
            return sign_S, float_F
        return None


def read_reference(
    literals: Sequence[bytes], to_H: Sequence[int], content: bytes
) -> tuple[dict[int, int], dict[int, np.float32]] | None:
    """Reference for `RequestTemplate.read`, of all numbers: signs and floats by their places."""
    number = rb"(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
    if (found := re.fullmatch(number.join(map(re.escape, literals)), content)) is None:
        return None
    numbers = dict(zip(to_H, (documents.parse(each, "a number") for each in found.groups()), strict=True))
    signs = {place: each for place, each in numbers.items() if place >= 0}
    if not all(type(each) is int and 0 <= each < 1 << 64 for each in signs.values()):
        return None
    return signs, {-1 - place: np.float32(each) for place, each in numbers.items() if place < 0}


def places_of(sizes: Sequence[int], signs: Sequence[int], floats: Sequence[int]) -> I64:
    """`to_H` of a request whose tensors have these sizes; `signs` and `floats` are the tensors in the order of the
    arrays."""
    begins, to_H = np.cumsum([0, *sizes]), np.empty(sum(sizes), np.int64)
    for tensors, is_float in ((signs, False), (floats, True)):
        place = 0
        for tensor in tensors:
            at_H = np.arange(place, place + sizes[tensor])
            to_H[begins[tensor] : begins[tensor + 1]] = -1 - at_H if is_float else at_H
            place += sizes[tensor]
    return to_H


def compile_kernels() -> None:
    """Compile before a request waits for it."""
    RequestTemplate(b'{"data": [0]}', np.array([-1]), 0, 1).read(b'{"data": [1.5]}')


@njit(nogil=True, cache=True)
def read_numbers(content_N, literal_L, end_H1, to_H, power_P, sign_S, float_F):  # type: ignore[no-untyped-def]
    """Write a request's numbers to `sign_S` and `float_F`; False where one cannot be read, or other bytes differ.

    A float is computed as a float64 with an error of less than two units of its last place, then rounded; where the
    error could change the rounding, it is not read.
    """
    at, literal, size = 0, 0, len(content_N)
    for hole in range(len(end_H1)):
        count = end_H1[hole] - literal
        if at + count > size:
            return False
        for n in range(count):
            if content_N[at + n] != literal_L[literal + n]:
                return False
        at, literal = at + count, end_H1[hole]
        if hole == len(to_H):
            break
        is_float, is_negative = to_H[hole] < 0, False
        if is_float and at < size and content_N[at] == MINUS:
            is_negative, at = True, at + 1
        begin = at
        at, mantissa = _digits(content_N, at, np.uint64(0))
        if at == begin or (content_N[begin] == ZERO and at > begin + 1):
            return False
        if not is_float:
            sign_S[to_H[hole]] = mantissa
            continue
        exponent, is_whole = 0, True
        if at < size and content_N[at] == DOT:
            begin, is_whole = at + 1, False
            at, mantissa = _digits(content_N, begin, mantissa)
            exponent = begin - at
            if at == begin:
                return False
        if at < size and (content_N[at] == LITTLE_E or content_N[at] == LARGE_E):
            at, is_whole, power, power_sign = at + 1, False, 0, 1
            if at < size and (content_N[at] == MINUS or content_N[at] == PLUS):
                power_sign = -1 if content_N[at] == MINUS else 1
                at += 1
            begin = at
            while at < min(size, begin + 3) and ZERO <= content_N[at] <= NINE:
                power, at = 10 * power + int(content_N[at] - ZERO), at + 1
            if at == begin:
                return False
            exponent += power_sign * power
        value = np.float64(mantissa)
        if abs(exponent) >= len(power_P) or (is_whole and is_negative and mantissa == 0):
            return False
        value = value / power_P[-exponent] if exponent < 0 else value * power_P[exponent]
        if mantissa != 0 and (not TINY < value < HUGE or not _is_sure(value)):
            return False
        float_F[-1 - to_H[hole]] = np.float32(-value if is_negative else value)
    return at == size


@njit(nogil=True, cache=True, inline="always")
def _digits(content_N, at, mantissa):  # type: ignore[no-untyped-def]
    """Where the digits from `at` on end that 64 bits hold behind those of `mantissa`, and the number with them."""
    most, last = np.uint64(LAST[0]), np.uint64(LAST[1])
    while at < len(content_N) and ZERO <= content_N[at] <= NINE:
        digit = np.uint64(content_N[at] - ZERO)
        if mantissa > most or (mantissa == most and digit >= last):
            break  # the digit is in no literal, so that the request is not read
        mantissa = mantissa * np.uint64(10) + digit
        at += 1
    return at, mantissa


@njit(nogil=True, cache=True, inline="always")
def _is_sure(value):  # type: ignore[no-untyped-def]
    dropped = np.int64(np.float64(value).view(np.int64) & np.int64(2 * HALF - 1))
    return abs(dropped - np.int64(HALF)) > UNSURE
