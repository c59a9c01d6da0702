"""Event files of TensorBoard, read as TensorBoard reads them: the closes of a log, each once."""

import shutil
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.errors import Unwritable
from headrace.service.history import event_files as written
from headrace.service.history.event_files import EventFiles, event_files
from tests.fakes.past import Past


@pytest.fixture
def past(tmp_path):
    made = Past(tmp_path / "store").begin()
    made.meet("a")
    yield made
    made.end()


def close(past, *versions):
    for version in versions:
        facts = {"window": {"ctr": {"auc": version / 8, "gauc": None}}}
        past.close(version, facts, a=(100 * version - 100, 100 * version))


def scalars(folder, tag="window/ctr/auc"):
    """The steps and values of a tag."""
    read = EventAccumulator(str(folder)).Reload()
    return [(each.step, each.value) for each in read.Scalars(tag)] if tag in read.Tags()["scalars"] else []


def write(past, folder):
    files = EventFiles(past.store / "log", folder)
    number = files.write_on()
    files.close()
    return number


def test_each_close_is_a_step_with_its_figures(past, tmp_path):
    close(past, 1, 2)
    assert write(past, tmp_path / "runs") == 2
    folder = tmp_path / "runs" / "t1"
    assert scalars(folder) == [(1, 0.125), (2, 0.25)]
    tags = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    assert {"stream/events", "stream/samples", "stream/rejected"} <= {*tags} and "window/ctr/gauc" not in tags
    assert scalars(folder, "stream/events") == [(1, 100.0), (2, 100.0)]


def test_the_time_of_a_step_is_that_of_its_events(past, tmp_path):
    past.close(1, {"window": {"ctr": {"auc": 0.5}}, "event_time_s": 1_700_000_000.0}, a=(0, 100))
    write(past, tmp_path)
    (event,) = EventAccumulator(str(tmp_path / "t1")).Reload().Scalars("window/ctr/auc")
    assert event.wall_time == 1_700_000_000.0


def test_closes_are_written_once_as_they_come_and_again_after_a_restart_without_doubles(past, tmp_path):
    files = EventFiles(past.store / "log", tmp_path)
    close(past, 1)
    assert files.write_on() == 1 and files.write_on() == 0
    close(past, 2, 3)
    assert files.write_on() == 2
    assert scalars(tmp_path / "t1") == [(1, 0.125), (2, 0.25), (3, 0.375)], "written, though nothing is closed"
    files.close()
    assert write(past, tmp_path) == 3
    assert scalars(tmp_path / "t1") == [(1, 0.125), (2, 0.25), (3, 0.375)]


def test_steps_that_the_log_has_no_more_stay(past, tmp_path):
    close(past, 1)
    write(past, tmp_path)
    first = past.log.files()[0].path
    past.begin()
    close(past, 2)
    first.unlink()
    assert write(past, tmp_path) == 1
    assert scalars(tmp_path / "t1") == [(1, 0.125), (2, 0.25)]


def test_a_rewind_is_a_run_of_its_own(past, tmp_path):
    files = EventFiles(past.store / "log", tmp_path)
    close(past, 1, 2, 3)
    files.write_on()
    past.begin("t2", base="t1-0000000001-g1")
    close(past, 4)
    assert files.write_on() == 1
    files.close()
    assert [step for step, _ in scalars(tmp_path / "t1")] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path / "t2")] == [4]


def test_a_folder_that_takes_nothing_is_told_once_and_written_when_it_is_back(past, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(written, "EVERY_S", 0.01)
    close(past, 1)
    folder, files = tmp_path / "runs", EventFiles(past.store / "log", tmp_path / "runs")
    folder.rmdir()
    folder.touch()
    for _ in range(2):
        with pytest.raises(Unwritable, match="runs"):
            files.write_on()
    folder.unlink()
    assert files.write_on() == 1
    files.close()
    assert scalars(folder / "t1") == [(1, 0.125)]
    shutil.rmtree(folder)
    with event_files(past.store / "log", folder):
        close(past, 2)
    assert scalars(folder / "t1") == [(1, 0.125), (2, 0.25)], "the end writes what is left"
    assert not [each for each in caplog.records if each.name.startswith("headrace")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the library's, on its thread
def test_a_disk_that_takes_nothing_leaves_no_thread_behind(past, tmp_path):
    before, files = {*threading.enumerate()}, EventFiles(past.store / "log", tmp_path / "runs")
    close(past, 1)
    files.write_on()
    past.begin("t2", base="t1-0000000001-g1")
    close(past, 2)
    files.write_on()
    shutil.rmtree(tmp_path / "runs" / "t2")
    close(past, 3)
    with pytest.raises(Unwritable):
        files.write_on()
    assert {*threading.enumerate()} <= before
    files.close()


def test_without_the_library_the_extra_is_named(past, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.extras.find_spec", lambda _: None)
    with pytest.raises(
        Exception, match=r"needs TensorBoard, which is not installed: pip install 'headrace\[tensorboard\]'"
    ):
        EventFiles(past.store / "log", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
