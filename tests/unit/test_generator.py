"""Generators in Python: three ways to write one, two protocols, and a shell."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.formats.generator_answers import answer_of, answer_schema
from headrace.dataset.formats.generator_columns import GeneratorSlot, SampleReader, columns_of, lines_of
from headrace.dataset.generator import signs
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.pipe.command import PACKAGES
from headrace.dataset.samples.rejection import Reason
from headrace.dataset.spec.config import DenseSlot, MetaSlot, PipeSection, SourceSection, SparseSlot
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.scripted_source import MemorySource
from headrace.dataset.stream.source import Segment

SCHEMA = Schema.of(
    [
        SparseSlot(names=("user", "shown")),
        SparseSlot(name="word", values="string"),
        DenseSlot(name="d", kind="dense", size=2),
        MetaSlot(name="click", kind="meta"),
    ]
)
SLOTS = (
    GeneratorSlot("user", "sparse", "uint64", 0),
    GeneratorSlot("shown", "sparse", "uint64", 0),
    GeneratorSlot("word", "sparse", "string", 0),
    GeneratorSlot("d", "dense", "float", 2),
    GeneratorSlot("click", "meta", "float", 1),
)
SPEC = """
slots = [
    { names = ["user", "shown"] }, { name = "word", values = "string" },
    { name = "d", kind = "dense", size = 2 }, { name = "click", kind = "meta" },
]
"""
SIMPLE = """
    class Mine(DataGenerator):
        def generate(self, event):
            print("this must not spoil the samples")
            for shown in json.loads(event)["shown"]:
                yield {"user": json.loads(event)["user"], "shown": [shown, shown + 1], "word": ["a"],
                       "d": [0.5, shown], "click": [1]}
"""
COLUMNS = """
    class Mine(DataGenerator):
        def generate_columns(self, events):
            parsed = [json.loads(event) for event in events]
            count = [len(each["shown"]) for each in parsed]
            shown = np.array([s for each in parsed for s in each["shown"]], np.int64)
            return {
                "event": np.repeat(np.arange(len(parsed)), count),
                "user": np.repeat([each["user"] for each in parsed], count),
                "shown": np.stack([shown, shown + 1], 1),
                "word": (["a"] * len(shown), [1] * len(shown)),
                "d": np.stack([np.full(len(shown), 0.5), shown], 1),
                "click": np.ones(len(shown)),
            }
"""
PADDLE = """
    class Mine(DataGenerator):
        def generate_sample(self, line):
            print("this must not spoil the samples")
            def samples():
                print("nor this")
                assert line.endswith("\\n")
                for shown in json.loads(line)["shown"]:
                    yield [("user", [json.loads(line)["user"]]), ("shown", [shown, shown + 1]), ("word", ["a"]),
                           ("d", [0.5, shown]), ("click", [1])]
            return samples
"""
WAYS = {"generate": SIMPLE, "generate_columns": COLUMNS, "generate_sample": PADDLE}
EVENTS = [b'{"user": 7, "shown": [1, 2]}', b'{"user": 8, "shown": []}', b'{"user": 9, "shown": [3]}']


def write(folder: Path, text: str) -> tuple[str, ...]:
    head = "import json\nimport numpy as np\nfrom headrace.dataset.generator import DataGenerator\n"
    tail = "if __name__ == '__main__':\n    Mine().run()\n"
    (folder / "mine.py").write_text(head + textwrap.dedent(text) + tail)
    (folder / "job.toml").write_text(SPEC)
    return ("python", "mine.py")


def read(folder, command, protocol, events=EVENTS, **more):
    pipe = PipeSection(command=command, protocol=protocol, tries=1, deadline=20.0, **more)
    reader = SegmentReader(MemorySource([events]), pipe, SCHEMA, SourceSection(), None, folder)
    tally = PassTally()
    try:
        blocks = list(reader.read(0, [Segment("memory/0", 0, 0, len(events))], tally))
    finally:
        reader.close()
    return blocks, tally


def shell(folder: Path, *arguments: str, events=EVENTS) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "mine.py", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(PACKAGES)},
        input=b"".join(event + b"\n" for event in events),
        capture_output=True,
    )


def values(blocks, slot: str) -> list:
    return [value for block in blocks for value in block.sparse[slot].values_N.tolist()]


@pytest.mark.parametrize("protocol", ["arrow", "multislot"])
@pytest.mark.parametrize("way", WAYS)
def test_three_ways_to_write_it_give_the_same_samples_in_both_protocols(tmp_path, way, protocol):
    blocks, tally = read(tmp_path, write(tmp_path, WAYS[way]), protocol)
    assert not tally.rejected, tally.first_of
    assert values(blocks, "user") == [7, 7, 9]
    assert values(blocks, "shown") == [1, 2, 2, 3, 3, 4]
    assert [d for block in blocks for d in block.dense["d"].tolist()] == [[0.5, 1], [0.5, 2], [0.5, 3]]
    assert [click for block in blocks for click in block.meta["click"].tolist()] == [1, 1, 1]
    if protocol == "arrow":
        assert [event for block in blocks for event in block.event_B.tolist()] == [0, 0, 2]


@pytest.mark.parametrize("way", ["generate", "generate_columns"])
def test_in_a_shell_it_prints_multislot_text(tmp_path, way):
    write(tmp_path, WAYS[way])
    done = shell(tmp_path, "--spec", "job.toml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        b"1 7 2 1 2 1 a 2 0.5 1 1 1" if way == "generate" else b"1 7 2 1 2 1 a 2 0.5 1.0 1 1.0",
        b"1 7 2 2 3 1 a 2 0.5 2 1 1" if way == "generate" else b"1 7 2 2 3 1 a 2 0.5 2.0 1 1.0",
        b"1 9 2 3 4 1 a 2 0.5 3 1 1" if way == "generate" else b"1 9 2 3 4 1 a 2 0.5 3.0 1 1.0",
    ]
    if way == "generate":
        assert b"this must not spoil" in done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_in_a_shell_a_byte_order_mark_at_the_start_is_dropped(tmp_path, way):
    write(tmp_path, WAYS[way])
    plain, marked = (
        shell(tmp_path, "--spec", "job.toml", events=[mark + EVENTS[0], EVENTS[2]]) for mark in (b"", b"\xef\xbb\xbf")
    )
    assert marked.stdout == plain.stdout and plain.stdout.count(b"\n") == 3


def test_in_a_shell_it_asks_for_the_slots(tmp_path):
    write(tmp_path, SIMPLE)
    done = shell(tmp_path)
    assert done.returncode == 1 and b"--spec job.toml" in done.stderr


def test_in_a_shell_columns_refuse_a_slot_with_the_name_of_another_column(tmp_path):
    write(tmp_path, COLUMNS)
    (tmp_path / "job.toml").write_text(SPEC.replace('"click"', '"error"'))
    done = shell(tmp_path, "--spec", "job.toml")
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    assert b"error: slot 'error': answers in columns reserve this name; rename the slot" in done.stderr


@pytest.mark.parametrize("protocol", ["arrow", "multislot"])
@pytest.mark.parametrize("way", WAYS)
def test_an_event_that_raises_is_rejected_with_its_error_and_the_others_go_on(tmp_path, way, protocol):
    events = [EVENTS[0], b'{"shown": [5]}', b"not json", EVENTS[2]]
    blocks, tally = read(tmp_path, write(tmp_path, WAYS[way]), protocol, events)
    assert values(blocks, "user") == [7, 7, 9]
    assert tally.rejected == {Reason.GENERATOR: 2}
    assert "KeyError: 'user'" in tally.first_of[Reason.GENERATOR]


@pytest.mark.parametrize("protocol", ["arrow", "multislot"])
def test_a_line_that_is_no_text_is_rejected_by_a_generator_of_text(tmp_path, protocol):
    blocks, tally = read(tmp_path, write(tmp_path, PADDLE), protocol, [EVENTS[0], b'{"user": "\xff"}', EVENTS[2]])
    assert values(blocks, "user") == [7, 7, 9]
    assert tally.rejected == {Reason.NOT_UTF8: 1}


HALF_PAIRS = {
    "generate": """
    class Mine(DataGenerator):
        def generate(self, event):
            user, word = parts(event)
            yield {"user": [user], "word": [word], "d": [0, 0], "click": [0]}
    """,
    "generate_columns": """
    class Mine(DataGenerator):
        def generate_columns(self, events):
            users, words = map(list, zip(*map(parts, events)))
            num = len(events)
            return {"event": range(num), "user": users, "shown": users, "word": words, "d": np.zeros((num, 2)),
                    "click": np.zeros(num)}
    """,
    "generate_sample": """
    class Mine(DataGenerator):
        def generate_sample(self, line):
            user, word = parts(line)
            return lambda: [[("user", [user]), ("shown", []), ("word", [word]), ("d", [0, 0]), ("click", [0])]]
    """,
    "MultiSlotStringDataGenerator": """
    from headrace.dataset import paddle
    class Mine(paddle.MultiSlotStringDataGenerator):
        def generate_sample(self, line):
            user, word = parts(line)
            return lambda: [[("user", [str(user)]), ("shown", []), ("word", [word]), ("d", ["0", "0"]),
                             ("click", ["0"])]]
    """,
}
OF_TEXT = ("MultiSlotStringDataGenerator", "arrow")
"""Refused: columns hold numbers."""


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize(
    ("way", "protocol"),
    [(way, protocol) for way in HALF_PAIRS for protocol in ("arrow", "multislot") if (way, protocol) != OF_TEXT],
)
def test_half_a_surrogate_pair_rejects_its_event_alone_in_a_value_and_in_an_error(tmp_path, way, protocol, raised):
    text = f"""
    def parts(event):
        user, word = json.loads(event)
        if {raised} and "cut" in word:
            raise ValueError(word)
        return user, word
    {HALF_PAIRS[way]}"""
    events = [b'[5, "a"]', b'[6, "cut\\ud83d"]', b'[7, "cut\\udc80"]', b'[8, "b"]']
    blocks, tally = read(tmp_path, write(tmp_path, text), protocol, events)
    assert values(blocks, "user") == [5, 8]
    assert tally.rejected == {Reason.GENERATOR: 2}


@pytest.mark.parametrize("protocol", ["arrow", "multislot"])
@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ('{"user": [1], "nobody": [1], "d": [1, 2], "click": [1]}', "'nobody' is not a slot"),
        ('{"user": [1], "click": [1]}', "dense slot 'd' is missing"),
        ('{"d": [1, 2, 3], "click": [1]}', "3 values instead of 2"),
        ('{"d": [1, 2], "click": [1, 0]}', "meta slot 'click' has 2 values"),
    ],
)
def test_a_sample_that_does_not_fit_the_slots_rejects_its_event(tmp_path, protocol, sample, said):
    text = f"""
    class Mine(DataGenerator):
        def generate(self, event):
            yield {{"user": [5], "d": [0, 0], "click": [0]}}
            if event == b"bad":
                yield {sample}
    """
    blocks, tally = read(tmp_path, write(tmp_path, text), protocol, [b"fine", b"bad", b"fine"])
    assert values(blocks, "user") == [5, 5]
    assert sum(tally.rejected.values()) == 1
    assert said in next(iter(tally.first_of.values()))


def test_a_label_that_is_left_out_is_missing(tmp_path):
    text = """
    class Mine(DataGenerator):
        def generate(self, event):
            yield {"user": [5], "d": [0, 0]}
    """
    for protocol in ("arrow", "multislot"):
        _, tally = read(tmp_path, write(tmp_path, text), protocol, [b"x"])
        assert tally.rejected == {Reason.LABEL_MISSING: 1}


def test_wrong_columns_reject_their_events_with_the_reason(tmp_path):
    text = """
    class Mine(DataGenerator):
        def generate_columns(self, events):
            return {"event": [0], "user": [1, 2], "shown": [1], "word": ["x"], "d": np.zeros((1, 2)), "click": [0.0]}
    """
    _, tally = read(tmp_path, write(tmp_path, text), "arrow", [b"x"])
    assert "column 'user' has 2 rows, column 'event' 1" in tally.first_of[Reason.GENERATOR]


def test_columns_may_be_arrays_lists_tuples_or_arrow():
    import pyarrow as pa

    columns = {
        "event": np.array([0, 1]),
        "user": [1 << 63, 2],
        "shown": (np.array([5, 6, 7], np.uint64), np.array([3, 0])),
        "word": pa.array([["a"], []]),
        "d": [[1, 2], [3, 4]],
        "click": pa.chunked_array([[1.0], [0.0]]),
    }
    answer = answer_of(SLOTS, columns, answer_schema(SLOTS))
    assert answer.drop_columns(["error"]).to_pylist() == [
        {"event": 0, "user": [1 << 63], "shown": [5, 6, 7], "word": ["a"], "d": [1, 2], "click": 1},
        {"event": 1, "user": [2], "shown": [], "word": [], "d": [3, 4], "click": 0},
    ]


@pytest.mark.parametrize("users", [["ann", "bob"], (["ann", "bob"], [1, 1])])
def test_text_where_signs_are_expected_is_told_by_its_slot_and_what_to_set(users):
    columns = {
        "event": [0, 1],
        "user": users,
        "shown": [1, 2],
        "word": ["a", "b"],
        "d": [[1, 2]] * 2,
        "click": [1.0, 0.0],
    }
    with pytest.raises(ValueError, match=r"^slot 'user': .*; for text, set values = \"string\" in the slot"):
        answer_of(SLOTS, columns, answer_schema(SLOTS))
    with pytest.raises(ValueError, match=r"'ann' is not a sign: .*values = \"string\""):
        signs(["ann"])
    with pytest.raises(ValueError, match=r"^slot 'click': [^;]*$"):
        answer_of(SLOTS, columns | {"user": [1, 2], "click": ["yes", "no"]}, answer_schema(SLOTS))


def line_of(sample):
    return lines_of(SLOTS, [SampleReader(SLOTS, drop=False)(sample)])[0]


@pytest.mark.parametrize(("text", "said"), [("", "empty"), ("two words", "blanks"), ("tab\there", "blanks")])
def test_text_that_multislot_cannot_carry_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        line_of({"word": [text], "d": [0, 0], "click": 1})


def test_numpy_values_are_written_as_numbers():
    sample = {"user": np.int64(3), "shown": np.array([4, 5]), "d": (np.float32(0.5), True), "click": np.float64(1)}
    assert line_of(sample) == "1 3 2 4 5 0 2 0.5 1 1 1.0"


def test_weights_of_signs_go_through(tmp_path):
    text = """
    class Mine(DataGenerator):
        def generate(self, event):
            yield {"s": [5, 6], "s.weight": [0.5, 2]}
    """
    schema = Schema.of([SparseSlot(name="s", weighted=True)])
    pipe = PipeSection(command=write(tmp_path, text), protocol="arrow", tries=1)
    reader = SegmentReader(MemorySource([[b"x"]]), pipe, schema, SourceSection(), None, tmp_path)
    (samples,) = reader.read(0, [Segment("memory/0", 0, 0, 1)], PassTally())
    reader.close()
    assert samples.sparse["s"].weights_N.tolist() == [0.5, 2.0]


# -- samples as columns: what `generate` gives is what each sample says, however it says it

DENSE = st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=2) | st.just(np.float32([0.5, 2]))
VALUES = {
    "user": st.none() | st.integers(0, 2**64 - 1) | st.lists(st.integers(0, 2**64 - 1), max_size=3),
    "shown": st.lists(st.integers(0, 99), max_size=2).map(tuple) | st.lists(st.integers(0, 99)).map(np.array),
    "word": st.sampled_from(["a", "bc", ["a", "b"], [], None]),
    "click": st.sampled_from([0, 1.0, True, [1], None, np.float32(0.5)]),
}


def plain(value) -> list:
    """A slot's values, one way for all."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


@settings(max_examples=60)
@given(st.lists(st.fixed_dictionaries({"d": DENSE}, optional=VALUES), max_size=6))
def test_columns_and_lines_hold_what_the_samples_say(samples):
    rows = list(map(SampleReader(SLOTS, drop=False), samples))
    answer = answer_of(SLOTS, columns_of(SLOTS, rows, list(range(len(rows)))), answer_schema(SLOTS)).to_pylist()
    for sample, row in zip(samples, answer, strict=True):
        for slot in SLOTS[:4]:
            assert row[slot.name] == plain(sample.get(slot.name))
        assert plain(row["click"]) == plain(sample.get("click"))
    for sample, line in zip(samples, lines_of(SLOTS, rows), strict=True):
        found = [plain(sample.get(slot.name)) for slot in SLOTS]
        words = [word for each in found for word in (len(each), *each)]
        texts = [str(int(w)) if isinstance(w, bool) else w if isinstance(w, str) else repr(w) for w in words]
        assert line.split(" ") == texts


def test_a_generator_may_yield_one_mapping_again_and_again(tmp_path):
    text = """
    class Mine(DataGenerator):
        def generate(self, event):
            sample, shown = {"user": [5], "d": [0, 0], "click": [0]}, [0]
            for sample["user"], shown[0] in ((1, 2), (3, 4)):
                sample["shown"] = shown
                yield sample
    """
    for protocol in ("arrow", "multislot"):
        blocks, _ = read(tmp_path, write(tmp_path, text), protocol, [b"x"])
        assert (values(blocks, "user"), values(blocks, "shown")) == ([1, 3], [2, 4])


# -- one generator for several specs

MORE = """
    class Mine(DataGenerator):
        def generate_columns(self, events):
            names = [slot.name for slot in self.job_slots]
            return {"event": range(len(events)), "user": [len(names)] * len(events), "shown": [7] * len(events),
                    "word": ["a"] * len(events), "d": [[0, 0]] * len(events), "click": [1.0] * len(events),
                    "tomorrow": [1] * len(events)}
"""
MORE_EACH = """
    class Mine(DataGenerator):
        def __init__(self):
            super().__init__()
            self.num = len(self.job_slots)
        def generate(self, event):
            yield {"user": self.num, "shown": 7, "word": "a", "d": [0, 0], "click": 1, "tomorrow": [1]}
"""
MORE_OF_PADDLES = """
    class Mine(DataGenerator):
        def generate_sample(self, line):
            return lambda: [[("user", [len(self.job_slots)]), ("shown", [7]), ("word", ["a"]), ("d", [0, 0]),
                             ("click", [1]), ("tomorrow", [1])]]
"""


@pytest.mark.parametrize("protocol", ["arrow", "multislot"])
@pytest.mark.parametrize("text", [MORE, MORE_EACH, MORE_OF_PADDLES])
def test_a_generator_asks_for_the_slots_and_its_other_columns_may_be_dropped(tmp_path, text, protocol):
    command = write(tmp_path, text)
    blocks, tally = read(tmp_path, command, protocol, [b"x"], extra="drop")
    assert not tally.rejected and values(blocks, "user") == [5] and values(blocks, "shown") == [7]
    if text == MORE_OF_PADDLES and protocol == "multislot":
        return  # as with Paddle, the process ends where a sample does not fit
    _, tally = read(tmp_path, command, protocol, [b"x"])
    assert "'tomorrow' is not a slot; pipe.extra" in tally.first_of[Reason.GENERATOR]


def test_in_a_shell_slots_and_what_is_dropped_are_those_of_the_spec(tmp_path):
    write(tmp_path, MORE_EACH)
    (tmp_path / "job.toml").write_text(SPEC + '[pipe]\ncommand = ["python", "mine.py"]\nextra = "drop"\n')
    assert shell(tmp_path, "--spec", "job.toml", events=[b"x"]).stdout == b"1 5 1 7 1 a 2 0 0 1 1\n"


# -- errors are told once, then counted


@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_told_with_its_traceback_once_and_then_counted(tmp_path, way):
    write(tmp_path, WAYS[way])
    done = shell(tmp_path, "--spec", "job.toml", events=[b"{}"] * 150)
    told = done.stderr.decode().replace("this must not spoil the samples\n", "").replace("nor this\n", "")
    assert done.stdout.count(b"!KeyError") == 150
    assert told.count("Traceback") == 1 and len(told.splitlines()) < 12
    assert "/dataset/" not in told, "its frames are the user's own"
    assert "100 events are rejected so far with KeyError at " in told and "150" not in told


def test_the_slots_are_listed_once_and_not_in_each_rejection(tmp_path):
    write(tmp_path, MORE_EACH)
    done = shell(tmp_path, "--spec", "job.toml", events=[b"x"] * 20)
    line = b"!ValueError: 'tomorrow' is not a slot; pipe.extra = \"drop\" ignores such columns\n"
    assert done.stdout == line * 20
    assert done.stderr.count(b"the spec has slots user, shown, word, d, click") == 1
