"""`headrace spec diff`: the class of each key that differs, and what to do; and the settings in force beside a file."""

import json
from contextlib import closing

import pytest
from typer.testing import CliRunner

from headrace.deadline import Deadline
from headrace.service.cli.main import cli
from headrace.service.cluster import store_defaults
from headrace.service.jobs import spec_difference
from headrace.service.jobs.spec_difference import (
    CarriedOver,
    CarriedRows,
    SettingInForce,
    WeightChange,
    changes_between,
    format_carried,
    not_taken_yet,
    settings_in_force,
)
from headrace.service.spec.job import load_job, with_defaults
from headrace.trainer.journal.log import Log
from headrace.trainer.journal.records import SpecOperation
from headrace.trainer.spec.changes import flat_values
from tests.integration import stream_job

SPEC = stream_job.SPEC.replace("dim = 4", 'dim = 4\ngrad_scale = "mean"')  # so that a rate changes nothing else


@pytest.fixture
def diff(tmp_path):
    """Compare the usual job file with a changed one; the exit code and the lines."""

    def compared(*changes, options=()):
        new = SPEC
        for old_text, new_text in changes:
            assert old_text in new
            new = new.replace(old_text, new_text)
        for name, text in (("old.toml", SPEC), ("new.toml", new)):
            (tmp_path / name).write_text(text)
        found = CliRunner().invoke(cli, ["spec", "diff", *map(str, tmp_path.glob("old.toml")),
                                         str(tmp_path / "new.toml"), *options])  # fmt: skip
        return found.exit_code, found.output.splitlines(), found.exception

    return compared


def test_each_class_has_its_lines_and_what_to_do(diff):
    code, lines, _ = diff(
        ("dim = 4", 'dim = 4\ndecay = 0.9\noptimizer = { kind = "adagrad", lr = 0.1 }'),
        ("batch_size = 64", "batch_size = 32"),
        ('names = ["a", "b"]', 'names = ["b", "c"]'),
        ('slices = ["a"]', ""),
        ('path = "store"', 'path = "store"\n[commit]\nkeep = 5'),
    )
    assert code == 0
    assert lines[0].startswith("hot: `headrace set JOB KEY=VALUE`")
    assert lines[1:3] == ["  tables.default.decay: 0.98 -> 0.9", "  tables.default.optimizer.lr: 0.05 -> 0.1"]
    assert lines[3].startswith("at a restart: ")
    assert lines[4] == "  commit.keep: 3 -> 5"
    assert lines[5].startswith("between passes: ")
    assert lines[6:8] == ['  metrics.slices: ["a"] -> []', "  train.batch_size: 64 -> 32"]
    assert lines[8].startswith("carried over: ")
    assert lines[9:] == ["  slots: added c; removed a"]


def test_a_new_model_is_said_with_its_reason_and_exit_code_1(diff):
    code, lines, _ = diff(("dim = 4", "dim = 8"), ("size = 2", "size = 3"))
    assert code == 1
    assert lines[0].startswith("a new model: a new store.path, or --fresh; `headrace import`")
    assert lines[1] == "  slots: slot 'd' (size was 2 and is 3; another name would make it a new slot)"
    assert lines[2] == "  tables.default.dim: 4 -> 8"
    assert diff() == (0, ["nothing changes"], None)


def test_json_is_for_programs(diff):
    code, lines, _ = diff(("batch_size = 64", "batch_size = 32"), options=("--json",))
    assert code == 0
    (change,) = json.loads("\n".join(lines))["changes"]
    assert change == {"key": "train.batch_size", "change": "between passes", "note": "", "was": "64", "now": "32"}


def test_a_dry_run_without_a_commit_says_so(diff):
    code, _, error = diff(('names = ["a", "b"]', 'names = ["a", "b", "c"]'), options=("--dry-run",))
    assert code != 0
    assert "store.path: " in str(error) and "holds no commit" in str(error)


def test_rows_and_weights_that_are_carried_over_are_listed():
    found = CarriedOver(
        "t1-0000000003-g1", 3, {"a": 0},
        {"default": CarriedRows(1200, {"b": 7}, dropped=False), "more": CarriedRows(5, {}, dropped=True)},
        [WeightChange("w", [2, 3], [2, 4], 6), WeightChange("new", None, [4], 0), WeightChange("old", [1], None, 0)],
    )  # fmt: skip
    assert list(format_carried(found)) == [
        "carried over from version 3, commit t1-0000000003-g1; nothing was changed",
        "  table default: 1,200 rows are kept; 7 of b until ageing removes them",
        "  table more: goes with 5 rows; no slot uses it",
        "  w: 2 x 3 -> 2 x 4, 6 values are kept",
        "  new: 4, at its initial value",
        "  old: 1 is dropped",
    ]
    assert json.dumps(found.message())


def test_a_job_compared_with_itself_has_no_changes(tmp_path):
    (tmp_path / "job.toml").write_text(SPEC)
    assert changes_between(load_job(tmp_path / "job.toml").full, load_job(tmp_path / "job.toml").full) == []


@pytest.fixture
def restarted(tmp_path, monkeypatch):
    """A store whose newest commit has set 4 of the defaults, before a restart with another key, which is not committed.

    Gives the job of its present file.
    """
    (tmp_path / "job.toml").write_text(SPEC)
    old = with_defaults(load_job(tmp_path / "job.toml"), 4).full
    (tmp_path / "job.toml").write_text(SPEC.replace("batch_size = 64", "batch_size = 32"))
    (tmp_path / "store").mkdir()
    with closing(Log.claim(tmp_path / "store" / "log", 1, Deadline.after(5))) as log:
        for spec in (old, with_defaults(load_job(tmp_path / "job.toml"), 4).full):
            log.append(SpecOperation(spec=spec))
    for module in (store_defaults, spec_difference):
        monkeypatch.setattr(module, "newest_spec", lambda store: old)
    return lambda: load_job(tmp_path / "job.toml")


def test_a_restart_takes_a_changed_file_before_it_commits(restarted, tmp_path):
    assert not_taken_yet(restarted()) == []
    (tmp_path / "job.toml").write_text(SPEC.replace("batch_size = 64", "batch_size = 16"))
    assert [(each.key, each.was, each.now) for each in not_taken_yet(restarted())] == [("train.batch_size", "32", "16")]


def test_a_default_of_an_older_store_is_not_chosen_by_its_job(restarted):
    job = restarted()
    found = {each.key: each for each in settings_in_force(job, {"commit": {"keep": 9}})}
    assert {each.origin for each in found.values()} == {"file", "default", "set"}
    assert [key for key, each in found.items() if each.now != dict(flat_values(job.full)).get(key)] != ["commit.keep"]
    assert found["commit.keep"] == SettingInForce("commit.keep", None, "9", "set")
