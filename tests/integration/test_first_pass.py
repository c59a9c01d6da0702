"""The first pass after a restart is read while the shards get their rows, and is looked up in them afterwards."""

import threading

import pytest

from headrace.deadline import Deadline
from headrace.trainer.train import assembly
from headrace.trainer.train.report import digest_of
from tests.integration.stream_job import write_job
from tests.integration.trainer_here import config_of, run, torch_as_before

SETTINGS = ("passes.max_events=50", "train.batch_size=8", "train.threads=1")


class NotedReader:
    """A PassReader that notes when it has read a pass."""

    def __init__(self, reader):
        self._reader, self.has_read = reader, threading.Event()

    def read(self, pass_number, segments, tally):
        """See PassReader."""
        yield from self._reader.read(pass_number, segments, tally)
        self.has_read.set()

    def close(self):
        """See PassReader."""
        self._reader.close()


@pytest.mark.long
def test_the_first_logged_pass_is_read_before_rows_are_restored_with_the_same_result(tmp_path, monkeypatch):
    job = write_job(tmp_path, num_lines=200)
    undisturbed = run(job, tmp_path / "undisturbed", *SETTINGS)
    run(job, tmp_path / "stopped", *SETTINGS, drain_after=150)
    readers, looked_up = [], []
    make_reader, restore, embedded = assembly.open_reader, assembly.restore, assembly.EmbeddedShards

    class NotedShards(embedded):
        def prepare(self, tables, *, learn):
            looked_up.append(restored.is_set())
            return super().prepare(tables, learn=learn)

    def noted(*args, **more):
        readers.append(NotedReader(make_reader(*args, **more)))
        return readers[-1]

    def restore_late(*args):
        assert readers[0].has_read.wait(60), "the pass is read first"
        restore(*args)
        restored.set()

    restored = threading.Event()
    monkeypatch.setattr(assembly, "open_reader", noted)
    monkeypatch.setattr(assembly, "restore", restore_late)
    monkeypatch.setattr(assembly, "EmbeddedShards", NotedShards)
    again = config_of(job, tmp_path / "stopped", *SETTINGS, generation=2)
    with torch_as_before(), assembly.open_trainer(again) as trainer:
        trainer.loop.run()
        trainer.rank0.beginning.joblog.close()
        assert digest_of(trainer.parts.shards, trainer.parts.dense, Deadline.after(10)) == undisturbed.digest
        assert trainer.parts.progress.num_events == undisturbed.events
    assert looked_up and all(looked_up), "no key is looked up before the rows are there"
