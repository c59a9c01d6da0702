"""The quick way through MultiSlot text: lines of signs and short decimals, with one blank between tokens.

Digits are read eight at a time from one word of memory. A line that is not plain is left to
`dataset.formats.multislot_kernels`, which gives equal results for plain ones. Hot functions take words, not arrays:
Numba counts references to an array at each call.

Shapes: S slots, C sparse slots, F float cells of a row, B lines, N signs.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from headrace.kernel_cache import njit

LINE_FEED, BLANK, MINUS, DOT = 10, 32, 45, 46
ONE_AND_BLANK = 0x2031
"""The bytes "1 " as the lowest ones of a word: the count of a slot with one sign."""
WORD_BYTES = 8
MAX_TOKEN_BYTES = 4 * WORD_BYTES
"""No more than so many bytes are read for a token; closer to the text's end no line is plain."""
MAX_16_DIGITS = (1 << 64) // 10_000
"""Below it, four more digits keep a number of 16 digits below 2^64."""
WHOLE_POWERS_OF_10 = np.array([10**n for n in range(WORD_BYTES + 1)], np.uint64)
POWERS_OF_10 = np.array([10.0**n for n in range(WORD_BYTES + 1)])

ZEROS = 0x3030303030303030
"""Eight digits 0."""
ABOVE_9 = 0x7676767676767676
"""Added to eight bytes, it sets the high bit of each that is above 9."""
HIGH_BITS = 0x8080808080808080


def _load_word(_context, data, _at):  # type: ignore[no-untyped-def]
    """load_word(data, at): the eight bytes of a uint8 array from `at` on, the first one lowest. All must be in it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])  # type: ignore[no-untyped-call]
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return types.uint64(data, types.int64), codegen


def _trailing_zeros(_context, _word):  # type: ignore[no-untyped-def]
    """trailing_zeros(word): number of zero bits below the lowest bit that is set; 64 for 0."""

    def codegen(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


load_word: Any = intrinsic(_load_word)
trailing_zeros: Any = intrinsic(_trailing_zeros)


@njit(nogil=True, cache=True, inline="always")
def eight_digits(word):  # type: ignore[no-untyped-def]
    """The value of the digits at the beginning of eight bytes of text, and their number."""
    word = word ^ np.uint64(ZEROS)
    others = ((word + np.uint64(ABOVE_9)) | word) & np.uint64(HIGH_BITS)  # exact up to the first byte that is no digit
    num_bits = trailing_zeros(others) & np.uint64(0x78)
    unused = np.uint64(64) - num_bits
    # Digits move up, so that zeros stand before them. Two shifts: one by 64 bits is not defined.
    word = (word << (unused >> np.uint64(1))) << (unused - (unused >> np.uint64(1)))
    word = word * np.uint64(2561) >> np.uint64(8)  # pairs of digits
    word = (word & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601) >> np.uint64(16)
    word = (word & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001) >> np.uint64(32)
    return word, np.int64(num_bits >> np.uint64(3))


@njit(nogil=True, cache=True)
def more_digits(value, second, third):  # type: ignore[no-untyped-def]
    """The whole number that begins with eight digits of `value`, and the number of its digits; 0 if not below 2^64."""
    low, num = eight_digits(second)
    value = value * WHOLE_POWERS_OF_10[num] + low
    if num < WORD_BYTES:
        return value, WORD_BYTES + num
    low, num = eight_digits(third)
    if num > 4 or (num == 4 and value >= np.uint64(MAX_16_DIGITS)):
        return value, 0
    return value * WHOLE_POWERS_OF_10[num] + low, 2 * WORD_BYTES + num


@njit(nogil=True, cache=True)
def long_decimal(data, at):  # type: ignore[no-untyped-def]
    """As `short_decimal`, with up to seven digits before the dot and behind it."""
    mantissa, num = eight_digits(load_word(data, at))
    if num == WORD_BYTES or data[at + num] != DOT:
        return mantissa, 0, num & (WORD_BYTES - 1)
    behind, num_behind = eight_digits(load_word(data, at + num + 1))
    if num + num_behind == 0 or num_behind == WORD_BYTES:
        return mantissa, 0, 0
    return mantissa * WHOLE_POWERS_OF_10[num_behind] + behind, num_behind, num + 1 + num_behind


@njit(nogil=True, cache=True)
def parse_plain(data, at, end, row, num_values, sign_kind, slots_S3, value_N, count_CB, float_BF, line_B4):  # type: ignore[no-untyped-def]
    """Parse lines from `at` on, up to `end` or to the first line that is not plain. See `multislot_kernels.scan`.

    Returns the index after the last line, its row + 1, and the number of values. Slots are of `sign_kind` or floats.
    """
    num_slots, stop = len(slots_S3), len(data) - MAX_TOKEN_BYTES
    while at < end:
        begin, first_value, plain = at, num_values, True
        for slot in range(num_slots):
            kind, size, column = slots_S3[slot, 0], slots_S3[slot, 1], slots_S3[slot, 2]
            plain = False
            if at >= stop:
                break
            word, num = eight_digits(load_word(data, at))
            count, n = np.int64(word), 0
            at += num
            if num == 0 or num == WORD_BYTES:
                break
            if kind == sign_kind:
                count_CB[column, row] = count
                while n < count and at < stop and data[at] == BLANK:
                    value, num = eight_digits(load_word(data, at + 1))
                    if num == WORD_BYTES:
                        value, num = more_digits(value, load_word(data, at + 9), load_word(data, at + 17))
                    if num == 0:
                        break
                    value_N[num_values] = value
                    at, num_values, n = at + 1 + num, num_values + 1, n + 1
            elif count != size:
                break
            else:
                while n < count and at < stop and data[at] == BLANK:
                    negative = data[at + 1] == MINUS
                    at += 1 + negative
                    mantissa, num = eight_digits(load_word(data, at))
                    at += num
                    num_behind = 0
                    if data[at] == DOT and num < WORD_BYTES:
                        behind, num_behind = eight_digits(load_word(data, at + 1))
                        mantissa = mantissa * WHOLE_POWERS_OF_10[num_behind] + behind
                        at += 1 + num_behind
                    if num + num_behind == 0 or num_behind == WORD_BYTES:
                        break
                    number = np.float64(mantissa) / POWERS_OF_10[num_behind]  # as float() does: both are exact
                    float_BF[row, column + n] = np.float32(-number if negative else number)
                    n += 1
            plain = n == count and data[at] == (LINE_FEED if slot + 1 == num_slots else BLANK)
            if not plain:
                break
            at += 1
        if not plain:
            return begin, row, first_value
        line_B4[row, 2], line_B4[row, 3] = begin, first_value
        row += 1
    return at, row, num_values


@njit(nogil=True, cache=True, inline="always")
def short_decimal(word):  # type: ignore[no-untyped-def]
    """Of a decimal in eight bytes of text: its digits as a whole number, how many stand behind the dot, and its bytes.

    The bytes are 0 if it is not a decimal of less than eight bytes.
    """
    apart = word ^ np.uint64(ZEROS)
    others = ((apart + np.uint64(ABOVE_9)) | apart) & np.uint64(HIGH_BITS)
    num_bits = trailing_zeros(others) & np.uint64(0x78)  # of the digits before the first byte that is no digit
    if num_bits == np.uint64(64) or (word >> num_bits) & np.uint64(0xFF) != np.uint64(DOT):
        value, num = eight_digits(word)
        return value, 0, num & (WORD_BYTES - 1)
    before = (np.uint64(1) << num_bits) - np.uint64(1)
    value, num = eight_digits((word & before) | ((word >> np.uint64(8)) & ~before))  # without the dot
    num_behind = num - np.int64(num_bits >> np.uint64(3))
    return value, num_behind, (0 if num == 0 or num == WORD_BYTES - 1 else num + 1)


@njit(nogil=True, cache=True)
def parse_singles(data, at, end, row, sign_kind, slots_S3, sign_CB, float_M):  # type: ignore[no-untyped-def]
    """Parse plain lines with one sign in each sparse slot, from `at` on, up to `end` or to the first line that is not
    so. Returns the index after the last line, and its row + 1.

    Row b of a slot of floats is `float_M[column * B + b * size:][:size]`, its column and size as in `slots_S3`.
    """
    num_slots, stop, num_lines = len(slots_S3), len(data) - MAX_TOKEN_BYTES, sign_CB.shape[1]
    while at < end:
        begin, plain = at, True
        for slot in range(num_slots):
            kind, size, column = slots_S3[slot, 0], slots_S3[slot, 1], slots_S3[slot, 2]
            plain = False
            if at >= stop:
                break
            word = load_word(data, at)
            if kind == sign_kind:
                if word & np.uint64(0xFFFF) != np.uint64(ONE_AND_BLANK):
                    break
                value, num = eight_digits(load_word(data, at + 2))
                if num == WORD_BYTES:
                    value, num = more_digits(value, load_word(data, at + 10), load_word(data, at + 18))
                at += 2 + num
                plain = num > 0
                sign_CB[column, row] = value
            else:
                count, num = eight_digits(word)
                if num == 0 or num == WORD_BYTES or count != np.uint64(size):
                    break
                at, n = at + num, 0
                cell = column * num_lines + row * size
                while n < size and at < stop and data[at] == BLANK:
                    negative = data[at + 1] == MINUS
                    at += 1 + negative
                    mantissa, num_behind, num = short_decimal(load_word(data, at))
                    if num == 0:
                        mantissa, num_behind, num = long_decimal(data, at)
                        if num == 0:
                            break
                    number = np.float64(mantissa) / POWERS_OF_10[num_behind]  # as float() does: both are exact
                    float_M[cell + n] = np.float32(-number if negative else number)
                    at, n = at + num, n + 1
                plain = n == size
            plain = plain and data[at] == (LINE_FEED if slot + 1 == num_slots else BLANK)
            if not plain:
                break
            at += 1
        if not plain:
            return begin, row
        row += 1
    return at, row
