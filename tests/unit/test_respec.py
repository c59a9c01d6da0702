"""Changes of the job file of a job that continues."""

import tomllib

import pytest

from headrace.errors import SpecError
from headrace.trainer.spec.change_classes import ChangeClass
from headrace.trainer.spec.changes import changed_keys, key_changes, significant_keys
from tests.integration import stream_job

SPEC = {
    "name": "j",
    "seed": 1,
    "slots": [{"name": "a"}],
    "tables": {"default": {"dim": 8, "optimizer": {"kind": "adagrad", "lr": 0.05}}},
    "cluster": {"shards": 1, "trainers": 2},
    "commit": {"every": "30s"},
    "store": {"path": "s"},
    "train": {"batch_size": 64},
}


WHOLE = {
    "sources": {"lines": {"kind": "files", "paths": ["*.txt"]}},
    "pipe": {"command": ["cat"]},
    "tasks": [{"name": "ctr", "label": "click"}],
    "slots": [{"name": "a"}, {"name": "click", "kind": "meta"}],
    "model": {"name": "lr"},
}
"""The sections without which a spec has no defaults."""


def altered(path, value, of=SPEC):
    spec = {key: dict(part) if isinstance(part, dict) else part for key, part in of.items()}
    *sections, key = path.split(".")
    place = spec
    for section in sections:
        place[section] = dict(place.get(section, {}))
        place = place[section]
    place[key] = value
    return spec


def test_the_same_spec_in_another_order_has_not_changed():
    assert changed_keys(SPEC, dict(reversed(SPEC.items()))) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("commit.every", "1s"),
        ("store.mirror", "s3://b"),
        ("cluster.shards", 4),
        ("cluster.trainers", 3),  # the number of trainers of a pass is in its plan
        ("pipe.dead_letters.keep_bytes", False),
    ],
)
def test_keys_without_effect_on_a_pass_change_at_once(path, value):
    assert changed_keys(SPEC, altered(path, value)) == [path] and significant_keys(SPEC, altered(path, value)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.batch_size", 32),
        ("train.staleness", 1),
        ("train.mode", "async"),
        ("train.merge.wait", 0.5),
        ("tables.default.optimizer.lr", 0.1),
        ("passes.cut", "count"),
        ("train.learn", False),
    ],
)
def test_keys_with_effect_on_a_pass_are_named(path, value):
    assert significant_keys(SPEC, altered(path, value)) == [path]


def test_when_vectors_join_may_change_but_not_whether_any_does_later():
    later, other = altered("tables.default.extend_at", 2), altered("tables.default.extend_at", 3)
    assert significant_keys(later, other) == ["tables.default.extend_at"]
    of_slot = altered("tables.default.slots.a.extend_at", 1)
    assert significant_keys(of_slot, later) == ["tables.default.extend_at", "tables.default.slots.a.extend_at"]
    for old, new in ((SPEC, later), (of_slot, SPEC)):
        with pytest.raises(SpecError, match="extend_at: cannot change"):
            significant_keys(old, new)


def test_a_schedule_may_come_and_go_but_stays_with_ftrl():
    def scheduled(kind, **settings):
        return SPEC | {"tables": {"default": {"dim": 8, "optimizer": {"kind": kind}, **settings}}}

    falling = {"kind": "exponential", "factor": 0.5, "every": 9}
    assert significant_keys(scheduled("sgd", schedule=falling), scheduled("sgd"))
    assert significant_keys(scheduled("ftrl"), scheduled("ftrl", schedule=falling))
    unnamed = SPEC | {"tables": {"default": {"dim": 8, "schedule": falling}}}
    assert significant_keys(unnamed, SPEC | {"tables": {"default": {"dim": 8}}})
    constant = scheduled("ftrl", schedule={"kind": "constant"})
    assert significant_keys(scheduled("ftrl", schedule=falling), constant)
    with pytest.raises(SpecError, match=r"tables.default.schedule.*: cannot change the schedule to none with an optim"):
        significant_keys(scheduled("ftrl", schedule=falling), scheduled("ftrl"))
    with pytest.raises(SpecError, match=r"tables.default.schedule.*: cannot change the schedule to none with an optim"):
        significant_keys(constant, scheduled("ftrl"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", 2),
        ("slots", []),
        ("slots", [{"name": "a", "values": "string"}]),
        ("slots", [{"name": "b"}, {"name": "a"}]),  # without numbers, `a` would read the rows of `b`
        ("slots", [{"name": "a", "kind": "dense"}]),
        ("model.name", "fm"),
        ("tables.default.dim", 4),
        ("tables.default.optimizer.kind", "adam"),
        ("name", "k"),
        ("tables.default.default_row", "learnt"),
    ],  # fmt: skip
)
def test_a_key_that_stored_rows_depend_on_is_refused_by_name(path, value):
    with pytest.raises(SpecError, match=f"^{path}: cannot change .*--fresh"):
        significant_keys(SPEC, altered(path, value))


def test_the_optimizer_of_dense_parameters_on_shards_stays_and_its_rate_may_change():
    def sliced(**optimizer):
        return SPEC | {"dense": {"strategy": "shards", "optimizer": optimizer}}

    with pytest.raises(SpecError, match="^dense.optimizer.kind: cannot change .*--fresh"):
        significant_keys(sliced(kind="adam"), sliced(kind="adagrad"))
    with pytest.raises(SpecError, match="^dense.optimizer.momentum: cannot change .*--fresh"):
        significant_keys(sliced(kind="sgd"), sliced(kind="sgd", momentum=0.5))
    more = sliced(kind="sgd", momentum=0.75)
    assert significant_keys(sliced(kind="sgd", momentum=0.5), more) == ["dense.optimizer.momentum"]
    rate = sliced(kind="adam", lr=0.1)
    assert significant_keys(sliced(kind="adam"), rate) == ["dense.optimizer.lr"]
    moved = altered("dense.strategy", "shards")
    assert significant_keys(SPEC, moved) == significant_keys(moved, SPEC) == ["dense.strategy"]


def test_the_names_of_partitions_stay():
    """The one source of a job may have any name; partitions of several begin with their source's."""

    def with_sources(*names):
        return SPEC | {"sources": {name: {"kind": "simulated", "events": 5} for name in names}}

    assert significant_keys(with_sources("a", "b"), with_sources("b", "a")) == []
    assert "sources.b.kind" in significant_keys(with_sources("a"), with_sources("b"))
    for old, new in ((("a",), ("a", "b")), (("a", "b"), ("a",)), (("a", "b"), ("a", "c"))):
        with pytest.raises(SpecError, match="^sources: the store's positions are those of a.*--fresh"):
            significant_keys(with_sources(*old), with_sources(*new), learnt=False)


def test_how_slices_travel_has_no_effect_on_a_pass():
    def sliced(**more):
        return SPEC | {"dense": {"strategy": "shards"} | more}

    assert significant_keys(sliced(), sliced(slice_floats=10_000, priority="fifo")) == []


WHOLE = tomllib.loads(stream_job.SPEC)


def whole(**default):
    return {**WHOLE, "tables": {"default": WHOLE["tables"]["default"] | default}}


def test_a_default_that_is_written_out_is_no_change_and_a_rate_may_be_written_where_none_was():
    rate = {"kind": "adagrad", "lr": 0.1}
    assert "tables.default.optimizer.lr" in significant_keys(whole(), whole(optimizer=rate))
    significant_keys(whole(), whole(first_order=True, default_row="zeros"))
    significant_keys(whole(first_order=True), whole())
    significant_keys(WHOLE, WHOLE | {"slots": [{"kind": "sparse"} | slot for slot in WHOLE["slots"]]})
    with pytest.raises(SpecError, match=r'optimizer.kind: cannot change from "adagrad" to "adam"'):
        significant_keys(whole(), whole(optimizer={"kind": "adam"}))
    with pytest.raises(SpecError, match=r"first_order: cannot change from true to false"):
        significant_keys(whole(), whole(first_order=False))


def slots(*entries, **more):
    return SPEC | {"slots": list(entries)} | more


A, B = {"name": "a"}, {"name": "b"}
D = {"name": "d", "kind": "dense", "size": 2}


def test_slots_that_come_go_or_move_are_carried_over_and_their_settings_change_between_passes():
    for new, words in (
        (slots(A, B, D), "added b, d"),
        (slots(D), "added d; removed a"),
        (slots(B | {"group": 1}, A | {"group": 0}), "added b; in another place a"),
    ):
        (change,) = key_changes(SPEC, new)
        assert (change.key, change.change) == ("slots", ChangeClass.CARRIED)
        assert change.note in (words, words.split(";")[0])
        assert significant_keys(SPEC, new) == ["slots"]
    (change,) = key_changes(SPEC, slots(A | {"pooling": "mean"}))
    assert (change.change, change.note) == (ChangeClass.BETWEEN, "with other settings a")
    assert significant_keys(slots(A, B), slots({"names": ["a", "b"]})) == []
    with pytest.raises(SpecError, match=r"^slots: cannot change slot 'd' \(size was 2 and is 3;.*--fresh"):
        significant_keys(slots(D), slots(D | {"size": 3}))
    with pytest.raises(SpecError, match="^slots: cannot change its order and number with dense.strategy"):
        significant_keys(slots(A, dense={"strategy": "shards"}), slots(A, B, dense={"strategy": "shards"}))


def test_histories_stay_as_they_are():
    kept = {"name": "h", "max_len": 3, "pooling": "mean", "history": {"key": "a", "of": "b", "last": 3}}
    longer = kept | {"max_len": 4, "history": kept["history"] | {"last": 4}}
    with pytest.raises(SpecError, match=r"^slots: cannot change slot 'h' .history was"):
        significant_keys(slots(A, B, kept), slots(A, B, longer))
    for old, new in ((slots(A, B), slots(A, B, kept)), (slots(A, B, kept), slots(A, B))):
        with pytest.raises(SpecError, match=r"^slots: cannot change .* history"):
            significant_keys(old, new)
    assert significant_keys(slots(A, B, kept), slots(A, B, kept, D)) == ["slots"]


@pytest.mark.parametrize(
    ("key", "value", "was", "now"),
    [
        ("tables.default.weight_decay", 0.01, "0.0", "0.01"),
        ("tables.default.l2", 0.5, "0.0", "0.5"),
        ("dense.optimizer", {"kind": "adam", "no_decay": ["bias"]}, "[]", '["bias"]'),
    ],
)
def test_a_later_key_changes_from_its_default_and_back(key, value, was, now):
    old = altered("dense.optimizer", {"kind": "adam"}, of=SPEC | WHOLE)
    new = altered(key, value, of=old)
    assert [(each.was, each.now) for each in key_changes(old, new)] == [(was, now)]
    assert [(each.was, each.now) for each in key_changes(new, old)] == [(now, was)]


def test_a_table_comes_and_goes_with_its_slots():
    wider = altered("tables.more", {"dim": 2})
    assert {each.change for each in key_changes(SPEC, wider)} == {ChangeClass.CARRIED}
    assert significant_keys(wider, SPEC) == significant_keys(SPEC, wider)
