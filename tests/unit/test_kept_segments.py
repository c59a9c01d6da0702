"""Samples kept in memory and in files are those of the pipe, with all that is counted; bounds, and damaged files."""

import base64
import fcntl
import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.kept_files import KeptFiles, drop_kept
from headrace.dataset.loader.kept_segments import MemorySegments
from headrace.dataset.loader.pass_shuffle import RankShare
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.samples.batch import Ragged, Samples
from headrace.dataset.samples.sample_columns import columns_of, file_of, samples_of
from headrace.dataset.sources.repeated import RepeatedSource
from headrace.dataset.spec.config import ColumnsPipe, DeadLettersSection, EventTime, SourceSection
from headrace.dataset.spec.epochs import in_epoch
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.spec.stream_spec import SlotsSpec
from headrace.dataset.stream.scripted_source import MemorySource
from headrace.dataset.stream.source import Segment
from headrace.keys import sign_of_text

SLOTS = [
    {"name": "a"},
    {"name": "tags", "values": "string"},
    {"name": "x", "kind": "dense"},
    {"name": "click", "kind": "meta"},
    {"name": "who", "kind": "meta", "type": "string"},
]
PIPE = ColumnsPipe(kind="columns", batch_events=4)
SECTION = SourceSection(event_time=EventTime(field="ts"), epochs=2)
EVENT = st.one_of(
    st.just(b"broken"),
    st.fixed_dictionaries(
        {
            "a": st.integers(0, 9),
            "tags": st.lists(st.sampled_from(["p", "q", "é"]), max_size=3),
            "x": st.integers(-5, 5),
            "click": st.integers(0, 1),
            "who": st.text("xyz", min_size=1, max_size=3),
            "ts": st.integers(0, 10**6),
        }
    ).map(lambda event: json.dumps(event).encode()),
)


def schema_of(*names):
    return Schema.of(validate(SlotsSpec, {"slots": [each for each in SLOTS if each["name"] in names]}).slots)


WHOLE = schema_of("a", "tags", "x", "click", "who")


class Reads:
    """Reads the same events again and again, and counts the reads of the source."""

    def __init__(self, events, kept, folder, schema=WHOLE, shuffles=None, **options):
        self.source = MemorySource([events])
        self.letters = DeadLetters(folder, 0, DeadLettersSection())
        self.reader = SegmentReader(
            RepeatedSource(self.source, 2), PIPE, schema, SECTION, self.letters, folder, kept=kept, shuffles=shuffles,
            **options,
        )  # fmt: skip
        self.num = len(events)

    def epoch(self, number, cut=7):
        """The samples of passes of `cut` events, as plain values, with their tallies."""
        found = []
        for begin in range(0, self.num, cut):
            tally = PassTally()
            segment = Segment(in_epoch("memory/0", number), 0, begin, min(begin + cut, self.num))
            blocks = [plain(block) for block in self.reader.read(begin, [segment], tally)]
            path = self.letters.publish(begin)
            letters = None if path is None else path.read_text()
            counted = tally.num_events, tally.num_samples, tally.rejected, tally.num_dead_letters, tally.num_judged
            slots = tally.slots
            sums = slots.sums_SK.tolist(), slots.registers_SR.sum(axis=1).tolist(), slots.buckets_SK.tolist()
            found.append(([row for block in blocks for row in block], counted, sums, letters))
        return found


def plain(samples):
    """A row for each sample."""
    return [
        (
            {name: samples.slice(b, b + 1).sparse[name].values_N.tolist() for name in samples.sparse},
            {name: column[b].tolist() for name, column in samples.dense.items()},
            {name: str(column[b]) for name, column in samples.meta.items()},
            int(samples.event_B[b]),
            repr(float(samples.time_s_B[b])),
        )
        for b in range(len(samples))
    ]


def files_in(folder, schema=WHOLE, max_bytes=1 << 20):
    return KeptFiles(folder, max_bytes, PIPE, schema, SourceSet.of(SECTION), {})


@settings(deadline=None, max_examples=15)
@given(st.lists(EVENT, min_size=1, max_size=20), st.booleans(), st.booleans(), st.sampled_from([1, 3_000, 1 << 30]))
def test_what_is_kept_is_what_the_pipe_gives_whatever_memory_it_has(
    tmp_path_factory, events, in_files, shuffled, memory
):
    folder = tmp_path_factory.mktemp("kept")
    shuffles = RankShare(3, 0, 1) if shuffled else None
    kept = files_in(folder / "kept") if in_files else MemorySegments(1 << 20)
    reads = Reads(events, kept, folder, shuffles=shuffles, memory=memory)
    fresh = Reads(events, None, folder, shuffles=shuffles)
    for number in (1, 2):
        assert reads.epoch(number) == fresh.epoch(number)
    if not in_files or b"broken" not in events:
        assert 2 * reads.source.num_reads == fresh.source.num_reads, "the second epoch reads nothing"
    if not in_files:
        assert kept.num_bytes == 0, "the last epoch gives the memory back"
    if shuffled and len(events) > 12:
        assert reads.epoch(2) != Reads(events, None, folder).epoch(2)


def events_of(num):
    return [
        json.dumps({"a": n, "tags": ["p"], "x": n, "click": n % 2, "who": "me", "ts": n}).encode() for n in range(num)
    ]


def test_beyond_the_bound_samples_go_through_the_pipe_in_each_epoch(tmp_path, caplog):
    events = events_of(21)
    one = MemorySegments(1 << 20)
    Reads(events[:7], one, tmp_path).epoch(1)
    reads, fresh = Reads(events, MemorySegments(one.num_bytes + 10), tmp_path), Reads(events, None, tmp_path)
    for number in (1, 2):
        assert reads.epoch(number) == fresh.epoch(number)
    assert reads.source.num_reads == 5 and fresh.source.num_reads == 6
    assert caplog.text.count("passes.keep is reached") == 1


def test_another_cut_is_read_again(tmp_path):
    reads, fresh = Reads(events_of(20), MemorySegments(1 << 20), tmp_path), Reads(events_of(20), None, tmp_path)
    reads.epoch(1)
    assert reads.epoch(2, cut=6) == fresh.epoch(2, cut=6)


def test_a_segment_of_which_a_beginning_is_kept_goes_through_the_pipe_from_there(tmp_path):
    events = events_of(7)
    Reads(events, files_in(tmp_path / "kept"), tmp_path, memory=1).epoch(1)
    parts = sorted((tmp_path / "kept").glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns)
    assert len(parts) == 7, "an event each"
    for path in parts[4:]:
        path.unlink()
    reads = Reads(events, files_in(tmp_path / "kept"), tmp_path)
    assert reads.epoch(1) == Reads(events, None, tmp_path).epoch(1) and reads.source.num_reads == 1
    again = Reads(events, files_in(tmp_path / "kept"), tmp_path)
    assert again.epoch(1) == reads.epoch(1) and again.source.num_reads == 0


def test_a_trainer_that_has_a_part_of_a_shuffled_pass_keeps_nothing(tmp_path):
    kept = MemorySegments(1 << 20)
    reads = Reads(events_of(20), kept, tmp_path, shuffles=RankShare(3, 1, 2))
    assert sum(len(rows) for rows, *_ in reads.epoch(1)) in range(8, 13)
    assert kept.num_bytes == 0


def test_files_serve_a_job_with_fewer_slots_and_no_other_pipe(tmp_path):
    events = events_of(9)
    Reads(events, files_in(tmp_path / "kept"), tmp_path).epoch(1)
    fewer = schema_of("a", "click")
    reads = Reads(events, files_in(tmp_path / "kept", fewer), tmp_path, fewer)
    assert reads.epoch(1) == Reads(events, None, tmp_path, fewer).epoch(1)
    assert reads.source.num_reads == 0
    other = KeptFiles(
        tmp_path / "kept", 1 << 20, PIPE.model_copy(update={"explode": "tags"}), WHOLE, SourceSet.of(SECTION), {}
    )
    again = Reads(events, other, tmp_path)
    again.epoch(1)
    assert again.source.num_reads == 2


@pytest.mark.parametrize("damage", [b"", b"ARROW1 and then nothing", None])
def test_a_damaged_file_counts_as_absent(tmp_path, damage):
    events = events_of(5)
    Reads(events, files_in(tmp_path / "kept"), tmp_path).epoch(1)
    (path,) = (tmp_path / "kept").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    reads = Reads(events, files_in(tmp_path / "kept"), tmp_path)
    assert reads.epoch(1) == Reads(events, None, tmp_path).epoch(1) and reads.source.num_reads == 1


def test_a_file_whose_lists_end_outside_of_their_values_counts_as_absent(tmp_path):
    events = events_of(5)
    Reads(events, files_in(tmp_path / "kept"), tmp_path).epoch(1)
    (path,) = (tmp_path / "kept").glob("*.arrow")
    offsets = np.arange(6, dtype=np.int64)
    wrong = np.array([*offsets[:-1], 1 << 40])
    assert path.read_bytes().count(offsets.tobytes()) >= 1
    path.write_bytes(path.read_bytes().replace(offsets.tobytes(), wrong.tobytes()))
    reads = Reads(events, files_in(tmp_path / "kept"), tmp_path)
    assert reads.epoch(1) == Reads(events, None, tmp_path).epoch(1) and reads.source.num_reads == 1


def test_a_folder_at_its_bound_takes_no_more_files(tmp_path):
    reads = Reads(events_of(14), files_in(tmp_path / "kept", max_bytes=100), tmp_path)
    assert reads.epoch(1) == Reads(events_of(14), None, tmp_path).epoch(1)
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("offsets", [[0, 2, 3], [0, 1, 2], [1, 2, 3]])
def test_texts_and_weights_come_back(narrow, offsets):
    weighted = Schema.of(validate(SlotsSpec, {"slots": [{"name": "w", "weighted": True}]}).slots)
    column = Ragged(np.array([1, 2, 3], np.uint64), np.array(offsets), np.array([0.5, 1, 2], np.float32))
    samples = Samples({"w": column}, {}, {}, np.array([4, 5]), np.full(2, np.nan))
    data = file_of(columns_of(samples, narrow=narrow), {}, packed=narrow)
    found = samples_of(pa.ipc.open_file(pa.py_buffer(data)).get_batch(0), weighted).sparse["w"]
    lists = list(itertools.pairwise(offsets))
    assert [found.weights_N[begin:end].tolist() for begin, end in itertools.pairwise(found.offset_B1)] == [
        column.weights_N[begin:end].tolist() for begin, end in lists
    ]
    assert [found.values_N[begin:end].tolist() for begin, end in itertools.pairwise(found.offset_B1)] == [
        column.values_N[begin:end].tolist() for begin, end in lists
    ]


def test_files_hold_no_bytes_of_rejected_events_and_letters_do(tmp_path):
    events = [*events_of(5), b'{"a": "ada"}', b"broken by ada"]
    Reads(events, files_in(tmp_path / "kept"), tmp_path).epoch(1)
    (path,) = (tmp_path / "kept").iterdir()
    assert not any(text in path.read_bytes() for text in (b"ada", base64.b64encode(events[-1])))
    reads, fresh = Reads(events, files_in(tmp_path / "kept"), tmp_path), Reads(events, None, tmp_path)
    assert reads.epoch(1) == fresh.epoch(1) and "ada" in base64.b64decode(json.loads(
        fresh.epoch(1)[0][-1].splitlines()[-1])["bytes"]).decode()  # fmt: skip
    assert reads.source.num_reads == 1, "the rejected events alone"
    reads.source.drop_before(0, 7)
    assert [json.loads(line)["bytes"] for line in reads.epoch(1)[0][-1].splitlines()] == [None, None]


def test_a_file_of_an_earlier_program_with_such_bytes_is_written_anew(tmp_path, monkeypatch):
    events = [*events_of(3), b"broken"]
    with monkeypatch.context() as patched:
        earlier = lambda each: [each.partition, each.offset, each.reason.value, "why", "YnJva2Vu", None]  # noqa: E731
        patched.setattr("headrace.dataset.loader.kept_files._rejection_message", earlier)
        Reads(events, files_in(tmp_path / "kept"), tmp_path).epoch(1)
    (path,) = (tmp_path / "kept").iterdir()
    assert b"YnJva2Vu" in path.read_bytes()
    Reads(events, files_in(tmp_path / "kept"), tmp_path).epoch(1)
    assert b"YnJva2Vu" not in path.read_bytes() and [path] == list((tmp_path / "kept").iterdir())


def test_files_that_a_dead_process_left_half_written_are_removed(tmp_path):
    kept = tmp_path / "kept"
    Reads(events_of(3), files_in(kept), tmp_path).epoch(1)
    (path,) = kept.iterdir()
    left, unfinished, other = path.with_suffix(".4711"), path.with_suffix(".4711.new"), kept / "notes.txt"
    for each in (left, unfinished, other):
        each.write_bytes(b"half")
    with path.with_suffix(".0a1b2c3d").open("wb") as writing:
        fcntl.flock(writing.fileno(), fcntl.LOCK_EX)
        files_in(kept)
        assert sorted(kept.iterdir()) == sorted([path, path.with_suffix(".0a1b2c3d"), other])
    stays = path.with_suffix(".11111111")
    stays.mkdir()  # it cannot be removed, like a file of another user
    files_in(kept)
    assert sorted(kept.iterdir()) == sorted([path, stays, other])


def test_files_with_a_forgotten_value_are_deleted(tmp_path):
    kept = tmp_path / "kept"
    events = [
        json.dumps({"a": n, "tags": ["p"], "x": n, "click": 5, "who": "ada"[:n] or "x", "ts": n}) for n in range(4)
    ]
    Reads([event.encode() for event in events], files_in(kept), tmp_path).epoch(1, cut=1)
    assert len(list(kept.iterdir())) == 4
    assert drop_kept(kept, "nobody", 77) == 0 and len(list(kept.iterdir())) == 4
    assert drop_kept(kept, "2", 2) == 1, "a sign"
    assert drop_kept(kept, "ada", 99) == 1, "a text of a meta slot"
    (kept / f"{'0' * 40}.arrow").write_bytes(b"damaged")
    assert drop_kept(kept, "nobody", 77) == 1 and len(list(kept.iterdir())) == 2
    assert drop_kept(kept, "p", sign_of_text(b"p")) == 2
