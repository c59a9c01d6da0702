"""Paddle's data generators, with their import changed."""

import gzip
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.dataset import paddle as fleet
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.pipe.command import PACKAGES
from headrace.dataset.spec.config import PipeSection, SourceSection
from headrace.dataset.spec.schema import Schema
from headrace.dataset.stream.scripted_source import MemorySource
from headrace.dataset.stream.source import Segment
from headrace.service.spec.job import load_job

DATA = Path(os.environ.get("HEADRACE_DATA", PACKAGES.parent / "shared" / "data"))
READER, CRITEO = DATA.parent / "compat" / "paddle_reader.py", DATA / "criteo" / "criteo_80k.txt.gz"
PAGE = (PACKAGES / "docs" / "coming-from" / "paddle.md").read_text()
NUM_LINES = 200


class Words(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def samples():
            words = [int(word) for word in line.split()]
            yield [("words", words), ("label", [len(words) % 2])]

        return samples


class Texts(fleet.MultiSlotStringDataGenerator):
    def generate_sample(self, line):
        def samples():
            yield zip(["text", "none"], [line.split(), []], strict=True)

        return samples


def printed(generator, text: str, monkeypatch, capfd) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    generator.run_from_stdin()
    return capfd.readouterr().out.splitlines()


def test_numbers_are_printed_as_count_and_values(monkeypatch, capfd):
    assert printed(Words(), "3 4\n5\n", monkeypatch, capfd) == ["2 3 4 1 0", "1 5 1 1"]


def test_texts_are_printed_as_they_are_and_an_empty_slot_as_0(monkeypatch, capfd):
    assert printed(Texts(), "a b\n\n", monkeypatch, capfd) == ["2 a b 0", "0 0"]


def test_generate_batch_may_reorder_and_drop_within_a_group(monkeypatch, capfd):
    class Reversed(Words):
        def generate_batch(self, samples):
            return lambda: reversed([sample for sample in samples if sample[0][1] != [0]])

    generator = Reversed()
    generator.set_batch(3)
    assert printed(generator, "1\n0\n2\n3\n4\n", monkeypatch, capfd) == ["1 2 1 1", "1 1 1 1", "1 4 1 1", "1 3 1 1"]


def test_run_from_memory_prints_what_the_generator_makes_of_nothing(capfd):
    class Two(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line):
            assert line is None
            return lambda: iter([[("x", [1])], None, [("x", [2.5])]])

    Two().run_from_memory()
    assert capfd.readouterr().out == "1 1\n1 2.5\n"


NOISY = """
import os
from headrace.dataset import paddle as fleet

class Noisy(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line):
        print("printed in the call")
        os.system("echo printed by a child")

        def samples():
            print("printed while samples are made")
            yield [("x", [1 if line is None else int(line)])]

        return samples

    def generate_batch(self, samples):
        print("printed for a group")
        return super().generate_batch(samples)

print("before")
Noisy().run_from_stdin()
Noisy().run_from_memory()
print("after")
"""


def test_what_the_generator_prints_goes_to_stderr_while_it_runs(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    done = subprocess.run(
        [sys.executable, "noisy.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PACKAGES), "PATH": os.environ["PATH"]},
        input=b"3\nx\n5\n",
        capture_output=True,
        check=True,
    )
    samples = done.stdout.decode().splitlines()
    assert samples.pop(1).startswith("!ValueError: invalid literal")
    assert samples == ["before", "1 3", "1 5", "1 1", "after"]
    printed = done.stderr.decode()
    assert printed.count("printed in the call") == printed.count("printed by a child") == 4
    assert printed.count("printed while samples are made") == 4 and printed.count("printed for a group") == 2


def test_a_line_that_raises_is_told_and_the_others_go_on(monkeypatch, capfd):
    lines = printed(Words(), "3\nx\n5\n", monkeypatch, capfd)
    assert lines[0].startswith("!ValueError: invalid literal") and lines[1:] == ["1 3 1 1", "1 5 1 1"]


def test_slots_that_the_spec_lacks_may_be_dropped(monkeypatch, capfd):
    monkeypatch.setenv("HEADRACE_SLOTS", '[["label","meta","float",1]]')
    assert printed(Words(), "3 4\n", monkeypatch, capfd) == ["2 3 4 1 0"]
    monkeypatch.setenv("HEADRACE_EXTRA", "drop")
    assert printed(Words(), "3 4\n", monkeypatch, capfd) == ["1 0"]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ([("words", ["text"])], "neither int nor float"),
        (["words"], "a sample is a list of"),
    ],
)
def test_a_sample_of_the_wrong_form_is_an_error(sample, said):
    with pytest.raises(ValueError, match=said):
        fleet.MultiSlotDataGenerator()._gen_str(sample)


def test_the_first_sample_fixes_the_slots():
    generator = fleet.MultiSlotDataGenerator()
    generator._gen_str([("a", [1])])
    with pytest.raises(ValueError, match="those of the first sample were"):
        generator._gen_str([("b", [1])])


@pytest.fixture
def reader_script(tmp_path) -> Path:
    """The generator of Paddle's own documentation, its two imports replaced as the page for users of Paddle says."""
    for path in (READER, CRITEO):
        if not path.is_file():
            pytest.skip(f"{path} is not there; HEADRACE_DATA names the folder of the data sets")
    text = READER.read_text()
    old = "import paddle\nimport paddle.distributed.fleet as fleet\n"
    assert old in text
    new = re.search(r"^from headrace.* import paddle as fleet", PAGE, re.MULTILINE)[0]
    (tmp_path / "reader.py").write_text(text.replace(old, f"{new}\n"))
    return tmp_path / "reader.py"


def criteo_lines() -> list[bytes]:
    with gzip.open(CRITEO) as lines:
        return [line.rstrip(b"\n") for line, _ in zip(lines, range(NUM_LINES), strict=False)]


@pytest.mark.data
def test_the_documented_generator_runs_in_a_shell_and_prints_the_documented_lines(reader_script):
    done = subprocess.run(
        [sys.executable, reader_script.name],
        cwd=reader_script.parent,
        env={"PYTHONPATH": str(PACKAGES), "PYTHONHASHSEED": "0"},
        input=b"\n".join(criteo_lines()) + b"\n",
        capture_output=True,
        check=True,
    )
    lines = done.stdout.decode().splitlines()
    assert len(lines) == NUM_LINES
    for line in lines:
        words = line.split(" ")
        assert words[0] == "13" and words[14::2][:27] == ["1"] * 27 and len(words) == 14 + 2 * 27


@pytest.mark.data
@pytest.mark.parametrize("protocol", ["multislot", "arrow"])
def test_the_documented_generator_is_a_pipe_command(reader_script, protocol):
    (reader_script.parent / "job.toml").write_text(re.search(r'```toml title="job.toml"\n(.*?)```', PAGE, re.DOTALL)[1])
    schema = Schema.of(load_job(reader_script.parent / "job.toml").spec.slots)
    pipe = PipeSection(command=("python", "reader.py"), protocol=protocol, tries=1)
    lines = criteo_lines()
    reader = SegmentReader(MemorySource([lines]), pipe, schema, SourceSection(), None, reader_script.parent)
    tally = PassTally()
    blocks = list(reader.read(0, [Segment("memory/0", 0, 0, NUM_LINES)], tally))
    reader.close()
    assert (tally.num_samples, tally.rejected) == (NUM_LINES, {})
    labels = [label for block in blocks for label in block.meta["label"].tolist()]
    assert labels == [float(line.split(b"\t")[0]) for line in lines]
    assert all((block.sparse["C7"].values_N < 1_000_001).all() for block in blocks)
