"""Samples, counts, rejections and dead letters of a pass are the same whether its trainer reads it or readers do."""

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from headrace.config import validate
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.dead_letters import DeadLetters
from headrace.dataset.loader.kept_files import KeptFiles
from headrace.dataset.loader.pass_shuffle import RankShare
from headrace.dataset.loader.segment_parts import SegmentPart
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.pipe.label_bounds import LabelBounds
from headrace.dataset.reader import client, server
from headrace.dataset.reader.client import ReaderCaller, ReaderLost, RemoteParts
from headrace.dataset.reader.config import ReaderProcess
from headrace.dataset.reader.server import ReaderServer, _Servicer
from headrace.dataset.samples.batch import Samples
from headrace.dataset.samples.rejection import Reason, RejectedSample
from headrace.dataset.sources.kinds import open_sources
from headrace.dataset.spec.config import DeadLettersSection, Opening
from headrace.dataset.spec.schema import Schema
from headrace.dataset.spec.source_set import SourceSet
from headrace.dataset.stream.errors import PipeFailed, SourceGap, SourceUnavailable
from headrace.dataset.stream.source import Segment
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, Refused
from headrace.rpc import rpc_server
from headrace.rpc.rendezvous import ServingWorker

GENERATOR = """
from headrace import DataGenerator

class Words(DataGenerator):
    def generate(self, event):
        who, words, price, click = event.split(b",")
        for _ in range(1 + int(who) % 2):
            yield {"who": [int(who)], "words": words.decode().split(), "price": [float(price)], "click": [float(click)],
                   "title": [words.decode()]}

Words().run()
"""
SLOTS = [
    {"name": "who"},
    {"name": "words", "values": "string"},
    {"name": "price", "kind": "dense"},
    {"name": "click", "kind": "meta"},
    {"name": "title", "kind": "meta", "type": "string"},
]
PIPES = {
    "arrow": {"command": ["python", "words.py"], "protocol": "arrow", "batch_events": 100},
    "multislot": {"command": ["python", "words.py"]},
    "columns": {"kind": "columns"},
}
LABELS = (LabelBounds.of_probability("click", None),)
NUM = 3_000
KIB = 1 << 10
WHOLE = [Segment("lines.txt", 0, 0, 1_000), Segment("lines.txt", 0, 1_000, NUM)]


def event(pipe, number):
    """Every 97th cannot be read, every 131st has no label that a task takes."""
    click = 7.0 if number % 131 == 130 else float(number % 3 == 0)
    words = " ".join(f"w{number * each % 50}" for each in range(number % 4))
    if pipe == "columns":
        found = {"who": number, "words": words.split(), "price": number / 7, "click": click, "title": words}
        return "{broken" if number % 97 == 96 else json.dumps(found)
    return "broken" if number % 97 == 96 else f"{number},{words},{number / 7},{click}"


class World:
    """A stream of one file, its pipe, and readers of this process."""

    def __init__(self, folder, pipe, held, **passes):
        self.folder, self.passes, self.held = folder, passes, held
        (folder / "words.py").write_text(GENERATOR)
        (folder / "lines.txt").write_text("".join(event(pipe, number) + "\n" for number in range(NUM)))
        self.raw = {
            "reader": 0,
            "num_readers": 1,
            "num_ranks": 1,
            "name": "words",
            "seed": 1,
            "sources": {"lines": {"kind": "files", "paths": ["lines.txt"]}},
            "pipe": PIPES[pipe] | {"max_bad_fraction": 0.5, "dead_letters": {"keep_bytes": True}},
            "slots": SLOTS,
            "memory": passes.get("memory", 512 << 20),
            "folder": str(folder),
            "labels": [{name: getattr(each, name) for name in each.__slots__} for each in LABELS],
            "secret": "s",
            "generation": 4,
        }
        self.config = validate(ReaderProcess, self.raw)
        self.schema = Schema.of(self.config.slots)
        self.servers = []

    def readers(self, num, others=(), **caller):
        servers = [ReaderServer(self.config, self.folder / f"reader-{number}.socket") for number in range(num)]
        self.servers += servers
        for each in servers:
            self.held.callback(each.close)
        who = ReaderCaller(**{"rank": 0, "generation": 4, "secret": "s", **caller})
        self.caller = who, self.schema, self.config.pipe.processes
        parts = RemoteParts([*(each.address for each in servers), *others], *self.caller)
        self.held.callback(parts.close)
        return parts

    def reader(self, name, parts, **more):
        config = self.config
        opening = Opening(folder=self.folder, job="words", seed=1, deadline=Deadline.after(30), known=None)
        source = open_sources(config.sources, opening)
        letters = DeadLetters(self.folder / name, 0, DeadLettersSection(keep_bytes=True))
        sections = SourceSet(config.sources)
        reader = SegmentReader(
            *(source, config.pipe, self.schema, sections, letters, self.folder),
            memory=config.memory,
            labels=LABELS,
            parts=parts,
            **more,
        )
        self.held.callback(reader.close)
        return reader

    def read(self, name, parts=None, segments=None, **more):
        """All that a pass gives: samples in columns, counts, dead letters."""
        reader, tally = self.reader(name, parts, **more), PassTally()
        blocks = list(reader.read(1, segments or WHOLE, tally))
        if "shuffles" not in more:
            reader.reject(1, [RejectedSample(0, int(blocks[0].event_B[0]), Reason.SAMPLE_TOO_LONG)], tally)
        letters = reader._dead_letters
        letters.publish(1)
        return facts_of(Samples.concat(blocks), tally) | {"letters": letters.path(1).read_text()}


def facts_of(samples, tally):
    found = {"event": samples.event_B.tolist(), "who": samples.sparse["who"].values_N.tolist()}
    found |= {"words": [samples.sparse["words"].values_N.tolist(), samples.sparse["words"].offset_B1.tolist()]}
    found |= {"price": samples.dense["price"].tobytes(), "click": samples.meta["click"].tobytes()}
    found |= {"title": samples.meta["title"].tolist(), "time": str(samples.time_s_B.tolist())}
    counters = tally.slots
    found |= {"counters": [each.tolist() for each in (counters.sums_SK, counters.registers_SR, counters.buckets_SK)]}
    counted = ("num_events", "num_samples", "rejected", "left_out", "num_judged", "first_of", "num_dead_letters")
    return found | {name: getattr(tally, name) for name in counted}


@pytest.fixture
def held():
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("num", [1, 3])
def test_a_pass_is_the_same_whoever_reads_it(tmp_path, held, pipe, num):
    world = World(tmp_path, pipe, held)
    here = world.read("here")
    assert here["num_events"] == NUM and here["num_dead_letters"] > 40 and len(set(here["rejected"])) == 3
    assert world.read("there", world.readers(num)) == here


def test_a_part_comes_in_pieces_of_limited_bytes_the_same_in_both(tmp_path, held):
    world = World(tmp_path, "columns", held, memory=160 * KIB)
    world.config = world.config.model_copy(update={"pipe": world.config.pipe.model_copy(update={"processes": 3})})
    parts = world.readers(2)
    pieces = [work.segment for work, _ in parts.run(1, [SegmentPart(each) for each in WHOLE], PassTally())]
    assert len(pieces) > 10 and [each.begin for each in pieces] == [0, *(each.end for each in pieces[:-1])]
    assert world.read("there", parts) == world.read("here")


@pytest.mark.parametrize("pipe", ["arrow", "columns"])
def test_each_trainer_gets_its_own_events_of_a_shuffled_pass(tmp_path, held, pipe):
    world = World(tmp_path, pipe, held)
    parts = world.readers(2)
    for rank in range(2):
        share = RankShare(5, rank, 2)
        assert world.read(f"there-{rank}", parts, shuffles=share) == world.read(f"here-{rank}", shuffles=share)


def test_segments_of_readers_are_kept_for_jobs_that_read_alone(tmp_path, held):
    world = World(tmp_path, "columns", held)
    config = world.config

    def kept():
        sections = SourceSet(config.sources)
        return KeptFiles(tmp_path / "kept", 64 << 20, config.pipe, world.schema, sections, {})

    here = world.read("here")
    assert world.read("there", world.readers(2), kept=kept()) == here
    num_files = len(list((tmp_path / "kept").iterdir()))
    again = world.read("again", kept=kept())
    assert num_files == len(list((tmp_path / "kept").iterdir())) == 2
    assert {name: each for name, each in again.items() if name not in ("letters", "first_of")} == {
        name: each for name, each in here.items() if name not in ("letters", "first_of")
    }


def test_the_parts_of_a_lost_reader_go_to_another_one(tmp_path, held):
    world = World(tmp_path, "columns", held, memory=64 * KIB)
    parts = world.readers(2)
    whole = world.read("here")
    reader, tally = world.reader("there", parts), PassTally()
    blocks = reader.read(1, WHOLE, tally)
    first = next(blocks)
    world.servers[0].close(0)
    samples = Samples.concat([first, *blocks])
    assert samples.event_B.tolist() == whole["event"] and tally.num_events == NUM
    world.servers[1].close(0)
    with pytest.raises(ReaderLost, match="reader-[01] is not reachable"):
        list(reader.read(2, [Segment("lines.txt", 0, 0, 1_000)], PassTally()))


@pytest.fixture
def parts_of(tmp_path, held):
    """Takes a number of processes of the pipe; two readers, and 100 parts with several pieces each."""

    def make(processes):
        world = World(tmp_path, "columns", held, memory=64 * KIB)
        pipe = world.config.pipe.model_copy(update={"processes": processes})
        world.config = world.config.model_copy(update={"pipe": pipe})
        segments = (Segment("lines.txt", 0, begin, begin + 30) for begin in range(0, NUM, 30))
        return world, world.readers(2), [SegmentPart(each) for each in segments]

    return make


def test_one_reader_can_take_all_parts_that_are_on_their_way(parts_of, monkeypatch):
    for module in (client, server, rpc_server):
        monkeypatch.setattr(module, "MAX_CALLS", 4)
    world, readers, parts = parts_of(7)
    found = []

    def read():
        pieces = readers.run(1, parts, PassTally())
        found.append(next(pieces))
        world.servers[0].close(0)
        found.extend(pieces)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive() and sum(work.num_events for work, _ in found) == NUM


def test_a_lost_reader_gets_no_further_parts_while_there_are_others(parts_of, caplog):
    world, readers, parts = parts_of(1)
    world.servers[0].close(0)
    assert sum(work.num_events for work, _ in readers.run(1, parts, PassTally())) == NUM
    num_lost = sum("is given to another reader" in each.message for each in caplog.records)
    assert 1 <= num_lost <= 2, "no more than were on their way to it"


def test_a_reader_that_is_started_late_or_again_gets_parts_at_once(parts_of, monkeypatch):
    """The trainers ask for it by its name: reader-1 does not run at first, then as one process, then as another."""
    monkeypatch.setattr(client, "LOOK_S", 0.0)
    world, _, parts = parts_of(1)
    serves, asked = {}, []

    def find(name):
        asked.append(name)
        if "trouble" in serves:
            raise Refused("another generation runs")
        return serves.get(name)

    def received(parts):
        assert sum(work.num_events for work, _ in readers.run(1, parts[:6], PassTally())) == 6 * 30
        return readers.links().get("reader-1", {}).get("received_bytes", 0)

    readers = client.RemoteParts([world.servers[0].address, ""], *world.caller, find)
    world.held.callback(readers.close)
    assert received(parts) == 0 and set(asked) == {"reader-1"}
    serves["trouble"] = True
    assert received(parts) == 0
    serves.pop("trouble")
    serves["reader-1"] = ServingWorker(world.servers[1].address, 1)
    first = received(parts)
    assert first > 0
    asked.clear()
    assert received(parts) > first and not asked, "none is lost"
    world.servers[1].close(0)
    second = received(parts)
    assert asked, "the launcher has not noticed yet: the same process"
    again = ReaderServer(world.config, world.folder / "again.socket")
    world.held.callback(again.close)
    serves["reader-1"] = ServingWorker(again.address, 2)
    third = received(parts)
    assert third > second
    monkeypatch.setattr(client, "LOOK_S", 600.0)
    for each in (world.servers[0], again):
        each.close(0)
    last = ReaderServer(world.config, world.folder / "last.socket")
    world.held.callback(last.close)
    serves["reader-1"] = ServingWorker(last.address, 3)
    assert received(parts) > third, "it is looked for before a part is given up"


@pytest.mark.slow
def test_a_reader_that_answers_no_pings_is_lost_after_half_a_minute(tmp_path, held):
    world = World(tmp_path, "columns", held, memory=64 * KIB)
    socket, config = tmp_path / "stopped.socket", tmp_path / "stopped.json"
    config.write_text(json.dumps(world.raw | {"socket": str(socket)}))
    process = subprocess.Popen([sys.executable, "-m", "headrace.dataset.reader", "--config", str(config)])
    held.callback(process.wait)
    held.callback(process.kill)
    readers = world.readers(1, others=[f"unix:{socket}"])
    deadline = Deadline.after(60)
    while not socket.exists():
        deadline.check("waiting for the reader")
    pieces = readers.run(
        1, [SegmentPart(Segment("lines.txt", 0, at, at + 30)) for at in range(0, NUM, 30)], PassTally()
    )
    num_events = sum(next(pieces)[0].num_events for _ in range(5))
    process.send_signal(signal.SIGSTOP)
    begin_s = time.monotonic()
    assert num_events + sum(work.num_events for work, _ in pieces) == NUM
    assert 5 < time.monotonic() - begin_s < 45


def test_a_reader_waits_for_a_source_that_cannot_be_opened_yet(tmp_path, held, monkeypatch):
    world, tries = World(tmp_path, "columns", held), []

    def opened(*given):
        tries.append(given)
        if len(tries) < 3:
            raise SourceUnavailable("the broker does not answer")
        return open_sources(*given)

    monkeypatch.setattr("headrace.dataset.reader.server.open_sources", opened)
    monkeypatch.setattr("headrace.dataset.reader.server.AWAY_WAIT_S", 0.01)
    assert world.read("there", world.readers(1))["num_events"] == NUM
    world.servers.pop().close(0)
    world.config = world.config.model_copy(update={"max_outage": 0.0})
    tries.clear()
    with pytest.raises(SourceUnavailable, match="the broker does not answer"):
        world.read("again", world.readers(1))


def test_a_reader_that_breaks_down_is_as_one_that_dies(tmp_path, held, monkeypatch):
    world, whole, broken = World(tmp_path, "columns", held), _Servicer._pieces, []

    def pieces(*given):
        if len(broken) < 1:
            broken.append(given)
            raise OSError(24, "Too many open files")
        return whole(*given)

    monkeypatch.setattr(_Servicer, "_pieces", pieces)
    assert world.read("there", world.readers(2))["num_events"] == NUM and broken
    broken.clear()
    with pytest.raises(ReaderLost, match="Too many open files"):
        world.read("again", RemoteParts([world.servers[0].address], *world.caller))


def test_errors_of_source_and_pipe_are_those_of_a_trainer_of_its_own(tmp_path, held):
    world = World(tmp_path, "multislot", held)
    parts = world.readers(1)
    beyond = [Segment("lines.txt", 0, NUM - 1, NUM + 5)]
    (tmp_path / "words.py").write_text("raise SystemExit(3)")
    for segments, error in ((beyond, SourceGap), (None, PipeFailed)):
        told = []
        for name, where in (("here", None), ("there", parts)):
            with pytest.raises(error) as found:
                world.read(name, where, segments)
            told.append(str(found.value))
        assert told[0] == told[1]


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (slice(1, None), "has positions .* where 0 to 1000 are missing"),
        (slice(-1), "ended lines.txt at .* before 1000"),
    ],
)
def test_no_piece_of_a_part_is_lost_unnoticed(tmp_path, held, monkeypatch, left, words):
    world, whole = World(tmp_path, "columns", held, memory=64 * KIB), _Servicer._pieces
    monkeypatch.setattr(_Servicer, "_pieces", lambda *given: list(whole(*given))[left])
    with pytest.raises(HeadraceError, match=words):
        world.read("there", world.readers(1))


@pytest.mark.parametrize(
    ("caller", "words"), [({"generation": 3}, "is of generation 4"), ({"secret": "other"}, "another job")]
)
def test_a_trainer_of_another_generation_or_job_is_refused(tmp_path, held, caller, words):
    world = World(tmp_path, "columns", held)
    with pytest.raises(Refused, match=words):
        world.read("there", world.readers(1, **caller))


def test_closing_ends_a_read_that_waits_for_a_reader(tmp_path, held):
    world = World(tmp_path, "multislot", held)
    (tmp_path / "words.py").write_text("import time; time.sleep(60)")
    reader = world.reader("there", world.readers(1))
    timer = threading.Timer(0.5, reader.close)
    held.callback(timer.join)
    timer.start()
    with pytest.raises(PipeFailed, match="closed while"):
        list(reader.read(1, [Segment("lines.txt", 0, 0, 1_000)], PassTally()))
