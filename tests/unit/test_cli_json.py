"""The commands delete, forget, import and rerun print JSON where programs ask for it."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from headrace.service.cli import history_commands, main, service_commands, table_commands
from headrace.service.exports import model_import
from headrace.service.history import rerun
from headrace.service.tables import forget
from tests.fakes.exports import write_export
from tests.integration.stream_job import write_job


@pytest.fixture
def answer():
    def run(*words):
        ended = CliRunner().invoke(main.cli, [*map(str, words), "--json"])
        assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
        return ended.exit_code, json.loads(ended.stdout)

    return run


def test_a_deleted_job(answer, monkeypatch):
    asked = []

    @contextmanager
    def service(url, token):
        yield SimpleNamespace(change=lambda method, path, **more: asked.append((method, path, more)))

    monkeypatch.setattr(service_commands, "service_at", service)
    assert answer("delete", "news", "--keep-store", "--yes") == (0, {"job": "news", "store_kept": True})
    assert asked == [("DELETE", "/v1/jobs/news", {"keep_store": "true"})]


def test_a_forgotten_value(answer, monkeypatch):
    monkeypatch.setattr(table_commands, "load_run", lambda job, overrides: None)
    monkeypatch.setattr(forget, "forget", lambda *_, everywhere: iter(["row: gone", "letters: 0"]))
    assert answer("forget", "job.toml", "user", "7") == (0, {"lines": ["row: gone", "letters: 0"]})


def test_an_imported_model(answer, monkeypatch, tmp_path):
    monkeypatch.setattr(model_import, "shapes_of", lambda job, folder: {})
    path = write_job(tmp_path, num_parts=1, num_lines=1)
    rows = {("a", 1): [1, 2, 3, 4, 5], ("a", 2): [5, 4, 3, 2, 1]}
    code, found = answer("import", path, write_export(tmp_path / "out", "base", 3, rows))
    assert code == 0 and found["commit"] and found["tables"] == {"default": 2} and found["slots"] == {"a": 2}
    assert set(found) == {"store", "commit", "tables", "slots", "ignored", "dense"}


def test_a_rerun(answer, monkeypatch):
    monkeypatch.setattr(history_commands, "load_run", lambda job, overrides: None)

    def rerun_job(job, start, show, *, keep, as_json):
        print(json.dumps({"start": start, "keep": keep, "as_json": as_json, "show": type(show).__name__}))
        return 1

    monkeypatch.setattr(rerun, "rerun_job", rerun_job)
    told = {"start": "17", "keep": False, "as_json": True, "show": "PlainShow"}
    assert answer("rerun", "job.toml", "--from", "17") == (1, told)
