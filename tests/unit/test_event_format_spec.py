"""Keys about the format of events: what is refused, what a remote caller may set, and a job that reads them."""

import contextlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from headrace.config import validate
from headrace.dataset.features.served_events import ServedFeatures, describe_features
from headrace.dataset.loader.batch_loader import PassTally
from headrace.dataset.loader.segment_reader import SegmentReader
from headrace.dataset.pipe.command import check_pipe
from headrace.dataset.samples.slot_counters import SlotCounters
from headrace.dataset.spec.config import ColumnsPipe, SourceSection
from headrace.dataset.stream.scripted_source import MemorySource
from headrace.dataset.stream.source import Segment
from headrace.errors import SpecError
from headrace.service.auth.config import AllowSection
from headrace.service.auth.spec_rules import SpecRules
from headrace.service.spec.job import job_of
from tests.fakes.schema_registry import serving
from tests.unit.test_event_formats import AVRO, DESCRIPTORS, EXAMPLE, SLOTS, as_avro, as_protobuf

JOB = {
    "name": "shop",
    "sources": {"main": {"kind": "files", "paths": ["x"]}},
    "slots": [{"name": "id"}, {"name": "sale", "kind": "meta"}],
    "tasks": [{"name": "ctr", "label": "sale"}],
    "model": {"name": "deepfm"},
    "store": {"path": "runs"},
}
AVRO_FILE = {"kind": "columns", "format": "avro", "schema_file": "event.avsc"}
PROTO_FILE = {"kind": "columns", "format": "protobuf", "schema_file": "event.desc", "message": "shop.Event"}
REGISTRY = {"kind": "columns", "format": "avro", "registry": "https://registry:8081"}

REJECT = {"registry_unknown": "reject"}


def job(pipe, **sections):
    return job_of({**JOB, **sections, "pipe": pipe}, Path("/jobs"))


def test_formats_that_load():
    for pipe in (
        AVRO_FILE,
        PROTO_FILE,
        REGISTRY,
        REGISTRY | {"format": "protobuf"},
        {"kind": "columns"},
        REGISTRY | REJECT,
    ):
        assert job(pipe).spec.pipe.format == pipe.get("format", "json")


@pytest.mark.parametrize(
    ("pipe", "message"),
    [
        ({"kind": "columns", "schema_file": "a"}, "JSON needs no schema"),
        ({"kind": "columns", "message": "a"}, "JSON needs no schema"),
        ({"kind": "columns", "format": "avro"}, "needs schema_file or registry"),
        (AVRO_FILE | {"registry": "http://a"}, "one of them alone"),
        (AVRO_FILE | {"message": "a"}, "message is for"),
        (PROTO_FILE | {"message": None}, "needs message"),
        (REGISTRY | {"format": "protobuf", "message": "a.B"}, "message is for"),
        (REGISTRY | {"registry": "ftp://a"}, "is not a URL"),
        (REGISTRY | {"registry": "registry:8081"}, "is not a URL"),
        (REGISTRY | {"registry": "http://u:p@a"}, "has a user or a password"),
        (REGISTRY | {"registry": "http://a/?x=1"}, "more than a host"),
        (REGISTRY | {"registry_credentials": "secret"}, "registry_credentials"),
        (REGISTRY | {"registry_credentials": {"text": "secret"}}, "not a reference to a secret"),
        (AVRO_FILE | {"registry_credentials": {"env": "A"}}, "there is none"),
        (AVRO_FILE | {"registry_unknown": "reject"}, "registry_unknown is for a registry"),
        ({"kind": "columns", "registry_unknown": "reject"}, "registry_unknown is for a registry"),
        (REGISTRY | {"registry_unknown": "skip"}, "registry_unknown"),
        (REGISTRY | {"registry": "http://a", "registry_credentials": {"env": "A"}}, "unencrypted"),
    ],
)
def test_formats_that_are_refused(pipe, message):
    with pytest.raises(SpecError, match=message) as caught:
        job({name: value for name, value in pipe.items() if value is not None})
    assert caught.match("pipe")


def test_the_time_of_other_events_than_json_comes_from_a_slot():
    source = {"kind": "files", "paths": ["x"], "event_time": {"field": "ts"}}
    with pytest.raises(SpecError, match=r'sources.main.event_time.field: .*slot = "\.\.\."'):
        job(AVRO_FILE, sources={"main": source})


def test_a_remote_caller_names_only_what_the_owner_allowed(tmp_path):
    def check(pipe, **allow):
        rules = SpecRules(validate(AllowSection, allow), tmp_path / "own")
        rules.check(job(pipe).spec.pipe, tmp_path / "own", "pipe")

    secret = REGISTRY | {"registry_credentials": {"env": "REGISTRY"}}
    (tmp_path / "own").mkdir()
    check(AVRO_FILE)
    check(REGISTRY, registries=["https://registry:8081"])
    check(secret, registries=["https://registry:8081"], secret_env=["REGISTRY"])
    for pipe, allow, message in (
        (AVRO_FILE | {"schema_file": "/etc/passwd"}, {}, "pipe.schema_file: .*outside of the allowed paths"),
        (AVRO_FILE | {"schema_file": "../a"}, {}, "pipe.schema_file: .*'..' is not allowed"),
        (REGISTRY, {}, "pipe.registry: 'https://registry:8081' is not allowed here; allowed: none"),
        (REGISTRY, {"registries": ["https://registry"]}, "allow.registries"),
        (secret, {"registries": ["https://registry:8081"]}, "pipe.registry_credentials: 'REGISTRY' is not allowed"),
        (secret, {"secret_env": ["REGISTRY"]}, "pipe.registry: "),
    ):
        with pytest.raises(SpecError, match=message):
            check(pipe, **allow)


def read(pipe, events, folder, max_outage_s=30.0):
    """The samples of a job's pipe, as the trainer reads them."""
    config = validate(ColumnsPipe, {**pipe, "explode": "items"})
    source = MemorySource([events])
    with contextlib.closing(
        SegmentReader(source, config, SLOTS, SourceSection(), None, folder, max_outage_s=max_outage_s)
    ) as reader:
        tally = PassTally(slots=SlotCounters(SLOTS))
        samples = list(reader.read(1, [Segment("memory/0", 0, 0, len(events))], tally))
        return samples, tally


@pytest.mark.parametrize(("pipe", "encode"), [(AVRO_FILE, as_avro), (PROTO_FILE, as_protobuf)], ids=["avro", "proto"])
def test_a_job_reads_events_by_a_schema_file(tmp_path, pipe, encode):
    (tmp_path / "event.avsc").write_text(json.dumps(AVRO))
    (tmp_path / "event.desc").write_bytes(DESCRIPTORS)
    good = encode(EXAMPLE)
    (samples,), tally = read(pipe, [good, b"\xff" * 9, good], tmp_path)
    expected, _ = read({"kind": "columns"}, [json.dumps(EXAMPLE).encode()], tmp_path)
    assert samples.event_B.tolist() == [0, 2]
    for name, column in expected[0].sparse.items():
        assert samples.sparse[name].values_N.tolist() == column.values_N.tolist() * 2
    assert tally.num_events == 3 and sum(tally.rejected.values()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not JSON"), (json.dumps(AVRO).replace("title", "tite"), "no field 'title'")],
)
def test_a_schema_file_that_does_not_fit_is_refused_with_its_name(tmp_path, content, message):
    if content is not None:
        (tmp_path / "event.avsc").write_text(content)
    with pytest.raises(SpecError, match=rf"pipe.schema_file: {tmp_path}/event.avsc .*{message}"):
        read(AVRO_FILE, [], tmp_path)


def test_a_start_is_refused_if_the_schema_file_is_not_there(tmp_path):
    check = partial(check_pipe, validate(ColumnsPipe, AVRO_FILE | {"explode": "items"}), SLOTS, tmp_path)
    with pytest.raises(SpecError, match="pipe.schema_file: .*event.avsc cannot be read: No such file"):
        check()
    (tmp_path / "event.avsc").write_text(json.dumps(AVRO))
    check()


def test_a_job_waits_for_its_registry(tmp_path):
    event = b"\0\0\0\0\x01" + as_avro(EXAMPLE)
    with serving() as registry:
        registry.add(1, json.dumps(AVRO))
        registry.failures = 1
        (samples,), _ = read(REGISTRY | {"registry": registry.url}, [event, event], tmp_path)
        assert np.array_equal(samples.event_B, [0, 1])
        assert len(registry.asked) == 2


def test_a_job_waits_for_a_registry_that_is_behind_and_loses_no_event(tmp_path):
    event = b"\0\0\0\0\x01" + as_avro(EXAMPLE)
    with serving() as registry:
        registry.add(1, json.dumps(AVRO))
        registry.behind = 1
        (samples,), tally = read(REGISTRY | {"registry": registry.url}, [event, event], tmp_path)
        assert np.array_equal(samples.event_B, [0, 1]) and not tally.rejected
        registry.behind = 1000
        _, tally = read(REGISTRY | REJECT | {"registry": registry.url}, [event, event], tmp_path)
        assert sum(tally.rejected.values()) == 2


@pytest.mark.parametrize("max_outage_s", [0.1, 2.5])
def test_a_record_whose_id_the_registry_never_knows_is_rejected_alone(tmp_path, max_outage_s):
    good = b"\0\0\0\0\x01" + as_avro(EXAMPLE)
    with serving() as registry:
        registry.add(1, json.dumps(AVRO))
        events = [good, b"\0\0\0\0\x63" + as_avro(EXAMPLE), good]
        pipe = REGISTRY | {"registry": registry.url}
        (samples,), tally = read(pipe, events, tmp_path, max_outage_s=max_outage_s)
        assert np.array_equal(samples.event_B, [0, 2]) and tally.rejected == {"unparsable": 1}
        assert "does not know schema 99" in tally.first_of["unparsable"]
        asked = registry.asked.count("/schemas/ids/99?format=serialized")
        assert (asked == 1) == (max_outage_s < 1), "it is asked again, where there is time"


def test_a_secret_for_the_registry_comes_from_its_place(tmp_path, monkeypatch):
    pipe = REGISTRY | {"registry_credentials": {"env": "REGISTRY_SECRET"}}
    monkeypatch.delenv("REGISTRY_SECRET", raising=False)
    with pytest.raises(SpecError, match="pipe.registry_credentials: the environment variable REGISTRY_SECRET"):
        read(pipe, [], tmp_path)
    monkeypatch.setenv("REGISTRY_SECRET", "nonsense")
    with pytest.raises(SpecError, match="neither") as caught:
        read(pipe, [], tmp_path)
    assert "nonsense" not in str(caught.value)


def test_raw_events_of_an_export_are_json_whatever_the_job_reads():
    pipe = validate(ColumnsPipe, AVRO_FILE | {"explode": "items"})
    document = describe_features(pipe, SLOTS)
    assert document["pipe"] == {"kind": "columns", "format": "json", "explode": "items"}
    table, event_B = ServedFeatures(document).samples([json.dumps(EXAMPLE).encode()])
    assert (table.num_rows, event_B.tolist()) == (1, [0])
