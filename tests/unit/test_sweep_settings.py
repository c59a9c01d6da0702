"""The settings of a sweep, slots that are left out, the table of results; and what is refused before anything runs."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.config import load_toml, parse_value
from headrace.dataset.spec.schema import Schema
from headrace.errors import SpecError
from headrace.pserver.row_optimizers import Adagrad
from headrace.service.cli.sweep_command import _with_its_slices, sweep
from headrace.service.cluster.run_folder import run_folder
from headrace.service.history.frozen_runs import frozen_of
from headrace.service.history.paired_test import JobComparison, PairedResult
from headrace.service.planning.sweep_runs import MARK, PRIVATE, Sweep, SweepFailed, SweepResult, table_of
from headrace.service.planning.sweep_settings import (
    BASE,
    MAX_SETTINGS,
    SweepSetting,
    _overrides,
    ablations,
    check_settings,
    grid,
    of_file,
    read_settings,
    shown,
    split_values,
    without_slices,
)
from headrace.service.planning.training_facts import alone
from headrace.service.predict.prediction import job_of as job_of_request
from headrace.service.spec.job import job_of, load_job
from headrace.service.spec.side_groups import group_overrides
from headrace.trainer.predict.config import PredictionRequest
from tests.integration.epoch_job import write_epoch_job

VALUE = st.one_of(
    st.integers(-9, 9).map(str),
    st.sampled_from(["deepfm", '"a,b"', "[64, 32]", "{kind = 'sgd', lr = 0.1}", "[[1, 2], [3]]", "'x]'"]),
)


@given(st.lists(VALUE, min_size=1, max_size=5))
def test_values_are_split_at_the_commas_between_them(values):
    assert split_values(",".join(values)) == values
    assert split_values(" , ".join(values)) == values


def test_a_grid_has_every_combination_and_is_named_by_what_varies():
    found = grid(["train.batch_size=64,128", "tables.default.dim=8", "model.settings.hidden=[64,32],[8]"])
    assert [each.name for each in found] == [
        f"train.batch_size={size} model.settings.hidden={hidden}" for size in (64, 128) for hidden in ("[64,32]", "[8]")
    ]
    assert all("tables.default.dim=8" in each.overrides for each in found)
    assert grid([]) == [SweepSetting(BASE, ())]
    assert grid(["a=1,2"], ["user"])[1].without == ["user"]


def test_a_file_has_a_table_for_each_setting():
    found = of_file(
        '["wide"]\n"model.name" = "dcn_v2"\n"model.settings.hidden" = [8, 4]\n["plain"]\n"train.learn" = false\n'
    )
    assert found == [
        SweepSetting("wide", ("model.name=dcn_v2", "model.settings.hidden=[8, 4]")),
        SweepSetting("plain", ("train.learn=false",)),
    ]
    assert parse_value(found[0].overrides[1].partition("=")[2]) == [8, 4]
    assert of_file('["lr"]\n"model.settings" = {}\n') == [SweepSetting("lr", ("model.settings={}",))]
    for text, words in (("x", "not TOML"), ("a = 1", "a table for each")):
        with pytest.raises(SpecError, match=words):
            of_file(text)


TABLES = """
[gentle.tables.default]
optimizer.lr = 0.02
decay = 0.5
[plain]
dense.optimizer = {kind = "sgd", lr = 0.1}
"model.settings" = {hidden = [[8], [4]]}
name = "7"
"""


def test_a_setting_may_be_tables_and_follows_what_is_common(tmp_path):
    (tmp_path / "settings.toml").write_text(TABLES)
    gentle, plain = read_settings(tmp_path / "settings.toml", ["train.batch_size=8"])
    assert gentle.overrides == (
        "train.batch_size=8", "tables.default.optimizer.lr=0.02", "tables.default.decay=0.5"
    )  # fmt: skip
    job = write_epoch_job(tmp_path)
    loaded = load_job(job, gentle.overrides).spec
    assert (loaded.tables["default"].optimizer, loaded.train.batch_size) == (Adagrad(lr=0.02), 8)
    given = load_toml(job, plain.overrides)
    assert given["dense"]["optimizer"] == {"kind": "sgd", "lr": 0.1}, "in place of the file's, whatever keys that has"
    assert (given["model"]["settings"], given["name"]) == ({"hidden": [[8], [4]]}, "7")


@given(st.dictionaries(st.text(min_size=1), st.text() | st.booleans() | st.integers() | st.lists(st.text())))
def test_a_table_with_a_kind_is_read_again_as_it_was_written(table):
    whole = {**table, "kind": "x"}
    (override,) = _overrides({"a": whole})
    assert parse_value(override.partition("=")[2]) == whole


def test_settings_of_a_file_take_one_value_for_each_common_key(tmp_path):
    (tmp_path / "settings.toml").write_text(TABLES)
    job = write_epoch_job(tmp_path)
    for options, words in (({"sets": ["seed=1,2"]}, "one value"), ({"ablate": True}, "--ablate leaves each slot out")):
        with pytest.raises(SpecError, match=words):
            sweep(job, settings=tmp_path / "settings.toml", **options)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff")
    for name, words in (("absent", "absent cannot be read: No such file"), ("", "directory"), ("binary", "not UTF-8")):
        with pytest.raises(SpecError, match=rf"^--settings: .*{words}"):
            read_settings(tmp_path / name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (grid([]), "compares with nothing"),
        (grid(["a=" + ",".join(map(str, range(MAX_SETTINGS + 1)))]), "at most 64"),
        (grid(["a=1,1"]), "twice"),
    ],
)
def test_a_sweep_that_compares_nothing_or_too_much_is_refused(settings, words):
    with pytest.raises(SpecError, match=words):
        check_settings(settings)


def test_an_ablation_leaves_each_slot_out_once(tmp_path):
    job = write_epoch_job(tmp_path)
    base = grid(["train.batch_size=16"], ["b"])[0]
    schema = Schema.of(load_job(job, base.overrides).spec.slots)
    found = ablations(base, schema)
    assert [each.name for each in found] == [BASE, "without a", "without x"]
    assert [each.without for each in found] == [["b"], ["b", "a"], ["b", "x"]]
    assert all(each.overrides[0] == "train.batch_size=16" for each in found)


def test_a_slot_that_is_left_out_is_no_slice_either(tmp_path):
    job = write_epoch_job(tmp_path)
    base = grid(["metrics.slices=['a','b']"])[0]
    schema = Schema.of(load_job(job, base.overrides).spec.slots)
    every = ablations(base, schema)
    with pytest.raises(SpecError, match=r"metrics.slices.0: there is no slot 'a'"):
        load_job(job, every[1].overrides)
    found = [without_slices(each, ["a", "b"]) for each in every]
    assert [load_job(job, each.overrides).spec.metrics.slices for each in found] == [
        ("a", "b"), ("b",), ("a",), ("a", "b")
    ]  # fmt: skip
    assert found == _with_its_slices(job, every), "as the command does"


KAFKA = (
    "sources.later={kind='kafka', topics=['t'], end='2026-01-01T00:00:00Z', after='history', "
    "event_time={kind='record'}, group='live', "
    "options={bootstrap_servers='b:9', sasl_plain_username='joe', sasl_plain_password='hunter2'}}"
)


def test_secrets_of_a_setting_are_in_no_argument_and_in_no_result(tmp_path):
    job = write_epoch_job(tmp_path)
    settings = grid([KAFKA, "train.batch_size=16,32"])
    sweep = Sweep(job, tmp_path / "sweep", settings, keep="1GiB", after=0)
    with run_folder(tmp_path / "sweep" / PRIVATE) as folder:
        command = sweep.command(1)
        assert not [word for word in command if "hunter2" in word or "joe" in word]
        file = folder / "01.json"
        assert command[-2:] == ["--set", f"@{file}"]
        assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
        run = load_job(job, command[-1:])
    assert run.spec.train.batch_size == 32 and run.secrets == load_job(job, [KAFKA]).secrets and run.secrets
    assert run.spec.sources["later"].group == "live-sweep", "the live group keeps its positions"
    message = json.dumps(SweepResult(settings[1], {}, {}, 0.0, 0, 0.0, None).message())
    assert "hunter2" not in message and "joe" not in message and "***" in message and "b:9" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.options.ssl_password=x", "a.options.ssl_password=***"),
        ("a.options.ssl_password={env='X'}", "a.options.ssl_password={env='X'}"),
        ("a.options={ssl_password='x', port=1}", 'a.options={"ssl_password": "***", "port": 1}'),
        ("a.ssl_password.b=x", "a.ssl_password.b=***"),
        ("model.name=lr", "model.name=lr"),
        ("no equals", "no equals"),
    ],
)
def test_a_secret_is_shown_as_stars(override, expected):
    assert shown(override) == expected


@pytest.mark.parametrize("metrics", [{}, {"life": {}}])
def test_a_sweep_of_an_empty_stream_says_so(tmp_path, metrics):
    job = write_epoch_job(tmp_path)
    sweep = Sweep(job, tmp_path / "sweep", grid(["train.batch_size=16,32"]), keep="1GiB", after=0)
    report = {"metrics": metrics, "wall_s": 1.0, "events": 7, "rejected": {"bad": 7}, "samples": 0, "tables": {}}
    (tmp_path / "sweep" / "00").mkdir(parents=True)
    (tmp_path / "sweep" / "00" / "report.json").write_text(json.dumps(report))
    with pytest.raises(SweepFailed, match="predicted no sample.* 7 events were read, and 7 rejected; its output is in"):
        sweep._result(0)


def test_runs_beside_a_job_have_kafka_groups_of_their_own(tmp_path):
    job = load_job(write_epoch_job(tmp_path), [KAFKA, "sources.later.start=group"])
    for beside, suffix in ((alone(job), "-size"), (frozen_of(job, tmp_path / "twin"), "-frozen")):
        later = beside.spec.sources["later"]
        assert (later.group, later.start) == (f"live{suffix}", "earliest"), suffix
        assert beside.spec.sources["history"] == job.spec.sources["history"] and beside.secrets == job.secrets
    unnamed = load_job(job.folder / "job.toml", [KAFKA.replace("group='live', ", "")])
    assert group_overrides(unnamed.spec, "-sweep") == ['sources.later.group="epochs-sweep"']


SLOTS = [{"names": ["a", "b"]}, {"name": "x", "kind": "dense"}, {"name": "click", "kind": "meta"}]
COMMAND = {"command": ["cat"], "protocol": "arrow"}


def raw(**keys):
    return {
        "name": "small",
        "sources": {"lines": {"kind": "files", "paths": ["*.txt"]}},
        "pipe": COMMAND,
        "slots": SLOTS,
        "tasks": [{"name": "ctr", "label": "click"}],
        "model": {"name": "lr"},
        "store": {"path": "store"},
        **keys,
    }


def test_a_slot_that_is_left_out_is_not_in_the_spec(tmp_path):
    job = job_of(raw(without=["a", "x"]), tmp_path)
    assert [slot.name for slot in Schema.of(job.spec.slots).slots] == ["b", "click"]
    assert "without" not in job.raw and "without" not in job.full
    assert job.raw["pipe"] == {**COMMAND, "extra": "drop"}, "the generator may still emit it"
    predicted = job_of_request(PredictionRequest(input={"paths": ("x",)}, output="o", spec=raw(without=["a", "x"])))
    assert predicted.raw["slots"] == job.raw["slots"]
    assert job_of(raw(), tmp_path).raw == raw() and job_of(raw(without=[]), tmp_path).raw == raw()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"without": ["c"]}, r"without.0: 'c' is no slot that the model gets"),
        ({"without": ["click"]}, r"without.0: 'click' is no slot"),
        ({"without": "a"}, r"without: is a list of names"),
        ({"without": ["a"], "pipe": {"command": ["cat"]}}, r'without: the pipe prints all slots .* protocol = "arrow"'),
        (
            {
                "without": ["a"],
                "pipe": {"kind": "columns"},
                "slots": [*SLOTS, {"name": "a_b", "cross": ["a", "b"]}],
            },
            r"without: slot 'a' is crossed by 'a_b'",
        ),
        ({"without": ["a", "b", "x"]}, r"slots: all slots are meta"),
        ({"without": ["a"], "slots": [*SLOTS, {"name": "c", "cross": 3}, 7]}, r"slots"),
    ],
)
def test_slots_that_cannot_be_left_out_are_refused(tmp_path, keys, words):
    with pytest.raises(SpecError, match=words):
        job_of(raw(**keys), tmp_path)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["sources.later.follow=true"], r"sources.later: a sweep reads a stream to its end"),
        (
            ["sources.later={kind='kafka', topics=['t'], end='latest', after='history', event_time={kind='record'}}"],
            "latest",
        ),
        (["predict={input={paths=['x']}, output='o'}"], r"predict: the runs of a sweep"),
        (["evaluator={input={paths=['x']}}"], r"evaluator: the runs of a sweep would all score their versions"),
        (
            [
                "sources.later={kind='kafka', topics=['t'], start='group', end='2026-01-01T00:00:00Z', "
                "after='history', event_time={kind='record'}}"
            ],
            r"sources.later.start: is \"group\", which moves",
        ),
        (["train.batch_size=0,1"], r"train.batch_size.*in the setting 'train.batch_size=0'"),
    ],
)
def test_what_a_sweep_cannot_run_is_refused_before_it_runs(tmp_path, sets, words):
    job = write_epoch_job(tmp_path)
    with pytest.raises(SpecError, match=words):
        Sweep(job, tmp_path / "sweep", grid(sets), keep="1GiB", after=0)
    assert not (tmp_path / "sweep").exists()


def test_a_folder_of_something_else_is_not_emptied(tmp_path):
    job = write_epoch_job(tmp_path)
    precious = tmp_path / "sweep" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    sweep = Sweep(job, tmp_path / "sweep", grid(["train.batch_size=16,32"]), keep="1GiB", after=0)
    with pytest.raises(SpecError, match="holds something else"):
        sweep.run(1, print)
    assert precious.exists() and not (precious.parent / MARK).exists()
    sweep = Sweep(job, precious, grid(["train.batch_size=16,32"]), keep="1GiB", after=0)
    with pytest.raises(SpecError, match="is no folder"):
        sweep.run(1, print)
    assert precious.read_text() == "years of work"


def result(name, auc, against):
    metrics = {"ctr": {"auc": auc, "gauc": None, "logloss": 0.25}}
    return SweepResult(SweepSetting(name, ()), metrics, {"ctr": {"auc": auc + 0.05}}, 12_345.6, 1_234, 2.0, against)


def test_the_table_has_a_row_for_each_setting_with_its_difference_from_the_first():
    paired = PairedResult("ctr", "auc", 9, 0.7, 0.712, 0.012, 0.001, 0.0039)
    second = result("wide", 0.7123, JobComparison(9, 900, 0, 0, [paired]))
    text = io.StringIO()
    Console(file=text, width=160).print(table_of([result("narrow", 0.7, None), second], second_half=True))
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in text.getvalue().splitlines()
        if "│" in line
    }
    assert rows["narrow"] == ["0.7000", "-", "0.2500", "0.7500", "12,346", "1,234", "-", "-", "-", "-"]
    assert rows["wide"] == ["0.7123", "-", "0.2500", "0.7623", "12,346", "1,234", "+0.0120", "0.0039", "-", "-"]
    assert "AUC 2nd" not in [column.header for column in table_of([second]).columns]
    assert json.loads(json.dumps(second.message()))["against_first"]["results"][0]["p"] == 0.0039
