"""The configuration of a service: paths are relative to the file, mistakes are named, the example is valid."""

from pathlib import Path

import pytest

from headrace.errors import SpecError
from headrace.service.auth.allowed_paths import AllowedPaths
from headrace.service.jobs.config import LimitsSection, load_service

EXAMPLE = Path(__file__).parents[2] / "deploy" / "service.toml"


def loaded(folder, text):
    path = folder / "service.toml"
    path.write_text(text)
    return load_service(path)


def test_relative_paths_start_at_the_files_folder_and_addresses_stay(tmp_path):
    config = loaded(
        tmp_path,
        'root = "r"\n[tls]\ncert = "c.pem"\nkey = "/k.pem"\n[allow]\nroots = ["data", "/abs", "s3://bucket/prefix"]',
    )
    assert config.root == tmp_path / "r" and config.jobs == tmp_path / "r" / "jobs"
    assert (config.tls.cert, config.tls.key) == (tmp_path / "c.pem", Path("/k.pem"))
    assert config.allow.roots == (str(tmp_path / "data"), "/abs", "s3://bucket/prefix")
    assert config.database_url == f"sqlite:///{tmp_path}/r/records.db"


def test_the_example_allows_no_script_that_others_may_write():
    assert load_service(EXAMPLE).allow.relative_scripts() == []


def test_scripts_below_a_specs_base_are_told(tmp_path):
    allowed = '[["python", "generator.py"], ["python", "-m", "towers", "..."], ["/opt/run", "bin/push", "/opt/a.sh"]]'
    config = loaded(tmp_path, f'root = "r"\n[allow]\npipe_commands = {allowed}\nexport_commands = [["sh", "push.sh"]]')
    assert config.allow.relative_scripts() == ["bin/push", "generator.py", "push.sh"]


def test_another_database_is_a_change_of_its_address(tmp_path):
    config = loaded(tmp_path, 'root = "r"\ndatabase = "postgresql+psycopg://db/headrace"')
    assert config.database_url == "postgresql+psycopg://db/headrace"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "root"),
        ('root = "r"\nlisten = "8080"', "listen"),
        ('root = "r"\nlisten = "localhost:99999"', "listen"),
        ('root = "r"\n[limits]\nmax_jobs = 0', "limits.max_jobs"),
        ('root = "r"\n[limits]\nstopp = "1s"', "stopp"),
        ('root = "r"\n[tls]\ncert = "c.pem"', "tls"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, words):
    with pytest.raises(SpecError, match=words):
        loaded(tmp_path, text)


def test_what_allows_things_and_what_remembers_them_is_reached_by_no_spec(tmp_path):
    config = loaded(tmp_path, f'root = "r"\ndatabase = "sqlite:///{tmp_path}/records.db"\n[allow]\nroots = ["."]')
    confines = AllowedPaths.of(config.allow.roots, tmp_path / "r/jobs/news", config.private)
    for name in ("service.toml", "records.db", "records.db-wal", "."):
        with pytest.raises(SpecError, match="service's own"):
            confines.check_folder(str(tmp_path / name), tmp_path, "store.path")
    confines.check_folder(str(tmp_path / "data"), tmp_path, "store.path")
    with pytest.raises(SpecError, match="_file"):
        loaded(tmp_path, 'root = "r"\n_file = "/elsewhere"')


def test_the_files_with_the_secrets_of_the_database_are_reached_by_no_spec(tmp_path):
    url = f"postgresql+psycopg://headrace@db/headrace?passfile={tmp_path}/pgpass&sslkey={tmp_path}/my%20key"
    config = loaded(tmp_path, f'root = "r"\ndatabase = "{url}"\n[allow]\nroots = ["."]')
    assert {tmp_path / "pgpass", tmp_path / "my key"} <= set(config.private)


def test_the_example_is_right_and_says_what_the_defaults_are():
    config = load_service(EXAMPLE)
    assert config.limits == LimitsSection()
    assert config.access.anonymous == "none"
