"""The MultiSlot parser: equal to its plain twin on whatever comes, and clear about what it rejects."""

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.dataset.formats.multislot_parser import REASONS, SKIPPED_CHUNKS, MultiSlotParser, parse_line_reference
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.spec.config import DenseSlot, MetaSlot, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.keys import sign_of_text

SCHEMA = Schema.of(
    [
        SparseSlot(names=("C{1..2}",)),
        SparseSlot(name="word", values="string"),
        DenseSlot(name="d", kind="dense", size=2),
        MetaSlot(name="label", kind="meta"),
        MetaSlot(name="has_label", kind="meta", type="uint64"),
        MetaSlot(name="delta", kind="meta", type="int64"),
        MetaSlot(name="title", kind="meta", type="string"),
    ]
)
MASKS = {"label": "has_label"}
GOOD = b"1 7 0 2 a b 2 0.5 -1e3 1 1 1 1 1 -5 1 hello"
PARSER = MultiSlotParser(SCHEMA, MASKS)
ONE_FLOAT = Schema.of([DenseSlot(name="d", kind="dense", size=1)])
FLOAT_PARSER = MultiSlotParser(ONE_FLOAT)
ONE_SIGN = Schema.of([SparseSlot(name="s")])
SIGN_PARSER = MultiSlotParser(ONE_SIGN)


def assert_equal_to_twin(text: bytes, schema: Schema, parser: MultiSlotParser, masks: dict[str, str]) -> None:
    """Alone, and before more text: words of eight bytes are read only where the text has so many more."""
    for whole in (text, text + b"\n" * 32):
        _assert_equal_to_twin(whole, schema, parser, masks)


def _assert_equal_to_twin(text: bytes, schema: Schema, parser: MultiSlotParser, masks: dict[str, str]) -> None:
    samples, bad_lines = parser.parse(text)
    bad = {line.line: line for line in bad_lines}
    row = 0
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        expected = parse_line_reference(line, schema, masks)
        if isinstance(expected, tuple):
            fault, slot = expected
            assert (bad[number].reason, bad[number].slot, bad[number].data) == (REASONS[fault], slot, line)
            continue
        assert number not in bad, bad.get(number)
        assert samples.event_B[row] == number - 1
        for name, column in samples.sparse.items():
            begin, end = column.offset_B1[row : row + 2]
            assert column.values_N[begin:end].tolist() == expected[name]
        for name, column in samples.dense.items():
            assert column[row].tobytes() == np.array(expected[name], np.float32).tobytes()
        for name, column in samples.meta.items():
            both_nan = column[row] != column[row] and expected[name] != expected[name]
            assert both_nan or column[row] == expected[name]
        row += 1
    assert row == len(samples)


def test_a_line_becomes_a_sample():
    samples, bad_lines = PARSER.parse(GOOD + b"\n")
    assert not bad_lines
    assert samples.sparse["C1"].values_N.tolist() == [7]
    assert samples.sparse["C2"].values_N.tolist() == []
    assert samples.sparse["word"].values_N.tolist() == [sign_of_text(b"a"), sign_of_text(b"b")]
    assert samples.dense["d"].tolist() == [[0.5, -1000.0]]
    assert {name: column[0] for name, column in samples.meta.items()} == {
        "label": 1.0,
        "has_label": 1,
        "delta": -5,
        "title": "hello",
    }


@pytest.mark.parametrize(
    ("line", "reason", "slot"),
    [
        (b"", Reason.WRONG_COUNT, "C1"),
        (b"hello world", Reason.UNPARSABLE, "C1"),
        (b"1 x" + GOOD[3:], Reason.UNPARSABLE, "C1"),
        (b"1 -7" + GOOD[3:], Reason.UNPARSABLE, "C1"),
        (b"1 18446744073709551616" + GOOD[3:], Reason.UNPARSABLE, "C1"),
        (b"99 7" + GOOD[3:], Reason.UNPARSABLE, "C1"),
        (b"99999999999999999999999 7", Reason.UNPARSABLE, "C1"),
        (b"1 7 3 1 2", Reason.WRONG_COUNT, "C2"),
        (GOOD.replace(b"2 0.5 -1e3", b"1 0.5"), Reason.WRONG_COUNT, "d"),
        (GOOD.replace(b"-1e3", b"nan"), Reason.NON_FINITE, "d"),
        (GOOD.replace(b"-1e3", b"-Infinity"), Reason.NON_FINITE, "d"),
        (GOOD.replace(b"-1e3", b"1e39"), Reason.NON_FINITE, "d"),
        (GOOD.replace(b"-1e3", b"1_000"), Reason.UNPARSABLE, "d"),
        (GOOD.replace(b"1 1 1 1 1 -5", b"0 1 1 1 -5"), Reason.LABEL_MISSING, "label"),
        (GOOD.replace(b"1 -5", b"0"), Reason.LABEL_MISSING, "delta"),
        (GOOD.replace(b"1 -5", b"2 -5 6"), Reason.WRONG_COUNT, "delta"),
        (GOOD + b" 1 2", Reason.WRONG_COUNT, None),
        (GOOD.replace(b"2 a b", b"1 \xff"), Reason.NOT_UTF8, "word"),
        (GOOD.replace(b"hello", b"\xed\xa0\x80"), Reason.NOT_UTF8, "title"),
        (b"!ValueError: 3 fields", Reason.GENERATOR, None),
    ],
)
def test_a_bad_line_is_rejected_alone_with_its_reason_and_slot(line, reason, slot):
    samples, bad_lines = PARSER.parse(b"\n".join([GOOD, line, GOOD]) + b"\n", num_before=10)
    (bad,) = bad_lines
    assert (bad.line, bad.reason, bad.slot, bad.data) == (12, reason, slot, line)
    assert samples.event_B.tolist() == [10, 12]
    assert [len(column.values_N) for column in samples.sparse.values()] == [2, 0, 4]
    assert_equal_to_twin(line + b"\n", SCHEMA, PARSER, MASKS)


def test_a_fault_says_the_byte_it_is_at():
    _, (bad,) = PARSER.parse(b"1 7 1 12x4" + b"\n")
    assert bad.detail == "slot 'C2': '12x4' at byte 7"


def test_text_where_numbers_are_expected_is_told_how_to_be_text():
    _, (bad,) = PARSER.parse(b"1 u7 1 2\n")
    assert bad.detail == "slot 'C1': 'u7' at byte 3; for text, set values = \"string\" in the slot"


def test_a_generators_error_is_the_reason_in_its_own_words():
    _, (bad,) = PARSER.parse(b"!KeyError: 'user'\n")
    assert (bad.reason, bad.detail) == (Reason.GENERATOR, "KeyError: 'user'")


def test_a_label_may_be_absent_where_its_mask_is_0():
    absent = GOOD.replace(b"1 1 1 1 1 -5", b"0 1 0 1 -5") + b"\n"
    samples, bad_lines = PARSER.parse(absent)
    assert not bad_lines and math.isnan(samples.meta["label"][0])
    samples, bad_lines = MultiSlotParser(SCHEMA).parse(absent)
    assert [bad.reason for bad in bad_lines] == [Reason.LABEL_MISSING] and not len(samples)


def test_no_lines_give_no_samples():
    samples, bad_lines = PARSER.parse(b"")
    assert (len(samples), bad_lines) == (0, [])
    assert samples.sparse["C1"].offset_B1.tolist() == [0]


@given(st.lists(st.one_of(st.binary(max_size=60), st.just(GOOD)), max_size=8))
def test_hostile_bytes_are_judged_as_the_twin_judges_them(lines):
    text = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines)
    assert_equal_to_twin(text, SCHEMA, PARSER, MASKS)


@given(st.data())
def test_damaged_lines_are_judged_as_the_twin_judges_them(data):
    line = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(line) - 1))
        line[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b" ", b"0", b"\x80", b"9 ", b"-"])
        )
        line = line or bytearray(b"0")
    assert_equal_to_twin(bytes(line) + b"\n" + GOOD + b"\n", SCHEMA, PARSER, MASKS)


PLAIN_SCHEMA = Schema.of(
    [
        SparseSlot(names=("C{1..2}",)),
        DenseSlot(name="d", kind="dense", size=2),
        MetaSlot(name="label", kind="meta"),
    ]
)
PLAIN_PARSER = MultiSlotParser(PLAIN_SCHEMA)
PLAIN = b"1 7 2 1234567 123456789012 2 0.1234 -12.5 1 1"


@given(
    st.lists(
        st.tuples(st.integers(0, 44), st.integers(0, 2), st.sampled_from(list("0 9-.e\t\rx")) | st.just("")), max_size=3
    )
)
@example([])
@example([(42, 3, "0")])
@example([(27, 14, "0")])
def test_damaged_lines_of_numbers_alone_are_judged_as_the_twin_judges_them(damages):
    line = bytearray(PLAIN)
    for at, num, put in damages:
        line[at : at + num] = put.encode()
    assert_equal_to_twin(bytes(line) + b"\n" + PLAIN + b"\n", PLAIN_SCHEMA, PLAIN_PARSER, {})


@given(
    st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
    st.integers(0, 9),
)
def test_lines_of_numbers_alone_are_read_as_the_twin_reads_them(signs, floats, digits):
    words = [len(signs), *signs, 0, 2, *(f"{value:.{digits}f}" for value in floats), 1, 0]
    line = " ".join(map(str, words)).encode() + b"\n"
    assert_equal_to_twin(line * 3, PLAIN_SCHEMA, PLAIN_PARSER, {})


DECIMALS = r"[0-9]{0,9}\.?[0-9]{0,9}"
SINGLE = b"1 7 1 123456789012 2 0.1234 -12.5 1 1"


@given(
    st.lists(
        st.tuples(st.integers(0, 36), st.integers(0, 2), st.sampled_from(list("0 9-.e\t\rx\n")) | st.just("")),
        max_size=3,
    )
)
@example([])
@example([(18, 0, "34567890")])
@example([(18, 0, "94567890")])
def test_damaged_lines_of_one_sign_a_slot_are_judged_as_the_twin_judges_them(damages):
    line = bytearray(SINGLE)
    for at, num, put in damages:
        line[at : at + num] = put.encode()
    text = bytes(line) + b"\n" + SINGLE + b"\n"
    assert_equal_to_twin(text, PLAIN_SCHEMA, MultiSlotParser(PLAIN_SCHEMA), {})


@given(
    st.lists(
        st.tuples(st.integers(0, (1 << 64) - 1), st.sampled_from(["", "-"]), st.from_regex(DECIMALS, fullmatch=True)),
        min_size=1,
        max_size=5,
    )
)
@example([(0, "", "1234567.1234567")])
@example([(0, "-", "0.12345"), (1, "", "0.123456"), (2, "", "123456."), (3, "", ".1234567")])
def test_lines_of_one_sign_a_slot_are_read_as_the_twin_reads_them(values):
    text = "".join(f"1 {sign} 1 {sign // 3} 2 {minus}{number} 1 1 0\n" for sign, minus, number in values).encode()
    assert_equal_to_twin(text, PLAIN_SCHEMA, MultiSlotParser(PLAIN_SCHEMA), {})


def test_lines_after_others_are_read_the_quick_way_again():
    parser = MultiSlotParser(PLAIN_SCHEMA)
    for text in (PLAIN, *[SINGLE] * (SKIPPED_CHUNKS + 1)):
        samples, bad_lines = parser.parse(text + b"\n", num_before=7)
        assert (len(samples), samples.event_B.tolist(), bad_lines) == (1, [7], [])
    assert samples.sparse["C1"].offset_B1 is samples.sparse["C2"].offset_B1


TOKENS = st.one_of(
    st.integers(-3, 1 << 65).map(str),
    st.floats().map(repr),
    st.from_regex(r"[+-]?[0-9]{0,25}(\.[0-9]{0,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.sampled_from(
        ["inf", "-INF", "Infinity", "nan", "+NaN", "in", "infinit", "1e", "e5", ".", "+", "1_0", "0x1", "ä", "1\r"]
    ),
)


@given(TOKENS)
@example("16777217")
@example("16777217.0000000000000000000001")
@example("7.0064923216240853e-46")
@example("7.006492321624085e-46")
@example("3.4028235677973366e38")
@example("3.40282356e38")
@example("1e-400")
@example("-0.0")
@example("0" * 400 + "1")
@example("1" + "0" * 400)
@example("0." + "0" * 60 + "1")
@example("1e99999999999999999999")
def test_a_float_is_what_python_reads_rounded_to_32_bits(token):
    assert_equal_to_twin(f"1 {token}\n".encode(), ONE_FLOAT, FLOAT_PARSER, {})


@given(st.binary(min_size=4, max_size=4), st.integers(6, 20))
def test_floats_near_the_border_of_two_float32_are_rounded_right(raw, digits):
    # The middle between two float32, shortly before and behind it: where an approximate value would err.
    low = np.frombuffer(raw, np.float32)[0]
    if not np.isfinite(low):
        return
    middle = (float(low) + float(np.nextafter(low, np.float32(np.inf), dtype=np.float32))) / 2
    for value in (middle, math.nextafter(middle, math.inf), math.nextafter(middle, -math.inf)):
        if math.isfinite(value):
            assert_equal_to_twin(f"1 {value:.{digits}e}\n".encode(), ONE_FLOAT, FLOAT_PARSER, {})


@given(st.lists(st.lists(st.integers(0, (1 << 64) - 1), max_size=5), max_size=6))
def test_signs_come_back_as_they_were_written(signs):
    text = "".join(f"{len(row)} {' '.join(map(str, row))}\n" for row in signs).encode()
    samples, bad_lines = SIGN_PARSER.parse(text)
    assert not bad_lines
    assert samples.sparse["s"].values_N.tolist() == [sign for row in signs for sign in row]
    assert np.diff(samples.sparse["s"].offset_B1).tolist() == [len(row) for row in signs]


@given(st.binary(min_size=1, max_size=6))
@example(b"\xf4\x8f\xbf\xbf")
@example(b"\xf4\x90\x80\x80")
@example(b"\xe0\x9f\xbf")
@example(b"\xc3")
def test_text_is_utf8_or_rejected_as_python_says(raw):
    schema = Schema.of([SparseSlot(name="t", values="string")])
    token = raw.translate(None, b" \t\r\n")
    if token:
        assert_equal_to_twin(b"1 " + token + b"\n", schema, MultiSlotParser(schema), {})


def test_float_bits_are_kept():
    samples, _ = FLOAT_PARSER.parse(b"1 0.1\n1 -0\n")
    assert samples.dense["d"].tobytes() == struct.pack("<2f", 0.1, -0.0)
