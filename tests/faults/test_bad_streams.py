"""What a user sees of bad input: the exit code, the message, and what is left in the store.

Every way in which one event, one pipe or one option is bad is held by the unit tests; here is what becomes of it.
"""

import base64
import json

import pytest

from headrace.lifecycle import ExitCode
from tests.integration.stream_job import SPEC, headrace, write_job
from tests.jobs import changed

NUM_LINES = 400
ONE_PASS = "passes.max_events=2000"


@pytest.fixture
def job(tmp_path):
    """A job on one file of NUM_LINES good lines."""
    return write_job(tmp_path, num_parts=1)


def pipe(job, text):
    """Have the job's events go through a Python program."""
    (job.parent / "pipe.py").write_text(f"import sys, time\n{text}\n")
    return 'pipe.command=["python", "pipe.py"]'


def letters(job):
    """All dead letters of a run, by their file."""
    files = sorted((job.parent / "store" / "dead_letters").glob("*"))
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def spoil(job, *lines):
    """Put lines in front of the good ones."""
    data = job.parent / "part-0.txt"
    data.write_bytes(b"".join(line + b"\n" for line in lines) + data.read_bytes())


# -- the pipe command


def test_a_command_that_does_not_exist_is_bad_configuration(job):
    ended = headrace(job, 'pipe.command=["no-such-program"]')
    assert ended.code == ExitCode.BAD_CONFIG
    assert "pipe.command: 'no-such-program': no such program on PATH" in ended.output
    assert "Traceback" not in ended.output
    assert not (job.parent / "store").exists()


@pytest.mark.slow
def test_a_command_that_fails_is_tried_again_then_the_job_stops_naming_segment_and_last_words(job):
    command = pipe(job, "sys.stdin.read(); sys.exit('the disk is full')")
    ended = headrace(job, command, "pipe.tries=2")
    assert ended.code == 1
    for words in ("try 1: it ended with exit code 1", "part-0.txt [0, 400), try 2 of 2", "the disk is full"):
        assert words in ended.output
    assert "error: trainer-0 ended first: exit code 1" in ended.output
    assert "Traceback" not in ended.output
    assert ended.report is None


@pytest.mark.long
def test_a_command_that_hangs_is_killed_at_its_deadline_and_the_job_says_so(job):
    ended = headrace(job, pipe(job, "time.sleep(600)"), "pipe.tries=1", "pipe.deadline=500ms", timeout_s=40)
    assert ended.code == 1
    assert "part-0.txt [0, 400), try 1 of 1" in ended.output
    assert "and was killed" in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.long
def test_a_command_that_answers_fewer_batches_than_asked_stops_the_job(job):
    answers_none = """
import pyarrow as pa
with pa.ipc.open_stream(sys.stdin.buffer) as requests:
    requests.read_all()
with pa.ipc.new_stream(sys.stdout.buffer, pa.schema([("event", pa.int32()), ("error", pa.utf8())])):
    pass
"""
    ended = headrace(job, pipe(job, answers_none), "pipe.tries=1", "pipe.protocol=arrow", "pipe.batch_events=100")
    assert ended.code == 1
    assert "answer" in ended.output and "[0, 400), try 1 of 1" in ended.output
    assert "Traceback" not in ended.output


# -- events that give no sample

GARBAGE = b"loading model ..."
NO_LABEL = b"2 0.5 0.5 1 3 1 4 0 0 1 7"
HALF = b"2 0.5 0.5 1 3 1"


@pytest.mark.long
def test_bad_events_are_counted_and_kept_as_dead_letters_and_the_others_trained(job):
    spoil(job, GARBAGE, NO_LABEL)
    half = f"sys.stdout.write(sys.stdin.read() + {HALF.decode()!r})"
    ended = headrace(job, pipe(job, half), "passes.max_events=201")
    assert ended.code == 0, ended.output
    assert ended.report["events"] == NUM_LINES + 2
    assert ended.report["samples"] == ended.report["metrics"]["life"]["ctr"]["count"] == NUM_LINES
    assert ended.report["rejected"] == {"unparsable": 1, "label missing": 1, "output ends inside a line": 2}
    found = letters(job)
    assert list(found) == [f"pass-{number:012d}-rank-0.jsonl" for number in (1, 2)]
    first, second = found.values()
    told = [(each["offset"], each["line"], each["reason"], base64.b64decode(each["bytes"])) for each in first]
    assert told == [
        (0, 1, "unparsable", GARBAGE),
        (0, 2, "label missing", NO_LABEL),
        (0, 202, "output ends inside a line", HALF),
    ]
    assert [(each["offset"], each["line"], each["reason"]) for each in second] == [
        (201, 202, "output ends inside a line")
    ]
    assert {each["partition"] for each in first + second} == {first[0]["partition"]}
    assert first[0]["partition"].endswith("part-0.txt")


@pytest.mark.slow
def test_skipped_events_are_counted_and_not_kept(job):
    spoil(job, GARBAGE)
    ended = headrace(job, "pipe.on_bad_event=skip")
    assert ended.code == 0, ended.output
    assert ended.report["rejected"] == {"unparsable": 1}
    assert ended.report["samples"] == NUM_LINES
    assert letters(job) == {}


@pytest.mark.slow
def test_a_job_told_to_fail_stops_at_the_first_bad_event(job):
    spoil(job, GARBAGE)
    ended = headrace(job, "pipe.on_bad_event=fail")
    assert ended.code == 1
    assert "part-0.txt at 0, output line 1: unparsable" in ended.output
    assert 'pipe.on_bad_event = "fail" stops here' in ended.output


@pytest.mark.long
def test_too_many_bad_events_stop_the_job_with_the_commonest_reasons_and_all_dead_letters(tmp_path):
    job = write_job(tmp_path, num_parts=1, num_lines=1000)
    spoil(job, *[NO_LABEL] * 20, *[GARBAGE] * 5, HALF)
    ended = headrace(job, ONE_PASS, "cluster={trainers=2, shards=1}")
    assert ended.code == 1
    assert "26 of the last 1026 events were rejected, above pipe.max_bad_fraction = 0.01" in ended.output
    assert "label missing (20), unparsable (5), wrong count (1)" in ended.output
    assert "look at the dead letters" in ended.output
    assert sum(map(len, letters(job).values())) == 26
    assert ended.report is None


# -- a step that is no number

ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, shape, settings):
        super().__init__()
        self.linear = nn.Linear(shape.dense_size, 1)

    def forward(self, inputs):
        overflow = torch.exp((inputs.dense_BC[:, 0] > 9).float() * 1000) - 1
        return {"ctr": self.linear(inputs.dense_BC).squeeze(1) * (1 + overflow)}
"""
"""Linear, and not finite where the first dense value is above 9."""


@pytest.fixture
def odd(job):
    """A job whose samples 10 and 300 have no finite loss."""
    (job.parent / "odd_model.py").write_text(ODD)
    data = job.parent / "part-0.txt"
    lines = data.read_text().splitlines(keepends=True)
    for number in (10, 300):
        lines[number] = "2 10.0 0.0 " + lines[number].split(" ", 3)[3]
    data.write_text("".join(lines))
    job.write_text(changed(SPEC, {"model": {"class": "odd_model:Odd"}}))
    return job


@pytest.mark.long
def test_a_loss_that_is_no_number_stops_the_job_naming_pass_and_step(odd):
    ended = headrace(odd)
    assert ended.code == 1
    assert "pass 1, step 0: a loss or gradient on 1 rank(s) is not finite" in ended.output
    assert "lower the learning rates" in ended.output and 'train.on_nonfinite = "skip_batch"' in ended.output
    assert "Traceback" not in ended.output
    assert ended.report is None


@pytest.mark.slow
def test_batches_without_a_finite_loss_are_skipped_where_the_spec_says_so(odd):
    ended = headrace(odd, "train.on_nonfinite=skip_batch")
    assert ended.code == 0, ended.output
    assert "pass 1, step 4: a loss or gradient on 1 rank(s) is not finite; the step is skipped" in ended.output
    assert ended.report["skipped_steps"] == 2
    assert ended.report["samples"] == NUM_LINES


ODD_TOWER = """
import torch
from torch import nn
from headrace.trainer.models.contract import DeepTower

class OddTower(nn.Module):
    parameters_in_calls = True

    def __init__(self, shape, settings):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(shape.dense_size, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.top = nn.Linear(8, 1)

    def enter(self, inputs):
        overflow = torch.exp((inputs.dense_BC[:, :1] > 9).float() * 1000) - 1
        return inputs.dense_BC * (1 + overflow), inputs.dense_BC.new_zeros(inputs.num_samples, 1)

    def tower(self):
        return DeepTower(self.enter, self.net[0].in_features, list(self.net), self.top)

    def forward(self, inputs):
        x, beside = self.enter(inputs)
        return {"ctr": (self.top(self.net(x)) + beside).squeeze(1)}
"""
DIVIDED = {
    "pipeline": (
        (2, "dense={strategy='pipeline',accumulate=2,pipeline={micro_batches=3,stages=1}}"),
        (4, "dense={strategy='pipeline',accumulate=2,pipeline={micro_batches=3,stages=2}}"),
    ),
    "sharded": tuple((2, f"dense={{strategy='sharded',stage={stage},bucket_bytes=256}}") for stage in (2, 3)),
}
"""Numbers of trainers and strategies with equal bits."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", DIVIDED)
def test_all_that_divide_a_model_skip_a_step_that_one_of_them_finds_bad(odd, strategy):
    (odd.parent / "odd_model.py").write_text(ODD_TOWER)
    settings = "train.on_nonfinite=skip_batch", 'model.class="odd_model:OddTower"', 'train.matmul="mkl"'
    ends = set()
    for number, (trainers, dense) in enumerate(DIVIDED[strategy]):
        cluster = f"cluster={{trainers={trainers},shards=1}}"
        ended = headrace(odd, *settings, "train.threads=1", dense, cluster, store=f"store-{number}")
        assert ended.code == 0, ended.output
        assert ended.report["samples"] == NUM_LINES
        ends.add((ended.report["digest"], ended.report["skipped_steps"]))
    ((_, num_skipped),) = ends
    assert num_skipped == {"pipeline": 1, "sharded": 2}[strategy], "both are in one step of two merged batches"


@pytest.mark.slow
def test_a_model_that_does_not_exist_is_bad_configuration(odd):
    ended = headrace(odd, 'model.class="odd_model:Od"')
    assert ended.code == ExitCode.BAD_CONFIG
    assert "model.class:" in ended.output and "did you mean 'Odd'?" in ended.output
    assert "Traceback" not in ended.output
