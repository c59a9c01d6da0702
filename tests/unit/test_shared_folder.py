"""A worker knows whether its machine sees a folder of the head."""

import shutil

import pytest

from headrace.errors import SpecError, Unwritable
from headrace.shared_folder import FOLDER, SharedFolder

TOLD = r"trainer-1 on .* does not see {} of the head .*mount that folder at the same path .* store.parts = \"object\""


def test_a_worker_that_sees_the_folder_goes_on_and_nothing_is_left_in_it(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "of-a-killed-run").touch()
    with SharedFolder.proved(tmp_path) as shared:
        shared.check("trainer-1")
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*/*")] == [shared.proof]
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_missing_or_another_machines_is_refused(tmp_path):
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    with SharedFolder.proved(here) as shared, SharedFolder.proved(there) as another:
        assert shared.proof != another.proof
        of_this_machine = shared.model_copy(update={"path": there})
        with pytest.raises(SpecError, match=TOLD.format(there)) as refused:
            of_this_machine.check("trainer-1")
        assert (refused.value.path, refused.value.exit_code) == ("store.path", 2)
        shutil.rmtree(there)
        with pytest.raises(SpecError, match="No such file"):
            of_this_machine.check("trainer-1")
        shared.check("trainer-1")


def test_a_run_before_does_not_prove_this_one(tmp_path):
    with SharedFolder.proved(tmp_path) as before:
        pass
    with SharedFolder.proved(tmp_path), pytest.raises(SpecError):
        before.check("shard-0")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(Unwritable, match=f"{tmp_path}/gone/{FOLDER}/"), SharedFolder.proved(tmp_path / "gone"):
        pass
