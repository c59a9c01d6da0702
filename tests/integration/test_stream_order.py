"""Files of one source are one stream: what is learnt does not depend on how the stream lies in files."""

import json
import zlib
from pathlib import Path

import pytest

from headrace.config import load_toml
from headrace.failpoints import Failpoint
from headrace.trainer.config import Rerun
from headrace.trainer.journal.job_history import JobHistory
from headrace.trainer.journal.log import read
from headrace.trainer.train.assembly import open_trainer
from tests.integration.stream_job import FIRST_S, LIVING, SPEC, headrace, write_job, write_living_job
from tests.integration.trainer_here import closes, config_of, killed, run, torch_as_before
from tests.jobs import changed

SETTINGS = ("passes.max_events=70", "train.threads=1")
WHOLE = changed(LIVING, {"exports": None})
HOURLY = changed(WHOLE, {"sources.lines.paths": ["hours/{day}/{hour}.txt"]})


def write_hourly(folder: Path, num_lines: int = 300) -> tuple[Path, Path]:
    """The same events in one file, and in a file an hour whose names sort otherwise as text: two job files."""
    one = folder / "one"
    one.mkdir()
    whole = write_living_job(one, num_parts=1, num_lines=num_lines, spec=WHOLE)
    lines = (one / "part-0.txt").read_text().splitlines(keepends=True)
    for number in range(0, num_lines, 23):
        path = folder / "hours" / str(9 + number // 100) / f"{8 + number % 100 // 23}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines[number : number + 23]))
    hourly = folder / "job.toml"
    hourly.write_text(HOURLY)
    return whole, hourly


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return write_hourly(tmp_path_factory.mktemp("hourly"))


@pytest.fixture(scope="module")
def whole(jobs, tmp_path_factory):
    store = tmp_path_factory.mktemp("whole") / "store"
    return run(jobs[0], store, *SETTINGS), closes(store)


def test_hourly_files_give_the_digest_of_the_same_events_in_one_file(jobs, whole, tmp_path):
    assert run(jobs[1], tmp_path / "store", *SETTINGS) == whole[0]
    assert digests(closes(tmp_path / "store")) == digests(whole[1])


@pytest.mark.long
def test_a_job_killed_between_files_ends_with_the_same_digest(jobs, whole, tmp_path):
    store = tmp_path / "store"
    killed(jobs[1], store, *SETTINGS, generation=1, point=Failpoint.CLOSED, hit=3)
    killed(jobs[1], store, *SETTINGS, generation=2, point=Failpoint.PLAN_LOGGED, hit=1)
    assert run(jobs[1], store, *SETTINGS, generation=3) == whole[0]


@pytest.mark.long
@pytest.mark.parametrize("trainers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_so_do_several_trainers_each_with_an_equal_part_of_every_pass(jobs, trainers):
    settings = (*SETTINGS, f"cluster.trainers={trainers}", "cluster.shards=1")
    runs = [headrace(job, *settings, store=f"store-{trainers}") for job in jobs]
    assert [each.code for each in runs] == [0, 0], runs[1].output
    assert runs[0].report["digest"] == runs[1].report["digest"]
    plans = [p.content for p in JobHistory.of(read(jobs[1].parent / f"store-{trainers}" / "log")).plans.values()]
    sizes = [[sum(s.end - s.begin for s in rank) for rank in plan.segments] for plan in plans]
    assert all(max(each) - min(each) <= 1 for each in sizes)


def test_the_report_says_how_far_event_times_lay_apart(jobs, whole):
    assert whole[0].span_s["last"] <= whole[0].span_s["max"] < 3 * 86_400


def test_declared_files_of_unequal_rates_advance_together(jobs, tmp_path):
    lines = (jobs[0].parent / "part-0.txt").read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        day = (int(line.rsplit(" ", 1)[1]) - FIRST_S) // 86_400
        with (tmp_path / f"{'small' if number % 10 == 0 else 'large'}-{day}.txt").open("a") as file:
            file.write(line)
    ended = run(declared(tmp_path, "{shard}-{day}.txt", "{shard}"), tmp_path / "store", *SETTINGS)
    assert ended.events == len(lines) and ended.span_s["max"] <= 86_400
    by_name = run(declared(tmp_path, "{name}.txt", None), tmp_path / "by-name", *SETTINGS)
    assert by_name.span_s["max"] > 5 * 86_400  # all of the large ones, then all of the small ones


def declared(folder, path, by):
    job = folder / "job.toml"
    by_part = {"sources.lines.partition_by": by} if by else {}
    job.write_text(changed(WHOLE, {"sources.lines.paths": [path], **by_part}))
    return job


def digests(found):
    return {number: close["digests"] for number, close in found.items()}


def log_of_before(job: Path, store: Path) -> None:
    """The store as the program left it that took equal shares, killed before its first plan: its log, of format 1."""
    spec = load_toml(job, [f"store.path={store}", "commit.every_passes=2", *SETTINGS])
    seen = []
    for number, path in enumerate(sorted(job.parent.glob("part-*.txt"))):
        status = path.stat()
        lines = len(path.read_text().splitlines())
        known = {"name": path.name, "number": number, "start": 0, "end": lines}
        seen.append(known | {"identity": f"{status.st_dev}:{status.st_ino}"})
    records = [
        {"kind": "claim", "timeline": "t1", "base": None, "generation": 1, "sealed": {}, "closed": 0},
        {"kind": "operation", "op": "spec", "spec": spec},
        {"kind": "operation", "op": "partitions", "partitions": seen},
    ]
    (store / "log").mkdir(parents=True)
    with (store / "log" / "00000001-0001.log").open("wb") as file:
        for number, record in enumerate(records, start=1):
            content = json.dumps({"n": number, **record}, separators=(",", ":")).encode()
            file.write(b"1 %08x %s\n" % (zlib.crc32(content), content))


@pytest.mark.long
def test_a_job_that_began_with_equal_shares_goes_on_so_and_restarts_to_the_bit(tmp_path):
    job = write_job(tmp_path, num_lines=100)
    for name in ("undisturbed", "killed"):
        log_of_before(job, tmp_path / name)
    ended = run(job, tmp_path / "undisturbed", *SETTINGS, generation=2)
    plans = [p.content for p in JobHistory.of(read(tmp_path / "undisturbed" / "log")).plans.values()]
    assert [(s.number, s.begin, s.end) for s in plans[0].segments[0]] == [(0, 0, 24), (1, 0, 23), (2, 0, 23)]
    killed(job, tmp_path / "killed", *SETTINGS, generation=2, point=Failpoint.CLOSED, hit=3)
    assert run(job, tmp_path / "killed", *SETTINGS, generation=3) == ended
    assert run(job, tmp_path / "anew", *SETTINGS).digest != ended.digest  # one after another
    again = config_of(
        job, tmp_path / "rerun", *SETTINGS, rerun=Rerun(store=tmp_path / "killed", commit=None, last=len(plans))
    )
    with torch_as_before(), open_trainer(again) as trainer:
        trainer.loop.run()
        compared = trainer.rank0.replay_log.compared
    assert compared == [(number, []) for number in range(1, len(plans) + 1)]


@pytest.mark.long
def test_a_finished_job_trains_what_is_new_and_ends(tmp_path):
    job = write_job(tmp_path, num_parts=2, num_lines=60, spec=SPEC)
    first = headrace(job, *SETTINGS)
    again = headrace(job, *SETTINGS)
    assert (first.code, again.code) == (0, 0) and "the stream is drained" in again.output
    assert again.report["events"] == first.report["events"] == 113 and again.report["digest"] == first.report["digest"]
    lines = (tmp_path / "part-0.txt").read_text().splitlines(keepends=True)
    (tmp_path / "part-2.txt").write_text("".join(lines[:30]))
    with (tmp_path / "part-1.txt").open("a") as file:
        file.write("".join(lines[:5]))
    (tmp_path / "part-0.txt").unlink()
    more = headrace(job, *SETTINGS)
    assert more.code == 0 and more.report["events"] == 148, more.output
    assert more.report["positions"] == {"part-0.txt": 60, "part-1.txt": 58, "part-2.txt": 30}
    assert "part-0.txt is no longer there; it was read up to position 60" in more.output
    assert "35 events are new since the stream was read completely, in part-1.txt, part-2.txt" in more.output
    for path in tmp_path.glob("part-*.txt"):
        path.unlink()
    gone = headrace(job, *SETTINGS)
    assert gone.code == 0 and gone.report["digest"] == more.report["digest"], gone.output
