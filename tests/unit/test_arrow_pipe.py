"""The Arrow protocol: exact per event, and clear about answers that are none."""

import os
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.formats.arrow_columns import (
    AnswerReader,
    BadAnswer,
    check_answer_schema,
    hash_texts,
    hash_texts_reference,
)
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.pipe.answer_samples import rebatch
from headrace.dataset.pipe.segment_work import split_segment
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.samples.slot_counters import SlotSum
from headrace.dataset.spec.config import DenseSlot, EventTime, MetaSlot, PipeSection, SourceSection, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.errors import PipeFailed
from headrace.dataset.stream.scripted_source import MemorySource, ScriptedRecord
from headrace.dataset.stream.source import Events, Segment
from headrace.keys import sign_of_text

SCHEMA = Schema.of(
    [
        SparseSlot(name="s"),
        SparseSlot(name="word", values="string"),
        DenseSlot(name="d", kind="dense", size=2),
        MetaSlot(name="label", kind="meta"),
    ]
)
ANSWER = pa.schema(
    [
        ("event", pa.int32()),
        ("error", pa.utf8()),
        ("s", pa.list_(pa.uint64())),
        ("word", pa.list_(pa.utf8())),
        ("d", pa.list_(pa.float32(), 2)),
        ("label", pa.float32()),
    ]
)
PRELUDE = """
import sys, os, time, json
import pyarrow as pa
answer_schema = pa.schema([("event", pa.int32()), ("error", pa.utf8()), ("s", pa.list_(pa.uint64())),
    ("word", pa.list_(pa.utf8())), ("d", pa.list_(pa.float32(), 2)), ("label", pa.float32())])
class Pipe:
    closed = False
    def read(self, n=-1): return sys.stdin.buffer.read(n)
    def close(self): pass
class Out:
    closed = False
    def write(self, b): return sys.stdout.buffer.write(b)
    def flush(self): sys.stdout.buffer.flush()
    def close(self): pass
def rows_of(request):
    rows = []
    for event, value in enumerate(request.column("event").to_pylist()):
        for row in json.loads(value):
            rows.append({"event": event, "error": None, "s": [], "word": [], "d": [0.0, 0.0], "label": 0.0} | row)
    return rows
def answer(request):
    return pa.RecordBatch.from_pylist(rows_of(request), schema=answer_schema)
def serve(answer=answer, num=10**9, schema=None):
    while sys.stdin.buffer.peek(1):
        with pa.ipc.open_stream(pa.PythonFile(Pipe(), mode="r")) as requests:
            with pa.ipc.new_stream(pa.PythonFile(Out(), mode="w"), schema or answer_schema) as writer:
                for n, request in enumerate(requests):
                    if n < num:
                        writer.write_batch(answer(request))
                        Out().flush()
        Out().flush()
"""


def script(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "pipe.py").write_text(PRELUDE + textwrap.dedent(text))
    return ("python", "pipe.py")


def event(*rows: str) -> bytes:
    return ("[" + ",".join(rows) + "]").encode()


EVENTS = [
    event('{"s": [1], "d": [0.5, 1], "label": 1}', '{"s": [2, 3]}'),
    event(),
    event('{"s": [4], "word": ["a", "é"]}'),
]


def read(folder, command, *, events=EVENTS, segments=None, config=None, letters=None, masks=None, **settings):
    pipe = PipeSection(
        command=command, protocol="arrow", **{"tries": 1, "deadline": 10.0, "batch_events": 2} | settings
    )
    source = MemorySource([events])
    reader = SegmentReader(source, pipe, SCHEMA, config or SourceSection(), letters, folder, masks=masks)
    tally = PassTally()
    try:
        blocks = list(reader.read(3, segments or [Segment("memory/0", 0, 0, len(events))], tally))
    finally:
        reader.close()
    return blocks, tally


def column(blocks, of) -> list:
    return [value for block in blocks for value in of(block).tolist()]


# -- what goes well


def test_samples_know_the_event_they_are_of(tmp_path):
    blocks, tally = read(tmp_path, script(tmp_path, "serve()"))
    assert column(blocks, lambda b: b.event_B) == [0, 0, 2]
    assert column(blocks, lambda b: b.sparse["s"].values_N) == [1, 2, 3, 4]
    assert column(blocks, lambda b: b.sparse["word"].values_N) == [sign_of_text(b"a"), sign_of_text("é".encode())]
    assert column(blocks, lambda b: b.dense["d"]) == [[0.5, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert column(blocks, lambda b: b.meta["label"]) == [1.0, 0.0, 0.0]
    assert (tally.num_events, tally.num_samples, tally.num_judged, tally.rejected) == (3, 3, 3, {})


def test_one_process_serves_segment_after_segment(tmp_path):
    command = script(tmp_path, "open('pids', 'a').write(f'{os.getpid()} '); serve()")
    segments = [Segment("memory/0", 0, n, n + 1) for n in range(3)]
    blocks, _ = read(tmp_path, command, segments=segments)
    assert column(blocks, lambda b: b.event_B) == [0, 0, 2]
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not Path(f"/proc/{pid}").exists()


def test_any_number_of_processes_gives_the_same_samples_in_the_same_order(tmp_path):
    events = [event(f'{{"s": [{n}]}}') for n in range(3000)]
    for processes in (1, 2):
        blocks, _ = read(tmp_path, script(tmp_path, "serve()"), events=events, processes=processes, batch_events=500)
        assert column(blocks, lambda b: b.sparse["s"].values_N) == list(range(3000))


def test_more_than_a_pipe_holds_flows_both_ways(tmp_path):
    events = [event(f'{{"s": {list(range(300))}}}') for _ in range(2000)]
    blocks, tally = read(tmp_path, script(tmp_path, "serve()"), events=events, batch_events=64)
    assert tally.num_samples == 2000


def test_requests_tell_what_is_known_of_an_event(tmp_path):
    command = script(
        tmp_path,
        """
        def check(request):
            (row,) = request.to_pylist()
            good = row["event"] == b"[]" and row["key"] == b"k" and row["topic"] == "memory"
            good = good and (row["partition"], row["offset"], row["timestamp_ms"]) == (0, 0, 1500)
            good = good and list(row["headers"]) == [("a", b"1")]
            rows = [{"event": 0, "error": None, "s": [int(good)], "word": [], "d": [0.0, 0.0], "label": 0.0}]
            return pa.RecordBatch.from_pylist(rows, schema=answer_schema)
        serve(check)
        """,
    )
    events = [ScriptedRecord(b"[]", 1500, b"k", (("a", b"1"),))]
    blocks, _ = read(tmp_path, command, events=events, config=SourceSection(event_time=EventTime(kind="record")))
    assert column(blocks, lambda b: b.sparse["s"].values_N) == [1]
    assert column(blocks, lambda b: b.time_s_B) == [1.5]


def test_an_event_with_a_line_feed_is_an_event_like_any_other(tmp_path):
    blocks, tally = read(tmp_path, script(tmp_path, "serve()"), events=[b'[\n{"s": [9]}]'])
    assert column(blocks, lambda b: b.sparse["s"].values_N) == [9] and not tally.rejected


# -- events that are rejected, one by one


def test_an_events_error_rejects_all_its_samples_and_no_others(tmp_path):
    events = [
        event('{"s": [1]}'),
        event('{"s": [2]}', '{"error": "no user"}'),
        event('{"s": [3]}', '{"s": [4], "d": [0, 1e999]}'),
        event('{"s": [5], "label": null}'),
        None,
        event('{"s": [6]}'),
        event('{"error": "not UTF-8: byte 3"}'),
    ]
    letters = DeadLetters(tmp_path / "dead", 0, PipeSection(command=("cat",)).dead_letters)
    blocks, tally = read(tmp_path, script(tmp_path, "serve()"), events=events, letters=letters)
    assert column(blocks, lambda b: b.sparse["s"].values_N) == [1, 6]
    assert column(blocks, lambda b: b.event_B) == [0, 5]
    assert tally.rejected == {
        Reason.GENERATOR: 1,
        Reason.NON_FINITE: 1,
        Reason.LABEL_MISSING: 1,
        Reason.NULL: 1,
        Reason.NOT_UTF8: 1,
    }
    assert tally.first_of[Reason.GENERATOR] == "memory/0 at 1: generator error: no user"
    assert "slot 'd'" in tally.first_of[Reason.NON_FINITE]
    assert tally.slots is not None and tally.slots.sums_SK[2, SlotSum.NON_FINITE] == 1


def test_a_label_may_be_absent_where_its_mask_is_0(tmp_path):
    schema = Schema.of([MetaSlot(name="label", kind="meta"), MetaSlot(name="mask", kind="meta")])
    answer = pa.RecordBatch.from_pydict(
        {"event": [0, 1], "error": [None, None], "label": [None, None], "mask": [0.0, 1.0]},
        pa.schema([("event", pa.int32()), ("error", pa.utf8()), ("label", pa.float32()), ("mask", pa.float32())]),
    )
    samples, bad = AnswerReader(schema, {"label": "mask"}).read(answer, np.arange(2), np.zeros(2))
    assert samples.event_B.tolist() == [0]
    assert [(row.event, row.reason) for row in bad] == [(1, Reason.LABEL_MISSING)]


def test_negative_signs_reject_their_event():
    schema = Schema.of([SparseSlot(name="s")])
    answer = pa.RecordBatch.from_pydict(
        {"event": [0, 1], "error": [None, None], "s": [[5, -1], [6]]},
        pa.schema([("event", pa.int32()), ("error", pa.utf8()), ("s", pa.list_(pa.int64()))]),
    )
    samples, bad = AnswerReader(schema, {}).read(answer, np.arange(2), np.zeros(2))
    assert samples.sparse["s"].values_N.tolist() == [6]
    assert [(row.event, row.reason) for row in bad] == [(0, Reason.UNPARSABLE)]


# -- answers that are none


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serve(num=1)", "answered 1 batches instead of 2"),
        ("serve(num=0)", "answered 0 batches instead of 2"),
        ("print('hello', flush=True); serve()", "not an Arrow stream: b'hello"),
        ("sys.exit(3)", r"ended with exit code 3"),
        ("sys.exit('the model is gone')", "the model is gone"),
        ("sys.stdin.buffer.peek(1); sys.exit(0)", "ended in the middle of a segment"),
        ("serve(lambda r: 1 / 0)", "ZeroDivisionError"),
        ("serve(lambda r: answer(r).drop_columns(['s']), schema=answer_schema.remove(2))", "without column 's'"),
        (
            "s = answer_schema.set(2, pa.field('s', pa.list_(pa.int32())))\n"
            "serve(lambda r: answer(r).cast(s), schema=s)",
            r"answers 's' as list<.*int32>; it must be list<.*uint64> or list<.*int64>",
        ),
        (
            "s = answer_schema.set(2, pa.field('s', pa.list_(pa.utf8())))\n"
            "serve(lambda r: answer(r).cast(s), schema=s)",
            r"it must be list<.*uint64> or list<.*int64>; for text, set values = \"string\" in the slot",
        ),
        (
            "s = answer_schema.append(pa.field('x', pa.int32()))\n"
            "serve(lambda r: pa.RecordBatch.from_pylist(rows_of(r), schema=s), schema=s)",
            "a column 'x' that is not a slot",
        ),
        (
            "serve(lambda r: pa.RecordBatch.from_pylist([x | {'event': 7} for x in rows_of(r)], schema=answer_schema))",
            "answers for event 7 of 2",
        ),
        (
            "serve(lambda r: pa.RecordBatch.from_pylist([x | {'event': 1 - i} for i, x in enumerate(rows_of(r))], "
            "schema=answer_schema))",
            "decreasing",
        ),
        ("time.sleep(600)", "neither read nor wrote"),
        ("serve(lambda r: time.sleep(600))", "neither read nor wrote"),
        (
            "sys.stdout.buffer.write(b'\\xff' * 4 + b'\\x10\\0\\0\\0' + b'x' * 400); Out().flush(); time.sleep(600)",
            "Arrow|wrote",
        ),
    ],
)
def test_an_answer_that_breaks_the_protocol_names_what_is_wrong(tmp_path, text, said):
    with pytest.raises(PipeFailed, match=said) as failed:
        read(tmp_path, script(tmp_path, text), deadline=1.0 if "sleep" in text else 30.0)
    assert "memory/0 [0, 3), try 1 of 1" in str(failed.value)


def test_a_try_that_failed_is_made_again_with_a_new_process(tmp_path):
    command = script(
        tmp_path, "first = not os.path.exists('second'); open('second', 'w'); serve(num=1 if first else 9)"
    )
    blocks, tally = read(tmp_path, command, tries=2)
    assert column(blocks, lambda b: b.event_B) == [0, 0, 2]
    assert tally.num_samples == 3


BROKEN = {
    "wrong offsets": (
        "b''.join(n.to_bytes(4, 'little') for n in (0, 1, 3))",
        "b''.join(n.to_bytes(4, 'little') for n in (0, 1, 1 << 20))",
    ),
    "a name that is no UTF-8": ("b'error'", "b'err\\xff\\xfe'"),
    "an unknown name that is no UTF-8": ("b'event'", "b'\\xc3(\\xe2\\x80'"),
}
"""What bytes of an answer become what others."""


@pytest.mark.parametrize("how", BROKEN)
def test_an_answer_of_broken_bytes_is_told_as_such(tmp_path, how):
    found, put = BROKEN[how]
    command = script(
        tmp_path,
        f"""
        def write_broken():
            requests = pa.ipc.open_stream(pa.PythonFile(Pipe(), mode="r"))
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, answer_schema) as writer:
                for request in requests:
                    writer.write_batch(answer(request))
            stream = sink.getvalue().to_pybytes()
            sys.stdout.buffer.write(stream.replace({found}, {put}, 1))
            Out().flush()
            sys.stdin.buffer.read()
        write_broken()
        """,
    )
    with pytest.raises(PipeFailed, match="broken Arrow stream"):
        read(tmp_path, command)


def test_columns_of_wrong_kind_are_named():
    with pytest.raises(BadAnswer, match="'event', 'error', 's', 'word', 'd', 'label'"):
        check_answer_schema(SCHEMA, pa.schema([]))
    check_answer_schema(SCHEMA, ANSWER)
    twice = ANSWER.append(pa.field("label", pa.float32()))
    with pytest.raises(BadAnswer, match="two columns 'label'"):
        check_answer_schema(SCHEMA, twice)


# -- pure parts


@given(st.lists(st.integers(0, 7), max_size=5), st.integers(1, 6))
def test_requests_do_not_depend_on_the_blocks_events_came_in(sizes, num):
    values = [str(n).encode() * (n % 3) for n in range(sum(sizes))]
    begins = np.cumsum([0, *sizes]).tolist()
    blocks = [Events.of(values[b:e], range(b, e)) for b, e in zip(begins[:-1], begins[1:], strict=True)]
    requests = list(rebatch(blocks, num))
    assert [r.value(i) for r in requests for i in range(len(r))] == values
    assert [position for r in requests for position in r.position_E.tolist()] == list(range(len(values)))
    assert [len(r) for r in requests] == [num] * (len(values) // num) + [len(values) % num] * bool(len(values) % num)


@given(st.lists(st.text(), max_size=6))
def test_hashing_of_texts_equals_its_twin(texts):
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    data = np.frombuffer(b"".join(raw) + b"\0", np.uint8)
    out = np.empty(len(raw), np.uint64)
    hash_texts(data, np.cumsum([0, *map(len, raw)]), out)
    assert out.tolist() == hash_texts_reference(raw).tolist()


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(1, 64))
def test_a_segment_is_split_without_gap_or_overlap(begin, size, parts):
    pieces = split_segment(Segment("p", 3, begin, begin + size), parts)
    assert pieces[0].begin == begin and pieces[-1].end == begin + size and len(pieces) <= parts
    assert all(a.end == b.begin for a, b in zip(pieces, pieces[1:], strict=False))
    assert pieces == split_segment(Segment("p", 3, begin, begin + size), parts)


def test_no_process_is_started_for_a_segment_without_events(tmp_path):
    command = script(tmp_path, "open('pids', 'w'); serve()")
    blocks, _ = read(tmp_path, command, events=[None, None])
    assert not blocks and not os.path.exists(tmp_path / "pids")
