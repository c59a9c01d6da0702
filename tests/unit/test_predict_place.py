"""The place of an output: what a look at it tells while workers write, and where there can be none."""

import os
from contextlib import ExitStack, nullcontext

import pyarrow as pa
import pytest

from headrace.errors import SpecError
from headrace.service.predict.prediction import claim_output
from headrace.service.predict.worker_group import POLL_S
from headrace.trainer.predict.output_files import PartWriter, PredictionOutput
from headrace.trainer.predict.output_place import WORK, FolderPlace


@pytest.fixture
def begun(tmp_path):
    """The files of an output, two parts of which are finished."""
    output = PredictionOutput(tmp_path / "out")
    output.work.mkdir(parents=True)
    for number in range(2):
        (output.work / f"mark-{number:06d}.json").write_text("{}")
    return output


def test_a_file_that_is_renamed_during_a_look_hides_no_other(begun, monkeypatch):
    (begun.work / "observed-000002.arrow.1234").touch()
    scandir = os.scandir

    def gone_meanwhile(path):
        with scandir(path) as entries:
            found = [*entries]
        (begun.work / "observed-000002.arrow.1234").unlink(missing_ok=True)
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", gone_meanwhile)
    assert begun.place.sizes(WORK) == {"mark-000000.json": 2, "mark-000001.json": 2}
    assert begun.place.sizes() == {}, "files alone, no folder"


def test_finished_parts_are_counted_by_names_and_not_with_each_look_at_the_workers(begun, monkeypatch):
    monkeypatch.setattr(FolderPlace, "sizes", lambda *_: pytest.fail("a look at each file"))
    assert begun.num_finished() == 2
    assert PredictionOutput(begun.place.folder / "absent").num_finished() == 0
    assert begun.place.look_s > 2 * POLL_S


@pytest.mark.parametrize("output", ["file", "file/below", "file/far/below"])
def test_an_output_that_names_a_file_is_refused_by_its_key(tmp_path, output):
    (tmp_path / "file").write_text("mine")
    with ExitStack() as held, pytest.raises(SpecError, match=r"^output: .*/file is a file; choose another$"):
        claim_output(PredictionOutput(tmp_path / output), "fingerprint", held)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_a_killed_worker_had_begun_is_removed_and_nothing_else(tmp_path):
    output = PredictionOutput(tmp_path / "out")
    kept = {"mark-000000.json", "observed-000000.arrow", "clicks-000000.arrow", "lock"}
    output.work.mkdir(parents=True)
    for name in kept - {"lock"}:
        (output.work / name).touch()
    types = pa.schema([("value", pa.int64())])
    PartWriter(output, 1, types, types, types).close()  # killed before it has finished the part
    assert len([*output.work.iterdir()]) == 6
    with ExitStack() as held:
        assert claim_output(output, "fingerprint", held) is None
    assert {path.name for path in output.work.iterdir()} == kept
