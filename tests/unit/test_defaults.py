"""Sets of defaults: a logged spec has every default, and old specs keep their meaning."""

import json
import tomllib
from pathlib import Path

import pytest

import headrace.service.spec.config
import headrace.trainer.config
import headrace.trainer.predict.config
from headrace.config import Section, validate
from headrace.errors import SpecError
from headrace.service.cluster.store_defaults import old_defaults, old_defaults_note, with_store_defaults
from headrace.service.spec.job import JobFile, job_of, with_defaults
from headrace.trainer.config import NEWEST_DEFAULTS
from headrace.trainer.spec import changes, defaults
from headrace.trainer.spec.defaults import FIRST, fill_defaults, frozen

GOLDEN = Path(__file__).parents[1] / "golden" / "store-of-defaults-1"
MOVED = {
    "TrainSection.batch_size": (1024, 256),
    "DenseAdam.lr": (0.001, 0.003),
    "DenseAdam.decoupled": (True, False),
    "MetricsSection.progressive": ("training", "inference"),
    "KafkaSource.null_values": ("reject", "skip"),
    "FilesSource.blank_lines": ("read", "skip"),
    "TrainSection.calibrate": (False, True),
    "CrossesSection.events": (20_000, 40_000),
    "TuningSection.events": (20_000, 10_000),
}
"""Defaults that the newest set has otherwise than the first, by class and key: the old value and the new one."""
LEFT_OUT = ("predict", "evaluator", "cluster", "without")
"""Keys of the service's own: requests and evaluations are no part of a store's state, the launcher writes out the
cluster, and slots that are left out are not in a spec."""

RAW = tomllib.loads("""
name = "j"
[sources.s]
kind = "files"
paths = ["x"]
[pipe]
command = ["cat"]
[[slots]]
name = "a"
[[slots]]
name = "click"
kind = "meta"
[[tasks]]
name = "ctr"
label = "click"
[model]
name = "deepfm"
[store]
path = "store"
""")


def raw(**more):
    return {**RAW, **more}


def sections(base=Section):
    for each in base.__subclasses__():
        yield each
        yield from sections(each)


def now():
    """The present default of each key that the first set names, as JSON."""
    found = {}
    for section in sections():
        for key in frozen(FIRST).get(section.__name__, ()):
            field = next((f for name, f in section.model_fields.items() if (f.alias or name) == key), None)
            if field is not None and not field.is_required():
                value = section.model_construct(**{key: field.default}).model_dump(mode="json", by_alias=True)
                found[f"{section.__name__}.{key}"] = value[key]
    return found


def test_every_key_of_the_frozen_set_is_there_under_its_name():
    everything = headrace.service.spec.config, headrace.trainer.config, headrace.trainer.predict.config
    assert all(everything)  # so that all sections are known
    named = {f"{section}.{key}" for section, keys in frozen(FIRST).items() for key in keys}
    assert named - now().keys() == set()


def test_a_default_moves_only_with_a_new_set():
    """To change a default: see trainer/spec/defaults.py. A key around a nested default changes with it."""
    first = {f"{section}.{key}": value for section, keys in frozen(FIRST).items() for key, value in keys.items()}
    moved = {key: (first[key], value) for key, value in now().items() if first[key] != value}
    plain = {key: pair for key, pair in moved.items() if not isinstance(pair[0], dict)}
    assert plain == MOVED


@pytest.fixture
def newer(monkeypatch):
    """A newest set that differs from the first in every key with an effect on learning."""
    table = {
        "TableSection": {"dim": 4, "init_range": 0.05},
        "Adagrad": {"lr": 0.02},
        "TrainSection": {"batch_size": 7},
        "DenseAdam": {"lr": 0.01},
    }
    first = frozen(FIRST)
    monkeypatch.setattr(defaults, "frozen", lambda number: first if number == FIRST else table)
    defaults._in_full.cache_clear()
    yield
    defaults._in_full.cache_clear()


def keys_of(spec):
    return {key: json.loads(value) for key, value in changes.flat_values(spec)}


def test_a_full_spec_holds_every_key_of_every_section():
    spec = fill_defaults(raw())
    job = validate(JobFile, spec)
    written = {key for key, _ in changes.flat_values(json.loads(job.model_dump_json(by_alias=True)))}
    missing = {key for key in written - keys_of(spec).keys() if key.split(".")[0] not in LEFT_OUT}
    assert missing == set()
    assert spec["model"]["settings"] == {"hidden": [128, 64], "dropout": 0.0, "towers": []}
    assert fill_defaults(spec) == spec == fill_defaults(spec, unset=NEWEST_DEFAULTS)


def test_a_spec_without_a_number_has_the_defaults_of_the_first_set(newer):
    keys = keys_of(fill_defaults(raw()))
    assert (keys["defaults"], keys["tables.default.dim"], keys["tables.default.init_range"]) == (1, 16, 0.01)
    assert (keys["tables.default.optimizer.lr"], keys["train.batch_size"]) == (0.05, 1024)
    assert keys["dense.optimizer.lr"] == 0.001


def test_keys_that_are_left_out_of_a_section_that_is_given_are_of_the_set_too(newer):
    spec = raw(tables={"default": {"optimizer": {"kind": "adagrad", "per": "element"}}}, train={"accumulate": 2})
    for number, dim, row_lr, batch_size in ((FIRST, 16, 0.05, 1024), (NEWEST_DEFAULTS, 4, 0.02, 7)):
        keys = keys_of(fill_defaults(spec, unset=number))
        assert (keys["tables.default.dim"], keys["train.batch_size"]) == (dim, batch_size)
        assert keys["tables.default.optimizer.lr"] == row_lr
        assert keys["tables.default.optimizer.per"] == "element" and keys["dense.accumulate"] == 2


def test_a_written_key_holds_in_every_set(newer):
    spec = raw(train={"batch_size": 1024}, tables={"default": {"dim": 16}})
    for number in (FIRST, NEWEST_DEFAULTS):
        keys = keys_of(fill_defaults(spec, unset=number))
        assert (keys["train.batch_size"], keys["tables.default.dim"]) == (1024, 16)


def test_a_store_of_set_2_goes_on_with_what_it_measures_and_how_its_weights_decay():
    decays = raw(dense={"optimizer": {"kind": "adam", "weight_decay": 0.1}})
    for number, mode, decoupled in ((FIRST, "training", True), (2, "training", True), (3, "inference", False)):
        full = fill_defaults(decays, unset=number)
        assert full["metrics"]["progressive"] == mode and full["dense"]["optimizer"]["decoupled"] is decoupled
        assert full["dense"]["optimizer"]["lr"] == (0.001 if number == FIRST else 0.003)
        logged = json.loads(json.dumps(full))
        del logged["metrics"]["progressive"], logged["dense"]["optimizer"]["decoupled"]
        assert fill_defaults(logged) == full, "a log of its time has every other key"


def test_rows_learn_by_the_number_of_slots_unless_the_job_file_says_how():
    slots = [{"names": ["s{1..39}"]}, *RAW["slots"][1:]]
    table = fill_defaults(raw(slots=slots), unset=NEWEST_DEFAULTS)["tables"]["default"]
    assert table["grad_scale"] == "sum"
    assert (table["optimizer"]["lr"], table["optimizer"]["initial"]) == (0.01, 0.1)
    assert (table["first_order_optimizer"]["lr"], table["first_order_optimizer"]["initial"]) == (0.064, 1.0)
    few = fill_defaults(raw(tables={"default": {"first_order": False}}), unset=NEWEST_DEFAULTS)["tables"]["default"]
    assert (few["optimizer"]["lr"], few["first_order_optimizer"]) == (0.067, None)
    for said in ({"optimizer": {"kind": "adagrad"}}, {"grad_scale": "mean"}):
        table = fill_defaults(raw(slots=slots, tables={"default": said}), unset=NEWEST_DEFAULTS)["tables"]["default"]
        assert (table["optimizer"]["lr"], table["first_order_optimizer"], table["grad_scale"]) == (0.05, None, "mean")
    for number in range(FIRST, defaults.RATES_BY_SLOTS):
        table = fill_defaults(raw(slots=slots), unset=number)["tables"]["default"]
        assert (table["optimizer"]["lr"], table["first_order_optimizer"], table["grad_scale"]) == (0.05, None, "mean")


def test_an_invalid_spec_is_unchanged():
    assert fill_defaults({"name": "golden"}) == {"name": "golden"}
    assert fill_defaults(raw(newer=1) | {"train": {"unheard": 1}})["train"] == {"unheard": 1}


def test_a_logged_spec_without_the_later_keys_of_cluster_has_their_defaults():
    later, section = defaults.LATER_OF_CLUSTER, headrace.service.spec.config.ClusterSection().model_dump(mode="json")
    assert {key: section[key] for key in later} == later
    full = job_of(raw(), Path("/")).full
    old = {**full, "cluster": {key: value for key, value in full["cluster"].items() if key not in later}}
    assert changes.changed_keys(old, full) == []


@pytest.mark.parametrize(
    ("number", "null", "blank"), [(1, "reject", "read"), (3, "reject", "read"), (4, "skip", "skip")]
)
def test_older_stores_keep_events_without_a_value(number, null, blank):
    kafka = {"kind": "kafka", "topics": ["t"]}
    full = fill_defaults(raw(sources={"s": RAW["sources"]["s"], "k": kafka}, defaults=number))
    assert (full["sources"]["k"]["null_values"], full["sources"]["s"]["blank_lines"]) == (null, blank)


def test_an_unknown_set_is_refused():
    with pytest.raises(SpecError, match="defaults: "):
        job_of(raw(defaults=NEWEST_DEFAULTS + 1), Path("/"))


def test_a_default_that_is_written_out_or_written_otherwise_is_no_change():
    spec = raw(commit={"every": "1m"}, cluster={"trainers": 1})
    assert changes.changed_keys(raw(commit={"every": "60s"}), spec) == []
    assert changes.changed_keys(spec, fill_defaults(spec)) == []


def test_only_what_differs_from_the_defaults_of_its_time_is_a_change(newer):
    old, job = raw(), with_defaults(job_of(raw(), Path("/")), FIRST)
    assert changes.changed_keys(old, job.full) == []
    fresh = job_of(raw(), Path("/"))
    assert "train.batch_size" in changes.changed_keys(old, fresh.full)
    with pytest.raises(SpecError, match=r"tables\.default\.dim: cannot change from 16 to 4"):
        changes.significant_keys(old, fresh.full)


def test_a_job_file_takes_the_defaults_of_its_store_unless_it_names_a_set(newer, tmp_path):
    here = {"store": {"path": str(GOLDEN / "store")}}
    assert with_store_defaults(job_of(raw(**here), tmp_path)).spec.train.batch_size == 1024
    assert with_store_defaults(job_of(raw(**here, defaults=NEWEST_DEFAULTS), tmp_path)).spec.train.batch_size == 7
    assert with_store_defaults(job_of(raw(), tmp_path)).spec.train.batch_size == 7
    assert job_of(raw(), tmp_path).full["defaults"] == NEWEST_DEFAULTS


def test_a_run_lists_the_old_defaults_in_force(newer, tmp_path):
    spec = raw(store={"path": str(GOLDEN / "store")}, train={"batch_size": 1024})
    job = with_store_defaults(job_of(spec, tmp_path))
    said = old_defaults_note(job) or ""
    assert 'keys that the job file leaves out: sources.s.blank_lines = "read" (a new store: "skip"),' in said
    assert "tables.default.dim = 16 (a new store: 4)," in said
    assert "batch_size" not in said  # it is written in the file
    assert old_defaults(with_defaults(job, NEWEST_DEFAULTS)) == []


def test_a_store_at_an_impossible_path_is_left_to_its_claim_to_refuse(tmp_path):
    (tmp_path / "store").write_text("no folder")
    job = job_of(raw(), tmp_path)
    assert with_store_defaults(job) == job
