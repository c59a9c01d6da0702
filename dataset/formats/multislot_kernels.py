"""The hot loops of the MultiSlot parser: bytes of whole lines to rows, rows to columns.

`dataset.formats.multislot_parser` prepares the arrays and has the plain twin. Every line ends with a line feed, which
also ends a token, so no loop checks for the end of the buffer.

Shapes: S slots, C sparse slots, F float cells of a row, W word cells of a row, B lines, N signs.
"""

from enum import IntEnum

import numpy as np

from headrace.dataset.formats.plain_lines import parse_plain
from headrace.kernel_cache import njit
from headrace.key_kernels import fnv1a


class CellKind(IntEnum):
    """The type of a slot's values, which decides where they are stored."""

    SIGN = 0
    TEXT_SIGN = 1
    DENSE = 2
    META_FLOAT = 3
    META_UNSIGNED = 4
    META_SIGNED = 5
    META_TEXT = 6


class LineFault(IntEnum):
    """Why a line is rejected."""

    FINE = 0
    WRONG_COUNT = 1
    UNPARSABLE = 2
    LABEL_MISSING = 3
    NON_FINITE = 4
    NOT_UTF8 = 5
    GENERATOR = 6


FINE, WRONG_COUNT, UNPARSABLE, LABEL_MISSING, NON_FINITE, NOT_UTF8, GENERATOR = (int(fault) for fault in LineFault)
SIGN, TEXT_SIGN, DENSE, META_FLOAT, META_UNSIGNED, META_SIGNED, META_TEXT = (int(cell) for cell in CellKind)

LINE_FEED, BANG, PLUS, MINUS, DOT, LETTER_E = 10, 33, 43, 45, 46, 101
MAX_UNSIGNED_BY_10 = (1 << 64) // 10
EXACT, SLOW, BAD = 0, 1, 2
POWERS_OF_10 = np.array([10.0**n for n in range(23)])
"""10^0 .. 10^22: the powers that a double holds exactly."""


@njit(nogil=True, cache=True)
def _is_blank(byte):  # type: ignore[no-untyped-def]
    return byte <= 32 and (byte == 32 or byte == 9 or byte == 13)


@njit(nogil=True, cache=True)
def _skip_blanks(data, at):  # type: ignore[no-untyped-def]
    while _is_blank(data[at]):
        at += 1
    return at


@njit(nogil=True, cache=True)
def _ends(byte):  # type: ignore[no-untyped-def]
    return byte <= 32 and (byte == 32 or byte == LINE_FEED or byte == 9 or byte == 13)


@njit(nogil=True, cache=True)
def _unsigned(data, at):  # type: ignore[no-untyped-def]
    """The value, the index after it, and whether a whole token of digits below 2^64 is at `at`."""
    value, first = np.uint64(0), at
    while True:
        digit = np.uint64(data[at]) - np.uint64(48)
        if digit > np.uint64(9):
            return value, at, at > first and _ends(data[at])
        if value >= np.uint64(MAX_UNSIGNED_BY_10) and (value > np.uint64(MAX_UNSIGNED_BY_10) or digit > np.uint64(5)):
            return value, at, False
        value = value * np.uint64(10) + digit
        at += 1


@njit(nogil=True, cache=True)
def _word(data, at, lower):  # type: ignore[no-untyped-def]
    """Whether the token at `at` is the word `lower`, ignoring case."""
    for i in range(len(lower)):
        if data[at + i] | 32 != lower[i]:
            return False
    return _ends(data[at + len(lower)])


@njit(nogil=True, cache=True)
def _token_end(data, at):  # type: ignore[no-untyped-def]
    while not _ends(data[at]):
        at += 1
    return at


INF = np.frombuffer(b"inf", np.uint8)
INFINITY = np.frombuffer(b"infinity", np.uint8)
NAN = np.frombuffer(b"nan", np.uint8)


@njit(nogil=True, cache=True)
def _no_digits(data, at):  # type: ignore[no-untyped-def]
    """The result of `_numeral` for a token without digits."""
    if _word(data, at, INF) or _word(data, at, INFINITY):
        return np.float32(np.inf), _token_end(data, at), EXACT
    if _word(data, at, NAN):
        return np.float32(np.nan), _token_end(data, at), EXACT
    return np.float32(0), at, BAD


@njit(nogil=True, cache=True)
def _numeral(data, at):  # type: ignore[no-untyped-def]
    """A float32 value, the index after its token, and EXACT, SLOW or BAD.

    EXACT: the value equals Python's float(), rounded to float32. Up to 19 digits are read as an integer and scaled by
    an exact power of ten. This is exact for 53 bits (Clinger 1990); otherwise the error is below 2^-51 of the value,
    which still decides the float32 unless the value is that close to a border between two. SLOW: left to float().
    """
    negative = data[at] == MINUS
    if negative or data[at] == PLUS:
        at += 1
    start = at
    mantissa, scale, num_digits, seen_dot, exact = np.uint64(0), 0, 0, False, True
    while True:
        digit = np.uint64(data[at]) - np.uint64(48)
        if digit <= np.uint64(9):
            num_digits += 1
            if mantissa < np.uint64(10**18):
                mantissa = mantissa * np.uint64(10) + digit
                scale -= seen_dot
            else:
                exact = False
                scale += not seen_dot
        elif data[at] == DOT and not seen_dot:
            seen_dot = True
        else:
            break
        at += 1
    if num_digits == 0:
        return _no_digits(data, start)
    if data[at] | 32 == LETTER_E:
        at += 1
        downwards = data[at] == MINUS
        if downwards or data[at] == PLUS:
            at += 1
        exponent, first = 0, at
        while np.uint64(data[at]) - np.uint64(48) <= np.uint64(9):
            if exponent < 1_000_000:
                exponent = exponent * 10 + (data[at] - 48)
            at += 1
        if at == first:
            return np.float32(0), at, BAD
        scale += -exponent if downwards else exponent
    if not _ends(data[at]):
        return np.float32(0), at, BAD
    return _scaled(negative, mantissa, scale, exact, at)


@njit(nogil=True, cache=True)
def _scaled(negative, mantissa, scale, exact, at):  # type: ignore[no-untyped-def]
    """The last step of `_numeral`: mantissa * 10^scale."""
    if mantissa == np.uint64(0):
        return np.float32(-0.0 if negative else 0.0), at, EXACT
    if scale < -22 or scale > 22:
        return np.float32(0), at, SLOW
    value = np.float64(mantissa)
    value = value * POWERS_OF_10[scale] if scale >= 0 else value / POWERS_OF_10[-scale]
    value = -value if negative else value
    if not exact or mantissa > np.uint64(1 << 53):
        margin = value * 2.0**-50
        if np.float32(value - margin) != np.float32(value + margin):
            return np.float32(0), at, SLOW
    return np.float32(value), at, EXACT


@njit(nogil=True, cache=True)
def _is_utf8(data, at, end):  # type: ignore[no-untyped-def]
    """Whether `data[at:end]` is UTF-8 by RFC 3629: no overlong form, no surrogate, nothing above U+10FFFF."""
    while at < end:
        lead = data[at]
        at += 1
        if lead < 0x80:
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        num_more = 1 if lead < 0xE0 else (2 if lead < 0xF0 else 3)
        lowest, highest = 0x80, 0xBF
        if lead == 0xE0:
            lowest = 0xA0
        elif lead == 0xED:
            highest = 0x9F
        elif lead == 0xF0:
            lowest = 0x90
        elif lead == 0xF4:
            highest = 0x8F
        if at + num_more > end or data[at] < lowest or data[at] > highest:
            return False
        for i in range(1, num_more):
            if data[at + i] & 0xC0 != 0x80:
                return False
        at += num_more
    return True


@njit(nogil=True, cache=True)
def _signed(data, at):  # type: ignore[no-untyped-def]
    """The bits of an int64, the index after it, and whether one is at `at`."""
    negative = data[at] == MINUS
    if negative or data[at] == PLUS:
        at += 1
    value, at, good = _unsigned(data, at)
    good = good and value <= np.uint64((1 << 63) - 1) + np.uint64(negative)
    return np.uint64(0) - value if negative else value, at, good


@njit(nogil=True, cache=True)
def _float_cell(data, at, row, column, slot, float_BF, slow_N5, num_slow, is_dense):  # type: ignore[no-untyped-def]
    """Store a float; return fault, index after it, number of slow floats."""
    value, after, how = _numeral(data, at)
    if how == BAD:
        return UNPARSABLE, at, num_slow
    if how == SLOW:
        slow_N5[num_slow, 0], slow_N5[num_slow, 1], slow_N5[num_slow, 2] = row, column, slot
        slow_N5[num_slow, 3], slow_N5[num_slow, 4] = at, after
        return FINE, after, num_slow + 1
    if np.isinf(value) or (is_dense and np.isnan(value)):
        return NON_FINITE, at, num_slow
    float_BF[row, column] = value
    return FINE, after, num_slow


@njit(nogil=True, cache=True)
def _word_cell(data, at, row, column, kind, word_BW):  # type: ignore[no-untyped-def]
    """Store an integer, or the place of a text; return fault and index after it."""
    if kind == META_TEXT:
        after = _token_end(data, at)
        word_BW[row, column] = (np.uint64(at) << np.uint64(32)) | np.uint64(after)
        return (FINE if _is_utf8(data, at, after) else NOT_UTF8), after
    value, after, good = _unsigned(data, at) if kind == META_UNSIGNED else _signed(data, at)
    word_BW[row, column] = value
    return (FINE if good else UNPARSABLE), (after if good else at)


@njit(nogil=True, cache=True)
def _signs(data, at, kind, count, value_N, num_values):  # type: ignore[no-untyped-def]
    """Store `count` signs; return fault and index after them (after a fault: of the token)."""
    for n in range(count):
        at = _skip_blanks(data, at)
        if data[at] == LINE_FEED:
            return WRONG_COUNT, at
        if kind == SIGN:
            value, after, good = _unsigned(data, at)
            if not good:
                return UNPARSABLE, at
        else:
            after = _token_end(data, at)
            if not _is_utf8(data, at, after):
                return NOT_UTF8, at
            value = fnv1a(data, at, after)
        value_N[num_values + n] = value
        at = after
    return FINE, at


@njit(nogil=True, cache=True)
def _cells(data, at, row, slot, kind, count, column, float_BF, word_BW, slow_N5, num_slow):  # type: ignore[no-untyped-def]
    """Store the values of a dense or meta slot; return fault, index, number of slow floats."""
    if count == 0:  # a meta slot; the caller decides whether the label may be absent
        if kind != META_FLOAT:
            return LABEL_MISSING, at, num_slow
        float_BF[row, column] = np.nan
        return FINE, at, num_slow
    for n in range(count):
        at = _skip_blanks(data, at)
        if data[at] == LINE_FEED:
            return WRONG_COUNT, at, num_slow
        if kind == DENSE or kind == META_FLOAT:
            fault, at, num_slow = _float_cell(
                data, at, row, column + n, slot, float_BF, slow_N5, num_slow, kind == DENSE
            )
        else:
            fault, at = _word_cell(data, at, row, column, kind, word_BW)
        if fault != FINE:
            return fault, at, num_slow
    return FINE, at, num_slow


@njit(nogil=True, cache=True)
def _line(data, at, row, slots_S3, value_N, num_values, count_CB, float_BF, word_BW, slow_N5, num_slow):  # type: ignore[no-untyped-def]
    """Parse one line; return fault, slot, index where parsing stopped, numbers of values and of slow floats."""
    if data[at] == BANG:
        return GENERATOR, 0, at, num_values, num_slow
    for slot in range(len(slots_S3)):
        kind, size, column = slots_S3[slot, 0], slots_S3[slot, 1], slots_S3[slot, 2]
        at = _skip_blanks(data, at)
        count, after, good = _unsigned(data, at)
        if not good:
            return (WRONG_COUNT if data[at] == LINE_FEED else UNPARSABLE), slot, at, num_values, num_slow
        if kind <= TEXT_SIGN:
            # A line cannot have more signs than bytes; with a clipped count the kernel stops at the line's end.
            num = np.int64(min(count, np.uint64(len(data))))
            fault, at = _signs(data, after, kind, num, value_N, num_values)
            num_values += num if fault == FINE else 0
            count_CB[column, row] = num
        elif count != np.uint64(size) and not (kind != DENSE and count == np.uint64(0)):
            return WRONG_COUNT, slot, at, num_values, num_slow
        else:
            fault, at, num_slow = _cells(
                data, after, row, slot, kind, np.int64(count), column, float_BF, word_BW, slow_N5, num_slow
            )
        if fault != FINE:
            return fault, slot, at, num_values, num_slow
    at = _skip_blanks(data, at)
    if data[at] != LINE_FEED:
        return WRONG_COUNT, len(slots_S3), at, num_values, num_slow
    return FINE, 0, at, num_values, num_slow


@njit(nogil=True, cache=True)
def scan(data, begin, end, slots_S3, value_N, count_CB, float_BF, word_BW, slow_N5, line_B4):  # type: ignore[no-untyped-def]
    """Parse the lines of `data[begin:end]`; return the number of slow floats.

    `slots_S3` has (Cell, size, column) of each slot. The signs of line b, slot by slot, begin at `value_N[v]`.
    `line_B4[b]` becomes (fault, slot << 32 | index of the fault, begin of the line, v).
    """
    row, num_values, num_slow, at = 0, 0, 0, begin
    numbers_alone = len(slots_S3) > 0
    for slot in range(len(slots_S3)):
        numbers_alone &= slots_S3[slot, 0] == SIGN or slots_S3[slot, 0] == DENSE or slots_S3[slot, 0] == META_FLOAT
    while at < end:
        if numbers_alone:
            at, row, num_values = parse_plain(
                data, at, end, row, num_values, SIGN, slots_S3, value_N, count_CB, float_BF, line_B4
            )
            if at == end:
                break
        first, first_value, first_slow = at, num_values, num_slow
        fault, slot, at, num_values, num_slow = _line(
            data, at, row, slots_S3, value_N, num_values, count_CB, float_BF, word_BW, slow_N5, num_slow
        )
        line_B4[row, 0], line_B4[row, 2], line_B4[row, 3] = fault, first, first_value
        if fault != FINE:
            line_B4[row, 1] = (slot << 32) | at
            num_values, num_slow = first_value, first_slow
            while data[at] != LINE_FEED:
                at += 1
        at += 1
        row += 1
    return num_slow


@njit(nogil=True, cache=True)
def gather_signs(value_N, count_CB, line_B4, out_N, offset_CB1):  # type: ignore[no-untyped-def]
    """Copy the signs of lines without a fault from line order to slot order; return the number of these lines, B'.

    The signs of slot c are `out_N[offset_CB1[c, 0]:offset_CB1[c, B']]`.
    """
    num_slots, num_lines = count_CB.shape
    total = 0
    for c in range(num_slots):
        offset_CB1[c, 0] = total
        row = 0
        for b in range(num_lines):
            if line_B4[b, 0] == FINE:
                total += count_CB[c, b]
                row += 1
                offset_CB1[c, row] = total
    row = 0
    for b in range(num_lines):
        if line_B4[b, 0] != FINE:
            continue
        source = line_B4[b, 3]
        for c in range(num_slots):
            for n in range(offset_CB1[c, row], offset_CB1[c, row + 1]):
                out_N[n] = value_N[source]
                source += 1
        row += 1
    return row
