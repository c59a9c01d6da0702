"""The event times of a file by position."""

import json
from bisect import bisect_left
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.sources.files import FilesSource, FileStream
from headrace.dataset.sources.line_file import LineFile
from headrace.dataset.sources.time_index import TimeIndex
from headrace.dataset.spec.config import EventTime
from headrace.deadline import Deadline

FIELD = EventTime(field="ts", unit="ms")
TIMES = st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=40)


def write(path, times, mode="w"):
    with path.open(mode) as file:
        file.writelines(json.dumps({"n": n} | ({} if t is None else {"ts": t})) + "\n" for n, t in enumerate(times))
    return path


@settings(deadline=None, max_examples=40)
@given(TIMES, TIMES, st.sampled_from([4, 1 << 20]))
def test_a_position_is_that_of_the_first_event_with_the_time_or_a_later_one(tmp_path_factory, times, more, max_times):
    path = write(tmp_path_factory.mktemp("times") / "events.jsonl", times)
    file = LineFile(path, growing=True, max_line_bytes=1 << 20)
    index = TimeIndex(LineFile(path, growing=True, max_line_bytes=1 << 20), FIELD, max_times)
    index.extend(file.count(), file.identity)
    write(path, more, "a")
    index.extend(file.count(), file.identity)
    reached = list(accumulate((-1 if t is None else t for t in (*times, *more)), max))
    for asked in range(52):
        at = bisect_left(reached, asked)
        found = index.position(asked)
        if max_times > 4:
            assert found == (at if at < len(reached) else None)
        else:
            step = 1
            while len(range(0, len(reached), step)) > 4:
                step *= 2
            assert found is None or (found % step == 0 and at <= found)


@pytest.mark.parametrize("kind", ["lines", "parquet"])
def test_files_tell_positions_by_the_field_of_their_events(tmp_path, kind):
    events = [{"n": n, "meta": {"ts": 1_700_000_000 + 60 * n}} for n in range(100)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(events), tmp_path / "events.x")
    else:
        (tmp_path / "events.x").write_text("".join(json.dumps(event) + "\n" for event in events))
    timed = FilesSource(kind="files", paths=("events.x",), format=kind, event_time=EventTime(field="meta.ts"))
    source = FileStream(timed, tmp_path)
    source.partitions(Deadline.after(10))
    ask = lambda ms: source.positions_at({"events.x": ms}, Deadline.after(10))  # noqa: E731
    assert ask(0) == {"events.x": 0} and ask(1_700_000_059_000) == {"events.x": 1} and ask(1 << 60) == {}
    source.close()
    untimed = FileStream(FilesSource(kind="files", paths=("events.x",), format=kind), tmp_path)
    assert untimed.positions_at({}, Deadline.after(10)) is None
