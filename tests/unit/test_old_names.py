"""What versions before 0.2 wrote under the project's first name is read and stays valid; their generators still run."""

import subprocess
import sys

import pytest

from headrace.dataset.loader import kept_files
from headrace.dataset.pipe.command import OLD_NAMES, old_name_hint
from headrace.dataset.spec.config import PipeSection
from headrace.identity.join_token import JoinToken
from headrace.service.auth.tokens import hashed
from headrace.service.cluster.store import MARKER, OLD_MARKER, claimed, remove
from tests.unit.test_kept_segments import Reads, events_of, files_in

GENERATOR = "from dataset.generator import DataGenerator, signs\nprint(DataGenerator.__module__)\n"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_store_keeps_the_marker_that_it_began_with(tmp_path, fresh):
    store = tmp_path / "store"
    with claimed(store, "clicks", fresh=False):
        (store / MARKER).rename(store / OLD_MARKER)
    with claimed(store, "clicks", fresh=fresh):
        assert (store / OLD_MARKER).exists() and not (store / MARKER).exists()
    remove(store, "clicks")
    assert not store.exists()


def test_kept_samples_of_before_are_not_read_again(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(kept_files, "FACTS", kept_files.OLD_FACTS)
        Reads(events_of(3), files_in(tmp_path / "kept"), tmp_path).epoch(1)
    (path,) = (tmp_path / "kept").iterdir()
    then = path.read_bytes()
    reads = Reads(events_of(3), files_in(tmp_path / "kept"), tmp_path)
    reads.epoch(1)
    assert reads.source.num_reads == 0 and path.read_bytes() == then


def test_join_tokens_and_api_tokens_of_before_stay_valid():
    fingerprint, secret = "ab" * 32, "cd" * 32
    assert JoinToken.parse(f"millrace-1.{fingerprint}.{secret}") == JoinToken(fingerprint, secret)
    assert hashed("secret", "00" * 16) == ("ff7cbeb774e1b26f280211f4acb6f45918766ed279a84b108167057058cf3d2d")


def ran(folder, *environment):
    command = ["env", *environment, sys.executable, "generator.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_old_name_works_in_pipe_commands_and_hides_no_other_package(tmp_path):
    (tmp_path / "generator.py").write_text(GENERATOR)
    path = f"PYTHONPATH={OLD_NAMES}"
    assert ran(tmp_path, path).stdout == "dataset.generator\n"
    other = tmp_path / "installed" / "dataset"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "generator.py").write_text("class DataGenerator: pass\nsigns = None\nprint('another distribution')\n")
    assert ran(tmp_path, f"{path}:{other.parent}").stdout.startswith("another distribution")
    (tmp_path / "dataset.py").write_text("print('a file of the user')\n")
    told = ran(tmp_path, path)
    assert told.stdout == "a file of the user\n" and "'dataset' is not a package" in told.stderr


def test_a_hint_names_the_file_that_uses_the_old_name(tmp_path):
    section = PipeSection(command=("python", "generator.py"))
    (tmp_path / "generator.py").write_text(GENERATOR)
    assert str(tmp_path / "generator.py") in old_name_hint(section, tmp_path)
    assert "`-m headrace.dataset`" in old_name_hint(PipeSection(command=("python", "-m", "dataset")), tmp_path)
    (tmp_path / "dataset.py").write_text("")
    assert old_name_hint(section, tmp_path) is None
    (tmp_path / "generator.py").write_text(GENERATOR.replace("from dataset", "from headrace.dataset"))
    (tmp_path / "dataset.py").unlink()
    assert old_name_hint(section, tmp_path) is None
