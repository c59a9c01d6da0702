"""The content of the log's records: each survives its form as JSON, and this form never changes."""

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataset.stream.source import Segment
from headrace.pserver.protocol.table_operations import SLOT_CHANGES, ClearSlot
from headrace.trainer.journal import records
from headrace.trainer.journal.log_file import RecordPlace, line_of, record_of
from headrace.trainer.journal.partitions import KnownPartition
from headrace.trainer.journal.pass_plan import PassPlan
from headrace.trainer.journal.records import (
    Claim,
    Operation,
    PartitionsOperation,
    RecordKind,
    UndecodableRecord,
    decode,
    encode,
    kind_of,
)

TEXT, COUNT = st.text(max_size=8), st.integers(0, 1 << 64)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.none() | st.booleans() | COUNT | NUMBER | TEXT
FACTS = st.dictionaries(TEXT, VALUE, max_size=3)
KNOWN = st.builds(KnownPartition, TEXT, COUNT, COUNT, st.none() | COUNT, TEXT)
IN_ORDER = st.builds(
    KnownPartition, TEXT, COUNT, COUNT, st.none() | COUNT, TEXT, TEXT, st.lists(TEXT, max_size=2).map(tuple)
)
BY_TYPE = {
    int: COUNT, str: TEXT, bool: st.booleans(), float: NUMBER, NoneType: st.none(), Mapping[str, Any]: FACTS,
    Mapping[str, int]: st.dictionaries(TEXT, COUNT, max_size=3),
    Mapping[str, str]: st.dictionaries(TEXT, TEXT, max_size=3),
    Mapping[str, Mapping[str, str]]: st.dictionaries(TEXT, st.dictionaries(TEXT, TEXT, max_size=3), max_size=3),
    Sequence[str]: st.lists(TEXT, max_size=3),
    Sequence[Mapping[str, Any]]: st.lists(FACTS, max_size=3),
    Sequence[KnownPartition]: st.lists(KNOWN | IN_ORDER, max_size=3),
    Literal["base", "delta"]: st.sampled_from(["base", "delta"]),
}  # fmt: skip


NAME = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
OF_EXPORTS = {
    "stream": NAME, "name": NAME, "timeline": NAME, "paths": st.lists(NAME, max_size=3),
    "parent": st.none() | st.builds(records.ParentOfExport, name=NAME, version=COUNT, timeline=NAME),
}  # fmt: skip
"""Names of exports become parts of paths, so other texts are refused: tests/unit/test_relative_names.py."""


def strategy(cls):
    """Any instance of a record's class, by the types of its fields."""
    hints = {name: hint for name, hint in get_type_hints(cls).items() if get_origin(hint) is not ClassVar}
    own = OF_EXPORTS if "timeline" in hints else {}
    return st.builds(cls, **{name: own[name] if name in own else values_of(hint) for name, hint in hints.items()})


def values_of(hint):
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return st.one_of(*(strategy(part) if part in SLOT_CHANGES else BY_TYPE[part] for part in parts))


SEGMENT = st.builds(Segment, TEXT, COUNT, COUNT, COUNT, TEXT)
PLAN = st.builds(
    PassPlan,
    COUNT,
    st.lists(st.lists(SEGMENT, max_size=2).map(tuple), max_size=2).map(tuple),
    st.booleans(),
    st.booleans(),
)
CLAIM = st.builds(
    lambda timeline, base, facts, **more: Claim(
        timeline=timeline, base=None if timeline is None else base, facts={f"x{k}": v for k, v in facts.items()}, **more
    ),
    timeline=st.none() | TEXT, base=st.none() | TEXT, facts=FACTS, generation=COUNT,
    sealed=BY_TYPE[Mapping[str, int]], closed=st.none() | COUNT,
)  # fmt: skip
OTHERS = [records.Void, records.PassClose, *get_args(Operation)]
CONTENT = st.one_of(PLAN, CLAIM, *map(strategy, OTHERS))


@given(CONTENT)
def test_a_record_is_read_as_it_was_written(content):
    line = line_of(7, content)
    record = record_of(line, RecordPlace(None, 0))
    assert (record.number, record.content, record.kind) == (7, content, kind_of(content))
    assert line_of(7, record.content) == line


@given(CONTENT)
def test_the_json_form_begins_with_the_kind_of_operation(content):
    body = encode(content)
    assert (next(iter(body)) == "op") == (kind_of(content) is RecordKind.OPERATION)
    assert not {"n", "kind"} & body.keys()


def test_the_lines_of_all_kinds_are_the_ones_of_format_2():
    contents = [
        Claim(generation=2, timeline="t1", facts={"host": "h"}, sealed={"a.log": 3}, closed=4),
        PassPlan(1, ((Segment("t/0", 0, 0, 5),),), last=True),
        records.Void(number=1, reason="r"),
        records.PassClose(
            number=1, day=0, events=1, samples=2, rejected={}, digests={"dense": "d"},
            window={"a": 1.5}, of_pass={"a": 2.5},
        ),  # fmt: skip
        records.SpecOperation(spec={"seed": 3}),
        records.RestoreOperation(commit=None, passed_over={"a": "b"}),
        PartitionsOperation(
            partitions=[KnownPartition("t/0", 0, 0, None, ""), KnownPartition("a", 1, 0, 9, "i", "files", ("9",))]
        ),
        records.GapOperation(partition="t/0", position=3, go_on=5),
        records.SkipOperation(partition="t/0", begin=3, end=5, reason="r"),
        records.MatmulOperation(setting="mkl", kernels={"3x2": {"forward": "mkl"}}, fingerprint={"torch": "2"}),
        records.SetOperation(id="i", keys={"a.b": 0.5}),
        records.ResizeOperation(id="i", keys={"cluster.shards": 3, "cluster.trainers": 2}),
        records.DayTickOperation(id="i", to=3),
        records.ShrinkOperation(id=None, table="t", delete_below=None, delete_after_days=3, at_once=True),
        records.ShrinkOperation(
            id="i", table="t", delete_below=None, delete_after_days=None, at_once=False, rule={"t": {}}
        ),
        records.HoldOperation(table="t", rows=4, going=2, fraction=0.5, why="w"),
        records.ForgetOperation(id="i", slot="s", table="t", group=1, key=9),
        records.SlotOperation(id="i", change=ClearSlot(slot="s", table="t", group=1)),
        records.ExportOperation(
            id=None, stream="s", type="base", name="n", version=1, timeline="t1", parent=None, all=False, why="w",
            clears=True, arithmetic="a", at_s=None, address="x", tables=["t"], dtype="float32", base_threshold=0.0,
            delta_threshold=0.5, delta_keep_days=None,
        ),
        records.ExportedOperation(
            stream="s", name="n", version=1, type="base", timeline="t1", outcome="complete", error=None, final=False,
            current=True, failed_gates=[], command_error=None, at_s=1.5,
        ),
        records.RollbackOperation(
            stream="s", version=3, timeline="t1", paths=["t1/n"], level=0.75, value=0.5, why="w",
        ),
    ]  # fmt: skip
    found = [line_of(1, each).split(b" ", 2)[2].decode().strip() for each in contents]
    assert found == [
        '{"n":1,"kind":"claim","timeline":"t1","base":null,"host":"h","generation":2,"sealed":{"a.log":3},"closed":4}',
        '{"n":1,"kind":"plan","number":1,"segments":[[{"partition":"t/0","number":0,"begin":0,"end":5,'
        '"identity":""}]],"learn":true,"last":true}',
        '{"n":1,"kind":"void","number":1,"reason":"r"}',
        '{"n":1,"kind":"close","number":1,"day":0,"events":1,"samples":2,"rejected":{},"digests":{"dense":"d"},'
        '"event_time_s":null,"window":{"a":1.5},"of_pass":{"a":2.5}}',
        '{"n":1,"kind":"operation","op":"spec","spec":{"seed":3}}',
        '{"n":1,"kind":"operation","op":"restore","commit":null,"passed_over":{"a":"b"}}',
        '{"n":1,"kind":"operation","op":"partitions","partitions":[{"name":"t/0","number":0,"start":0,"end":null,'
        '"identity":""},{"name":"a","number":1,"start":0,"end":9,"identity":"i","stream":"files","period":["9"]}]}',
        '{"n":1,"kind":"operation","op":"gap","partition":"t/0","position":3,"go_on":5}',
        '{"n":1,"kind":"operation","op":"skip","partition":"t/0","begin":3,"end":5,"reason":"r"}',
        '{"n":1,"kind":"operation","op":"matmul","setting":"mkl","kernels":{"3x2":{"forward":"mkl"}},'
        '"fingerprint":{"torch":"2"}}',
        '{"n":1,"kind":"operation","op":"set","id":"i","keys":{"a.b":0.5}}',
        '{"n":1,"kind":"operation","op":"resize","id":"i","keys":{"cluster.shards":3,"cluster.trainers":2}}',
        '{"n":1,"kind":"operation","op":"day_tick","id":"i","to":3}',
        '{"n":1,"kind":"operation","op":"shrink","id":null,"table":"t","delete_below":null,"delete_after_days":3,'
        '"at_once":true}',
        '{"n":1,"kind":"operation","op":"shrink","id":"i","table":"t","delete_below":null,"delete_after_days":null,'
        '"at_once":false,"rule":{"t":{}}}',
        '{"n":1,"kind":"operation","op":"hold","id":null,"table":"t","rows":4,"going":2,"fraction":0.5,"why":"w"}',
        '{"n":1,"kind":"operation","op":"forget","id":"i","slot":"s","table":"t","group":1,"key":9}',
        '{"n":1,"kind":"operation","op":"slot","id":"i","change":{"op":"clear","slot":"s","table":"t","group":1}}',
        '{"n":1,"kind":"operation","op":"export","id":null,"stream":"s","type":"base","name":"n","version":1,'
        '"timeline":"t1","parent":null,"all":false,"why":"w","clears":true,"arithmetic":"a","at_s":null,"address":"x",'
        '"tables":["t"],"dtype":"float32","base_threshold":0.0,"delta_threshold":0.5,"delta_keep_days":null}',
        '{"n":1,"kind":"operation","op":"exported","stream":"s","name":"n","version":1,"type":"base","timeline":"t1",'
        '"outcome":"complete","error":null,"final":false,"current":true,"failed_gates":[],"command_error":null,'
        '"at_s":1.5}',
        '{"n":1,"kind":"operation","op":"rollback","stream":"s","version":3,"timeline":"t1","paths":["t1/n"],'
        '"level":0.75,"value":0.5,"why":"w"}',
    ]
    assert {type(each) for each in contents} == {*get_args(records.Content)}, "a line for each kind"


def test_records_of_older_programs_lack_keys_that_came_later():
    close = {"number": 1, "day": 0, "events": 1, "samples": 1, "rejected": {}, "digests": {}}
    assert (decode("close", close).event_time_s, decode("close", close).window) == (None, {})
    shrink = {"op": "shrink", "id": None, "table": "t", "delete_below": None, "delete_after_days": None}
    assert decode("operation", shrink | {"at_once": True}).rule is None


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        ("vote", {}, "the kind 'vote' is unknown; known are claim, plan, void, operation, close"),
        ("operation", {"op": "swap"}, "the operation 'swap' is unknown; known are spec, restore"),
        ("operation", {}, "the operation None is unknown"),
        (
            "operation",
            {"op": "gap", "partition": "t"},
            "the operation is not understood: Object missing required field `position`",
        ),
        ("close", {"number": 1}, "the close is not understood: Object missing required field `day`"),
        (
            "plan",
            {"number": 1, "segments": 3, "learn": True},
            "the plan is not understood: Expected `array`, got `int` - at `$.segments`",
        ),
    ],
)
def test_an_unknown_record_is_named(kind, body, why):
    with pytest.raises(UndecodableRecord) as caught:
        decode(kind, body)
    assert str(caught.value).startswith(why)
