"""Several sources in one job: names of partitions, clocks, and what is refused."""

import pytest

from headrace.config import validate
from headrace.dataset.sources.files import FilesSource
from headrace.dataset.sources.kafka import KafkaSource
from headrace.dataset.sources.simulated import SimulatedSource
from headrace.dataset.spec.config import MAX_SOURCES, RECORD_CLOCK, EventTime
from headrace.dataset.spec.source_set import SourceSet, check_sources
from headrace.errors import SpecError

FIELD = EventTime(field="ts")


def files(*paths, **keys):
    return FilesSource(kind="files", paths=paths or ("*.jsonl",), **keys)


def kafka(**keys):
    return KafkaSource(kind="kafka", topics=("t",), **keys)


def test_the_partitions_of_a_single_source_keep_their_names():
    names = SourceSet({"clicks": files()})
    assert names.joined("clicks", "a:b.jsonl") == "a:b.jsonl"
    assert names.name_of("a:b.jsonl") == "clicks" and names.own_name("a:b.jsonl") == "a:b.jsonl"


def test_the_partitions_of_several_sources_begin_with_the_name_of_theirs():
    names = SourceSet({"old": files(), "live": kafka()})
    name = names.joined("old", "a:b.jsonl")
    assert name == "old:a:b.jsonl"
    assert names.name_of(name) == "old" and names.own_name(name) == "a:b.jsonl"
    assert names.split({name: 3, "live:t/0": 4}) == {"old": {"a:b.jsonl": 3}, "live": {"t/0": 4}}
    with pytest.raises(SpecError, match="is of none of the job's sources"):
        names.name_of("t/0")


def test_streams_whose_times_can_be_compared_have_one_clock():
    names = SourceSet(
        {
            "a": files("a/{day}/{shard}.txt", partition_by="{shard}"),
            "b": files("b/{day}.txt"),
            "c": files("c/*.txt"),
            "d": kafka(),
            "e": kafka(),
        }
    )
    clocks = {name: names.clock_of(f"{name}:x") for name in names.sections}
    assert clocks["a"] == clocks["b"] == "day" and clocks["d"] == clocks["e"] == RECORD_CLOCK
    assert len(set(clocks.values())) == 3
    assert SourceSet({"a": files("c/*.txt")}).clock_of("x") == ""


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"a": files(), "b": files(after="c")}, r"sources.b.after: 'c' is not another source"),
        ({"a": files(after="a")}, r"sources.a.after: 'a' is not another source"),
        ({"a": files(after="b"), "b": files(after="a")}, r"sources.a.after: the sources wait for each other"),
        ({"a": kafka(), "b": files(after="a")}, r"sources.b.after: 'a' never ends"),
        ({"a": files(follow=True), "b": files(after="a")}, r"sources.b.after: 'a' never ends"),
        ({"a": files(), "b:c": files()}, r"sources.b:c: a name of several sources has letters"),
        ({"a": files(), "b": files(event_time=FIELD)}, r"sources.b.event_time: either all sources"),
        ({f"s{n}": files() for n in range(MAX_SOURCES + 1)}, "at most 16"),
    ],
)
def test_sources_that_do_not_work_together_are_refused(sources, words):
    with pytest.raises(SpecError, match=words):
        check_sources(sources)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"until": "2024-05-01T00:00:00+00:00"}, "need the event's own time"),
        ({"until": "2024-05-01T00:00:00+00:00", "event_time": {"slot": "time"}}, "need the event's own time"),
        ({"since": "2024-05-01T00:00:00", "event_time": {"field": "ts"}}, "needs its offset"),
        ({"since": "yesterday", "event_time": {"field": "ts"}}, "must be a time like"),
        (
            {
                "since": "2024-05-02T00:00:00+00:00",
                "until": "2024-05-02T02:00:00+02:00",
                "event_time": {"field": "ts"},
            },
            "no event is at or after",
        ),
    ],
)
def test_bounds_of_time_that_cannot_hold_are_refused(section, words):
    with pytest.raises(SpecError, match=words):
        validate(FilesSource, {"kind": "files", "paths": ["*.jsonl"], **section})


def test_kafka_has_one_place_to_start():
    keys = {"kind": "kafka", "topics": ["t"], "event_time": {"kind": "record"}, "since": "2024-05-01T00:00:00+00:00"}
    assert validate(KafkaSource, keys).overlap == 3600.0
    with pytest.raises(SpecError, match="leave start out"):
        validate(KafkaSource, {**keys, "start": "latest"})
    with pytest.raises(SpecError, match="overlap has an effect with since only"):
        validate(KafkaSource, {"kind": "kafka", "topics": ["t"], "overlap": "2h"})


def test_what_waits_waits_for_all_before_it():
    simulated = SimulatedSource(kind="simulated", events=5)
    names = SourceSet({"c": simulated.model_copy(update={"after": "b"}), "b": files(after="a"), "a": files()})
    assert names.predecessors("c") == ["b", "a"] and names.predecessors("a") == []


def test_files_are_one_stream_unless_a_field_parts_them():
    files = FilesSource(kind="files", paths=["{day}.jsonl"])
    parted = FilesSource(kind="files", paths=["{shard}/{day}.jsonl"], partition_by="{shard}")
    kafka = KafkaSource(kind="kafka", topics=["t"], options={"bootstrap_servers": "x:1"})
    one = SourceSet.of(parted)
    assert [one.stream_of(name) for name in ("a/1.jsonl", "a/2.jsonl", "b/1.jsonl")] == ["a", "a", "b"]
    several = SourceSet({"f": files, "k": kafka})
    assert [several.stream_of(name) for name in ("f:1.jsonl", "f:2.jsonl", "k:t/1")] == ["f:", "f:", "k:t/1"]


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"start": "latest"}, {"start"}),
        ({"start": "group", "end": "latest"}, {"start", "end"}),
        ({"start": "2026-01-01T00:00:00Z", "end": "2026-02-01T00:00:00Z"}, set()),
        ({"start": "earliest"}, set()),
    ],
)
def test_a_place_that_moves_is_not_read_twice_alike(keys, refused):
    assert {key for key, _ in kafka(**keys).not_repeated()} == refused
